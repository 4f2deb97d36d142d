// Charts of several lines over the steps, with one zoom, one cursor and one smoothing for all.
"use strict";

const COLORS = ["#3b7dd8", "#e07a2f", "#2f9e63", "#b5529c", "#8168d6", "#c79a1e", "#2aa7a7", "#d4504f",
  "#7a8b2e", "#5b6b7d", "#a56a43", "#d277b3"];
// Staleness is ordered, so its colours are: from fresh (blue) to stale (red).
const ORDERED = ["#2c7fb8", "#41b6c4", "#7fcdbb", "#c7e9b4", "#fed976", "#feb24c", "#f03b20", "#99000d"];
const DASHES = [[], [6, 3], [2, 3], [10, 3, 2, 3]];

const charts = {all: new Map(), zoom: null, smoothing: 0.6, changed: () => {}};

function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made && name !== "style") made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function variable(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Decode little-endian numbers of 4 bytes in base64; null stands for nan.
function decode(text, kind) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const values = Array.from(new kind(bytes.buffer));
  return kind === Float32Array ? values.map((value) => (Number.isNaN(value) ? null : value)) : values;
}

function number(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  if (unit === "share") return `${(100 * value).toFixed(Math.abs(value) < 0.1 && value !== 0 ? 2 : 1)} %`;
  const size = Math.abs(value);
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(3)}G`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return `${+value.toPrecision(4)}`;
}

function translucent(color, opacity) {
  return `${color}${Math.round(255 * opacity).toString(16).padStart(2, "0")}`;
}

// Exponential moving mean, without the bias of its first values.
function smooth(values, weight) {
  let mean = 0, total = 0;
  return values.map((value) => {
    if (value === null || value === undefined) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + 1 - weight;
    return mean / total;
  });
}

// The columns of a chart, and how each is drawn. A line has key, label, color, x, y, and may have low,
// high, dash, smooth.
function columns(chart) {
  const lines = chart.lines;
  const tables = [];
  const series = [{}], bands = [], shown = [];
  const add = (x, y, options) => {
    tables.push([x, y]);
    series.push({spanGaps: true, points: {show: false}, ...options});
    return series.length - 1;
  };
  if (chart.stacked) {
    const joined = uPlot.join(lines.map((line) => [line.x, line.y]));
    const sums = new Array(joined[0].length).fill(0);
    let before = null;
    lines.forEach((line, place) => {
      if (chart.hidden.has(line.key)) return shown.push({line, y: joined[place + 1], x: joined[0]});
      joined[place + 1].forEach((value, row) => (sums[row] += value ?? 0));
      const index = add(joined[0], [...sums], {stroke: line.color, width: 1,
        fill: before === null ? translucent(line.color, 0.75) : undefined});
      if (before !== null) bands.push({series: [index, before], fill: translucent(line.color, 0.75)});
      before = index;
      shown.push({line, y: joined[place + 1], x: joined[0]});
    });
  } else {
    for (const line of lines) {
      shown.push({line, y: line.y, x: line.x});
      if (chart.hidden.has(line.key)) continue;
      const few = line.y.length <= 40;
      const smooths = line.smooth && charts.smoothing > 0 && line.y.length > 4;
      if (line.low) {
        const high = add(line.x, line.high, {stroke: translucent(line.color, 0.12), width: 1});
        const low = add(line.x, line.low, {stroke: translucent(line.color, 0.12), width: 1});
        bands.push({series: [high, low], fill: translucent(line.color, line.smooth ? 0.14 : 0.2)});
      }
      if (chart.bars) {
        const paths = uPlot.paths.bars({size: [1, Infinity], align: 1, gap: 1});
        add(line.x, line.y, {stroke: line.color, width: 0, fill: translucent(line.color, 0.75), paths});
        continue;
      }
      const points = {show: few && !smooths, size: 5};
      add(line.x, line.y, {stroke: translucent(line.color, smooths ? 0.45 : 1), width: smooths ? 1 : 1.8,
        dash: line.dash, points});
      if (smooths) {
        add(line.x, smooth(line.y, charts.smoothing), {stroke: line.color, width: 2, dash: line.dash});
      }
    }
  }
  return {data: tables.length ? uPlot.join(tables) : [[]], series, bands, shown};
}

function axis(chart, options) {
  const grid = variable("--line");
  return {stroke: variable("--muted"), grid: {stroke: grid, width: 1}, ticks: {stroke: grid, width: 1, size: 4},
    font: "11px system-ui, sans-serif", ...options};
}

function options(chart, width, made) {
  const xs = made.data[0];
  const full = () => {
    const first = xs.length ? xs[0] : 0, last = chart.bars?.at(-1) ?? (xs.length ? xs[xs.length - 1] : 1);
    return first === last ? [first - 0.5, last + 0.5] : [first, last];
  };
  const y = {};
  if (chart.log) y.distr = 3;
  else {
    y.range = (_, low, high) => {
      if (low === null) return [0, 1];
      const margin = 0.06 * (high - low || Math.abs(high) || 1);
      const bottom = (chart.zero || chart.stacked) && low >= 0 ? 0 : low - margin;
      return [bottom, high + margin];
    };
  }
  return {
    width, height: chart.height ?? 190, series: made.series, bands: made.bands, legend: {show: false},
    scales: {x: {time: false, distr: chart.xLog ? 3 : 1, log: 2,
      range: chart.synced ? () => charts.zoom ?? full() : full}, y},
    axes: [axis(chart, {size: 26, incrs: chart.xLog ? undefined : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000,
      5000, 10000, 20000, 50000, 100000]}),
      axis(chart, {size: 56, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, chart.unit)))})],
    cursor: {drag: {setScale: false, x: chart.synced, y: false}, points: {size: 5},
      sync: chart.synced ? {key: "steps", scales: ["x", null]} : undefined,
      bind: {dblclick: () => () => { setZoom(null); return null; }}},
    hooks: {
      setCursor: [(plot) => showValues(chart, plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null)],
      setSelect: [(plot) => {
        const {left, width: wide} = plot.select;
        if (wide > 4 && chart.synced) setZoom([plot.posToVal(left, "x"), plot.posToVal(left + wide, "x")]);
        plot.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
      }],
    },
  };
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle;
    else high = middle;
  }
  return high < 0 ? -1 : Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

// Values at a step in the legend; without a step, the last ones.
function showValues(chart, x) {
  chart.shown.forEach(({line, x: xs, y}, place) => {
    const cell = chart.values[place];
    if (!cell) return;
    if (x === null && !chart.synced) return void (cell.textContent = "");
    let row = x === null ? y.length - 1 : nearest(xs, x);
    while (row > 0 && (y[row] === null || y[row] === undefined)) row -= 1;
    cell.textContent = row < 0 ? "–" : number(y[row], chart.unit);
  });
  chart.at.textContent = x === null || !chart.synced ? "" : `step ${Math.round(x)}`;
}

function setZoom(range) {
  charts.zoom = range && range[1] - range[0] > 1e-6 ? range : null;
  document.documentElement.toggleAttribute("data-zoomed", charts.zoom !== null);
  for (const chart of charts.all.values()) if (chart.synced && chart.plot) chart.plot.setData(chart.plot.data, true);
  charts.changed();
}

function fullRange() {
  let first = Infinity, last = -Infinity;
  for (const chart of charts.all.values()) {
    const xs = chart.synced && chart.plot ? chart.plot.data[0] : [];
    if (xs.length) [first, last] = [Math.min(first, xs[0]), Math.max(last, xs[xs.length - 1])];
  }
  return first < last ? [first, last] : [0, 1];
}

// Move or scale the zoom: arrows, plus and minus on a focused chart.
function moveZoom(shift, scale) {
  const [first, last] = fullRange(), [low, high] = charts.zoom ?? [first, last];
  const width = Math.min(last - first, Math.max(1, (high - low) * scale));
  const centre = (low + high) / 2 + shift * (high - low);
  const start = Math.min(Math.max(first, centre - width / 2), last - width);
  setZoom(width >= last - first ? null : [start, start + width]);
}

function legend(chart) {
  chart.values = [];
  const items = chart.lines.map((line) => {
    const value = element("b");
    chart.values.push(value);
    const swatch = element("i", {style: `background:${line.color}`, ariaHidden: "true"});
    if (line.dash && line.dash.length) swatch.setAttribute("style",
      `background:repeating-linear-gradient(90deg, ${line.color} 0 4px, transparent 4px 6px)`);
    const button = element("button", {type: "button", className: "line", title: line.title ?? ""},
      swatch, line.label, " ", value);
    button.setAttribute("aria-pressed", String(!chart.hidden.has(line.key)));
    button.addEventListener("click", () => {
      if (chart.hidden.has(line.key)) chart.hidden.delete(line.key);
      else chart.hidden.add(line.key);
      button.setAttribute("aria-pressed", String(!chart.hidden.has(line.key)));
      draw(chart);
    });
    return button;
  });
  chart.legend.replaceChildren(...items);
}

function draw(chart) {
  const made = columns(chart);
  chart.shown = made.shown;
  const shape = JSON.stringify([made.series.slice(1), made.bands, chart.log]);
  if (chart.plot && chart.shape === shape && !chart.xLog) {
    chart.plot.setData(made.data, true);
  } else {
    chart.plot?.destroy();
    chart.shape = shape;
    chart.plot = new uPlot(options(chart, Math.max(200, chart.canvas.clientWidth), made), made.data, chart.canvas);
  }
  showValues(chart, null);
}

// Show a chart in a container; a chart with the same id is updated in place.
// spec: id, title, unit, note, lines, stacked, zero, log, xLog, synced, bars (their edges), height.
function showChart(container, spec) {
  let chart = charts.all.get(spec.id);
  if (!chart) {
    chart = {hidden: new Set(), values: [], shown: []};
    chart.title = element("h3");
    chart.at = element("span", {className: "at"});
    chart.note = element("p", {className: "note"});
    chart.legend = element("div", {className: "legend"});
    chart.canvas = element("div", {className: "canvas", tabIndex: 0});
    chart.canvas.setAttribute("role", "img");
    chart.canvas.addEventListener("keydown", (event) => {
      const moves = {ArrowLeft: [-0.25, 1], ArrowRight: [0.25, 1], "+": [0, 0.5], "=": [0, 0.5], "-": [0, 2]};
      if (event.key in moves && chart.synced) moveZoom(...moves[event.key]);
      else if (event.key === "0" || event.key === "Escape") setZoom(null);
      else return;
      event.preventDefault();
    });
    chart.figure = element("figure", {className: "chart"},
      element("div", {className: "title"}, chart.title, chart.at), chart.note, chart.legend, chart.canvas);
    charts.all.set(spec.id, chart);
  }
  if (chart.figure.parentNode !== container) container.append(chart.figure);
  const keys = JSON.stringify(spec.lines.map((line) => [line.key, line.label, line.color]));
  Object.assign(chart, {unit: "", stacked: false, log: false, xLog: false, synced: true, ...spec, title: chart.title,
    note: chart.note});
  chart.title.textContent = spec.title;
  chart.note.textContent = spec.note ?? "";
  chart.canvas.setAttribute("aria-label", `${spec.title}: ${spec.lines.map((line) => line.label).join(", ")}`);
  if (chart.keys !== keys) {
    chart.keys = keys;
    legend(chart);
  }
  draw(chart);
}

function removeCharts(isStale) {
  for (const [id, chart] of charts.all) {
    if (!isStale(id)) continue;
    chart.plot?.destroy();
    chart.figure.remove();
    charts.all.delete(id);
  }
}

function redrawCharts() {
  for (const chart of charts.all.values()) {
    chart.plot?.destroy();
    chart.plot = null;
    draw(chart);
  }
}

let resizing = 0;
window.addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => {
    for (const chart of charts.all.values()) {
      const width = Math.max(200, chart.canvas.clientWidth);
      if (chart.plot && chart.plot.width !== width) chart.plot.setSize({width, height: chart.plot.height});
    }
  }, 100);
});

// The theme follows the system, unless the reader has chosen one.
function setTheme(theme) {
  if (theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", theme);
  redrawCharts();
}
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawCharts);
