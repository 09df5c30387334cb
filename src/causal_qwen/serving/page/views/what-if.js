// Two prompts, the same individual; what changed is marked, beside another individual as the control.

import { answer } from "../api.js";
import { bars, changes, element } from "../elements.js";
import { sampling } from "../fields.js";

export default {
  id: "what-if",
  title: "What if",
  verb: "Ask what if",
  lead: "What would the same individual have said? Both texts are decided by the same noise; what the other prompt changed is marked. The control is somebody else under the factual prompt: how far texts differ by chance alone.",
  live: ["persistence", "temperature", "seed"],
  fields: (model) => sampling(model, {
    prompt: { label: "factual prompt", kind: "text", value: "I grew up by the sea, so in my free time I", rows: 2 },
    instead: { label: "and if it had been", kind: "text", value: "I grew up in the desert, so in my free time I", rows: 2 },
    max_tokens: { label: "tokens", kind: "number", value: 40, min: 1, max: model.max_tokens, step: 1 },
  }),
  layout: (controls) => [
    element("div", { class: "pair" }, controls.prompt, controls.instead),
    element("div", { class: "fields" }, controls.seed, controls.persistence, controls.temperature, controls.max_tokens),
  ],
  request: (values) => ({
    path: "/v1/counterfactual",
    body: {
      prompt: values.prompt, interventions: [values.instead], seed: values.seed, persistence: values.persistence,
      temperature: values.temperature, max_tokens: values.max_tokens,
    },
  }),
  async run(values, model, output, signal) {
    const { path, body } = this.request(values);
    const result = await answer(path, body, signal);
    const [other] = result.interventions;
    const factual = result.factual;
    output.replaceChildren(
      element(
        "div",
        { class: "cards" },
        card("factual", `individual ${result.individual.seed}`, factual, other, "del"),
        card("what if", `the same individual · ${difference(other)}`, other, factual, "ins"),
        card("control", `individual ${result.control.individual.seed} · ${difference(result.control)}`, result.control, factual, "ins"),
      ),
    );
    return `${result.usage.completion_tokens} tokens`;
  },
};

/** A text, with those of its tokens marked that the other does not share. */
function card(name, who, branch, other, mark) {
  const said = element("p", { class: "said" }, element("span", { class: "prompt" }, branch.prompt));
  for (const [kind, text] of changes(other.tokens, branch.tokens)) {
    if (kind !== "gone") said.append(kind === "same" ? text : element(mark, {}, text));
  }
  const numbers = branch.numbers.length ? bars(branch.numbers) : null;
  return element("div", { class: "answer" }, element("h2", {}, name), said, numbers, element("p", { class: "foot" }, who));
}

function difference(branch) {
  if (branch.divergence === null) return "identical to the factual text";
  return `differs from token ${branch.divergence + 1} on, ${branch.edit_distance} edits`;
}
