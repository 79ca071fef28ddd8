// What OpenAI's own client for Node reads of a server's HTTP port, as it comes: each answer or error as a line of JSON.
//
//   node tools/openai_client.mjs http://127.0.0.1:8000/v1 [KEY]
//
// The model is the first that is listed. Its answers are drawn with a seed, so that two runs print the same but for ids and times.
import OpenAI from "openai";

const [baseURL, apiKey = "none"] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const print = (name, value) => console.log(JSON.stringify({ [name]: value }));

const models = [];
for await (const model of client.models.list()) models.push(model.id);
print("models", models);
const messages = [{ role: "user", content: "How do you do?" }];
const asked = { model: models[0], messages, seed: 1, max_completion_tokens: 12 };

const { data: whole, request_id } = await client.chat.completions.create({ ...asked, logprobs: true }).withResponse();
print("whole", { content: whole.choices[0].message.content, usage: whole.usage, logprobs: whole.choices[0].logprobs.content.length, request_id });

let streamed = "";
let usage = null;
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true, stream_options: { include_usage: true } })) {
  streamed += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
print("streamed", { content: streamed, usage });

const parameters = { type: "object", properties: { city: { enum: ["Bath", "York"] } }, required: ["city"], additionalProperties: false };
const tools = [{ type: "function", function: { name: "weather", parameters } }];
const named = { tools, tool_choice: { type: "function", function: { name: "weather" } }, max_completion_tokens: 200 };
const events = [];
const runner = client.chat.completions.stream({ ...asked, ...named });
runner.on("tool_calls.function.arguments.done", (done) => events.push(JSON.parse(done.arguments)));
const [call] = (await runner.finalChatCompletion()).choices[0].message.tool_calls;
print("called", { name: call.function.name, arguments: JSON.parse(call.function.arguments), events });

const format = { type: "json_schema", json_schema: { name: "answer", strict: true, schema: parameters } };
const parsed = await client.chat.completions.parse({ ...asked, response_format: format, max_completion_tokens: 200 });
print("parsed", JSON.parse(parsed.choices[0].message.content));

const kinds = new Set();
const response = client.responses.stream({ model: models[0], input: "How do you do?", max_output_tokens: 4, temperature: 0 });
for await (const event of response) kinds.add(event.type);
const final = await response.finalResponse();
print("response", { kinds: [...kinds], status: final.status, output: final.output_text });

const embedding = await client.embeddings.create({ model: models[0], input: ["How", "do you do?"], dimensions: 8 });
print("embedding", embedding.data.map((one) => one.embedding.length));

for (const wrong of [{ model: "gpt" }, { temperature: 300 }, { messages: [{ role: "user" }] }]) {
  const error = await client.chat.completions.create({ ...asked, ...wrong }).then(() => null, (error) => error);
  print("error", { kind: error.constructor.name, status: error.status, param: error.param, code: error.code, has_id: Boolean(error.requestID) });
}

const endless = await client.chat.completions.create({ ...asked, max_completion_tokens: 100_000, clamp_max_tokens: false, stream: true }).catch(() => null);
print("endless", endless === null ? "refused" : "taken");

const long = await client.chat.completions.create({ ...asked, max_completion_tokens: 1500, ignore_eos: true, stream: true });
for await (const chunk of long) {
  if (chunk.choices[0].delta.content) break;  // which aborts it
}
print("aborted", long.controller.signal.aborted);
