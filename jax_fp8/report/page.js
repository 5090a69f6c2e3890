"use strict";
// Draws the maps, and says what is under the pointer. Text from files is only ever set as textContent.

const UNKNOWN = "–";
const tip = document.getElementById("tip");
const colorOf = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function write(value, unit) {
  if (Number.isNaN(value)) return UNKNOWN;
  if (unit === "count") return value.toLocaleString("en");
  if (unit === "percent") return value > 0 && value < 1e-5 ? "< 0.001 %" : `${+(100 * value).toPrecision(3)} %`;
  const size = Math.abs(value);
  const text = size >= 1e7 || (size > 0 && size < 1e-4) ? value.toExponential(2)
    : size >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(4));
  return unit === "times" ? `${text} x` : text;
}

// Three bytes a value: the upper ones of a float32.
function decode(text) {
  const bytes = atob(text), bits = new Uint32Array(bytes.length / 3);
  for (let i = 0; i < bits.length; i++) {
    const [high, middle, low] = [0, 1, 2].map(place => bytes.charCodeAt(3 * i + place));
    bits[i] = (high << 24) | (middle << 16) | (low << 8);
  }
  return new Float32Array(bits.buffer);
}

function element(name, parent, text, style) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (style) made.className = style;
  parent.append(made);
  return made;
}

