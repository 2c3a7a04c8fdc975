"""What a run says on the terminal while it goes, and at its end.

On a terminal, `Progress` keeps a few lines at the bottom up to date: a bar for
each stage and, under it, what the stage is doing. Anywhere else (a pipe, a log
file) it prints a plain line every few seconds instead, without control codes.
Either way the first reward of a run is announced by a line of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import io
import math
import os
import re
import sys
import threading
import time
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.console import Group
from rich.console import RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

EVERY_S = 5.0  # between plain lines of a stage
REFRESH = 4  # of the live display, a second
SPARK = 24  # columns of a sparkline
PLAIN_WIDTH = 100  # columns of a table that goes into a file
BARS = '▁▂▃▄▅▆▇█'

# Figures that have words of their own; others go by their names. {} is the
# number, a share is shown in percent.
WORDS = {
  'tokens_per_s': '{} tokens/s',
  'sessions_per_s': '{} sessions/s',
  'version': 'version {}',
  'versions': '{} versions',
}
HISTORIES = ('reward', 'solve_rate', 'loss')  # the first there is gets drawn
ASCII = {'±': '+/-', '·': '-', '→': '->', '–': '-', '…': '...', '★': '*'}


@dataclasses.dataclass
class _Stage:
  """What is known of a stage; times are of `time.monotonic`."""

  name: str
  total: int
  step: int
  started: float
  figures: dict[str, Any] = dataclasses.field(default_factory=dict)
  history: list[float] = dataclasses.field(default_factory=list)
  first: tuple[int, float] | None = None  # step and time of the first update
  latest: float = 0.0
  printed: float = -math.inf


class Progress:
  """Live progress of a run; a context manager. Thread-safe.

  Args:
    experiment_name: shown at the top.
    live: whether to draw a live display; None asks whether `file` is a terminal
      that can.
    file: where to; None is standard output.
    every_s: seconds between two plain lines of a stage.
  """

  def __init__(
    self,
    experiment_name: str,
    live: bool | None = None,
    *,
    file: TextIO | None = None,
    every_s: float = EVERY_S,
  ):
    self._name = _clean(experiment_name)
    self._file = sys.stdout if file is None else file
    self._every_s = every_s
    self._lock = threading.RLock()
    self._stages: dict[str, _Stage] = {}
    self._started = time.monotonic()
    self._rewarded = False
    self._muted = False
    self._console = Console(
      file=self._file, force_terminal=True if live else None, highlight=False
    )
    if live is None:
      live = self._console.is_terminal and not self._console.is_dumb_terminal
    self._live: Live | None = None
    if live and _unicode(self._file):
      self._live = Live(
        get_renderable=self._render,
        console=self._console,
        refresh_per_second=REFRESH,
        vertical_overflow='crop',
      )
      self._live.start()
    else:
      self._print(f'Composer · {self._name}')

  def stage(self, stage: str, total: int, done: int = 0) -> None:
    """Begins a stage of `total` steps, of which `done` lie behind it."""
    with self._lock:
      self._stages[stage] = _Stage(
        _clean(stage), int(total), int(done), time.monotonic()
      )
      if self._live is None:
        self._print(self._line(self._stages[stage]))

  def update(self, stage: str, step: int, **figures: float | None) -> None:
    """Notes that `step` steps of a stage are done, and figures of the last.

    Known figures: loss, reward, solve_rate, entropy, mismatch, staleness,
    tokens_per_s, sessions_per_s, version, busy_<side> (a share). `<name>_se` is
    shown as the error of `<name>`, `<name>_max` beside it. A figure keeps its
    value until it gets another; None changes nothing.
    """
    with self._lock:
      if stage not in self._stages:
        raise ValueError(
          f'stage={stage!r} has not begun; call stage() first (known:'
          f' {", ".join(self._stages) or "none"})'
        )
      known, now = self._stages[stage], time.monotonic()
      ends = known.step < known.total <= step  # figures may still come after it
      known.step, known.latest = int(step), now
      known.first = known.first or (int(step), now)
      given = {k: v for k, v in figures.items() if v is not None}
      known.figures.update(given)
      drawn = next((name for name in HISTORIES if name in given), None)
      if drawn and math.isfinite(given[drawn]):
        known.history.append(float(given[drawn]))
      if 'reward' in given and not self._rewarded:
        self._rewarded = True
        self._announce(float(given['reward']))
      late = now - known.printed >= self._every_s
      if self._live is None and (late or ends):
        known.printed = now
        self._print(self._line(known))

  def log(self, text: str) -> None:
    """Prints a line above the display. Control codes in it are dropped."""
    with self._lock:
      self._show(Text(_clean(text)), f'{self._clock()}  {_clean(text)}')

  def table(
    self,
    rows: Sequence[Mapping[str, Any]],
    report: str | os.PathLike[str] | None = None,
  ) -> None:
    """Ends the display and prints the table before/after and the report's path.

    Rows are those of `metrics.write_summary`.
    """
    self.close()
    fancy = _unicode(self._file)
    with self._lock:
      if self._console.is_terminal and fancy:
        self._show(result_table(rows), '')
      else:
        text = io.StringIO()
        plain = Console(file=text, width=PLAIN_WIDTH, color_system=None)
        plain.print(result_table(rows, box.SIMPLE if fancy else box.ASCII))
        self._print(text.getvalue().rstrip('\n'))
      if report is not None:
        # Never wrapped: the path is there to be copied.
        self._print(f'report: {_clean(os.fspath(report))}')

  def close(self) -> None:
    """Ends the live display and leaves its last state; may be called twice."""
    live, self._live = self._live, None
    if live is not None:
      # Not under the lock: the thread that it joins takes the lock to draw.
      live.stop()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  # --- printing --------------------------------------------------------------

  def _announce(self, reward: float) -> None:
    text = f'★ first reward: {_number(reward)}, {self._clock()} after the start'
    self._show(Text(text, style='bold green'), text)

  def _show(self, fancy: RenderableType, plain: str) -> None:
    if self._console.is_terminal and _unicode(self._file):
      self._guard(lambda: self._console.print(fancy))
    else:
      self._print(plain)

  def _print(self, text: str) -> None:
    """A plain line, in whatever encoding the file has."""
    encoding = getattr(self._file, 'encoding', None) or 'utf-8'
    if not _unicode(self._file):
      for sign, other in ASCII.items():
        text = text.replace(sign, other)
      text = text.encode(encoding, 'replace').decode(encoding)
    self._guard(lambda: print(text, file=self._file, flush=True))

  def _guard(self, act: Any) -> None:
    """A reader that goes away (`| head`) ends the output, not the run."""
    if not self._muted:
      try:
        act()
      except BrokenPipeError:
        self._muted = True

  # --- what it looks like ----------------------------------------------------

  def _clock(self) -> str:
    return _clock(time.monotonic() - self._started)

  def _line(self, stage: _Stage) -> str:
    pieces = [f'{self._clock()}  {stage.name} {stage.step}/{stage.total}']
    pieces += _pieces(stage.figures)
    if left := _left(stage):
      pieces.append(f'{_clock(left)} left')
    return ' · '.join(pieces)

  def _render(self) -> RenderableType:
    with self._lock:
      head = Text.assemble(
        ('Composer', 'bold blue'), f' · {self._name} · {self._clock()}'
      )
      parts: list[RenderableType] = [head]
      for stage in self._stages.values():
        parts.append(self._bar(stage))
        parts.append(_figures(stage))
      return Group(*parts)

  def _bar(self, stage: _Stage) -> RenderableType:
    done = stage.step >= stage.total
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=14, no_wrap=True, overflow='ellipsis')
    grid.add_column(min_width=4, max_width=40)
    grid.add_column(no_wrap=True, overflow='ellipsis')
    end = stage.latest if done and stage.latest else time.monotonic()
    note = f'{stage.step}/{stage.total} · {_clock(end - stage.started)}'
    if left := _left(stage):
      note += f' · {_clock(left)} left'
    grid.add_row(
      Text(stage.name, style='green' if done else 'bold'),
      ProgressBar(total=max(stage.total, 1), completed=stage.step),
      Text(note, style='dim' if done else ''),
    )
    return grid


def _figures(stage: _Stage) -> Text:
  """The line under a bar: numbers, and the course of the main one."""
  text = Text('  ')
  for at, piece in enumerate(_pieces(stage.figures)):
    text.append(' · ' if at else '')
    main = piece.split(' ')[0] in ('reward', 'loss', 'solve')
    text.append(piece, style='bold' if main else 'dim')
    if not at and len(stage.history) > 1:
      text.append(f' {spark(stage.history)}', style='blue')
  return text


def _left(stage: _Stage) -> float | None:
  """Seconds that the stage still takes, by its pace since its first update.

  The first step is left out: it contains the compilation.
  """
  if stage.first is None or not stage.first[0] < stage.step < stage.total:
    return None
  pace = (stage.latest - stage.first[1]) / (stage.step - stage.first[0])
  passed = time.monotonic() - stage.latest
  return max(pace * (stage.total - stage.step) - passed, 0.0) or None


def _pieces(figures: Mapping[str, Any]) -> list[str]:
  """Figures in words, the main ones first."""
  pieces, busy = [], []
  order = sorted(
    figures, key=lambda n: HISTORIES.index(n) if n in HISTORIES else 9
  )
  for name in order:
    stem, _, ending = name.rpartition('_')
    if ending in ('se', 'max') and stem in figures:
      continue
    value = figures[name]
    if name.startswith('busy_'):
      busy.append(f'{_clean(name[5:])} {100 * value:.0f} %')
      continue
    words = WORDS.get(name, _clean(name).replace('_', ' ') + ' {}')
    shown = _number(value)
    if f'{name}_se' in figures:
      shown += f' ± {_number(figures[f"{name}_se"])}'
    if f'{name}_max' in figures:
      shown += f' (max {_number(figures[f"{name}_max"])})'
    pieces.append(words.replace('{}', shown))
  return pieces + (['busy: ' + ', '.join(busy)] if busy else [])


def result_table(
  rows: Sequence[Mapping[str, Any]], lines: box.Box = box.SIMPLE
) -> Table:
  """The table before/after, by set, with standard errors."""
  table = Table(box=lines, title='Solve rate', title_justify='left')
  table.add_column('set')
  table.add_column('who')
  for name in ('solve rate', 'best of k', 'sessions'):
    table.add_column(name, justify='right')
  previous = None
  for row in rows:
    first = row['set'] != previous
    if first and previous is not None:
      table.add_section()
    previous = row['set']
    se = row.get('se')
    rate = _fixed(row['solve_rate']) + (f' ± {_fixed(se)}' if se else '')
    after = row['who'] == 'after RL'
    table.add_row(
      Text(_clean(str(row['set'])).replace('_', ' ') if first else ''),
      Text(_clean(str(row['who']))),
      Text(rate),
      Text(_fixed(row.get('best_of_k'))),
      Text(_number(row.get('sessions'))),
      style='bold green' if after else None,
    )
  return table


def spark(values: Sequence[float], width: int = SPARK) -> str:
  """The course of a figure in one line: means of up to `width` equal parts."""
  count = min(width, len(values))
  edges = [round(k * len(values) / count) for k in range(count + 1)]
  means = [
    sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)
  ]
  low, high = min(means), max(means)
  scale = (len(BARS) - 1) / (high - low) if high > low else 0
  return ''.join(BARS[round((mean - low) * scale)] for mean in means)


def _fixed(value: float | None) -> str:
  return '–' if value is None else f'{value:.3f}'


def _number(value: Any) -> str:
  """Three digits; thousands as k and millions as M; counts whole."""
  if value is None:
    return '–'
  number = float(value)
  if not math.isfinite(number):
    return str(number)
  size = abs(number)
  if number.is_integer() and size < 10_000:
    return str(int(number))
  for limit, sign in ((1e6, 'M'), (1e3, 'k')):
    if size >= limit:
      return f'{number / limit:.3g}{sign}'
  if 1e-3 <= size < 1:
    return f'{number:.3f}'
  return f'{number:.3g}'


def _clock(seconds: float) -> str:
  minutes, rest = divmod(int(max(seconds, 0)), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{rest:02}' if hours else f'{minutes}:{rest:02}'


def _clean(text: str) -> str:
  """Text without escape sequences and control codes, new lines excepted."""
  text = re.sub(r'\x1b\[[0-?]*[ -/]*[@-~]', '', text)
  return re.sub(
    r'[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]', '', text
  )


def _unicode(file: TextIO) -> bool:
  encoding = getattr(file, 'encoding', None) or 'utf-8'
  return encoding.lower().replace('-', '') in ('utf8', 'utf16', 'utf32')
