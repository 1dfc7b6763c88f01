// The live view of a cluster: shows the reports and decisions of the controller.

import { Refused, call, events, make } from "./api.js";
import { chart, short } from "./chart.js";
import { HeatMap } from "./heat_map.js";

const $ = (id) => document.getElementById(id);
const KEPT_S = 15 * 60;
const ROWS_LISTED = 100;
// Figures of a replica: title, format, and the ends of the axis, which are extended to fit the data.
const FIGURES = {
  load: ["rows in use", (value) => `${(100 * value).toFixed(0)} %`, [0, 1]],
  threshold: ["threshold", short, [0.9, 1]],
  block: ["block", short],
  tokens_s: ["tokens/s", short],
  tokens_per_forward: ["tokens per forward", (value) => value.toFixed(2)],
  agreement: ["agreement audited", (value) => `${(100 * value).toFixed(2)} %`, [0.9, 1]],
  queue: ["waiting", short],
};
const heatMap = new HeatMap($("heat"), (replica, unix_s, shown) => ($("heat-says").textContent = `${replica} at ${clock(unix_s)}: ${shown}`));
// The model whose controller the page shows; none means the main model.
const MODEL = new URLSearchParams(location.search).get("model");
const OF_MODEL = MODEL === null ? {} : { model: MODEL };
let frames = [];
let now = null;
let controller = null;
let waiting = false;
let changed = false;

// Handle one event of the stream.
export function take(event) {
  if (event.silent) return say(`${event.silent} The page shows earlier data.`, true);
  const life = event.controller;
  if (life && controller && life !== controller) {
    notice(`The controller was restarted at ${clock(Date.now() / 1000)}. Earlier data stay on this page.`);
    frames = frames.filter((frame) => frame.unix_s < event.frame.unix_s); // its node may have another clock
  }
  controller = life ?? controller;
  if (event.frame) {
    changed = true;
    frames = frames.filter((frame) => frame.unix_s !== event.frame.unix_s && frame.unix_s > event.frame.unix_s - KEPT_S);
    frames.push(event.frame);
    // A new controller may send older frames.
    if (frames.length > 1 && frames.at(-2).unix_s > event.frame.unix_s) frames.sort((a, b) => a.unix_s - b.unix_s);
  }
  if (event.now) {
    now = event.now;
    say("");
    $("updated").textContent = `Updated at ${clock(now.unix_s)}.`;
    listModels(now.models);
  }
  if (waiting) return undefined;
  waiting = true; // draw only once for events that arrive together
  return requestAnimationFrame(() => {
    waiting = false;
    draw();
  });
}

const clock = (unix_s) => new Date(unix_s * 1000).toLocaleTimeString([], { hour12: false });
const column = (frame, name) => frame.values.map((values) => values[frame.figures.indexOf(name)]).filter((value) => value !== null);
const price = (value) => short(value ?? NaN);
const sum = (values) => values.reduce((total, value) => total + value, 0);

function say(text, bad = false) {
  $("says").textContent = text;
  $("says").className = bad ? "notice" : "soft";
}

function notice(text) {
  $("notices").replaceChildren(make("p", "notice", text));
}

export function draw() {
  $("live").hidden = !now;
  if (!now) return;
  const last = frames.at(-1);
  const notices = [now.status.notice, ...now.status.warnings].filter(Boolean);
  $("figures-notice").hidden = notices.length === 0;
  $("figures-notice").textContent = notices.join("; ");
  const perHour = now.status.price_per_hour;
  tiles([
    ["replicas", String(now.replicas), `${now.status.desired_replicas || "–"} desired`],
    ["policy", now.status.policy, ""],
    ["tokens/s", last ? short(sum(column(last, "tokens_s"))) : "–", ""],
    ["waiting", last ? short(sum(column(last, "queue"))) : "–", "sequences"],
    ...(perHour === null ? [] : [["price", price(now.status.price_per_million_tokens), `per 1M tokens, at ${short(perHour)} an hour`]]),
  ]);
  classes();
  curves();
  jobs();
  if (!changed) return; // frames arrive only every five seconds, and drawing them takes most of the time
  changed = false;
  series();
  heat();
  replicas(last);
}

function tiles(pairs) {
  $("tiles").replaceChildren(...pairs.map(([name, value, of]) => {
    const pair = make("div");
    const shown = make("dd", "", `${value} `);
    shown.append(make("small", "", of));
    pair.append(make("dt", "", name), shown);
    return pair;
  }));
}

