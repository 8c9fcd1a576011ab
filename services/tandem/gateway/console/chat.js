// Sends the typed message to the model, streams the answer and shows its path and the time of its stages. The
// conversation is kept only in this page.
import { byId, el, mark, setText } from "./dom.js";
import { count, ms, path, rate } from "./format.js";
import { headers } from "./key.js";
import { events } from "./sse.js";
import { bar, showBar, table } from "./stages.js";

const EMPTY = "Answers stream here, each with its path and the time of its stages.";
const IDEAS = ["What is a key-value cache?", "Write a haiku about two workers.", "Count from one to twenty."];

export class Chat {
  /* `refused(message)` is called when the key is not accepted. */
  constructor(refused) {
    this.refused = refused;
    this.talk = byId("talk");
    this.text = byId("chat-text");
    this.turns = [];
    this.running = null;
    this.stages = [];
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("composer").requestSubmit();
    });
    byId("chat-stop").addEventListener("click", () => this.running?.abort());
    byId("chat").addEventListener("keydown", (event) => event.key === "Escape" && this.running?.abort());
    byId("chat-clear").addEventListener("click", () => this.clear());
    this.clear();
  }

  show({ state }) {
    this.stages = state.stages;
    const select = byId("chat-model");
    const names = state.models.join("\n");
    if (select.dataset.names === names) return;
    const chosen = select.value;
    select.replaceChildren(...state.models.map((name) => el("option", { value: name }, name)));
    select.dataset.names = names;
    if (state.models.includes(chosen)) select.value = chosen;
    mark(byId("chat-send"), "disabled", state.models.length === 0);
  }

  clear() {
    this.running?.abort();
    this.turns = [];
    this.talk.replaceChildren(el("div", { class: "empty" }, el("p", {}, EMPTY), ...IDEAS.map((idea) => this.suggest(idea))));
    byId("chat-clear").hidden = true;
  }

  suggest(idea) {
    return el("button", { type: "button", onclick: () => {
      this.text.value = idea;
      this.text.focus();
      this.send();
    } }, idea);
  }

  async send() {
    const text = this.text.value.trim();
    if (!text || this.running || byId("chat-send").disabled) return;
    if (!this.turns.length) this.talk.replaceChildren();
    this.text.value = "";
    // Clear replaces the list while the answer to one of its messages streams.
    const turns = this.turns;
    turns.push({ role: "user", content: text });
    const answer = new Answer();
    this.talk.append(el("div", { class: "turn user" }, el("p", {}, text)), answer.node);
    this.follow(true);
    this.run(new AbortController());
    try {
      await this.stream(answer);
      turns.push({ role: "assistant", content: answer.text });
    } catch (error) {
      const isStopped = error.name === "AbortError";
      answer.fail(isStopped ? "stopped" : error.message, !isStopped);
      // A message without any answer is not sent again with the next one.
      if (answer.text) turns.push({ role: "assistant", content: answer.text });
      else turns.pop();
    }
    this.run(null);
    answer.end(this.stages);
    setText(byId("chat-status"), `Answer: ${answer.text} ${answer.summary}`);
    this.follow();
  }

  run(controller) {
    this.running = controller;
    byId("chat-stop").hidden = !controller;
    byId("chat-send").hidden = Boolean(controller);
    byId("chat-clear").hidden = false;
    mark(this.talk, "aria-busy", Boolean(controller));
  }

  async stream(answer) {
    const reply = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { ...headers(), "content-type": "application/json", "x-tandem-timing": "1", "x-tandem-explain": "1" },
      body: JSON.stringify(this.body()),
      signal: this.running.signal,
    });
    if (!reply.ok) {
      const { error } = await reply.json();
      if (reply.status === 401) this.refused(`${error.message}.`);
      throw new Error(error.message);
    }
    answer.path = reply.headers.get("x-tandem-path") ?? "";
    for await (const event of events(reply.body)) {
      if (event.error) throw new Error(event.error.message);
      answer.take(event);
      this.follow();
    }
  }

  body() {
    return {
      model: byId("chat-model").value,
      messages: this.turns,
      max_tokens: Number(byId("chat-tokens").value) || 256,
      temperature: Number(byId("chat-heat").value),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  /* Scrolls to the end, unless the reader has scrolled up. */
  follow(isForced = false) {
    const { scrollHeight, scrollTop, clientHeight } = this.talk;
    if (isForced || scrollHeight - scrollTop - clientHeight < 120) this.talk.scrollTop = scrollHeight;
  }
}

/* One answer while it streams. Its times are measured by the browser, from the sending of the request. */
class Answer {
  constructor() {
    this.text = "";
    this.path = "";
    this.summary = "";
    this.facts = null;
    this.usage = null;
    this.began = performance.now();
    this.first = null;
    this.thought = el("p", { class: "thought faint", hidden: true });
    this.said = document.createTextNode("");
    this.words = el("p", { class: "words" }, this.said);
    this.foot = el("div", { class: "foot" }, el("span", { class: "faint" }, "waiting for the first token …"));
    this.node = el("div", { class: "turn model", "data-state": "running" }, this.thought, this.words, this.foot);
  }

  take(event) {
    const delta = event.choices?.[0]?.delta ?? {};
    if (delta.reasoning_content) {
      this.thought.hidden = false;
      this.thought.textContent += delta.reasoning_content;
    }
    if (delta.content) {
      this.text += delta.content;
      this.said.appendData(delta.content);
    }
    if (delta.content || delta.reasoning_content) this.tick();
    this.facts = event.tandem ?? this.facts;
    this.usage = event.usage ?? this.usage;
  }

  tick() {
    this.first ??= performance.now();
    setText(this.foot, `first token ${ms(this.first - this.began)} · ${ms(performance.now() - this.began)}`);
  }

  fail(message, isBad) {
    this.node.append(el("p", { class: isBad ? "bad" : "faint" }, message));
  }

  end(stages) {
    this.node.dataset.state = "done";
    const total = performance.now() - this.began;
    const taken = path(this.facts?.path ?? this.path);
    const rows = [this.first === null ? null : `first token ${ms(this.first - this.began)}`, `total ${ms(total)}`, this.speed(total)];
    this.summary = [taken.kind, ...rows].filter(Boolean).join(", ");
    this.foot.replaceChildren(
      taken.kind ? el("span", { class: "chip", "data-kind": taken.kind, title: taken.facts }, taken.kind) : "",
      ...rows.filter(Boolean).map((text) => el("span", { class: "faint" }, text)));
    this.explain(stages);
  }

  speed(total) {
    const number = this.usage?.completion_tokens;
    if (!number) return null;
    const seconds = (total - (this.first - this.began || 0)) / 1000;
    return `${count(number)} tokens${number > 1 && seconds > 0 ? `, ${rate((number - 1) / seconds)}/s` : ""}`;
  }

  explain(stages) {
    const timing = this.facts?.timing;
    if (timing) {
      const times = stages.map((stage) => timing[`${stage}_ms`] ?? 0);
      const stageBar = bar(stages);
      showBar(stageBar, stages, times, times.reduce((sum, time) => sum + time, 0));
      this.node.append(stageBar, el("details", {}, el("summary", {}, "Timing"), table(stages, times)));
    }
    if (this.facts?.reasons) {
      const why = JSON.stringify(this.facts.reasons, null, 2);
      this.node.append(el("details", {}, el("summary", {}, "Placement reasons"), el("pre", { tabindex: "0" }, why)));
    }
  }
}
