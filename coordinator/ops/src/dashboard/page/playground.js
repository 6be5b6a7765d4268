// A chat through the cluster's API, with its times and token counts.

import { byId, el, say, short, time } from "./dom.js";
import { events, headers, refusal } from "./feed.js";
import { showRequest } from "./requests.js";

const talk = [];
let running = null;

export function offerModels(models) {
  const select = byId("model");
  // Versions of a deployed model are asked for by its name.
  const generating = models.filter(({ task }) => task === null || task === "generate");
  const ids = [...new Set(generating.map(({ id }) => id.split("@")[0]))];
  if ([...select.options].map(({ value }) => value).join() === ids.join()) return;
  const before = select.value;
  select.replaceChildren(...ids.map((id) => el("option", { value: id }, id)));
  if (ids.includes(before)) select.value = before;
}

export function startPlayground({ askForKey, toast }) {
  const form = byId("ask");
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.abort();
    else send(askForKey, toast);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  byId("clear").addEventListener("click", () => {
    running?.abort();
    talk.length = 0;
    byId("talk").replaceChildren();
  });
}

async function send(askForKey, toast) {
  const prompt = byId("prompt");
  const content = prompt.value.trim();
  if (content === "") return;
  talk.push({ role: "user", content });
  const words = el("p");
  const figures = el("small", {}, "waits for a worker");
  const turn = [el("div", { class: "turn user" }, el("p", {}, content)), el("div", { class: "turn assistant" }, words, figures)];
  byId("talk").append(...turn);
  turn[1].scrollIntoView({ block: "nearest" });
  prompt.value = "";
  running = new AbortController();
  say(byId("send"), "Stop");
  const answer = { role: "assistant", content: "" };
  try {
    await stream(answer, words, figures, running.signal);
    talk.push(answer);
  } catch (error) {
    if (error.name === "AbortError") {
      talk.push(answer);
      figures.append(" – stopped");
    } else {
      talk.pop();
      prompt.value = content;
      turn.forEach((node) => node.remove());
      if (error.status === 401 || error.status === 403) askForKey("The API asks for a key.");
      else toast(error.message, true);
    }
  } finally {
    running = null;
    say(byId("send"), "Send");
  }
}

/** `loading, 43 %, ready in 12 s`, from the comment of a stream that waits for a model. */
export function progress(comment) {
  const { state, percent, eta_s: eta } = Object.fromEntries(comment.split(" ").map((pair) => pair.split("=")));
  return [state ?? "waits for a worker", percent && `${percent} %`, eta && `ready in ${time(Number(eta))}`].filter(Boolean).join(", ");
}

async function stream(answer, words, figures, signal) {
  const asked = performance.now();
  const body = { model: byId("model").value, messages: talk, stream: true, stream_options: { include_usage: true }, max_tokens: Number(byId("max-tokens").value) || 256, temperature: Number(byId("temperature").value) };
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body), signal });
  if (!response.ok) throw Object.assign(new Error(await refusal(response)), { status: response.status });
  const [worker, route, name] = ["x-kvasir-worker", "x-kvasir-route", "x-request-id"].map((header) => response.headers.get(header));
  let first = null;
  let usage = null;
  const tell = () => {
    const seconds = (performance.now() - asked) / 1000;
    const rate = usage && first !== null ? `${short((usage.completion_tokens - 1) / Math.max(seconds - first, 1e-3))} tokens/s` : null;
    const cached = usage ? `${usage.prompt_tokens_details?.cached_tokens ?? 0} of ${usage.prompt_tokens} prompt tokens cached` : null;
    const parts = [`${worker ?? "?"} (${/reason=(\w+)/.exec(route ?? "")?.[1] ?? "?"})`, first !== null && `first token ${time(first)}`, rate, cached];
    figures.replaceChildren(parts.filter(Boolean).join(", "), " ", el("button", { type: "button", class: "text", onclick: () => showRequest(name) }, "Why there?"));
  };
  for await (const { event, data } of events(response.body, (text) => first === null && say(figures, progress(text)))) {
    if (event === "error") throw new Error(data?.error?.message ?? "the stream broke off");
    if (data === null) break;
    usage = data.usage ?? usage;
    const text = data.choices?.[0]?.delta?.content;
    if (text) {
      if (first === null) {
        first = (performance.now() - asked) / 1000;
        tell();
      }
      answer.content += text;
      say(words, answer.content);
    }
  }
  tell();
}