// Fill a table, but keep unchanged cells, so that a button does not disappear under the pointer.
function fill(body, rows) {
  rows.forEach((cells, number) => {
    const row = body.rows[number] ?? body.insertRow();
    cells.forEach((cell, place) => {
      const at = row.cells[place] ?? row.insertCell();
      if (typeof cell === "string") at.textContent !== cell && (at.textContent = cell);
      else if (at.dataset.key !== cell.key) {
        at.dataset.key = cell.key;
        at.replaceChildren(...cell.parts());
      }
    });
  });
  while (body.rows.length > rows.length) body.deleteRow(-1);
}

function classes() {
  fill($("classes"), now.status.classes.map((row) => [
    row.name, short(row.threshold), `${short(row.floor)} to ${short(row.ceiling)}`, row.requests_s.toFixed(1),
    `${row.reason}${row.override?.ends_unix_s ? ` until ${clock(row.override.ends_unix_s)}` : ""}${row.floor_reason ? `. Requested floor ${short(row.floor_asked)} raised: ${row.floor_reason}` : ""}`,
    { key: `${row.name} ${Boolean(row.override)}`, parts: () => buttons(row) },
  ]));
  const top = now.status.curve[0];
  $("demand").textContent = top ? `Demand is ${top.demand.toFixed(2)} times the capacity of the cluster at threshold ${short(top.threshold)}.` : "";
}

// Links to the pages of the endpoint's models, the main one first.
function listModels(models) {
  if ($("models").dataset.listed === models.join()) return; // new links would lose the focus
  $("models").dataset.listed = models.join();
  $("models").hidden = models.length < 2;
  $("models").replaceChildren(...models.map((name, index) => {
    const link = make("a", "", name);
    link.href = index ? `?${new URLSearchParams({ model: name })}` : "?";
    if (name === (MODEL ?? models[0])) link.setAttribute("aria-current", "page");
    return link;
  }));
}

function buttons(row) {
  const set = make("button", "", "Set");
  set.setAttribute("aria-label", `Set the threshold of class ${row.name}`);
  set.addEventListener("click", () => openOverride(now.status.classes.find(({ name }) => name === row.name) ?? row));
  if (!row.override) return [set];
  const clear = make("button", "", "Clear");
  clear.setAttribute("aria-label", `Clear the threshold of class ${row.name}`);
  clear.addEventListener("click", () => confirmed(`Let the policy choose the threshold of class ${row.name} again?`, () =>
    call(`control/threshold?${new URLSearchParams({ ...OF_MODEL, service_class: row.name })}`, { method: "DELETE" })));
  return [set, " ", clear];
}

function openOverride(row) {
  $("override-title").textContent = `Threshold of class ${row.name}`;
  Object.assign($("override-value"), { min: row.floor_asked, max: row.ceiling, value: row.threshold });
  $("override-allowed").textContent = `From ${short(row.floor_asked)} to ${short(row.ceiling)}.`;
  $("override").onclose = () => {
    if ($("override").returnValue !== "set") return;
    const [threshold, minutes] = [Number($("override-value").value), Number($("override-minutes").value)];
    const lasting = minutes ? `for ${minutes} minutes` : "until it is cleared";
    confirmed(`Set the threshold of class ${row.name} to ${threshold} ${lasting}? Until then the policy has no effect on it.`, () =>
      call("control/threshold", {
        method: "PUT", body: { ...OF_MODEL, threshold, service_class: row.name, seconds: minutes ? 60 * minutes : null },
      }));
  };
  $("override").returnValue = "";
  $("override").showModal();
}

function confirmed(question, act) {
  $("confirm-says").textContent = question;
  $("confirm").returnValue = "";
  $("confirm").onclose = async () => {
    if ($("confirm").returnValue !== "yes") return;
    try {
      await act();
      notice("Done. The controller applies it with the next report.");
    } catch (error) {
      notice(error.message);
    }
  };
  $("confirm").showModal();
}

function curves() {
  curve("curve", "Tokens per second of the whole cluster at each threshold", "tokens_s");
  curve("price", "Expected price of a million tokens at each threshold", "price_per_million_tokens");
  fill($("curve-rows"), now.status.curve.map((point) => [
    short(point.threshold), short(point.tokens_s), `${(100 * point.demand).toFixed(0)} %`, price(point.price_per_million_tokens),
  ]));
}

