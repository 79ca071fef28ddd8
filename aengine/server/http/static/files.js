/* Text files that go along with a message: which can, and what the model is given of them. */

import { countTokens, served } from "./api.js";
import { $, announcer, make } from "./dom.js";

const MOST_BYTES_PER_TOKEN = 16; // of texts: a larger file cannot fit, and is not read

let files = []; // {name, text} of the message that is being written
let changed = () => {};

/** The content of a message with files: each behind its name, in a fence that is longer than any within. */
export function messageOf(text, files) {
  const parts = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [text, ...parts].filter(Boolean).join("\n\n");
}

export const attached = () => files;

export function attach(list) {
  files = list;
  const chip = (file) => {
    const remove = make("button", { type: "button", class: "quiet", "aria-label": `Remove ${file.name}`, on: { click: () => drop(file) } }, "×");
    return make("li", {}, make("span", {}, file.name), remove);
  };
  $("files").replaceChildren(...files.map(chip));
  $("files").hidden = !files.length;
}

function drop(file) {
  attach(files.filter((one) => one !== file));
  changed();
  $("prompt").focus();
}

function say(text) {
  $("file-notice").textContent = text;
  $("file-notice").hidden = !text;
}

/** The text of a file. Raises `Error` with what is wrong with it. */
async function read(file) {
  const context = served.context;
  const tooLong = (size) => new Error(`${file.name} has ${size}; the context of the model has ${context.toLocaleString("en")} tokens.`);
  if (file.size > MOST_BYTES_PER_TOKEN * context) throw tooLong(`${file.size.toLocaleString("en")} bytes`);
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text in UTF-8.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text.`);
  if (!text) throw new Error(`${file.name} is empty.`);
  const others = messageOf($("prompt").value, files);
  const [count, before] = await Promise.all([countTokens(messageOf("", [{ name: file.name, text }])), others ? countTokens(others) : 0]);
  if (count >= context) throw tooLong(`${count.toLocaleString("en")} tokens`);
  if (count + before >= context) throw tooLong(`${count.toLocaleString("en")} tokens, and the message ${before.toLocaleString("en")} already`);
  return text;
}

async function add(list) {
  say("");
  for (const file of list) {
    try {
      const text = await read(file);
      attach([...files, { name: file.name, text }]);
      announcer.say(`${file.name} is attached.`);
      changed();
    } catch (error) {
      say(error.message);
    }
  }
}

/** `onChange` is called with each change. */
export function startFiles(onChange) {
  changed = onChange;
  $("attach").addEventListener("click", () => $("file-input").click());
  $("file-input").addEventListener("change", async () => {
    await add([...$("file-input").files]);
    $("file-input").value = "";
    $("prompt").focus();
  });
  const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
  const chat = $("chat");
  for (const name of ["dragenter", "dragover"]) {
    chat.addEventListener(name, (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      chat.classList.add("takes-files");
    });
  }
  chat.addEventListener("dragleave", (event) => chat.contains(event.relatedTarget) || chat.classList.remove("takes-files"));
  chat.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    chat.classList.remove("takes-files");
    add([...event.dataTransfer.files]);
  });
  // A file that misses the conversation would take the page's place.
  for (const name of ["dragover", "drop"]) addEventListener(name, (event) => hasFiles(event) && event.preventDefault());
}
