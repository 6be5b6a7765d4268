// Coordinators, workers and the stages of replicas, with the requests and bytes between them.

import { byId, bytes, svg, time } from "./dom.js";
import { nameOf, workersOf } from "./fleet.js";

const [BOX, HEIGHT, GAP, ROW] = [132, 46, 62, 66];
const LEFT = 30;

export function drawTopology({ look }) {
  const parent = byId("topology");
  const { coordinators, replicas } = look.cluster;
  const all = workersOf(look);
  const workers = new Map(all.flatMap((worker) => [...worker.instances, worker]).map((worker) => [worker.id, worker]));
  const instances = new Set(all.flatMap((worker) => worker.instances.map(({ id }) => id)));
  const placed = new Set(replicas.flatMap(({ stages }) => stages.map(({ worker }) => worker)));
  // A model that a worker holds beside others is in the worker's box.
  const lines = replicas.filter(({ stages }) => stages.length > 1 || !instances.has(stages[0].worker)).map(({ model, state, stages }) => ({ model, state, stages }));
  for (const { id, models } of all) if (!placed.has(id)) lines.push({ model: models?.[0] ?? "", state: "free", stages: [{ worker: id, layers: null }] });
  lines.sort((a, b) => a.stages[0].worker.localeCompare(b.stages[0].worker, "en", { numeric: true }));
  const longest = Math.max(1, ...lines.map(({ stages }) => stages.length));
  const rows = Math.max(coordinators.length, lines.length, 1);
  const first = LEFT + BOX + 92;
  const [width, height] = [first + longest * (BOX + GAP), rows * ROW + 8];
  const y = (row, of) => 8 + ((row + 0.5) * rows * ROW) / of - HEIGHT / 2;
  const leader = coordinators.find(({ role }) => role === "leader");
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${coordinators.length} coordinators, ${all.length} workers` });
  const links = svg("g");
  const boxes = svg("g");
  drawing.append(links, boxes);
  coordinators.forEach(({ id, role, term }, row) => {
    const at = y(row, coordinators.length);
    boxes.append(box(LEFT, at, id, `${role}, term ${term}`, `coordinator ${role}`));
    if (leader && id !== leader.id) {
      const to = y(coordinators.indexOf(leader), coordinators.length) + HEIGHT / 2;
      links.append(svg("path", { class: "link quiet", d: `M${LEFT} ${at + HEIGHT / 2}C${LEFT - 26} ${at + HEIGHT / 2} ${LEFT - 26} ${to} ${LEFT} ${to}` }));
    }
  });
  const here = coordinators.findIndex(({ id }) => id === look.coordinator);
  lines.forEach(({ model, state, stages }, row) => {
    const at = y(row, lines.length);
    const middle = at + HEIGHT / 2;
    const head = workers.get(stages[0].worker);
    const busy = head?.inflight > 0;
    const from = y(Math.max(here, 0), coordinators.length) + HEIGHT / 2;
    const start = LEFT + BOX;
    links.append(svg("path", { class: busy ? "link active" : "link", "--width": `${1.2 + Math.min(5, Math.sqrt(head?.inflight ?? 0))}px`, d: `M${start} ${from}C${start + 50} ${from} ${first - 50} ${middle} ${first} ${middle}` }));
    if (busy) boxes.append(text(first - 8, middle - 6, `${head.inflight}`, "flow end"));
    const told = workers.get(stages[0].worker)?.stages ?? [];
    stages.forEach(({ worker, layers }, index) => {
      const x = first + index * (BOX + GAP);
      const known = workers.get(worker);
      const range = layers ? `layers ${layers[0]}–${layers[1]}` : "no layers";
      const held = known?.instances?.map(({ models }) => nameOf(models?.[0])) ?? [];
      const models = [...(model ? [`${model}, ${range}`] : []), ...held];
      const several = held.length > 0 ? `${models.length} models, ` : "";
      const note = stages.length > 1 ? `${range}${state === "serving" ? "" : `, ${state}`}` : known ? `${several}${time(known.queue_s)} ahead` : state;
      boxes.append(box(x, at, worker, note, `worker ${known?.level ?? "out"}`, `${worker}: ${models.join("; ") || "no model"}`));
      if (index > 0) {
        const flows = told.find(({ stage }) => stage === String(index))?.received_per_s;
        links.append(svg("path", { class: flows > 0 ? "link active" : "link", d: `M${x - GAP} ${middle}H${x}` }));
        if (flows > 0) boxes.append(text(x - GAP / 2, middle - 6, `${bytes(flows)}/s`, "flow"));
      }
    });
    const pulls = workers.get(stages[0].worker)?.pulled_per_s;
    if (pulls > 0) boxes.append(text(first + BOX - 6, at + HEIGHT + 12, `pulls ${bytes(pulls)}/s`, "flow end"));
  });
  parent.replaceChildren(drawing);
}

function box(x, y, name, note, style, title) {
  return svg("g", { class: `node ${style}` }, svg("title", {}, title ?? `${name}: ${note}`), svg("rect", { x, y, width: BOX, height: HEIGHT, rx: 9 }), svg("rect", { class: "edge", x, y, width: 5, height: HEIGHT, rx: 2.5 }),
    text(x + 15, y + 20, name.length > 15 ? `${name.slice(0, 14)}…` : name, "id"), text(x + 15, y + 36, note.length > 22 ? `${note.slice(0, 21)}…` : note, "about"));
}

const text = (x, y, what, style) => svg("text", { x, y, class: style }, what);
