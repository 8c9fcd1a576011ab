// Lists the requests that ended last, each with a bar of its stages; a click or Enter opens the details.
import { byId, el, mark, setText, sync } from "./dom.js";
import { clock, count, ms, NONE, path } from "./format.js";
import { bar, legend, showBar } from "./stages.js";
import { showDetail } from "./detail.js";

const NUM_ROWS = 40;
const OUTCOMES = { finished: "✓", cancelled: "–" };

export const signOf = (outcome) => OUTCOMES[outcome] ?? "✕";

export class Requests {
  constructor() {
    this.list = el("ol", { class: "rows", "aria-label": "Recent requests, newest first" });
    this.empty = el("p", { class: "empty" });
    byId("requests-body").append(heads(), this.list, this.empty);
    this.failed = toggle("requests-failed", () => this.draw());
    this.fits = toggle("requests-scale", () => this.draw());
    this.paused = toggle("requests-pause", (isPaused, button) => {
      setText(button, isPaused ? "Resume" : "Pause");
      this.frozen = isPaused ? this.feed?.answers : null;
      this.draw();
    });
    this.list.addEventListener("keydown", (event) => this.move(event));
  }

  show(feed) {
    this.feed = feed;
    legend(byId("stages"), feed.state.stages);
    this.draw();
  }

  draw() {
    if (!this.feed?.state) return;
    const { state, answers: last } = this.feed;
    const answers = this.frozen ?? last;
    const matching = answers.filter(({ outcome }) => !this.failed() || signOf(outcome) === "✕");
    const rows = matching.slice(0, NUM_ROWS);
    const longest = Math.max(...rows.map(({ total }) => total), 0);
    // A gateway that has restarted numbers its requests from 1 on again.
    sync(this.list, rows, ({ number }) => `${state.gateway.life} ${number}`, (row) => this.make(row), (parts, row) => {
      showBar(parts.bar, state.stages, row.stages, this.fits() ? row.total : longest);
    });
    this.rove();
    const missed = this.frozen ? last.filter(({ number }) => number > (this.frozen[0]?.number ?? 0)).length : 0;
    const whose = state.viewer.is_operator ? "" : `, of tenant ${state.viewer.tenant}`;
    setText(byId("requests-note"), this.frozen ? `paused, ${missed} new` : rows.length ? `the last ${rows.length}${whose}` : "");
    this.empty.hidden = rows.length > 0;
    setText(this.empty, this.failed() ? "None of the last requests failed." : "No request has ended yet. Send one in the chat.");
  }

  make(row) {
    const stages = bar(this.feed.state.stages);
    const { kind, facts } = path(row.path);
    const outcome = signOf(row.outcome);
    const button = el("button", { type: "button", class: "row", tabindex: "-1", "aria-haspopup": "dialog", "data-number": row.number, onclick: () => showDetail(row, this.feed.state.stages) },
      el("span", { class: "at" }, clock(row.at + row.total / 1000)),
      el("span", { class: `outcome ${outcome === "✕" ? "bad" : "faint"}`, title: row.outcome }, outcome, el("span", { class: "hidden" }, ` ${row.outcome}`)),
      el("span", { class: "who" }, el("span", { class: "mono" }, row.model), row.tenant ? el("span", { class: "faint" }, ` ${row.tenant}`) : null),
      el("span", { class: "path" }, row.path ? el("span", { class: "chip", "data-kind": kind, title: facts }, kind) : el("span", { class: "chip", "data-kind": "none" }, row.reason || row.outcome)),
      el("span", { class: "tokens number", title: "prompt and output tokens" }, `${count(row.num_prompt)} → ${count(row.num_output)}`),
      el("span", { class: "ttft number", title: "time to the first token" }, row.ttft === null ? NONE : ms(row.ttft)),
      el("span", { class: "total number", title: "total time" }, ms(row.total)),
      stages);
    return { node: el("li", {}, button), bar: stages };
  }

  /* Only one row is in the tab order: the row that was last in focus, else the first (roving tabindex). */
  rove() {
    const buttons = [...this.list.querySelectorAll(".row")];
    const isKept = buttons.some((button) => button.tabIndex === 0 && button === document.activeElement);
    if (!isKept) buttons.forEach((button, place) => { button.tabIndex = place ? -1 : 0; });
  }

  move(event) {
    const buttons = [...this.list.querySelectorAll(".row")];
    const place = buttons.indexOf(document.activeElement);
    const next = { ArrowDown: place + 1, ArrowUp: place - 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (place < 0 || next === undefined || !buttons[next]) return;
    event.preventDefault();
    buttons[place].tabIndex = -1;
    buttons[next].tabIndex = 0;
    buttons[next].focus();
  }
}

function heads() {
  const names = [["Ended", ""], ["", ""], ["Model", ""], ["Path", ""], ["Tokens", "number"], ["TTFT", "number"], ["Total", "number"], ["Stages", ""]];
  return el("div", { class: "heads faint", "aria-hidden": "true" }, ...names.map(([name, kind]) => el("span", { class: kind }, name)));
}

/* Makes a toggle of a button; returns a function that tells whether it is pressed. */
function toggle(id, changed) {
  const button = byId(id);
  const isPressed = () => button.getAttribute("aria-pressed") === "true";
  button.addEventListener("click", () => {
    mark(button, "aria-pressed", String(!isPressed()));
    changed(isPressed(), button);
  });
  return isPressed;
}
