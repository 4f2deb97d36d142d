// The report of one or more runs: renders the page from its data, and again from every update.
"use strict";

const IS_PART = window !== window.top && location.search.startsWith("?part=data");
const UPDATE_MS = 10_000;
const page = {data: null, decoded: new Map(), theme: "auto", isLive: false, isConnected: true};

function byId(id) {
  return document.getElementById(id);
}

// Lines of a run by metric, decoded when a chart first asks for them.
function lineOf(run, name) {
  const place = run.places.get(name);
  if (!place) return null;
  if (!place.line) {
    const frame = place.frame;
    frame.x ??= decode(frame.versions, Int32Array);
    const [y, low, high] = frame.columns[name].map((text) => decode(text, Float32Array));
    place.line = {x: frame.x, y, low, high};
  }
  return place.line;
}

function index(run) {
  run.places = new Map();
  for (const frame of run.frames) {
    for (const name of Object.keys(frame.columns)) run.places.set(name, {frame, line: null});
  }
}

function expand(line, runs) {
  if (!line.metric.includes("*")) return [{...line, key: line.metric, label: line.label || line.metric}];
  const [before, after] = line.metric.split("*");
  const found = new Set();
  for (const run of runs) {
    for (const name of run.places.keys()) {
      const part = name.slice(before.length, name.length - after.length);
      if (name.startsWith(before) && name.endsWith(after) && part && !part.includes("/")) found.add(name);
    }
  }
  const order = new Intl.Collator("en", {numeric: true}).compare;
  return [...found].sort(order).map((name) => {
    const part = name.slice(before.length, name.length - after.length);
    return {...line, metric: name, key: name, label: (line.label || line.metric).replace("*", part)};
  });
}

function withSpread(run, line, drawn) {
  const spread = line.spread ? lineOf(run, line.spread) : null;
  if (!spread) return drawn;
  const widths = new Map(spread.x.map((x, place) => [x, spread.y[place] * line.spread_factor]));
  const at = (sign) => drawn.x.map((x, place) => (drawn.y[place] === null ? null
    : drawn.y[place] + sign * (widths.get(x) ?? 0)));
  return {...drawn, low: at(-1), high: at(1)};
}

function chartLines(spec, runs) {
  const lines = [];
  const wanted = spec.lines.flatMap((line) => expand(line, runs))
    .filter((line) => page.data.runs.some((run) => run.places.has(line.metric)));
  runs.forEach((run, number) => {
    wanted.forEach((line, place) => {
      const found = lineOf(run, line.metric);
      if (!found || (spec.stacked && !found.y.some((value) => value))) return;
      const many = page.data.runs.length > 1 && !spec.stacked;
      lines.push(withSpread(run, line, {
        ...found, key: `${run.key} ${line.key}`, title: meaning(run, line.metric), smooth: spec.smooth,
        label: many ? (wanted.length > 1 ? `${run.label} · ${line.label}` : run.label) : line.label,
        color: COLORS[(many ? page.data.runs.indexOf(run) : place) % COLORS.length],
        dash: many ? DASHES[place % DASHES.length] : [],
      }));
    });
  });
  return lines;
}

function meaning(run, name) {
  const [text, unit, healthy] = run.metrics[name] ?? ["", "", ""];
  return `${name}${text ? `: ${text}` : ""}${unit ? ` (${unit})` : ""}${healthy ? `; healthy: ${healthy}` : ""}`;
}

function renderCharts(section, specs) {
  const container = byId(`${section}-charts`), wanted = new Set();
  for (const spec of specs) {
    const variants = spec.stacked ? page.data.runs.map((run) => [run]) : [page.data.runs];
    for (const runs of variants) {
      if (spec.without && runs.every((run) => run.places.has(spec.without))) continue;
      const lines = chartLines(spec, runs);
      if (!lines.length) continue;
      const name = spec.stacked && page.data.runs.length > 1 ? `${spec.title}: ${runs[0].label}` : spec.title;
      const id = `${section}/${name}`;
      wanted.add(id);
      showChart(container, {...spec, id, title: name, lines, section});
    }
  }
  return wanted;
}

