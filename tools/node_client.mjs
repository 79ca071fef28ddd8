// Calls any method of the server with @grpc/grpc-js, which shares no code with the server's gRPC, and prints each response as a line of JSON.
//
//   node tools/node_client.mjs [--token TOKEN] ADDRESS PACKAGE.SERVICE/METHOD [JSON]
//
// JSON is the request, {} without it; for a method that takes a stream of requests it is an array of them. Names are in camelCase,
// enums are names, 64-bit integers are strings, bytes are base64; durations are {"seconds": ..., "nanos": ...}. For example:
//
//   node tools/node_client.mjs 127.0.0.1:50051 aengine.v1.GenerationService/StreamGenerate \
//     '{"spec": {"prompt": {"text": "It is a truth universally"}, "stopping": {"maxTokens": 32}}}'
//
// A call that fails prints the status to stderr, and the exit code is 1.
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";
import { readdirSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { parseArgs } from "node:util";

const { values: options, positionals } = parseArgs({ options: { token: { type: "string" } }, allowPositionals: true });
const [address, name, json] = positionals;

const protos = fileURLToPath(new URL("../protos", import.meta.url));
const files = readdirSync(`${protos}/aengine/v1`).map((file) => `aengine/v1/${file}`);
const definition = protoLoader.loadSync([...files, "grpc/health/v1/health.proto"], {
  includeDirs: [protos, fileURLToPath(new URL(".", import.meta.url))],
  longs: String,
  enums: String,
  bytes: String,
});

const [service, method] = (name ?? "").split("/");
const rpc = definition[service]?.[method];
if (rpc === undefined) {
  console.error(`${name} is not a method of ${Object.keys(definition).filter((key) => definition[key].format === undefined).join(", ")}`);
  process.exit(2);
}
const request = JSON.parse(json ?? (rpc.requestStream ? "[]" : "{}"));
const metadata = new grpc.Metadata();
if (options.token !== undefined) metadata.set("authorization", `Bearer ${options.token}`);

const client = new grpc.Client(address, grpc.credentials.createInsecure());
const coding = [rpc.path, rpc.requestSerialize, rpc.responseDeserialize];
const limits = { deadline: Date.now() + 60_000 };

const print = (response) => console.log(JSON.stringify(response));
const end = (error) => {
  if (error) {
    console.error(`${grpc.status[error.code]}: ${error.details}`);
    process.exitCode = 1;
  }
  client.close();
};

if (rpc.responseStream) {
  const call = rpc.requestStream
    ? client.makeBidiStreamRequest(...coding, metadata, limits)
    : client.makeServerStreamRequest(...coding, request, metadata, limits);
  call.on("data", print);
  call.on("error", end);
  call.on("end", () => end());
  if (rpc.requestStream) {
    for (const message of request) call.write(message);
    call.end();
  }
} else {
  const answered = (error, response) => {
    if (!error) print(response);
    end(error);
  };
  if (rpc.requestStream) {
    const call = client.makeClientStreamRequest(...coding, metadata, limits, answered);
    for (const message of request) call.write(message);
    call.end();
  } else {
    client.makeUnaryRequest(...coding, request, metadata, limits, answered);
  }
}
