/* Tokens of answers: what else was likely, and branches from there. */

import { $, make, percent, shown } from "./dom.js";
import { isRunning, setFollowing, stop } from "./running.js";
import { ROVING } from "./texts.js";

/** Answers by their elements. One has `tokens`, `promptIds`, and `branch(keep, next)`. */
export const answers = new WeakMap();

let choices = null; // the element of the token whose choices are shown, and whether they stay until they are closed

/** Of the tokens of a text one is reached with Tab; the arrow keys make it another one. */
export function rove(element) {
  const others = element.closest(".text").querySelectorAll(".token[tabindex]");
  for (const other of others) for (const name of Object.keys(ROVING)) other.removeAttribute(name);
  for (const [name, value] of Object.entries(ROVING)) element.setAttribute(name, value);
  element.focus();
}

/** Runs `draw`, which replaces elements of tokens in `box`; what was focused, and what choices are shown of, stays that. */
export function redraw(box, draw) {
  const focused = box.contains(document.activeElement) && document.activeElement.closest(".token");
  const pointed = choices && box.contains(choices.element) && choices.element;
  draw();
  const again = (old) => box.querySelector(`.token[data-index="${old.dataset.index}"]`);
  if (pointed && !pointed.isConnected) {
    const element = again(pointed);
    if (!element) closeChoices();
    else mark((choices.element = element));
  }
  if (focused && !focused.isConnected) {
    const element = again(focused);
    if (element) rove(element);
  }
}

function mark(element) {
  element.classList.add("open");
  element.setAttribute("aria-describedby", "choices-name");
}

function showChoices(element, pinned) {
  const turn = answers.get(element.closest(".answer"));
  if (!turn) return;
  closeChoices();
  const token = turn.tokens[element.dataset.index];
  const alternatives = [...token.top];
  if (token.logprob !== undefined && !alternatives.some((one) => one.token_id === token.id)) {
    alternatives.push({ token_id: token.id, token: token.label, logprob: token.logprob });
    alternatives.sort((a, b) => b.logprob - a.logprob);
  }
  const rank = alternatives.findIndex((one) => one.token_id === token.id) + 1;
  const place = rank && rank <= token.top.length ? `rank ${rank}, ` : "";
  const facts = `${token.logprob === undefined ? "" : `, ${percent(token.logprob)}`}, ${place}id ${token.id}`;
  const fill = (one) => {
    const bar = make("i");
    bar.style.width = `${100 * Math.exp(one.logprob)}%`;
    const isThis = one.token_id === token.id;
    const on = { click: () => branchFrom(turn, token, isThis ? null : one) };
    const [name, likely] = [make("span", {}, shown(one.token)), make("span", {}, percent(one.logprob))];
    return make("li", {}, make("button", { "aria-current": isThis && "true", on }, name, likely, bar));
  };
  const keep = make("button", { on: { click: () => branchFrom(turn, token, null) } }, "Keep it, draw the rest again");
  const again = make("button", { on: { click: () => branchFrom(turn, token, null, 0) } }, "Draw it again");
  $("choices").replaceChildren(
    make("p", { id: "choices-name" }, make("b", {}, shown(token.label)), facts),
    make("ol", { "aria-label": "Alternatives" }, ...alternatives.map(fill)),
    ...(turn.promptIds ? [make("div", { class: "actions" }, keep, again)] : []),
  );
  $("choices").hidden = false;
  mark(element);
  choices = { element, pinned };
  const at = element.getClientRects()[0];
  const { offsetWidth: width, offsetHeight: height } = $("choices");
  $("choices").style.left = `${Math.max(8, Math.min(at.left, innerWidth - width - 8))}px`;
  $("choices").style.top = `${at.bottom + height + 12 < innerHeight ? at.bottom + 4 : Math.max(8, at.top - height - 4)}px`;
  if (pinned) ($("choices").querySelector("[aria-current]") ?? $("choices").querySelector("button")).focus();
}

export function closeChoices(refocus = false) {
  if (!choices) return;
  const { element } = choices;
  choices = null;
  $("choices").hidden = true;
  element.classList.remove("open");
  element.removeAttribute("aria-describedby");
  if (refocus) rove(element);
}

function branchFrom(turn, token, next, kept = 1) {
  setFollowing(false);
  closeChoices();
  turn.branch(token.index + (next ? 0 : kept), next);
}

export function listenToTokens() {
  let leaving = 0;
  const tokenAt = (event) => event.target.closest?.(".token");
  const leave = () => {
    clearTimeout(leaving);
    leaving = setTimeout(() => choices && !choices.pinned && choices.element !== document.activeElement && closeChoices(), 250);
  };
  $("log").addEventListener("pointerover", (event) => {
    if (event.pointerType !== "mouse" || choices?.pinned) return;
    const token = tokenAt(event);
    if (!token) return leave();
    clearTimeout(leaving);
    if (choices?.element !== token) showChoices(token, false);
  });
  $("log").addEventListener("pointerleave", leave);
  $("choices").addEventListener("pointerenter", () => clearTimeout(leaving));
  $("choices").addEventListener("pointerleave", leave);
  $("log").addEventListener("focusin", (event) => {
    const token = tokenAt(event);
    if (token?.matches(":focus-visible") && choices?.element !== token) showChoices(token, false);
  });
  $("log").addEventListener("click", (event) => {
    if (event.target.closest?.("a")) return; // it is followed; pointing at it shows the choices
    if (tokenAt(event) && getSelection().isCollapsed) showChoices(tokenAt(event), true);
  });
  $("log").addEventListener("keydown", (event) => {
    const token = tokenAt(event);
    if (!token || event.ctrlKey || event.metaKey || event.altKey) return;
    const all = [...token.closest(".text").querySelectorAll(".token")];
    const at = all.indexOf(token);
    const line = (step) => {
      const others = all.filter((one) => Math.sign(one.offsetTop - token.offsetTop) === step);
      const away = (one) => Math.abs(one.offsetLeft - token.offsetLeft) + 1e4 * Math.abs(one.offsetTop - token.offsetTop);
      return others.sort((a, b) => away(a) - away(b))[0];
    };
    const moves = {
      ...{ ArrowRight: () => all[at + 1], ArrowLeft: () => all[at - 1], ArrowDown: () => line(1), ArrowUp: () => line(-1) },
      ...{ Home: () => all[0], End: () => all.at(-1) },
    };
    if (event.key === "Enter" || event.key === " ") showChoices(token, true);
    else if (event.key in moves) {
      const next = moves[event.key]();
      if (next) rove(next);
    } else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || document.querySelector("dialog[open]")) return;
    if (choices) closeChoices(choices.pinned);
    else if (isRunning()) stop();
  });
  document.addEventListener("focusin", (event) => {
    if (choices && !$("choices").contains(event.target) && event.target !== choices.element) closeChoices();
  });
  document.addEventListener("pointerdown", (event) => {
    if (choices && !event.target.closest?.("#choices, .token")) closeChoices();
  });
  addEventListener("resize", () => closeChoices());
  $("log").addEventListener("scroll", () => {
    if (choices && !choices.pinned && choices.element !== document.activeElement) closeChoices();
  });
}
