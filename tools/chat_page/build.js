// Bundles the libraries of the chat page, and lists their licences beside them.
import { build } from "esbuild";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";

const OUT = "../../aengine/server/http/static/vendor";
const { metafile } = await build({
  entryPoints: ["libraries.js"],
  outfile: `${OUT}/libraries.js`,
  bundle: true,
  minify: true,
  lineLimit: 160, // for those who search in it
  format: "esm",
  target: "es2022",
  legalComments: "none",
  metafile: true,
  // The one for browsers writes HTML, which the page's policy forbids.
  alias: { "decode-named-character-reference": "./node_modules/decode-named-character-reference/index.js" },
});

// Without its font: the system has one, and the page's policy lets none in.
const css = readFileSync("node_modules/temml/dist/Temml-Local.css", "utf8");
writeFileSync(`${OUT}/math.css`, css.replace(/\/\*\nTemml\.woff2[^]*?@font-face \{[^]*?\}\n/, "").trim() + "\n");

const inputs = Object.values(metafile.outputs)[0].inputs;
const used = Object.keys(inputs).filter((path) => inputs[path].bytesInOutput > 0);
const folders = new Set(used.map((path) => /^(?:.*node_modules\/)(?:@[^/]+\/)?[^/]+/.exec(path)?.[0]).filter(Boolean));
const packages = new Map(); // by the text of their licence
for (const folder of [...folders].sort()) {
  const { name, version, license } = JSON.parse(readFileSync(`${folder}/package.json`, "utf8"));
  const file = readdirSync(folder).find((one) => /^licen[cs]e(\.|$)/i.test(one));
  if (!file) throw new Error(`${name} has no licence file`);
  const text = readFileSync(`${folder}/${file}`, "utf8").trim().replaceAll("\r\n", "\n");
  packages.set(text, [...(packages.get(text) ?? []), `${name} ${version} (${license})`]);
}
const parts = [...packages].map(([text, names]) => `${names.join("\n")}\n\n${text}\n`);
const rule = `\n${"-".repeat(78)}\n\n`;
const head = "libraries.js and math.css are made of these packages of the npm registry, by tools/chat_page/build.js.\n";
writeFileSync(`${OUT}/LICENSES.txt`, [head, ...parts].join(rule));
