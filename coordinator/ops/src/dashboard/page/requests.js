// The last routing decisions, each with its candidates.

import { byId, el, keyed, nothing, put, say, time, whole } from "./dom.js";

const STATES = { prefills: "prefill", decodes: "decode", done: "done", ended: "ended", failed: "failed" };
const REASONS = { prefix: "prefix", load: "load", group: "group", replica: "replica", only: "only one" };

let last = null;
/** Id of a request to open as soon as a picture contains it. */
let wanted = null;
const opened = new Set();

export function startRequests() {
  for (const id of ["find", "only-lost", "only-wrong"]) byId(id).addEventListener("input", () => last && draw(last));
  byId("pause").addEventListener("click", ({ target }) => {
    const held = target.getAttribute("aria-pressed") !== "true";
    target.setAttribute("aria-pressed", held);
    say(target, held ? "Go on" : "Hold still");
    if (!held && last) draw(last);
  });
}

/** Filters the list by the id `name` and opens that request as soon as a picture contains it. */
export function showRequest(name) {
  wanted = name;
  byId("find").value = name;
  if (last) {
    openWanted(last);
    draw(last);
  }
  byId("requests").scrollIntoView({ behavior: "smooth" });
}

function openWanted({ requests }) {
  const found = wanted && [...requests.values()].find(({ request }) => request === wanted);
  if (!found) return;
  opened.add(found.number);
  wanted = null;
}

export function drawRequests(picture) {
  last = picture;
  openWanted(picture);
  if (byId("pause").getAttribute("aria-pressed") !== "true") draw(picture);
}

function draw({ requests }) {
  const find = byId("find").value.trim().toLowerCase();
  const matches = ({ request, tenant, worker, reason, lost, cached, predicted }) =>
    (find === "" || [request, tenant, worker, reason].some((text) => text?.toLowerCase().includes(find))) &&
    (!byId("only-lost").checked || lost !== null) &&
    (!byId("only-wrong").checked || (cached !== null && cached !== predicted));
  const shown = [...requests.values()].filter(matches).sort((a, b) => b.number - a.number);
  const rows = shown.length > 0 ? shown : [{ number: "none", none: true }];
  keyed(byId("decisions"), rows, ({ number }) => number, make, update);
}

function make({ number, none }) {
  if (none) return { nodes: [el("tr", {}, el("td", { colspan: 10 }, nothing("No request of the last 100 is like that.")))] };
  const cell = (label, style) => el("td", { "data-label": label, class: style });
  const row = { at: el("td", { "data-label": "Time" }), button: el("button", { type: "button", class: "open", "aria-expanded": "false", "aria-controls": `why-${number}` }), tenant: cell("Tenant"), worker: cell("Worker"), reason: cell("Reason"), prompt: cell("Prompt", "number"), cached: cell("Cached", "number"), first: cell("First token", "number"), total: cell("Total", "number"), state: cell("State"), detail: el("td", { colspan: 10, id: `why-${number}` }) };
  row.summary = el("tr", { class: "request", "data-request": number }, row.at, el("td", { "data-label": "Request" }, row.button), row.tenant, row.worker, row.reason, row.prompt, row.cached, row.first, row.total, row.state);
  row.details = el("tr", { class: "detail", hidden: true }, row.detail);
  row.button.addEventListener("click", () => {
    if (!opened.delete(number)) opened.add(number);
    draw(last);
  });
  row.nodes = [row.summary, row.details];
  return row;
}

const clock = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

