// A few rows of a table; the number that follows each, with its interval.

import { answer } from "../api.js";
import { axis, element, ends, figure, flag, percent, track } from "../elements.js";

const MOST = 256;

export default {
  id: "table",
  title: "Table",
  verb: "Predict",
  lead: "Paste a few rows with their header, from a spreadsheet or a CSV file. Each row becomes a sentence, and the model says which number follows, with an interval; a row beyond what training has seen says so.",
  fields: (model) => ({
    rows: { label: "rows, with a header", kind: "text", value: "", rows: 8, class: "rows", hint: hint(model) },
    template: { label: "sentence of a row", kind: "line", value: model.template || "", hint: "A car of {weight} lbs drives {mpg} miles per gallon." },
    target: { label: "field that is predicted", kind: "line", value: model.target || "", hint: "mpg" },
    level: { label: "interval", kind: "range", value: 0.9, min: 0.5, max: 0.99, step: 0.01 },
  }),
  layout: (controls, model) => [
    controls.rows,
    element("div", { class: "fields" }, controls.level),
    element("details", { open: !model.template }, element("summary", {}, "sentence"), element("div", {}, controls.template, controls.target)),
    model.writes_numbers ? null : element("p", { class: "flag" }, "This model has not learned to write numbers: its predictions mean nothing yet. Train one with causal-qwen train."),
  ].filter(Boolean),
  live: ["level"],
  request(values, model) {
    const body = { rows: parse(values.rows), interval_level: values.level };
    if (values.template && values.template !== model.template) body.template = values.template;
    if (values.target && values.target !== model.target) body.target = values.target;
    return { path: "/v1/predict", body };
  },
  async run(values, model, output, signal) {
    const { path, body } = this.request(values, model);
    if (!body.rows.length) throw new Error("there are no rows; paste a header and at least one row below it");
    const result = await answer(path, body, signal);
    const names = Object.keys(body.rows[0]).slice(0, 6);
    const level = `${Math.round(100 * result.interval_level)}% interval`;
    const head = [...names.map((name) => [name]), [result.target || "number", "figure"], [level], [""], ["a number follows", "figure"]];
    const edges = axis(result.data);
    const rows = result.data.map((one) => element(
      "tr",
      {},
      ...names.map((name) => element("td", {}, String(body.rows[one.index][name] ?? ""))),
      element("td", { class: "figure" }, element("b", {}, figure(one.median))),
      element("td", { class: "wide" }, track(one, edges)),
      element("td", {}, ends(one), flag(one)),
      element("td", { class: "figure" }, percent(one.prob_num)),
    ));
    const kind = result.intervals === "conformal" ? "calibrated on left-out rows" : "of the Cauchy law itself, not calibrated";
    output.replaceChildren(
      element("div", { class: "answer scroll" }, element("table", {}, element("thead", {}, element("tr", {}, ...head.map(([name, kind = ""]) => element("th", { class: kind }, name)))), element("tbody", {}, ...rows))),
      element("p", { class: "foot" }, `Intervals are ${kind}. First sentence: ${result.data[0].prompt}…`),
    );
    return `${result.data.length} rows`;
  },
};

/** Rows of tab- or comma-separated text with a header; a cell that is a number becomes one. */
export function parse(text) {
  const trimmed = text.replace(/^\uFEFF/, "").trim();
  if (!trimmed) return [];
  const separator = ["\t", ";", ","].find((one) => trimmed.split("\n")[0].includes(one)) || ",";
  const records = cells(trimmed, separator);
  const [header, ...rest] = records;
  if (rest.length > MOST) throw new Error(`${rest.length} rows; the page takes up to ${MOST}. causal-qwen predict takes files of any length`);
  return rest.map((record, index) => {
    if (record.length !== header.length) {
      throw new Error(`row ${index + 1} has ${record.length} cells, the header ${header.length}: "${record.join(separator)}"`);
    }
    return Object.fromEntries(header.map((name, column) => [name.trim(), valueOf(record[column])]));
  });
}

function valueOf(cell) {
  const text = cell.trim();
  return text !== "" && /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? Number(text) : text;
}

function cells(text, separator) {
  const records = [[]];
  let [cell, quoted] = ["", false];
  for (let index = 0; index < text.length; index += 1) {
    const sign = text[index];
    if (quoted) {
      if (sign === '"' && text[index + 1] === '"') {
        cell += '"';
        index += 1;
      } else if (sign === '"') quoted = false;
      else cell += sign;
    } else if (sign === '"' && cell === "") quoted = true;
    else if (sign === separator || sign === "\n") {
      records.at(-1).push(cell.replace(/\r$/, ""));
      cell = "";
      if (sign === "\n") records.push([]);
    } else cell += sign;
  }
  records.at(-1).push(cell.replace(/\r$/, ""));
  return records.filter((record) => record.length > 1 || record[0] !== "");
}

function hint(model) {
  if (!model.template) return "weight,horsepower\n2500,90";
  const names = [...model.template.matchAll(/\{(\w+)[^}]*\}/g)].map((match) => match[1]).filter((name) => name !== model.target);
  return `${names.join(",")}\n…`;
}
