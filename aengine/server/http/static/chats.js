/* The conversations that the browser keeps: the one that is open, what of it is to be kept, and the list of all. */

import { $, announcer, isNarrow, make, newId } from "./dom.js";
import { attach, attached } from "./files.js";
import { isRunning, setFollowing, stop, follow } from "./running.js";
import { heldSettings, holdSettings } from "./settings.js";
import { showPanel } from "./panels.js";
import * as store from "./store.js";
import { Answer, root, Sent, showPath, whenChanged } from "./turns.js";

const SOON = 200; // milliseconds until a change is kept
const WAIT_RUNNING = 1000; // at least, while an answer grows
const SHARE = 30; // keeping takes one of so many parts of the time then
const MOST_TITLE = 80;

const fresh = () => ({ id: newId(), title: "", isNamed: false, created: Date.now(), updated: 0, chosen: null });
let current = fresh(); // `updated` is 0 until there is something to keep
const welcome = $("log").firstElementChild;
const others = new BroadcastChannel(`aengine ${location.pathname}`); // tabs with this page

function sayTrouble(error) {
  $("store-notice").hidden = false;
  $("store-notice").textContent = `This browser does not keep conversations: ${error.message}`;
}
/** Runs what uses the store; where it cannot be used, the page goes on without. */
const trying = (work) => work().catch(sayTrouble);

/* ---- What is to be kept. ---- */

const waiting = new Map(); // turns that changed, and whether their texts did
let timer = 0;
let due = Infinity;
let cost = 0; // milliseconds that it last took
let order = 0;

function onChange(turn, hasText) {
  if (turn !== root) {
    turn.conversation ??= current.id;
    turn.order ??= order = Math.max(order + 1, Date.now());
  }
  waiting.set(turn, waiting.get(turn) || hasText);
  keepIn(isRunning() && hasText ? Math.max(WAIT_RUNNING, SHARE * cost) : SOON);
}

function keepIn(wait) {
  const at = performance.now() + wait;
  if (at >= due) return;
  due = at;
  clearTimeout(timer);
  timer = setTimeout(keepNow, wait);
}

const chosenOf = (turn) => turn.children[turn.chosen]?.id ?? null;

async function keepNow() {
  clearTimeout(timer);
  due = Infinity;
  if (!waiting.size) return;
  const begun = performance.now();
  const all = [...waiting];
  waiting.clear();
  const turns = all.filter(([turn]) => turn !== root);
  const isMine = all.some(([turn]) => turn === root || turn.conversation === current.id);
  const isNew = isMine && !current.updated;
  if (isMine) {
    const first = root.children[root.chosen]?.content;
    const title = (first?.text || first?.files[0]?.name || "").trim().split("\n")[0].slice(0, MOST_TITLE);
    Object.assign(current, { updated: Date.now(), chosen: chosenOf(root), title: current.isNamed ? current.title : title || "Conversation" });
    sessionStorage.setItem("conversation", current.id);
  }
  const records = turns.map(([turn]) => {
    const { id, kind, conversation, order, parent } = turn;
    return { id, kind, conversation, order, parent: parent === root ? null : parent.id, chosen: chosenOf(turn), ...turn.record };
  });
  const tokens = turns.filter(([turn, hasText]) => hasText && turn.tokenRecord).map(([turn]) => ({ id: turn.id, ...turn.tokenRecord }));
  const conversation = isMine ? { ...current } : null;
  await trying(() => store.keep({ conversation, turns: records, tokens }));
  cost = performance.now() - begun;
  if (isNew) await listChanged();
}

/* ---- The draft and the settings. ---- */

const draftName = () => `draft ${current.updated ? current.id : "new"}`;
let draftTimer = 0;

export function draftChanged() {
  clearTimeout(draftTimer);
  draftTimer = setTimeout(keepDraft, SOON);
}

