/* Markdown to elements. They are made one by one from the tree of the parser, never from HTML, and of the kinds that are named here. */

import { copy, make } from "./dom.js";
import { common, createLowlight, fromMarkdown, gfm, gfmFromMarkdown, math, mathFromMarkdown, temml } from "./vendor/libraries.js";

const highlighter = createLowlight(common);
const MOST_HIGHLIGHTED = 100_000; // characters of a block of code
const MOST_DEPTH = 24; // of quotes and lists in each other
const MOST_MARKS = 12; // of quotes and lists at the beginning of a line
const MARKS = "$>-*+.)"; // each has a character that stands for it where it means nothing; they are none of Unicode's characters
const meaningless = (mark) => String.fromCharCode(0xfdd0 + MARKS.indexOf(mark));

/* What may hold dollar signs, the first that matches: fences, code, escapes, then the four ways to write mathematics. */
const DOLLARS = new RegExp(
  [
    /^[ \t]*(?<fence>`{3,}|~{3,})[^\n]*\n(?:[^]*?\n)?[ \t]*\k<fence>[`~]*[ \t]*$/,
    /(?<ticks>`+)(?!`)(?:(?!\n\s*\n)[^])*?[^`]\k<ticks>(?!`)/,
    /\\[\\$]/,
    /\\\((?<round>(?:(?!\n\s*\n|\\\))[^])+)\\\)/,
    /\\\[(?<square>(?:(?!\n\s*\n|\\\])[^])+)\\\]/,
    /\$\$(?<double>(?:(?!\n\s*\n)[^$])+)\$\$/,
    /\$(?![\s$])(?:[^$\n\\]|\\.)*?(?<![\s\\])\$(?!\d)/,
    /\$/,
  ]
    .map((pattern) => pattern.source)
    .join("|"),
  "gm",
);

/** The source with mathematics as the parser knows it, and of the same length. A formula is one line, so that no line of it is a list. */
function prepare(source) {
  const inLine = (tex) => (/\n\s*>/.test(tex) ? tex : tex.replaceAll("\n", " "));
  const dollars = source.replace(DOLLARS, (found, ...rest) => {
    const { round, square, double } = rest.at(-1);
    const tex = round ?? square ?? double;
    if (tex !== undefined) return `$$${inLine(tex.replaceAll("$", meaningless))}$$`;
    return found === "$" ? meaningless(found) : found;
  });
  return dollars.replace(/^(?:[ \t]*(?:>|[-*+](?=[ \t])|\d{1,9}[.)](?=[ \t])))+/gm, (found) => {
    let count = 0;
    return found.replace(/[->*+.)]/g, (mark) => (++count > MOST_MARKS ? meaningless(mark) : mark));
  });
}

const restore = (text) => text.replace(/[\ufdd0-\ufdd6]/g, (character) => MARKS[character.charCodeAt(0) - 0xfdd0]);

/* Without transforms, whose nodes have no places: they look for addresses in finished texts. */
const TREE = [...gfmFromMarkdown(), mathFromMarkdown()].map(({ transforms, ...extension }) => extension);
const SYNTAX = [gfm(), math()];

export function parse(source) {
  return fromMarkdown(prepare(source), { extensions: SYNTAX, mdastExtensions: TREE });
}

/** Marks a document whose system has no font for mathematics: the browser does not lower subscripts then. */
export function markMathFont() {
  const probe = document.body.appendChild(make("span", { class: "unseen" }));
  temml.render("x_2", probe, {});
  const [base, below] = probe.querySelector("msub").children;
  const isLow = below.getBoundingClientRect().bottom > base.getBoundingClientRect().bottom + 1;
  document.documentElement.classList.toggle("no-math-font", !isLow);
  probe.remove();
}

const TAGS = { paragraph: "p", blockquote: "blockquote", strong: "strong", emphasis: "em", delete: "del", thematicBreak: "hr", break: "br" };

/** Makes the elements of the blocks of a tree. `text` is a `TokenText`; `source`, which was parsed, stands at `base` in it. */
export class Renderer {
  constructor(text, base, source, tree) {
    this.text = text;
    this.base = base;
    this.source = source;
    this.definitions = new Map(tree.children.filter(({ type }) => type === "definition").map((one) => [one.identifier, one.url]));
    this.depth = 0;
  }

  /** The element of a block; null for one that is not shown. */
  block(node) {
    const parent = document.createDocumentFragment();
    this.add(node, parent);
    return parent.lastElementChild;
  }

  /** A list without its items. */
  list(node) {
    return make(node.ordered ? "ol" : "ul", { start: node.ordered && node.start !== 1 ? node.start : null });
  }

  item(node, list) {
    const element = make("li");
    if (node.checked != null) {
      const box = make("input", { type: "checkbox", disabled: "", checked: node.checked ? "" : null, "aria-label": node.checked ? "Done" : "To do" });
      element.classList.add("task");
      element.append(box);
    }
    this.children(node, element);
    list.append(element);
    return element;
  }

  children(node, element) {
    if (this.depth >= MOST_DEPTH) return this.asWritten(node, element);
    this.depth++;
    for (const child of node.children ?? []) this.add(child, element);
    this.depth--;
  }

  add(node, parent) {
    const { type } = node;
    if (type in TAGS) return this.children(node, parent.appendChild(make(TAGS[type])));
    if (type in this.makers) return this.makers[type].call(this, node, parent);
    this.asWritten(node, parent);
  }

