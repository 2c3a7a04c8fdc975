// The browser of sessions: a list with filters, turns as a person reads them,
// and tokens coloured by what rollout and trainer make of them.

const SHOWN = 150; // entries of the list at first, and more at each request

const browser = { all: [], vocab: {}, shown: SHOWN, open: -1, color: 'difference' };
const filters = { split: '', outcome: '', step: '', text: '' };

const solved = (session) => {
  const { tests } = session.parts;
  return typeof tests === 'number' ? tests >= 1 - 1e-6 : (session.reward ?? 0) > 0.5;
};

const summaries = (session) =>
  session.segments.filter((segment) => segment.stop_reason === 'summary').length;

const counted = (count, one, many) => `${count} ${count === 1 ? one : many}`;

const OUTCOMES = {
  solved,
  'not solved': (session) => !solved(session),
  'with a broken call': (session) => session.turns.some((turn) => turn.kind === 'broken'),
  'with a summary': (session) => summaries(session) > 0,
  'with route flips': (session) => session.segments.some((s) => (s.flips || []).some((f) => f > 0)),
};

// --- the list ----------------------------------------------------------------

function matches(session) {
  const wanted = filters.text.toLowerCase();
  return (
    (!filters.split || session.split === filters.split) &&
    (!filters.outcome || OUTCOMES[filters.outcome](session)) &&
    (!filters.step || String(session.step) === filters.step) &&
    (!wanted || `${session.description} ${session.task}`.toLowerCase().includes(wanted))
  );
}

function choice(name, label, options) {
  return el(
    'select',
    {
      'aria-label': label,
      onchange: (event) => {
        filters[name] = event.target.value;
        browser.shown = SHOWN;
        drawList();
      },
    },
    el('option', { value: '' }, label),
    options.map((option) =>
      el('option', { value: String(option) }, name === 'step' ? `step ${option}` : words(option)),
    ),
  );
}

function filterBar() {
  const distinct = (field) => [...new Set(browser.all.map((s) => s[field]))];
  const steps = distinct('step').filter((s) => s !== null).sort((a, b) => a - b);
  return el(
    'div',
    { class: 'filters' },
    choice('split', 'every set', distinct('split').filter(Boolean).sort()),
    choice('outcome', 'every outcome', Object.keys(OUTCOMES)),
    choice('step', 'every step', steps),
    el('input', {
      type: 'search', placeholder: 'find a task', 'aria-label': 'find a task',
      oninput: (event) => {
        filters.text = event.target.value;
        drawList();
      },
    }),
  );
}

function entry(session, index) {
  const good = solved(session);
  return el(
    'button',
    {
      class: index === browser.open ? 'entry open' : 'entry',
      'data-index': index,
      onclick: () => openSession(index),
    },
    el('span', { class: good ? 'mark good' : 'mark', title: good ? 'solved' : 'not solved' }, good ? '✓' : '·'),
    el(
      'span',
      { class: 'entry-text' },
      el('span', { class: 'entry-task' }, session.description || session.task),
      el(
        'small',
        {},
        [
          words(session.split), session.step !== null && `step ${session.step}`, `rollout ${session.index}`,
          summaries(session) > 0 && counted(summaries(session), 'summary', 'summaries'),
        ]
          .filter(Boolean)
          .join(' · '),
      ),
    ),
    el('span', { class: 'entry-reward' }, number(session.reward)),
  );
}

function drawList() {
  const found = browser.all.map((session, index) => [session, index]).filter(([s]) => matches(s));
  const good = found.filter(([session]) => solved(session)).length;
  const share = found.length ? ` · ${percent(good / found.length)} solved` : '';
  browser.count.textContent = `${number(found.length)} of ${number(browser.total)} saved sessions${share}`;
  const more = found.length > browser.shown && el(
    'button',
    {
      class: 'more',
      onclick: () => {
        browser.shown += SHOWN;
        drawList();
      },
    },
    `${found.length - browser.shown} more`,
  );
  browser.list.replaceChildren();
  fill(browser.list, {}, [found.slice(0, browser.shown).map(([s, at]) => entry(s, at)), more]);
}

// --- turns -------------------------------------------------------------------