function stalenessCharts() {
  const wanted = new Set(), container = byId("staleness-charts");
  for (const run of page.data.runs) {
    const {bins, versions, counts} = run.staleness;
    if (!versions.length) continue;
    const totals = versions.map((_, row) => counts.reduce((sum, of) => sum + of[row], 0) || 1);
    const lines = counts.flatMap((of, bin) => {
      if (!of.some((count) => count > 0)) return [];
      const last = bins[bin + 1] - 1;
      const label = bins[bin + 1] === undefined ? `${bins[bin]} or more` : last > bins[bin] ? `${bins[bin]} to ${last}` : `${bins[bin]}`;
      return [{key: `${bin}`, label, color: ORDERED[bin], x: versions, y: of.map((count, row) => count / totals[row])}];
    });
    const many = page.data.runs.length > 1;
    const id = `staleness/histogram ${run.key}`;
    wanted.add(id);
    showChart(container, {id, title: many ? `Tokens by staleness: ${run.label}` : "Tokens by staleness", unit: "share", lines,
      note: "Share of each step's sampled tokens, by how many versions older than the trained policy they are.",
      stacked: true, zero: true, section: "staleness"});
  }
  return wanted;
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
  if (days) return `${days} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes % 60} min`;
  if (minutes) return `${minutes} min ${Math.round(seconds % 60)} s`;
  return seconds < 10 ? `${seconds.toFixed(1)} s` : `${Math.round(seconds)} s`;
}

function date(seconds) {
  return seconds ? new Date(1000 * seconds).toLocaleString([], {dateStyle: "medium", timeStyle: "medium"}) : "–";
}

const STATES = {running: "running", finished: "finished", stopped: "stopped early", silent: "no news"};

// A run that was killed cannot say so: its page falls silent.
function stateOf(run) {
  const age = Date.now() / 1000 - run.updated_s;
  return run.state === "running" && !page.isLive && age > Math.max(120, 10 * (run.step_s ?? 0)) ? "silent" : run.state;
}

function card(value, label) {
  return element("div", {className: "card"}, element("b", {textContent: value}), element("span", {textContent: label}));
}

function compareRuns(runs) {
  const labels = [...new Set(runs.flatMap((run) => run.summary.map(([name]) => name)))];
  const head = ["run", "state", "steps", "per step", ...labels, "commit"].map((text) => element("th", {scope: "col", textContent: text}));
  const rows = runs.map((run, place) => {
    const state = stateOf(run), summary = Object.fromEntries(run.summary);
    const texts = [`${run.steps_done}${run.num_steps ? ` of ${run.num_steps}` : ""}`, duration(run.step_s),
      ...labels.map((name) => summary[name] ?? "–"), (run.environment.commit ?? "").slice(0, 12)];
    return element("tr", {}, element("th", {scope: "row", title: `${run.folder}\n${run.command}`},
      element("i", {className: "swatch", style: `background:${COLORS[place % COLORS.length]}`}), run.label),
      element("td", {}, element("span", {className: `state ${state}`, textContent: STATES[state]})),
      ...texts.map((text) => element("td", {textContent: text})));
  });
  return element("div", {className: "panel"}, element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)));
}

