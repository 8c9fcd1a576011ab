// Polls the gateway for new data while the page is visible, and keeps the last minutes of it.
import { headers, key } from "./key.js";

const PERIOD_MS = 1000;
const SLOWEST_MS = 8000;
const TIMEOUT_MS = 4000;
const NUM_ANSWERS = 200;
const RATE_MS = 5000;

export class Feed {
  /* `show(feed)` is called after each change, `refused(message)` when a key is required or not accepted. */
  constructor(show, refused) {
    this.show = show;
    this.refused = refused;
    this.timer = 0;
    this.turn = 0;
    this.wait = PERIOD_MS;
    this.status = "connecting";
    this.reset();
    document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(this.timer) : this.restart()));
  }

  reset() {
    this.state = null;
    this.slices = new Map();
    this.answers = [];
    this.samples = [];
  }

  /* Poll at once; the reply to a poll in progress is ignored. */
  restart() {
    clearTimeout(this.timer);
    this.poll(++this.turn);
  }

  async poll(turn) {
    const sent = key();
    let status;
    try {
      const life = this.state?.gateway.life ?? "";
      const query = new URLSearchParams({ life, since: this.state?.number ?? 0 });
      const reply = await fetch(`console/state?${query}`, {
        headers: headers(), cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS),
      });
      const body = await reply.json();
      if (turn !== this.turn) return;
      status = this.handle(reply.status, body, sent);
    } catch {
      if (turn !== this.turn) return;
      status = "lost";
    }
    this.status = status;
    this.show(this);
    if (status === "refused" || status === "off" || document.hidden) return;
    this.wait = status === "live" ? PERIOD_MS : Math.min(SLOWEST_MS, 1.6 * this.wait);
    this.timer = setTimeout(() => this.poll(turn), this.wait);
  }

  handle(code, body, sent) {
    if (code === 200) {
      this.take(body);
      return "live";
    }
    if (code === 401) {
      this.reset();
      this.refused(sent ? `${body.error.message}.` : "");
      return "refused";
    }
    return code === 404 ? "off" : "lost";
  }

  take(state) {
    const before = this.state;
    const isOther = before && (before.gateway.life !== state.gateway.life || before.viewer.tenant !== state.viewer.tenant);
    if (isOther) this.reset();
    this.state = state;
    for (const slice of state.slices) this.slices.set(slice.index, slice.lanes);
    for (const index of this.slices.keys()) {
      if (index <= state.slice_now - state.num_slices) this.slices.delete(index);
    }
    const known = new Set(this.answers.map((answer) => answer.number));
    const fresh = state.answers.filter((answer) => !known.has(answer.number));
    this.answers = [...fresh, ...this.answers].slice(0, NUM_ANSWERS);
    this.sample(state);
  }

  sample(state) {
    const counts = new Map();
    for (const worker of state.workers) {
      counts.set(`prefill ${worker.id} ${worker.life}`, worker.num_prefill_tokens);
      counts.set(`decode ${worker.id} ${worker.life}`, worker.num_decode_tokens);
    }
    for (const [source, target, kind, moves, bytes] of state.flows) {
      counts.set(`moves ${source} ${target} ${kind}`, moves);
      counts.set(`bytes ${source} ${target} ${kind}`, bytes);
    }
    const at = performance.now();
    this.samples.push({ at, counts });
    while (this.samples.length > 2 && at - this.samples[1].at >= RATE_MS) this.samples.shift();
  }

  /* Returns the rate per second of a counter over the last seconds; null before the second sample. `before`: the
     counter's value in samples that lack it. */
  rate(name, before = null) {
    const [first, last] = [this.samples[0], this.samples.at(-1)];
    if (!first || first === last || !last.counts.has(name)) return null;
    const begun = first.counts.get(name) ?? before;
    return begun === null ? null : Math.max(0, 1000 * (last.counts.get(name) - begun) / (last.at - first.at));
  }
}