// Puts each labelled line of a listing on a line of its own: ' L1 .. L2 ..'.
function unfold(text) {
  let out = '';
  let rest = text;
  for (let label = 1; ; label += 1) {
    const at = rest.search(new RegExp(`(^|\\s)L${label}\\s`));
    if (at < 0) return out + rest;
    out += rest.slice(0, at).trimEnd();
    if (out) out += '\n';
    const start = rest.indexOf('L', at);
    const past = start + 1 + String(label).length;
    out += rest.slice(start, past);
    rest = rest.slice(past);
  }
}

const KINDS = {
  prompt: 'task', call: 'call', text: 'note', broken: 'broken call',
  observation: 'answer', summary: 'summary',
};

function turnRow(turn, restart) {
  const text = turn.kind === 'prompt' ? unfold(turn.text) : turn.text.trim();
  const label = restart ? 'restart' : KINDS[turn.kind] || turn.kind;
  return el(
    'div',
    { class: `turn ${/^[a-z]+$/.test(turn.kind) ? turn.kind : ''}` },
    el('span', { class: 'turn-kind' }, label),
    el('pre', {}, text || '(nothing)'),
    turn.seconds > 0 && el('small', { class: 'turn-time' }, duration(turn.seconds)),
  );
}

function turnsView(session) {
  const rows = [];
  let segment = 0;
  for (const turn of session.turns) {
    const restart = turn.segment > segment;
    if (restart) {
      const why = session.segments[segment].stop_reason;
      segment = turn.segment;
      const text = why === 'summary'
        ? `summarised: segment ${segment + 1} starts from the summary`
        : `${words(why)}: segment ${segment + 1} starts anew`;
      rows.push(el('div', { class: 'seam', 'data-segment': segment }, text));
    }
    rows.push(turnRow(turn, turn.kind === 'prompt' && turn.segment > 0));
  }
  return el('div', { class: 'turns' }, rows);
}

// The contexts of a session in their order, each as wide as it is long; what was
// sampled in it is filled, and a flag stands where it was summarised.
function contextsView(session) {
  if (session.segments.length < 2) return null;
  const lengths = session.segments.map((segment) => segment.ids.length);
  const total = lengths.reduce((sum, length) => sum + length, 0);
  const bars = session.segments.map((segment, at) => {
    const share = segment.sampled.length / Math.max(lengths[at], 1);
    const parent = segment.parent >= 0 ? `, from the summary of segment ${segment.parent + 1}` : '';
    return el(
      'button',
      {
        class: segment.stop_reason === 'summary' ? 'context-bar summarised' : 'context-bar',
        style: `flex-grow:${lengths[at]}`,
        title: `segment ${at + 1}: ${lengths[at]} tokens, ${segment.sampled.length} sampled,`
          + ` ended: ${words(segment.stop_reason)}${parent}`,
        'aria-label': `segment ${at + 1}`,
        onclick: () => {
          const there = browser.detail.querySelector(`.seam[data-segment="${at}"]`);
          (there || browser.detail.querySelector('.turns')).scrollIntoView({ block: 'start', behavior: 'smooth' });
        },
      },
      el('i', { style: `height:${(100 * share).toFixed(1)}%` }),
    );
  });
  const text = `${counted(summaries(session), 'summary', 'summaries')} · ${number(total)} tokens in`
    + ` ${lengths.length} contexts, at most ${number(Math.max(...lengths))} at once`;
  return el(
    'div',
    { class: 'contexts', 'data-summaries': summaries(session) },
    el('div', { class: 'context-bars' }, bars),
    el('small', { class: 'soft' }, text),
  );
}

function partsView(session) {
  const entries = [...Object.entries(session.parts), ['reward', session.reward]];
  const most = Math.max(...entries.map(([, value]) => Math.abs(value || 0)), 1e-9);
  return el(
    'table',
    { class: 'parts' },
    entries.map(([name, value]) =>
      el(
        'tr',
        { class: name === 'reward' ? 'total' : null },
        el('td', {}, words(name)),
        el('td', { class: 'num' }, number(value)),
        el(
          'td',
          { class: 'bar-cell' },
          el('i', {
            class: (value || 0) < 0 ? 'part-bar negative' : 'part-bar',
            style: `width:${(100 * Math.abs(value || 0)) / most}%`,
          }),
        ),
      ),
    ),
  );
}

// --- tokens ------------------------------------------------------------------

