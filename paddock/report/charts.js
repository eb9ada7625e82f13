"use strict";
// Line charts and stacked bars in SVG. Texts go through textContent, so nothing that a run wrote becomes markup.
const SVG = "http://www.w3.org/2000/svg";

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

const format = {
  number(value, percent) {
    if (value === null || value === undefined) return "–";
    if (percent) return (100 * value).toFixed(1) + "%";
    const size = Math.abs(value);
    if (value === 0) return "0";
    if (size >= 1e6 || size < 1e-3) return value.toExponential(2).replace("e+", "e");
    if (Number.isInteger(value)) return value.toLocaleString("en");
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    return String(Number(value.toPrecision(4)));
  },
  short(value, percent) {
    // three digits, for headlines
    if (percent || value === null || Math.abs(value) >= 1000 || Math.abs(value) < 1e-3) return this.number(value, percent);
    return String(Number(value.toPrecision(3)));
  },
  tick(value, percent, step) {
    if (percent) return Number((100 * value).toFixed(step < 0.001 ? 2 : step < 0.01 ? 1 : 0)) + "%";
    const size = Math.abs(value);
    if (size === 0) return "0";
    const digits = Math.max(1, Math.floor(Math.log10(size)) - Math.floor(Math.log10(step) + 1e-9) + 2);
    if (size >= 1e6) return Number((value / 1e6).toPrecision(digits)) + "M";
    if (size >= 1e4) return Number((value / 1e3).toPrecision(digits)) + "k";
    if (size < 1e-3) return Number(value.toPrecision(digits)).toExponential().replace("e+", "e");
    return String(Number(value.toPrecision(digits)));
  },
};

function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) || 10 * power;
  const found = [];
  for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(Math.abs(v) < step * 1e-9 ? 0 : v);
  return { found, step };
}

function stepTicks(low, high, count) {
  const { found } = ticks(low, high, count);
  return found.filter(Number.isInteger);
}

const FEW = 30;

function smoothed(values, share) {
  // a mean with falling weights over `share` of the points to either side: it does not lag behind as a running mean does
  const reach = Math.round(values.length * share);
  if (reach < 1 || values.length < FEW) return values;
  return values.map((value, i) => {
    if (value === null) return null;
    let sum = 0, norm = 0;
    for (let j = Math.max(0, i - reach); j <= Math.min(values.length - 1, i + reach); j++) {
      if (values[j] === null) continue;
      const weight = 1 - Math.abs(i - j) / (reach + 1);
      sum += weight * values[j];
      norm += weight;
    }
    return sum / norm;
  });
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] > step) high = middle; else low = middle;
  }
  return Math.abs(steps[high] - step) < Math.abs(steps[low] - step) ? high : low;
}

const crosshair = { charts: new Set(), show(step, from) { for (const chart of this.charts) chart.cross(step, chart === from); },
  hide() { for (const chart of this.charts) chart.uncross(); } };

function putTip(tip, canvas, x) {
  // beside the crosshair, inside the window
  const inner = canvas.getBoundingClientRect(), wide = tip.offsetWidth, right = inner.left + x + 12;
  tip.style.left = Math.max(4, right + wide + 4 < window.innerWidth ? right : right - wide - 24) + "px";
  tip.style.top = inner.top + 4 + "px";
}

