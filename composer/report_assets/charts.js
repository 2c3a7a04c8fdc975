// Line charts and bars, as SVG that is drawn again when the width changes.

const SMOOTH_FROM = 40; // points; longer lines get a moving mean drawn over them

// A centred mean, so that the drawn line does not lag behind the data.
function smooth(y) {
  const reach = Math.max(2, Math.round(y.length / 24));
  return y.map((_, at) => {
    const near = y.slice(Math.max(at - reach, 0), at + reach + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

function extent(chart) {
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const line of chart.lines) {
    line.x.forEach((x, at) => {
      const spread = line.se ? line.se[at] : 0;
      x0 = Math.min(x0, x);
      x1 = Math.max(x1, x);
      y0 = Math.min(y0, line.y[at] - spread);
      y1 = Math.max(y1, line.y[at] + spread);
    });
  }
  if (chart.range) [y0, y1] = chart.range;
  if (y0 > 0 && y0 < 0.6 * y1) y0 = 0;
  if (y0 === y1) [y0, y1] = y0 === 0 ? [0, 1] : [y0 - Math.abs(y0) / 2, y1 + Math.abs(y1) / 2];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  return [x0, x1, y0, y1];
}

function plotArea(chart, width, height) {
  let [x0, x1, low, high] = extent(chart);
  if (chart.bars) [x0, x1] = [x0 - 0.5, x1 + 0.5];
  const rows = ticks(low, high, 4);
  const y0 = Math.min(low, rows[0]);
  const y1 = Math.max(high, rows[rows.length - 1]);
  const gutter = 10 + 6.2 * Math.max(...rows.map((v) => number(v).length));
  const box = { left: gutter, right: width - 10, top: 8, bottom: height - 22 };
  const sx = (x) => box.left + ((x - x0) / (x1 - x0)) * (box.right - box.left);
  const sy = (y) => box.bottom - ((y - y0) / (y1 - y0)) * (box.bottom - box.top);
  return { x0, x1, box, sx, sy, rows };
}

function axes(area, chart) {
  const { box, sx, sy, rows, x0, x1 } = area;
  const columns = ticks(x0, x1, (box.right - box.left) / 55).filter(
    (x) => Number.isInteger(x) || !chart.whole,
  );
  return [
    rows.map((y) => [
      svg('line', { class: 'grid', x1: box.left, x2: box.right, y1: sy(y), y2: sy(y) }),
      svg('text', { class: 'tick', x: box.left - 6, y: sy(y) + 3.5, 'text-anchor': 'end' }, number(y)),
    ]),
    columns.map((x) =>
      svg('text', { class: 'tick', x: sx(x), y: box.bottom + 15, 'text-anchor': 'middle' }, number(x)),
    ),
  ];
}

const path = (x, y, area) =>
  x
    .map((v, at) => `${at ? 'L' : 'M'}${area.sx(v).toFixed(1)} ${area.sy(y[at]).toFixed(1)}`)
    .join('');

function drawLine(line, index, area) {
  const stroke = color(index);
  const drawn = [];
  const few = line.x.length <= 24;
  if (line.se) {
    const up = line.y.map((y, at) => y + line.se[at]);
    const down = line.y.map((y, at) => y - line.se[at]);
    const back = path([...line.x].reverse(), [...down].reverse(), area);
    drawn.push(
      svg('path', { class: 'band', d: `${path(line.x, up, area)}${back.replace('M', 'L')}Z`, fill: stroke }),
    );
  }
  const long = line.x.length >= SMOOTH_FROM && !line.steady;
  drawn.push(svg('path', { class: long ? 'line faint' : 'line', d: path(line.x, line.y, area), stroke }));
  if (long) {
    drawn.push(svg('path', { class: 'line', d: path(line.x, smooth(line.y), area), stroke }));
  }
  if (few) {
    line.x.forEach((x, at) => {
      if (line.se) {
        const [top, bottom] = [line.y[at] + line.se[at], line.y[at] - line.se[at]];
        drawn.push(
          svg('line', { class: 'whisker', x1: area.sx(x), x2: area.sx(x), y1: area.sy(top), y2: area.sy(bottom), stroke }),
        );
      }
      drawn.push(svg('circle', { class: 'dot', cx: area.sx(x), cy: area.sy(line.y[at]), r: 3, fill: stroke }));
    });
  }
  return drawn;
}

// Index of the entry of the sorted `x` that lies nearest to `at`.
function nearest(x, at) {
  let low = 0;
  let high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] < at) low = middle;
    else high = middle;
  }
  return Math.abs(x[low] - at) <= Math.abs(x[high] - at) ? low : high;
}

