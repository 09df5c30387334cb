// A against B on the same individuals; the paired difference grows as pairs arrive.

import { events } from "../api.js";
import { drawn, element, figure } from "../elements.js";
import { sampling } from "../fields.js";

const SCORES = [
  ["characters", "characters"], ["tokens", "tokens"], ["distinct_tokens", "distinct tokens"],
  ["nats", "nats per token under softmax"], ["number", "the first number"],
];
const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [900, 230, 56, 24, 10];

export default {
  id: "compare",
  title: "Compare",
  verb: "Compare",
  lead: "Two prompts or two settings on the same individuals, as one tests two treatments on the same patients. A variance ratio below 1 means that fewer samples are needed than with strangers.",
  fields: (model) => sampling(model, {
    a: { label: "A", kind: "text", value: "The best thing about summer is", rows: 2 },
    b: { label: "B", kind: "text", value: "The best thing about winter is", rows: 2 },
    seed: { label: "first individual", kind: "number", value: 0, min: 0, step: 1 },
    score: { label: "score", kind: "choice", value: "characters", options: SCORES },
    contains: { label: "… or contains (1 or 0)", kind: "line", value: "", hint: "a word" },
    pairs: { label: "pairs", kind: "number", value: 24, min: 2, max: 256, step: 1 },
    temperature: { label: "temperature of A", kind: "range", value: 1, min: 0, max: 2, step: 0.05 },
    other: { label: "temperature of B", kind: "range", value: 1, min: 0, max: 2, step: 0.05 },
    coupling: { label: "coupling", kind: "choice", value: "individual", options: [["individual", "the same individuals"], ["independent", "strangers"]] },
    max_tokens: { label: "tokens", kind: "number", value: 24, min: 1, max: model.max_tokens, step: 1 },
  }),
  layout: (controls) => [
    element("div", { class: "pair" }, controls.a, controls.b),
    element("div", { class: "fields" }, controls.score, controls.contains, controls.pairs, controls.coupling),
    element("details", {}, element("summary", {}, "more"), element("div", { class: "fields" }, controls.temperature, controls.other, controls.persistence, controls.seed, controls.max_tokens)),
  ],
  request: (values) => ({
    path: "/v1/compare",
    body: {
      a: { prompt: values.a, temperature: values.temperature, persistence: values.persistence },
      b: { prompt: values.b, temperature: values.other, persistence: values.persistence },
      score: values.contains ? { contains: values.contains } : values.score,
      pairs: values.pairs, seed: values.seed, coupling: values.coupling, max_tokens: values.max_tokens,
    },
  }),
  async run(values, model, output, signal) {
    const { path, body } = this.request(values);
    const figures = element("dl", { class: "figures" });
    const curve = drawn("svg", { class: "curve", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": "The mean paired difference with its interval, as pairs arrive" });
    const rows = element("tbody");
    const head = element("tr", {}, ...["individual", "A", "B", "B − A"].map((name, index) => element("th", { class: index === 3 ? "figure" : "" }, name)));
    output.replaceChildren(
      element("div", { class: "answer" }, figures, curve),
      element("div", { class: "answer scroll" }, element("table", {}, element("thead", {}, head), rows)),
    );
    const pairs = [];
    let estimate = null;
    for await (const event of events(path, body, signal)) {
      if (event.object === "compare.pair") {
        pairs.push(event);
        rows.prepend(pairRow(event));
      }
      estimate = event.estimate || estimate;
      tell(figures, estimate);
      draw(curve, pairs, values.pairs);
    }
    return `${pairs.length} pairs`;
  },
};

function pairRow(pair) {
  const score = (side) => ` (${figure(side.score)})`;
  return element(
    "tr",
    {},
    element("td", {}, String(pair.seed)),
    element("td", {}, pair.a.text, element("small", {}, score(pair.a))),
    element("td", {}, pair.b.text, element("small", {}, score(pair.b))),
    element("td", { class: "figure" }, figure(pair.difference)),
  );
}

function tell(figures, estimate) {
  if (!estimate) return;
  const entries = [
    ["mean difference B − A", figure(estimate.difference)],
    ["interval", `${figure(estimate.lower)} … ${figure(estimate.upper)}`],
    ["pairs", String(estimate.pairs)],
    ["correlation of pairs", figure(estimate.correlation)],
    ["variance against strangers", figure(estimate.variance_ratio)],
  ];
  figures.replaceChildren(...entries.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

/** Differences as dots, their running mean as a line, its interval as a band. */
function draw(curve, pairs, total) {
  const known = pairs.filter((pair) => pair.difference !== null);
  if (!known.length) return;
  const spots = known.map((pair, index) => ({ x: index + 1, y: pair.difference }));
  const means = known.map((pair, index) => ({ x: index + 1, ...pair.estimate })).filter((one) => one.difference !== undefined);
  const heights = spots.map((one) => one.y).sort((one, other) => one - other);
  const inner = [heights[Math.floor(heights.length * 0.02)], heights[Math.ceil(heights.length * 0.98) - 1]];
  const late = means.slice(-Math.max(1, Math.floor(means.length * 0.7)));
  const edges = [0, ...inner, ...late.flatMap((one) => [one.lower, one.upper])];
  const [low, high] = [Math.min(...edges), Math.max(...edges)];
  const x = (value) => LEFT + ((WIDTH - LEFT - 10) * value) / Math.max(total, spots.length);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (Math.max(low, Math.min(high, value)) - low) / (high - low || 1));
  const path = (points) => points.map(([one, other], index) => `${index ? "L" : "M"}${one.toFixed(1)} ${other.toFixed(1)}`).join("");
  const parts = [drawn("line", { class: "axis", x1: LEFT, x2: LEFT, y1: TOP, y2: HEIGHT - BOTTOM })];
  parts.push(drawn("line", { class: "zero", x1: LEFT, x2: WIDTH - 10, y1: y(0), y2: y(0) }));
  const label = (value, height, anchor = "end", across = LEFT - 8) => drawn("text", { x: across, y: height, "text-anchor": anchor }, value);
  parts.push(label("0", y(0) + 4));
  if (Math.abs(y(high) - y(0)) > 16) parts.push(label(figure(high), y(high) + 8));
  if (Math.abs(y(low) - y(0)) > 16) parts.push(label(figure(low), y(low)));
  parts.push(label("pairs", HEIGHT - 6, "end", WIDTH - 10), label("1", HEIGHT - 6, "middle", x(1)));
  parts.push(...spots.map((one) => drawn("circle", { class: "dot", cx: x(one.x), cy: y(one.y), r: 3.5 })));
  if (means.length > 1) {
    const band = [...means.map((one) => [x(one.x), y(one.upper)]), ...means.toReversed().map((one) => [x(one.x), y(one.lower)])];
    parts.push(drawn("path", { class: "band", d: `${path(band)}Z` }), drawn("path", { class: "line", d: path(means.map((one) => [x(one.x), y(one.difference)])) }));
  }
  curve.replaceChildren(...parts);
}
