// A request as code that makes it again: Python with the openai package, or curl.

const KNOWN = new Set(["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "n", "seed", "stop", "logprobs", "top_logprobs"]);

function python(value, indent = "") {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (Array.isArray(value)) return `[${value.map((one) => python(one, indent)).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([key, one]) => `${JSON.stringify(key)}: ${python(one, indent)}`).join(", ")}}`;
  }
  return JSON.stringify(value);
}

/** Python that makes the request and prints its answer. */
export function asPython({ path, body }, origin) {
  const chat = path.endsWith("/chat/completions");
  if (!chat && !path.endsWith("/completions")) {
    return `import httpx\n\nanswer = httpx.post(\n    "${origin}${path}",\n    json=${python(body)},\n    timeout=600,\n).json()\nprint(answer)\n`;
  }
  const known = Object.entries(body).filter(([name]) => KNOWN.has(name));
  const ours = Object.fromEntries(Object.entries(body).filter(([name]) => !KNOWN.has(name)));
  const lines = known.map(([name, value]) => `    ${name}=${python(value)},`);
  if (Object.keys(ours).length) lines.push(`    extra_body=${python(ours)},`);
  const call = chat ? "chat.completions" : "completions";
  const text = chat ? "choice.message.content" : "choice.text";
  return [
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${origin}/v1", api_key="none")`,
    `answer = client.${call}.create(`,
    ...lines,
    ")",
    "for choice in answer.choices:",
    `    print(${text})`,
    "",
  ].join("\n");
}

/** A line for a shell that makes the request. */
export function asCurl({ path, body }, origin) {
  const data = JSON.stringify(body).replaceAll("'", "'\\''");
  return `curl ${origin}${path} -H 'Content-Type: application/json' -d '${data}'\n`;
}
