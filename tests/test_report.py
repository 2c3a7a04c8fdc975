"""The report of a synthetic run, opened by a real Chromium."""

import dataclasses
import html
import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest

from composer import metrics
from composer import report
from composer.config import Experiment
from composer.records import Segment
from composer.records import Task
from composer.records import Trajectory
from composer.records import Turn

BROWSERS = ('chromium', 'chromium-browser', 'google-chrome', 'chrome')
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
FLAGS = (
  '--headless',
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
)
needs_browser = pytest.mark.skipif(
  BROWSER is None, reason=f'no browser is installed (of {", ".join(BROWSERS)})'
)

HOSTILE = (
  '</script><script>document.title="owned"</script><img src=x onerror=y>'
)
START = 1_764_280_000.0
MIDTRAIN, RL = 150, 120
SETS = ('held_out_bugs', 'held_out_functions')


# --- a synthetic run ---------------------------------------------------------


def write_midtraining(rng, lines):
  """Scalars and spans of the first stage."""
  for step in range(1, MIDTRAIN + 1):
    loss = 0.9 + 4.6 * math.exp(-step / 28) + rng.normal(0, 0.05)
    lines.append(
      (
        step,
        START + 8 + step * 0.85,
        {
          'midtrain/loss': loss,
          'midtrain/tokens_per_s': 14_800 + rng.normal(0, 250),
          'midtrain/grad_norm': 0.6 + abs(rng.normal(0, 0.1)),
          'midtrain/learning_rate': 3e-3 * min(step / 10, 1),
        },
      )
    )


def write_rl(rng, lines, bitwise):
  """Scalars of the second stage, evaluations among them."""
  begin = START + 8 + MIDTRAIN * 0.85
  produced = trained = equal = stale = 0
  for k in range(1, RL + 1):
    skipped, late = int(rng.integers(0, 3)), int(rng.random() < 0.08)
    trained, equal, stale = trained + 8, equal + skipped, stale + late
    produced = trained + equal + stale + 5
    rate = 0.22 + 0.53 / (1 + math.exp(-(k - 45) / 16))
    scalars = {
      'reward/mean': rate - 0.09 + rng.normal(0, 0.05),
      'reward/tests': rate + rng.normal(0, 0.05),
      'reward/effort': 3.2 - 0.9 * rate + rng.normal(0, 0.05),
      'loss/policy': rng.normal(0, 0.02),
      'entropy': 1.4 - 0.8 * rate + rng.normal(0, 0.03),
      'staleness/mean': 0.9 + rng.normal(0, 0.15),
      'staleness/max': int(rng.integers(1, 3)),
      'busy/trainer': min(0.62 + rng.normal(0, 0.04), 1),
      'busy/rollout': min(0.88 + rng.normal(0, 0.03), 1),
      'rollout/tokens_per_s': 9_100 + rng.normal(0, 400),
      'trainer/tokens_per_s': 11_900 + rng.normal(0, 300),
      'rollout/sessions_per_s': 41 + rng.normal(0, 2),
      'weights/ratio': 0.61 + rng.normal(0, 0.015),
      'weights/publish_s': 0.031 + abs(rng.normal(0, 0.004)),
      'weights/pause_s': 0.004 + abs(rng.normal(0, 0.001)),
      'groups/produced': produced,
      'groups/trained': trained,
      'groups/queued': 5,
      'groups/dropped/equal': equal,
      'groups/dropped/stale': stale,
      'groups/dropped/infrastructure': 0,
      'sessions/abandoned': 0,
      'policy/grad_norm': 0.4 + abs(rng.normal(0, 0.1)),
      'policy/clip_share': abs(rng.normal(0, 0.02)),
    }
    if k % 10 == 0:
      scale = 0.0 if bitwise else 1.0
      scalars |= {
        'mismatch/kl': scale * abs(rng.normal(2e-4, 5e-5)),
        'mismatch/max_abs_logprob': scale * abs(rng.normal(0.2, 0.05)),
        'mismatch/p99_abs_logprob': scale * abs(rng.normal(0.02, 0.004)),
        'mismatch/route_flip_rate': scale * abs(rng.normal(0.004, 0.001)),
        'mismatch/audited_tokens': 1900 + int(rng.integers(0, 300)),
      }
    time_s = begin + 4 + k * 1.7
    lines.append((MIDTRAIN + k, time_s, scalars))
    if k % 30 == 0 or k == 1:
      for name, share in zip(SETS, (1.0, 0.55), strict=True):
        sessions = 128
        value = 0.2 + (rate - 0.2) * share
        lines.append(
          (
            MIDTRAIN + k,
            time_s,
            {
              f'eval/{name}/solve_rate': value,
              f'eval/{name}/solve_rate_se': math.sqrt(
                value * (1 - value) / sessions
              ),
              f'eval/{name}/best_of_k': min(value + 0.15, 1),
            },
          )
        )


