/* Texts and images that go along with a message: which can, and what the model is given of them. */

import { countTokens, served } from "./api.js";
import { $, announcer, make } from "./dom.js";

const MOST_BYTES_PER_TOKEN = 16; // of texts: a larger file cannot fit, and is not read
const IMAGES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MOST_SIDE = 2048; // pixels of an image that is sent; models make large ones smaller than that
const MOST_IMAGE_BYTES = 4 << 20; // of one that is sent as it is

let files = []; // {name, text} or {name, image}, a data: URL, of the message that is being written
let changed = () => {};

/** The content of a message with files: images before the text; behind it each text after its name, in a fence that is longer than any within. */
export function messageOf(text, files) {
  const images = files.filter(({ image }) => image);
  const whole = textOf(text, files.filter(({ image }) => !image));
  if (!images.length) return whole;
  const parts = images.map(({ image }) => ({ type: "image_url", image_url: { url: image } }));
  return whole ? [...parts, { type: "text", text: whole }] : parts;
}

function textOf(text, files) {
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
    const shown = file.image ? [make("img", { src: file.image, alt: "" })] : [];
    return make("li", {}, ...shown, make("span", {}, file.name), remove);
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

/** An image as a data: URL, smaller where it is large. Raises `Error` with what is wrong with it. */
async function readImage(file) {
  if (!served.maxImages) throw new Error(`${file.name} is an image, and the model takes text alone.`);
  if (files.filter(({ image }) => image).length >= served.maxImages) throw new Error(`The model takes at most ${served.maxImages} images.`);
  const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" }).catch(() => null);
  if (!bitmap) throw new Error(`${file.name} is no image that can be read.`);
  const scale = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MOST_IMAGE_BYTES && IMAGES.includes(file.type)) return await dataUrl(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white"; // under what is transparent
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.92);
}

function dataUrl(blob) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The file cannot be read."));
    reader.readAsDataURL(blob);
  });
}

/** The text of a file. Raises `Error` with what is wrong with it. */
async function readText(file) {
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
  const others = textOf($("prompt").value, files.filter(({ image }) => !image));
  const [count, before] = await Promise.all([countTokens(textOf("", [{ name: file.name, text }])), others ? countTokens(others) : 0]);
  if (count >= context) throw tooLong(`${count.toLocaleString("en")} tokens`);
  if (count + before >= context) throw tooLong(`${count.toLocaleString("en")} tokens, and the message ${before.toLocaleString("en")} already`);
  return text;
}

async function add(list) {
  say("");
  for (const file of list) {
    try {
      const content = file.type.startsWith("image/") ? { image: await readImage(file) } : { text: await readText(file) };
      attach([...files, { name: file.name, ...content }]);
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
  for (const [button, input] of [["attach", "file-input"], ["camera", "camera-input"]]) {
    $(button).addEventListener("click", () => $(input).click());
    $(input).addEventListener("change", async () => {
      await add([...$(input).files]);
      $(input).value = "";
      $("prompt").focus();
    });
  }
  $("model").addEventListener("change", () => ($("camera").hidden = !served.maxImages));
  $("prompt").addEventListener("paste", (event) => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (!pasted.length) return;
    event.preventDefault();
    add(pasted);
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
