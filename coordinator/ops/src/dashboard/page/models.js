// The models: state, workers, versions, traffic and use.

import { bar, byId, bytes, el, keyed, nothing, percent, put, say, short, time, whole } from "./dom.js";
import { deviceTime, energy, period, span, usedBy } from "./usage.js";

const WORDS = { bad_file: "bad file" };
const LEVELS = { ready: "normal", fetching: "busy", loading: "busy", waking: "busy", failed: "stuck", bad_file: "stuck" };
/** States with progress. */
const LOADS = ["fetching", "loading", "waking"];
/** A version is shown in the state of the worker where it is furthest. */
const FURTHEST = ["ready", "waking", "loading", "fetching", "failed", "bad_file", "asleep", "absent"];

let last = null;

/** Draws the models again after another look or another response about usage. `look`: null for the last one. */
export function drawModels(look) {
  last = look ?? last;
  if (!last) return;
  say(byId("models-used"), `Used, ${period()}`);
  const rows = [...configured(last), ...last.cluster.deployments.flatMap((deployment) => deployed(deployment, last.models))];
  keyed(byId("models-rows"), rows.length > 0 ? rows : [{ key: "none", none: true }], ({ key }) => key, make, update);
}

const traffic = (rates, ids) => {
  const known = rates.filter(({ id }) => ids.includes(id));
  const sum = (field) => known.reduce((all, rate) => (rate[field] === null ? all : (all ?? 0) + rate[field]), null);
  return { requests: sum("requests_per_s"), tokens: sum("generated_per_s") };
};

/** Models of the coordinator's own configuration, which workers were started with. */
function configured({ cluster, models }) {
  const names = cluster.models.map(({ id }) => id).filter((id) => !id.includes("@"));
  return names.map((id) => {
    const replicas = cluster.replicas.filter(({ model }) => model === id);
    const serving = replicas.filter(({ state }) => state === "serving");
    const chips = replicas.map(({ state, stages }) => ({ text: stages.map(({ worker }) => worker).join(" → "), title: state }));
    return { key: id, name: id, about: "started with its workers", state: serving.length > 0 ? "ready" : (replicas[0]?.state ?? "absent"), chips, ...traffic(models, [id]), used: usedBy(({ model }) => model === id) };
  });
}

/** A deployment and, if there are several, its versions. */
function deployed(deployment, rates) {
  const { model, versions, rollout } = deployment;
  const active = versions.find(({ active }) => active);
  const ids = versions.map(({ id }) => id);
  const total = (field) => versions.reduce((sum, version) => sum + version[field], 0);
  const whole = { key: model, name: model, about: settings(deployment, active), paths: paths(versions), state: deployment.state, progress: deployment.progress, eta: deployment.eta_s, reason: deployment.reason, waiting: deployment.waiting, chips: workers(active), ...traffic(rates, ids), ended: { requests: total("requests"), errors: total("errors"), ttft: active?.ttft_p50_s ?? null }, used: usedBy(({ model: name }) => name.split("@")[0] === model) };
  if (deployment.last_rollout) whole.note = `last rollout: ${deployment.last_rollout}`;
  if (versions.length < 2) return [whole];
  return [whole, ...versions.map((version) => {
    const { id, version: number, digest, workers: places, failed, requests, errors, ttft_p50_s: ttft } = version;
    const best = FURTHEST.map((state) => places.find((place) => place.state === state)).find(Boolean);
    return { key: `${model}#${number}`, of: model, name: digest?.slice(0, 12) ?? "not read yet", role: role(version, rollout, active), about: source(version), paths: paths([version]), state: failed ? "bad_file" : (best?.state ?? "absent"), progress: best?.progress, eta: best?.eta_s, reason: failed || best?.reason, chips: workers(version), ...traffic(rates, [id]), ended: { requests, errors, ttft }, used: usedBy(({ model: name }) => name === id) };
  })];
}

function role({ version, active, rolled_back: back }, rollout, serving) {
  if (active) return "active";
  if (rollout?.version === version) return rollout.canary ? `canary ${short(rollout.canary.permille / 10)} %` : "rolled out";
  return back ? "rolled back" : version < (serving?.version ?? 0) ? "before" : "kept";
}

/** The file's or folder's name, or the address. */
const source = ({ source }) => source.file?.split("/").at(-1) ?? source.fetch;
const paths = (versions) => versions.map(({ source }) => source.file ?? source.fetch).join("\n");

function settings({ min, max, idle_s: idle, pin, nodes, priority, context, engine }, active) {
  const parts = [active && source(active), engine !== "kvasir" && `engine ${engine}`, min === max ? `${whole(max)} replicas` : `${whole(min)} to ${whole(max)} replicas`, idle > 0 ? `sleeps after ${span(idle)}` : "never sleeps", pin && "pinned", nodes.length > 0 && `on ${nodes.join(", ")}`, context > 0 && `context ${whole(context)}`, priority !== 1 && `priority ${whole(priority)}`];
  return parts.filter(Boolean).join("; ");
}