def write_lines(workdir, lines):
  """Through the real writer, then with the times that they should have."""
  with metrics.Writer(workdir) as writer:
    for step, _, scalars in lines:
      writer.write(step, scalars)
  path = workdir / metrics.METRICS
  records = metrics.read(workdir)
  for record, (_, time_s, _) in zip(records, lines, strict=True):
    record['time'] = time_s
  path.write_text(''.join(json.dumps(record) + '\n' for record in records))


def write_spans(workdir, rng):
  """Spans of both stages, at the times of the lines."""
  begin = START + 8 + MIDTRAIN * 0.85 + 4
  spans = [
    ('trainer', START + 8 + k * 0.85, START + 8.8 + k * 0.85, 'mid-training')
    for k in range(MIDTRAIN)
  ]
  for k in range(RL):
    at = begin + k * 1.7
    spans.append(('trainer', at + 0.4, at + 1.45, 'step'))
    spans.append(('publish', at + 1.45, at + 1.49, 'delta'))
    for j in range(24):
      start = at + j * 0.07
      spans.append(('rollout', start, start + 0.062, 'decode'))
    for _ in range(10):
      start = at + rng.random() * 1.7
      spans.append(('grade', start, start + 0.008, 'tests'))
    if k % 30 == 29:
      spans.append(('eval', at, at + 1.6, 'held_out_bugs'))
  lines = (
    json.dumps({'lane': a, 'start': b, 'end': c, 'name': d}) + '\n'
    for a, b, c, d in spans
  )
  (workdir / metrics.EVENTS).write_text(''.join(lines))


def write_versions(workdir, rng):
  for version in range(RL):
    base = version % 25 == 0
    size = 1_650_000 if base else int(1_010_000 + rng.normal(0, 20_000))
    metrics.record_version(
      workdir,
      version,
      kind='base' if base else 'delta',
      bytes=size,
      full_bytes=1_700_000,
      ratio=size / 1_700_000,
      seconds=0.03 + abs(rng.normal(0, 0.004)),
    )
    metrics.record_version(workdir, version, pause_s=0.004)


SPECIALS = (
  *('<pad>', '<bos>', '<end>', '<task>', '<tools>', '<act>', '<obs>'),
  *('<summarize>', '<summary>', '<file>'),
)


class Words:
  """A tokenizer of whole words, grown as they come."""

  def __init__(self):
    self.words = list(SPECIALS)

  def encode(self, text):
    pieces = re.findall(r'<\w+>|\s?[^\s<]+|\s|<', text)
    for piece in pieces:
      if piece not in self.words:
        self.words.append(piece)
    return [self.words.index(piece) for piece in pieces]

  def text(self, ids):
    return [self.words[i] for i in ids]


TASKS = (
  ('count of items over k', 'def count_over a k', 't += x > k'),
  ('sum of squares of even items', 'def sum_squares a', 't += x * x'),
  ('index of the largest item', 'def index_max a', 'if a[i] > a[b] :'),
  ('running product modulo m', 'def product_mod a m', 't = t * x % m'),
)
LISTING = ' L1 {} L2 t = 0 L3 for x in a : L4 {} L5 return t'


def make_task(number, split):
  instruction, head, body = TASKS[number % len(TASKS)]
  if number == 2:
    instruction += HOSTILE
  return Task(
    id=f'repair/{number}',
    kind='repair',
    instruction=instruction,
    files={'solution.py': head + body},
    tools=('edit', 'test', 'submit'),
    test_command=('python', 'runner.py'),
    allowed=('solution.py',),
    hidden_files={},
    hidden_command=('python', 'hidden.py'),
    metadata={'split': split},
  )


