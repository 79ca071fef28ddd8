/* The conversation: a tree of turns, of which one path is shown. */

import { ConnectionLost, events, Refused, served } from "./api.js";
import { $, announcer, copy, make, newId } from "./dom.js";
import { messageOf } from "./files.js";
import { begin, end, follow, isRunning, rest, setFollowing } from "./running.js";
import { goToSetting, readSettings, showViolations } from "./settings.js";
import { MarkdownView, SourceView, TokenText } from "./texts.js";
import { answers, closeChoices, redraw, rove } from "./tokens.js";

export const root = { id: null, parent: null, children: [], chosen: 0 };

let changed = () => {};
/** `listener(turn, hasText)` is called after a turn, or which of its children is shown, has changed; `hasText`: its text did, too. */
export function whenChanged(listener) {
  changed = listener;
}

class Turn {
  constructor(parent, kind, title, id = newId()) {
    this.id = id;
    this.kind = kind;
    this.parent = parent;
    this.children = [];
    this.chosen = 0;
    this.place = make("span");
    this.back = make("button", { class: "quiet", "aria-label": `Previous ${kind}`, on: { click: () => this.choose(-1) } }, "‹");
    this.forth = make("button", { class: "quiet", "aria-label": `Next ${kind}`, on: { click: () => this.choose(1) } }, "›");
    this.actions = make("div", { class: "actions" }, this.back, this.place, this.forth);
    this.element = make("article", { class: `turn ${kind}`, tabindex: "-1", "aria-label": title }, make("h2", {}, title));
    parent.chosen = parent.children.push(this) - 1;
  }

  action(label, act) {
    const button = make("button", { class: "quiet", on: { click: act } }, label);
    this.actions.append(button);
    return button;
  }

  choose(by) {
    this.parent.chosen += by;
    changed(this.parent, false);
    const turn = this.parent.children[this.parent.chosen];
    showPath();
    const [button, other] = by < 0 ? [turn.back, turn.forth] : [turn.forth, turn.back];
    (button.disabled ? other : button).focus();
  }

  showPlace() {
    const { children, chosen } = this.parent;
    this.back.hidden = this.forth.hidden = this.place.hidden = children.length < 2;
    this.place.textContent = `${chosen + 1} of ${children.length}`;
    this.back.disabled = chosen === 0;
    this.forth.disabled = chosen === children.length - 1;
  }
}

const isText = (value) => typeof value === "string";

/** What was sent: a message with its files, or the results of tools. */
export class Sent extends Turn {
  constructor(parent, { text = "", files = [], results = null }, id) {
    super(parent, "user", results ? "Results of tools" : "You", id);
    this.content = { text, files, results };
    this.messages = results ?? [{ role: "user", content: messageOf(text, files) }];
    this.text = this.messages.map(({ content }) => (isText(content) ? content : content.map((part) => part.text ?? "").join(""))).join("\n");
    this.body = make("div", { class: "text" }, results ? this.text : text);
    const file = ({ name, text, image }) =>
      image
        ? make("img", { class: "picture", src: image, alt: name, title: name })
        : make("details", { class: "file" }, make("summary", {}, name), make("pre", { class: "code", tabindex: "0" }, text));
    this.element.append(this.body, ...files.map(file), this.actions);
    if (!results) this.action("Edit", () => this.edit());
    const button = this.action("Copy", () => copy(this.text, button));
  }

  edit() {
    const { text, files } = this.content;
    const box = make("textarea", { rows: Math.min(12, text.split("\n").length + 1), "aria-label": "Edited message" });
    box.value = text;
    const close = () => form.replaceWith(this.body);
    const send = () => {
      if (isRunning()) return sayRunning();
      const settings = (box.value.trim() || files.length) && readSettings();
      if (!settings) return;
      close();
      answer(new Sent(this.parent, { text: box.value, files }), settings);
    };
    const onKey = (event) => {
      if (event.key === "Escape") (event.stopPropagation(), cancel());
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) (event.preventDefault(), send());
    };
    const cancel = () => (close(), this.actions.querySelector("button:last-child").focus());
    const buttons = [make("button", { class: "quiet", on: { click: cancel } }, "Cancel"), make("button", { class: "main", on: { click: send } }, "Send")];
    const form = make("div", { on: { keydown: onKey } }, box, make("div", { class: "actions" }, ...buttons));
    this.body.replaceWith(form);
    box.focus();
  }

  get record() {
    return { text: this.text, content: this.content };
  }
}

