/* The settings of requests and of what is seen: their boxes, what they hold, and what is wrong with it. */

import { served } from "./api.js";
import { $, isNarrow, make } from "./dom.js";
import { showPanel } from "./panels.js";

const number = (text) => {
  if (Number.isNaN(Number(text))) throw new Error("This is not a number.");
  return Number(text);
};
const tokens = (text) => {
  const value = number(text);
  if (value > served.context) throw new Error(`The context of the model has ${served.context} tokens.`);
  return value;
};
const json = (text) => JSON.parse(text);
const lines = (text) => text.split("\n").filter(Boolean).map((line) => line.replaceAll("\\n", "\n"));
/** Name in the request, label, how the text is read, the hint, and how many rows the box has. The first five are seen at once. */
const FIELDS = [
  ["system", "System prompt", String, "", 3],
  ["temperature", "Temperature", number, "0 to 100"],
  ["max_tokens", "Max tokens", tokens, "1 or more"],
  ["top_p", "top_p", number, "above 0, to 1"],
  ["seed", "Seed", number, "0 or more"],
  ["min_tokens", "Min tokens", tokens, "0 or more"],
  ["max_reasoning_tokens", "Max reasoning", number, "tokens"],
  ["top_k", "top_k", number, "0: off"],
  ["min_p", "min_p", number, "0 to 1"],
  ["presence_penalty", "Presence penalty", number, "−2 to 2"],
  ["frequency_penalty", "Frequency penalty", number, "−2 to 2"],
  ["repetition_penalty", "Repetition penalty", number, "above 0, to 2"],
  ["top_logprobs", "Alternatives", number, "per token"],
  ["stop", "Stop strings", lines, "One a line; \\n is a line break.", 2],
  ["schema", "JSON schema of the answer", json, "", 4],
  ["tools", "Tools, a JSON list", json, "", 3],
];
const NUM_SHOWN = 5;
const DEFAULTS = { top_logprobs: 8 };
/** Boxes to tick: name, label, and whether they are ticked at first. */
const SWITCHES = [
  ["markdown", "Render Markdown in answers", true],
  ["colours", "Colour tokens by their probability", false],
];

/** `onChange` is called with each change. */
export function buildSettings(onChange) {
  const folded = make("details", { id: "more-settings" }, make("summary", {}, "More settings"));
  FIELDS.forEach(([name, label, , hint, rows], i) => {
    const place = i < NUM_SHOWN ? $("fields") : folded;
    const numeric = !rows;
    const box = make(numeric ? "input" : "textarea", {
      id: `set-${name}`,
      rows,
      class: name === "schema" || name === "tools" ? "code" : null,
      spellcheck: name === "system" ? null : "false",
      inputmode: numeric ? "decimal" : null,
      placeholder: numeric && !(name in DEFAULTS) ? "default" : null,
      "aria-describedby": `set-${name}-hint set-${name}-wrong`,
      on: { input: () => showWrong(name, "") },
    });
    box.value = DEFAULTS[name] ?? "";
    const wrong = make("small", { id: `set-${name}-wrong`, class: "wrong" });
    const field = make("div", { class: "field" }, make("label", { for: box.id }, label), box, make("small", { id: `${box.id}-hint` }, hint), wrong);
    if (!numeric) return place.append(field);
    const pairs = place.lastElementChild?.matches(".pairs") ? place.lastElementChild : place.appendChild(make("div", { class: "pairs" }));
    pairs.append(field);
  });
  for (const [name, label, ticked] of SWITCHES) {
    const box = make("input", { type: "checkbox", id: name });
    box.checked = ticked;
    folded.append(make("div", { class: "field" }, box, " ", make("label", { for: name }, label)));
  }
  folded.append(make("div", { class: "field" }, make("label", { for: "theme" }, "Theme"), $("theme")));
  $("fields").append(folded);
  $("fields").addEventListener("submit", (event) => event.preventDefault());
  $("fields").addEventListener("input", onChange);
  $("colours").addEventListener("change", showColours);
  $("model").addEventListener("change", () => {
    const most = Number.isFinite(served.context) ? `1 to ${served.context.toLocaleString("en")}; empty: all that fit` : "1 or more";
    $("set-max_tokens-hint").textContent = most;
  });
}

const showColours = () => $("log").classList.toggle("coloured", $("colours").checked);

/** What the boxes hold, as it is kept. */
export function heldSettings() {
  const texts = FIELDS.map(([name]) => [name, $(`set-${name}`).value]);
  return { ...Object.fromEntries(texts), ...Object.fromEntries(SWITCHES.map(([name]) => [name, $(name).checked])) };
}

/** Puts what was kept into the boxes. */
export function holdSettings(held) {
  for (const [name] of FIELDS) if (typeof held[name] === "string") $(`set-${name}`).value = held[name];
  for (const [name] of SWITCHES) if (typeof held[name] === "boolean") $(name).checked = held[name];
  showColours();
}

function showWrong(name, text) {
  $(`set-${name}-wrong`).textContent = text;
  $(`set-${name}`).setAttribute("aria-invalid", text ? "true" : "false");
  if (text) $(`set-${name}`).closest("details")?.setAttribute("open", "");
}

/** The values of the settings, by name; those left empty are not there. Null where one cannot be read: then its box says why. */
export function readSettings() {
  const values = {};
  let first = null;
  for (const [name, , read] of FIELDS) {
    const text = $(`set-${name}`).value.trim();
    if (!text) continue;
    try {
      values[name] = read(text);
      showWrong(name, "");
    } catch (error) {
      showWrong(name, read === json ? `This is not JSON: ${error.message}` : error.message);
      first ??= name;
    }
  }
  if (first) goToSetting(first);
  return first ? null : values;
}

export function goToSetting(name) {
  showPanel("settings", true);
  $(`set-${name}`).focus();
}

/** Says at the boxes what the server refuses. Returns the name of the first such box. */
export function showViolations(violations) {
  let first = null;
  for (const { field, message } of violations) {
    const top = field.split(/[.[]/)[0];
    const name = { response_format: "schema", structured_output: "schema", logprobs: "top_logprobs", max_completion_tokens: "max_tokens" }[top] ?? top;
    if (!FIELDS.some(([known]) => known === name)) continue;
    showWrong(name, message.includes(field) ? message : `${field}: ${message}`);
    first ??= name;
  }
  if (first && !isNarrow()) showPanel("settings", true);
  return first;
}
