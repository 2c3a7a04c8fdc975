// The page: what is known of the run, from the most wanted to the least.

const data = JSON.parse(document.getElementById('data').textContent);

function section(id, title, note, ...children) {
  return el(
    'section',
    { id },
    el('h2', {}, title),
    note && el('p', { class: 'soft section-note' }, note),
    children,
  );
}

const absent = (text) => el('p', { class: 'absent' }, text);

// --- header ------------------------------------------------------------------

function setTheme(theme) {
  root.dataset.theme = theme;
  if (laneView) drawLanes(laneView);
}

function themeButton() {
  return el(
    'button',
    {
      class: 'theme', title: 'light or dark', 'aria-label': 'light or dark',
      onclick: () => {
        const dark = root.dataset.theme
          ? root.dataset.theme === 'dark'
          : matchMedia('(prefers-color-scheme: dark)').matches;
        setTheme(dark ? 'light' : 'dark');
      },
    },
    '◐',
  );
}

const tile = (label, value, note) =>
  el(
    'div',
    { class: 'tile' },
    el('div', { class: 'tile-label' }, label),
    el('div', { class: 'tile-value' }, value),
    el('div', { class: 'tile-note' }, note || ''),
  );

const rowsOf = (set) => ((data.summary && data.summary.rows) || []).filter((row) => row.set === set);

function rateTile() {
  const rows = rowsOf('held_out_bugs');
  const find = (who) => rows.find((row) => row.who === who);
  const before = find('after mid-training');
  const after = find('after RL');
  if (before && after) {
    const se = typeof after.se === 'number' ? `± ${after.se.toFixed(3)}, ` : '';
    return tile(
      'held-out bugs solved',
      [el('span', { class: 'before' }, `${before.solve_rate.toFixed(2)} → `), after.solve_rate.toFixed(2)],
      `${se}${number(after.sessions)} sessions`,
    );
  }
  const chart = data.charts.find((c) => c.title === 'Solve rate');
  const line = chart && (chart.lines.find((l) => l.label === 'held out bugs') || chart.lines[0]);
  return line && tile(`${line.label} solved`, line.y[line.y.length - 1].toFixed(2), `step ${line.x[line.x.length - 1]}, so far`);
}

function tiles() {
  const { facts } = data;
  const reward = data.charts.find((chart) => chart.title === 'Reward');
  const values = reward ? reward.lines[0].y : [];
  const recent = values.slice(-10);
  const mean = recent.reduce((sum, v) => sum + v, 0) / recent.length;
  const made = [
    rateTile(),
    values.length && tile('reward', mean.toFixed(2), `last ${recent.length} steps`),
    facts.first_reward_s !== undefined && tile('first reward after', duration(facts.first_reward_s), 'from the start'),
    facts.mismatch_kl_max !== undefined && tile('largest mismatch, KL', number(facts.mismatch_kl_max), facts.mismatch_kl_max === 0 ? 'bit for bit equal' : ''),
    facts.seconds !== undefined && tile('run time', duration(facts.seconds), `${number(facts.steps)} optimizer steps`),
    facts.versions > 0 && tile('versions published', number(facts.versions), ''),
  ];
  return el('div', { class: 'tiles' }, made.filter(Boolean));
}

function header() {
  const { config, facts } = data;
  const about = [];
  if (config && config.model) {
    const m = config.model;
    about.push(`${m.layers} layers, width ${m.width}, ${m.experts} experts, top ${m.experts_per_token}`);
  }
  if (config && config.numerics) about.push(`numerics ${config.numerics.mode}`);
  if (config && config.seed !== undefined) about.push(`seed ${config.seed}`);
  if (facts.start) about.push(new Date(facts.start * 1000).toISOString().slice(0, 16).replace('T', ' '));
  return el(
    'header',
    { class: 'top' },
    el('div', {}, el('div', { class: 'brand' }, 'Composer'), el('h1', {}, data.name), el('p', { class: 'soft' }, about.join(' · '))),
    themeButton(),
  );
}

function missingNote() {
  if (!data.missing.length) return null;
  return el(
    'details',
    { class: 'missing', open: true },
    el('summary', {}, 'What this report does not show'),
    el('ul', {}, data.missing.map((text) => el('li', {}, text))),
  );
}

// --- before and after --------------------------------------------------------

