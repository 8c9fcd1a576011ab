// Composes the console: passes each state of the gateway to all parts of the page.
import { byId, mark, setText } from "./dom.js";
import { Chart } from "./charts.js";
import { Chat } from "./chat.js";
import { Feed } from "./feed.js";
import { span } from "./format.js";
import { KeyDialog } from "./key.js";
import { WorkerMap } from "./map.js";
import { Requests } from "./requests.js";
import { Tenants } from "./tenants.js";
import { showTiles } from "./tiles.js";

const LINKS = {
  live: "live", connecting: "connecting", lost: "reconnecting", refused: "key needed", off: "switched off",
};
const keyDialog = new KeyDialog(() => {
  feed.reset();
  feed.restart();
});
const refused = (message) => keyDialog.open(message);
const parts = [
  new WorkerMap(),
  new Chart(byId("ttft"), "ttft", "Time to first token", "p50 solid, p99 dashed; by lane and by the time when requests ended."),
  new Chart(byId("itl"), "itl", "Inter-token latency", "Mean time between the tokens of a request: p50 solid, p99 dashed."),
  new Requests(),
  new Tenants(),
  new Chat(refused),
];

function show({ status, state }) {
  const link = byId("link");
  mark(link, "data-state", status);
  setText(link, LINKS[status]);
  mark(document.body, "data-stale", status !== "live");
  mark(document.body, "data-blank", !state);
  showNotice(status, state);
  if (status !== "live") return;
  keyDialog.accepted(Boolean(state.viewer.tenant));
  setText(byId("key"), state.viewer.tenant ? `Key: ${state.viewer.tenant}` : "Key");
  setText(byId("version"), `${state.gateway.version}, up ${span(state.gateway.up_s)}`);
  showTiles(feed);
  for (const part of parts) part.show(feed);
}

function showNotice(status, state) {
  const notes = {
    lost: state ? "The gateway does not answer, reconnecting. The page shows the last data received." : "The gateway does not answer, reconnecting.",
    off: "The console of this gateway is switched off (gateway.console: false).",
    live: state?.gateway.missing ? `Requests cannot be served yet: ${state.gateway.missing}.` : "",
  };
  const note = notes[status] ?? "";
  byId("notice").hidden = !note;
  mark(byId("notice"), "class", status === "live" ? "notice warn" : "notice");
  setText(byId("notice"), note);
}

const feed = new Feed(show, refused);
feed.restart();
