// Draws the workers by pool and the KV traffic between them.
import { LANES } from "./charts.js";
import { byId, el, mark, setText, svg, sync, width } from "./dom.js";
import { bytes, count, percent, plural, rate } from "./format.js";

const POOLS = [["prefill", "Prefill"], ["mixed", "Mixed"], ["decode", "Decode"], ["", "Disconnected"]];
const STATES = {
  live: ["●", "live"], draining: ["◐", "draining"], trial: ["◍", "half-open"], resting: ["✕", "failing"],
  away: ["○", "disconnected"],
};
const BY_NAME = new Intl.Collator("en", { numeric: true });
const DENSE = 12;
const MAX_WIRES = 40;
const MAX_LISTED = 8;
const LABELLED = 6;

export class WorkerMap {
  constructor() {
    this.body = byId("map-body");
    this.wires = svg("svg", { class: "wires", "aria-hidden": "true" });
    this.pools = el("div", { class: "pools" });
    this.empty = el("p", { class: "empty", hidden: true });
    this.body.append(this.wires, this.pools, this.empty);
    this.flows = [];
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  show(feed) {
    const { workers, num_workers } = feed.state;
    this.note(workers, num_workers);
    const sorted = workers.toSorted((one, other) => BY_NAME.compare(one.id, other.id));
    const pools = POOLS.map(([pool, name]) => ({ pool, name, workers: sorted.filter((worker) => worker.pool === pool) }));
    mark(this.body, "data-dense", workers.length > DENSE);
    this.poolOf = new Map(workers.map(({ id, pool }) => [id, pool]));
    sync(this.pools, pools.filter((pool) => pool.workers.length), ({ pool }) => pool, makePool, (parts, pool) => {
      setText(parts.number, pool.workers.length);
      sync(parts.list, pool.workers, ({ id }) => id, makeWorker, (card, worker) => showWorker(card, worker, feed));
    });
    this.flows = moving(feed);
    this.list();
    this.draw();
  }

  note(workers, number) {
    const live = workers.filter(({ state }) => state !== "away").length;
    const hidden = number > workers.length ? `, ${number - workers.length} more not shown` : "";
    setText(byId("map-note"), workers.length ? `${live} of ${plural(number, "worker")} live${hidden}` : "");
    this.empty.hidden = workers.length > 0;
    setText(this.empty, "No workers yet. A worker appears here as soon as it registers.");
  }

  /* Lists the flows as text: for screen readers, and for figures that do not fit into the map. */
  list() {
    const rows = this.flows.slice(0, MAX_LISTED);
    const box = byId("flows");
    box.hidden = rows.length === 0;
    sync(box, rows, ({ key }) => key, makeFlow, (parts, flow) => {
      mark(parts.node, "data-idle", !flow.moves);
      setText(parts.ends, `${flow.source} → ${flow.target}`);
      setText(parts.kind, flow.kind === "prefix" ? "prefix fetch" : "handoff");
      setText(parts.speed, flow.moves ? `${bytes(flow.speed)}/s, ${rate(flow.moves)}/s` : `idle; ${bytes(flow.total)} so far`);
    });
  }

  draw() {
    const frame = this.body.getBoundingClientRect();
    mark(this.wires, "viewBox", `0 0 ${Math.round(frame.width)} ${Math.round(frame.height)}`);
    const isDense = this.body.hasAttribute("data-dense");
    const boxes = new Map();
    for (const card of this.pools.querySelectorAll(isDense ? ".pool" : ".worker")) {
      boxes.set(isDense ? card.dataset.pool : card.dataset.id, place(card, frame));
    }
    const flows = isDense ? byPool(this.flows, this.poolOf) : this.flows;
    const seen = flows.filter(({ source, target }) => boxes.has(source) && boxes.has(target)).slice(0, MAX_WIRES);
    const most = Math.max(1, ...seen.map(({ speed }) => speed));
    const wires = seen.map((flow) => ({ ...flow, most, ...route(boxes, flow, frame) }));
    label(wires);
    sync(this.wires, wires, ({ key }) => key, makeWire, showWire);
  }
}

function moving(feed) {
  const found = feed.state.flows.map(([source, target, kind, moves, total]) => {
    const name = `${source} ${target} ${kind}`;
    return {
      key: name, source, target, kind, total, moves: feed.rate(`moves ${name}`, 0) ?? 0, speed: feed.rate(`bytes ${name}`, 0) ?? 0,
    };
  });
  return found.sort((one, other) => other.speed - one.speed || other.total - one.total || (one.key < other.key ? -1 : 1));
}

/* Adds the flows up by pool, for the map of many workers. */
function byPool(flows, poolOf) {
  const found = new Map();
  for (const flow of flows) {
    const [source, target] = [poolOf.get(flow.source), poolOf.get(flow.target)];
    if (!source || !target) continue;
    const key = `${source} ${target} ${flow.kind}`;
    const sum = found.get(key) ?? { ...flow, key, source, target, moves: 0, speed: 0 };
    found.set(key, { ...sum, moves: sum.moves + flow.moves, speed: sum.speed + flow.speed });
  }
  return [...found.values()].sort((one, other) => other.speed - one.speed);
}

function makePool({ pool, name }) {
  const list = el("ul", { class: "workers" });
  const number = el("span", { class: "faint" });
  const node = el("div", { class: "pool", "data-pool": pool || "away" }, el("h3", {}, name, " ", number), list);
  return { node, list, number };
}

function makeWorker({ id }) {
  const parts = {
    sign: el("span", { class: "sign-state", "aria-hidden": "true" }), state: el("span", { class: "state" }),
    load: el("span", { class: "load" }), lanes: el("span", { class: "lanes faint" }), kv: el("b"), mix: el("b"), model: el("span", { class: "model faint" }),
    held: el("i", { class: "kv-held" }), leased: el("i", { class: "kv-leased" }), reserved: el("i", { class: "kv-reserved" }),
    prefill: el("i", { class: "mix-prefill" }), decode: el("i", { class: "mix-decode" }),
  };
  const node = el("li", { class: "worker", "data-id": id },
    el("div", { class: "worker-head" }, parts.sign, el("strong", {}, id), parts.state),
    parts.load,
    parts.lanes,
    el("div", { class: "gauge" }, el("span", {}, "KV"), el("span", { class: "bar" }, parts.held, parts.leased, parts.reserved), parts.kv),
    el("div", { class: "gauge" }, el("span", {}, "Steps"), el("span", { class: "bar" }, parts.prefill, parts.decode), parts.mix),
    parts.model);
  return { node, ...parts };
}

function showWorker(parts, worker, feed) {
  const [sign, state] = STATES[worker.state] ?? ["?", worker.state];
  setText(parts.sign, sign);
  setText(parts.state, state);
  mark(parts.node, "data-state", worker.state);
  const isAway = worker.state === "away";
  const queued = worker.num_queued_tokens ? `, ${count(worker.num_queued_tokens)} tokens to compute` : "";
  const numPaused = worker.lane_paused.reduce((sum, one) => sum + one, 0);
  const paused = numPaused ? `, ${count(numPaused)} paused` : "";
  const counts = `${count(worker.num_running)} running, ${count(worker.num_waiting - numPaused)} waiting${paused}${queued}`;
  setText(parts.load, isAway ? "its stream is down" : counts);
  showLanes(parts, worker);
  showBlocks(parts, worker);
  showSteps(parts, worker, feed);
  setText(parts.model, [worker.model, worker.zone, worker.lanes.join(", ")].filter(Boolean).join(" · "));
}

/* Leased blocks are among the held ones; reserved blocks are free ones. */
function showBlocks(parts, worker) {
  const all = worker.num_blocks || 1;
  const held = worker.num_blocks - worker.num_free_blocks;
  const leased = Math.min(held, worker.num_leased_blocks);
  width(parts.held, (held - leased) / all);
  width(parts.leased, leased / all);
  width(parts.reserved, Math.min(worker.num_reserved_blocks, worker.num_free_blocks) / all);
  setText(parts.kv, worker.num_blocks ? percent(held / all) : "");
  parts.kv.title = `${count(held)} of ${count(worker.num_blocks)} blocks held, ${count(leased)} of them leased, ` +
    `${count(worker.num_reserved_blocks)} reserved`;
}

/* Shows the sequences of each lane and its share of the KV blocks, in which shared blocks count for each of them, and
   the blocks in host memory. */
function showLanes(parts, worker) {
  const all = worker.num_blocks || 1;
  const lanes = LANES.map((lane, index) => ({
    lane, seqs: worker.lane_seqs[index] ?? 0, blocks: worker.lane_blocks[index] ?? 0, paused: worker.lane_paused[index] ?? 0,
  }));
  const texts = lanes.filter(({ seqs }) => seqs)
    .map(({ lane, seqs, blocks }) => `${lane} ${count(seqs)}` + (blocks ? ` (${percent(blocks / all)} of KV)` : ""));
  if (worker.num_host_blocks) texts.push(`${count(worker.num_host_blocks)} blocks in host memory`);
  setText(parts.lanes, texts.join(" · "));
  parts.lanes.title = lanes.map(({ lane, seqs, blocks, paused }) =>
    `${lane}: ${count(seqs)} sequences, ${count(blocks)} blocks, ${count(paused)} paused`).join("; ");
}

function showSteps(parts, worker, feed) {
  const prefill = feed.rate(`prefill ${worker.id} ${worker.life}`);
  const decode = feed.rate(`decode ${worker.id} ${worker.life}`);
  const all = (prefill ?? 0) + (decode ?? 0);
  width(parts.prefill, all ? prefill / all : 0);
  width(parts.decode, all ? decode / all : 0);
  setText(parts.mix, all ? `${[prefill, decode].filter(Boolean).map(rate).join(" + ")} tok/s` : "idle");
  parts.mix.title = `${rate(prefill)} prompt tokens and ${rate(decode)} output tokens each second`;
}

function makeFlow({ kind }) {
  const parts = { ends: el("span", { class: "mono" }), kind: el("span", { class: "faint" }), speed: el("b") };
  return { node: el("div", { class: "flow" }, el("i", { class: `wire-sign ${kind}` }), ...Object.values(parts)), ...parts };
}

// ---- wires

function place(card, frame) {
  const box = card.getBoundingClientRect();
  return {
    left: box.left - frame.left, right: box.right - frame.left, top: box.top - frame.top, bottom: box.bottom - frame.top,
    middle: (box.top + box.bottom) / 2 - frame.top,
  };
}

/* Draws a curve between the facing sides of two columns; within a column, or where columns are stacked, along the margin. */
function route(boxes, { source, target, kind }, frame) {
  const [from, to] = [boxes.get(source), boxes.get(target)];
  const shift = kind === "prefix" ? 7 : 0;
  if (to.left >= from.right || to.right <= from.left) {
    const isRight = to.left >= from.right;
    const [x1, x2] = isRight ? [from.right, to.left] : [from.left, to.right];
    const [y1, y2] = [from.middle + shift, to.middle + shift];
    const bend = (x2 - x1) / 2;
    return { line: `M${x1} ${y1}C${x1 + bend} ${y1} ${x2 - bend} ${y2} ${x2} ${y2}`, ...spot(x1, x2, y1, y2), isWide: Math.abs(bend) > 45 };
  }
  const isLeft = from.left >= 18;
  const x = isLeft ? from.left : from.right;
  const room = isLeft ? from.left : Math.max(6, frame.width - from.right);
  const bow = (isLeft ? -1 : 1) * Math.min(room, 26 + shift) * 1.2;
  const own = from === to ? 26 : 0;
  const [y1, y2] = [from.middle + shift - own, to.middle + shift + own];
  return { line: `M${x} ${y1}C${x + bow} ${y1} ${x + bow} ${y2} ${x} ${y2}`, x, y: (y1 + y2) / 2, isWide: false };
}

/* Finds the place of a label at 28 % of the curve, near the source, where the curves of other sources are still apart. */
function spot(x1, x2, y1, y2) {
  const [t, u] = [0.28, 0.72];
  const whole = (first, last, bent) => u ** 3 * first + 3 * u * u * t * bent[0] + 3 * u * t * t * bent[1] + t ** 3 * last;
  const middle = (x1 + x2) / 2;
  return { x: whole(x1, x2, [middle, middle]), y: whole(y1, y2, [y1, y2]) };
}

/* Labels the fastest wires, as far as the labels do not overlap. */
function label(wires) {
  const taken = [];
  for (const wire of wires) {
    const isFree = taken.every(({ x, y }) => Math.abs(x - wire.x) > 70 || Math.abs(y - wire.y) > 15);
    wire.text = wire.moves && wire.isWide && isFree && taken.length < LABELLED ? `${bytes(wire.speed)}/s` : "";
    if (wire.text) taken.push(wire);
  }
}

function makeWire({ kind }) {
  const parts = { base: svg("path", { class: "base" }), drops: svg("path", { class: "drops" }), text: svg("text", { "text-anchor": "middle" }) };
  return { node: svg("g", { class: `wire ${kind}` }, ...Object.values(parts)), ...parts };
}

function showWire({ node, base, drops, text }, { line, x, y, speed, most, moves, text: caption }) {
  mark(node, "data-idle", !moves);
  mark(base, "d", line);
  mark(drops, "d", line);
  base.style.strokeWidth = moves ? 1.5 + 5 * Math.sqrt(speed / most) : 1;
  // Drops move faster where there are more transfers: 1.6 s for a pass at the slowest.
  drops.style.animationDuration = `${(1.6 / (1 + Math.min(3, Math.sqrt(moves) / 2))).toFixed(1)}s`;
  mark(text, "x", x);
  mark(text, "y", y + 4);
  setText(text, caption);
}
