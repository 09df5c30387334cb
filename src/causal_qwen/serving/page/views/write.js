// One text, token by token: a completion, or the next turn of a chat.

import { events } from "../api.js";
import { Said, bars, element, legend, tokensOf } from "../elements.js";
import { sampling } from "../fields.js";

const MODES = [
  ["causal", "causal: one individual decides"],
  ["standard", "standard: the law of the cause decides"],
  ["compatible", "compatible: softmax, as the base"],
];
const ALTERNATIVES = 5;
let turns = []; // of the chat on this page
let spoken = 0; // tokens that its individual has decided

function settings(values) {
  const body = { max_tokens: values.max_tokens, seed: values.seed, inference_mode: values.mode, temperature: values.temperature };
  if (values.mode === "causal") body.persistence = values.persistence;
  if (values.top_p < 1) body.top_p = values.top_p;
  return body;
}

export default {
  id: "write",
  title: "Write",
  verb: "Write",
  lead: "The model continues a text or answers a message. Warm tokens surprise its softmax; point at one (or walk with the arrow keys) to see what else it considered.",
  fields: (model) => sampling(model, {
    prompt: { label: "text to continue, or message", kind: "text", value: "My favourite season is", rows: 4 },
    form: { label: "as", kind: "choice", value: "completion", options: model.chat ? [["completion", "a text to continue"], ["chat", "a message to answer"]] : [["completion", "a text to continue"]] },
    mode: { label: "mode", kind: "choice", value: "causal", options: MODES },
    top_p: { label: "top p", kind: "range", value: 1, min: 0.05, max: 1, step: 0.05 },
  }),
  layout: (controls) => [
    controls.prompt,
    element("div", { class: "fields" }, controls.form, controls.mode, controls.seed, controls.persistence, controls.temperature, controls.max_tokens),
    element("details", {}, element("summary", {}, "more"), element("div", { class: "fields" }, controls.top_p)),
  ],
  request(values) {
    if (values.form === "chat") {
      const messages = [...turns, { role: "user", content: values.prompt }];
      const body = { messages, ...settings(values), logprobs: true, top_logprobs: ALTERNATIVES };
      if (spoken && values.mode === "causal") {
        delete body.seed;
        body.individual = { seed: values.seed, persistence: values.persistence, start: spoken };
      }
      return { path: "/v1/chat/completions", body };
    }
    return { path: "/v1/completions", body: { prompt: values.prompt, ...settings(values), logprobs: ALTERNATIVES } };
  },
  async run(values, model, output, signal) {
    const chat = values.form === "chat";
    const { path, body } = this.request(values);
    const said = new Said(chat ? "" : values.prompt);
    const foot = element("p", { class: "foot" });
    const card = element("div", { class: "answer" }, said.element, foot);
    if (!chat) {
      turns = [];
      spoken = 0;
      output.replaceChildren(element("div", { class: "foot" }, legend()), card);
    } else {
      if (!turns.length) output.replaceChildren(element("div", { class: "foot" }, legend(), " ", newChat(output)));
      output.append(
        element("div", { class: "turn user" }, element("h2", {}, "you"), element("p", { class: "said" }, values.prompt)),
        element("div", { class: "turn" }, element("h2", {}, "the individual"), card),
      );
    }
    const numbers = [];
    let [text, reason, who] = ["", null, null];
    for await (const event of events(path, body, signal)) {
      const choice = event.choices?.[0];
      if (!choice) continue;
      who ??= choice.individual;
      const tokens = tokensOf(choice.logprobs);
      numbers.push(...(choice.numbers || []));
      const piece = chat ? choice.delta.content || "" : choice.text;
      text += piece;
      if (tokens) said.add(tokens, numbers);
      else if (piece) said.addText(piece);
      reason = choice.finish_reason || reason;
    }
    said.end();
    if (numbers.length) card.append(bars(numbers));
    const person = who ? `individual ${who.seed}` : "nothing was sampled";
    foot.textContent = `${person} · ${said.tokens.length} tokens · ended by ${reason}`;
    if (chat) {
      turns = [...turns, { role: "user", content: values.prompt }, { role: "assistant", content: text }];
      spoken += said.tokens.length;
    }
    return `${said.tokens.length} tokens`;
  },
};

function newChat(output) {
  return element("button", {
    type: "button",
    onclick: () => {
      turns = [];
      spoken = 0;
      output.replaceChildren();
    },
  }, "New chat");
}