/** An answer: its tokens, and the text, reasoning and calls that the server read from them. */
export class Answer extends Turn {
  constructor(parent, settings, id) {
    super(parent, "answer", "Answer", id);
    this.settings = settings;
    this.promptIds = null;
    this.origin = null; // {id, at, then}: of its tokens the first `at` are those of this completion, and these come behind them
    this.tokens = []; // {id, label, logprob, top, pieces, index, start, end}; pieces: what is shown of it; start, end: its place in `raw`
    this.raw = ""; // the texts of all tokens
    this.taken = 0; // so much of `raw` lies before what comes next
    this.mark = ""; // what lies between reasoning and answer
    this.calls = [];
    this.counted = 0; // tokens that were there before the last generation
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    this.thinking = make("div", { class: "text" });
    this.reasoning = make("details", { class: "reasoning", hidden: "" }, make("summary", {}, "Reasoning"), this.thinking);
    this.body = make("div", { class: "text" });
    this.callList = make("div");
    this.notice = make("div", { role: "alert" });
    this.meta = make("p", { class: "meta" });
    this.element.append(this.reasoning, this.body, this.callList, this.notice, this.meta, this.actions);
    this.texts = { reasoning: new TokenText(), content: new TokenText() };
    this.views = { reasoning: new SourceView(this.thinking, this.texts.reasoning) };
    this.action("Retry", () => answer(this.parent, readSettings()));
    this.more = this.action("Continue", () => this.goOn());
    this.more.hidden = true;
    const button = this.action("Copy", () => copy(this.content, button));
    this.source = this.action("Source", () => this.showAs(this.source.getAttribute("aria-pressed") !== "true"));
    this.showAs(!$("markdown").checked || "schema" in settings);
    answers.set(this.element, this);
  }

  get content() {
    return this.texts.content.text;
  }

  get text() {
    return this.content;
  }

  get messages() {
    const calls = this.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
    return [{ role: "assistant", content: this.content || (calls.length ? null : ""), ...(calls.length && { tool_calls: calls }) }];
  }

  /** Shows the answer as it was written, or as Markdown. */
  showAs(isSource) {
    this.source.setAttribute("aria-pressed", String(isSource));
    this.views.content = isSource ? new SourceView(this.body, this.texts.content) : new MarkdownView(this.body, this.texts.content, redraw);
    if (this.element.classList.contains("running")) this.views.content.update();
    else this.views.content.end();
  }

  /* From the server. */

  read(event) {
    this.usage = event.usage ?? this.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    this.promptIds ??= choice.prompt_token_ids ?? null;
    if (event.id) this.origin = { id: event.id };
    const entries = choice.logprobs?.content ?? (choice.token_ids ?? []).map((id) => ({ token_id: id, token: "" }));
    entries.forEach((entry, i) => this.addToken({ token_id: choice.token_ids?.[i], ...entry }));
    if (choice.finish_reason) this.endToken();
    if (entries.length) this.firstToken ??= performance.now();
    const delta = choice.delta ?? {};
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (reasoning) this.addText("reasoning", reasoning);
    if (delta.content) this.addText("content", delta.content);
    if (choice.text) this.addPlain(choice.text);
    for (const part of delta.tool_calls ?? []) this.addCall(part);
    if (choice.finish_reason) this.finish = choice.stop_reason === "deadline" ? "deadline" : choice.finish_reason;
    this.lastToken = performance.now();
    this.showMeta();
    changed(this, true);
  }

  addToken(entry) {
    const text = entry.bytes ? this.decoder.decode(new Uint8Array(entry.bytes), { stream: true }) : entry.token;
    const place = { index: this.tokens.length, start: this.raw.length, end: this.raw.length + text.length };
    const token = { id: entry.token_id, label: entry.token, logprob: entry.logprob, top: entry.top_logprobs ?? [], pieces: [], ...place };
    this.raw += text;
    this.tokens.push(token);
    return token;
  }

  /** Ends the text of the last token, after which there is no more: the server shows a character that was not ended, too. */
  endToken() {
    this.raw += this.decoder.decode();
    if (this.tokens.length) this.tokens.at(-1).end = this.raw.length;
  }