/** The workers that have a version in some state. A replica over several is shown at its first one. */
function workers(version) {
  const there = (version?.workers ?? []).filter(({ state, wanted }) => wanted || state !== "absent");
  return there.map(({ worker, state, progress, bytes: held, failures, reason }) => {
    const stages = (version.stages ?? []).find(([first]) => first?.worker === worker) ?? [{ worker }];
    const now = state === "ready" ? "" : ` ${WORDS[state] ?? state}${progress === null || !LOADS.includes(state) ? "" : ` ${Math.round(progress)} %`}`;
    const ranges = stages.length > 1 && stages.map(({ worker, layers }) => `${worker}: layers ${layers[0]}–${layers[1]}`).join(", ");
    const title = [ranges, held > 0 && `holds ${bytes(held)}`, failures > 0 && `${whole(failures)} failed attempts`, reason].filter(Boolean).join("; ");
    return { text: `${stages.map(({ worker }) => worker).join(" → ")}${now}`, title, lost: state === "failed" || state === "bad_file" };
  });
}

function make({ key, of, none }) {
  if (none) return { nodes: [el("tr", {}, el("td", { colspan: 7 }, nothing("No model is served: kvasir models deploy NAME --from MODEL.")))] };
  const number = (label, ...children) => el("td", { "data-label": label, class: "number" }, el("div", { class: "stack" }, children));
  const parts = ["name", "role", "about", "note", "state", "progress", "eta", "reason", "chips", "requests", "waiting", "tokens", "ended", "ttft", "device", "energy", "tokensUsed"];
  const tags = { name: of ? "code" : "b", state: "span", role: "span", progress: "div", chips: "div", requests: "b", tokens: "b", ended: "b", device: "b" };
  const row = Object.fromEntries(parts.map((part) => [part, el(tags[part] ?? "small")]));
  row.state.className = "level";
  row.role.className = "chip";
  row.chips.className = "chips";
  row.row = el("tr", { "data-model": of ? null : key, "data-version": of ? key : null, class: of ? "version" : null },
    el("th", { scope: "row" }, el("div", { class: "name" }, row.name, row.role), row.about, row.note),
    el("td", { "data-label": "State" }, el("div", { class: "stack" }, el("div", { class: "name" }, row.state, row.eta), row.progress, row.reason)),
    el("td", { "data-label": "Workers" }, row.chips),
    number("Requests/s", row.requests, row.waiting),
    number("Tokens/s", row.tokens),
    number("Requests", row.ended, row.ttft),
    number("Used", row.device, row.energy, row.tokensUsed));
  row.nodes = [row.row];
  return row;
}

function update(row, model) {
  if (model.none) return;
  say(row.name, model.name);
  say(row.role, model.role ?? "");
  row.role.hidden = !model.role;
  say(row.about, model.about);
  row.about.title = model.paths ?? "";
  say(row.note, model.note ?? "");
  row.row.dataset.state = model.state;
  row.state.dataset.level = LEVELS[model.state] ?? "out";
  say(row.state, WORDS[model.state] ?? model.state);
  const loads = LOADS.includes(model.state) && typeof model.progress === "number";
  say(row.eta, [loads && percent(model.progress / 100), typeof model.eta === "number" && `ready in ${time(model.eta)}`].filter(Boolean).join(", "));
  put(row.progress, loads && bar([{ name: "queue", share: model.progress / 100 }], `${model.name}: ${model.state}, ${percent(model.progress / 100)}`));
  say(row.reason, model.reason ?? "");
  row.reason.classList.toggle("bad", LEVELS[model.state] === "stuck");
  put(row.chips, model.chips.length > 0 ? model.chips.map(({ text, title, lost }) => el("span", { class: lost ? "chip lost" : "chip", title }, text)) : el("small", {}, "nowhere"));
  say(row.requests, short(model.requests));
  say(row.waiting, model.waiting > 0 ? `${whole(model.waiting)} waiting` : "");
  say(row.tokens, short(model.tokens));
  const { requests, errors, ttft } = model.ended ?? {};
  say(row.ended, model.ended ? short(requests) : "–");
  say(row.ttft, requests > 0 ? `${errors > 0 ? `${whole(errors)} failed (${short((100 * errors) / requests)} %), ` : ""}first token ${time(ttft)}` : "");
  row.ttft.classList.toggle("bad", errors > 0);
  const { used } = model;
  const nothingUsed = used.requests === null;
  say(row.device, nothingUsed ? "–" : deviceTime(used));
  say(row.energy, nothingUsed ? "" : used.energy_j === null ? "energy unknown" : energy(used));
  say(row.tokensUsed, nothingUsed ? "" : `${short(used.prompt_tokens)} prompt, ${short(used.generated_tokens)} generated`);
}