// |difference| on a log scale: 1e-6 is barely seen, 1 and above is full.
const strength = (value) => Math.min(Math.max((Math.log10(value) + 6) / 6, 0.08), 1);

const wash = (variable, share) =>
  `background:color-mix(in srgb, var(${variable}) ${Math.round(75 * share)}%, transparent)`;

function tokenStyle(mode, token) {
  if (mode === 'difference') {
    if (!token.sampled) return ['context', ''];
    if (token.difference === null) return ['unknown', ''];
    return token.difference === 0 ? ['equal', ''] : ['', wash('--hot', strength(token.difference))];
  }
  if (mode === 'flips') {
    const quiet = token.sampled ? '' : 'context';
    if (token.flips === null) return [`unknown ${quiet}`, ''];
    const share = Math.min(0.35 + token.flips / 4, 1);
    return token.flips ? ['', wash('--flip', share)] : [`equal ${quiet}`, ''];
  }
  if (mode === 'versions' && token.sampled) return ['', wash(`--c${(token.version % 6) + 1}`, 0.45)];
  return [token.sampled ? 'sampled' : 'context', ''];
}

function tokensOf(segment) {
  const place = new Map(segment.sampled.map((at, k) => [at, k]));
  const pick = (column, k) => (segment[column] && k !== undefined ? segment[column][k] : null);
  return segment.ids.map((id, at) => {
    const k = place.get(at);
    return {
      id, at, sampled: k !== undefined,
      text: browser.vocab[id] ?? `[${id}]`,
      behaviour: pick('behaviour', k), trainer: pick('trainer', k),
      difference: pick('difference', k), version: pick('versions', k),
      auditable: pick('auditable', k),
      flips: segment.flips ? segment.flips[at] : null,
    };
  });
}

const visible = (text) => text.replace(/\n/g, '⏎\n').replace(/\t/g, '⇥\t') || '∅';

// A new line where a person would want one: turns, and labels of the listing.
function breaks(token, state) {
  const name = token.text.trim();
  if (name === '<act>') state.listing = 0;
  if (/^<(task|file|act|summarize|summary)>$/.test(name)) {
    if (name === '<file>') state.listing = 1;
    return true;
  }
  if (state.listing && name === `L${state.listing}`) {
    state.listing += 1;
    return true;
  }
  return false;
}

function tokenTip(event, token) {
  const exact = (value) => (typeof value === 'number' ? value.toPrecision(6).replace('-', '−') : '–');
  const flips = token.flips === null ? 'not known' : `${token.flips} layer${token.flips === 1 ? '' : 's'}`;
  const rows = [pair('token', token.id), pair('position', token.at)];
  if (token.sampled) {
    rows.push(
      pair('rollout logprob', exact(token.behaviour)),
      pair('trainer logprob', exact(token.trainer)),
      pair('|difference|', token.difference === 0 ? '0, equal' : number(token.difference)),
      pair('version', token.version),
      pair('auditable', token.auditable ? 'yes' : 'no'),
    );
  }
  rows.push(pair('experts differ in', flips));
  showTip(event, el('div', { class: 'tip-head mono' }, JSON.stringify(token.text)), rows);
}

function tokenSpan(token) {
  const [kind, style] = tokenStyle(browser.color, token);
  return el(
    'span',
    {
      class: `token ${kind}`, style: style || null,
      onpointerenter: (event) => tokenTip(event, token),
      onpointerleave: hideTip,
    },
    visible(token.text),
  );
}

function segmentView(segment, index) {
  const state = { listing: 0 };
  const tokens = tokensOf(segment);
  const spans = tokens.map((token, at) => [
    breaks(token, state) && at > 0 ? el('br') : null,
    tokenSpan(token),
  ]);
  const parent = segment.parent >= 0 ? ` · from the summary of segment ${segment.parent + 1}` : '';
  return el(
    'div',
    { class: 'segment' },
    el(
      'div',
      { class: 'segment-head' },
      el('b', {}, `segment ${index + 1}`),
      ` · ${tokens.length} tokens, ${segment.sampled.length} sampled · ended: ${words(segment.stop_reason)}${parent}`,
    ),
    el('div', { class: 'tokens' }, spans),
  );
}

