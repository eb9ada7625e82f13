// Fills the page from the JSON in #data.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const state = { smoothing: 0, hidden: new Set() };
const COLOURS = 8;
const charts = [];

function seriesOf(metric) {
  return data.metrics[metric].map((one, i) => one && { label: data.curves[i].label, colour: i % COLOURS, x: data.steps[one.x], y: one.y, lo: one.lo, hi: one.hi })
    .filter(Boolean);
}

function picker(options, chosen, label, change) {
  const select = el("select", { "aria-label": label, onchange: () => change(select.value) },
    ...options.map(([value, text]) => el("option", { value, selected: String(value) === String(chosen) }, text)));
  return select;
}

function shorter(table, most, expanded, expand) {
  // shows the first rows of a long table, and a button for the others
  const rows = [...table.tBodies[0].rows].filter((row) => !row.hidden);
  if (expanded || rows.length <= most * 1.3) return null;
  rows.slice(most).forEach((row) => { row.hidden = true; });
  return el("button", { type: "button", class: "all", onclick: expand }, `Show all ${rows.length}`);
}

function drop(id) {
  $(id).remove();
}

// overview
function arrowed(change) {
  if (change.text) return el("div", { class: "number" }, change.text);
  const after = format.short(change.after, change.percent);
  if (change.before === null) return el("div", { class: "number" }, after);
  return el("div", { class: "number" }, el("span", { class: "from" }, format.short(change.before, change.percent)),
    el("span", { class: "arrow" }, "→"), after);
}

function delta(change) {
  if (!change.better || change.before === null || change.before === undefined) return null;
  const gain = change.after - change.before;
  if (gain === 0) return null;
  const text = (gain > 0 ? "+" : "−") + (change.percent ? (100 * Math.abs(gain)).toFixed(1) + " points" : format.short(Math.abs(gain)));
  return el("span", { class: "delta " + (gain * change.better > 0 ? "up" : "down") }, text);
}

function overview() {
  data.warnings.forEach((text) => $("overview").append(el("p", { class: "panel warning", role: "alert" }, text)));
  if (data.curves.length === 1) {
    const cards = data.headlines[0].map((change, i) => {
      const gain = delta(change);
      return el("div", { class: "card" + (i === 0 ? " main" : "") }, el("div", { class: "label" }, change.label), arrowed(change),
        el("div", { class: "note" }, gain, gain && change.note ? " · " : null, change.note || null));
    });
    $("overview").append(el("div", { class: "cards" }, ...cards));
    return;
  }
  const rank = (label) => label.startsWith("Held-out") ? 0 : label === "Reward" ? 1 : /^(Time|Tokens)/.test(label) ? 3 : 2;
  const labels = [...new Set(data.headlines.flat().map((change) => change.label))].sort((a, b) => rank(a) - rank(b));
  const rows = data.curves.map((curve, i) => el("tr", {}, el("td", {}, curveName(i)),
    ...labels.map((label) => {
      const change = data.headlines[i].find((one) => one.label === label);
      if (!change) return el("td", { class: "n" }, "–");
      const text = change.text || (change.before === null ? "" : format.short(change.before, change.percent) + " → ") + format.short(change.after, change.percent);
      return el("td", { class: "n" }, text);
    })));
  $("overview").append(el("div", { class: "panel table-wrap" }, el("table", { class: "compare" },
    el("thead", {}, el("tr", {}, el("th", {}, "Run"), ...labels.map((label) => el("th", { class: "n" }, label)))), el("tbody", {}, ...rows))));
}

function curveName(i) {
  const swatch = el("span", { class: "swatch" });
  swatch.style.color = `var(--c${i % COLOURS})`;
  const name = el("span", { class: "item", style: "display:inline-flex;gap:7px;align-items:center" }, swatch, data.curves[i].label);
  return name;
}

// curves
function curves() {
  if (data.curves.length > 1) {
    const buttons = data.curves.map((curve, i) => {
      const swatch = el("span", { class: "swatch" });
      swatch.style.color = `var(--c${i % COLOURS})`;
      const button = el("button", { type: "button", "aria-pressed": "true", onclick: () => {
        const hide = !state.hidden.has(curve.label);
        if (hide) state.hidden.add(curve.label); else state.hidden.delete(curve.label);
        button.setAttribute("aria-pressed", !hide);
        charts.forEach((chart) => chart.draw());
      } }, swatch, curve.label);
      return button;
    });
    $("legend").append(...buttons);
  }
  const long = Math.max(...data.steps.map((steps) => steps.length)) > 30;
  const slider = el("input", { type: "range", min: 0, max: 20, value: long ? 4 : 0, id: "smoothing", "aria-label": "smoothing", oninput: () => smooth() });
  const shown = el("span", { style: "min-width:3.2em" });
  const smooth = () => {
    state.smoothing = slider.value / 100;
    shown.textContent = state.smoothing ? `± ${slider.value}%` : "off";
    charts.forEach((chart) => chart.draw());
  };
  $("curve-controls").append(el("label", {}, "Smoothing", slider, shown));
  for (const spec of data.charts) {
    const chart = new Chart({ ...spec, series: seriesOf(spec.metric) }, state);
    charts.push(chart);
    $("charts").append(chart.root);
  }
  smooth();
}

