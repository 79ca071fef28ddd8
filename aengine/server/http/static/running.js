/* The answer that is being generated, and how its end is kept in view. */

import { $ } from "./dom.js";

let running = null; // what aborts it

export const isRunning = () => running !== null;

/** Marks `controller` as that of the answer under way; the one before it is stopped. */
export function begin(controller) {
  stop();
  running = controller;
  showRunning();
}

/** The answer of `controller` has ended. */
export function end(controller) {
  if (running === controller) running = null;
  showRunning();
}

export function stop() {
  running?.abort();
  running = null;
  showRunning();
}

function showRunning() {
  const hadFocus = [$("send"), $("stop")].includes(document.activeElement);
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  if (hadFocus) $(running ? "stop" : "send").focus();
  $("keys").textContent = running ? "Escape stops the answer." : "Enter sends, Shift+Enter begins a line.";
}

let following = true;
let willFollow = false;

/** Whether the end of the conversation stays in view as it grows. */
export function setFollowing(value) {
  following = value;
}

/** Keeps the end in view while the reader has not scrolled away from it. */
export function follow() {
  if (!following || willFollow) return;
  willFollow = true;
  requestAnimationFrame(() => {
    willFollow = false;
    if (following) $("log").scrollTop = $("log").scrollHeight;
  });
}

export function listenToScrolling() {
  let top = 0; // of what is seen of the conversation
  $("log").addEventListener("scroll", () => {
    const { scrollTop, scrollHeight, clientHeight } = $("log");
    if (scrollHeight - scrollTop - clientHeight < 40) following = true;
    else if (scrollTop < top) following = false; // more text alone does not move it up
    top = scrollTop;
  });
}

const resting = new MessageChannel();
/** Lets the browser paint, and take clicks. Unlike timers it is as quick in a tab that is hidden. */
export function rest() {
  return new Promise((resolve) => {
    resting.port1.onmessage = resolve;
    resting.port2.postMessage(null);
  });
}