  /** Shows `text`, each part of it as a part of its token. The parser on the server leaves out marks and may hold text back. */
  addText(kind, text) {
    const at = this.raw.startsWith(text, this.taken) ? this.taken : this.raw.lastIndexOf(text);
    if (kind === "content" && !this.content && at > this.taken) this.mark = this.raw.slice(this.taken, at).trim() || this.mark;
    if (kind === "content") announcer.add(text);
    if (at < this.taken) return this.addPiece(this.tokens.at(-1), kind, text);
    this.taken = at + text.length;
    let first = this.tokens.length;
    while (first > 0 && this.tokens[first - 1].end > at) first--;
    for (const token of this.tokens.slice(first)) {
      const piece = text.slice(Math.max(0, token.start - at), Math.max(0, token.end - at));
      if (piece) this.addPiece(token, kind, piece);
    }
  }

  addPiece(token, kind, text) {
    if (kind === "reasoning" && this.reasoning.hidden) {
      this.reasoning.hidden = false;
      this.reasoning.open = true;
    } else if (kind === "content" && !this.content && !this.reasoning.contains(document.activeElement)) {
      this.reasoning.open = false;
    }
    token?.pieces.push([kind, text]);
    this.texts[kind].add(token ?? null, text);
    this.views[kind].update();
  }

  /** Shows text of a branch, which the server does not parse: reasoning lasts up to its closing mark, which may be left out of `text`. */
  addPlain(text, last = false) {
    if (!this.closing) return text && this.addText("content", this.content || this.reasoning.hidden ? text : text.trimStart());
    const at = this.raw.indexOf(this.closing, this.taken);
    const sure = last ? this.raw.length : Math.max(this.taken, this.raw.length - this.closing.length + 1); // the mark may have begun
    this.addText("reasoning", this.raw.slice(this.taken, at < 0 ? sure : at));
    if (at < 0) return;
    const rest = this.raw.slice(at + this.closing.length).trimStart();
    this.taken = this.raw.length - rest.length;
    this.closing = null;
    if (text.endsWith(rest)) this.addText("content", rest);
  }

  addCall(part) {
    let one = this.calls[part.index];
    if (!one) {
      one = this.calls[part.index] = { id: part.id, name: "", text: "", title: make("strong"), code: make("pre", { class: "code" }) };
      one.result = make("textarea", { rows: 1, "aria-label": "Result of the call" });
      one.send = make("button", { on: { click: () => this.sendResults() } }, "Send results");
      this.callList.append(make("div", { class: "call" }, "Calls ", one.title, one.code, make("label", {}, "Result", one.result), one.send));
    }
    one.name += part.function?.name ?? "";
    one.text += part.function?.arguments ?? "";
    one.title.textContent = one.name;
    try {
      one.code.textContent = JSON.stringify(JSON.parse(one.text), null, 2);
    } catch {
      one.code.textContent = one.text; // there is more to come
    }
  }

  sendResults() {
    const settings = readSettings();
    const results = this.calls.map(({ id, result }) => ({ role: "tool", tool_call_id: id, content: result.value }));
    if (settings) answer(new Sent(this, { results }), settings);
  }

  /* Generating. */

  /** Generates into this answer. Other answers that are being generated are stopped. `body`: as of `eventsOf`. */
  async generate(path, body) {
    const controller = new AbortController();
    begin(controller);
    this.begun = performance.now();
    this.firstToken = undefined;
    this.counted = this.tokens.length;
    this.finish = null;
    this.notes = undefined;
    this.notice.replaceChildren();
    announcer.held = "";
    this.more.hidden = true;
    this.element.classList.add("running");
    changed(this.parent, false);
    changed(this, true);
    showPath();
    let [text, isWrong] = ["", false];
    try {
      let rested = performance.now();
      for await (const event of eventsOf(path, body, controller.signal)) {
        this.read(event);
        follow();
        if (performance.now() < rested + 8) continue;
        await rest();
        rested = performance.now();
      }
      announcer.end("End of the answer.");
    } catch (error) {
      isWrong = !controller.signal.aborted;
      text = isWrong ? error.message : "Stopped.";
      if (isWrong && !(error instanceof Refused || error instanceof ConnectionLost)) console.error(error);
      const name = error instanceof Refused ? showViolations(error.violations) : null;
      this.showNotice(text, isWrong, name);
      announcer.end("");
    } finally {
      this.addPlain("", true);
      this.closing = null;
      this.element.classList.remove("running");
      this.views.content.end();
      this.showMore(text !== "");
      this.showMeta();
      changed(this, true);
      end(controller);
      follow();
    }
  }

  showNotice(text, isWrong, setting = null) {
    this.notes = { text, isWrong };
    const link = setting && make("button", { class: "quiet", on: { click: () => goToSetting(setting) } }, "Show in the settings");
    this.notice.replaceChildren(make("div", { class: isWrong ? "notice wrong" : "notice" }, text, link ?? ""));
  }

