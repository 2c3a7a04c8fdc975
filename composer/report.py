"""`report.html`: a finished, running or broken run on one self-contained page.

`collect` reads what `metrics.py` wrote and turns it into plain data, `render`
puts the data into the page of `report_assets/`, `write` does both. Every piece
may be missing; the page then says what it does not show. The page loads nothing
from anywhere, and text that came out of a model or a machine reaches it only as
JSON in a script tag and as text nodes, never as HTML.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
import hashlib
import importlib.resources
import json
import math
import os
from pathlib import Path
import re
import time
from typing import Any

from composer import metrics

REPORT = 'report.html'
STYLES = ('style.css',)
SCRIPTS = ('dom.js', 'charts.js', 'lanes.js', 'sessions.js', 'page.js')

POINTS = 800  # of a curve; more are averaged in bins
SPANS = 4000  # of a lane; more are merged with their neighbours
SESSION_BYTES = 7_000_000  # of trajectories, as JSON
TEXT = 20_000  # characters of a turn

Series = dict[str, tuple[list[float], list[float]]]

# Curves: section, title, what it says, scalars (a pattern; its group, if any,
# is the label). A scalar belongs to the first chart that matches it.
CHARTS = (
  ('Learning', 'Reward', 'mean over the groups of a step', r'reward/mean'),
  (
    'Learning',
    'Solve rate',
    'sets evaluated; band: one standard error',
    r'eval/(.+)/solve_rate',
  ),
  (
    'Learning',
    'Best of k',
    'at least one of k sessions solves',
    r'eval/(.+)/best_of_k',
  ),
  ('Learning', 'Reward by part', 'mean over sessions', r'reward/(.+)'),
  ('Learning', 'Entropy', 'nats a sampled token', r'(?:.*/)?(entropy.*)'),
  (
    'Learning',
    'Mid-training loss',
    'nats a token',
    r'(?:mid.?train(?:ing)?/(.*loss.*)|loss/mid.?train.*)',
  ),
  (
    'Learning',
    'RL loss',
    '',
    r'(?:(?:rl|train|trainer)/(.*loss.*)|loss/?(.*))',
  ),
  (
    'Agreement',
    'Mismatch, KL',
    'rollout against trainer, audited tokens',
    r'mismatch/kl',
  ),
  (
    'Agreement',
    'Mismatch, |Δ logprob|',
    'largest and 99th percentile',
    r'mismatch/(.+)_abs_logprob',
  ),
  (
    'Agreement',
    'Route flips',
    'share of tokens whose experts differ',
    r'mismatch/route_flip_rate',
  ),
  (
    'Agreement',
    'Audited tokens',
    'scored again, a step',
    r'mismatch/audited_tokens',
  ),
  (
    'Flow',
    'Staleness',
    'versions between sampling and training',
    r'staleness/(.+)',
  ),
  (
    'Flow',
    'Busy shares',
    'share of the time in which a side worked',
    r'busy/(.+)',
  ),
  ('Flow', 'Tokens a second', '', r'(.*?)/?tokens_per_s(?:econd)?'),
  ('Flow', 'Sessions a second', '', r'(.*?)/?sessions_per_s(?:econd)?'),
  (
    'Flow',
    'Groups',
    'cumulative; queued is a listing',
    r'groups/(produced|trained|queued|dropped/.+)',
  ),
  ('Flow', 'Publish time', 'seconds', r'weights/(.+_s)'),
)


def write(workdir: str | os.PathLike[str]) -> Path:
  """Writes the report of a run; the old one stays until the new one is whole."""
  path = Path(workdir) / REPORT
  part = path.with_name(f'.{REPORT}.{os.getpid()}.part')
  part.write_text(render(collect(workdir)), encoding='utf-8')
  os.replace(part, path)
  return path


# --- the page ----------------------------------------------------------------


def render(data: Mapping[str, Any]) -> str:
  """The page that shows `data`."""
  style = '\n'.join(map(_asset, STYLES))
  script = '(() => {\n"use strict";\n'
  script += '\n'.join(map(_asset, SCRIPTS)) + '\n})();'
  digest = hashlib.sha256(script.encode()).digest()
  pieces = {
    'title': _escape(str(data.get('name', 'run'))),
    'script_hash': base64.b64encode(digest).decode(),
    'style': style,
    'data': embed(data),
    'script': script,
  }
  return re.sub(
    r'\{\{(\w+)\}\}', lambda match: pieces[match[1]], _asset('page.html')
  )


def embed(data: Any) -> str:
  """JSON that no text in it can break out of a script tag with."""
  text = json.dumps(data, separators=(',', ':'), allow_nan=False)
  return text.replace('<', '\\u003c').replace('>', '\\u003e')


def _escape(text: str) -> str:
  return text.replace('&', '&amp;').replace('<', '&lt;').replace('>', '&gt;')


def _asset(name: str) -> str:
  folder = importlib.resources.files('composer') / 'report_assets'
  return (folder / name).read_text(encoding='utf-8')


# --- the data ----------------------------------------------------------------


def collect(workdir: str | os.PathLike[str]) -> dict[str, Any]:
  """All that the page shows of a run, as plain data; `missing` says the rest."""
  workdir = Path(workdir)
  missing: list[str] = []
  config = _attempt(missing, 'config.json', lambda: _config(workdir))
  lines = _attempt(missing, 'metrics.jsonl', lambda: metrics.read(workdir))
  spans = _attempt(missing, 'events.jsonl', lambda: metrics.read_lanes(workdir))
  versions = _attempt(
    missing, 'versions.jsonl', lambda: metrics.read_versions(workdir)
  )
  summary = _attempt(
    missing, 'summary.json', lambda: metrics.read_summary(workdir)
  )
  sessions = _attempt(missing, 'trajectories/', lambda: _sessions(workdir))
  lines = lines or []
  series = _series(lines)
  flow = conservation(lines)
  for what, there in (
    ('reward/mean', 'reward/mean' in series),
    ('eval/<set>/solve_rate', any('/solve_rate' in name for name in series)),
    ('groups/produced', bool(flow)),
  ):
    if lines and not there:
      missing.append(f'no scalar {what} yet')
  return {
    'name': (config or {}).get('name') or workdir.resolve().name,
    'written': time.strftime('%Y-%m-%d %H:%M', time.localtime()),
    'config': config,
    'facts': _facts(lines, series, spans or [], versions or []),
    'charts': charts(series),
    'lanes': lanes(spans or []),
    'versions': versions or [],
    'summary': summary,
    'conservation': flow,
    'sessions': sessions,
    'missing': missing,
  }


def _attempt(missing: list[str], what: str, read: Any) -> Any:
  """What `read` gives; a note in `missing` if that is nothing or fails."""
  try:
    value = read()
  except Exception as error:  # a report of a broken run is still a report
    missing.append(f'{what} cannot be read: {error}')
    return None
  if not value:
    missing.append(f'{what} is not there yet')
  return value


def _config(workdir: Path) -> dict[str, Any] | None:
  path = workdir / 'config.json'
  return json.loads(path.read_bytes()) if path.exists() else None


def _series(lines: Iterable[Mapping[str, Any]]) -> Series:
  """name -> (steps, values), in order of step; a step's last value counts."""
  points: dict[str, dict[float, float]] = {}
  for line in lines:
    for name, value in line.items():
      if name not in ('step', 'time') and value is not None:
        points.setdefault(name, {})[line['step']] = value
  return {
    name: (sorted(known), [known[step] for step in sorted(known)])
    for name, known in points.items()
  }


