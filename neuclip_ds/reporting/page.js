// Draws the plots of a report as SVG: values on hover, an optional log axis per plot, smoothing of all curves.
"use strict";
const COLORS = ["#1f77b4", "#d95f02", "#1b9e77", "#a50f78", "#7a6a00", "#666666", "#c2185b", "#00838f"];
const LEFT = 58, RIGHT = 22, TOP = 8, BOTTOM = 34, HEIGHT = 240;
const smoothing = document.getElementById("smoothing");

function element(parent, name, attributes, text) {
  const namespace = parent.namespaceURI.endsWith("svg") || name === "svg" ? "http://www.w3.org/2000/svg" : parent.namespaceURI;
  const made = document.createElementNS(namespace, name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
}

function format(value, percent) {
  if (percent) return `${+(100 * value).toPrecision(4)}%`;
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2).replace(/\.?0+e/, "e") : `${+value.toPrecision(5)}`;
}

// Exponential moving average, without the bias at its start, as in TensorBoard.
function smooth(values, weight) {
  let sum = 0, total = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

function ticks(low, high, log) {
  if (log && high / low >= 10) {
    const powers = [];
    for (let power = Math.ceil(Math.log10(low) - 1e-9); power <= Math.log10(high) + 1e-9; power++) powers.push(10 ** power);
    const every = Math.ceil(powers.length / 6);
    return powers.filter((_, number) => number % every === 0);
  }
  const raw = (high - low) / 5, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw);
  const found = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + 1e-9 * step; number++) found.push(number * step);
  return found;
}

// Returns a function that maps a value to its position in pixels, and the tick values.
// `leastRange` is the smallest range of a linear axis, as a share of the largest value.
function axis(values, log, start, end, leastRange) {
  let low = values.reduce((a, b) => Math.min(a, b), Infinity), high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  const missing = leastRange * Math.max(Math.abs(low), Math.abs(high)) - (high - low);
  if (!log && missing > 0) [low, high] = [low - missing / 2, high + missing / 2];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 10, high + (Math.abs(high) || 1) / 10];
  const scale = log ? Math.log10 : (value) => value;
  const place = (value) => start + ((scale(value) - scale(low)) / (scale(high) - scale(low))) * (end - start);
  return [place, ticks(low, high, log)];
}

function draw(figure, plot) {
  const holder = figure.querySelector(".plot"), log = figure.querySelector("input").checked;
  holder.replaceChildren();
  const width = holder.clientWidth;
  const curves = plot.curves.map((curve, number) => {
    const dense = curve.y.length > 100;  // few points are shown as they are
    const shown = smooth(curve.y, dense ? +smoothing.value : 0).map((y) => (y === null || (log && y <= 0) ? null : y));
    return { ...curve, shown, color: COLORS[number % COLORS.length] };
  });
  const finite = curves.flatMap((curve) => curve.shown.filter((y) => y !== null));
  if (!finite.length) { element(holder, "p", {}, "No value is above 0: turn the log axis off."); return; }
  const chance = plot.chance.filter((line) => !log || line.y > 0);
  const [x, xTicks] = axis(curves.flatMap((curve) => curve.x), false, LEFT, width - RIGHT, 0);
  const [y, yTicks] = axis(finite.concat(chance.map((line) => line.y)), log, HEIGHT - BOTTOM, TOP, plot.least_range);
  const svg = element(holder, "svg", { width, height: HEIGHT, role: "img", "aria-label": plot.title });
  for (const value of yTicks) {
    element(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value), class: "grid" });
    element(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value, plot.unit === "%"));
  }
  const most = Math.max(2, Math.floor((width - LEFT) / 70)), every = Math.ceil(xTicks.length / most);
  xTicks.filter((_, number) => number % every === 0).forEach((value) => {
    element(svg, "text", { x: x(value), y: HEIGHT - BOTTOM + 15, "text-anchor": "middle" }, format(value));
  });
  element(svg, "text", { x: (LEFT + width) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "training step");
  for (const line of chance) {
    const drawn = element(svg, "line", { x1: LEFT, x2: width - RIGHT, y1: y(line.y), y2: y(line.y), class: "chance" });
    element(drawn, "title", {}, `${line.name}: ${format(line.y, plot.unit === "%")}`);
  }
  for (const curve of curves) {
    let path = "", pen = "M";
    curve.shown.forEach((value, number) => {
      if (value !== null) path += `${pen}${x(curve.x[number]).toFixed(1)},${y(value).toFixed(1)}`;
      pen = value === null ? "M" : "L";
    });
    element(svg, "path", { d: path, stroke: curve.color, class: "curve" });
  }
  const cursor = element(svg, "line", { y1: TOP, y2: HEIGHT - BOTTOM, class: "cursor", visibility: "hidden" });
  const values = figure.querySelector(".values");
  const show = (at) => {
    cursor.setAttribute("visibility", at === null ? "hidden" : "visible");
    values.replaceChildren();
    if (at !== null) {
      cursor.setAttribute("x1", x(at));
      cursor.setAttribute("x2", x(at));
      element(values, "span", {}, `training step ${format(at)}`);
    }
    for (const curve of curves) {
      const number = at === null ? -1 : nearest(curve.x, at);
      const value = number < 0 || curve.y[number] === null ? "" : `: ${format(curve.y[number], plot.unit === "%")}`;
      const name = element(values, "span", {}, `${curve.name}${value}`);
      name.style.color = curve.color;
    }
    if (chance.length) element(values, "span", {}, "dashed: chance");
  };
  const all = [...new Set(curves.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  svg.addEventListener("pointermove", (event) => {
    const place = event.clientX - svg.getBoundingClientRect().left;
    show(all[nearest(all.map(x), place)]);
  });
  svg.addEventListener("pointerleave", () => show(null));
  show(null);
}

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= wanted) low = middle; else high = middle;
  }
  return Math.abs(sorted[low] - wanted) <= Math.abs(sorted[high] - wanted) ? low : high;
}

const place = document.getElementById("plots"), redraw = [];
for (const plot of JSON.parse(document.getElementById("data").textContent)) {
  const figure = element(place, "figure"), head = element(figure, "header");
  element(head, "strong", {}, plot.title);
  element(head, "small", {}, plot.unit);
  const label = element(head, "label");
  const log = element(label, "input", { type: "checkbox" });
  label.append(" log axis");
  log.checked = plot.log_scale;
  element(figure, "div", { class: "plot" });
  element(figure, "div", { class: "values" });
  element(figure, "figcaption", {}, plot.meaning);
  log.addEventListener("change", () => draw(figure, plot));
  redraw.push(() => draw(figure, plot));
}
const drawAll = () => redraw.forEach((one) => one());
smoothing.addEventListener("input", drawAll);
let shownWidth = 0;
new ResizeObserver(() => {
  if (place.clientWidth !== shownWidth) { shownWidth = place.clientWidth; drawAll(); }
}).observe(place);