  showMore(wasCut) {
    this.more.hidden = !this.promptIds || !(wasCut || this.finish === "length" || this.finish === "deadline");
  }

  /** Generates what comes after the tokens that are there. */
  goOn() {
    const { settings } = this;
    const kept = this.tokens.length;
    const ids = this.tokens.map((token) => token.id);
    const room = served.context - this.promptIds.length - kept; // without it the API takes 16
    const most = settings.max_tokens ?? (Number.isFinite(room) ? Math.max(1, room) : undefined);
    const left = settings.max_tokens > kept ? most - kept : most;
    const { top_logprobs = 0, ...params } = parameters(settings);
    const isReasoning = this.tokens.findLast((token) => token.pieces.length)?.pieces.at(-1)[0] === "reasoning";
    this.closing = isReasoning ? this.mark || "</think>" : null;
    this.addPlain(this.raw.slice(this.taken)); // what the parser held back when the answer was cut
    const thoughts = this.tokens.filter((token) => token.pieces[0]?.[0] === "reasoning").length;
    const budget = settings.max_reasoning_tokens === undefined ? undefined : Math.max(0, settings.max_reasoning_tokens - thoughts);
    const behind = settings.schema && { structured_output: { json_schema: settings.schema } };
    const within = this.closing && { reasoning: { closing: this.closing, opened: true, max_tokens: budget }, ...behind };
    this.isFree = "schema" in settings && !within;
    const fewest = settings.min_tokens > kept ? settings.min_tokens - kept : undefined;
    const common = { ...params, ...within, logprobs: top_logprobs };
    const anew = { ...common, max_tokens: left, min_tokens: fewest, prompt: [...this.promptIds, ...ids] };
    const { id, at = kept, then = [] } = this.origin ?? {};
    const branch = id && !within && { ...common, branch: { id, at, then } }; // limits are those of all its tokens
    return this.generate("v1/completions", branch ? [branch, anew] : [anew]);
  }

  /** Another answer with the first `keep` tokens of this one, then `next` if there is one, then what the model makes of it. */
  branch(keep, next) {
    const other = new Answer(this.parent, readSettings() ?? this.settings);
    other.promptIds = this.promptIds;
    other.origin = this.origin && { id: this.origin.id, at: keep, then: next ? [next.token_id] : [] };
    other.mark = this.mark;
    other.take(this.tokens.slice(0, keep), this.raw);
    if (next) {
      const token = other.addToken({ ...next, top_logprobs: this.tokens[keep].top });
      other.addPiece(token, this.tokens[keep].pieces[0]?.[0] ?? "content", other.raw.slice(token.start));
    }
    other.taken = other.raw.length;
    other.showAs(this.source.getAttribute("aria-pressed") === "true");
    announcer.say("Another answer from here.");
    other.goOn();
    const index = Math.max(0, next ? keep : keep - 1);
    const at = other.element.querySelector(`.token[data-index="${index}"]`);
    at ? rove(at) : other.element.focus();
  }

  /** Takes over tokens, whose texts are in `raw`. */
  take(tokens, raw) {
    for (const token of tokens) {
      const copied = { ...token, pieces: [] };
      this.tokens.push(copied);
      for (const [kind, text] of token.pieces) this.addPiece(copied, kind, text);
    }
    this.raw = raw.slice(0, this.tokens.at(-1)?.end ?? 0);
  }

  showMeta() {
    const count = this.tokens.length - this.counted;
    const seconds = (this.lastToken - this.firstToken) / 1000;
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    const parts = [
      count && `${count} tokens`,
      count > 1 && seconds > 0 && `${((count - 1) / seconds).toFixed(0)} tokens/s`,
      count && this.firstToken !== undefined && `first after ${((this.firstToken - this.begun) / 1000).toFixed(2)} s`,
      this.usage && `prompt of ${this.usage.prompt_tokens} tokens${cached ? `, ${cached} cached` : ""}`,
      this.isFree && "not held to the schema",
      { length: "ended at the most tokens", deadline: "ended at its deadline" }[this.finish],
    ];
    this.meta.textContent = parts.filter(Boolean).join(" · ");
  }

  /* As it is kept: the text and facts, and apart from them the tokens, which are much more. */

  get record() {
    const { settings, mark, taken, notes, finish, origin } = this;
    const calls = this.calls.map(({ id, name, text, result }) => ({ id, name, text, result: result.value }));
    return { text: this.content, settings, mark, taken, calls, notes, finish, origin, meta: this.meta.textContent };
  }

