// Small pieces of the page: elements, figures, tokens with what else was considered, intervals as bars.

/** An element with properties and children; strings become text, never markup. */
export function element(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key === "class") made.className = value;
    else if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key in made && key !== "list") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

const SVG = "http://www.w3.org/2000/svg";
export function drawn(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** A number as a person writes it: four digits that matter. */
export function figure(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e7 || size < 1e-3)) return value.toExponential(2);
  return new Intl.NumberFormat("en", { maximumSignificantDigits: Math.max(4, Math.ceil(Math.log10(size + 1))) }).format(value);
}

export function percent(probability) {
  return probability >= 0.0995 ? `${Math.round(100 * probability)}%` : `${(100 * probability).toFixed(probability < 0.001 ? 2 : 1)}%`;
}

/** The less likely a token, the warmer its ground. */
function ground(logprob) {
  if (logprob === null || logprob === undefined) return "";
  const doubt = Math.min(1, -logprob / 6);
  return doubt < 0.04 ? "" : `rgb(var(--doubt) / ${(0.55 * doubt).toFixed(3)})`;
}

export function legend() {
  const steps = [0, -1.5, -3, -6].map((logprob) => {
    const swatch = element("i");
    swatch.style.background = ground(logprob) || "var(--line)";
    return swatch;
  });
  return element("span", { class: "legend" }, "likely", ...steps, "surprising (to softmax)");
}

/** A growing text whose tokens can be asked what else was considered, by mouse or by arrow keys. */
export class Said {
  constructor(prompt = "") {
    this.tokens = [];
    this.here = -1;
    this.element = element("p", { class: "said waits", tabIndex: 0, "aria-label": "Generated text; arrow keys show what else was considered" });
    if (prompt) this.element.append(element("span", { class: "prompt" }, prompt));
    this.element.addEventListener("keydown", (event) => this.#move(event));
    this.element.addEventListener("blur", () => this.#leave());
  }

  /** @param tokens [{text, logprob, top: [{token, logprob}]}]; numbers are matched by position. */
  add(tokens, numbers = []) {
    const byPosition = new Map(numbers.map((number) => [number.position, number]));
    for (const token of tokens) {
      const number = byPosition.get(this.tokens.length);
      const kind = number ? ` number${number.extrapolates ? " beyond" : ""}` : "";
      const span = element("span", { class: `token${kind}` }, token.text);
      span.style.background = ground(token.logprob);
      const entry = { ...token, number, span };
      span.addEventListener("mouseenter", () => showCard(entry));
      span.addEventListener("mouseleave", hideCard);
      this.tokens.push(entry);
      this.element.append(span);
    }
  }

  /** Text without probabilities, where the server gives none. */
  addText(text) {
    this.element.append(text);
  }

  end() {
    this.element.classList.remove("waits");
  }

  #move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") return this.#leave();
    if (step === undefined || !this.tokens.length) return;
    event.preventDefault();
    this.tokens[this.here]?.span.classList.remove("here");
    this.here = Math.max(0, Math.min(this.tokens.length - 1, this.here + step));
    this.tokens[this.here].span.classList.add("here");
    showCard(this.tokens[this.here]);
  }

  #leave() {
    this.tokens[this.here]?.span.classList.remove("here");
    this.here = -1;
    hideCard();
  }
}

function showCard(token) {
  const card = document.getElementById("card");
  const rows = (token.top || []).map((other) => {
    const bar = element("span");
    bar.style.width = `${Math.max(2, 100 * Math.exp(other.logprob))}%`;
    const mine = other.token === token.text || (token.number && other.token === "<NUM>");
    return element("div", { class: `row${mine ? " said-one" : ""}` }, element("b", {}, visible(other.token)), element("div", {}, bar), element("small", {}, percent(Math.exp(other.logprob))));
  });
  const own = token.logprob === null || token.logprob === undefined ? "" : ` · ${percent(Math.exp(token.logprob))}`;
  card.replaceChildren(element("h3", {}, `${visible(token.text)}${own}`), ...rows);
  if (token.number) card.append(bars([token.number]));
  card.hidden = false;
  const box = token.span.getBoundingClientRect();
  const left = Math.min(box.left + scrollX, scrollX + innerWidth - card.offsetWidth - 12);
  const below = box.bottom + scrollY + 8;
  const above = box.top + scrollY - card.offsetHeight - 8;
  card.style.left = `${Math.max(8, left)}px`;
  card.style.top = `${box.bottom + card.offsetHeight + 16 > innerHeight && above > scrollY ? above : below}px`;
}

export function hideCard() {
  document.getElementById("card").hidden = true;
}

function visible(token) {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ /, "␣");
}

/** The ends of an axis on which all intervals have room. */
export function axis(numbers) {
  const [least, most] = [Math.min(...numbers.map((number) => number.lower)), Math.max(...numbers.map((number) => number.upper))];
  return [least - 0.1 * (most - least), most + 0.1 * (most - least)];
}

/** An interval as a bar on an axis, its median as a mark. */
export function track(number, [low, high]) {
  const place = (value) => (high > low ? (100 * (value - low)) / (high - low) : 50);
  const [span, mark] = [element("span"), element("i")];
  span.style.left = `${place(number.lower)}%`;
  span.style.width = `${Math.max(0.5, place(number.upper) - place(number.lower))}%`;
  mark.style.left = `${place(number.value ?? number.median)}%`;
  return element("div", { class: `track${number.extrapolates ? " beyond" : ""}`, role: "img", "aria-label": `interval ${ends(number)}` }, span, mark);
}

export function ends(number) {
  return `${figure(number.lower)} … ${figure(number.upper)}`;
}

export function flag(number) {
  return number.extrapolates ? element("span", { class: "flag", title: "beyond what training has seen" }, " extrapolates") : null;
}

/** Values with their intervals on one common axis. */
export function bars(numbers) {
  const edges = axis(numbers);
  const rows = numbers.flatMap((number) => [
    element("span", {}, figure(number.value)),
    track(number, edges),
    element("span", {}, ends(number), flag(number)),
  ]);
  return element("div", { class: "bars" }, ...rows);
}

/** Tokens of an event, whichever of OpenAI's two shapes it has. */
export function tokensOf(logprobs) {
  if (!logprobs) return null;
  if (logprobs.content) {
    return logprobs.content.map((entry) => ({ text: entry.token, logprob: entry.logprob, top: entry.top_logprobs }));
  }
  return logprobs.tokens.map((text, index) => ({
    text,
    logprob: logprobs.token_logprobs[index],
    top: Object.entries(logprobs.top_logprobs?.[index] || {})
      .map(([token, logprob]) => ({ token, logprob }))
      .sort((one, other) => other.logprob - one.logprob),
  }));
}

/** The longest common subsequence of two lists of tokens, as [kind, text] with kind "same", "gone" or "new". */
export function changes(before, after) {
  const table = Array.from({ length: before.length + 1 }, () => new Uint16Array(after.length + 1));
  for (let i = before.length - 1; i >= 0; i -= 1) {
    for (let j = after.length - 1; j >= 0; j -= 1) {
      table[i][j] = before[i] === after[j] ? table[i + 1][j + 1] + 1 : Math.max(table[i + 1][j], table[i][j + 1]);
    }
  }
  const found = [];
  let [i, j] = [0, 0];
  while (i < before.length || j < after.length) {
    if (i < before.length && j < after.length && before[i] === after[j]) found.push(["same", before[i++], j++]);
    else if (i < before.length && (j === after.length || table[i + 1][j] >= table[i][j + 1])) found.push(["gone", before[i++]]);
    else found.push(["new", after[j++]]);
  }
  return found;
}
