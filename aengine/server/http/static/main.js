/* The chat page: its frame, and what begins it. */

import { loadModels } from "./api.js";
import { clearDraft, draftChanged, settingsChanged, startChats } from "./chats.js";
import { $, announcer } from "./dom.js";
import { dashboard } from "./engine.js";
import { attached, startFiles } from "./files.js";
import { markMathFont } from "./markdown.js";
import { startPanels } from "./panels.js";
import { isRunning, listenToScrolling, stop } from "./running.js";
import { buildSettings, readSettings } from "./settings.js";
import { listenToTokens } from "./tokens.js";
import { answer, root, sayRunning, Sent, shownPath } from "./turns.js";

function startTheme() {
  const show = (theme) => (document.documentElement.dataset.theme = $("theme").value = theme);
  show(localStorage.getItem("theme") ?? "auto");
  $("theme").addEventListener("change", () => {
    localStorage.setItem("theme", $("theme").value);
    show($("theme").value);
  });
}

function send() {
  if (isRunning()) return sayRunning();
  const [text, files] = [$("prompt").value, attached()];
  const settings = (text.trim() || files.length) && readSettings();
  if (!settings) return;
  clearDraft();
  answer(new Sent(shownPath().at(-1) ?? root, { text, files }), settings);
}

function startComposer() {
  const fit = () => {
    $("prompt").style.height = "auto";
    $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
  };
  $("prompt").addEventListener("input", fit);
  $("prompt").addEventListener("input", draftChanged);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("stop").addEventListener("click", stop);
  startFiles(draftChanged);
}

async function start() {
  startTheme();
  markMathFont();
  buildSettings(settingsChanged);
  const name = $("served"); // it is out of the document while there is a conversation
  $("model").addEventListener("change", () => (name.textContent = $("model").value));
  startComposer();
  $("token-cancel").addEventListener("click", () => $("token-dialog").close(""));
  $("delete-cancel").addEventListener("click", () => $("delete-dialog").close(""));
  listenToScrolling();
  listenToTokens();
  dashboard.start();
  startPanels();
  await startChats();
  $("model").addEventListener("input", settingsChanged);
  loadModels().catch((error) => announcer.say(error.message));
  document.documentElement.dataset.ready = "";
  $("prompt").focus();
}

start();
