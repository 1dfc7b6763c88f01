// Show an answer while it streams: tokens coloured by forward, figures, and details of each token.
// Text from the model is only inserted as text nodes.

import { make } from "./api.js";

const COLOURS = 4;
const FIGURES = ["tokens/forward", "tokens/s", "first token", "tokens"];

export class Answer {
  constructor(title) {
    this.element = make("article", "card reply");
    this.title = make("h2", "", title);
    this.figures = Object.fromEntries(FIGURES.map((name) => [name, make("dd", "", "–")]));
    const list = make("dl", "figures-beside");
    for (const name of FIGURES) {
      const pair = make("div");
      pair.append(make("dt", "", name), this.figures[name]);
      list.append(pair);
    }
    this.body = make("div", "answer");
    this.body.tabIndex = 0;
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", `Answer, ${title}. Arrow keys step through its tokens.`);
    this.detail = make("p", "detail soft");
    this.detail.setAttribute("role", "status");
    this.element.append(this.title, list, this.body, this.detail);
    this.tokens = [];
    this.byIndex = new Map();
    this.held = [];
    this.begin();
    this.firstAt = null;
    this.chosen = -1;
    this.body.addEventListener("pointerover", (event) => this.choose(this.tokens.findIndex((token) => token.span === event.target)));
    this.body.addEventListener("click", (event) => this.choose(this.tokens.findIndex((token) => token.span === event.target)));
    this.body.addEventListener("keydown", (event) => this.step(event));
    this.body.addEventListener("focus", () => this.chosen < 0 && this.choose(0));
  }

  // Start the timer of this answer.
  begin() {
    this.began = performance.now();
  }

  get text() {
    return this.tokens.filter((token) => !token.thought).map((token) => token.span.textContent).join("");
  }

  // Add one event of the stream.
  take(chunk, mode) {
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices[0];
    if (!choice) return this.count();
    // Tokens without text are parts of a character, or their text is held back. They belong to the text that comes next.
    const entries = [...this.held, ...(choice.logprobs?.content ?? [])];
    const { content, reasoning_content: reasoning } = choice.delta;
    const text = content || reasoning || "";
    this.held = text ? [] : entries;
    if (text) this.append(text, entries, mode, !content);
    for (const audit of choice.logprobs?.audits ?? []) this.audit(audit);
    if (choice.finish_reason) this.reason = choice.finish_reason;
    if (text) this.count();
  }

  append(text, entries, mode, thought) {
    this.lastAt = performance.now();
    this.firstAt ??= this.lastAt;
    const last = this.tokens.at(-1);
    if (!entries.length && last?.thought === thought) {
      last.span.append(text); // the rest of an unfinished character
      return;
    }
    const entry = entries[0] ?? { forward: last?.forward ?? 0, logprob: NaN };
    const span = make("span", `token c${entry.forward % COLOURS}${thought ? " thought" : ""}`, text);
    const place = this.tokens.filter((earlier) => earlier.forward === entry.forward).length;
    const count = Math.max(last ? 0 : 1, entries.length);
    const token = { span, text, entries, count, thought, forward: entry.forward, confidence: Math.exp(entry.logprob), place, mode };
    span.dataset.forward = entry.forward;
    for (const { index } of entries) this.byIndex.set(index, token);
    this.received = (this.received ?? 0) + count;
    this.tokens.push(token);
    this.body.append(span);
  }

  audit(audit) {
    const token = this.byIndex.get(audit.index);
    if (!token) return;
    // Compare bytes, because a token may be only a part of a character.
    const same = String(audit.bytes) === String(token.entries.find(({ index }) => index === audit.index).bytes);
    if (token.audit && same) return; // of several tokens of a character, show one that differs
    Object.assign(token, { audit, same });
    token.span.classList.toggle("other", !same);
  }

  count() {
    const tokens = this.usage?.completion_tokens ?? this.received ?? 0;
    const forwards = this.tokens.at(-1)?.forward ?? 0;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const perForward = this.usage?.tokens_per_forward ?? (forwards ? tokens / forwards : NaN);
    const show = (name, value, digits, unit = "") => {
      this.figures[name].textContent = Number.isFinite(value) ? value.toFixed(digits) + unit : "–";
    };
    show("tokens/forward", perForward, 2);
    // The time runs from the first forward on, so the tokens of that forward do not count.
    const begun = this.tokens.filter((token) => token.forward === this.tokens[0].forward);
    const later = tokens - begun.reduce((sum, token) => sum + token.count, 0);
    show("tokens/s", later > 0 && seconds > 0 ? later / seconds : NaN, 0);
    show("first token", this.firstAt === null ? NaN : this.firstAt - this.began, 0, " ms");
    show("tokens", tokens, 0);
  }

  end(says) {
    this.count();
    const seconds = ((this.lastAt ?? performance.now()) - this.began) / 1000;
    this.title.append(make("small", "", ` ${says ?? this.reason ?? "ended"} after ${seconds.toFixed(2)} s`));
    const audited = this.tokens.filter((token) => token.audit);
    const equal = audited.filter((token) => token.same).length;
    if (audited.length) {
      this.detail.textContent = `${equal} of ${audited.length} tokens taken ahead equal one-at-a-time decoding.`;
    }
  }

  fail(message) {
    this.element.append(make("p", "wrong", message));
  }

  step(event) {
    const to = { ArrowRight: this.chosen + 1, ArrowLeft: this.chosen - 1, Home: 0, End: this.tokens.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(to, 0), this.tokens.length - 1));
  }

  choose(number) {
    const token = this.tokens[number];
    if (!token) return;
    this.tokens[this.chosen]?.span.classList.remove("chosen");
    token.span.classList.add("chosen");
    this.chosen = number;
    const together = this.tokens.filter((other) => other.forward === token.forward).length;
    const which = together > 1 ? `, token ${token.place + 1} of ${together}` : "";
    const sure = Number.isFinite(token.confidence) ? `, confidence ${(100 * token.confidence).toFixed(1)} %` : "";
    this.detail.textContent = `“${visible(token.text)}”: forward ${token.forward}${which}${sure}. ${oneAtATime(token)}`;
  }
}

function oneAtATime(token) {
  if (token.audit && !token.same) {
    return `One-at-a-time decoding would have chosen “${visible(token.audit.token)}” (${(100 * Math.exp(token.audit.logprob)).toFixed(1)} %).`;
  }
  if (token.audit || token.mode !== "threshold") return "One-at-a-time decoding chooses the same token.";
  return "Whether one-at-a-time decoding chooses the same token is not known here.";
}

const visible = (text) => text.replaceAll("\n", "⏎");
