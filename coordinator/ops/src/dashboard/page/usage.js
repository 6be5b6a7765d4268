// What tenants and models used: tokens, device time and energy. Unknown values are dashes, never estimates.

import { byId, el, keyed, nothing, put, say, short, time, whole } from "./dom.js";
import { headers, refusal } from "./feed.js";

const EVERY_MS = 10_000;
const SHOWN = 20;
const SUMMED = ["requests", "prompt_tokens", "cached_tokens", "generated_tokens", "attempts", "timed_attempts", "device_s", "energy_j", "energy_device_s"];

/** The last response of the coordinator. */
let latest = { rows: [], total: null, from_unix_s: null };
let timer;

/** Sums of the rows that `wanted` accepts. A value that no row knows is null. */
export function usedBy(wanted) {
  const sums = Object.fromEntries(SUMMED.map((field) => [field, null]));
  for (const row of latest.rows.filter(wanted)) {
    for (const field of SUMMED) if (row[field] !== null) sums[field] = (sums[field] ?? 0) + row[field];
  }
  return sums;
}

/** The covered part of a value, if it is not all of it. */
const covered = (part, whole) => (part !== null && whole > 0 && part < 0.995 * whole ? ` (${Math.round((100 * part) / whole)} %)` : "");

/** `80 ms`, `10 min`, `3.5 h`. */
export const span = (seconds) => (seconds === null || seconds < 120 ? time(seconds) : seconds < 7_200 ? `${Math.round(seconds / 60)} min` : `${short(seconds / 3_600)} h`);

/** Device time, with the share of the attempts of which it is known. */
export const deviceTime = ({ device_s: seconds, attempts, timed_attempts: timed }) => (seconds === null ? "–" : `${span(seconds)}${covered(timed, attempts)}`);

/** Energy, with the share of the device time of which it is known. */
export const energy = ({ energy_j: joules, device_s: seconds, energy_device_s: known }) => (joules === null ? "–" : `${joules < 3.6e5 ? `${short(Math.round(joules))} J` : `${short(joules / 3.6e6)} kWh`}${covered(known, seconds)}`);

/** The selected time in words: `24 h`. */
export const period = () => byId("usage-since").selectedOptions[0].textContent;

async function read(drawn) {
  clearTimeout(timer);
  try {
    const answer = await fetch(`admin/v1/usage?since=${byId("usage-since").value}&by=tenant,model`, { headers: headers(), cache: "no-store" });
    if (!answer.ok) throw new Error(await refusal(answer));
    latest = await answer.json();
    draw();
    drawn();
  } catch (error) {
    say(byId("usage-note"), `Not read: ${error.message}`);
  }
  timer = setTimeout(() => read(drawn), EVERY_MS);
}

/** Reads the usage every ten seconds, and at once for another time. Calls `drawn` after each response. */
export function startUsage(drawn) {
  byId("usage-since").addEventListener("change", () => read(drawn));
  read(drawn);
}

const moment = new Intl.DateTimeFormat([], { dateStyle: "medium", timeStyle: "short" });

function draw() {
  const { rows, total, from_unix_s: from } = latest;
  const sorted = rows.toSorted((a, b) => (b.device_s ?? 0) - (a.device_s ?? 0) || b.generated_tokens - a.generated_tokens || b.requests - a.requests);
  const shown = sorted.slice(0, SHOWN).map((row) => ({ ...row, key: `${row.tenant}\n${row.model}` }));
  const more = rows.length > SHOWN ? `; ${whole(rows.length - SHOWN)} more rows: kvasir usage` : "";
  say(byId("usage-note"), `At all coordinators since ${moment.format(1_000 * from)}${more}. A part in brackets is the part of the work of which a value is known.`);
  const last = rows.length > 1 ? [{ ...total, key: "total", tenant: "total", model: "" }] : [];
  keyed(byId("usage-rows"), rows.length > 0 ? [...shown, ...last] : [{ key: "none", none: true }], ({ key }) => key, make, update);
}

function make({ key, none }) {
  if (none) return { nodes: [el("tr", {}, el("td", { colspan: 8 }, nothing("Nothing was used in this time.")))] };
  const cell = (label) => el("td", { "data-label": label, class: "number" });
  const row = { tenant: el("th", { scope: "row" }), model: el("td", { "data-label": "Model" }), cells: ["Requests", "Prompt tokens", "Cached", "Generated", "Device time", "Energy"].map(cell) };
  row.nodes = [el("tr", { class: key === "total" ? "chosen" : null }, row.tenant, row.model, row.cells)];
  return row;
}

function update(row, used) {
  if (used.none) return;
  say(row.tenant, used.tenant);
  put(row.model, used.model);
  const values = [whole(used.requests), short(used.prompt_tokens), short(used.cached_tokens), short(used.generated_tokens), deviceTime(used), energy(used)];
  values.forEach((value, at) => say(row.cells[at], value));
}
