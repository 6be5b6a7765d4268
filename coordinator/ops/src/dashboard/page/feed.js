// The coordinator's event stream: first an event with the history, then one event each second. `picture` is
// the state that all sections are drawn from.

const KEEPS_MS = 300_000;
const KEPT_REQUESTS = 100;

/** The API key of all requests. It is stored until the tab is closed. */
export const key = {
  get: () => sessionStorage.getItem("key") ?? "",
  set: (value) => (value ? sessionStorage.setItem("key", value) : sessionStorage.removeItem("key")),
};

export function headers(more = {}) {
  return key.get() ? { ...more, authorization: `Bearer ${key.get()}` } : more;
}

/** Returns the error message of a response. */
export async function refusal(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text.trim() || `the coordinator answered ${answer.status}`;
  }
}

/** Current data of the dashboard. */
export const picture = { look: null, requests: new Map(), moments: [], locality: [], slotSeconds: 2, held: false };

/**
 * Reads the event stream and reconnects forever. Calls `drawn` with the picture after each event. Calls
 * `state` with the state of the connection: `live`, `lost` or `locked` (a key is needed).
 */
export async function follow(drawn, state) {
  for (let wait = 500; ; wait = Math.min(wait * 2, 8_000)) {
    try {
      const answer = await fetch("admin/v1/dashboard/events", { headers: headers(), cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        state("locked", await refusal(answer));
        await changed();
        wait = 250;
        continue;
      }
      if (!answer.ok) throw new Error(await refusal(answer));
      for await (const { event, data } of events(answer.body)) {
        if (event === "begin") begin(data);
        else take(data);
        state("live");
        wait = 250;
        if (picture.look) drawn(picture);
      }
      throw new Error("the coordinator ended the connection");
    } catch (error) {
      state("lost", error.message);
    }
    await new Promise((done) => setTimeout(done, wait));
  }
}

let keyChanged = () => {};
const changed = () => new Promise((done) => (keyChanged = done));

/** Stores another key and reconnects with it. */
export function useKey(value) {
  key.set(value.trim());
  keyChanged();
}

/** Parses the server-sent events of a response body. Calls `comment` with the text of each comment. */
export async function* events(body, comment = () => {}) {
  let text = "";
  for await (const chunk of pieces(body)) {
    text += chunk;
    for (let end = text.indexOf("\n\n"); end >= 0; end = text.indexOf("\n\n")) {
      const lines = text.slice(0, end).split("\n");
      text = text.slice(end + 2);
      const field = (name) => lines.find((line) => line.startsWith(`${name}: `))?.slice(name.length + 2);
      const data = field("data");
      lines.filter((line) => line.startsWith(": ")).forEach((line) => comment(line.slice(2)));
      if (data === undefined) continue;
      yield { event: field("event") ?? "message", data: data === "[DONE]" ? null : JSON.parse(data) };
    }
  }
}

async function* pieces(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function begin({ requests, history, slot_s }) {
  picture.requests = new Map();
  picture.moments = [];
  picture.locality = [];
  picture.slotSeconds = slot_s;
  takeRequests(requests);
  takeHistory(history);
}

function take(look) {
  takeRequests(look.requests);
  takeHistory(look.history);
  picture.look = look;
}

function takeRequests(requests) {
  for (const request of requests) picture.requests.set(request.number, request);
  const numbers = [...picture.requests.keys()].sort((a, b) => a - b);
  for (const number of numbers.slice(0, -KEPT_REQUESTS)) picture.requests.delete(number);
}

function takeHistory({ requests, locality }) {
  for (const point of requests) upsert(picture.moments, point);
  for (const point of locality) upsert(picture.locality, point);
}

/**
 * Adds a point, or replaces the point of the same time slot. The coordinator repeats a slot while it fills
 * up. The times of one slot differ by a few milliseconds.
 */
function upsert(line, point) {
  const at = line.findIndex((known) => Math.abs(known.at - point.at) < 1_000 * picture.slotSeconds / 2);
  if (at >= 0) line[at] = point;
  else line.push(point);
  while (line.length > 0 && line[0].at < point.at - KEEPS_MS) line.shift();
}
