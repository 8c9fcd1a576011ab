// Draws p50 and p99 of one latency over the last minutes, as a pair of lines for each lane.
import { el, mark, setText, svg, sync } from "./dom.js";
import { ms, NONE, plural } from "./format.js";

const [LEFT, RIGHT, TOP, BOTTOM] = [52, 14, 10, 22];
const HEIGHT = 190;
const NUM_TICKS = 4;
export const LANES = ["interactive", "standard", "batch"];

export class Chart {
  /* `measure`: ttft or itl. */
  constructor(figure, measure, title, about) {
    this.measure = measure;
    this.at = null;
    this.lanes = [];
    this.hidden = new Set();
    this.legend = el("ul", { class: "legend" });
    this.now = el("p", { class: "faint" });
    this.paper = svg("svg", { tabindex: "0", role: "img", "aria-label": title });
    this.grid = svg("g", { class: "grid" });
    this.lines = svg("g");
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.paper.append(this.grid, this.lines, this.cursor);
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    this.empty = el("p", { class: "empty" }, "No requests ended in the last minutes.");
    this.title = title;
    figure.append(
      el("figcaption", {}, el("h2", {}, title), this.now, this.legend),
      el("div", { class: "plot" }, this.paper, this.tip, this.empty),
      el("p", { class: "faint note" }, about));
    this.listen();
    new ResizeObserver(() => this.state && this.draw()).observe(this.paper.parentElement);
  }

  listen() {
    this.paper.addEventListener("pointermove", (event) => {
      const box = this.paper.getBoundingClientRect();
      this.point(Math.floor((event.clientX - box.left - LEFT) / this.step));
    });
    for (const name of ["pointerleave", "blur"]) this.paper.addEventListener(name, () => this.point(null));
    this.paper.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Escape") this.point(null);
      if (!move || !this.state) return;
      event.preventDefault();
      this.point((this.at ?? this.state.num_slices - (move < 0 ? 0 : 1)) + move);
    });
  }

  show(feed) {
    this.state = feed.state;
    this.slices = feed.slices;
    const first = this.state.slice_now - this.state.num_slices + 1;
    this.lanes = LANES.map((lane) => ({ lane, points: [] }));
    for (const { lane, points } of this.lanes) {
      for (let place = 0; place < this.state.num_slices; place++) {
        const value = this.slices.get(first + place)?.[lane];
        points.push(value?.[this.measure] ?? null);
      }
    }
    this.lanes = this.lanes.filter(({ points }) => points.some(Boolean));
    this.draw();
    this.point(this.at);
  }

  draw() {
    const full = Math.max(240, Math.round(this.paper.parentElement.clientWidth));
    mark(this.paper, "viewBox", `0 0 ${full} ${HEIGHT}`);
    this.step = (full - LEFT - RIGHT) / this.state.num_slices;
    this.empty.hidden = this.lanes.length > 0;
    mark(this.paper.parentElement, "data-empty", !this.lanes.length);
    const shown = this.lanes.filter(({ lane }) => !this.hidden.has(lane));
    const highest = Math.max(0, ...shown.flatMap(({ points }) => points.filter(Boolean).map(([, p99]) => p99)));
    this.top = nice(highest || 1);
    this.axes(full);
    sync(this.lines, shown, ({ lane }) => lane, makeLane, (parts, lane) => this.drawLane(parts, lane));
    sync(this.legend, this.lanes, ({ lane }) => lane, (row) => this.sign(row), ({ button, value }, { lane, points }) => {
      mark(button, "aria-pressed", String(!this.hidden.has(lane)));
      const last = points.findLast(Boolean);
      setText(value, `${ms(last[0])} / ${ms(last[1])}`);
    });
    const recent = this.state.recent[this.measure];
    setText(this.now, recent ? `last minute: p50 ${ms(recent[0])}, p99 ${ms(recent[1])}` : "no requests in the last minute");
    mark(this.paper, "aria-label", `${this.title}, ${this.now.textContent}. Arrow keys read single points.`);
  }

  /* Makes a lane's button in the legend, which hides and shows the lane. */
  sign({ lane }) {
    const value = el("b");
    const turn = () => {
      if (!this.hidden.delete(lane)) this.hidden.add(lane);
      this.draw();
    };
    const button = el("button", { type: "button", class: "lane-name", title: `Show or hide ${lane}`, onclick: turn },
      el("i", { class: `lane-sign ${lane}` }), `${lane} `, value);
    return { node: el("li", {}, button), button, value };
  }

  axes(full) {
    const ticks = Array.from({ length: NUM_TICKS + 1 }, (_, tick) => tick);
    const minutes = this.state.num_slices * this.state.slice_s / 60;
    const marks = [
      ...ticks.map((tick) => ({ key: `y${tick}`, y: this.y(this.top * tick / NUM_TICKS), text: tick ? short(this.top * tick / NUM_TICKS) : "0" })),
      ...Array.from({ length: minutes + 1 }, (_, ago) => ({
        key: `x${ago}`, x: LEFT + (full - LEFT - RIGHT) * (1 - ago / minutes), text: ago ? `−${ago} min` : "now",
      })),
    ];
    sync(this.grid, marks, ({ key }) => key, makeTick, ({ line, label }, { x, y, text }) => {
      const isY = y !== undefined;
      const facts = isY ? { x1: LEFT, x2: full - RIGHT, y1: y, y2: y } : { x1: x, x2: x, y1: HEIGHT - BOTTOM, y2: HEIGHT - BOTTOM + 4 };
      for (const [name, value] of Object.entries(facts)) mark(line, name, value);
      mark(label, "x", isY ? LEFT - 6 : x);
      mark(label, "y", isY ? y + 4 : HEIGHT - 5);
      mark(label, "text-anchor", isY || text === "now" ? "end" : "middle");
      setText(label, text);
    });
  }

  drawLane(parts, { points }) {
    const [p50, p99] = [0, 1].map((part) => this.path(points, part));
    mark(parts.p50, "d", p50);
    mark(parts.p99, "d", p99);
    mark(parts.band, "d", this.band(points));
    const last = points.findLastIndex(Boolean);
    mark(parts.end, "transform", `translate(${this.x(last)} ${this.y(points[last][0])})`);
  }

  /* Joins neighbouring points by lines; a point without a neighbour becomes a dot. */
  path(points, part) {
    let line = "";
    points.forEach((point, place) => {
      if (!point) return;
      const [x, y] = [this.x(place), this.y(point[part])];
      if (points[place - 1]) line += `L${x} ${y}`;
      else line += points[place + 1] ? `M${x} ${y}` : `M${x - 1.5} ${y}h3`;
    });
    return line;
  }

  band(points) {
    let area = "";
    for (let place = 0; place < points.length; place++) {
      if (!points[place] || points[place - 1]) continue;
      let end = place;
      while (points[end + 1]) end++;
      const run = points.slice(place, end + 1).map((point, step) => [this.x(place + step), this.y(point[0]), this.y(point[1])]);
      area += `M${run.map(([x, low]) => `${x} ${low}`).join("L")}L${run.reverse().map(([x, , high]) => `${x} ${high}`).join("L")}Z`;
    }
    return area;
  }

  point(place) {
    const isIn = place !== null && this.state && place >= 0 && place < this.state.num_slices;
    this.at = isIn ? place : null;
    mark(this.cursor, "visibility", isIn ? "visible" : "hidden");
    this.tip.hidden = !isIn;
    if (!isIn) return;
    const x = this.x(place);
    mark(this.cursor, "x1", x);
    mark(this.cursor, "x2", x);
    const ago = (this.state.num_slices - 1 - place) * this.state.slice_s;
    const lanes = this.lanes.filter(({ points }) => points[place]);
    const texts = lanes.map(({ lane, points }) => `${lane}  p50 ${ms(points[place][0])}  p99 ${ms(points[place][1])}`);
    const slice = this.slices.get(this.state.slice_now - ago / this.state.slice_s);
    const number = slice ? Object.values(slice).reduce((sum, lane) => sum + lane.num_answers, 0) : 0;
    setText(this.tip, [ago ? `${ago} s ago` : "now", ...(texts.length ? texts : [NONE]), plural(number, "request")].join("\n"));
    const full = this.paper.parentElement.clientWidth;
    this.tip.style.left = `${Math.min(Math.max(0, x + 12), full - this.tip.offsetWidth - 4)}px`;
  }

  x(place) { return +(LEFT + this.step * (place + 0.5)).toFixed(1); }

  y(value) { return +(TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / this.top)).toFixed(1); }
}

