// The dashboard: draws all its sections from each message of the coordinator, once a second.

import { byId, el, keyed, percent, say, short, time, whole } from "./dom.js";
import { follow, headers, key, refusal, useKey } from "./feed.js";
import { drawFleet } from "./fleet.js";
import { drawGroup } from "./group.js";
import { drawModels } from "./models.js";
import { offerModels, startPlayground } from "./playground.js";
import { drawRequests, startRequests } from "./requests.js";
import { drawTopology } from "./topology.js";
import { drawTraffic } from "./traffic.js";
import { startUsage } from "./usage.js";

const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  localStorage.setItem("theme", theme);
  const button = byId("theme");
  say(button, THEMES[theme]);
  button.setAttribute("aria-label", `Theme: ${THEMES[theme]}`);
}

function startTheme() {
  const known = localStorage.getItem("theme");
  setTheme(known in THEMES ? known : "auto");
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    setTheme(names[(names.indexOf(localStorage.getItem("theme")) + 1) % names.length]);
  });
}

function startKey() {
  const dialog = byId("key-dialog");
  byId("key").addEventListener("click", () => askForKey());
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "use") useKey(byId("key-value").value);
    byId("key-value").value = "";
  });
}

/** Opens the dialog for a key. `note`: the reason, shown in the dialog. */
export function askForKey(note) {
  if (note) say(byId("key-note"), note);
  byId("key-value").value = key.get();
  const dialog = byId("key-dialog");
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
}

let toasting;

/** Shows a message for 5 s. */
export function toast(text, bad = false) {
  const node = byId("toast");
  say(node, text);
  node.classList.toggle("bad", bad);
  node.hidden = false;
  clearTimeout(toasting);
  toasting = setTimeout(() => (node.hidden = true), 5_000);
}

function confirmDrain(worker) {
  const dialog = byId("drain-dialog");
  say(byId("drain-title"), `Drain ${worker}?`);
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((done) => dialog.addEventListener("close", () => done(dialog.returnValue === "drain"), { once: true }));
}

/** Drains a worker after a confirmation, or ends its drain. */
export async function drain(worker, draining) {
  if (draining && !(await confirmDrain(worker))) return;
  const order = draining ? "drain" : "undrain";
  try {
    const answer = await fetch(`admin/v1/workers/${encodeURIComponent(worker)}/${order}`, { method: "POST", headers: headers() });
    if (answer.status === 401 || answer.status === 403) return askForKey("Draining takes an administrator's key.");
    if (!answer.ok) throw new Error(await refusal(answer));
    toast(draining ? `${worker} takes no new work.` : `${worker} takes work.`);
  } catch (error) {
    toast(`${worker}: ${error.message}`, true);
  }
}

const LIVE = { live: "live", lost: "lost", locked: "locked" };

function connection(state, why) {
  const node = byId("live");
  node.dataset.state = state;
  say(node, LIVE[state]);
  node.title = why ?? "A look each second";
  if (state === "live") return;
  if (state === "locked") {
    say(byId("verdict-text"), "An administrator's key is needed to look at this cluster from here.");
    byId("verdict").dataset.level = "waiting";
    askForKey();
  } else {
    say(byId("verdict-text"), `The coordinator cannot be reached: ${why}. What is below is as it was last.`);
    byId("verdict").dataset.level = "stuck";
  }
}

function drawFigures({ look }) {
  const { latency, locality, cluster } = look;
  const perSecond = (count) => count / latency.window_s;
  const figures = [
    ["First token", time(latency.ttft.p95), `95th; median ${time(latency.ttft.p50)}`],
    ["Between tokens", time(latency.itl.p95), `95th; median ${time(latency.itl.p50)}`],
    ["Requests/s", short(perSecond(latency.done)), `${whole(cluster.queue.inflight)} with workers`],
    ["Tokens/s", short(perSecond(latency.generated)), "generated"],
    ["Cache hits", percent(locality.prompt > 0 ? locality.predicted / locality.prompt : null), `of ${percent(locality.prompt > 0 ? locality.best / locality.prompt : null)} held somewhere`],
    ["Waiting", whole(cluster.queue.requests), `${whole(cluster.queue.tokens)} prompt tokens`],
    ["Refused", whole(latency.shed + latency.failed), latency.failed > 0 ? `${latency.failed} failed` : "in the last minute"],
  ];
  keyed(
    byId("figures"),
    figures,
    ([name]) => name,
    ([name]) => {
      const [value, note] = [el("dd", { class: "value" }), el("dd", { class: "note" })];
      return { nodes: [el("div", { class: "figure" }, el("dt", {}, name), value, note)], value, note };
    },
    (row, [, value, note]) => {
      say(row.value, value);
      say(row.note, note);
    },
  );
}

function drawn(picture) {
  const { look } = picture;
  say(byId("coordinator"), look.coordinator);
  byId("verdict").dataset.level = look.verdict.level;
  say(byId("verdict-text"), look.verdict.text);
  document.title = `${look.verdict.level === "hot" || look.verdict.level === "stuck" ? "● " : ""}Kvasir ${look.coordinator}`;
  drawFigures(picture);
  drawFleet(picture, drain);
  drawTopology(picture);
  drawModels(look);
  drawTraffic(picture);
  drawRequests(picture);
  drawGroup(picture);
  offerModels(look.cluster.models);
}

startTheme();
startKey();
startRequests();
startUsage(() => drawModels(null));
startPlayground({ askForKey, toast });
follow(drawn, connection);
