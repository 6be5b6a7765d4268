// Latencies, throughput and locality over time; tenants; prefixes and their holders.

import { Chart } from "./chart.js";
import { bar, byId, el, keyed, nothing, percent, say, short, time, whole } from "./dom.js";

const PERCENTILES = [{ name: "99th", style: "p99" }, { name: "95th", style: "p95" }, { name: "median", style: "p50" }];
const LOST = {
  absent: "Held by nobody",
  load: "Holder had too much to do",
  replica: "Prefix got another holder",
  full: "Holder had no room for requests",
  drain: "Holder drains",
  not_ready: "Holder was not ready",
  silent: "Holder was silent or stuck",
  role: "Holder only prefills",
  declined: "Holder had declined",
};

const charts = {};

function chart(name, options) {
  charts[name] ??= new Chart(byId(`chart-${name}`), options);
  return charts[name];
}

export function drawTraffic({ look, moments, locality, slotSeconds }) {
  const now = look.at;
  for (const name of ["ttft", "itl", "e2e"]) {
    chart(name, { series: PERCENTILES, format: time }).draw(moments.map((moment) => ({ at: moment.at, values: moment[name].toReversed() })), now);
  }
  const each = (count) => count / slotSeconds;
  const ended = filled(moments, now, slotSeconds);
  chart("tokens", { series: [{ name: "generated", style: "p50" }, { name: "of prompts", style: "other" }], format: short })
    .draw(ended.map((moment) => ({ at: moment.at, values: [each(moment.generated ?? 0), each(moment.prompt ?? 0)] })), now);
  chart("requests", { series: [{ name: "ended", style: "p50" }, { name: "refused", style: "warn" }, { name: "failed", style: "bad" }], format: short })
    .draw(ended.map((moment) => ({ at: moment.at, values: [each(moment.done ?? 0), each(moment.shed ?? 0), each(moment.failed ?? 0)] })), now);
  chart("locality", { stacked: true, height: 210, series: [{ name: "used from a cache", style: "full" }, { name: "held elsewhere, lost", style: "warn" }, { name: "held by nobody", style: "absent" }], format: short })
    .draw(filled(locality, now, slotSeconds).map(({ at, predicted = 0, best = 0, prompt = 0 }) => ({ at, values: [each(predicted), each(best - predicted), each(prompt - best)] })), now);
  drawLost(look.locality);
  drawTenants(look);
  drawPrefixes(look);
}

/**
 * Adds points without values, drawn as 0, for slots that the coordinator omitted because nothing happened in
 * them. Drops the current slot, because its partial count would look like a decrease.
 */
function filled(points, now, slotSeconds) {
  const [slot, out] = [1_000 * slotSeconds, []];
  for (const point of points) {
    const before = out.at(-1);
    if (before && point.at - before.at > 1.5 * slot) {
      out.push({ at: before.at + slot });
      if (point.at - before.at > 2.5 * slot) out.push({ at: point.at - slot });
    }
    if (point.at + slot <= now) out.push(point);
  }
  const last = out.at(-1);
  if (last && now - last.at > 2.5 * slot) out.push({ at: last.at + slot }, { at: now });
  return out;
}

function drawLost({ prompt, best, predicted, lost, requests }) {
  const parent = byId("lost");
  if (prompt === 0) return parent.replaceChildren(nothing("No request in the last minute."));
  const reasons = Object.entries({ absent: prompt - best, ...lost }).filter(([, tokens]) => tokens > 0).sort(([, a], [, b]) => b - a);
  const row = (name, tokens, style) => el("div", { class: "reason" }, el("span", {}, name), el("b", {}, percent(tokens / prompt)), bar([{ name: style, share: tokens / prompt }], `${name}: ${whole(tokens)} tokens`), el("small", {}, `${whole(tokens)} tokens`));
  parent.replaceChildren(
    el("p", { class: "note" }, `${whole(requests)} requests, ${whole(prompt)} prompt tokens; ${percent(predicted / prompt)} used from caches of ${percent(best / prompt)} that were held.`),
    row("Used from a cache", predicted, "full"),
    ...reasons.map(([reason, tokens]) => row(LOST[reason] ?? reason, tokens, reason === "absent" ? "absent" : "warn")));
}

const LIMITS = { requests_per_minute: "requests/min", tokens_per_minute: "tokens/min", concurrency: "at a time" };

