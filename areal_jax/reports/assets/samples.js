// The browser of samples: one group at a time, its samples side by side.
"use strict";

const LEVELS = ["above 95 %", "90 to 95 %", "78 to 90 %", "61 to 78 %", "37 to 61 %", "22 to 37 %", "14 to 22 %", "5 to 14 %",
  "0.7 to 5 %", "below 0.7 %"];

// The golden angle: neighbouring versions differ, and colours repeat late.
function versionColor(version) {
  return `hsl(${Math.round(version * 137.508) % 360} 62% var(--token))`;
}

function levelColor(level) {
  return level === "-" ? "transparent" : `hsl(14 85% 55% / ${(Number(level) / 9) * 0.75})`;
}

const browser = {
  state: {run: 0, first: "", last: "", grade: "", task: "", color: "version", offset: 0},
  found: 0,
  group: null,
  shown: "",
  search: 0,

  bind() {
    for (const name of ["first", "last", "grade", "task", "color", "run"]) {
      const input = byId(`filter-${name}`);
      input.value = this.state[name];
      input.addEventListener("input", () => {
        this.state[name] = name === "run" ? Number(input.value) : input.value;
        if (name !== "color") this.state.offset = 0;
        this.refresh();
      });
    }
    byId("samples-next").addEventListener("click", () => this.move(1));
    byId("samples-previous").addEventListener("click", () => this.move(-1));
    byId("samples-clear").addEventListener("click", () => {
      for (const name of ["first", "last", "grade", "task"]) byId(`filter-${name}`).value = this.state[name] = "";
      this.state.offset = 0;
      this.refresh();
    });
  },

  move(step) {
    this.state.offset = Math.max(0, Math.min(this.found - 1, this.state.offset + step));
    this.refresh();
  },

  // Groups of the page that match, newest first.
  matches(run) {
    const {first, last, grade, task} = this.state, wanted = task.toLowerCase();
    return run.groups.filter((group) => {
      const grades = new Set(group.samples.map((sample) => sample.grade));
      return (first === "" || group.version >= Number(first)) && (last === "" || group.version <= Number(last))
        && (grade === "" || (grade === "mixed" ? grades.size > 1 : grades.has(grade)))
        && group.task.toLowerCase().includes(wanted);
    }).reverse();
  },

  // The number of groups that match, and one of them: that at the offset, or the kept one if it still matches.
  async find(kept) {
    const {run: place, offset} = this.state;
    if (!page.isLive) {
      const found = this.matches(page.data.runs[place]);
      const at = kept ? found.findIndex((group) => group.group === kept.group) : -1;
      return {found: found.length, offset: at < 0 ? offset : at, group: found[at < 0 ? offset : at] ?? null};
    }
    const query = new URLSearchParams(location.search);
    if (kept) query.set("group", kept.group);
    for (const name of ["run", "first", "last", "grade", "task", "offset"]) query.set(name, this.state[name]);
    const answer = await fetch(`samples?${query}`);
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  },

  // New steps must not replace what is being read: `isUpdate` keeps the shown group.
  async refresh(isUpdate = false) {
    const runs = page.data.runs;
    if (this.state.run >= runs.length) this.state.run = 0;
    const run = runs[this.state.run];
    byId("samples").hidden = runs.every((each) => !each.samples.groups);
    this.fillChoices(runs, run);
    const search = ++this.search;
    let answer;
    try {
      answer = await this.find(isUpdate ? this.group : null);
    } catch (error) {
      byId("samples-found").textContent = `samples could not be read: ${error.message}`;
      return;
    }
    if (search !== this.search) return;  // a later filter has been set
    if (answer.found && answer.offset >= answer.found) {
      this.state.offset = answer.found - 1;
      return this.refresh();
    }
    this.found = answer.found;
    this.state.offset = answer.offset;
    this.group = answer.group;
    const total = run.samples.groups.toLocaleString();
    const what = page.isLive ? `of the run's ${total} groups`
      : `of the ${run.groups.length} groups in this file; the run has ${total}`;
    byId("samples-found").textContent = answer.found
      ? `group ${this.state.offset + 1} of ${answer.found.toLocaleString()} that match, ${what}` : `no group matches, ${what}`;
    byId("samples-note").hidden = page.isLive || run.groups.length >= run.samples.groups;
    byId("samples-previous").disabled = this.state.offset <= 0;
    byId("samples-next").disabled = this.state.offset >= answer.found - 1;
    this.show();
  },

  fillChoices(runs, run) {
    const choices = byId("filter-run"), grades = byId("filter-grade");
    choices.parentNode.hidden = runs.length < 2;
    const fill = (select, options, value) => {
      const key = JSON.stringify(options);
      if (select.dataset.key !== key) {
        select.dataset.key = key;
        select.replaceChildren(...options.map(([of, text]) => element("option", {value: of, textContent: text})));
      }
      select.value = value;
    };
    fill(choices, runs.map((each, place) => [String(place), each.label]), String(this.state.run));
    fill(grades, [["", "any"], ["mixed", "mixed: samples differ"], ...Object.keys(run.samples.grades).sort().map((each) => [each, each])],
      this.state.grade);
  },

  show() {
    const dark = getComputedStyle(document.documentElement).colorScheme;
    const key = JSON.stringify([this.group, this.state.color, dark]);
    if (key === this.shown) return;
    this.shown = key;
    const group = this.group;
    if (!group) return byId("samples-body").replaceChildren();
    const rewards = group.samples.map((sample) => sample.reward);
    const known = rewards.filter((reward) => reward !== null);
    const mean = known.reduce((sum, reward) => sum + reward, 0) / (known.length || 1);
    byId("samples-body").replaceChildren(
      element("p", {}, element("b", {textContent: `Task ${group.task}`}), ` trained at step ${group.version}, group ${group.group}, mean reward ${
        number(mean)}, expected answer: `, element("code", {className: "expected", textContent: group.expected || "none"})),
      element("pre", {className: "prompt given", tabIndex: 0, textContent: group.prompt}),
      ...group.images.map((src, place) => element("img", {className: "given", src, alt: `Image ${place + 1} of the prompt`})), this.keys(group),
      element("div", {className: "group", tabIndex: 0}, ...group.samples.map((sample) => this.sample(sample))));
  },

  keys(group) {
    if (this.state.color === "logp") {
      return element("p", {className: "note"}, "Probability at which the policy sampled the token: ",
        ...LEVELS.map((text, level) => element("span", {className: "key", style: `background:${levelColor(String(level))}; color: var(--text)`,
          textContent: text})));
    }
    const versions = new Set(group.samples.flatMap((sample) => sample.spans.filter((span) => span && span[0] >= 0).map((span) => span[0])));
    return element("p", {className: "note"}, "Policy that sampled the token: ", ...[...versions].sort((a, b) => a - b).map((version) =>
      element("span", {className: "key", style: `background:${versionColor(version)}`, textContent: `version ${version}`})),
      " A wavy line marks tokens too stale to train on.");
  },

  sample(sample) {
    const text = element("pre", {tabIndex: 0});
    for (const span of sample.spans) {
      if (span === null) text.append(element("span", {className: "gap", textContent: "\n[… tokens left out of this page …]\n"}));
      else text.append(...this.span(span));
    }
    const reward = sample.reward === null ? "none" : number(sample.reward);
    return element("article", {className: "sample"}, element("div", {}, element("span", {className: `grade ${sample.grade}`, textContent: sample.grade}),
      element("span", {className: "note", textContent: ` reward ${reward}, ${sample.tokens} tokens, ended by ${sample.stop}`})), text);
  },

  span([version, isStale, text, chars, levels]) {
    if (version < 0) return [element("span", {className: "given", textContent: text})];
    const classes = `token${isStale ? " stale" : ""}`, stale = isStale ? ", too stale to train on" : "";
    if (this.state.color !== "logp") {
      return [element("span", {className: classes, title: `version ${version}${stale}`, style: `background:${versionColor(version)}`, textContent: text})];
    }
    const spans = [];
    let start = 0;
    for (let token = 0; token < chars.length;) {
      let end = start, next = token;
      while (next < chars.length && levels[next] === levels[token]) end += chars[next++];
      if (end > start) {
        spans.push(element("span", {className: classes, title: `version ${version}, probability ${LEVELS[levels[token]] ?? ""}${stale}`,
          style: `background:${levelColor(levels[token])}; color: inherit`, textContent: text.slice(start, end)}));
      }
      [start, token] = [end, next];
    }
    return spans;
  },
};