// time by phase
const ORDER = ["generation", "greedy baseline", "reward", "reward model update", "values", "reference", "advantages", "critic update", "policy update", "old log-probs", "weight sync", "validation", "rollout dump", "checkpoint", "other"];
const phaseColour = (name) => `var(--p${Math.max(0, ORDER.indexOf(name))})`;

function time() {
  const names = [...new Set(data.phases.flatMap((phases) => phases.total.map(([name]) => name)))];
  if (!names.length) return drop("time");
  const order = ORDER, colour = phaseColour;
  const body = $("phases"), two = el("div", { class: "two" });
  const shares = el("div", { class: "panel" }), list = el("div", { class: "shares" });
  data.phases.forEach((phases, i) => {
    const sum = phases.total.reduce((total, [, seconds]) => total + seconds, 0);
    if (!sum) return;
    const stack = el("div", { class: "stack", role: "img", "aria-label": phases.total.map(([name, s]) => `${name} ${(100 * s / sum).toFixed(0)}%`).join(", ") },
      ...phases.total.map(([name, seconds]) => {
        const part = el("i", { title: `${name}: ${(100 * seconds / sum).toFixed(1)}%, ${format.number(seconds)} s` });
        part.style.width = 100 * seconds / sum + "%";
        part.style.background = colour(name);
        return part;
      }));
    list.append(el("div", {}, el("div", { class: "name" }, el("span", {}, data.curves.length > 1 ? curveName(i) : "All steps"), el("span", {}, long(sum))), stack));
  });
  const single = data.phases.length === 1 ? data.phases[0] : null;
  const total = single ? single.total.reduce((sum, [, seconds]) => sum + seconds, 0) : 0;
  const amounts = single ? new Map(single.total) : null;
  const legend = el("div", { class: "legend" }, ...names.sort((a, b) => amounts ? amounts.get(b) - amounts.get(a) : order.indexOf(a) - order.indexOf(b)).map((name) => {
    const swatch = el("span", { class: "swatch box" });
    swatch.style.color = colour(name);
    const share = amounts ? 100 * amounts.get(name) / total : 0;
    return el("span", { class: "item" }, swatch, name, amounts ? el("span", {}, share < 0.1 ? "<0.1%" : share.toFixed(1) + "%") : null);
  }));
  shares.append(list, legend);
  two.append(shares, el("div", { id: "bars" }));
  body.append(two);
  const draw = (i) => {
    const phases = data.phases[i];
    $("bars").replaceChildren(new Bars(phases.steps, names.filter((name) => phases.seconds[name]).sort((a, b) => order.indexOf(a) - order.indexOf(b))
      .map((name) => ({ label: name, colour: colour(name), values: phases.seconds[name] }))).root);
  };
  if (data.phases.length > 1) $("time-controls").append(picker(data.curves.map((curve, i) => [i, curve.label]), 0, "run", (i) => draw(Number(i))));
  draw(0);
}

// rollouts that run ahead
function ahead() {
  const runs = data.ahead.map((one, i) => [i, one]).filter(([, one]) => one);
  if (!runs.length) return drop("ahead");
  const draw = (i) => {
    const one = data.ahead[i], ages = new Bars(one.ages.map((_, age) => [age, age]), [{ label: "of the tokens", colour: "var(--c0)", values: one.ages }],
      { title: "Age of trained tokens", meaning: "percent of the tokens, by updates since each was drawn", unit: " %", name: "age" });
    const parts = ORDER.filter((name) => one.seconds[name]).map((name) => ({ label: name, colour: phaseColour(name), values: one.seconds[name] }));
    const lines = [["ready", "finished", "--ink"], ["carried_rows", "begun", "--c3"]].map(([name, label, colour]) => ({ label: `${label}, of later steps`, colour: `var(${colour})`, values: one.waiting[name] }));
    const steps = new Bars(one.steps, parts, { title: "Steps", meaning: "seconds by phase (left), and responses of later steps that wait behind the step (lines, right)", lines });
    const legend = el("div", { class: "legend" }, ...[...parts, ...lines].map(({ label, colour }, i) => {
      const swatch = el("span", { class: i < parts.length ? "swatch box" : "swatch" });
      swatch.style.color = colour;
      return el("span", { class: "item" }, swatch, label);
    }));
    steps.root.append(legend);
    $("ahead-body").replaceChildren(el("div", { class: "two" }, ages.root, steps.root));
  };
  if (runs.length > 1) $("ahead-controls").append(picker(runs.map(([i]) => [i, data.curves[i].label]), runs[0][0], "run that runs ahead", (i) => draw(Number(i))));
  draw(runs[0][0]);
}