  makers = {
    text: (node, parent) => this.value(node, parent),
    html: (node, parent) => (/^<br\s*\/?>$/i.test(node.value) ? parent.append(make("br")) : this.asWritten(node, parent)),
    definition: () => {},
    heading: (node, parent) => this.children(node, parent.appendChild(make(`h${Math.min(6, node.depth + 2)}`, { class: `level${node.depth}` }))),
    inlineCode: (node, parent) => this.value(node, parent.appendChild(make("code"))),
    code: (node, parent) => parent.append(this.code(node)),
    inlineMath: (node, parent) => parent.append(this.formula(node)),
    math: (node, parent) => parent.append(this.formula(node)),
    link: (node, parent) => this.link(node, parent, node.url),
    linkReference: (node, parent) => this.link(node, parent, this.definitions.get(node.identifier)),
    image: (node, parent) => this.link(node, parent, node.url),
    imageReference: (node, parent) => this.link(node, parent, this.definitions.get(node.identifier)),
    footnoteReference: (node, parent) => this.asWritten(node, parent.appendChild(make("sup"))),
    footnoteDefinition: (node, parent) => {
      const element = parent.appendChild(make("div", { class: "footnote" }, make("sup", {}, node.label), " "));
      this.children(node, element);
    },
    list: (node, parent) => {
      const list = parent.appendChild(this.list(node));
      for (const item of node.children) this.item(item, list);
    },
    table: (node, parent) => {
      const [head, ...rows] = node.children;
      const row = (one, tag) => {
        const cells = one.children.map((cell, i) => {
          const element = make(tag, { class: node.align[i] && `to-${node.align[i]}`, scope: tag === "th" && "col" });
          this.children(cell, element);
          return element;
        });
        return make("tr", {}, ...cells);
      };
      const table = make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((one) => row(one, "td"))));
      parent.append(make("div", { class: "wide-block", tabindex: "0", role: "region", "aria-label": "Table" }, table));
    },
  };

  /** Where the characters of `value`, a part of a node without its marks, stand in the text: see `TokenText.appendTo`. */
  places(node, value) {
    const [start, end] = [node.position.start.offset, node.position.end.offset];
    const from = node.type === "code" && /^(`{3}|~{3})/.test(this.source.slice(start, start + 3)) ? this.source.indexOf("\n", start) + 1 : start;
    const found = this.source.slice(from, end).indexOf(value);
    if (found >= 0) return this.base + from + found;
    // Marks, escapes and the beginnings of lines lie between: each character stands at the next place that has it.
    const places = new Int32Array(value.length);
    for (let i = 0, at = from; i < value.length; i++) {
      const next = this.source.indexOf(value[i], at);
      const isThere = next >= 0 && next < end && next < at + 200;
      places[i] = this.base + Math.min(isThere ? next : at, end - 1);
      if (isThere) at = next + 1;
    }
    return places;
  }

  value(node, element) {
    const value = restore(node.value);
    this.text.appendTo(element, value, this.places(node, value));
  }

  /** The source of a node. */
  asWritten(node, element) {
    const start = node.position.start.offset;
    this.text.appendTo(element, this.source.slice(start, node.position.end.offset), this.base + start);
  }

  /** Links lead out of this page only, and pictures are links: nothing is loaded by an answer. */
  link(node, parent, url = "") {
    const isSafe = /^(?:https?:\/\/|mailto:)/i.test(url) && URL.canParse(url);
    const element = isSafe ? make("a", { href: restore(url), title: restore(url), target: "_blank", rel: "noopener noreferrer nofollow" }) : make("span");
    if (node.children) this.children(node, element);
    else this.asWritten(node, element);
    parent.append(element);
  }

  code(node) {
    const value = restore(node.value);
    const places = this.places(node, value);
    const code = make("code");
    const language = (node.lang ?? "").toLowerCase();
    if (language && highlighter.registered(language) && value.length <= MOST_HIGHLIGHTED) {
      let at = 0;
      const add = (one, element) => {
        if (one.type === "text") {
          const end = at + one.value.length;
          this.text.appendTo(element, one.value, typeof places === "number" ? places + at : places.subarray(at, end));
          at = end;
          return;
        }
        const inner = one.type === "element" ? element.appendChild(make("span", { class: one.properties.className.join(" ") })) : element;
        for (const child of one.children) add(child, inner);
      };
      add(highlighter.highlight(language, value), code);
    } else this.text.appendTo(code, value, places);
    const button = make("button", { type: "button", class: "quiet", on: { click: () => copy(value, button) } }, "Copy");
    const head = make("div", { class: "block-head" }, make("span", {}, restore(node.lang ?? "") || "text"), button);
    return make("div", { class: "block" }, head, make("pre", { tabindex: "0", role: "region", "aria-label": "Code" }, code));
  }

  /** A formula; a click shows the tokens that it was written with. */
  formula(node) {
    const start = node.position.start.offset;
    const isDisplay = node.type === "math" || /^(?:\$\$|\\\[)/.test(this.source.slice(start, start + 2));
    const box = make("span", { class: isDisplay ? "formula display" : "formula" });
    const written = () => this.asWritten(node, box);
    const drawn = make("span", { class: "drawn", title: "Click for its tokens" });
    try {
      const settings = { displayMode: isDisplay, throwOnError: true, trust: false, maxExpand: 1000, maxSize: [20, 20] };
      temml.render(restore(node.value), drawn, settings);
    } catch {
      written();
      return box;
    }
    const back = make("button", { type: "button", class: "quiet" }, "Show the formula");
    drawn.addEventListener("click", () => {
      if (!getSelection().isCollapsed) return;
      box.replaceChildren();
      written();
      box.append(" ", back);
    });
    back.addEventListener("click", () => box.replaceChildren(drawn));
    box.append(drawn);
    return box;
  }
}