function ratePlot(row) {
  const height = 22;
  const x = (v) => `${2 + 96 * Math.min(Math.max(v, 0), 1)}%`;
  const tone = { 'after RL': 'strong', 'after mid-training': 'start' }[row.who] || 'other';
  const se = typeof row.se === 'number' ? row.se : 0;
  const flat = { y1: height / 2, y2: height / 2 };
  return svg(
    'svg',
    { class: `rate ${tone}`, width: '100%', height },
    [0, 0.25, 0.5, 0.75, 1].map((v) => svg('line', { class: 'grid', x1: x(v), x2: x(v), y1: 0, y2: height })),
    svg('line', { class: 'reach', x1: x(0), x2: x(row.solve_rate), ...flat }),
    svg('line', { class: 'spread', x1: x(row.solve_rate - se), x2: x(row.solve_rate + se), ...flat }),
    svg('circle', { class: 'point', cx: x(row.solve_rate), cy: height / 2, r: 4.5 }),
  );
}

function rateRow(row) {
  const se = typeof row.se === 'number' ? ` ± ${row.se.toFixed(3)}` : '';
  const rate = typeof row.solve_rate === 'number' ? row.solve_rate.toFixed(3) : '–';
  return el(
    'tr',
    { class: row.who === 'after RL' ? 'strong' : null },
    el('td', {}, row.who),
    el('td', { class: 'rate-cell' }, typeof row.solve_rate === 'number' && ratePlot(row)),
    el('td', { class: 'num' }, rate, el('span', { class: 'soft' }, se)),
    el('td', { class: 'num' }, number(row.best_of_k)),
    el('td', { class: 'num soft' }, number(row.sessions)),
  );
}

function resultTable() {
  const rows = (data.summary && data.summary.rows) || [];
  if (!rows.length) return absent('The table is written when the run has been evaluated at its end.');
  const sets = [...new Set(rows.map((row) => row.set))];
  const head = ['', 'solve rate, 0 to 1', '± standard error', 'best of k', 'sessions'];
  return [
    el(
      'div',
      { class: 'card scroll' },
      el(
        'table',
        { class: 'results' },
        el('thead', {}, el('tr', {}, head.map((text, at) => el('th', { class: at > 1 ? 'num' : null }, text)))),
        sets.map((set) =>
          el(
            'tbody',
            {},
            el('tr', { class: 'set' }, el('td', { colspan: 5 }, words(set))),
            rowsOf(set).map(rateRow),
          ),
        ),
      ),
    ),
    (data.summary.notes || []).map((note) => el('p', { class: 'soft' }, note)),
  ];
}

// --- tables ------------------------------------------------------------------

function conservationCard(flow) {
  const dropped = Object.entries(flow.dropped);
  const row = (name, value, kind) =>
    el('tr', { class: kind || null }, el('td', {}, name), el('td', { class: 'num' }, number(value)));
  const even = flow.difference === 0;
  return el(
    'div',
    { class: 'card' },
    el('h3', {}, 'Where every group went'),
    el(
      'table',
      { class: 'plain' },
      row('produced', flow.produced, 'total'),
      row('trained', flow.trained),
      dropped.map(([reason, count]) => row(`dropped: ${words(reason)}`, count)),
      row('queued', flow.queued),
      row('unaccounted', flow.difference, even ? 'total' : 'total bad'),
    ),
    el('p', { class: 'soft' }, even
      ? 'Each count is kept by another party, and they add up.'
      : 'The counts do not add up; in a running run these may be groups on their way.'),
    flow.abandoned !== null && el('p', { class: 'soft' }, `${number(flow.abandoned)} sessions were abandoned and rolled again.`),
  );
}

// {a: {b: figures}} -> [['a, b', figures]]: as deep as the figures lie.
function leaves(tree, name) {
  const nested = Object.entries(tree).filter(([, v]) => v && typeof v === 'object');
  const own = Object.fromEntries(Object.entries(tree).filter(([, v]) => !v || typeof v !== 'object'));
  return [
    ...(Object.keys(own).length ? [[name, own]] : []),
    ...nested.flatMap(([key, v]) => leaves(v, [name, words(key)].filter(Boolean).join(', '))),
  ];
}

function figuresCard(title, tree, note) {
  const rows = leaves(tree, '');
  const columns = [...new Set(rows.flatMap(([, figures]) => Object.keys(figures)))];
  if (rows.length === 1) {
    return el('div', { class: 'card' }, el('h3', {}, title),
      el('table', { class: 'plain' }, columns.map((c) =>
        el('tr', {}, el('td', {}, words(c)), el('td', { class: 'num' }, number(rows[0][1][c]))))));
  }
  return el(
    'div',
    { class: 'card scroll' },
    el('h3', {}, title),
    el(
      'table',
      { class: 'plain' },
      el('tr', {}, el('th', {}), columns.map((c) => el('th', { class: 'num' }, words(c)))),
      rows.map(([name, figures]) =>
        el('tr', {}, el('td', {}, name || 'all'), columns.map((c) => el('td', { class: 'num' }, number(figures[c]))))),
    ),
    note && el('p', { class: 'soft' }, note),
  );
}

