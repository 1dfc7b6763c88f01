// Draw small charts of lines with bands, bars and points in SVG, styled by the style sheet.
//
// A chart is { title, lines, bars, points, x, y }; the lists are optional:
//   lines: { name, at: [[x, y], …], band: [[x, low, high], …] }, coloured in a ramp from the first to the last line
//   bars: [low, high, value], from `low` to `high` on the horizontal axis
//   points: { name, kind, x, y, x_within: [low, high], y_within: [low, high] }, with whiskers for each interval
//   x, y: { ends: [low, high], unit }; without ends, `x` spans the data, and `y` spans 0 to slightly above the data
// This file imports nothing, because reports contain a copy of it.

const SVG = "http://www.w3.org/2000/svg";
const TICKS = 4;
const NAME_SPACE = 8; // pixels between a point and its name

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Write a number in few characters: 950, 0.85, 12.5k, 3M.
export function short(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [size, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + suffix;
  }
  return String(Number(value.toPrecision(3)));
}

// Return a figure with the chart, which shows the value nearest to the pointer.
export function chart({ title, lines = [], bars = [], points = [], x = {}, y = {} }) {
  const bands = lines.flatMap(({ band = [] }) => band);
  const across = axis(x, () => [
    ...lines.flatMap(({ at }) => at.map(([value]) => value)), ...bars.flatMap(([low, high]) => [low, high]),
    ...points.flatMap((point) => [point.x, ...(point.x_within ?? [])]),
  ]);
  const up = axis(y, () => [
    0, ...[...lines.flatMap(({ at }) => at.map(([, value]) => value)), ...bands.map(([, , high]) => high),
      ...bars.map(([, , value]) => value), ...points.map((point) => point.y)].map((value) => 1.08 * value),
  ]);
  const [px, py] = [across.at, (value) => 100 - up.at(value)];
  const figure = element("figure", "");
  figure.setAttribute("role", "img");
  figure.setAttribute("aria-label", title);
  const svg = drawn("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  figure.append(svg);
  const path = (className, d) => svg.appendChild(drawn("path", { class: className, d }));
  const marks = [];
  const mark = (at, value, says) => marks.push({ left: px(at), top: py(value), says });

  for (const [value, label] of up.ticks) {
    path("grid", `M0 ${py(value)}H100`);
    figure.append(put(element("span", "tick up", label), null, py(value)));
  }
  for (const [value, label] of across.ticks) figure.append(put(element("span", "tick across", label), px(value), null));

  if (bars.length) {
    path("area", bars.map(([low, high, value]) => `M${px(low)} 100V${py(value)}H${px(high)}V100z`).join(""));
    path("edge", `M${px(bars[0][0])} ${py(bars[0][2])}${bars.map(([low, high, value]) => `H${px(low)}V${py(value)}H${px(high)}`).join("")}`);
    for (const [low, high, value] of bars) mark((low + high) / 2, value, `${across.says(low)} to ${across.says(high)}: ${up.says(value)}`);
  }
  lines.forEach(({ name, at, band = [] }, number) => {
    if (band.length) {
      const there = band.map(([place, , high]) => `${px(place)} ${py(high)}`);
      const back = band.toReversed().map(([place, low]) => `${px(place)} ${py(low)}`);
      path("area", `M${[...there, ...back].join("L")}z`);
    }
    if (!at.length) return;
    const line = path("edge", `M${at.map(([place, value]) => `${px(place)} ${py(value)}`).join("L")}${at.length > 1 ? "" : "h.5"}`);
    line.style.setProperty("--later", `${(100 * number) / Math.max(1, lines.length - 1)}%`);
    for (const [place, value] of at) mark(place, value, `${name ? `${name}, ` : ""}${across.says(place)}: ${up.says(value)}`);
  });
  for (const { name, kind = "", x: place, y: value, x_within: [left, right] = [], y_within: [low, high] = [] } of points) {
    if (left < right) path("whisker", `M${px(left)} ${py(value)}H${px(right)}`);
    if (low < high) path("whisker", `M${px(place)} ${py(low)}V${py(high)}`);
    figure.append(put(element("span", `dot ${kind}`), px(place), py(value)), put(element("span", "name", name), px(place), py(value)));
    mark(place, value, `${name}, ${across.says(place)}: ${up.says(value)}`);
  }
  if (points.length) new ResizeObserver(() => spread(figure)).observe(figure);
  if (lines.length > 1 && lines[0].name) figure.append(legend(lines));
  tell(figure, marks);
  return figure;
}

// Return an axis: functions for the position (in percent) and the label of a value, and the ticks.
function axis({ ends, unit = "" }, values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of ends ?? values()) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(low < high)) [low, high] = Number.isFinite(low) ? [low, low + 1] : [0, 1];
  const rough = (high - low) / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let at = Math.ceil(low / step); at * step <= high + step / 1e6; at += 1) {
    const value = Number((at * step).toPrecision(12));
    ticks.push([value, short(value)]);
  }
  if (ticks.length) ticks.at(-1)[1] += unit;
  return { at: (value) => (100 * (value - low)) / (high - low), says: (value) => short(value) + unit, ticks };
}