function showTip(event, fill) {
  tip.replaceChildren();
  fill(tip);
  tip.hidden = false;
  const box = tip.getBoundingClientRect(), room = document.documentElement;
  const left = event.clientX + 16 + box.width < room.clientWidth ? event.clientX + 16 : event.clientX - 16 - box.width;
  const top = Math.min(event.clientY + 16, room.clientHeight - box.height - 8);
  tip.style.left = `${Math.max(8, Math.min(left, room.clientWidth - box.width - 8))}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

const hideTip = () => { tip.hidden = true; };

class HealthMap {
  constructor(section) {
    this.data = JSON.parse(section.querySelector("script").textContent);
    this.values = Object.fromEntries(Object.entries(this.data.values).map(([name, text]) => [name, decode(text)]));
    this.broken = new Set(this.data.broken);
    this.canvas = section.querySelector("canvas");
    this.details = section.querySelector("details");
    this.legend = section.querySelector(".legend");
    this.scale = this.data.scales[0];
    this.part = "";
    this.cell = null;
    this.marked = -1;
    for (const input of section.querySelectorAll("input")) input.addEventListener("change", () => this.choose(input));
    const move = event => this.point(event);
    for (const kind of ["pointermove", "pointerdown"]) this.canvas.addEventListener(kind, move);
    this.canvas.addEventListener("pointerleave", event => { if (event.pointerType !== "touch") this.forget(); });
    document.addEventListener("pointerdown", event => {
      if (event.target !== this.canvas && this.cell) this.forget();
    });
    this.canvas.addEventListener("keydown", event => this.step(event));
    this.canvas.addEventListener("blur", () => this.forget());
    new ResizeObserver(() => this.draw()).observe(section.querySelector(".frame"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.tell(); this.draw(); });
    this.tell();
    this.draw();
  }

  forget() {
    this.cell = null;
    hideTip();
    this.draw();
  }

  choose(input) {
    if (input.dataset.kind === "scale") this.scale = this.data.scales.find(scale => scale.name === input.value);
    else this.part = input.value;
    this.tell();
    this.draw();
  }

  tell() {
    this.legend.replaceChildren();
    const entries = this.scale.labels.map((label, i) => [label, this.scale.colors[i]]);
    for (const [label, color] of [...entries, ["not finite", "broken"], ["no value", "empty"]]) {
      const item = element("li", this.legend);
      element("b", item).style.background = colorOf(color);
      item.append(label);
    }
  }

  shown() {
    const rows = this.data.rows.map((_, row) => row);
    return this.part ? rows.filter(row => this.data.rows[row][1] === this.part) : rows;
  }

  colorAt(index, colors) {
    if (this.broken.has(index)) return colors.broken;
    const value = this.values[this.scale.name][index];
    if (Number.isNaN(value)) return colors.empty;
    return colors.classes[this.scale.bounds.filter(bound => value >= bound).length];
  }

  // Where things are, in CSS pixels: a gutter of names, the cells, and step numbers above and below.
  layout() {
    const rows = this.shown(), width = this.canvas.parentElement.clientWidth, narrow = width < 620;
    const room = (this.data.rows[0][1] ? 900 : 600) * (narrow ? 0.5 : 1), least = this.part ? 11 : 4;
    const height = Math.max(least, Math.min(18, Math.floor(room / rows.length)));
    const parts = this.part ? 1 : new Set(this.data.rows.map(row => row[1])).size;
    const short = narrow || height * parts < 11;
    const names = rows.map(row => short ? this.data.rows[row][0].split("/")[0] : this.data.rows[row][0]);
    const context = this.canvas.getContext("2d");
    context.font = "11px system-ui, sans-serif";
    const longest = Math.max(...names.map(name => context.measureText(name).width));
    const left = Math.ceil(Math.min(longest, width * (narrow ? 0.25 : 0.3))) + 8;
    const cells = width - left - 1, column = cells / this.data.columns.length;
    return { rows, names, left, top: 18, width: cells, row: height, column, total: width };
  }

  draw() {
    if (!this.details.open) return;
    const place = this.layout(), ratio = devicePixelRatio || 1, context = this.canvas.getContext("2d");
    const height = place.rows.length * place.row, whole = height + 2 * place.top;
    this.canvas.width = Math.round(place.total * ratio);
    this.canvas.height = Math.round(whole * ratio);
    this.canvas.style.height = `${whole}px`;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const colors = { broken: colorOf("broken"), empty: colorOf("empty"), classes: this.scale.colors.map(colorOf) };
    const count = this.data.columns.length;
    place.rows.forEach((row, line) => {
      let begin = 0, color = this.colorAt(row * count, colors);
      for (let column = 1; column <= count; column++) {
        const next = column < count ? this.colorAt(row * count + column, colors) : null;
        if (next === color) continue;
        context.fillStyle = color;
        const from = Math.round(place.left + begin * place.column), to = Math.round(place.left + column * place.column);
        context.fillRect(from, place.top + line * place.row, to - from, place.row);
        [begin, color] = [column, next];
      }
    });
    this.drawNames(context, place);
    this.drawSteps(context, place, height);
    this.drawCell(context, place);
  }

  drawNames(context, place) {
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    let free = -Infinity;
    for (let line = 0; line < place.rows.length;) {
      let end = line;
      while (end < place.rows.length && place.names[end] === place.names[line]) end++;
      const top = place.top + line * place.row, middle = top + (end - line) * place.row / 2;
      context.fillStyle = colorOf("page");
      if (line && (end - line) * place.row >= 8) context.fillRect(place.left, top, place.width, 1);
      if (middle - free >= 11) {
        context.fillStyle = colorOf("soft");
        context.fillText(place.names[line], place.left - 6, middle, place.left - 8);
        free = middle;
      }
      line = end;
    }
  }

  drawSteps(context, place, height) {
    context.fillStyle = colorOf("soft");
    const count = this.data.columns.length, most = Math.max(1, Math.min(count, Math.floor(place.width / 90)));
    for (let tick = 0; tick < most; tick++) {
      const column = Math.floor(tick * count / most), x = place.left + column * place.column;
      context.textAlign = "left";
      for (const y of [8, place.top + height + 10]) {
        context.fillText((tick ? "" : "step ") + this.data.columns[column][0].toLocaleString("en"), x, y);
      }
    }
  }

  drawCell(context, place) {
    context.strokeStyle = colorOf("ink");
    const line = this.cell ? place.rows.indexOf(this.cell[0]) : place.rows.indexOf(this.marked);
    if (line < 0) return;
    const [x, width] = this.cell ? [place.left + this.cell[1] * place.column, place.column] : [place.left, place.width];
    context.lineWidth = 2;
    context.strokeRect(x - 1, place.top + line * place.row - 1, Math.max(width, 3) + 2, place.row + 2);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect(), place = this.layout();
    const column = Math.floor((event.clientX - box.left - place.left) / place.column);
    const row = place.rows[Math.floor((event.clientY - box.top - place.top) / place.row)];
    this.cell = row === undefined || column < 0 || column >= this.data.columns.length ? null : [row, column];
    this.say(event);
  }

  step(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    if (!(event.key in moves)) return;
    event.preventDefault();
    const place = this.layout(), [down, right] = moves[event.key], [row, column] = this.cell || [place.rows[0], 0];
    const line = Math.max(0, Math.min(place.rows.length - 1, place.rows.indexOf(row) + down));
    this.cell = [place.rows[line], Math.max(0, Math.min(this.data.columns.length - 1, column + right))];
    const box = this.canvas.getBoundingClientRect();
    const x = box.left + place.left + this.cell[1] * place.column, y = box.top + place.top + line * place.row;
    this.say({ clientX: x, clientY: y });
  }

  say(at) {
    this.draw();
    if (!this.cell) return hideTip();
    const [row, column] = this.cell, [first, last] = this.data.columns[column];
    const [layer, tensor] = this.data.rows[row], index = row * this.data.columns.length + column;
    showTip(at, tip => {
      element("strong", tip, tensor ? `${layer}, ${tensor}` : layer);
      const steps = first === last ? `step ${first.toLocaleString("en")}`
        : `the worst of steps ${first.toLocaleString("en")} to ${last.toLocaleString("en")}`;
      element("p", tip, steps);
      const list = element("dl", tip);
      for (const [name, values] of Object.entries(this.values)) {
        const chosen = name === this.scale.name ? "chosen" : "";
        element("dt", list, { ratio: "against median", nonfinite: "not finite" }[name] || name, chosen);
        element("dd", list, write(values[index], this.data.units[name]), chosen);
      }
    });
  }

  mark(layer, tensor) {
    this.marked = this.data.rows.findIndex(row => row[0] === layer && row[1] === tensor);
    this.details.open = true;
    this.draw();
    const place = this.layout(), line = place.rows.indexOf(this.marked);
    const top = this.canvas.getBoundingClientRect().top + scrollY + place.top + line * place.row;
    scrollTo({ top: top - innerHeight / 2, behavior: "smooth" });
  }
}

// Curves: the values at the step under the pointer, in the place of the last ones.
function followCurves(figure) {
  const { last, curves } = JSON.parse(figure.dataset.curves), plot = figure.querySelector("svg");
  const outputs = figure.querySelectorAll("output"), cursor = figure.querySelector(".cursor");
  const area = figure.querySelector(".plot");
  const follow = event => {
    const box = plot.getBoundingClientRect(), step = (event.clientX - box.left) / box.width * last;
    if (step < 0 || step > last) return leave();
    cursor.style.left = `${event.clientX - area.getBoundingClientRect().left}px`;
    cursor.style.display = "block";
    curves.forEach(([steps, values], i) => {
      let nearest = 0;
      steps.forEach((at, j) => { if (Math.abs(at - step) < Math.abs(steps[nearest] - step)) nearest = j; });
      outputs[i].textContent = `${write(values[nearest])} at step ${steps[nearest].toLocaleString("en")}`;
    });
  };
  const leave = () => {
    cursor.style.display = "none";
    outputs.forEach(output => { output.textContent = output.dataset.last; });
  };
  for (const kind of ["pointermove", "pointerdown"]) area.addEventListener(kind, follow);
  area.addEventListener("pointerleave", leave);
}

const sections = [...document.querySelectorAll("[data-map]")];
const maps = new Map(sections.map(section => [section.dataset.map, new HealthMap(section)]));
document.querySelectorAll("[data-curves]").forEach(followCurves);
for (const button of document.querySelectorAll("button[data-layer]")) {
  const { of, layer, tensor } = button.dataset;
  button.addEventListener("click", () => maps.get(of)?.mark(layer, tensor));
}
