// Helpers for DOM nodes and for text. Text from the cluster only ever becomes text nodes and attributes,
// never markup.

const SVG = "http://www.w3.org/2000/svg";

/** Creates an element. Attributes `on…` are event listeners, attributes `--…` custom properties. */
export function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

/** Like `el`, for SVG elements. */
export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...present(children));
  return node;
}

const present = (children) => children.flat().filter((child) => child !== null && child !== undefined && child !== false);

/** Replaces all children of `node`. Children that are null, undefined or false are left out. */
export const put = (node, ...children) => node.replaceChildren(...present(children));

export const byId = (id) => document.getElementById(id);

/** Sets the text of `node` only if it differs, so that a selection of unchanged text stays. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/**
 * Updates `parent` to one row for each item, in order. Existing rows are kept with their focus. Only rows out
 * of order move.
 */
export function keyed(parent, items, keyOf, make, update) {
  const known = parent.keyed ?? new Map();
  const kept = new Map();
  let place = parent.firstChild;
  for (const item of items) {
    const key = keyOf(item);
    let row = known.get(key);
    if (!row) row = make(item);
    update(row, item);
    kept.set(key, row);
    known.delete(key);
    for (const node of row.nodes) {
      if (node === place) place = place.nextSibling;
      else parent.insertBefore(node, place);
    }
  }
  for (const row of known.values()) row.nodes.forEach((node) => node.remove());
  parent.keyed = kept;
}

const digits = new Intl.NumberFormat("en", { maximumFractionDigits: 0, useGrouping: true });

/** `12 345`. */
export const whole = (number) => digits.format(number).replaceAll(",", "\u202f");

/** A number, rounded to about three digits if it has a fraction or is large: `0.12`, `34.5k`, `56.0M`. */
export function short(number) {
  if (number === null || number === undefined) return "–";
  for (const [from, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (number >= from) return `${three(number / (unit === "k" ? 1e3 : from))}${unit}`;
  }
  return number >= 100 || Number.isInteger(number) ? whole(number) : three(number);
}

function three(number) {
  if (number >= 100) return number.toFixed(0);
  return number >= 10 ? number.toFixed(1) : number.toFixed(number >= 1 ? 1 : 2);
}

/** `80 ms`, `1.2 s`, `14 s`. */
export function time(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return seconds > 0 ? "<1 ms" : "0";
  if (seconds < 0.01) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(0)} ms`;
  return seconds < 10 ? `${seconds.toFixed(1)} s` : `${seconds.toFixed(0)} s`;
}

/** `12 MiB`. */
export function bytes(count) {
  for (const [from, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (count >= from) return `${three(count / from)} ${unit}`;
  }
  return `${Math.round(count)} B`;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${Math.round(100 * share)} %`);

/** A bar of parts, each with a `share` of the whole and a CSS class `name`. `label` describes the bar. */
export function bar(parts, label) {
  return el("div", { class: "meter", role: "img", "aria-label": label, title: label },
    parts.filter(({ share }) => share > 0).map(({ share, name }) => el("span", { class: name, "--share": Math.min(share, 1) })));
}

/** Text in place of a section without data. */
export const nothing = (text) => el("p", { class: "nothing" }, text);