function makeTick() {
  const [line, label] = [svg("line"), svg("text")];
  return { node: svg("g", {}, line, label), line, label };
}

function makeLane({ lane }) {
  const parts = {
    band: svg("path", { class: "band" }), p99: svg("path", { class: "p99" }), p50: svg("path", { class: "p50" }),
    end: svg("path", { class: "end", d: { interactive: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0", standard: "M-4 3.5L0 -4L4 3.5Z", batch: "M-3.5 -3.5h7v7h-7Z" }[lane] }),
  };
  return { node: svg("g", { class: `lane ${lane}` }, ...Object.values(parts)), ...parts };
}

/* Returns the least of 1, 2, 4 or 8 times a power of ten that is not below `value`; its quarters are short numbers. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 8, 10].map((step) => step * power).find((top) => top >= value);
}

function short(value) {
  return value >= 1000 ? `${+(value / 1000).toFixed(2)} s` : `${+value.toPrecision(3)} ms`;
}

/* Draws a line without axes for a tile, if there are at least two values. */
export function spark(parts, values) {
  const top = Math.max(...values, 1e-9);
  const step = 100 / Math.max(1, values.length - 1);
  const line = values.map((value, place) => `${(place * step).toFixed(1)} ${(23 - 21 * value / top).toFixed(1)}`).join("L");
  mark(parts.line, "d", values.length > 1 ? `M${line}` : "");
  mark(parts.area, "d", values.length > 1 ? `M0 24L${line}L100 24Z` : "");
}