def _thin(x: list[float], y: list[float]) -> tuple[list[float], list[float]]:
  """At most `POINTS` points: means of equal runs of neighbours."""
  size = math.ceil(len(x) / POINTS)
  if size <= 1:
    return x, y
  starts = range(0, len(x), size)
  return (
    [x[min(i + size, len(x)) - 1] for i in starts],
    [sum(y[i : i + size]) / len(y[i : i + size]) for i in starts],
  )


def charts(series: Series) -> list[dict[str, Any]]:
  """Charts to draw: {section, title, note, lines: [{label, x, y, se}]}.

  Scalars that no chart claims get one each in the section 'Other scalars'.
  """
  claimed: set[str] = set()
  drawn: dict[tuple[str, str], dict[str, Any]] = {}
  for section, title, note, pattern in CHARTS:
    for name in series:
      match = re.fullmatch(pattern, name)
      if match is None or name in claimed:
        continue
      claimed.add(name)
      chart = drawn.setdefault(
        (section, title),
        {'section': section, 'title': title, 'note': note, 'lines': []},
      )
      label = next(filter(None, match.groups()), '') or name
      chart['lines'].append(_line(series, name, label))
      claimed.add(name + '_se')
  for name in sorted(set(series) - claimed):
    section = 'Other scalars'
    line = _line(series, name, name)
    drawn[section, name] = {
      'section': section,
      'title': name,
      'note': '',
      'lines': [line],
    }
  return list(drawn.values())


def _line(series: Series, name: str, label: str) -> dict[str, Any]:
  x, y = _thin(*series[name])
  line = {'label': label.replace('_', ' ').replace('/', ': '), 'x': x, 'y': y}
  errors = series.get(name + '_se')
  if errors and errors[0] == x:
    line['se'] = errors[1]
  return line


