// A chart of the last five minutes: lines or stacked areas. Each update redraws all of it, which takes less
// than a millisecond for a few hundred points.

import { el, say, svg } from "./dom.js";

const SPAN_MS = 300_000;
const WIDTH = 600;

/** End of the scale: 1, 1.5, 2, 3, 5, 7.5 or 10 times a power of ten. */
function top(most) {
  if (!(most > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 5, 7.5, 10].map((step) => step * power).find((step) => step >= most * 1.02) ?? most;
}

/**
 * A chart in `parent`. `series`: `name` and CSS class `style` of each; `format`: turns a value into text;
 * `stacked`: stacked areas instead of lines.
 */
export class Chart {
  constructor(parent, { series, format, stacked = false, height = 150 }) {
    Object.assign(this, { series, format, stacked, height, points: [] });
    this.drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": "no data yet" });
    this.paths = series.map(({ style }) => svg("path", { class: stacked ? `area ${style}` : `line ${style}` }));
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: height, visibility: "hidden" });
    const grid = [0.25, 0.5, 0.75, 1].map((share) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: height * (1 - share) + 1, y2: height * (1 - share) + 1 }));
    this.drawing.append(...grid, ...this.paths, this.cursor);
    this.most = el("span", { class: "scale top" });
    this.middle = el("span", { class: "scale middle" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.values = series.map(({ style }) => el("b", { class: style }, "–"));
    this.legend = el("p", { class: "legend" }, series.map(({ name, style }, at) => el("span", { class: `key ${style}` }, `${name} `, this.values[at])));
    const plot = el("div", { class: "plot" }, this.drawing, this.most, this.middle, this.tip);
    parent.replaceChildren(plot, el("p", { class: "axis" }, el("span", {}, "5 min ago"), el("span", {}, "now")), this.legend);
    plot.addEventListener("pointermove", (event) => this.point(event));
    plot.addEventListener("pointerleave", () => this.leave());
  }

  /** `points`: `at` in milliseconds, and `values` with one value per series; null: no value. */
  draw(points, now) {
    this.points = points;
    this.now = now;
    const sums = points.flatMap(({ values }) => (this.stacked ? [values.reduce((sum, value) => sum + (value ?? 0), 0)] : values.map((value) => value ?? 0)));
    const scale = top(Math.max(0, ...sums));
    this.x = (at) => WIDTH * (1 - (now - at) / SPAN_MS);
    const y = (value) => this.height - (value / scale) * (this.height - 8);
    const floor = points.map(() => 0);
    this.paths.forEach((path, at) => path.setAttribute("d", this.stacked ? this.area(points, at, floor, y) : this.line(points, at, y)));
    say(this.most, points.length > 0 ? this.format(scale) : "");
    say(this.middle, points.length > 0 ? this.format(scale / 2) : "");
    const last = points.findLast(({ values }) => values.some((value) => value !== null));
    this.values.forEach((node, at) => say(node, last ? this.format(last.values[at]) : "–"));
    this.drawing.setAttribute("aria-label", this.series.map(({ name }, at) => `${name} ${last ? this.format(last.values[at]) : "unknown"}`).join(", "));
  }

  line(points, at, y) {
    let path = "";
    let before = null;
    for (const point of points) {
      const value = point.values[at];
      if (value === null) continue;
      const step = `${this.x(point.at).toFixed(1)} ${y(value).toFixed(1)}`;
      const near = before !== null && point.at - before < 30_000;
      // An isolated point is a dot: round caps draw a line of no length.
      path += near ? `L${step}` : `M${step}l0.01 0`;
      before = point.at;
    }
    return path;
  }

  area(points, at, floor, y) {
    if (points.length === 0) return "";
    const below = points.map((point, index) => `${this.x(point.at).toFixed(1)} ${y(floor[index]).toFixed(1)}`);
    points.forEach((point, index) => (floor[index] += point.values[at] ?? 0));
    const above = points.map((point, index) => `${this.x(point.at).toFixed(1)} ${y(floor[index]).toFixed(1)}`);
    return `M${above.join("L")}L${below.reverse().join("L")}Z`;
  }

  point(event) {
    const box = this.drawing.getBoundingClientRect();
    const at = this.now - SPAN_MS * (1 - (event.clientX - box.left) / box.width);
    const nearest = this.points.reduce((best, point) => (best === null || Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best), null);
    if (!nearest) return;
    const x = this.x(nearest.at);
    this.cursor.setAttribute("x1", x);
    this.cursor.setAttribute("x2", x);
    this.cursor.setAttribute("visibility", "visible");
    const ago = Math.max(0, Math.round((this.now - nearest.at) / 1000));
    this.tip.replaceChildren(el("small", {}, `${ago} s ago`), ...this.series.map(({ name, style }, series) => el("span", { class: `key ${style}` }, `${name} ${this.format(nearest.values[series])}`)));
    this.tip.hidden = false;
    this.tip.style.setProperty("--at", `${(100 * x) / WIDTH}%`);
    this.tip.dataset.side = x > WIDTH / 2 ? "left" : "right";
  }

  leave() {
    this.cursor.setAttribute("visibility", "hidden");
    this.tip.hidden = true;
  }
}