function keepDraft() {
  clearTimeout(draftTimer);
  draftTimer = 0;
  const draft = { text: $("prompt").value, files: attached() };
  return trying(() => store.keepValue(draftName(), draft.text || draft.files.length ? draft : undefined));
}

/** What was being written is sent, and is no draft any more. */
export function clearDraft() {
  setPrompt("");
  attach([]);
  return keepDraft();
}

function setPrompt(text) {
  $("prompt").value = text;
  $("prompt").dispatchEvent(new Event("input"));
}

async function showDraft() {
  const draft = (await store.read("values", draftName())) ?? { text: "", files: [] };
  setPrompt(draft.text);
  attach(draft.files);
}

let settingsTimer = 0;

export function settingsChanged() {
  clearTimeout(settingsTimer);
  settingsTimer = setTimeout(keepSettings, SOON);
}

function keepSettings() {
  settingsTimer = 0;
  return trying(() => store.keepValue("settings", { ...heldSettings(), model: $("model").value || $("model").dataset.wanted }));
}

async function showSettings() {
  const held = await store.read("values", "settings");
  if (!held) return;
  holdSettings(held);
  if (typeof held.model === "string") $("model").dataset.wanted = held.model;
}

/* ---- Opening one. ---- */

/** Ends what goes on in the conversation that is open, and keeps it. */
async function leave() {
  stop();
  await keepNow();
  if (draftTimer) await keepDraft();
}

function clear(conversation) {
  current = conversation;
  Object.assign(root, { children: [], chosen: 0 });
  setFollowing(true);
  $("log").replaceChildren(welcome);
  if (current.updated) sessionStorage.setItem("conversation", current.id);
  else sessionStorage.removeItem("conversation");
  markCurrent();
}

export async function newChat() {
  await leave();
  clear(fresh());
  if (isNarrow()) showPanel("chats", false);
  await trying(showDraft);
  $("prompt").focus();
}

async function openChat(id) {
  await leave();
  const conversation = await store.read("conversations", id);
  if (!conversation) return listChanged();
  const { turns, tokens } = await store.readTurns(id);
  clear(conversation);
  const known = new Map([[null, root]]);
  for (const record of turns) {
    const parent = known.get(record.parent);
    if (!parent) continue;
    const none = { promptIds: null, raw: "", tokens: [] };
    const isAnswer = record.kind === "answer";
    const turn = isAnswer ? Answer.of(parent, record.id, record, tokens.get(record.id) ?? none) : new Sent(parent, record.content, record.id);
    Object.assign(turn, { conversation: id, order: record.order });
    known.set(record.id, turn);
  }
  for (const { id, chosen } of [...turns, { id: null, chosen: conversation.chosen }]) {
    const turn = known.get(id);
    const at = turn?.children.findIndex((child) => child.id === chosen);
    if (at >= 0) turn.chosen = at;
  }
  if (root.children.length) showPath();
  follow();
  await showDraft();
}

/* ---- The list. ---- */

let shown = 0; // times that the list was made

async function listChanged() {
  others.postMessage("changed");
  await showList();
}

async function showList() {
  const turn = ++shown;
  const wanted = $("search").value.trim();
  const all = (await store.readAll("conversations")).sort((a, b) => b.updated - a.updated);
  const holding = wanted ? await store.search(wanted) : null;
  if (turn !== shown) return; // a later one has begun
  const found = all.filter(({ id, title }) => !holding || holding.has(id) || title.toLowerCase().includes(wanted.toLowerCase()));
  $("chat-list").replaceChildren(...found.map(entry));
  $("no-chats").hidden = found.length > 0;
  $("no-chats").textContent = wanted ? "None holds these words." : "Conversations will be listed here.";
  markCurrent();
}

function markCurrent() {
  for (const one of $("chat-list").children) {
    const button = one.querySelector(".chat-name");
    if (one.dataset.id === current.id) button?.setAttribute("aria-current", "true");
    else button?.removeAttribute("aria-current");
  }
}

