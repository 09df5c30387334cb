// The views, the address that holds their state, and the buttons that every view has.

import { ServerError, answer, setKey } from "./api.js";
import { asCurl, asPython } from "./code.js";
import { element, hideCard } from "./elements.js";
import { control, parsed } from "./fields.js";
import compare from "./views/compare.js";
import individuals from "./views/individuals.js";
import table from "./views/table.js";
import whatIf from "./views/what-if.js";
import write from "./views/write.js";

const VIEWS = [write, individuals, whatIf, compare, table];
const PAUSE = 350; // milliseconds without a change before a slider asks again
const place = (id) => document.getElementById(id);
let model = null;
let view = null;
let values = {};
let output = null;
let controller = null;
let timer = null;

function say(text, bad = false) {
  place("status").textContent = text;
  place("status").className = bad ? "bad" : "";
}

async function load() {
  try {
    model = (await answer("/v1/models")).data[0];
  } catch (error) {
    place("key-field").hidden = !(error instanceof ServerError && error.status === 401);
    place("model").textContent = error.message;
    return;
  }
  place("key-field").hidden = true;
  const numbers = model.writes_numbers ? "writes numbers" : "no numbers yet";
  place("model").textContent = `${model.id} · ${model.engine}, ${model.dtype} · ${numbers}`;
  open();
}

/** Show what the address says. */
function open() {
  const [name, query = ""] = location.hash.slice(1).split("?");
  const chosen = VIEWS.find((one) => one.id === name) || VIEWS[0];
  const given = new URLSearchParams(query);
  show(chosen, given);
  if (given.get("run") === "1") run();
}

function show(chosen, given) {
  controller?.abort();
  hideCard();
  say("");
  view = chosen;
  const fields = view.fields(model);
  values = Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, parsed(field, given.get(name))]));
  place("views").replaceChildren(...VIEWS.map(tab));
  output = element("section", { "aria-label": "Result" });
  const controls = Object.fromEntries(
    Object.entries(fields).map(([name, field]) => [name, control(name, field, values[name], changed)]),
  );
  const form = element("form", { onsubmit: submitted }, ...view.layout(controls, model), actions());
  place("view").replaceChildren(element("p", { class: "lead" }, view.lead), form, output);
  document.title = `${view.title} · CausalQwen`;
}

function tab(one) {
  const selected = one === view;
  return element("button", {
    type: "button", role: "tab", id: `tab-${one.id}`, "aria-selected": String(selected), tabIndex: selected ? 0 : -1,
    onclick: () => go(one),
    onkeydown: (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      const next = VIEWS[(VIEWS.indexOf(one) + step + VIEWS.length) % VIEWS.length];
      go(next);
      place(`tab-${next.id}`).focus();
    },
  }, one.title);
}

function go(one) {
  history.pushState(null, "", `#${one.id}`);
  show(one, new URLSearchParams());
}

function actions() {
  const copy = (text, what) => navigator.clipboard.writeText(text()).then(() => say(`${what} copied`), () => say(`the browser does not allow copying; the address holds the ${what}`, true));
  const button = (label, text, what) => element("button", { type: "button", onclick: () => copy(text, what) }, label);
  return element(
    "div",
    { class: "acts" },
    element("button", { class: "go", type: "submit", id: "go" }, view.verb),
    element("button", { type: "button", id: "stop", disabled: true, onclick: () => controller?.abort() }, "Stop"),
    element("span", { class: "space" }),
    button("Copy link", () => link(true), "link"),
    button("Copy as Python", () => asPython(named(), location.origin), "Python"),
    button("Copy as curl", () => asCurl(named(), location.origin), "curl"),
  );
}

/** The request of this view, with the name of the model that answers. */
function named() {
  const { path, body } = view.request(values, model);
  return { path, body: { model: model.id, ...body } };
}

/** The address of this view with all that was set; opened, it runs. */
function link(runs) {
  const fields = view.fields(model);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) if (value !== fields[name].value) query.set(name, String(value));
  if (runs) query.set("run", "1");
  const text = query.toString();
  return `${location.origin}${location.pathname}#${view.id}${text ? `?${text}` : ""}`;
}

function changed(name, value) {
  values[name] = value;
  history.replaceState(null, "", link(false));
  view.changed?.(name, values, place("view"));
  if (!view.live?.includes(name) || !output.hasChildNodes()) return;
  clearTimeout(timer);
  timer = setTimeout(run, PAUSE);
}

function submitted(event) {
  event.preventDefault();
  run();
}

async function run() {
  controller?.abort();
  const mine = new AbortController();
  controller = mine;
  hideCard();
  place("stop").disabled = false;
  history.replaceState(null, "", link(true));
  const started = performance.now();
  say("asking …");
  try {
    const note = await view.run(values, model, output, mine.signal, say);
    say(`${note ? `${note} · ` : ""}${((performance.now() - started) / 1000).toFixed(1)} s`);
  } catch (error) {
    if (error.name === "AbortError") {
      if (controller === mine) say("stopped");
    } else {
      say(error.message, true);
      if (error.status === 401) place("key-field").hidden = false;
    }
  } finally {
    output.querySelectorAll(".waits").forEach((one) => controller === mine && one.classList.remove("waits"));
    if (controller === mine) place("stop").disabled = true;
  }
}

place("key").addEventListener("change", (event) => {
  setKey(event.target.value);
  load();
});
addEventListener("popstate", () => model && open());
load();