function renderRun() {
  if (page.data.runs.length > 1) return byId("run-body").replaceChildren(compareRuns(page.data.runs));
  const parts = page.data.runs.flatMap((run) => {
    const state = stateOf(run);
    const share = run.num_steps ? Math.min(1, run.steps_done / run.num_steps) : null;
    const steps = run.num_steps ? `${run.steps_done} of ${run.num_steps}` : `${run.steps_done}`;
    const facts = [["Command", run.command, true], ["Commit", run.environment.commit, true],
      ["Started", date(run.started_s)], ["Updated", date(run.updated_s)], ["Folder", run.folder, true]];
    const name = element("h2", {}, `${run.label} `, element("span", {className: `state ${state}`, textContent: STATES[state]}));
    const cards = element("div", {className: "cards"}, card(steps, "steps"),
      run.state === "running" ? card(duration(run.left_s), "left, at the pace of the last steps") : null,
      card(duration(run.step_s), "per step"), ...run.summary.map(([label, text]) => card(text, label)));
    const bar = share === null ? null : element("div", {className: "progress"}, element("i", {style: `width:${100 * share}%`}));
    const table = element("table", {}, element("tbody", {}, ...facts.filter(([, value]) => value).map(([label, value, isCode]) =>
      element("tr", {}, element("th", {scope: "row", textContent: label}),
        element("td", {}, isCode ? element("code", {textContent: value}) : value)))));
    const silent = state !== "silent" ? null : element("p", {className: "wrong",
      textContent: `Nothing was written for ${duration(Date.now() / 1000 - run.updated_s)}: the process may have ended.`});
    return [name, element("p", {className: "note", textContent: run.headline}), silent, bar, cards,
      element("div", {className: "panel"}, table)].filter(Boolean);
  });
  byId("run-body").replaceChildren(...parts);
}

const MARKS = {healthy: "✓ healthy", ended: "! ended", finding: "✗ finding"};

function renderHealth() {
  const many = page.data.runs.length > 1;
  const body = page.data.runs.flatMap((run) => {
    return run.health.map((check) => {
      const when = check.status === "finding" ? `since step ${check.first}, in ${check.steps} steps: `
        : check.status === "ended" ? `from step ${check.first}, in ${check.steps} steps, now ended: ` : "";
      const what = check.status === "healthy" ? element("td", {className: "what", textContent: `would mean: ${check.meaning}`})
        : element("td", {}, `${when}${check.meaning}. `, element("b", {textContent: "What to do: "}), `${check.remedy}.`);
      return element("tr", {className: check.status}, element("td", {className: `mark ${check.status}`, textContent: MARKS[check.status]}),
        many ? element("td", {textContent: run.label}) : null, element("td", {}, element("code", {textContent: check.name})),
        element("td", {className: "number", textContent: check.value}),
        element("td", {className: "note", textContent: check.healthy}), what);
    });
  });
  const head = ["", ...(many ? ["run"] : []), "check", "value", "healthy range", "what to do"].map((text) =>
    element("th", {scope: "col", className: text === "value" ? "number" : "", textContent: text}));
  byId("health-body").replaceChildren(body.length
    ? element("table", {className: "health"}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...body))
    : element("p", {className: "note", textContent: "Checks need two steps."}));
}

function renderTimeNote() {
  byId("time-note").replaceChildren(...page.data.runs.filter((run) => run.bottleneck).map((run) =>
    element("p", {textContent: page.data.runs.length > 1 ? `${run.label}: ${run.bottleneck}` : run.bottleneck})));
}

function counted(title, counts) {
  const total = Object.values(counts).reduce((sum, count) => sum + count, 0);
  const rows = Object.entries(counts).sort((a, b) => b[1] - a[1]).map(([name, count]) => element("tr", {},
    element("td", {className: name, textContent: name}), element("td", {className: "number", textContent: count.toLocaleString()}),
    element("td", {className: "number", textContent: number(count / total, "share")})));
  return element("div", {className: "panel"}, element("h2", {textContent: title}), element("table", {}, element("tbody", {}, ...rows)));
}

function renderCounts() {
  byId("sample-counts").replaceChildren(...page.data.runs.flatMap((run) => {
    const of = page.data.runs.length > 1 ? `: ${run.label}` : "";
    return Object.keys(run.samples.grades).length
      ? [counted(`Grades${of}`, run.samples.grades), counted(`Why answers ended${of}`, run.samples.stop_reasons)] : [];
  }));
}

