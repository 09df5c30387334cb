// The fields of a form, described by data, so that a link can hold them and every view has the same ones.

import { element } from "./elements.js";

/** What every way of sampling shares. `model` gives the defaults. */
export function sampling(model, more = {}) {
  const defaults = model.defaults;
  return {
    seed: { label: "individual (seed)", kind: "number", value: 7, min: 0, step: 1 },
    persistence: { label: "persistence ρ", kind: "range", value: defaults.persistence, min: 0, max: 1, step: 0.05 },
    temperature: { label: "temperature (noise)", kind: "range", value: 1, min: 0, max: 2, step: 0.05 },
    max_tokens: { label: "tokens", kind: "number", value: 48, min: 1, max: model.max_tokens, step: 1 },
    ...more,
  };
}

/** The value of a field as the address holds it. */
export function parsed(field, text) {
  if (text === null) return field.value;
  if (field.kind === "number" || field.kind === "range") {
    const number = Number(text);
    return text.trim() === "" || Number.isNaN(number) ? field.value : number;
  }
  if (field.kind === "check") return text === "true";
  if (field.kind === "choice" && !field.options.some(([value]) => value === text)) return field.value;
  return text;
}

/** A labelled control that tells `changed` its value. */
export function control(name, field, value, changed) {
  const shown = field.kind === "range" ? element("output", {}, String(value)) : null;
  const tell = (event) => {
    const text = field.kind === "check" ? String(event.target.checked) : event.target.value;
    const parsedValue = parsed(field, text);
    if (shown) shown.textContent = String(parsedValue);
    changed(name, parsedValue);
  };
  const common = { id: `field-${name}`, name, oninput: tell };
  let input;
  if (field.kind === "text") input = element("textarea", { ...common, value, rows: field.rows || 3, class: field.class || "", placeholder: field.hint || "", spellcheck: false });
  else if (field.kind === "line") input = element("input", { ...common, type: "text", value, placeholder: field.hint || "" });
  else if (field.kind === "choice") {
    const options = field.options.map(([key, text]) => element("option", { value: key, selected: key === value }, text));
    input = element("select", common, ...options);
  } else if (field.kind === "check") input = element("input", { ...common, type: "checkbox", checked: value });
  // The range comes first: a value outside of it would be cut off.
  else input = element("input", { ...common, type: field.kind, min: field.min, max: field.max ?? "", step: field.step, value: String(value) });
  if (field.kind !== "text") {
    input.addEventListener("keydown", (event) => event.key === "Enter" && event.target.form.requestSubmit());
  } else {
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) event.target.form.requestSubmit();
    });
  }
  return element("label", {}, element("span", {}, field.label, shown ? " " : null, shown), input);
}
