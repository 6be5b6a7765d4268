// The coordinators' Raft group, and this coordinator's prefix index.

import { bar, byId, bytes, el, nothing, percent, whole } from "./dom.js";

const cell = (text, style) => el("td", { class: style }, text);
const heads = (names) => el("thead", {}, el("tr", {}, names.map(([name, style]) => el("th", { scope: "col", class: style }, name))));

export function drawGroup({ look }) {
  drawRaft(look);
  drawIndex(look);
}

function drawRaft({ cluster, raft, coordinator }) {
  const leader = cluster.coordinators.find(({ role }) => role === "leader");
  const state = !raft ? "This coordinator keeps nothing over a restart and decides alone." : raft.quorum ? `${leader?.id ?? "A leader"} leads in term ${raft.term}; ${whole(raft.committed)} entries agreed on.` : "No leader is known: requests are served, changes are refused.";
  const committed = raft ? raft.committed : Math.max(...cluster.coordinators.map(({ applied }) => applied));
  const rows = cluster.coordinators.map(({ id, role, term, applied }) => el("tr", { class: role === "leader" ? "chosen" : null }, el("th", { scope: "row" }, id, id === coordinator && el("span", { class: "chip" }, "here")), cell(role), cell(whole(term), "number"), cell(whole(applied), "number"), cell(whole(Math.max(0, committed - applied)), "number")));
  const facts = raft ? [["Voters", whole(raft.voters)], ["May be lost", whole(Math.max(0, Math.ceil(raft.voters / 2) - 1))], ["Learners", whole(raft.learners)], ["Leaders seen", whole(raft.leader_changes)], ["Log", `${whole(raft.log_entries)} entries, ${bytes(raft.log_bytes)}`], ["Disk", raft.disk_full ? "full" : "has room"]] : [];
  byId("raft").replaceChildren(el("p", { class: raft && !raft.quorum ? "note bad" : "note" }, state),
    el("table", { class: "small" }, heads([["Coordinator"], ["Role"], ["Term", "number"], ["Applied", "number"], ["Commit lag", "number"]]), el("tbody", {}, rows)),
    el("dl", { class: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}

function drawIndex({ cluster }) {
  const { blocks, bytes: used, max_bytes: most, refused, reservations, streams } = cluster.index;
  const rows = streams.map(({ worker, applied, gaps, snapshots, behind }) => el("tr", {}, el("th", { scope: "row" }, worker), cell(whole(applied), "number"), cell(whole(gaps), "number"), cell(whole(snapshots), "number"), cell(behind ? "catches up" : "up to date")));
  const share = most > 0 ? used / most : 0;
  byId("index").replaceChildren(
    el("p", { class: "note" }, `${whole(blocks)} units of 16 tokens, ${bytes(used)} of ${bytes(most)}; ${whole(reservations)} reservations${refused > 0 ? `, ${whole(refused)} units not recorded for lack of room` : ""}.`),
    bar([{ name: "full", share }], `index ${percent(share)} full`),
    streams.length === 0 ? nothing("No worker's events are followed.") : el("table", { class: "small" }, heads([["Events of"], ["Applied", "number"], ["Gaps", "number"], ["Snapshots", "number"], ["State"]]), el("tbody", {}, rows)));
}