function put(made, left, top) {
  if (left !== null) made.style.left = `${left}%`;
  if (top !== null) made.style.top = `${top}%`;
  return made;
}

function legend(lines) {
  const made = element("figcaption", "legend");
  lines.forEach(({ name }, number) => {
    const key = made.appendChild(element("span", "", name));
    key.style.setProperty("--later", `${(100 * number) / (lines.length - 1)}%`);
  });
  return made;
}

// Place the names of points so that they cover no point and no other name.
function spread(figure) {
  const { clientWidth: width, clientHeight: height } = figure;
  const centre = ({ style }) => [(parseFloat(style.left) * width) / 100, (parseFloat(style.top) * height) / 100];
  const taken = [...figure.querySelectorAll(".dot")].map(centre).map(([x, y]) => [x - 6, y - 6, 12, 12]);
  const free = ([x, y, w, h]) => x >= 0 && x + w <= width + NAME_SPACE
    && taken.every(([left, top, wide, high]) => x + w < left || left + wide < x || y + h < top || top + high < y);
  for (const name of figure.querySelectorAll(".name")) {
    const [x, y] = centre(name);
    const [w, h] = [name.offsetWidth, name.offsetHeight];
    const places = [];
    for (let away = 0; away < 5; away += 1) {
      for (const down of [-h - 2 - away * h, 2 + away * h]) for (const right of [NAME_SPACE / 2, -w - NAME_SPACE / 2]) places.push([right, down]);
    }
    const [right, down] = places.find(([dx, dy]) => free([x + dx, y + dy, w, h])) ?? places[0];
    name.style.translate = `${right}px ${down}px`;
    taken.push([x + right, y + down, w, h]);
  }
}

// Show the value nearest to the pointer.
function tell(figure, marks) {
  const [dot, says] = [element("span", "here"), element("span", "hint")];
  figure.append(dot, says);
  figure.addEventListener("pointermove", (event) => {
    const box = figure.getBoundingClientRect();
    const far = ({ left, top }) => Math.hypot(left * box.width / 100 - event.clientX + box.left, (top * box.height / 100 - event.clientY + box.top) / 4);
    let nearest = null;
    for (const mark of marks) if (!nearest || far(mark) <= far(nearest)) nearest = mark; // a point wins over a line below it
    if (!nearest) return;
    put(dot, nearest.left, nearest.top);
    says.textContent = nearest.says;
    figure.classList.add("pointed");
  });
  figure.addEventListener("pointerleave", () => figure.classList.remove("pointed"));
}

for (const place of document.querySelectorAll("[data-chart]")) place.replaceChildren(chart(JSON.parse(place.dataset.chart)));