def script(rng, solves, summarised, broken):
  """(kind, text) of the turns after the prompt, by segment."""
  turns = [('call', 'edit L4 <'), ('observation', 'ok'), ('call', 'test')]
  turns.append(('observation', f'{rng.integers(0, 6)} of 6'))
  if broken:
    turns += [
      ('broken', 'edit L4 L4 <<'),
      ('observation', 'error broken call'),
    ]
  more = [('call', 'edit L4 >='), ('observation', 'ok'), ('call', 'test')]
  more.append(('observation', 'all pass' if solves else '4 of 6'))
  more.append(('call', 'submit'))
  if summarised:
    return [[*turns, ('summary', 'L4 < fails , try >=')], more]
  return [turns + more]


def make_trajectory(rng, words, task, version, solves, summarised, broken):
  """A session that reads like one, and what the trainer makes of it."""
  opening = LISTING.format(*TASKS[int(task.id.split('/')[1]) % len(TASKS)][1:])
  start = words.encode(
    '<bos><tools> edit LINE TOKEN ; test ; submit<task> '
    f'{task.instruction}<file>{opening}'
  )
  segments, turns, trainer, flips = [], [], [], []
  for number, rows in enumerate(script(rng, solves, summarised, broken)):
    tokens, sampled = list(start), [False] * len(start)
    text = f'{task.instruction}\n{opening}'
    if number:
      more = words.encode('<summary> L4 < fails , try >= 4 turns left<end>')
      tokens, sampled = tokens + more, sampled + [False] * len(more)
      text = 'L4 < fails , try >= 4 turns left, 1 summaries'
    turns.append(Turn('prompt', text, number, 0, len(tokens), 0.0))
    for kind, row in rows:
      answer = kind == 'observation'
      mark = {'observation': '<obs>', 'summary': '<summarize>'}.get(
        kind, '<act>'
      )
      piece = words.encode(f'{mark} {row}<end>')
      begin = len(tokens)
      tokens += piece
      sampled += [False] + [not answer] * (len(piece) - 1)
      turns.append(Turn(kind, row, number, begin, len(tokens), 0.02))
    mask = np.array(sampled)
    length = len(tokens)
    logprobs = np.where(mask, -rng.exponential(0.7, length), 0)
    logprobs = logprobs.astype(np.float32)
    off = np.where(
      rng.random(length) < 0.5, 10 ** rng.uniform(-6, -0.3, length), 0
    )
    versions = np.where(mask, version + (np.arange(length) > length // 2), -1)
    segments.append(
      Segment(
        tokens=np.array(tokens, np.int32),
        sampled=mask,
        logprobs=logprobs,
        temperatures=np.ones(length, np.float32),
        versions=versions.astype(np.int32),
        experts=np.zeros((length, 3, 2), np.int16),
        auditable=mask & (np.arange(length) <= length // 2),
        stop_reason='summary' if summarised and not number else 'finished',
        parent=number - 1,
      )
    )
    trainer.append((logprobs + off.astype(np.float32)).astype(np.float32))
    flips.append(rng.choice([-1, 0, 1, 2], length, p=[0.1, 0.75, 0.1, 0.05]))
  effort = 1.5 + rng.random()
  trajectory = Trajectory(
    task_id=task.id,
    group_id='5f0c',
    index=int(rng.integers(0, 16)),
    segments=tuple(segments),
    turns=tuple(turns),
    reward=float(solves) - 0.02 * effort,
    reward_parts={'tests': float(solves), 'effort': -0.02 * effort},
    stop_reason='submitted',
    provenance={'cluster': 'local', 'driver': 'namespace', 'seed': 7},
    timings={'sampling': 0.31, 'tools': 0.02, 'grade': 0.008},
  )
  return trajectory, {'trainer_logprobs': trainer, 'flips': flips}


def write_sessions(workdir, rng, batches=5, each=12):
  words = Words()
  for batch in range(batches):
    step = MIDTRAIN + 30 * batch
    split = 'train' if batch % 2 else 'held_out_bugs'
    tasks = [make_task(number, split) for number in range(each)]
    made = [
      make_trajectory(
        rng,
        words,
        task,
        batch * 30,
        rng.random() < 0.2 + 0.13 * batch,
        number % 4 == 3,
        number % 3 == 0,
      )
      for number, task in enumerate(tasks)
    ]
    extra = [more if i % 6 else None for i, (_, more) in enumerate(made)]
    metrics.save_trajectories(
      workdir,
      f'{split}-{step}',
      [trajectory for trajectory, _ in made],
      extra,
      token_text=words.text,
      tasks={task.id: task for task in tasks},
      step=step,
    )


def write_summary(workdir):
  rates = {
    'held_out_bugs': (0.23, 0.756, 0.94, 0.58),
    'held_out_functions': (0.14, 0.31, 0.94, 0.57),
  }
  whos = ('after mid-training', 'after RL', 'demonstrator', 'blind guesser')
  metrics.write_summary(
    workdir,
    {
      'rows': [
        {
          'set': name,
          'who': who,
          'solve_rate': rate,
          'se': math.sqrt(rate * (1 - rate) / 512),
          'sessions': 512,
          'best_of_k': min(rate + 0.2, 1),
        }
        for name, values in rates.items()
        for who, rate in zip(whos, values, strict=True)
      ],
      'notes': ['best of k: at least one of 4 sessions of a task solves it.'],
      'mismatch': {
        'bitwise': {'kl': 0.0, 'max_abs_logprob': 0.0, 'route_flip_rate': 0.0},
        'fast': {
          'replay': {
            'kl': 2.1e-9,
            'max_abs_logprob': 3.3e-5,
            'route_flip_rate': 0.0012,
          },
          'no replay': {
            'kl': 4.4e-5,
            'max_abs_logprob': 0.31,
            'route_flip_rate': 0.0012,
          },
        },
      },
      'cost': {
        'seconds': 371.2,
        'peak_memory_gb': 2.3,
        'sampled_tokens': 231_000,
        'tool_calls': 58_211,
      },
    },
  )


def write_run(workdir, stage='done', bitwise=True):
  """A whole run, or one that is still in its mid-training."""
  workdir.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(0)
  config = dataclasses.asdict(Experiment(name='quickstart'))
  (workdir / 'config.json').write_text(json.dumps(config))
  lines = []
  write_midtraining(rng, lines)
  if stage == 'done':
    write_rl(rng, lines, bitwise)
    write_spans(workdir, rng)
    write_versions(workdir, rng)
    write_sessions(workdir, rng)
    write_summary(workdir)
  write_lines(workdir, lines)
  return workdir


# --- what the page gets ------------------------------------------------------


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  workdir = write_run(tmp_path_factory.mktemp('run') / 'finished')
  return workdir, report.write(workdir)


def embedded(page):
  """The data of a page, as a browser would find it."""
  text = page.read_text(encoding='utf-8')
  found = re.search(
    r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL
  )
  return json.loads(found[1])


def test_every_scalar_is_in_exactly_one_chart(finished):
  workdir, page = finished
  names = {
    name
    for line in metrics.read(workdir)
    for name in line
    if name not in ('step', 'time') and not name.endswith('_se')
  }
  lines = [
    line for chart in embedded(page)['charts'] for line in chart['lines']
  ]
  assert len(lines) == len(names)


def test_charts_have_the_values_and_their_errors(finished):
  workdir, page = finished
  chart = next(
    c for c in embedded(page)['charts'] if c['title'] == 'Solve rate'
  )
  line = next(x for x in chart['lines'] if x['label'] == 'held out bugs')
  wanted = [
    (row['step'], row[name], row[name + '_se'])
    for name in ['eval/held_out_bugs/solve_rate']
    for row in metrics.read(workdir)
    if name in row
  ]
  got = list(zip(line['x'], line['y'], line['se'], strict=True))
  assert got == [pytest.approx(row) for row in wanted]


def test_long_curves_are_thinned_but_keep_mean_and_end():
  x = list(range(10_000))
  y = [math.sin(v / 500) + 2 for v in x]
  chart = report.charts({'a/b': (x, y)})[0]['lines'][0]
  assert len(chart['x']) <= report.POINTS
  assert chart['x'][-1] == x[-1]
  assert np.mean(chart['y']) == pytest.approx(np.mean(y), abs=0.01)


def busy_union(row):
  """Seconds covered by spans, counted on a fine raster."""
  covered = np.zeros(200_000, bool)
  for start, end, *_ in row:
    covered[round(start * 1000) : round(end * 1000)] = True
  return covered.sum() / 1000


def test_lanes_with_too_many_spans_keep_their_long_gaps():
  spans = [
    {'lane': 'rollout', 'start': 5 + k * 0.01, 'end': 5.008 + k * 0.01}
    for k in range(3 * report.SPANS)
    if not 4000 <= k < 6000
  ]
  rows = report.lanes(spans)['rows']['rollout']
  assert len(rows) <= report.SPANS
  gaps = [b[0] - a[1] for a, b in zip(rows, rows[1:], strict=False)]
  assert max(gaps) == pytest.approx(20.002, abs=1e-3)
  few = report.lanes(spans[:1000])['rows']['rollout']
  assert busy_union(few) == pytest.approx(8.0, abs=0.01)


def test_conservation_takes_each_count_from_where_it_was_last_seen():
  lines = [
    {'step': 1, 'groups/produced': 9.0, 'groups/dropped/equal': 2.0},
    {'step': 2, 'groups/produced': 20.0, 'groups/trained': 8.0},
    {'step': 3, 'groups/queued': 7.0, 'groups/trained': 10.0},
  ]
  flow = report.conservation(lines)
  assert (flow['produced'], flow['trained'], flow['queued']) == (20, 10, 7)
  assert flow['dropped'] == {'equal': 2}
  assert flow['difference'] == 1
  assert report.conservation([{'step': 1, 'midtrain/loss': 2.0}]) is None


def test_sessions_are_drawn_evenly_when_they_do_not_all_fit(
  finished, monkeypatch
):
  workdir, page = finished
  whole = embedded(page)['sessions']
  assert len(whole['list']) == whole['total'] == 60
  monkeypatch.setattr(report, 'SESSION_BYTES', 40_000)
  few = report.collect(workdir)['sessions']
  assert few['total'] == 60
  counts = [
    sum(session['batch'] == name for session in few['list'])
    for name in {session['batch'] for session in whole['list']}
  ]
  assert 1 <= min(counts) and max(counts) - min(counts) <= 1


def test_no_text_ends_the_script_or_reaches_the_page_as_html(finished):
  _, page = finished
  text = page.read_text(encoding='utf-8')
  assert HOSTILE not in text
  assert text.count('</script>') == 2
  sessions = embedded(page)['sessions']['list']
  assert any(HOSTILE in session['description'] for session in sessions)
  script = ''.join(map(report._asset, report.SCRIPTS))
  for way in ('innerHTML', 'outerHTML', 'insertAdjacent', 'document.write'):
    assert way not in script


def test_the_page_names_no_address_and_is_small(finished):
  _, page = finished
  text = page.read_text(encoding='utf-8')
  outside = re.sub(r'(?s)<script type="application/json".*?</script>', '', text)
  addresses = set(re.findall(r'https?://[^\s"\']+', outside))
  assert addresses == {'http://www.w3.org/2000/svg'}  # a name, never fetched
  assert page.stat().st_size < 15_000_000


@pytest.mark.parametrize('broken', [False, True])
def test_an_empty_or_broken_workdir_gives_a_page_that_says_so(tmp_path, broken):
  if broken:
    (tmp_path / 'config.json').write_text('{"name":')
    (tmp_path / 'metrics.jsonl').write_text('{"step": 1\n{"step": 2}\n')
  data = embedded(report.write(tmp_path))
  missing = ' / '.join(data['missing'])
  for name in ('config.json', 'metrics.jsonl', 'trajectories/', 'summary.json'):
    assert name in missing
  assert ('metrics.jsonl cannot be read' in missing) == broken


# --- the page in a browser ---------------------------------------------------


def browse(page, profile, fragment=''):
  """(attributes of the root, the page's elements as text) after its scripts."""
  command = [
    BROWSER,
    *FLAGS,
    f'--user-data-dir={profile}',
    '--window-size=1280,2000',
    '--virtual-time-budget=2000',
    '--dump-dom',
    page.as_uri() + fragment,
  ]
  done = subprocess.run(command, capture_output=True, timeout=60, check=True)
  text = done.stdout.decode()
  opening = re.search(r'<html[^>]*>', text)[0]
  attributes = dict(re.findall(r'data-([a-z]+)="([^"]*)"', opening))
  body = re.sub(r'(?s)<script.*?</script>', '', text)
  return attributes, body


@needs_browser
def test_chromium_draws_a_finished_run_and_opens_a_session(finished, tmp_path):
  _, page = finished
  attributes, body = browse(page, tmp_path, '#trajectory=15&color=flips')
  data = embedded(page)
  assert 'errors' not in attributes
  assert attributes['ready'] == 'yes'
  wanted = [line for chart in data['charts'] for line in chart['lines']]
  assert int(attributes['curves']) == len(wanted) + 4  # and those of versions
  assert '<title>quickstart · Composer</title>' in body

  session = data['sessions']['list'][15]
  assert attributes['trajectory'] == '15'
  tokens = re.findall(r'<span class="token[^"]*"[^>]*>(.*?)</span>', body)
  texts = [
    data['sessions']['vocab'][str(i)]
    for segment in session['segments']
    for i in segment['ids']
  ]
  assert [html.unescape(token) for token in tokens] == texts
  assert len(session['segments']) == 2 and 'class="seam"' in body
  bars = re.findall(r'<button class="(context-bar[^"]*)"', body)
  assert bars == ['context-bar summarised', 'context-bar']
  assert 'class="contexts" data-summaries="1"' in body
  assert re.search(r'1 summary · \d+ tokens in 2 contexts, at most', body)
  assert 'class="turn broken"' in body and 'class="turn summary"' in body
  assert re.search(r'class="token[^"]*" style="background:[^"]*flip', body)
  assert 'owned' not in re.search(r'<title>.*?</title>', body)[0]
  assert '<img' not in body


CLICKS = """
const press = (at) => document.querySelector(at).click();
const choose = (label, value) => {
  const menu = document.querySelector(`select[aria-label="${label}"]`);
  menu.value = value;
  menu.dispatchEvent(new Event('change'));
};
choose('every outcome', 'with a summary');
choose('every set', 'train');
choose('every step', '180');
press('.entry[data-index="19"]');
press('button[data-color="versions"]');
press('.lane-tools button:nth-child(2)');
press('.theme');
"""


@needs_browser
def test_clicks_filter_open_recolour_zoom_and_change_the_theme(
  finished, tmp_path
):
  _, page = finished
  # The page refuses scripts that are not its own; a copy lets the test's in.
  text = re.sub(
    r'<meta http-equiv="Content-Security-Policy"[^>]*>',
    '',
    page.read_text(encoding='utf-8'),
  )
  copy = tmp_path / 'copy.html'
  script = f'<script>{CLICKS}</script></body>'
  copy.write_text(text.replace('</body>', script), encoding='utf-8')
  attributes, body = browse(copy, tmp_path / 'profile')
  sessions = embedded(page)['sessions']['list']
  wanted = [
    str(at)
    for at, session in enumerate(sessions)
    if len(session['segments']) > 1
    and session['split'] == 'train'
    and session['step'] == 180
  ]
  assert 'errors' not in attributes
  assert re.findall(r'data-index="(\d+)"', body) == wanted == ['15', '19', '23']
  assert attributes['trajectory'] == '19'
  assert re.search(r'class="entry open" data-index="19"', body)
  assert re.search(r'class="token[^"]*" style="background:[^"]*--c', body)
  assert attributes['theme'] in ('light', 'dark')


@needs_browser
def test_chromium_shows_a_run_that_is_in_its_mid_training(tmp_path):
  workdir = write_run(tmp_path / 'run', stage='mid-training')
  attributes, body = browse(report.write(workdir), tmp_path / 'profile')
  assert 'errors' not in attributes
  assert int(attributes['curves']) == 4
  assert 'trajectories/ is not there yet' in body
  assert 'No session has been saved yet.' in body


@needs_browser
def test_an_error_in_the_page_would_be_seen(tmp_path):
  """The oracle of the tests above can fail."""
  data = report.collect(tmp_path) | {'charts': [{'section': 'Learning'}]}
  page = tmp_path / 'report.html'
  page.write_text(report.render(data), encoding='utf-8')
  attributes, _ = browse(page, tmp_path / 'profile')
  assert 'TypeError' in attributes['errors']
  assert 'ready' not in attributes
