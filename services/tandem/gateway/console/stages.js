// The nine stages of a request's time: what each is, its colour, and a bar of them. Hatched is waiting, plain is work.
import { el, mark, width } from "./dom.js";
import { ms } from "./format.js";

const ABOUT = {
  receive: ["Receive", "body read, tenant known, prompt tokenized"],
  queue: ["Queue", "waiting in the gateway's line"],
  route: ["Route", "workers asked, and they accept"],
  prefill_queue: ["Prefill queue", "waiting for its first step"],
  prefill: ["Prefill", "computing the prompt, to the first token"],
  transfer: ["Transfer", "KV on its way that no prefill hides"],
  decode_queue: ["Decode queue", "KV is there, waiting for a step"],
  decode: ["Decode", "drawing tokens, to the last"],
  deliver: ["Deliver", "tokens on their way to the client"],
};

export const nameOf = (stage) => ABOUT[stage]?.[0] ?? stage;
export const aboutOf = (stage) => ABOUT[stage]?.[1] ?? "";
export const signOf = (stage) => el("i", { class: `sign stage-${stage}` });

export function legend(list, stages) {
  if (list.childElementCount === stages.length) return;
  list.replaceChildren(...stages.map((stage) => el("li", { title: aboutOf(stage) }, signOf(stage), nameOf(stage))));
}

/* `times` in milliseconds, of `stages`; the bar is as long as they are of `scale`. */
export function bar(stages) {
  const node = el("span", { class: "stages", role: "img" });
  node.append(...stages.map((stage) => el("i", { class: `stage-${stage}` })));
  return node;
}

export function showBar(node, stages, times, scale) {
  [...node.children].forEach((piece, place) => width(piece, scale > 0 ? times[place] / scale : 0));
  const told = stages.map((stage, place) => [nameOf(stage), times[place]]).filter(([, time]) => time > 0);
  mark(node, "aria-label", told.map(([name, time]) => `${name} ${ms(time)}`).join(", ") || "no time");
}

/* A row for each stage, one after the other as they came. */
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