function update(row, request) {
  if (request.none) return;
  const isOpen = opened.has(request.number);
  row.button.setAttribute("aria-expanded", isOpen);
  row.details.hidden = !isOpen;
  if (row.drawn === request && row.wasOpen === isOpen) return;
  [row.drawn, row.wasOpen] = [request, isOpen];
  say(row.at, clock.format(request.at));
  say(row.button, request.request.length > 14 ? `${request.request.slice(0, 12)}…` : request.request);
  row.button.title = request.request;
  say(row.tenant, request.tenant);
  say(row.worker, request.worker ?? "?");
  put(row.reason, el("span", { class: `chip ${request.reason}` }, REASONS[request.reason] ?? request.reason), request.lost && el("span", { class: "chip lost", title: "Another holds more of it" }, `lost: ${request.lost.replace("_", " ")}`));
  say(row.prompt, whole(request.prompt_tokens));
  const wrong = request.cached !== null && request.cached !== request.predicted;
  say(row.cached, request.cached === null ? `~${whole(request.predicted)}` : wrong ? `${whole(request.cached)} (${whole(request.predicted)})` : whole(request.cached));
  row.cached.classList.toggle("warn", wrong);
  row.cached.title = `${request.predicted} predicted, ${request.cached ?? "not known yet"} cached`;
  say(row.first, time(request.started_s));
  say(row.total, time(request.ended_s));
  say(row.state, `${STATES[request.state] ?? request.state}${request.generated === null ? "" : `, ${whole(request.generated)} tok`}`);
  row.state.dataset.state = request.state;
  if (isOpen) row.detail.replaceChildren(explanation(request));
}

function explanation(request) {
  const { candidates, compared } = request;
  const seconds = ({ queue_s: queue, prefill_s: prefill, transfer_s: transfer }) => queue + prefill + transfer;
  const most = Math.max(...candidates.map(seconds), 1e-6);
  const facts = [
    ["Request", request.request], ["Model", request.model], ["Attempt", String(request.attempt + 1)],
    ["Waited for a worker", time(request.waited_s)],
    ["Cached tokens", request.cached === null ? `${whole(request.predicted)} predicted` : `${whole(request.predicted)} predicted, ${whole(request.cached)} actual`],
    request.best && ["Most held by", `${request.best.worker}: ${whole(request.best.tokens)} tokens`],
    request.pull && ["Pulls from", `${request.pull.from}, ${time(request.pull.seconds)}`],
    request.prefill && ["Prompt computed by", request.prefill],
  ].filter(Boolean);
  const row = (candidate) => el("tr", { class: candidate.chosen ? "chosen" : null },
    el("th", { scope: "row" }, candidate.worker ?? "?", candidate.chosen && el("span", { class: "chip" }, "chosen")),
    el("td", { class: "number", "data-label": "Cached" }, whole(candidate.cached)),
    el("td", { class: "number", "data-label": "Queue" }, time(candidate.queue_s)),
    el("td", { class: "number", "data-label": "Prefill" }, time(candidate.prefill_s)),
    el("td", { class: "number", "data-label": "Transfer" }, candidate.pulls_from ? `${time(candidate.transfer_s)} from ${candidate.pulls_from}` : time(candidate.transfer_s)),
    el("td", { class: "number", "data-label": "Cost" }, time(candidate.cost_s)),
    el("td", { class: "parts" }, el("div", { class: "meter", role: "img", "aria-label": `first token after ${time(seconds(candidate))}` },
      ["queue", "prefill", "transfer"].map((part) => el("span", { class: part, "--share": candidate[`${part}_s`] / most })))));
  const heads = ["Candidate", "Cached", "Queue", "Prefill", "Transfer", "Cost"];
  const head = el("tr", {}, heads.map((name, at) => el("th", { scope: "col", class: at > 0 ? "number" : null }, name)), el("th", { scope: "col" }, "Until the first token"));
  return el("div", { class: "explanation" }, el("p", { class: "sentence" }, request.why),
    el("table", { class: "candidates" }, el("thead", {}, head), el("tbody", {}, candidates.map(row))),
    el("p", { class: "legend" }, el("span", { class: "key queue" }, "queue"), el("span", { class: "key prefill" }, "prefill of what is not cached"), el("span", { class: "key transfer" }, "transfer"),
      compared > candidates.length && el("span", {}, `${candidates.length} of ${compared} candidates`), el("span", {}, "Cost weighs the prefill by how busy all are, and what each was given lately.")),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}