const COLORS = {
  difference: '|trainer − rollout|', flips: 'route flips', versions: 'version', plain: 'plain',
};

function scale() {
  const swatch = (kind, style, label) =>
    el('span', {}, el('i', { class: `token ${kind}`, style: style || null }, '\u2007\u2007'), label);
  const unknown = swatch('unknown', '', 'not known');
  if (browser.color === 'difference') {
    return [
      swatch('equal', '', 'equal to the last bit'),
      [1e-5, 1e-3, 1e-1, 1].map((v) => swatch('', wash('--hot', strength(v)), number(v))),
      unknown,
    ];
  }
  if (browser.color === 'flips') {
    return [
      swatch('equal', '', 'same experts'),
      [1, 2, 3].map((v) => swatch('', wash('--flip', Math.min(0.35 + v / 4, 1)), `${v} layer${v > 1 ? 's' : ''}`)),
      unknown,
    ];
  }
  return [swatch('sampled', '', 'sampled'), swatch('context', '', 'context')];
}

function tokensView(session) {
  const holder = el('div', {});
  const draw = () => {
    const buttons = Object.entries(COLORS).map(([mode, label]) =>
      el(
        'button',
        {
          class: mode === browser.color ? 'on' : '', 'data-color': mode,
          onclick: () => {
            browser.color = mode;
            writeHash('color', mode);
            draw();
          },
        },
        label,
      ),
    );
    holder.replaceChildren(
      el('div', { class: 'token-tools' }, el('div', { class: 'switch' }, buttons), el('div', { class: 'scale' }, scale())),
      ...session.segments.map(segmentView),
    );
  };
  draw();
  return holder;
}

// --- one session -------------------------------------------------------------

function openSession(index) {
  const session = browser.all[index];
  if (!session) return;
  browser.open = index;
  writeHash('trajectory', index);
  for (const node of browser.list.querySelectorAll('.entry')) {
    const here = Number(node.dataset.index) === index;
    node.classList.toggle('open', here);
    const above = node.offsetTop - browser.list.offsetTop - browser.list.scrollTop;
    if (here && (above < 0 || above > browser.list.clientHeight - 50)) {
      browser.list.scrollTop += above - 60;
    }
  }
  const versions = session.segments.flatMap((segment) => segment.versions);
  const sampled = session.segments.reduce((sum, s) => sum + s.sampled.length, 0);
  const span = [...new Set([Math.min(...versions), Math.max(...versions)])].filter(Number.isFinite);
  const facts = [
    words(session.split), session.step !== null && `step ${session.step}`,
    `ended: ${words(session.stop_reason)}`, `${sampled} tokens sampled`,
    span.length && `version ${span.join(' to ')}`,
  ];
  const origin = { task: session.task, group: session.group, ...session.provenance, ...session.timings };
  const timing = (name) => name in session.timings;
  browser.detail.replaceChildren(
    el(
      'header',
      {},
      el('span', { class: solved(session) ? 'badge good' : 'badge' }, solved(session) ? 'solved' : 'not solved'),
      el('h3', {}, session.description || session.task),
      el('p', { class: 'soft' }, facts.filter(Boolean).join(' · ')),
    ),
    el('div', { class: 'session-top' },
      el('div', {}, el('h4', {}, 'What happened'), contextsView(session), turnsView(session)),
      el('aside', {}, el('h4', {}, 'Reward'), partsView(session))),
    el('h4', {}, 'What the model saw and sampled'),
    tokensView(session),
    el('details', {}, el('summary', {}, 'where it came from'),
      el('div', { class: 'pairs' }, Object.entries(origin).map(([name, value]) =>
        pair(words(name), timing(name) ? duration(value) : value)))),
  );
  root.dataset.trajectory = index;
}

function sessionsCard(sessions) {
  browser.all = sessions.list;
  browser.total = sessions.total;
  browser.vocab = sessions.vocab;
  browser.count = el('div', { class: 'soft count' });
  browser.list = el('div', { class: 'entries' });
  browser.detail = el('article', { class: 'session' });
  const wanted = readHash().get('color');
  if (wanted in COLORS) browser.color = wanted;
  drawList();
  return el(
    'div',
    { class: 'card browser' },
    el('div', { class: 'sidebar' }, filterBar(), browser.count, browser.list),
    browser.detail,
  );
}
