/* Elements of the page, and what is said to those who do not see it. */

export const $ = (id) => document.getElementById(id);

/** An element. `on` has its listeners by event; attributes that are null or false are left out. */
export function make(tag, { on = {}, ...attributes } = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) if (value != null && value !== false) element.setAttribute(name, value);
  for (const [event, listener] of Object.entries(on)) element.addEventListener(event, listener);
  element.append(...children);
  return element;
}

export const isNarrow = () => matchMedia("(max-width: 780px)").matches;

/** A number that is unlikely to be drawn twice; unlike crypto.randomUUID it is there without TLS, too. */
export const newId = () => [...crypto.getRandomValues(new Uint8Array(12))].map((byte) => byte.toString(16).padStart(2, "0")).join("");

export const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return `${value >= 99.95 || value < 0.05 ? value.toFixed(0) : value.toFixed(1)} %`;
};

/** The text of a token with its white space made visible. */
export const shown = (text) => (text === "" ? "∅" : text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥"));

/** Copies a text. `button` says how that went. */
export async function copy(text, button) {
  const label = (button.dataset.label ??= button.textContent);
  button.textContent = (await copied(text)) ? "Copied" : "Not copied";
  setTimeout(() => (button.textContent = label), 1500);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Without TLS there is no such clipboard.
  }
  const focused = document.activeElement;
  const box = make("textarea", { class: "unseen" });
  box.value = text;
  document.body.append(box);
  box.select();
  const done = document.execCommand("copy");
  box.remove();
  focused?.focus();
  return done;
}

/** What is said to a screen reader: whole sentences, not tokens. */
export const announcer = {
  held: "",
  add(text) {
    this.held += text;
    const end = this.held.length > 240 ? this.held.length : (/^[^]*[.!?;:\n](?=\s)/.exec(this.held)?.[0].length ?? 0);
    if (end) this.say(this.held.slice(0, end), this.held.slice(end));
  },
  say(text, held = "") {
    this.held = held;
    if (!text.trim()) return;
    $("announcer").append(make("p", {}, text));
    if ($("announcer").childElementCount > 6) $("announcer").firstChild.remove();
  },
  end(text) {
    this.say(`${this.held} ${text}`);
  },
};