class Chart {
  // series: [{label, colour, x, y, lo, hi}]; state: {smoothing, hidden: Set of labels}, shared by all charts of a page
  constructor(options, state) {
    Object.assign(this, { percent: false, height: 168, ...options });
    this.state = state;
    this.log = false;
    this.canvas = svg("svg", { role: "img", tabindex: "0", height: this.height });
    this.last = el("span", { class: "last" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.logButton = el("button", { class: "log", type: "button", "aria-pressed": "false", title: "logarithmic scale",
      onclick: () => { this.log = !this.log; this.logButton.setAttribute("aria-pressed", this.log); this.draw(); } }, "log");
    this.root = el("figure", { class: "chart", style: "margin:0", "data-metric": this.metric },
      this.bare ? null : el("figcaption", {},
        el("div", { class: "title" }, el("h3", {}, this.title), this.last),
        el("div", { class: "meaning" }, el("span", { title: this.metric }, this.meaning + " · " + this.metric), this.logButton)),
      this.canvas, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => crosshair.hide());
    this.canvas.addEventListener("blur", () => crosshair.hide());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    crosshair.charts.add(this);
    new ResizeObserver(() => this.resize()).observe(this.root);
  }

  shown() {
    return this.series.filter((one) => !this.state.hidden.has(one.label) && one.y.some((value) => value !== null));
  }

  resize() {
    const width = Math.round(this.canvas.getBoundingClientRect().width);
    if (width && width !== this.width) { this.width = width; this.draw(); }
  }

  scales() {
    const shown = this.shown();
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity, positive = Infinity;
    for (const one of shown) {
      x0 = Math.min(x0, one.x[0]); x1 = Math.max(x1, one.x[one.x.length - 1]);
      for (const values of [one.y, one.lo || [], one.hi || []]) for (const value of values) {
        if (value === null) continue;
        if (value < y0) y0 = value;
        if (value > y1) y1 = value;
        if (value > 0 && value < positive) positive = value;
      }
    }
    if (!shown.length) { x0 = 0; x1 = 1; y0 = 0; y1 = 1; }
    const logarithmic = this.log && positive < Infinity;
    if (logarithmic) { y0 = Math.log10(positive); y1 = Math.log10(Math.max(y1, positive)); }
    if (y1 - y0 < 1e-12 * Math.max(1, Math.abs(y0))) { const pad = logarithmic ? 0.5 : Math.abs(y0) * 0.1 || (this.percent ? 0.01 : 1); if (y0 !== 0) y0 -= pad; y1 += pad; }
    else { const pad = (y1 - y0) * 0.06; const floor = y0 >= 0 && !logarithmic; y0 -= pad; y1 += pad; if (floor && y0 < 0) y0 = 0; }
    if (this.percent && !logarithmic) { y1 = Math.min(y1, 1.0 + (y1 - y0) * 0.03); }
    if (x1 === x0) { x0 -= 0.5; x1 += 0.5; }
    const box = { left: 44, right: this.width - 8, top: 8, bottom: this.height - 20 };
    const across = (step) => box.left + (step - x0) / (x1 - x0) * (box.right - box.left);
    const up = (value) => {
      const v = logarithmic ? Math.log10(Math.max(value, positive)) : value;
      return box.bottom - (v - y0) / (y1 - y0) * (box.bottom - box.top);
    };
    return { x0, x1, y0, y1, box, across, up, logarithmic };
  }

  draw() {
    if (!this.width) return;
    const scale = this.scale = this.scales(), { box, across, up } = scale;
    this.canvas.replaceChildren();
    this.canvas.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.axes(scale);
    const shown = this.shown();
    this.drawn = shown.map((one) => ({ one, y: smoothed(one.y, this.state.smoothing) }));
    for (const { one, y } of this.drawn) {
      const style = `var(--c${one.colour})`;
      if (one.lo) {
        const lo = smoothed(one.lo, this.state.smoothing), hi = smoothed(one.hi, this.state.smoothing);
        const edge = one.x.map((step, i) => `${across(step).toFixed(1)},${up(hi[i]).toFixed(1)}`);
        const back = one.x.map((step, i) => `${across(step).toFixed(1)},${up(lo[i]).toFixed(1)}`).reverse();
        const band = svg("path", { class: "band", d: "M" + edge.concat(back).join("L") + "Z" });
        band.style.fill = style;
        this.canvas.append(band);
      } else if (y !== one.y) {
        const raw = svg("path", { class: "raw", d: this.path(one.x, one.y) });
        raw.style.stroke = style;
        this.canvas.append(raw);
      }
      const line = svg("path", { class: "line", d: this.path(one.x, y), "data-label": one.label });
      line.style.stroke = style;
      this.canvas.append(line);
      if (one.x.length === 1 || (one.x.length < FEW && across(one.x[1]) - across(one.x[0]) > 9)) one.x.forEach((step, i) => {
        if (y[i] === null) return;
        const dot = svg("circle", { cx: across(step).toFixed(1), cy: up(y[i]).toFixed(1), r: 2.2 });
        dot.style.fill = style;
        this.canvas.append(dot);
      });
    }
    this.overlay = svg("g", {});
    this.canvas.append(this.overlay);
    const ends = shown.map((one) => one.y.filter((value) => value !== null));
    this.last.textContent = shown.length === 1 ? format.number(ends[0].at(-1), this.percent) : "";
    const said = shown.map((one, i) => `${one.label}: ${format.number(ends[i][0], this.percent)} at step ${one.x[0]}, `
      + `${format.number(ends[i].at(-1), this.percent)} at step ${one.x.at(-1)}`);
    this.canvas.setAttribute("aria-label", `${this.title || this.metric}. ${said.join("; ")}. Arrow keys read points.`);
  }

  path(x, y) {
    const { across, up } = this.scale;
    let pen = "M", d = "";
    for (let i = 0; i < x.length; i++) {
      if (y[i] === null) { pen = "M"; continue; }
      d += `${pen}${across(x[i]).toFixed(1)},${up(y[i]).toFixed(1)}`;
      pen = "L";
    }
    return d;
  }

  axes({ x0, x1, y0, y1, box, across, up, logarithmic }) {
    const room = (box.bottom - box.top) / 30;
    let marks;
    if (logarithmic) {
      marks = [];
      const every = Math.max(1, Math.ceil((y1 - y0) / room));
      for (let p = Math.ceil(y0); p <= y1; p += every) marks.push([10 ** p, format.tick(10 ** p, this.percent, 1)]);
      if (marks.length < 2) marks = [y0, y1].map((v) => 10 ** (v + (v === y0 ? 0.04 : -0.04) * (y1 - y0))).map((v) => [v, format.number(v, this.percent)]);
    } else {
      const { found, step } = ticks(y0, y1, room);
      marks = found.map((value) => [value, format.tick(value, this.percent, step)]);
    }
    for (const [value, label] of marks) {
      const y = Math.round(up(value)) + 0.5;
      this.canvas.append(svg("line", { class: "gridline", x1: box.left, x2: box.right, y1: y, y2: y }));
      this.canvas.append(svg("text", { x: box.left - 6, y: y + 3.5, "text-anchor": "end" }, label));
    }
    for (const step of stepTicks(Math.ceil(x0), x1, (box.right - box.left) / 70)) {
      const x = across(step);
      this.canvas.append(svg("text", { x: Math.min(x, box.right), y: this.height - 6, "text-anchor": x > box.right - 12 ? "end" : "middle" }, step.toLocaleString("en")));
    }
  }

  point(event) {
    const { box, x0, x1 } = this.scale || {};
    if (!box) return;
    const left = this.canvas.getBoundingClientRect().left;
    const step = x0 + (event.clientX - left - box.left) / (box.right - box.left) * (x1 - x0);
    crosshair.show(Math.max(x0, Math.min(x1, step)), this);
  }

  key(event) {
    const shown = this.shown();
    if (!shown.length || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const steps = shown[0].x;
    let i = this.at === undefined ? -1 : nearest(steps, this.at);
    i = { ArrowLeft: i < 0 ? steps.length - 1 : i - 1, ArrowRight: i + 1, Home: 0, End: steps.length - 1 }[event.key];
    crosshair.show(steps[Math.max(0, Math.min(steps.length - 1, i))], this);
  }

  cross(step, asked) {
    if (!this.overlay || !this.width) return;
    const { box, across, up, x0, x1 } = this.scale;
    if (step < x0 || step > x1) return this.uncross();
    this.at = step;
    this.overlay.replaceChildren();
    this.tip.replaceChildren();
    let snapped = null;
    for (const { one, y } of this.drawn) {
      const i = nearest(one.x, step), slack = (one.x.at(-1) - one.x[0]) / one.x.length;
      if (y[i] === null || step > one.x.at(-1) + slack || step < one.x[0] - slack) continue;
      if (snapped === null) snapped = one.x[i];
      const dot = svg("circle", { class: "dot", cx: across(one.x[i]), cy: up(y[i]), r: 3.5 });
      dot.style.fill = `var(--c${one.colour})`;
      this.overlay.append(dot);
      const swatch = el("span", { class: "swatch" });
      swatch.style.color = `var(--c${one.colour})`;
      const spread = one.lo ? ` ± ${format.short((one.hi[i] - one.lo[i]) / 2, this.percent)}` : "";
      this.tip.append(el("div", { class: "row" }, swatch, this.drawn.length > 1 ? el("span", { class: "name" }, one.label) : null,
        el("b", {}, format.number(one.y[i], this.percent) + spread),
        y === one.y || this.drawn.length > 1 ? null : el("span", { class: "step" }, `smooth ${format.number(y[i], this.percent)}`)));
    }
    if (snapped === null) return this.uncross();
    const x = Math.round(across(snapped)) + 0.5;
    this.overlay.prepend(svg("line", { class: "cross", x1: x, x2: x, y1: box.top, y2: box.bottom }));
    this.tip.hidden = !asked;
    if (!asked) return;
    this.tip.prepend(el("div", { class: "step" }, `step ${snapped.toLocaleString("en")}`));
    putTip(this.tip, this.canvas, x);
  }

  uncross() {
    this.at = undefined;
    if (this.overlay) this.overlay.replaceChildren();
    this.tip.hidden = true;
  }
}

class Bars {
  // stacked bars: steps [[from, to]], parts [{label, colour, values}] in seconds per step; lines: the same on a scale at the right
  constructor(steps, parts, options = {}) {
    const each = steps.length && steps.some(([a, b]) => a !== b) ? "each bar is the mean of its steps" : "each bar is one step";
    Object.assign(this, { steps, parts, height: 190, title: "Seconds per step", meaning: each, unit: " s", name: "step", lines: [], ...options });
    this.canvas = svg("svg", { role: "img", height: this.height, "aria-label": options.title || "Seconds per step, stacked by phase" });
    this.tip = el("div", { class: "tip", hidden: true });
    this.root = el("figure", { class: "chart", style: "margin:0" }, el("figcaption", {}, el("div", { class: "title" }, el("h3", {}, this.title)),
      el("div", { class: "meaning" }, el("span", { title: this.meaning }, this.meaning))), this.canvas, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; if (this.mark) this.mark.remove(); });
    new ResizeObserver(() => {
      const width = Math.round(this.canvas.getBoundingClientRect().width);
      if (width && width !== this.width) { this.width = width; this.draw(); }
    }).observe(this.root);
  }

  draw() {
    const sums = this.steps.map((_, i) => this.parts.reduce((sum, part) => sum + (part.values[i] || 0), 0));
    // one slow step (a first compilation, a pause of the machine) must not flatten all others
    const sorted = [...sums].sort((a, b) => a - b), usual = sorted[Math.floor(sorted.length * 0.9)] || 1;
    const most = Math.max(...sums), high = (most > 3 * usual ? 2 * usual : most) * 1.05 || 1;
    const box = this.box = { left: 44, right: this.width - (this.lines.length ? 40 : 8), top: 8, bottom: this.height - 20 };
    const up = (value) => box.bottom - Math.min(value, high) / high * (box.bottom - box.top);
    const each = this.each = (box.right - box.left) / this.steps.length;
    this.canvas.replaceChildren();
    this.canvas.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    const { found, step } = ticks(0, high, 5);
    for (const value of found) {
      const y = Math.round(up(value)) + 0.5;
      this.canvas.append(svg("line", { class: "gridline", x1: box.left, x2: box.right, y1: y, y2: y }));
      this.canvas.append(svg("text", { x: box.left - 6, y: y + 3.5, "text-anchor": "end" }, format.tick(value, false, step)));
    }
    this.steps.forEach((_, i) => {
      let below = 0;
      for (const part of this.parts) {
        const value = part.values[i] || 0;
        if (value <= 0 || below >= high) continue;
        const bar = svg("rect", { x: (box.left + i * each + (each > 4 ? 0.5 : 0)).toFixed(2), width: Math.max(0.6, each - (each > 4 ? 1 : 0)).toFixed(2),
          y: up(below + value).toFixed(2), height: Math.max(0, up(below) - up(below + value)).toFixed(2) });
        bar.style.fill = part.colour;
        this.canvas.append(bar);
        below += value;
      }
      if (sums[i] > high) this.canvas.append(svg("text", { x: box.left + (i + 0.5) * each, y: box.top + 1, "text-anchor": "middle" }, "↑"));
    });
    if (this.lines.length) this.drawLines(box, each);
    for (const step of stepTicks(this.steps[0][0], this.steps.at(-1)[1] + 0.5, (box.right - box.left) / 80)) {
      const i = this.steps.findIndex(([, to]) => to >= step);
      this.canvas.append(svg("text", { x: box.left + (i + 0.5) * each, y: this.height - 6, "text-anchor": "middle" }, step.toLocaleString("en")));
    }
  }

  drawLines(box, each) {
    const most = Math.max(1, ...this.lines.flatMap((line) => line.values.map((value) => value || 0))) * 1.05;
    const up = (value) => box.bottom - value / most * (box.bottom - box.top), { found, step } = ticks(0, most, 4);
    for (const value of found) this.canvas.append(svg("text", { x: box.right + 6, y: up(value) + 3.5 }, format.tick(value, false, step)));
    for (const { label, colour, values } of this.lines) {
      const points = values.map((value, i) => value === null ? "" : `${(box.left + (i + 0.5) * each).toFixed(1)},${up(value).toFixed(1)}`).filter(Boolean);
      const line = svg("path", { class: "line", d: points.length ? "M" + points.join("L") : "", "data-label": label });
      line.style.stroke = colour;
      this.canvas.append(line);
    }
  }

  point(event) {
    if (!this.box) return;
    const at = event.clientX - this.canvas.getBoundingClientRect().left, i = Math.floor((at - this.box.left) / this.each);
    if (this.mark) this.mark.remove();
    if (i < 0 || i >= this.steps.length) { this.tip.hidden = true; return; }
    const [from, to] = this.steps[i], x = this.box.left + (i + 0.5) * this.each;
    this.mark = svg("line", { class: "cross", x1: x, x2: x, y1: this.box.top, y2: this.box.bottom });
    this.canvas.append(this.mark);
    const parts = this.parts.filter((part) => part.values[i] > 0).sort((a, b) => b.values[i] - a.values[i]).slice(0, 8);
    const rows = [...parts, ...this.lines].map((part) => {
      const swatch = el("span", { class: "swatch box" });
      swatch.style.color = part.colour;
      return el("div", { class: "row" }, swatch, el("span", { class: "name" }, part.label), el("b", {}, format.number(part.values[i]) + (this.lines.includes(part) ? "" : this.unit)));
    });
    this.tip.replaceChildren(el("div", { class: "step" }, from === to ? `${this.name} ${from}` : `steps ${from} to ${to}`), ...rows);
    this.tip.hidden = false;
    putTip(this.tip, this.canvas, x);
  }
}

function sparkline(series) {
  const wide = 120, high = 20, node = svg("svg", { width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, "aria-hidden": "true" });
  for (const one of series) {
    const every = Math.max(1, Math.floor(one.x.length / 120)), keep = (_, i) => i % every === 0 || i === one.x.length - 1;
    const x = one.x.filter(keep), y = one.y.filter(keep), finite = y.filter((value) => value !== null);
    if (!finite.length) continue;
    let low = Math.min(...finite), range = Math.max(...finite) - low;
    const span = x.at(-1) - x[0] || 1;
    let pen = "M", d = "";
    y.forEach((value, i) => {
      if (value === null) { pen = "M"; return; }
      d += `${pen}${(1 + (x[i] - x[0]) / span * (wide - 2)).toFixed(1)},${(range ? high - 2 - (value - low) / range * (high - 4) : high / 2).toFixed(1)}`;
      pen = "L";
    });
    const path = svg("path", { class: "line", d });
    path.style.stroke = `var(--c${one.colour})`;
    path.style.strokeWidth = "1.2";
    node.append(path);
  }
  return node;
}
