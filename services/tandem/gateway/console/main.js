// Puts the parts of the console together: what the gateway says goes to each; never draws anything itself.
import { byId, mark, say } from "./dom.js";
import { Chart } from "./charts.js";
import { Chat } from "./chat.js";
import { Feed } from "./feed.js";
import { span } from "./format.js";
import { Door } from "./key.js";
import { WorkerMap } from "./map.js";
import { Requests } from "./requests.js";
import { Tenants } from "./tenants.js";
import { showTiles } from "./tiles.js";

const LINKS = {
  live: "live", connecting: "connecting", lost: "reconnecting", refused: "key needed", off: "switched off",
};
const door = new Door(() => {
  feed.reset();
  feed.again();
});
const refused = (message) => door.ask(message);
const parts = [
  new WorkerMap(),
  new Chart(byId("ttft"), "ttft", "Time to first token", "p50 solid, p99 dashed, by lane, as requests ended."),
  new Chart(byId("itl"), "itl", "Inter-token latency", "Of each request the mean time between its tokens: p50 solid, p99 dashed."),
  new Requests(),
  new Tenants(),
  new Chat(refused),
];

function show({ status, state }) {
  const link = byId("link");
  mark(link, "data-state", status);
  say(link, LINKS[status]);
  mark(document.body, "data-stale", status !== "live");
  mark(document.body, "data-blank", !state);
  tell(status, state);
  if (status !== "live") return;
  door.passed(Boolean(state.viewer.tenant));
  say(byId("key"), state.viewer.tenant ? `Key: ${state.viewer.tenant}` : "Key");
  say(byId("version"), `${state.gateway.version}, up ${span(state.gateway.up_s)}`);
  showTiles(feed);
  for (const part of parts) part.show(feed);
}

function tell(status, state) {
  const notes = {
    lost: state ? "The gateway does not answer. What you see is the last that it said; trying again." : "The gateway does not answer; trying again.",
    off: "The console of this gateway is switched off (gateway.console: false).",
    live: state?.gateway.missing ? `Requests cannot be served yet: ${state.gateway.missing}.` : "",
  };
  const note = notes[status] ?? "";
  byId("notice").hidden = !note;
  mark(byId("notice"), "class", status === "live" ? "notice warn" : "notice");
  say(byId("notice"), note);
}

const feed = new Feed(show, refused);
feed.again();
