/* The panels beside the conversation: which are open, as many as there is room for. */

import { $ } from "./dom.js";
import { dashboard } from "./engine.js";

const PANELS = ["chats", "settings", "engine"];
const FIRST = ["chats", "settings"]; // what is open where there is room, until its user closes it
const bounds = [1150, 1650].map((width) => matchMedia(`(min-width: ${width}px)`));
const room = () => 1 + bounds.filter((bound) => bound.matches).length;

export function showPanel(name, open) {
  $(name).hidden = !open;
  const others = PANELS.filter((one) => one !== name && !$(one).hidden);
  if (others.includes("chats")) others.push(...others.splice(others.indexOf("chats"), 1)); // it is the last to go
  while (open && others.length >= room()) $(others.shift()).hidden = true;
  for (const one of PANELS) $(`show-${one}`).setAttribute("aria-expanded", String(!$(one).hidden));
  dashboard.poll();
}

/** What is open at first, and after the window has become wider or narrower. */
export function fitPanels() {
  const wanted = JSON.parse(localStorage.getItem("panels") ?? "null") ?? FIRST;
  for (const name of PANELS) showPanel(name, false);
  if (room() > 1) for (const name of PANELS) if (wanted.includes(name)) showPanel(name, true);
}

export function startPanels() {
  for (const name of PANELS) {
    $(`show-${name}`).addEventListener("click", () => {
      showPanel(name, $(name).hidden);
      if (room() > 1) localStorage.setItem("panels", JSON.stringify(PANELS.filter((one) => !$(one).hidden)));
    });
    $(name).querySelector(".close").addEventListener("click", () => $(`show-${name}`).click());
  }
  for (const bound of bounds) bound.addEventListener("change", fitPanels);
  fitPanels();
}
