// Elements, numbers and the tooltip. Text becomes text nodes, never HTML.

const root = document.documentElement;
const failures = [];

window.addEventListener('error', (event) => {
  failures.push(String(event.message));
  root.dataset.errors = failures.join(' | ');
});

const SVG = 'http://www.w3.org/2000/svg';

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith('on')) node.addEventListener(name.slice(2), value);
    else if (name === 'value') node.value = value;
    else if (name === 'checked') node.checked = value;
    else node.setAttribute(name, value === true ? '' : value);
  }
  for (const child of children.flat(4)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

const el = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);

const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

const color = (index) => `var(--c${(index % 8) + 1})`;

// A CSS variable's value, for canvases.
const ink = (name) => getComputedStyle(root).getPropertyValue(name).trim();

function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (typeof value !== 'number') return String(value);
  if (value < 0) return `−${number(-value)}`;
  const size = value;
  if (size === 0) return '0';
  if (Number.isInteger(value) && size < 1e6) return value.toLocaleString('en');
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${(value / 1e3).toPrecision(3)}k`;
  if (size >= 100) return value.toFixed(0);
  if (size < 1e-3) return value.toExponential(1).replace('e-', 'e−');
  return String(Number(value.toPrecision(3)));
}

const percent = (value) =>
  typeof value === 'number' ? `${(100 * value).toFixed(1)} %` : '–';

function bytes(value) {
  if (typeof value !== 'number') return '–';
  const units = ['B', 'kB', 'MB', 'GB', 'TB'];
  let at = 0;
  while (value >= 1000 && at < units.length - 1) {
    value /= 1000;
    at += 1;
  }
  return `${at ? Number(value.toPrecision(3)) : value} ${units[at]}`;
}

function duration(seconds) {
  if (typeof seconds !== 'number') return '–';
  if (seconds < 1) return `${number(1000 * seconds)} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const whole = Math.round(seconds);
  const hours = Math.floor(whole / 3600);
  const minutes = Math.floor((whole % 3600) / 60);
  if (hours) return `${hours} h ${String(minutes).padStart(2, '0')} min`;
  return `${minutes} min ${String(whole % 60).padStart(2, '0')} s`;
}

const words = (text) => String(text).replace(/_/g, ' ');

// Ticks at 1, 2, 2.5 or 5 times a power of ten; about `count` of them.
function ticks(low, high, count) {
  const span = high - low || 1;
  const raw = span / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].find((k) => k * power >= raw * 0.999) * power;
  const found = [];
  const first = Math.ceil(low / step - 1e-9);
  for (let k = first; k * step <= high + step * 1e-9; k += 1) {
    found.push(Number((k * step).toPrecision(12)));
  }
  return found;
}

const tip = document.getElementById('tip');

// Shows `children` beside the pointer, inside the window.
function showTip(event, ...children) {
  tip.replaceChildren();
  fill(tip, {}, children);
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  let left = event.clientX + 14;
  let top = event.clientY + 16;
  if (left + box.width > window.innerWidth - 8) {
    left = event.clientX - box.width - 14;
  }
  if (top + box.height > window.innerHeight - 8) {
    top = event.clientY - box.height - 12;
  }
  tip.style.left = `${Math.max(left, 4)}px`;
  tip.style.top = `${Math.max(top, 4)}px`;
}

function hideTip() {
  tip.hidden = true;
}

const pair = (name, value, swatch) =>
  el(
    'div',
    { class: 'pair' },
    el(
      'span',
      { class: 'name' },
      swatch && el('i', { class: 'swatch', style: `background:${swatch}` }),
      name,
    ),
    el('span', { class: 'value' }, value),
  );

// State in the address, so that a view can be linked: #trajectory=3&color=flips.
function readHash() {
  const text = location.hash.slice(1);
  return new URLSearchParams(text.includes('=') ? text : '');
}

function writeHash(name, value) {
  const state = readHash();
  if (value === null) state.delete(name);
  else state.set(name, value);
  try {
    history.replaceState(null, '', `#${state}`);
  } catch {
    // Some viewers forbid it; the page works without.
  }
}
