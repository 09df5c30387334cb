// The public interface of the server, and nothing else: JSON in, JSON or server-sent events out.

let key = sessionStorage.getItem("key") || "";

export function setKey(value) {
  key = value;
  sessionStorage.setItem("key", value);
}

/** What went wrong, as the server says it. */
export class ServerError extends Error {
  constructor(status, error) {
    super(error.message || `the server answered ${status}`);
    this.status = status;
  }
}

async function ask(path, body, signal) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const options = body === undefined ? { headers, signal } : {
    method: "POST",
    headers: { ...headers, "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  };
  const response = await fetch(path, options);
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  throw new ServerError(response.status, answer.error || {});
}

/** The answer to one request. */
export async function answer(path, body, signal) {
  return (await ask(path, body, signal)).json();
}

/** The events of a stream, one object each, until it is done. */
export async function* events(path, body, signal) {
  const response = await ask(path, { ...body, stream: true }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data: ")) continue;
        const data = line.slice(6);
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ServerError(0, event.error);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
