// Shows the details of one ended request in a dialog; they hold no text of its prompt or output.
import { byId, el } from "./dom.js";
import { count, moment, ms, NONE, path } from "./format.js";
import { signOf } from "./requests.js";
import { table } from "./stages.js";

export function showDetail(row, stages) {
  const dialog = byId("detail");
  const close = el("button", { type: "button", class: "quiet", onclick: () => dialog.close() }, "Close");
  dialog.replaceChildren(
    el("header", {},
      el("h2", { id: "detail-title" }, el("span", { class: signOf(row.outcome) === "✕" ? "bad" : "" }, signOf(row.outcome)), ` Request ${row.number}`),
      el("span", { class: "chip", "data-kind": row.outcome }, row.outcome.replaceAll("_", " ")), close),
    row.error ? el("p", { class: "notice" }, row.error) : "",
    el("dl", { class: "facts" }, ...facts(row).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])),
    el("h3", {}, "Time by stage"),
    table(stages, row.stages));
  dialog.addEventListener("click", ({ target }) => target === dialog && dialog.close(), { once: true });
  dialog.showModal();
  close.focus();
}

function facts(row) {
  const { kind, facts: why } = path(row.path);
  const cached = row.num_cached === null ? "" : ` (${count(row.num_cached)} cached)`;
  const mono = (text) => el("span", { class: "mono" }, text);
  const found = [
    ["Path", row.path ? el("span", {}, el("span", { class: "chip", "data-kind": kind }, kind), why ? ` ${why}` : "") : NONE],
    ["Reason", row.reason.replaceAll("_", " ")],
    ["Workers", row.workers.length ? mono(row.workers.join(" → ")) : NONE],
    ["Attempts", count(row.num_attempts)],
    ["Tokens", `${count(row.num_prompt)} prompt${cached}, ${count(row.num_output)} output`],
    ["First token", ms(row.ttft)],
    ["Between tokens", row.itl === null ? NONE : `${ms(row.itl)} mean, ${ms(row.gap)} longest`],
    ["Received", moment(row.at)],
    ["Model", mono(row.model)],
    ["Endpoint", `${row.endpoint}, ${row.is_streamed ? "streamed" : "whole"}`],
    ["Tenant", row.tenant],
    ["Lane", row.lane],
    ["Request", mono(row.id)],
    ["x-request-id", row.label && row.label !== row.id ? mono(row.label) : ""],
    ["Trace", row.trace ? mono(row.trace) : "not sampled"],
  ];
  return found.filter(([, value]) => value !== "");
}