function renderMetrics() {
  if (!byId("metrics").open) return;
  const wanted = byId("metric-filter").value.toLowerCase();
  const rows = page.data.runs.flatMap((run) => Object.entries(run.ranges).filter(([name]) => name.toLowerCase().includes(wanted))
    .map(([name, [first, last, low, high, version]]) => {
      const unit = (run.metrics[name] ?? ["", ""])[1];
      const show = element("button", {type: "button", textContent: "chart"});
      show.addEventListener("click", () => {
        const spec = {title: name, lines: [{metric: name}], unit, smooth: true};
        showChart(byId("metrics-charts"), {...spec, id: `metrics/${name}`, lines: chartLines(spec, page.data.runs), note: meaning(run, name)});
        byId("metrics-charts").scrollIntoView({block: "nearest"});
      });
      return element("tr", {}, element("td", {title: meaning(run, name)}, element("code", {textContent: name}),
        page.data.runs.length > 1 ? ` ${run.label}` : ""),
        ...[first, last, low, high].map((value) => element("td", {className: "number", textContent: number(value, unit)})),
        element("td", {className: "number", textContent: version}), element("td", {}, show));
    }));
  byId("metrics-body").replaceChildren(...rows);
}

function renderSettings() {
  byId("settings-body").replaceChildren(...page.data.runs.map((run) => element("div", {className: "panel"},
    element("h2", {textContent: page.data.runs.length > 1 ? run.label : "Environment"}),
    element("table", {}, element("tbody", {}, ...Object.entries(run.environment).map(([name, value]) => element("tr", {},
      element("th", {scope: "row", textContent: name}), element("td", {textContent: value}))))),
    element("pre", {textContent: settingsOf(run)}))));
}

// Of several runs, the settings in which they differ.
function settingsOf(run) {
  const others = page.data.runs.filter((other) => other !== run).map((other) => other.configuration);
  const isShown = ([name, value]) => !others.length || others.some((other) => JSON.stringify(other[name]) !== JSON.stringify(value));
  return Object.entries(run.configuration).filter(isShown).map(([name, value]) => `${name}=${
    typeof value === "string" ? value : JSON.stringify(value)}`).join("\n");
}

function label(runs) {
  runs.forEach((run, number) => {
    const isTwice = runs.some((other) => other !== run && other.name === run.name);
    run.label = isTwice ? `${run.name} (${number + 1})` : run.name;
    run.key = `${number}`;
    index(run);
  });
}

function render(data) {
  page.data = data;
  label(data.runs);
  document.title = data.runs.map((run) => `${run.label}: ${run.steps_done}${run.num_steps ? `/${run.num_steps}` : ""}`).join(", ");
  byId("headline").textContent = data.runs.length > 1 ? "Comparison of runs" : "Training report";
  renderRun();
  renderHealth();
  renderTimeNote();
  const wanted = new Set();
  for (const section of ["learning", "policy", "time"]) {
    for (const id of renderCharts(section, data.sections[section])) wanted.add(id);
  }
  for (const id of stalenessCharts()) wanted.add(id);
  for (const id of renderCharts("staleness", data.sections.staleness)) wanted.add(id);
  removeCharts((id) => !wanted.has(id) && !id.startsWith("metrics/"));
  for (const section of ["learning", "policy", "time", "staleness"]) {
    byId(section).hidden = !byId(`${section}-charts`).children.length;
  }
  renderCounts();
  renderMetrics();
  renderSettings();
  browser.refresh(true);
  for (const link of document.querySelectorAll("nav a")) link.hidden = byId(link.hash.slice(1)).hidden;
}

