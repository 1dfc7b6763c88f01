// Small charts: a line chart in SVG with the classes of the style sheet, and a heat map on a canvas.

import { make } from "./api.js";

const SVG = "http://www.w3.org/2000/svg";
const TICKS = 4;

const drawn = (name, attributes) => {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};

// Writes a number in few characters: 950, 0.85, 12.5k, 3M.
export function short(value) {
  if (!Number.isFinite(value)) return "–";
  for (const [size, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return Number((value / size).toPrecision(3)) + suffix;
  }
  return String(Number(value.toPrecision(3)));
}

function ticks(low, high) {
  const rough = (high - low) / TICKS || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step / 1e6; at += step) found.push(Number(at.toFixed(10)));
  return found;
}

// Returns a figure. `lines`: lists of [x, y], drawn in order; `band`: a list of [x, low, high]; `dots`: [x, y, says].
export function lineChart({ says, lines, band = [], dots = [], across = [], x = null, y = null }) {
  const figure = make("figure");
  figure.setAttribute("role", "img");
  figure.setAttribute("aria-label", says);
  const all = [...lines.flat(), ...band.flatMap(([at, low, high]) => [[at, low], [at, high]]), ...dots];
  const known = all.filter(([, value]) => Number.isFinite(value));
  const [left, right] = x ?? span(known.map(([at]) => at));
  const [bottom, top] = y ?? span([0, ...known.map(([, value]) => value * 1.08)]);
  const px = (at) => (100 * (at - left)) / (right - left || 1);
  const py = (value) => 100 - (100 * (value - bottom)) / (top - bottom || 1);
  const svg = drawn("svg", { viewBox: "0 0 100 100", preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const value of ticks(bottom, top)) {
    svg.append(drawn("path", { class: "grid", d: `M0 ${py(value)}H100` }));
    const label = make("span", "tick up", short(value));
    label.style.top = `${py(value)}%`;
    figure.append(label);
  }
  if (band.length) {
    const there = band.map(([at, , high]) => `${px(at)} ${py(high)}`);
    const back = band.toReversed().map(([at, low]) => `${px(at)} ${py(low)}`);
    svg.append(drawn("path", { class: "area", d: `M${[...there, ...back].join("L")}z` }));
  }
  for (const line of lines) {
    const points = line.filter(([, value]) => Number.isFinite(value)).map(([at, value]) => `${px(at)} ${py(value)}`);
    if (points.length) svg.append(drawn("path", { class: "edge", d: `M${points.join("L")}${points.length > 1 ? "" : "h.5"}` }));
  }
  figure.append(svg);
  for (const [at, value, label] of dots) {
    const dot = make("span", "dot");
    dot.title = label;
    dot.style.left = `${px(at)}%`;
    dot.style.top = `${py(value)}%`;
    figure.append(dot);
  }
  for (const [at, label] of across) {
    const tick = make("span", "tick across", label);
    tick.style.left = `${px(at)}%`;
    figure.append(tick);
  }
  return figure;
}

function span(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low < high ? [low, high] : [Number.isFinite(low) ? low : 0, (Number.isFinite(low) ? low : 0) + 1];
}

// Paints rows of shares from 0 to 1, null for nothing, one pixel each; the style sheet stretches the canvas.
export function heatMap(canvas, rows, colour) {
  canvas.width = rows[0]?.length || 1;
  canvas.height = rows.length || 1;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const [red, green, blue] = colour;
  rows.forEach((row, y) => row.forEach((share, x) => {
    if (share === null) return;
    image.data.set([red, green, blue, 25 + 230 * Math.min(Math.max(share, 0), 1)], 4 * (y * canvas.width + x));
  }));
  context.putImageData(image, 0, 0);
}
