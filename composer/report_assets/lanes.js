// Busy lanes: a timeline that zooms and pans, over a map of the whole run.

const ROW = 30;
const MAP = 9;

function busyShare(spans, from, to) {
  let busy = 0;
  let reached = from;
  for (const [start, end] of spans) {
    if (end <= reached) continue;
    if (start >= to) break;
    busy += Math.min(end, to) - Math.max(start, reached);
    reached = Math.min(end, to);
  }
  return to > from ? busy / (to - from) : 0;
}

const laneIndex = (name) =>
  ({ trainer: 0, rollout: 1, grade: 4, publish: 3, eval: 2 })[name] ?? 5;

const laneColor = (name) => ink(`--c${laneIndex(name) + 1}`);

function sized(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const draw = canvas.getContext('2d');
  draw.scale(scale, scale);
  draw.clearRect(0, 0, width, height);
  return [draw, width];
}

function clock(seconds, step) {
  if (step < 1) return `${Number(seconds.toFixed(3))} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, '0')}`;
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400];

// Ticks at whole seconds, minutes or hours where the span allows.
function timeTicks(from, to, count) {
  const raw = (to - from) / Math.max(count, 1);
  const step = raw > 0.5 && TIME_STEPS.find((candidate) => candidate >= raw);
  if (!step) return ticks(from, to, count);
  const found = [];
  for (let at = Math.ceil(from / step) * step; at <= to; at += step) found.push(at);
  return found;
}

function drawLanes(view) {
  const { data, rows, canvas } = view;
  const height = ROW * rows.length + 22;
  const [draw, width] = sized(canvas, height);
  const scale = width / (view.to - view.from);
  const marks = timeTicks(view.from, view.to, width / 90);
  draw.font = '11px system-ui, sans-serif';
  for (const mark of marks) {
    const x = (mark - view.from) * scale;
    draw.fillStyle = ink('--line');
    draw.fillRect(Math.round(x), 0, 1, height - 18);
    draw.fillStyle = ink('--soft');
    draw.textAlign = x < 20 ? 'left' : x > width - 24 ? 'right' : 'center';
    draw.fillText(clock(mark, marks[1] - marks[0]), x, height - 5);
  }
  rows.forEach((lane, row) => {
    const top = row * ROW + 6;
    draw.fillStyle = ink('--well');
    draw.fillRect(0, top, width, ROW - 12);
    draw.fillStyle = laneColor(lane);
    let edge = -1;
    for (const [start, end] of data.rows[lane]) {
      if (end < view.from || start > view.to) continue;
      const left = Math.max((start - view.from) * scale, edge, 0);
      const right = Math.min((end - view.from) * scale, width);
      if (right <= edge) continue;
      // A hair of ground between spans, where there is room for one.
      const body = right - left > 4 ? right - left - 0.8 : Math.max(right - left, 0.6);
      draw.fillRect(left, top, body, ROW - 12);
      edge = right;
    }
    view.shares[row].textContent = percent(busyShare(data.rows[lane], view.from, view.to));
  });
  drawMap(view);
}

function drawMap(view) {
  const { data, rows, map } = view;
  const height = MAP * rows.length + 4;
  const [draw, width] = sized(map, height);
  rows.forEach((lane, row) => {
    draw.fillStyle = laneColor(lane);
    const bins = Math.floor(width / 3);
    for (let at = 0; at < bins; at += 1) {
      const from = (at * data.end) / bins;
      const share = busyShare(data.rows[lane], from, from + data.end / bins);
      draw.globalAlpha = share && 0.2 + 0.7 * share;
      draw.fillRect(at * 3, row * MAP + 2, 3, MAP - 3);
    }
  });
  draw.globalAlpha = 1;
  const left = (view.from / data.end) * width;
  const wide = Math.max(((view.to - view.from) / data.end) * width, 3);
  draw.strokeStyle = ink('--ink');
  draw.lineWidth = 1.5;
  draw.strokeRect(left + 0.75, 0.75, Math.min(wide, width - left) - 1.5, height - 1.5);
}

