// The workers, hottest first, with their load and the contents of their caches.

import { bar, byId, bytes, el, keyed, nothing, percent, say, short, time, whole } from "./dom.js";

const ORDER = ["stuck", "hot", "busy", "normal", "out", "idle"];
const WORDS = { idle: "idle", normal: "works", busy: "busy", out: "out", hot: "hot", stuck: "stuck" };
const POOLS = { full: "Full KV", sliding: "Sliding window", state: "Recurrent state", host: "Host memory tier", disk: "Disk tier" };

/** Hottest first. Heat is rounded, so that workers of similar heat keep their order between updates. */
function byHeat(a, b) {
  return ORDER.indexOf(a.level) - ORDER.indexOf(b.level) || Math.round(5 * b.heat) - Math.round(5 * a.heat) || a.id.localeCompare(b.id, "en", { numeric: true });
}

/**
 * The workers of a look, each with its `instances`: the models that it holds beside its own. Load and caches of a worker
 * are those of all its models; level and reason are of the hottest one.
 */
export function workersOf({ cluster, workers }) {
  const known = new Map(cluster.workers.map((worker) => [worker.id, worker]));
  const all = workers.map((worker) => ({ ...known.get(worker.id), ...worker }));
  const there = new Set(all.map(({ id }) => id));
  const isInstance = ({ instance_of: of }) => there.has(of);
  return all.filter((worker) => !isInstance(worker)).map((worker) => withInstances(worker, all.filter((other) => other.instance_of === worker.id)));
}

