// Shows the figures of the last minutes by tenant; a viewer without operator rights sees only its own.
import { byId, el, mark, setText, sync, width } from "./dom.js";
import { count, ms, percent, plural, rate, span } from "./format.js";

const COLUMNS = ["Tenant", "Running", "Queued", "Requests", "Failed", "Prompt", "Cached", "Output", "TTFT", "Share of tokens"];

export class Tenants {
  constructor() {
    this.rows = el("tbody");
    const heads = COLUMNS.map((name, place) => el("th", { scope: "col", class: place && place < 9 ? "number" : "" }, name));
    this.table = el("table", { class: "tenants" }, el("thead", {}, el("tr", {}, ...heads)), this.rows);
    this.empty = el("p", { class: "empty" }, "No requests in the last minutes.");
    byId("tenants-body").append(this.table, this.empty);
  }

  show(feed) {
    const { tenants, tenants_s, viewer } = feed.state;
    const whole = tenants.reduce((sum, row) => sum + tokens(row), 0);
    this.table.hidden = tenants.length === 0;
    this.empty.hidden = tenants.length > 0;
    const whose = viewer.is_operator ? plural(tenants.length, "tenant") : "your tenant only";
    setText(byId("tenants-note"), tenants.length ? `${whose}, the last ${span(tenants_s)}` : "");
    const rows = tenants.toSorted((one, other) => tokens(other) - tokens(one) || (one.name < other.name ? -1 : 1));
    sync(this.rows, rows, ({ name }) => name, make, (parts, row) => {
      const minutes = tenants_s / 60;
      const cells = [
        count(row.num_running), count(row.num_waiting), `${rate(row.num_answers / minutes)}/min`, count(row.num_failed), count(row.num_prompt),
        row.num_prompt ? percent(row.num_cached / row.num_prompt) : "–", count(row.num_output), ms(row.ttft),
      ];
      cells.forEach((text, place) => setText(parts.cells[place], text));
      mark(parts.cells[3], "class", `number${row.num_failed ? " bad" : ""}`);
      width(parts.bar, whole ? tokens(row) / whole : 0);
      setText(parts.share, whole ? percent(tokens(row) / whole) : "");
    });
  }
}

const tokens = (row) => row.num_prompt + row.num_output;

function make({ name }) {
  const numbers = COLUMNS.slice(1, -1).map(() => el("td", { class: "number" }));
  const [bar, share] = [el("i"), el("b")];
  const shown = name === "open" ? "all clients (no keys)" : name;
  const node = el("tr", {}, el("th", { scope: "row" }, shown), ...numbers, el("td", { class: "gauge" }, el("span", { class: "bar" }, bar), share));
  return { node, cells: numbers, bar, share };
}