// Another copy of this file, in a hidden frame, sends its data: pages of the file system cannot be fetched.
function readAgain() {
  if (document.hidden || !page.data.runs.some((run) => run.state === "running")) return;
  const frame = element("iframe", {hidden: true, src: `${location.href.split(/[?#]/)[0]}?part=data&${Date.now()}`});
  const failed = setTimeout(() => { save(); location.reload(); }, 8000);
  const receive = (event) => {
    if (event.source !== frame.contentWindow || typeof event.data?.report !== "string") return;
    clearTimeout(failed);
    window.removeEventListener("message", receive);
    frame.remove();
    const data = JSON.parse(event.data.report);
    if (data.runs.some((run, number) => run.updated_s !== page.data.runs[number]?.updated_s)) render(data);
    else renderRun();
  };
  window.addEventListener("message", receive);
  document.body.append(frame);
}

function listen() {
  const events = new EventSource(`events${location.search}`);
  const show = (text) => { byId("connection").textContent = text; };
  events.addEventListener("open", () => show("live"));
  events.addEventListener("error", () => show("connection lost; trying again"));
  events.addEventListener("message", (event) => render(JSON.parse(event.data)));
}

const STATE_KEY = `report ${location.pathname}`;

function save() {
  const state = {scroll: window.scrollY, zoom: charts.zoom, smoothing: charts.smoothing, theme: page.theme,
    open: [...document.querySelectorAll("details")].map((each) => each.open), samples: browser.state};
  try { sessionStorage.setItem(STATE_KEY, JSON.stringify(state)); } catch { /* storage is switched off: nothing is kept */ }
}

function restore() {
  let state = null;
  try { state = JSON.parse(sessionStorage.getItem(STATE_KEY)); } catch { /* as in `save` */ }
  if (!state) return () => {};
  charts.zoom = state.zoom;
  document.documentElement.toggleAttribute("data-zoomed", charts.zoom !== null);
  charts.smoothing = state.smoothing;
  page.theme = state.theme;
  if (page.theme !== "auto") document.documentElement.setAttribute("data-theme", page.theme);
  Object.assign(browser.state, state.samples);
  document.querySelectorAll("details").forEach((each, place) => { each.open = state.open[place] ?? each.open; });
  return () => window.scrollTo(0, state.scroll);
}

function bind() {
  const smoothing = byId("smoothing"), theme = byId("theme");
  smoothing.value = charts.smoothing;
  theme.value = page.theme;
  smoothing.addEventListener("input", () => { charts.smoothing = Number(smoothing.value); redrawCharts(); });
  theme.addEventListener("change", () => { page.theme = theme.value; setTheme(theme.value); browser.refresh(); });
  byId("reset-zoom").addEventListener("click", () => setZoom(null));
  byId("metric-filter").addEventListener("input", renderMetrics);
  byId("metrics").addEventListener("toggle", renderMetrics);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => browser.refresh());
  window.addEventListener("pagehide", save);
  document.addEventListener("keydown", (event) => {
    if (event.target.closest("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const sections = ["run", "health", "learning", "policy", "time", "staleness", "samples", "metrics", "settings"];
    if (event.key >= "1" && event.key <= "9") byId(sections[Number(event.key) - 1]).scrollIntoView();
    else if (event.key === "0") setZoom(null);
    else if (event.key === "n" || event.key === "p") browser.move(event.key === "n" ? 1 : -1);
    else if (event.key === "/") { byId("samples").scrollIntoView(); byId("filter-task").focus(); }
    else return;
    event.preventDefault();
  });
}

function start() {
  const text = byId("data").textContent;
  // No other site may frame a file; one that frames a served copy of this page gets nothing.
  if (IS_PART) return window.parent.postMessage({report: text}, location.protocol === "file:" ? "*" : location.origin);
  history.scrollRestoration = "manual";
  const data = JSON.parse(text), scroll = restore();
  page.isLive = data.live;
  bind();
  browser.bind();
  render(data);
  scroll();
  if (page.isLive) listen();
  else setInterval(readAgain, UPDATE_MS);
}
