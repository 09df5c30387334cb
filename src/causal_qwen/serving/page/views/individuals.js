// One prompt, six individuals side by side.

import { events } from "../api.js";
import { Said, bars, element, legend, tokensOf } from "../elements.js";
import { sampling } from "../fields.js";

const SIX = 6;

export default {
  id: "individuals",
  title: "Individuals",
  verb: "Ask six",
  lead: "The same question to six individuals. Persistence is how much of its noise an individual keeps from token to token: at 0 each token is drawn afresh, towards 1 it insists on its own ways until it repeats itself. Temperature scales the noise; at 0 all six agree.",
  live: ["persistence", "temperature", "seed", "max_tokens"],
  fields: (model) => sampling(model, {
    seed: { label: "first individual", kind: "number", value: 1, min: 0, step: 1 },
    max_tokens: { label: "tokens", kind: "number", value: 32, min: 1, max: model.max_tokens, step: 1 },
    prompt: { label: "prompt", kind: "text", value: "On a free afternoon I like to", rows: 2 },
  }),
  layout: (controls) => [
    controls.prompt,
    element("div", { class: "fields" }, controls.persistence, controls.temperature, controls.seed, controls.max_tokens),
  ],
  request: (values) => ({
    path: "/v1/completions",
    body: {
      prompt: values.prompt, n: SIX, seed: values.seed, persistence: values.persistence, temperature: values.temperature,
      max_tokens: values.max_tokens, inference_mode: "causal", logprobs: 5,
    },
  }),
  async run(values, model, output, signal) {
    const { path, body } = this.request(values);
    const people = Array.from({ length: SIX }, (_, index) => {
      const said = new Said();
      const card = element("div", { class: "answer" }, element("h2", {}, `individual ${values.seed + index}`), said.element);
      return { said, card, numbers: [] };
    });
    output.replaceChildren(element("div", { class: "foot" }, legend()), element("div", { class: "cards" }, ...people.map((one) => one.card)));
    let tokens = 0;
    for await (const event of events(path, body, signal)) {
      for (const choice of event.choices || []) {
        const person = people[choice.index];
        const added = tokensOf(choice.logprobs);
        person.numbers.push(...(choice.numbers || []));
        if (added) person.said.add(added, person.numbers);
        else if (choice.text) person.said.addText(choice.text);
        tokens += added?.length || 0;
        if (choice.finish_reason) {
          person.said.end();
          if (person.numbers.length) person.card.append(bars(person.numbers));
        }
      }
    }
    return `${tokens} tokens by ${SIX} individuals`;
  },
};
