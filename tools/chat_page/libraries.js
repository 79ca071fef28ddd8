export { common, createLowlight } from "lowlight";
export { fromMarkdown } from "mdast-util-from-markdown";
export { gfmFromMarkdown } from "mdast-util-gfm";
export { mathFromMarkdown } from "mdast-util-math";
export { gfm } from "micromark-extension-gfm";
export { math } from "micromark-extension-math";
export { default as temml } from "temml";
