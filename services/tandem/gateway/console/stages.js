// Describes and draws the nine stages of a request's time. Hatched stages are waiting, plain ones are work.
import { el, mark, width } from "./dom.js";
import { ms } from "./format.js";

const ABOUT = {
  receive: ["Receive", "body read, tenant known, prompt tokenized"],
  queue: ["Queue", "waiting in the gateway's queue"],
  route: ["Route", "placed, until the workers accept"],
  prefill_queue: ["Prefill queue", "accepted, waiting for the first prefill step"],
  prefill: ["Prefill", "computing the prompt, to the first token"],
  transfer: ["Transfer", "KV transfer that does not overlap with the prefill"],
  decode_queue: ["Decode queue", "KV has arrived, waiting for the first decode step"],
  decode: ["Decode", "sampling tokens, to the last one"],
  deliver: ["Deliver", "sending the last tokens to the client"],
};

export const nameOf = (stage) => ABOUT[stage]?.[0] ?? stage;
export const aboutOf = (stage) => ABOUT[stage]?.[1] ?? "";
export const signOf = (stage) => el("i", { class: `sign stage-${stage}` });

export function legend(list, stages) {
  if (list.childElementCount === stages.length) return;
  list.replaceChildren(...stages.map((stage) => el("li", { title: aboutOf(stage) }, signOf(stage), nameOf(stage))));
}

/* Makes a bar with one piece for each stage; `showBar` sets the lengths. */
export function bar(stages) {
  const node = el("span", { class: "stages", role: "img" });
  node.append(...stages.map((stage) => el("i", { class: `stage-${stage}` })));
  return node;
}

/* `times`: milliseconds of each of `stages`. `scale`: the milliseconds that the full width stands for. */
export function showBar(node, stages, times, scale) {
  [...node.children].forEach((piece, place) => width(piece, scale > 0 ? times[place] / scale : 0));
  const parts = stages.map((stage, place) => [nameOf(stage), times[place]]).filter(([, time]) => time > 0);
  mark(node, "aria-label", parts.map(([name, time]) => `${name} ${ms(time)}`).join(", ") || "no time");
}

/* Makes a table with one row for each stage, in the order of time. */
export function table(stages, times) {
  const total = times.reduce((sum, time) => sum + time, 0);
  let before = 0;
  const rows = stages.map((stage, place) => {
    const [offset, piece] = [el("i", { class: "offset" }), el("i", { class: `stage-${stage}` })];
    width(offset, total ? before / total : 0);
    width(piece, total ? times[place] / total : 0);
    before += times[place];
    return el("tr", { class: times[place] ? "" : "none" },
      el("th", { scope: "row", title: aboutOf(stage) }, signOf(stage), nameOf(stage)),
      el("td", { class: "lane-bar", "aria-hidden": "true" }, el("span", { class: "stages" }, offset, piece)),
      el("td", { class: "number" }, ms(times[place])),
      el("td", { class: "number faint" }, total ? `${(100 * times[place] / total).toFixed(1)} %` : ""));
  });
  const head = el("tr", {}, ...["Stage", "When", "Time", "Share"].map((name) => el("th", { scope: "col" }, name)));
  const foot = el("tr", {}, el("th", { scope: "row" }, "Total"), el("td"), el("td", { class: "number" }, ms(total)), el("td"));
  return el("table", { class: "stage-table" }, el("thead", {}, head), el("tbody", {}, ...rows), el("tfoot", {}, foot));
}