// Draw a figure of the curve by threshold; hide its card if the figure is unknown.
function curve(id, title, figure) {
  const points = now.status.curve.filter((point) => point[figure] !== null).map((point) => [point.threshold, point[figure]]);
  $(`${id}-card`).hidden = !points.length;
  if (!points.length) return;
  const drawn = JSON.stringify([points, now.status.classes.map(({ threshold }) => threshold)]);
  if ($(id).dataset.drawn === drawn) return; // a new chart would lose the hint under the pointer
  $(id).dataset.drawn = drawn;
  const at = (threshold) => {
    const near = points.reduce((best, point) => (Math.abs(point[0] - threshold) < Math.abs(best[0] - threshold) ? point : best));
    return near[1];
  };
  $(id).replaceChildren(chart({
    title,
    lines: [{ at: points }],
    points: now.status.classes.map(({ name, threshold }) => ({ name, x: threshold, y: at(threshold) })),
  }));
}

function series() {
  const last_s = frames.at(-1).unix_s;
  $("series").replaceChildren(...Object.entries(FIGURES).map(([name, [title, shown, ends]]) => {
    const at = [];
    const band = [];
    for (const frame of frames) {
      const values = column(frame, name);
      if (!values.length) continue;
      const minutes = (frame.unix_s - last_s) / 60;
      at.push([minutes, sum(values) / values.length]);
      if (values.length > 1) band.push([minutes, values.reduce((a, b) => Math.min(a, b)), values.reduce((a, b) => Math.max(a, b))]);
    }
    const card = make("section", "card");
    const head = make("h3", "", title);
    if (at.length) head.append(make("span", "spark-now", shown(at.at(-1)[1])));
    card.append(head, chart({
      title: `${title} in the last 15 minutes, mean of the replicas`,
      lines: [{ at, band }],
      x: { ends: [-KEPT_S / 60, 0], unit: " min" },
      y: ends ? { ends: [Math.min(ends[0], ...at.map(([, value]) => value), ...band.map(([, low]) => low)), ends[1]] } : {},
    }));
    return card;
  }));
}

function heat() {
  const name = $("heat-figure").value;
  const [title, shown, ends] = FIGURES[name];
  heatMap.draw(frames, { name, title, shown, ends: ends ?? [0, 0] });
}

function replicas(last) {
  fill($("replicas"), last.replicas.slice(0, ROWS_LISTED).map((name, number) => [
    name, ...Object.entries(FIGURES).map(([figure, [, shown]]) => {
      const value = last.values[number][last.figures.indexOf(figure)];
      return value === null ? "–" : shown(value);
    }),
  ]));
  const more = last.replicas.length - ROWS_LISTED;
  $("replicas-more").textContent = more > 0 ? `and ${more} more` : "";
}

function jobs() {
  $("jobs-card").hidden = !now.jobs.length;
  fill($("jobs"), now.jobs.map((row) => {
    const share = row.tokens / (row.tokens + row.job.backlog.tokens || 1);
    const left = row.job.backlog.seconds;
    const minutes = (Math.abs(left) / 60).toFixed(1);
    const due = left === null ? "none" : left < 0 ? `missed ${minutes} min ago` : `in ${minutes} min`;
    const late = `runs; will be ${(row.late_s / 60).toFixed(1)} min late even at the fastest threshold`;
    const plain = row.paused ? "paused for online requests" : row.late_s ? late : "runs";
    const status = row.notice ? `${plain}; ${row.notice}` : plain;
    return [row.name, {
      key: `${row.name} ${share.toFixed(2)}`,
      parts: () => {
        const bar = make("progress");
        Object.assign(bar, { max: 1, value: share });
        bar.setAttribute("aria-label", `Progress of ${row.name}`);
        return [bar, ` ${(100 * share).toFixed(0)} %`];
      },
    }, due, short(row.job.tokens_s ?? NaN), short(row.job.threshold), String(row.workers), status];
  }));
}

// Streams are short, because a stopping gateway waits for open streams. Each stream continues where the last one ended.
async function follow() {
  for (;;) {
    try {
      const position = new URLSearchParams({ ...OF_MODEL, ...(now ? { controller, after: now.after } : {}) });
      for await (const data of events(await call(`control/live?${position}`))) take(JSON.parse(data));
    } catch (error) {
      if (error instanceof Refused && [401, 403].includes(error.status)) return say(`${error.message} Reload the page to give a key.`, true);
      say(`${error.message} Trying again.`, true);
      await new Promise((resolve) => setTimeout(resolve, 2000));
    }
  }
}

for (const [name, [title]] of Object.entries(FIGURES)) {
  const option = make("option", "", title);
  option.value = name;
  $("heat-figure").append(option);
}
$("heat-figure").addEventListener("change", heat);
follow();
