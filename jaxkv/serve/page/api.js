// The way to the server: the key, errors, and reading a stream of events. Knows no chat and draws nothing.

const KEY = "jaxkv-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

/** An answer that is an error: its status, code, and the server's own words. */
export class ServerError extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}

// A browser opens six connections to a server, and six more for requests that would carry cookies (there are none). A stream keeps one for as
// long as it lasts, so each sort has five lanes for streams, and looks at the pool always find a way.
const lanes = { omit: 5, "same-origin": 5 };
const queue = [];

async function takeLane(signal) {
  for (;;) {
    const lane = Object.keys(lanes).find((name) => lanes[name] > 0);
    if (lane) {
      lanes[lane] -= 1;
      return lane;
    }
    await new Promise((go, leave) => {
      queue.push(go);
      signal.addEventListener("abort", () => {
        if (queue.includes(go)) queue.splice(queue.indexOf(go), 1);
        leave(signal.reason);
      });
    });
  }
}

function leaveLane(lane) {
  lanes[lane] += 1;
  queue.shift()?.();
}

/** Ask for a path; the response, or a ServerError. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { credentials: "omit", ...options, headers, cache: "no-store" });
  if (response.ok) return response;
  throw await errorOf(response);
}

async function errorOf(response) {
  try {
    const { error } = await response.json();
    return new ServerError(response.status, error.code, error.message);
  } catch {
    return new ServerError(response.status, "unknown", `the server answered with status ${response.status}`);
  }
}

/** Post a body and yield what the stream brings: {comment} or {data}. Leaving the loop ends the request. */
export async function* events(path, body, { signal, id }) {
  const lane = await takeLane(signal);
  try {
    signal.throwIfAborted();
    yield* read(path, body, { signal, id, credentials: lane });
  } finally {
    leaveLane(lane);
  }
}

async function* read(path, body, { signal, id, credentials }) {
  const headers = { "content-type": "application/json", "x-request-id": id };
  const response = await ask(path, { method: "POST", headers, body: JSON.stringify(body), signal, credentials });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith(":")) yield { comment: part.slice(1).trim() };
        else if (part === "data: [DONE]") return;
        else if (part.startsWith("data: ")) yield { data: JSON.parse(part.slice(6)) };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
