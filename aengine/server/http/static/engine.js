/* The engine: plots of the last two minutes from its metrics. */

import { call, loadModels, Refused, served } from "./api.js";
import { $, make } from "./dom.js";

const WINDOW = 15; // samples over which rates and percentiles are taken: about seconds
const KEPT = 120; // samples that are plotted

/** The sums of the samples of each family, and the buckets of histograms, from Prometheus' text. */
function parseMetrics(text) {
  const sums = new Map();
  const buckets = new Map();
  for (const [, name, labels, value] of text.matchAll(/^(aengine_\w+)(?:\{(.*)\})? (\S+)/gm)) {
    const le = name.endsWith("_bucket") && /le="([^"]*)"/.exec(labels)?.[1];
    if (le) buckets.set(name, [...(buckets.get(name) ?? []), [le === "+Inf" ? Infinity : Number(le), Number(value)]]);
    else sums.set(name, (sums.get(name) ?? 0) + Number(value));
  }
  return { time: performance.now(), sums, buckets };
}

/** Milliseconds below which a share of the observations between two samples lies; null without any. */
function percentile(now, before, name, share) {
  const old = before.buckets.get(`${name}_bucket`) ?? [];
  const counts = (now.buckets.get(`${name}_bucket`) ?? []).map(([bound, count], i) => [bound, count - (old[i]?.[1] ?? 0)]);
  const wanted = share * (counts.at(-1)?.[1] ?? 0);
  if (!(wanted > 0)) return null;
  const at = counts.findIndex(([, count]) => count >= wanted);
  const [low, below] = counts[at - 1] ?? [0, 0];
  const [high, count] = counts[at];
  return 1000 * (high === Infinity ? low : low + ((high - low) * (wanted - below)) / (count - below));
}

const gauge = (name) => (now) => now.sums.get(`aengine_${name}`) ?? null;
const change = (now, before, name) => (now.sums.get(`aengine_${name}_total`) ?? 0) - (before.sums.get(`aengine_${name}_total`) ?? 0);
const rate = (name) => (now, before, last) => (now === last ? null : (1000 * change(now, last, name)) / (now.time - last.time));
const quantile = (name, share) => (now, before) => percentile(now, before, `aengine_${name}_seconds`, share);
const accepted = (now, before) => {
  const drafted = change(now, before, "draft_tokens");
  return drafted ? (100 * change(now, before, "accepted_draft_tokens")) / drafted : null;
};
/** Name, unit, and its series: name, and the value of a sample, given the one a window before it and the one just before it. */
const PLOTS = [
  ["Sequences", "", ["running", gauge("sequences_running")], ["waiting", gauge("requests_waiting")]],
  ["KV pages", "", ["used", gauge("kv_pages_used")]],
  ["Tokens per second", "", ["generated", rate("completion_tokens")]],
  ["TTFT", " ms", ["p50", quantile("time_to_first_token", 0.5)], ["p95", quantile("time_to_first_token", 0.95)]],
  ["ITL", " ms", ["p50", quantile("inter_token", 0.5)], ["p99", quantile("inter_token", 0.99)]],
  ["Drafts accepted", " %", ["of drafts", accepted]],
];

class Plot {
  constructor([name, unit, ...series]) {
    this.name = name;
    this.unit = unit;
    this.series = series.map(([label, value]) => ({ label, value, points: [] }));
    this.now = make("span", {}, make("b", {}, "–"));
    this.picture = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    const attributes = { role: "img", viewBox: `0 0 ${KEPT - 1} 40`, preserveAspectRatio: "none", "aria-label": name };
    for (const [key, value] of Object.entries(attributes)) this.picture.setAttribute(key, value);
    for (const one of this.series) one.line = this.picture.appendChild(document.createElementNS(this.picture.namespaceURI, "path"));
    this.element = make("figure", { class: "plot" }, make("figcaption", {}, name, this.now), this.picture);
  }

  format(value) {
    return value === null ? "–" : (value < 10 && value % 1 ? value.toFixed(1) : value.toFixed(0)) + this.unit;
  }

  add(now, before, last) {
    for (const one of this.series) one.points = [...one.points, one.value(now, before, last)].slice(-KEPT);
    const all = this.series.flatMap((one) => one.points).filter((value) => value !== null);
    const most = Math.max(1e-9, ...all);
    for (const { points, line } of this.series) {
      let pen = "M";
      const path = points.map((value, i) => {
        if (value === null) return ((pen = "M"), "");
        const step = `${pen}${KEPT - points.length + i} ${(38 - (36 * value) / most).toFixed(1)}`;
        return ((pen = "L"), step);
      });
      line.setAttribute("d", path.join(""));
    }
    const values = this.series.map(({ label, points }) => [label, this.format(points.at(-1))]);
    const capacity = this.name === "KV pages" ? ` of ${now.sums.get("aengine_kv_pages_capacity")}` : "";
    this.now.replaceChildren(...values.map(([label, value]) => make("b", {}, values.length > 1 ? `${label} ${value}` : value + capacity)));
    const summary = all.length ? `; least ${this.format(Math.min(...all))}, most ${this.format(most)} in the last two minutes` : "";
    this.picture.setAttribute("aria-label", `${this.name}: ${values.map((pair) => pair.join(" ")).join(", ")}${capacity}${summary}`);
  }
}

export const dashboard = {
  samples: [],
  wait: 1,
  timer: 0,
  start() {
    this.plots = PLOTS.map((plot) => new Plot(plot));
    $("plots").append(...this.plots.map((plot) => plot.element));
    document.addEventListener("visibilitychange", () => this.poll());
    addEventListener("online", () => this.poll());
  },
  /** Reads the metrics once a second while they are seen; after a failure twice as late each time. */
  async poll() {
    clearTimeout(this.timer);
    if (this.busy || document.hidden || $("engine").hidden) return;
    this.busy = true;
    try {
      const now = parseMetrics(await (await call("metrics", { ask: false })).text());
      const restarted = change(now, this.samples.at(-1) ?? now, "steps") < 0;
      this.samples = [...(restarted ? [] : this.samples), now].slice(-WINDOW);
      for (const plot of this.plots) plot.add(now, this.samples[0], this.samples.at(-2) ?? now);
      if (!served.models.length || this.wait > 1) loadModels().catch(() => {});
      this.wait = 1;
      this.say("Connected.");
    } catch (error) {
      this.wait = Math.min(16, 2 * this.wait);
      this.say(error instanceof Refused ? error.message : `No connection; the next try is in ${this.wait} seconds.`);
    }
    this.busy = false;
    this.timer = setTimeout(() => this.poll(), 1000 * this.wait);
  },
  say(text) {
    if ($("link").textContent !== text) $("link").textContent = text;
  },
};