function entry(conversation) {
  const { id, title, updated } = conversation;
  const show = async () => {
    if (id !== current.id) await trying(() => openChat(id));
    if (isNarrow()) showPanel("chats", false);
    $("prompt").focus();
  };
  const name = make("button", { class: "chat-name", title: `${title}\n${new Date(updated).toLocaleString()}`, on: { click: show } }, title);
  const rename = make("button", { class: "quiet", "aria-label": `Rename ${title}`, title: "Rename", on: { click: () => edit() } }, "✎");
  const remove = make("button", { class: "quiet", "aria-label": `Delete ${title}`, title: "Delete", on: { click: () => askToRemove(conversation) } }, "×");
  const item = make("li", { "data-id": id }, name, rename, remove);
  const edit = () => {
    const box = make("input", { "aria-label": "Name of the conversation", maxlength: MOST_TITLE });
    box.value = title;
    let isDone = false;
    const done = async (isKept) => {
      if (isDone) return;
      isDone = true;
      if (isKept && box.value.trim() && box.value !== title) {
        const now = { ...((await store.read("conversations", id)) ?? conversation), title: box.value.trim(), isNamed: true };
        if (id === current.id) Object.assign(current, { title: now.title, isNamed: true });
        await store.keep({ conversation: now });
        await listChanged();
      } else await showList();
      $("chat-list").querySelector(`[data-id="${id}"] .chat-name`)?.focus();
    };
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.preventDefault();
      trying(() => done(event.key === "Enter"));
    });
    box.addEventListener("blur", () => trying(() => done(true)));
    item.replaceChildren(box);
    box.select();
  };
  return item;
}

function askToRemove({ id, title }) {
  const dialog = $("delete-dialog");
  $("delete-name").textContent = title;
  dialog.returnValue = "";
  dialog.onclose = () => {
    if (dialog.returnValue !== "delete") return;
    trying(async () => {
      if (id === current.id) {
        await leave();
        clear(fresh());
        await showDraft();
      }
      await store.remove(id);
      announcer.say(`${title} is deleted.`);
      await listChanged();
      $("search").focus();
    });
  };
  dialog.showModal();
}

/* ---- Files of all conversations. ---- */

async function exportAll() {
  await keepNow();
  await keepSettings();
  await keepDraft();
  const blob = new Blob([JSON.stringify(await store.exported())], { type: "application/json" });
  const link = make("a", { href: URL.createObjectURL(blob), download: `conversations-${new Date().toISOString().slice(0, 10)}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function importFile() {
  const [file] = $("import-file").files;
  $("import-file").value = "";
  let text;
  try {
    await leave();
    const count = await store.imported(await file.text());
    text = `Imported: ${count}.`;
    await showSettings();
    await listChanged();
    if (current.updated) await openChat(current.id);
    else await showDraft();
  } catch (error) {
    text = `Not imported: ${error.message}`;
  }
  $("chats-status").textContent = text;
}

/** Shows what was kept: the settings, and the conversation and draft of this tab. */
export async function startChats() {
  whenChanged(onChange);
  $("new").addEventListener("click", newChat);
  let searching = 0;
  $("search").addEventListener("input", () => {
    clearTimeout(searching);
    searching = setTimeout(() => trying(showList), 150);
  });
  $("export").addEventListener("click", () => trying(exportAll));
  $("import").addEventListener("click", () => $("import-file").click());
  $("import-file").addEventListener("change", importFile);
  others.addEventListener("message", () => trying(showList));
  const keepAll = () => {
    keepNow();
    if (draftTimer) keepDraft();
    if (settingsTimer) keepSettings();
  };
  addEventListener("pagehide", keepAll);
  document.addEventListener("visibilitychange", () => document.hidden && keepAll());
  await trying(async () => {
    await showSettings();
    const id = sessionStorage.getItem("conversation");
    if (id) await openChat(id);
    else await showDraft();
    await showList();
  });
}
