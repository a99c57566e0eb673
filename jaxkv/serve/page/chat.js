// One chat: its card, its messages, and the stream of the answer it waits for. Knows no other chat and no pool.

import { events } from "/page/api.js";
import { colour, count, hatch, owner, paper, seconds, times } from "/page/format.js";

const STRIP_S = 60; // seconds that the strip shows
const REASONS = { stop: "said all", length: "as long as allowed", cancelled: "stopped" };

const now = () => performance.now() / 1000;

export class Chat {
  /** `options()` are the fields of a request, `told(text)` is for what a listener should hear of, `changed()` for whatever depends on states. */
  constructor(number, { options, told, changed, closed }) {
    Object.assign(this, { number, options, told, changed, closed });
    this.messages = [];
    this.id = null; // of the request under way
    this.state = "ready";
    this.spans = []; // {state, from, to}: what the strip shows
    this.reset();
    this.build();
  }

  reset() {
    Object.assign(this, { tokens: 0, pauses: 0, paused: 0, since: now() });
  }

  get isBusy() {
    return this.id !== null;
  }

  get name() {
    return `Chat ${this.number}`;
  }

  // The card

  build() {
    const card = document.getElementById("chat").content.cloneNode(true).firstElementChild;
    const find = (selector) => card.querySelector(selector);
    this.card = card;
    this.parts = Object.fromEntries(["state", "count", "close", "strip", "said", "send", "stop"].map((name) => [name, find(`.${name}`)]));
    this.form = find("form");
    this.field = find("textarea");
    find(".swatch").classList.add(owner(this.number - 1));
    find("h3").textContent = this.name;
    find("h3").id = `chat-${this.number}`;
    card.setAttribute("aria-labelledby", `chat-${this.number}`);
    this.field.setAttribute("aria-label", `${this.name}: your message`);
    this.parts.said.setAttribute("aria-label", `${this.name}: messages`);
    this.parts.strip.setAttribute("aria-label", `${this.name}: its last ${STRIP_S} seconds`);
    this.parts.stop.setAttribute("aria-label", `Stop ${this.name.toLowerCase()}`);
    this.parts.close.setAttribute("aria-label", `Close ${this.name.toLowerCase()}`);
    this.parts.stop.addEventListener("click", () => this.stop());
    this.parts.close.addEventListener("click", () => this.close());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      const text = this.field.value.trim();
      if (!text || this.isBusy) return;
      this.field.value = "";
      this.send(text);
    });
    this.field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.form.requestSubmit();
    });
  }

  /** A message's place in the card; what is written into it is never more than text. */
  write(kind, text) {
    const { said } = this.parts;
    const entry = document.createElement("div");
    entry.className = `entry ${kind}`;
    entry.append(document.createTextNode(text));
    said.append(entry);
    said.scrollTop = said.scrollHeight;
    return entry.firstChild;
  }

  add(place, text) {
    const { said } = this.parts;
    const isAtEnd = said.scrollHeight - said.scrollTop - said.clientHeight < 40;
    place.appendData(text);
    if (isAtEnd) said.scrollTop = said.scrollHeight;
  }

  // The request

  async send(text, more = {}) {
    this.messages.push({ role: "user", content: text });
    this.write("user", text);
    this.reset();
    this.id = `page-${crypto.getRandomValues(new Uint32Array(2)).join("-")}`;
    this.leaver = new AbortController();
    this.enter("waiting");
    const place = this.write("model", "");
    const body = { messages: this.messages, ...this.options(), ...more, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } };
    let reason = null;
    try {
      for await (const event of events("/v1/chat/completions", body, { signal: this.leaver.signal, id: this.id })) {
        reason = this.take(event, place) ?? reason;
      }
      if (reason === null) throw new Error("the server left before the answer was complete");
    } catch (error) {
      reason = error.name === "AbortError" ? "cancelled" : "error";
      if (reason === "error") this.write("wrong", error.message);
    }
    this.end(place, reason);
  }

  /** One event of the stream; the finish reason when it brings one. */
  take({ comment, data }, place) {
    if (comment === "parked") this.enter("parked");
    else if (comment === "restored") this.enter("running");
    if (data === undefined) return null;
    if (data.error) throw new Error(data.error.message);
    const [choice] = data.choices;
    if (data.usage) this.tokens = data.usage.completion_tokens;
    if (choice?.delta?.content) {
      if (this.state !== "parked") this.enter("running");
      this.add(place, choice.delta.content);
    }
    return choice?.finish_reason ?? null;
  }

  end(place, reason) {
    const said = place.data;
    if (said) this.messages.push({ role: "assistant", content: said });
    else this.messages.pop(); // nothing came of it: the next message stands in its place
    this.id = this.leaver = null;
    this.enter(reason === "error" ? "failed" : reason === "cancelled" ? "stopped" : "done");
    const pauses = this.pauses ? `, parked ${times(this.pauses)} for ${seconds(this.paused)} in all` : "";
    if (reason !== "error") this.write("sum", `${REASONS[reason] ?? reason}: ${count(this.tokens)} tokens${pauses}`);
    this.told(`${this.name} ${reason === "error" ? "failed" : "has ended"}`);
  }

  stop() {
    this.leaver?.abort();
  }

  close() {
    this.stop();
    this.card.remove();
    this.closed(this);
  }

  // Its state

  /** Another state begins. */
  enter(state) {
    if (state === this.state) return;
    if (this.state === "parked") this.paused += now() - this.since;
    if (state === "parked") {
      this.pauses += 1;
      this.told(`${this.name} is parked`);
    } else if (this.state === "parked" && state === "running") this.told(`${this.name} goes on`);
    this.state = state;
    this.since = now();
    this.spans.push({ state, from: this.since });
    this.show();
    this.changed();
  }

  show() {
    const { state, count: shown, said, send, stop } = this.parts;
    const isTimed = this.state === "parked" || this.state === "waiting";
    const text = isTimed ? `${this.state} ${seconds(now() - this.since)}` : this.state;
    if (state.textContent !== text) state.textContent = text;
    state.dataset.state = this.state;
    this.card.dataset.state = this.state;
    shown.hidden = !this.tokens;
    shown.firstChild.textContent = count(this.tokens);
    stop.hidden = !this.isBusy;
    send.hidden = this.isBusy;
    said.setAttribute("aria-busy", String(this.isBusy));
  }

  /** Who ran when: the last minute, now at the right. */
  draw() {
    const { pen, width, height } = paper(this.parts.strip);
    const until = now();
    const place = (time) => Math.max(0, width * (1 - (until - time) / STRIP_S));
    this.spans = this.spans.filter((span, index) => index === this.spans.length - 1 || until - this.spans[index + 1].from < STRIP_S);
    this.spans.forEach((span, index) => {
      const from = place(span.from);
      const length = place(this.spans[index + 1]?.from ?? until) - from;
      const ink = colour(owner(this.number - 1));
      if (span.state === "running") {
        pen.fillStyle = ink;
        pen.fillRect(from, 0, length, height);
      } else if (span.state === "parked") hatch(pen, from, 0, length, height, ink);
      else if (span.state === "waiting") {
        pen.fillStyle = colour("line");
        pen.fillRect(from, height / 2 - 1, length, 2);
      }
    });
  }
}
