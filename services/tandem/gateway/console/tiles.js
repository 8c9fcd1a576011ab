// Shows figures of the last minute as tiles, each with its course over the last minutes as a sparkline.
import { byId, el, setText, svg, sync } from "./dom.js";
import { count, ms, NONE, percent, rate } from "./format.js";
import { spark } from "./charts.js";

const MINUTE_S = 60;

export function showTiles(feed) {
  sync(byId("tiles"), tiles(feed), ({ name }) => name, makeTile, (parts, { value, note, past }) => {
    setText(parts.value, value);
    setText(parts.note, note);
    spark(parts, past ?? []);
  });
}

function tiles(feed) {
  const { recent, gateway, workers } = feed.state;
  const blocks = sum(workers, "num_blocks");
  const held = blocks - sum(workers, "num_free_blocks");
  const [ttft, itl] = [recent.ttft ?? [null, null], recent.itl ?? [null, null]];
  return [
    { name: "Requests", value: `${rate(recent.num_answers / MINUTE_S)}/s`, note: failures(recent), past: past(feed, "num_answers") },
    { name: "Output", value: `${rate(recent.num_output / MINUTE_S)} tok/s`, note: `${count(recent.num_prompt)} prompt tokens`, past: past(feed, "num_output") },
    { name: "TTFT", value: ms(ttft[0]), note: `p99 ${ms(ttft[1])}`, past: latency(feed, "ttft") },
    { name: "ITL", value: ms(itl[0]), note: `p99 ${ms(itl[1])}`, past: latency(feed, "itl") },
    { name: "In flight", value: count(gateway.num_running), note: `${count(gateway.num_waiting)} queued` },
    { name: "KV held", value: blocks ? percent(held / blocks) : NONE, note: `of ${count(blocks)} blocks` },
    { name: "Cached", value: recent.num_prompt ? percent(recent.num_cached / recent.num_prompt) : NONE, note: "of prompt tokens" },
  ];
}

function failures({ num_answers, num_failed }) {
  if (!num_answers) return "no requests";
  return num_failed ? `${count(num_failed)} of ${count(num_answers)} failed` : "none failed";
}

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);

/* Returns a value for each slice of time but the current one, which is incomplete. */
function past(feed, name) {
  const { slice_now, num_slices } = feed.state;
  return Array.from({ length: num_slices - 1 }, (_, place) => {
    const lanes = feed.slices.get(slice_now - num_slices + 1 + place);
    return lanes ? sum(Object.values(lanes), name) : 0;
  });
}

function latency(feed, name) {
  const { slice_now, num_slices } = feed.state;
  return Array.from({ length: num_slices - 1 }, (_, place) => {
    const lanes = Object.values(feed.slices.get(slice_now - num_slices + 1 + place) ?? {}).filter((lane) => lane[name]);
    return Math.max(0, ...lanes.map((lane) => lane[name][0]));
  });
}

function makeTile({ name }) {
  const parts = { value: el("b"), note: el("span", { class: "faint" }), line: svg("path", { class: "line" }), area: svg("path", { class: "area" }) };
  const paper = svg("svg", { viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" }, parts.area, parts.line);
  return { node: el("div", { class: "tile" }, el("h2", {}, name), parts.value, parts.note, paper), ...parts };
}