function withInstances(worker, found) {
  if (found.length === 0) return { ...worker, instances: [] };
  const instances = found.toSorted((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
  const parts = [worker, ...instances];
  const sum = (of) => parts.reduce((all, part) => all + (of(part) ?? 0), 0);
  const hottest = parts.toSorted(byHeat)[0];
  const [model] = hottest.models ?? [];
  return {
    ...worker,
    instances,
    level: hottest.level,
    heat: hottest.heat,
    why: hottest === worker || hottest.level === "idle" ? worker.why : `${nameOf(model)}: ${hottest.why}`,
    hottest: hottest.hottest ?? worker.hottest,
    queue_s: Math.max(...parts.map(({ queue_s: queue }) => queue)),
    sequences: sum((part) => part.sequences),
    waiting: sum((part) => part.waiting),
    inflight: sum((part) => part.inflight),
    pending_tokens: sum((part) => part.pending_tokens),
    // The worker's own metrics contain those of its instances.
    kv: { ...worker.kv, used: sum(({ kv }) => kv.used), total: sum(({ kv }) => kv.total) },
  };
}

/** A model without the digest of its version. */
export const nameOf = (model) => model?.split("@")[0] ?? "no model";

/**
 * Order of the rows: hottest first. While a button has keyboard focus or the pointer is over the buttons, the
 * order is kept. Otherwise a row that moves would lose the focus, Tab would skip a worker, and a click could
 * hit another worker's button.
 */
function order(body) {
  if (!body.querySelector(":focus-visible, .actions:hover")) return byHeat;
  const places = new Map([...body.children].map((row, place) => [row.dataset.worker, place]));
  const place = ({ id }) => places.get(id) ?? places.size;
  return (a, b) => place(a) - place(b) || byHeat(a, b);
}

export function drawFleet({ look }, drain) {
  const body = byId("workers");
  const workers = workersOf(look).sort(order(body));
  body.classList.toggle("none", workers.length === 0);
  const rows = workers.flatMap((worker) => [worker, ...worker.instances]);
  keyed(body, rows, ({ id }) => id, (worker) => makeRow(worker, drain), drawRow);
  drawPools(workers);
  drawShipping(look.cluster.shipping);
}

function makeRow({ id, instances }, drain) {
  const whole = instances !== undefined;
  const cell = (label, ...children) => el("td", { "data-label": label }, children);
  const row = { level: el("span", { class: "level" }), about: el("small"), load: el("span", { class: "fill" }), queue: el("b"), does: el("small"), kv: el("div"), kvText: el("small"), rate: el("b"), prefill: el("small"), prefix: el("code"), prefixText: el("small"), why: el("span"), gpu: el("small"), button: el("button", { type: "button", class: "quiet" }) };
  row.button.addEventListener("click", () => drain(id, !row.draining));
  row.meter = el("div", { class: "gauge", role: "img" }, row.load);
  row.name = el(whole ? "b" : "span", {}, id);
  row.row = el("tr", whole ? { "data-worker": id } : { "data-instance": id, class: "instance" },
    el("th", { scope: "row" }, el("div", { class: "name" }, row.name, row.level), row.about),
    cell("Work ahead", el("div", { class: "stack" }, el("div", { class: "reading" }, row.queue, row.meter), row.does)),
    cell("KV cache", el("div", { class: "stack" }, row.kv, row.kvText)),
    el("td", { "data-label": "Tokens/s", class: "number" }, el("div", { class: "stack" }, row.rate, row.prefill)),
    cell("Hottest prefix", el("div", { class: "stack" }, row.prefix, row.prefixText)),
    el("td", { "data-label": "Why", class: "why" }, el("div", { class: "stack" }, row.why, row.gpu)),
    el("td", { class: "actions" }, whole && row.button));
  row.nodes = [row.row];
  return row;
}

function drawRow(row, worker) {
  row.row.dataset.level = worker.level;
  say(row.level, WORDS[worker.level]);
  row.level.dataset.level = worker.level;
  const instance = worker.instances === undefined;
  if (instance) say(row.name, nameOf(worker.models?.[0]));
  const role = worker.role && worker.role !== "both" ? `${worker.role}, ` : "";
  const layers = worker.layers ? `layers ${worker.layers[0]}–${worker.layers[1]}` : "no layers";
  const offers = (worker.operations ?? []).map(({ operation, model, sessions }) => `${operation} (${model}${sessions > 0 ? `, ${whole(sessions)} open` : ""})`);
  const own = worker.models?.length > 0 || !worker.host ? `${role}${worker.models?.join(", ") || worker.encodes || "no model"}, ${layers}` : null;
  const more = instance ? [] : [worker.instances.length > 0 && `${whole(worker.instances.length)} deployed`, worker.host && `${worker.host.used === null ? "" : `${bytes(worker.host.used)} of `}${bytes(worker.host.budget)} for models`, worker.host && worker.host.engine !== "kvasir" && `engine ${worker.host.engine}`, worker.host?.labels.join(", ")];
  say(row.about, instance ? `instance ${worker.id}, ${layers}` : [own, ...more, ...offers].filter(Boolean).join("; "));
  row.row.title = worker.numeric_class ?? "";
  say(row.queue, time(worker.queue_s));
  row.load.style.setProperty("--share", worker.heat);
  row.meter.setAttribute("aria-label", `work ahead ${time(worker.queue_s)}`);
  const kinds = [[worker.sequences - worker.waiting, "running"], [worker.waiting, "queued"], [worker.pending_tokens, "tokens to compute"]];
  say(row.does, kinds.filter(([count]) => count > 0).map(([count, what]) => `${whole(count)} ${what}`).join(", ") || "nothing");
  const { used, total, groups_used: groups } = worker.kv;
  const named = Object.entries(groups).map(([name, count]) => ({ name, share: count / total }));
  const parts = named.length > 0 ? named : [{ name: "full", share: used / total }];
  row.kv.replaceChildren(bar(total > 0 ? parts : [], `KV cache ${percent(total > 0 ? used / total : 0)} in use`));
  say(row.kvText, total > 0 ? `${percent(used / total)} of ${bytes(total)}` : "none");
  say(row.rate, short(worker.generated_per_s));
  say(row.prefill, `${short(worker.prefilled_per_s)} prefill`);
  const hottest = worker.hottest;
  say(row.prefix, hottest ? hottest.prefix : "–");
  say(row.prefixText, hottest ? `${percent(hottest.share)} of its requests, ${whole(hottest.tokens)} tokens` : "no prefix in common");
  say(row.why, worker.why);
  say(row.gpu, gpuText(worker.gpu));
  row.gpu.classList.toggle("warn", worker.gpu?.slowed_by.length > 0 || worker.gpu?.unreadable > 0);
  row.draining = worker.draining;
  say(row.button, worker.draining ? "Undrain" : "Drain");
  row.button.setAttribute("aria-label", `${worker.draining ? "Undrain" : "Drain"} ${worker.id}`);
}

/** Power and temperature of a worker's GPUs, and the faults that slow them. */
function gpuText(gpu) {
  if (!gpu) return "";
  const { power_w: power, temperature_c: temperature, slowed_by: slowed, unreadable } = gpu;
  const parts = [power !== null && `${whole(power)} W`, temperature !== null && `${whole(temperature)} °C`, slowed.length > 0 && `slowed by ${slowed.join(", ")}`, unreadable > 0 && `${whole(unreadable)} unreadable`];
  return `GPU: ${parts.filter(Boolean).join(", ") || "no values"}`;
}

function drawPools(workers) {
  const parent = byId("pools");
  const shown = workers.filter(({ kv }) => kv.total > 0).sort((a, b) => a.id.localeCompare(b.id, "en", { numeric: true }));
  if (shown.length === 0) return parent.replaceChildren(nothing("No worker has a cache."));
  const kinds = new Set(shown.flatMap(({ kv }) => [...Object.keys(kv.groups), ...Object.keys(kv.tiers).filter((tier) => kv.tiers[tier] > 0)]));
  const legend = [...kinds].map((kind) => el("span", { class: `key ${kind}` }, POOLS[kind] ?? kind));
  legend.push(el("span", { class: "key cached" }, "cached, free to be taken"));
  const rows = shown.map(({ id, kv }) => {
    const live = Object.entries(kv.groups_used).map(([name, count]) => ({ name, share: count / kv.total, count }));
    const owned = Object.values(kv.groups).reduce((sum, count) => sum + count, 0);
    const used = live.reduce((sum, { count }) => sum + count, 0);
    const parts = live.length > 0 ? live : [{ name: "full", share: kv.used / kv.total, count: kv.used }];
    const cached = Math.max(0, owned - used);
    const text = [...parts.map(({ name, count }) => `${POOLS[name] ?? name} ${bytes(count)}`), `cached ${bytes(cached)}`, `of ${bytes(kv.total)}`].join(", ");
    const tiers = Object.entries(kv.tiers).filter(([, count]) => count > 0).map(([name, count]) => el("small", { class: `key ${name}` }, `${POOLS[name] ?? name} ${bytes(count)}`));
    return el("div", { class: "pool" }, el("b", {}, id), bar([...parts, { name: "cached", share: cached / kv.total }], `${id}: ${text}`), el("small", {}, text), tiers);
  });
  parent.replaceChildren(el("p", { class: "legend" }, legend), ...rows);
}

function drawShipping(shipping) {
  byId("shipping-card").hidden = shipping.length === 0;
  byId("shipping").replaceChildren(...shipping.map(({ worker, wanted_bytes: wanted, present_bytes: present, struck }) => {
    const share = wanted > 0 ? present / wanted : 1;
    const text = share >= 1 ? `has its model, ${bytes(wanted)}` : `${percent(share)}: ${bytes(present)} of ${bytes(wanted)}`;
    return el("div", { class: "pool" }, el("b", {}, worker), bar([{ name: "full", share }], `${worker} ${text}`), el("small", {}, text),
      struck.length > 0 && el("small", { class: "warn" }, `was sent wrong bytes by ${struck.join(", ")}`));
  }));
}