function hover(node, cursor, chart, area) {
  const all = [...new Set(chart.lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  node.addEventListener('pointermove', (event) => {
    const inside = event.clientX - node.getBoundingClientRect().left;
    const share = (inside - area.box.left) / (area.box.right - area.box.left);
    const x = all[nearest(all, area.x0 + share * (area.x1 - area.x0))];
    cursor.setAttribute('x1', area.sx(x));
    cursor.setAttribute('x2', area.sx(x));
    cursor.removeAttribute('visibility');
    const rows = chart.lines.map((line, index) => {
      const at = line.x.indexOf(x);
      if (at < 0) return null;
      const spread = line.se ? ` ± ${number(line.se[at])}` : '';
      return pair(line.label, `${number(line.y[at])}${spread}`, color(index));
    });
    showTip(event, el('div', { class: 'tip-head' }, `${chart.axis || 'step'} ${number(x)}`), rows);
  });
  node.addEventListener('pointerleave', () => {
    cursor.setAttribute('visibility', 'hidden');
    hideTip();
  });
}

function drawChart(holder, chart) {
  const width = Math.max(holder.clientWidth, 220);
  const height = chart.height || 170;
  const area = plotArea(chart, width, height);
  const { box } = area;
  const cursor = svg('line', { class: 'cursor', y1: box.top, y2: box.bottom, visibility: 'hidden' });
  const node = svg(
    'svg',
    { class: 'chart', width, height, viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': chart.title },
    axes(area, chart),
    chart.bars ? drawBars(chart, area) : null,
    chart.bars ? null : chart.lines.map((line, index) => drawLine(line, index, area)),
    cursor,
  );
  hover(node, cursor, chart, area);
  holder.replaceChildren(node);
}

function drawBars(chart, area) {
  const line = chart.lines[0];
  const room = (area.box.right - area.box.left) / Math.max(area.x1 - area.x0, 1);
  const wide = Math.max(Math.min(room - 1.5, 14), 1);
  return line.x.map((x, at) => {
    const top = area.sy(line.y[at]);
    return svg('rect', {
      class: 'bar', x: area.sx(x) - wide / 2, width: wide, y: top,
      height: Math.max(area.box.bottom - top, 1), fill: color(chart.bars[at]), rx: Math.min(2, wide / 2),
    });
  });
}

// A flat line at zero is the message of the bitwise mode: say it.
function remark(chart) {
  const zero = chart.lines.every((line) => line.y.every((y) => y === 0));
  return zero && chart.section === 'Agreement' ? 'exactly 0 at every step' : '';
}

const charts = [];

function chartCard(chart) {
  const holder = el('div', { class: 'plot' });
  const last = (line) => number(line.y[line.y.length - 1]);
  const legend = (chart.legend || chart.lines).map((line, index) =>
    el(
      'span',
      {},
      el('i', { class: 'swatch', style: `background:${color(index)}` }),
      chart.legend || chart.lines.length > 1 ? `${line.label} ` : '',
      chart.legend ? '' : el('b', {}, last(line)),
    ),
  );
  const card = el(
    'figure',
    { class: 'card chart-card' },
    el('figcaption', {}, el('strong', {}, chart.title), el('small', {}, chart.note)),
    el('div', { class: 'legend' }, legend, el('em', {}, remark(chart))),
    holder,
  );
  charts.push({ holder, chart });
  return card;
}

function drawCharts() {
  let drawn = 0;
  for (const { holder, chart } of charts) {
    if (!holder.clientWidth) continue; // in a closed section
    drawChart(holder, chart);
    drawn += chart.lines.length;
  }
  root.dataset.curves = drawn;
}

function versionCharts(versions) {
  const known = (field) => versions.filter((v) => typeof v[field] === 'number');
  const column = (field, label) => ({
    label,
    x: known(field).map((v) => v.version),
    y: known(field).map((v) => v[field]),
  });
  const common = { axis: 'version', whole: true };
  const made = [];
  if (known('bytes').length) {
    made.push({
      ...common, title: 'Bytes of a version', note: 'as published',
      lines: [{ ...column('bytes', 'bytes'), steady: true }],
      bars: known('bytes').map((v) => (v.kind === 'base' ? 1 : 0)),
      legend: [{ label: 'delta' }, { label: 'base' }],
    });
  }
  const deltas = known('ratio').filter((v) => v.kind !== 'base');
  if (deltas.length) {
    const line = { label: 'ratio', x: deltas.map((v) => v.version), y: deltas.map((v) => v.ratio) };
    made.push({
      ...common, title: 'Delta ratio', note: 'bytes / bytes of the full weights', lines: [line],
    });
  }
  const times = [column('seconds', 'publish'), column('pause_s', 'pause of the engine')];
  const lines = times.filter((line) => line.x.length);
  if (lines.length) made.push({ ...common, title: 'Publish and pause', note: 'seconds', lines });
  return made;
}