function look(view, from, to) {
  const span = Math.min(Math.max(to - from, 0.02), view.data.end);
  view.from = Math.min(Math.max(from, 0), view.data.end - span);
  view.to = view.from + span;
  drawLanes(view);
}

function zoom(view, factor, share = 0.5) {
  const span = (view.to - view.from) * factor;
  const fixed = view.from + share * (view.to - view.from);
  look(view, fixed - share * span, fixed + (1 - share) * span);
}

function laneTip(view, event) {
  const box = view.canvas.getBoundingClientRect();
  const lane = view.rows[Math.floor((event.clientY - box.top) / ROW)];
  if (!lane) return hideTip();
  const perPixel = (view.to - view.from) / box.width;
  const at = view.from + (event.clientX - box.left) * perPixel;
  const found = view.data.rows[lane].find(
    ([start, end]) => start - 2 * perPixel <= at && at <= end + 2 * perPixel,
  );
  if (!found) return hideTip();
  return showTip(
    event,
    el('div', { class: 'tip-head' }, `${lane} · ${view.data.names[found[2]] || 'busy'}`),
    pair('from', clock(found[0], 0.1)),
    pair('took', duration(found[1] - found[0])),
  );
}

// Dragging pans the timeline; dragging in the map moves its window.
function drags(view) {
  let grip = null;
  view.canvas.addEventListener('pointerdown', (event) => {
    grip = { x: event.clientX, from: view.from, to: view.to };
    view.canvas.setPointerCapture(event.pointerId);
  });
  view.canvas.addEventListener('pointermove', (event) => {
    if (!grip) return laneTip(view, event);
    const moved = ((grip.x - event.clientX) / view.canvas.clientWidth) * (grip.to - grip.from);
    return look(view, grip.from + moved, grip.to + moved);
  });
  view.canvas.addEventListener('pointerup', () => { grip = null; });
  view.canvas.addEventListener('pointerleave', hideTip);
  view.canvas.addEventListener('dblclick', (event) => {
    zoom(view, 0.3, event.offsetX / view.canvas.clientWidth);
  });
  view.canvas.addEventListener('wheel', (event) => {
    if (!event.ctrlKey && !event.metaKey && !event.shiftKey) return; // the page scrolls
    event.preventDefault();
    const turned = event.deltaY || event.deltaX;
    zoom(view, turned > 0 ? 1.25 : 0.8, event.offsetX / view.canvas.clientWidth);
  }, { passive: false });
  const jump = (event) => {
    if (!event.buttons) return;
    const centre = (event.offsetX / view.map.clientWidth) * view.data.end;
    const half = (view.to - view.from) / 2;
    look(view, centre - half, centre + half);
  };
  view.map.addEventListener('pointerdown', jump);
  view.map.addEventListener('pointermove', jump);
}

let laneView = null;

function lanesCard(data) {
  const rows = Object.keys(data.rows);
  const shares = rows.map(() => el('b', {}));
  const view = {
    data, rows, shares, from: 0, to: data.end,
    canvas: el('canvas', { class: 'lanes', 'aria-label': 'busy lanes' }),
    map: el('canvas', { class: 'map', 'aria-label': 'the whole run' }),
  };
  const button = (label, title, act) => el('button', { title, onclick: act }, label);
  drags(view);
  laneView = view;
  const labels = rows.map((lane, row) =>
    el(
      'div',
      { style: `height:${ROW}px` },
      el('i', { class: 'swatch', style: `background:var(--c${laneIndex(lane) + 1})` }),
      el('span', {}, words(lane)),
      shares[row],
    ),
  );
  return el(
    'div',
    { class: 'card lanes-card' },
    el('div', { class: 'lane-names' }, labels),
    el(
      'div',
      { class: 'lane-plot' },
      view.canvas,
      view.map,
      el(
        'div',
        { class: 'lane-tools' },
        button('−', 'zoom out', () => zoom(view, 2)),
        button('+', 'zoom in', () => zoom(view, 0.5)),
        button('whole run', 'show all', () => look(view, 0, data.end)),
        el('small', {}, 'drag to move · double-click or Ctrl+wheel to zoom · percentages are of what is shown'),
      ),
    ),
  );
}