/** A tenant's use of its limits, over all coordinators; null if it has no limits. */
function drawLimits(limits) {
  const known = Object.entries(limits ?? {}).filter(([, limit]) => limit);
  if (known.length === 0) return null;
  return el("div", { class: "limit" }, known.map(([name, { used, allowed }]) => {
    const share = used / allowed;
    const text = `${whole(used)} of ${whole(allowed)} ${LIMITS[name] ?? name}`;
    return el("div", { class: share >= 1 ? "reached" : "" }, el("small", {}, text), bar([{ name: share >= 1 ? "bad" : share >= 0.8 ? "warn" : "full", share }], text));
  }));
}

function drawTenants({ tenants, cluster }) {
  const parent = byId("tenants");
  const { requests, tokens, inflight } = cluster.queue;
  const line = el("p", { class: "note" }, `${whole(requests)} requests wait (${whole(tokens)} prompt tokens), ${whole(inflight)} are with workers.`);
  if (tenants.length === 0) return parent.replaceChildren(line, nothing("Nobody has asked for anything lately."));
  const all = Math.max(1, tenants.reduce((sum, { placed_tokens: placed }) => sum + placed, 0));
  const sorted = tenants.toSorted((a, b) => b.waiting_tokens - a.waiting_tokens || b.placed_tokens - a.placed_tokens).slice(0, 12);
  const rows = sorted.flatMap(({ tenant, waiting, placed, placed_tokens: tokens, limits }) => {
    const used = drawLimits(limits);
    const row = el("tr", { "data-tenant": tenant }, el("th", { scope: "row" }, tenant), el("td", { class: "number" }, whole(waiting)), el("td", { class: "number" }, whole(placed)), el("td", {}, bar([{ name: "full", share: tokens / all }], `${percent(tokens / all)} of prompt tokens`)));
    return used ? [row, el("tr", { class: "limits" }, el("td", { colspan: 4 }, used))] : [row];
  });
  const head = el("tr", {}, el("th", { scope: "col" }, "Tenant"), el("th", { scope: "col", class: "number" }, "Waiting"), el("th", { scope: "col", class: "number" }, "Placed"), el("th", { scope: "col" }, "Share"));
  parent.replaceChildren(line, el("table", { class: "small" }, el("thead", {}, head), el("tbody", {}, rows)));
}

function drawPrefixes({ prefixes }) {
  const body = byId("prefixes");
  const depth = (at, path = prefixes[at]) => (path.parent === null ? 0 : 1 + depth(path.parent));
  // A path follows the path that it continues.
  const rows = [];
  const add = (parent) => prefixes.forEach((path, at) => {
    if (path.parent !== parent) return;
    rows.push({ ...path, depth: depth(at), key: path.name });
    add(at);
  });
  add(null);
  keyed(body, rows.length > 0 ? rows : [{ key: "none", none: true }], ({ key }) => key, makePrefix, drawPrefix);
}

function makePrefix({ none }) {
  if (none) return { nodes: [el("tr", {}, el("td", { colspan: 5 }, nothing("No two requests of the last five minutes had a prefix in common.")))] };
  const row = { name: el("code"), tokens: el("td", { class: "number", "data-label": "Tokens" }), share: el("td", { "data-label": "Requests" }), held: el("td", { "data-label": "Held by", class: "chips" }), tenants: el("td", { "data-label": "Tenants" }) };
  row.path = el("th", { scope: "row", class: "path" }, row.name);
  row.nodes = [el("tr", {}, row.path, row.tokens, row.share, row.held, row.tenants)];
  return row;
}

function drawPrefix(row, path) {
  if (path.none) return;
  say(row.name, path.name);
  row.path.style.setProperty("--depth", Math.min(path.depth, 6));
  row.path.title = path.model;
  say(row.tokens, whole(path.tokens));
  row.share.replaceChildren(el("div", { class: "reading" }, el("b", {}, whole(path.requests)), bar([{ name: "full", share: path.share }], `${percent(path.share)} of requests`)));
  // Holders of a part are listed only if no worker holds the whole prefix.
  const all = path.holders.filter(({ tokens }) => tokens >= path.tokens);
  const holders = all.length > 0 ? all : path.holders.toSorted((a, b) => b.tokens - a.tokens);
  row.held.replaceChildren(...(holders.length > 0 ? holders.map(({ worker, tokens, held }) => {
    const soon = held < Math.min(tokens, path.tokens);
    return el("span", { class: soon ? "chip soon" : "chip", title: soon ? "computed just now" : "held" }, tokens >= path.tokens ? worker : `${worker} ${percent(tokens / path.tokens)}`);
  }) : [el("small", {}, "nobody any more")]));
  say(row.tenants, path.tenants.join(", "));
}