function long(seconds) {
  if (seconds < 60) return seconds.toFixed(1) + " s";
  const minutes = Math.floor(seconds / 60);
  return minutes < 60 ? `${minutes} min ${Math.round(seconds % 60)} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

// samples
function samples() {
  if (!data.samples.length) return drop("samples");
  const chosen = { run: 0, source: null, early: null, late: null };
  const names = { validation: "Held-out", rollout: "Training" };
  const linesOf = () => data.samples[chosen.run].lines.filter((line) => line.source === chosen.source);
  const sources = () => ["validation", "rollout"].filter((name) => data.samples[chosen.run].lines.some((line) => line.source === name));
  const reset = () => {
    if (!sources().includes(chosen.source)) chosen.source = sources()[0];
    const lines = linesOf();
    chosen.early = lines[0].step;
    chosen.late = lines.at(-1).step;
    controls();
    draw();
  };
  const controls = () => {
    const parts = [];
    if (data.samples.length > 1) parts.push(picker(data.samples.map((one, i) => [i, one.run]), chosen.run, "run", (i) => { chosen.run = Number(i); reset(); }));
    if (sources().length > 1) parts.push(el("span", { class: "pick", role: "group", "aria-label": "kind of samples" }, ...sources().map((name) =>
      el("button", { type: "button", "aria-pressed": String(name === chosen.source), onclick: () => { chosen.source = name; reset(); } }, names[name]))));
    $("sample-controls").replaceChildren(...parts);
  };
  const draw = () => {
    const lines = linesOf(), options = lines.map((line) => [line.step, `step ${line.step.toLocaleString("en")}`]);
    const early = lines.find((line) => line.step === chosen.early), late = lines.find((line) => line.step === chosen.late);
    const both = early !== late;
    const range = scores(lines);
    const head = el("div", { class: "steps" },
      el("div", {}, el("b", {}, "Early"), picker(options, chosen.early, "early step", (step) => { chosen.early = Number(step); draw(); }), mean(early)),
      both || options.length > 1 ? el("div", {}, el("b", {}, "Late"), picker(options, chosen.late, "late step", (step) => { chosen.late = Number(step); draw(); }), mean(late)) : null);
    const pairs = [];
    for (let i = 0; i < Math.max(early.samples.length, late.samples.length); i++) {
      const one = early.samples[i], other = late.samples[i];
      const shared = one && other && one.prompt === other.prompt;
      const pair = el("div", { class: "pair" });
      if (shared) pair.append(el("div", { class: "shared" }, el("pre", { class: "prompt clamp" }, one.prompt),
        one.ground_truth === null || one.ground_truth === undefined ? null : el("div", { class: "truth" }, "expected ", el("span", { class: "mono" }, one.ground_truth))));
      for (const [sample, line] of [[one, early], [other, late]]) if (sample) pair.append(card(sample, line.step, !shared, range, pair));
      pairs.push(pair);
    }
    $("sample-pairs").replaceChildren(head, ...pairs);
  };
  chosen.source = sources()[0];
  reset();
}

function scores(lines) {
  const all = lines.flatMap((line) => line.samples.map((sample) => sample.score));
  return { low: Math.min(...all), high: Math.max(...all) };
}

function mean(line) {
  const total = line.samples.reduce((sum, sample) => sum + sample.score, 0);
  return `mean score ${format.number(total / line.samples.length)} of these ${line.samples.length}`;
}

function card(sample, step, withPrompt, range, pair) {
  const kind = range.high > range.low ? (sample.score === range.high ? " high" : sample.score === range.low ? " low" : "") : "";
  const facts = [["score", format.number(sample.score)], ["expected", sample.ground_truth], ["tokens", sample.length], ["advantage", sample.advantage === null || sample.advantage === undefined ? null : format.number(sample.advantage)],
    ["data source", sample.data_source], ...Object.entries(sample.extras || {}).map(([name, value]) => [name, typeof value === "number" ? format.number(value) : String(value)])];
  const node = el("article", { class: "sample" });
  const button = el("button", { type: "button", "aria-expanded": "false", onclick: () => {
    const open = node.classList.toggle("open");
    button.setAttribute("aria-expanded", open);
    pair.classList.toggle("open", pair.querySelector(".sample.open") !== null);
  } }, el("span", { class: "score" + kind }, format.number(sample.score)), el("span", { class: "when" }, `step ${step.toLocaleString("en")}`),
    el("span", { class: "hide-small" }, `${sample.length} tokens`), el("span", { class: "more" }));
  node.append(button, withPrompt ? el("pre", { class: "prompt clamp" }, sample.prompt) : "",
    el("pre", { class: "answer clamp" + (sample.answer.trim() ? "" : " blank") }, sample.answer),
    el("dl", {}, ...facts.filter(([, value]) => value !== null && value !== undefined).flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))])));
  return node;
}

// all metrics
function metrics() {
  const names = Object.keys(data.metrics).filter((name) => data.metrics[name].some(Boolean)), body = el("tbody", {});
  const count = el("span", { "aria-live": "polite" });
  const search = el("input", { type: "search", placeholder: "Search, e.g. entropy", "aria-label": "search metrics", oninput: () => filter() });
  const rows = names.map((name) => {
    const series = seriesOf(name);
    const firsts = series.map((one) => one.y.find((value) => value !== null)), finite = series.flatMap((one) => one.y).filter((value) => value !== null);
    const lasts = series.map((one) => one.y.filter((value) => value !== null).at(-1));
    const low = finite.reduce((a, b) => Math.min(a, b), Infinity), high = finite.reduce((a, b) => Math.max(a, b), -Infinity);
    const show = (values) => values.length === 1 ? format.number(values[0]) : "";
    const row = el("tr", { class: "metric", "data-metric": name }, el("td", {}, el("button", { class: "name", type: "button", "aria-expanded": "false" }, name)),
      el("td", { class: "hide-small" }, sparkline(series)),
      el("td", { class: "n hide-small" }, show(firsts)), el("td", { class: "n" }, series.length === 1 ? show(lasts) : ""),
      el("td", { class: "n hide-small" }, finite.length ? format.number(low) : "–"), el("td", { class: "n hide-small" }, finite.length ? format.number(high) : "–"));
    row.addEventListener("click", () => toggle(row, name));
    return row;
  });
  const toggle = (row, name) => {
    const open = row.nextSibling && row.nextSibling.classList.contains("detail");
    row.querySelector("button").setAttribute("aria-expanded", !open);
    if (open) return row.nextSibling.remove();
    const chart = new Chart({ title: name, meaning: "", metric: name, series: seriesOf(name), height: 200, bare: true }, state);
    charts.push(chart);
    row.after(el("tr", { class: "detail" }, el("td", { colspan: 6 }, chart.root)));
  };
  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    body.querySelectorAll(".detail").forEach((row) => row.remove());
    rows.forEach((row) => {
      const fits = words.every((word) => row.dataset.metric.toLowerCase().includes(word));
      row.hidden = !fits;
      row.querySelector("button").setAttribute("aria-expanded", "false");
      shown += fits;
    });
    count.textContent = `${shown} of ${names.length}`;
    more.replaceChildren(shorter(table, 24, expanded, () => { expanded = true; filter(); }) || "");
  };
  $("metric-controls").append(count, el("label", {}, search));
  body.append(...rows);
  const single = data.curves.length === 1, more = el("div", {});
  let expanded = false;
  const table = el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Metric"), el("th", { class: "hide-small" }, ""),
    el("th", { class: "n hide-small" }, single ? "first" : ""), el("th", { class: "n" }, single ? "last" : ""), el("th", { class: "n hide-small" }, "min"), el("th", { class: "n hide-small" }, "max"))), body);
  $("metric-list").append(el("div", { class: "panel table-wrap" }, table, more));
  filter();
}

// config
function config() {
  if (!data.configs.length) return drop("config");
  const body = $("config-body"), several = data.configs.length > 1;
  if (several) body.append(...differences());
  const known = data.configs.some((one) => Object.values(one.settings).some(([, origin]) => origin));
  const chosen = { run: 0, all: !known, word: "", expanded: false };
  const search = el("input", { type: "search", placeholder: "Search keys, values, origins", "aria-label": "search config", oninput: () => { chosen.word = search.value; draw(); } });
  const count = el("span", { "aria-live": "polite" });
  const parts = [count];
  if (several) parts.push(picker(data.configs.map((one, i) => [i, one.run]), 0, "run", (i) => { chosen.run = Number(i); draw(); }));
  if (known) parts.push(el("label", {}, el("input", { type: "checkbox", onchange: (event) => { chosen.all = event.target.checked; draw(); } }), "defaults too"));
  $("config-controls").append(...parts, el("label", {}, search));
  const place = el("div", {});
  body.append(place);
  const draw = () => {
    const { settings, changes } = data.configs[chosen.run], words = chosen.word.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = Object.entries(settings).filter(([key, [value, origin]]) =>
      (chosen.all || words.length || (origin && origin !== "default")) && words.every((word) => `${key} ${value} ${origin} ${data.meanings[key] || ""}`.toLowerCase().includes(word)));
    const rank = (origin) => origin === "command line" ? 0 : origin === "default" ? 3 : origin.startsWith("follows") ? 2 : 1;
    rows.sort((a, b) => rank(a[1][1]) - rank(b[1][1]));
    count.textContent = `${rows.length} of ${Object.keys(settings).length} keys`;
    const nodes = [];
    if (changes.length) nodes.push(el("h3", {}, "Changed when the run went on"), el("div", { class: "panel table-wrap" }, el("table", {}, el("thead", {}, el("tr", {}, ...["Key", "Before", "After", "From step"].map((name) => el("th", {}, name)))),
      el("tbody", {}, ...changes.map(([step, key, before, after]) => el("tr", {}, el("td", { class: "key" }, key), el("td", { class: "value" }, before), el("td", { class: "value" }, after), el("td", {}, String(step + 1))))))));
    if (several || changes.length) nodes.push(el("h3", {}, `Settings of ${data.configs[chosen.run].run}`));
    const table = el("table", { class: "settings" }, el("thead", {}, el("tr", {}, el("th", {}, "Key"), el("th", {}, "Value"), el("th", {}, known ? "Where it came from" : ""), el("th", { class: "hide-small" }, "Meaning"))),
      el("tbody", {}, ...rows.map(([key, [value, origin]]) => el("tr", { title: data.meanings[key] || null }, el("td", { class: "key" }, key), el("td", { class: "value" }, value),
        el("td", {}, origin ? el("span", { class: "origin" + (rank(origin) === 0 ? " user" : "") }, origin) : ""), el("td", { class: "meaning hide-small" }, data.meanings[key] || "")))));
    nodes.push(el("div", { class: "panel table-wrap" }, table, shorter(table, 40, chosen.expanded, () => { chosen.expanded = true; draw(); })));
    place.replaceChildren(...nodes);
  };
  draw();
}

function differences() {
  const keys = [...new Set(data.configs.flatMap((one) => Object.keys(one.settings)))].filter((key) => {
    const values = data.configs.map((one) => one.settings[key] && one.settings[key][0]);
    return new Set(values).size > 1;
  });
  const title = el("h3", {}, "What differs");
  if (!keys.length) return [title, el("p", { class: "empty" }, "All settings are equal.")];
  return [title, el("div", { class: "panel table-wrap" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Key"), ...data.configs.map((one) => el("th", {}, one.run)))),
    el("tbody", {}, ...keys.map((key) => el("tr", {}, el("td", { class: "key", title: data.meanings[key] || null }, key), ...data.configs.map((one) => el("td", { class: "value" }, one.settings[key] ? one.settings[key][0] : "–")))))))];
}

// environment
function environment() {
  if (!data.environments.length) return drop("environment");
  const names = [...new Set(data.environments.flatMap((one) => Object.keys(one.facts)))], several = data.environments.length > 1;
  $("environment-body").append(el("div", { class: "panel table-wrap" }, el("table", {}, several ? el("thead", {}, el("tr", {}, el("th", {}, ""), ...data.environments.map((one) => el("th", {}, one.run)))) : null,
    el("tbody", {}, ...names.map((name) => el("tr", {}, el("td", {}, name), ...data.environments.map((one) => el("td", { class: "mono" }, one.facts[name] || "–"))))))));
}

overview();
curves();
time();
ahead();
samples();
metrics();
config();
environment();
$("subtitle").textContent = data.subtitle;
$("footer").textContent = `Written by Paddock ${data.version}, ${data.written}. This file needs no network and no other file.`;
for (const [id, name] of [["overview", "Overview"], ["curves", "Curves"], ["time", "Time"], ["ahead", "Ahead"], ["samples", "Samples"], ["metrics", "Metrics"], ["config", "Config"], ["environment", "Environment"]])
  if ($(id)) $("nav").append(el("a", { href: "#" + id }, name));
document.documentElement.dataset.ready = "true";
