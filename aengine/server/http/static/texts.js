/* Texts of which every part belongs to a token, and how they are shown: as they are, or rendered from Markdown. */

import { make } from "./dom.js";
import { parse, Renderer } from "./markdown.js";

export const ROVING = { tabindex: "0", role: "button", "aria-haspopup": "dialog" };

/** A text that grows, and the token that each part of it came with. */
export class TokenText {
  constructor() {
    this.text = "";
    this.tokens = []; // of the parts; null where the server told none
    this.starts = []; // where they begin
  }

  add(token, text) {
    if (!this.tokens.length || this.tokens.at(-1) !== token) {
      this.tokens.push(token);
      this.starts.push(this.text.length);
    }
    this.text += text;
  }

  /** The number of the part that holds the character at `offset`. */
  partAt(offset) {
    let [low, high] = [0, this.starts.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.starts[middle] <= offset) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  /** Appends `value` to an element. `places`: where its characters stand in this text, or where the first does if they stand in a row. */
  appendTo(element, value, places) {
    const inRow = typeof places === "number";
    for (let from = 0; from < value.length; ) {
      const part = this.partAt(inRow ? places + from : places[from]);
      const end = this.starts[part + 1] ?? Infinity;
      let to = inRow ? Math.min(value.length, end - places) : from + 1;
      if (!inRow) while (to < value.length && places[to] < end) to++;
      element.append(tokenElement(this.tokens[part], value.slice(from, to)));
      from = to;
    }
  }
}

function tokenElement(token, text) {
  if (!token) return text;
  const likely = token.logprob === undefined ? 5 : [0.01, 0.05, 0.2, 0.5, 0.9].filter((bound) => Math.exp(token.logprob) >= bound).length;
  return make("span", { class: `token p${likely}`, "data-index": token.index }, text);
}

/** One of the tokens is reached with Tab. */
function letTabReach(box) {
  if (box.querySelector(".token[tabindex]")) return;
  const first = box.querySelector(".token");
  for (const [name, value] of first ? Object.entries(ROVING) : []) first.setAttribute(name, value);
}

/** Shows a text as it is. */
export class SourceView {
  constructor(box, text) {
    this.box = box;
    this.text = text;
    this.drawn = 0;
    box.classList.add("source");
    box.classList.remove("markdown");
    box.replaceChildren();
    this.update();
  }

  update() {
    const from = this.drawn;
    const { text } = this.text;
    if (from === text.length) return;
    this.drawn = text.length;
    const last = this.box.lastElementChild;
    const part = this.text.partAt(from);
    if (last && this.text.starts[part] < from && last.dataset.index === String(this.text.tokens[part]?.index)) {
      const end = this.text.starts[part + 1] ?? text.length;
      last.append(text.slice(from, end));
      this.text.appendTo(this.box, text.slice(end), end);
    } else this.text.appendTo(this.box, text.slice(from), from);
    if (!from) letTabReach(this.box);
  }

  end() {
    this.update();
  }
}

const MOST_AGAIN = 6000; // characters that are parsed again with each token
const FEWEST_WAIT = 30; // milliseconds between two drawings
const SHARE = 5; // drawing takes one of so many parts of the time at most

/** Shows a text that is Markdown.
 *
 * Blocks that nothing can change any more are drawn once; the last one is drawn again as it grows. One that is longer than
 * MOST_AGAIN is drawn again each time that it has doubled, and what came since stands behind it as it is. So the work for a text
 * grows as the text does. `redraw` runs what replaces elements, and keeps what its user points at. */
export class MarkdownView {
  constructor(box, text, redraw) {
    this.box = box;
    this.text = text;
    this.redraw = redraw;
    box.classList.add("markdown");
    box.classList.remove("source");
    this.clear();
  }

  clear() {
    this.box.replaceChildren();
    this.settled = 0; // up to there it is drawn for good
    this.list = null; // the list that is drawn for good but for its last item
    this.tail = []; // elements that are drawn again
    this.parsed = 0; // up to there it is drawn
    this.next = 0; // when it may be drawn again
    this.timer = 0;
    this.growing = null;
  }

  update() {
    this.timer ||= setTimeout(() => {
      this.timer = 0;
      if (this.isSelected()) return this.update(); // it would take the selection away
      this.draw(false);
    }, Math.max(FEWEST_WAIT / 2, this.next - performance.now()));
  }

  /** There is no more text for now. */
  end() {
    clearTimeout(this.timer);
    this.timer = 0;
    const refersBack = /^ {0,3}\[[^\]\n]+\]:/m.test(this.text.text);
    this.redraw(this.box, () => {
      if (refersBack) this.clear();
      this.drawTail(true);
    });
  }

  isSelected() {
    const selection = getSelection();
    return !selection.isCollapsed && this.tail.some((element) => selection.containsNode(element, true));
  }

  draw(isLast) {
    const begun = performance.now();
    const length = this.text.text.length;
    if (length - this.settled > MOST_AGAIN && length - this.settled < 2 * (this.parsed - this.settled)) this.grow();
    else this.redraw(this.box, () => this.drawTail(isLast));
    const now = performance.now();
    this.next = now + Math.max(FEWEST_WAIT, (SHARE - 1) * (now - begun));
  }

  /** Shows what came since the last drawing as it is. */
  grow() {
    const { text } = this.text;
    if (!this.growing) {
      this.growing = make("div", { class: "growing" });
      this.growing.classList.toggle("code", this.tail.at(-1)?.matches(".block") ?? false);
      this.box.append(this.growing);
      this.tail.push(this.growing);
      this.grown = this.parsed;
    }
    this.text.appendTo(this.growing, text.slice(this.grown), this.grown);
    this.grown = text.length;
  }

  drawTail(isLast) {
    for (const element of this.tail) element.remove();
    this.growing = null;
    const { text } = this.text;
    const source = text.slice(this.settled);
    this.parsed = text.length;
    const tree = parse(source);
    const renderer = new Renderer(this.text, this.settled, source, tree);
    const lineOf = (node) => source.lastIndexOf("\n", node.position.start.offset - 1) + 1;
    const blocks = tree.children;
    const drawn = [];
    let settled = 0;
    blocks.forEach((block, i) => {
      const isOpen = i === blocks.length - 1 && !isLast;
      if (block.type === "list") {
        const goesOn = i === 0 && this.list !== null;
        const list = goesOn ? this.list : renderer.list(block);
        if (!goesOn) this.box.append(list);
        block.children.forEach((item, n) => {
          const element = renderer.item(item, list);
          if (isOpen && n === block.children.length - 1) drawn.push(element);
        });
        if (isOpen) {
          settled = lineOf(block.children.at(-1));
          this.list = list;
          if (settled === 0 && !goesOn) drawn.push(list); // its first item decides what kind of list it is
        }
      } else {
        const element = renderer.block(block);
        if (element) this.box.append(element);
        if (isOpen) settled = lineOf(block);
        if (isOpen && element) drawn.push(element);
      }
      if (!isOpen || block.type !== "list" || drawn.includes(this.list)) this.list = null;
    });
    if (isLast) settled = source.length;
    this.settled += settled;
    this.tail = isLast ? [] : drawn;
    letTabReach(this.box);
  }
}