function chartGrid(name) {
  const found = data.charts.filter((chart) => chart.section === name);
  return found.length ? el('div', { class: 'grid-3' }, found.map(chartCard)) : null;
}

function versionsSection() {
  if (!data.versions.length) return null;
  const total = data.versions.reduce((sum, v) => sum + (v.bytes || 0), 0);
  const deltas = data.versions.filter((v) => v.kind === 'delta' && typeof v.ratio === 'number');
  const mean = deltas.reduce((sum, v) => sum + v.ratio, 0) / deltas.length;
  const note = [`${data.versions.length} versions, ${bytes(total)} in all`];
  if (deltas.length) note.push(`a delta is ${percent(mean)} of the full weights on average`);
  return section('weights', 'Published weights', `${note.join('; ')}.`,
    el('div', { class: 'grid-3' }, versionCharts(data.versions).map(chartCard)));
}

function drawer(title, ...children) {
  return el(
    'details',
    { class: 'drawer', ontoggle: drawCharts },
    el('summary', {}, title),
    children,
  );
}

function mismatchCard(tree) {
  return figuresCard('Rollout against trainer', tree,
    'Logprobs of the same tokens, computed by the engine and again by the trainer.');
}

function agreement() {
  const grid = chartGrid('Agreement');
  const { mismatch } = data.summary || {};
  if (!grid && !mismatch) return null;
  return section('agreement', 'Agreement of rollout and trainer', '', mismatch && mismatchCard(mismatch), grid);
}

function accounts() {
  const { cost } = data.summary || {};
  const cards = [
    data.conservation && conservationCard(data.conservation),
    cost && figuresCard('What it cost', cost),
  ].filter(Boolean);
  return cards.length ? section('accounts', 'Accounts', '', el('div', { class: 'grid-2' }, cards)) : null;
}

function sessionsSection() {
  return section('sessions', 'Sessions',
    'Whole sessions: what the model read, did and earned. Point at a token for what both sides make of it.',
    data.sessions ? sessionsCard(data.sessions) : absent('No session has been saved yet.'));
}

// --- the whole ---------------------------------------------------------------

function build() {
  const learning = chartGrid('Learning');
  const lanes = data.lanes && section('lanes', 'Who was busy when',
    'Each side works by itself; a gap is a wait.', lanesCard(data.lanes));
  const other = chartGrid('Other scalars');
  const page = document.getElementById('page');
  fill(page, {}, [
    header(),
    missingNote(),
    tiles(),
    section('results', 'Before and after', '', resultTable()),
    section('learning', 'Learning', '', learning || absent('No scalars yet.')),
    agreement(),
    chartGrid('Flow') && section('flow', 'Flow', '', chartGrid('Flow')),
    lanes,
    versionsSection(),
    accounts(),
    sessionsSection(),
    other && drawer(`Other scalars (${other.childElementCount})`, other),
    data.config && drawer('Configuration', el('pre', { class: 'config' }, JSON.stringify(data.config, null, 1))),
    el('footer', { class: 'soft' }, `Written ${data.written}. This page holds all that it shows and loads nothing.`),
  ]);
}

function redraw() {
  drawCharts();
  if (laneView) drawLanes(laneView);
}

// The session that is open at first: solved, checked by the trainer, eventful.
function mostTelling(sessions) {
  const score = (session) =>
    4 * solved(session) +
    3 * session.segments.some((segment) => segment.trainer) +
    2 * (session.segments.length > 1) +
    session.turns.some((turn) => turn.kind === 'broken');
  const scores = sessions.map(score);
  return scores.lastIndexOf(Math.max(...scores));
}

// `scroll`: an address names a session, so that is what the reader came for.
function followHash(scroll) {
  const wanted = Number(readHash().get('trajectory') ?? NaN);
  if (Number.isInteger(wanted) && browser.all[wanted]) {
    if (wanted !== browser.open) openSession(wanted);
    if (scroll) document.getElementById('sessions').scrollIntoView();
  } else if (browser.all.length && browser.open < 0) {
    openSession(mostTelling(browser.all));
    writeHash('trajectory', null);
  }
}

build();
const theme = readHash().get('theme');
if (theme === 'light' || theme === 'dark') root.dataset.theme = theme;
redraw();
followHash(true);
let pending = 0;
window.addEventListener('resize', () => {
  cancelAnimationFrame(pending);
  pending = requestAnimationFrame(redraw);
});
window.addEventListener('hashchange', () => followHash(true));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);
root.dataset.ready = 'yes';