def lanes(spans: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
  """Spans by lane, in seconds from the first: {lane: [[start, end, name]]}.

  `names` holds the names once. Spans of a lane with too many are joined with
  their neighbours across the shortest gaps, so that long idle times stay.
  """
  if not spans:
    return None
  origin = min(span['start'] for span in spans)
  names: dict[str, int] = {}
  rows: dict[str, list[list[float]]] = {}
  for span in spans:
    name = names.setdefault(str(span.get('name', '')), len(names))
    rows.setdefault(str(span['lane']), []).append(
      [span['start'] - origin, span['end'] - origin, name]
    )
  return {
    'origin': origin,
    'end': max(span['end'] for span in spans) - origin,
    'names': list(names),
    'rows': {lane: _joined(rows[lane]) for lane in _order(rows)},
  }


def _order(lane_names: Iterable[str]) -> list[str]:
  first = ['trainer', 'rollout', 'grade', 'publish', 'eval']
  return sorted(
    lane_names,
    key=lambda lane: (first.index(lane) if lane in first else 9, lane),
  )


def _joined(row: list[list[float]]) -> list[list[float]]:
  """At most `SPANS` spans, sorted by start; times to a tenth of a ms."""
  row = sorted(row)
  if len(row) > SPANS:
    union: list[list[float]] = []
    for start, end, name in row:
      if union and start <= union[-1][1]:
        union[-1][1] = max(union[-1][1], end)
      else:
        union.append([start, end, name])
    gaps = sorted(
      (b[0] - a[1] for a, b in zip(union, union[1:], strict=False)),
      reverse=True,
    )
    least = gaps[SPANS - 1] if len(gaps) >= SPANS else -1.0
    row = []
    for start, end, name in union:
      if row and start - row[-1][1] <= least:
        row[-1][1] = end
      else:
        row.append([start, end, name])
  return [[round(a, 4), round(b, 4), name] for a, b, name in row]


def conservation(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
  """Where the produced groups are: the latest counts, and what is unaccounted.

  produced = trained + dropped (by reason) + queued; each is counted by another
  party, so the difference of a running run may be a group in flight.
  """
  last: dict[str, float] = {}
  for line in lines:
    for name, value in line.items():
      if value is not None and name.split('/')[0] in ('groups', 'sessions'):
        last[name] = value
  if 'groups/produced' not in last:
    return None
  prefix = 'groups/dropped/'
  dropped = {
    name[len(prefix) :]: value
    for name, value in last.items()
    if name.startswith(prefix)
  }
  trained, queued = last.get('groups/trained', 0), last.get('groups/queued', 0)
  return {
    'produced': last['groups/produced'],
    'trained': trained,
    'dropped': dropped,
    'queued': queued,
    'difference': last['groups/produced']
    - trained
    - queued
    - sum(dropped.values()),
    'abandoned': last.get('sessions/abandoned'),
  }


def _facts(
  lines: Sequence[Mapping[str, Any]],
  series: Series,
  spans: Sequence[Mapping[str, Any]],
  versions: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
  """Figures of the header: steps, seconds, when the first reward stood."""
  facts: dict[str, Any] = {
    'steps': max((line['step'] for line in lines), default=0),
    'versions': len(versions),
  }
  times = [line['time'] for line in lines]
  starts = times + [span['start'] for span in spans]
  ends = times + [span['end'] for span in spans]
  if starts:
    facts['start'] = min(starts)
    facts['seconds'] = max(ends) - min(starts)
    for line in lines:
      if line.get('reward/mean') is not None:
        facts['first_reward_s'] = line['time'] - min(starts)
        facts['first_rl_step'] = line['step']
        break
  if 'mismatch/kl' in series:
    facts['mismatch_kl_max'] = max(series['mismatch/kl'][1])
  return facts


# --- sessions ----------------------------------------------------------------


def _sessions(workdir: Path) -> dict[str, Any] | None:
  """Sessions that fit, drawn evenly from the batches, with one vocabulary."""
  vocab: dict[str, str] = {}
  rows: list[list[dict[str, Any]]] = []
  for batch in metrics.read_trajectories(workdir):
    vocab.update(batch['vocab'])
    rows.append(
      [
        _shorten(session) | {'batch': batch['name'], 'step': batch['step']}
        for session in batch['trajectories']
      ]
    )
  total = sum(map(len, rows))
  if not total:
    return None
  room, kept = SESSION_BYTES, []
  for place, at, session in _turn_about(rows):
    room -= len(json.dumps(session, separators=(',', ':')))
    if kept and room < 0:
      break
    kept.append((place, at, session))
  kept.sort(key=lambda entry: entry[:2])
  return {
    'total': total,
    'vocab': vocab,
    'list': [session for _, _, session in kept],
  }


def _turn_about(
  rows: Sequence[Sequence[dict[str, Any]]],
) -> Iterator[tuple[int, int, dict[str, Any]]]:
  """The first of every batch, then the second of every batch, and so on."""
  for at in range(max(map(len, rows))):
    for place, row in enumerate(rows):
      if at < len(row):
        yield place, at, row[at]


def _shorten(session: dict[str, Any]) -> dict[str, Any]:
  """Cuts the middle out of very long turns, and says so."""
  for turn in session['turns']:
    text = turn['text']
    if len(text) > TEXT:
      half = TEXT // 2
      gone = len(text) - 2 * half
      turn['text'] = (
        f'{text[:half]}\n[{gone} characters left out of the report]\n{text[-half:]}'
      )
  return session