  get tokenRecord() {
    const alternative = ({ token_id, token, logprob }) => [token_id, token, logprob];
    const token = ({ id, label, logprob, top, end, pieces }) => [id, label, logprob ?? null, end, pieces, top.map(alternative)];
    return { promptIds: this.promptIds, raw: this.raw, tokens: this.tokens.map(token) };
  }

  static of(parent, id, record, { promptIds, raw, tokens }) {
    const self = new Answer(parent, record.settings, id);
    self.promptIds = promptIds;
    self.mark = record.mark;
    self.origin = record.origin ?? null;
    let start = 0;
    const alternative = ([token_id, token, logprob]) => ({ token_id, token, logprob });
    const all = tokens.map(([id, label, logprob, end, pieces, top], index) => {
      const place = { index, start, end };
      start = end;
      return { id, label, logprob: logprob ?? undefined, top: top.map(alternative), pieces, ...place };
    });
    self.take(all, raw);
    if (!all.length && record.text) self.addPiece(null, "content", record.text);
    self.taken = record.taken;
    self.reasoning.open = false;
    record.calls.forEach(({ id, name, text, result }, index) => {
      self.addCall({ index, id, function: { name, arguments: text } });
      self.calls[index].result.value = result;
    });
    self.finish = record.finish;
    self.meta.textContent = record.meta;
    if (record.notes) self.showNotice(record.notes.text, record.notes.isWrong);
    else if (record.finish == null) self.showNotice("The page was left before the answer ended.", false);
    self.showMore(record.finish == null || record.notes !== undefined);
    self.views.content.end();
    return self;
  }
}

/** Events of the answer to the first of the bodies; to the next one where the server knows no more what it is a branch of. */
async function* eventsOf(path, bodies, signal) {
  const [body, ...others] = [bodies].flat();
  try {
    yield* events(path, body, signal);
  } catch (error) {
    const isForgotten = error instanceof Refused && error.violations.some(({ field }) => field?.startsWith("branch"));
    if (!isForgotten || !others.length) throw error;
    yield* eventsOf(path, others, signal);
  }
}

export function sayRunning() {
  $("keys").textContent = "An answer is still being written: Escape or Stop ends it.";
  announcer.say($("keys").textContent);
}

/** The turns that are shown, oldest first. */
export function shownPath() {
  const turns = [];
  for (let turn = root.children[root.chosen]; turn; turn = turn.children[turn.chosen]) turns.push(turn);
  return turns;
}

/** Shows the chosen path. Elements that stay are not touched, so that they keep the focus. */
export function showPath() {
  const turns = shownPath();
  let same = 0;
  while (same < turns.length && $("log").children[same] === turns[same].element) same++;
  while ($("log").children[same]) $("log").lastElementChild.remove();
  $("log").append(...turns.slice(same).map((turn) => turn.element));
  for (const turn of turns) turn.showPlace();
  closeChoices();
}

function parameters({ system, schema, tools, max_reasoning_tokens, ...params }) {
  return { model: $("model").value || undefined, stream: true, stream_options: { include_usage: true }, return_token_ids: true, ...params };
}

/** Asks for an answer to what was sent. */
export function answer(sent, settings) {
  if (!settings) return;
  setFollowing(true);
  const turns = [];
  for (let turn = sent; turn !== root; turn = turn.parent) turns.unshift(turn);
  const { system, schema, tools, max_reasoning_tokens } = settings;
  const format = schema && { response_format: { type: "json_schema", json_schema: { name: "answer", schema, strict: true } } };
  const next = new Answer(sent, settings);
  const params = { ...parameters(settings), ...format };
  changed(sent, true);
  if (served.model?.chat_template === false) {
    const { top_logprobs = 0, ...others } = params;
    const text = [system ?? "", ...turns.map((turn) => turn.text)].join("");
    next.generate("v1/completions", { max_tokens: TEXT_TOKENS, ...others, logprobs: top_logprobs, prompt: text });
  } else {
    const messages = [...(system ? [{ role: "system", content: system }] : []), ...turns.flatMap((turn) => turn.messages)];
    next.generate("v1/chat/completions", { ...params, messages, logprobs: true, max_reasoning_tokens, ...(tools && { tools }) });
  }
  if (document.activeElement === document.body) next.element.focus();
}

const TEXT_TOKENS = 256; // of what goes on with a text, where the settings say nothing: the API takes 16
