"use strict";
// What all figures use: elements, numbers, the tip, and drawing again when the width changes.
// Text only ever enters through textContent, and nothing sets a style attribute: the page's policy
// forbids both markup from text and styles that are not in its sheet.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function make(name, attributes, parent, text) {
  const element = document.createElement(name);
  for (const key in attributes) element.setAttribute(key, attributes[key]);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.appendChild(element);
  return element;
}

function shortNumber(value) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  let text;
  if (size >= 1e6 || size < 1e-3) text = value.toExponential(2).replace(/\.?0+e/, "e").replace("e+", "e");
  else if (size >= 1000) text = Math.round(value).toLocaleString("en");
  else text = String(Number(value.toPrecision(4)));
  return text.replace("-", "−").replace("e-", "e−");
}

function whole(value) {
  return value.toLocaleString("en");
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (Math.abs(value) >= 1024 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${Number(value.toPrecision(3))} ${units[at]}`;
}

function amount(value, unit) {
  if (unit === "bytes") return bytes(value);
  if (unit === "ms" && value >= 1000) return `${shortNumber(value / 1000)} s`;
  if (unit === "TFLOP" && value > 0 && value < 0.1) return `${shortNumber(value * 1000)} GFLOP`;
  if (unit === "PFLOP" && value > 0 && value < 0.1) return `${shortNumber(value * 1000)} TFLOP`;
  return `${shortNumber(value)} ${unit}`;
}

// As much of a text as fits into so many pixels, at 12 pixels a line.
function fitted(text, pixels) {
  const most = Math.floor(pixels / 7);
  return text.length <= most ? text : most < 2 ? "" : `${text.slice(0, most - 1)}…`;
}

// About `count` round numbers that cover a range, and never many: far from 0, where neighbouring
// numbers are further apart than the step, counting on would not end.
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].find((f) => f * power >= rough * 0.999) * power;
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9 && found.length < 50; n += 1) {
    found.push(n === 0 ? 0 : Number((n * step).toPrecision(12)));
  }
  return found;
}

const tip = {
  show(event, text) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    const left = Math.min(event.clientX + 14, window.innerWidth - width - 8);
    const below = event.clientY + 18;
    const top = below + height > window.innerHeight - 8 ? event.clientY - height - 12 : below;
    box.style.left = `${Math.max(8, left)}px`;
    box.style.top = `${Math.max(8, top)}px`;
  },
  hide() {
    document.getElementById("tip").hidden = true;
  },
};

// Calls draw(width) now and whenever the element's width changes.
function whenSized(element, draw) {
  let drawn = 0;
  new ResizeObserver(() => {
    const width = Math.floor(element.clientWidth);
    if (width > 0 && width !== drawn) {
      drawn = width;
      draw(width);
    }
  }).observe(element);
}

// A list to choose a picture from, where there is more than one.
function chooser(parent, word, choices, onChange) {
  if (choices.length < 2) return;
  const label = make("label", {}, parent, word);
  const select = make("select", {}, label);
  choices.forEach((choice, index) => make("option", { value: index }, select, choice.label));
  select.addEventListener("change", () => onChange(Number(select.value)));
}
