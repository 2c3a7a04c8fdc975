"""What a run writes for people and tools to read, and how to read it back.

    metrics.jsonl     one object a line: step, time, slash-named scalars
    tensorboard/      the same scalars as event files
    events.jsonl      spans of busy lanes: lane, start, end, name
    versions.jsonl    published versions: bytes, ratio, seconds, pause
    trajectories/     whole sessions, one zstd-framed JSON file a saved batch
    summary.json      the table before/after, the mismatch table, the cost

`step` is `TrainState.step`: it counts optimizer steps over all stages. A line
is whole or, after a crash, the half-written last one; readers ignore that one
and `Writer` repairs it. Times are seconds since the epoch. No jax in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import json
import math
import os
from pathlib import Path
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
  from composer.records import Segment
  from composer.records import Task
  from composer.records import Trajectory

METRICS = 'metrics.jsonl'
ABANDONED = 'metrics.abandoned.jsonl'
EVENTS = 'events.jsonl'
VERSIONS = 'versions.jsonl'
SUMMARY = 'summary.json'
TRAJECTORIES = 'trajectories'
TENSORBOARD = 'tensorboard'
SUFFIX = '.json.zst'

LANES_BUFFER = 256  # spans
LANES_SECONDS = 2.0  # between writes at most, while spans end

TokenText = Callable[[list[int]], list[str]]


# --- lines of JSON -----------------------------------------------------------


def _finite(value: Any) -> float | None:
  """A float that JSON can hold; None for NaN and infinities."""
  number = float(value)
  return number if math.isfinite(number) else None


def _dump(record: Mapping[str, Any]) -> bytes:
  text = json.dumps(record, separators=(',', ':'), allow_nan=False)
  return text.encode() + b'\n'


def _append(path: Path, data: bytes) -> None:
  """Adds whole lines by one write, so that processes may share a file."""
  with open(path, 'ab', buffering=0) as file:
    view = memoryview(data)
    while view:
      view = view[file.write(view) :]


def _replace(path: Path, data: bytes) -> None:
  """The file is the old one or the new one, never half of it."""
  part = path.with_name(f'.{path.name}.{os.getpid()}.part')
  part.write_bytes(data)
  os.replace(part, path)


def _lines(path: Path) -> list[dict[str, Any]]:
  """Records of a file of lines; none if there is no file.

  A half-written last line is left out; a broken line before it is an error, as
  no crash of ours can cause one.
  """
  if not path.exists():
    return []
  raw = path.read_bytes().split(b'\n')
  records = []
  for number, line in enumerate(raw, 1):
    if not line.strip():
      continue
    try:
      records.append(json.loads(line))
    except ValueError as error:
      if number == len(raw):
        break
      raise ValueError(
        f'{path} line {number} is not JSON ({error}); remove the line'
      ) from None
  return records


def _repair(path: Path) -> None:
  """Completes or removes a last line that a crash left without its end."""
  if not path.exists():
    return
  raw = path.read_bytes()
  if not raw or raw.endswith(b'\n'):
    return
  start = raw.rfind(b'\n') + 1
  try:
    json.loads(raw[start:])
  except ValueError:
    os.truncate(path, start)
  else:
    _append(path, b'\n')


# --- scalars -----------------------------------------------------------------


class Writer:
  """Scalars of a run, to `metrics.jsonl` and TensorBoard. Thread-safe.

  Args:
    workdir: the run's directory, made if it does not exist.
    resume: whether the run continues. Without it, a directory that has metrics
      already is refused.
    step: the step of the checkpoint that the run continues from. Lines of later
      steps belong to work that was lost: they move to
      `metrics.abandoned.jsonl`. None keeps all.
  """

  def __init__(
    self,
    workdir: str | os.PathLike[str],
    resume: bool = False,
    step: int | None = None,
  ):
    self._workdir = Path(workdir)
    self._lock = threading.Lock()
    self._workdir.mkdir(parents=True, exist_ok=True)
    path = self._workdir / METRICS
    if not resume and path.exists() and path.stat().st_size:
      raise ValueError(
        f'workdir={self._workdir} has metrics of an earlier run; resume it'
        ' (--resume) or name another directory (--workdir)'
      )
    for name in (METRICS, EVENTS, VERSIONS):
      _repair(self._workdir / name)
    if resume and step is not None:
      cut(self._workdir, step)
    # Here, because it takes as long to import as all the rest.
    from tensorboardX import SummaryWriter

    self._board = SummaryWriter(
      str(self._workdir / TENSORBOARD),
      purge_step=None if step is None else step + 1,
    )

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Appends one line. A value that is not finite is written as null.

    A step may be written more than once, with other names.
    """
    for name in scalars:
      if name in ('step', 'time') or not re.fullmatch(
        r'[\w.@+-]+(/[\w.@+-]+)*', name
      ):
        raise ValueError(
          f'scalar name {name!r}: use words joined by slashes, such as'
          " 'reward/mean'; 'step' and 'time' are taken"
        )
    now = time.time()
    values = {name: _finite(value) for name, value in scalars.items()}
    line = _dump({'step': int(step), 'time': round(now, 3), **values})
    with self._lock:
      _append(self._workdir / METRICS, line)
      for name, value in values.items():
        if value is not None:
          self._board.add_scalar(name, value, int(step), now)

  def flush(self) -> None:
    """Pushes TensorBoard's own buffer out; the lines are out already."""
    with self._lock:
      self._board.flush()

  def close(self) -> None:
    with self._lock:
      self._board.close()

  def __enter__(self) -> Writer:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()


def cut(workdir: str | os.PathLike[str], step: int) -> int:
  """Moves lines after `step` to `metrics.abandoned.jsonl`; returns how many.

  A crash in between may leave lines in both files, never in neither.
  """
  path = Path(workdir) / METRICS
  records = _lines(path)
  kept = [record for record in records if record['step'] <= step]
  gone = [record for record in records if record['step'] > step]
  if gone:
    _append(Path(workdir) / ABANDONED, b''.join(map(_dump, gone)))
    _replace(path, b''.join(map(_dump, kept)))
  return len(gone)


def read(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The lines of `metrics.jsonl`, in order; a null value is None."""
  return _lines(Path(workdir) / METRICS)


# --- busy lanes --------------------------------------------------------------


class Lanes:
  """Who was busy when. Thread-safe; a span costs some microseconds.

  Spans of one lane may overlap (many sessions, one lane): `busy` counts the
  time in which at least one was open.
  """

  def __init__(self, workdir: str | os.PathLike[str]):
    self._path = Path(workdir) / EVENTS
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._lock = threading.Lock()
    self._buffer: list[tuple[str, float, float, str]] = []
    # Times of the epoch from a clock that never jumps.
    self._epoch = time.time() - time.perf_counter()
    self._flushed = self._asked = time.perf_counter()
    self._open: dict[str, int] = {}
    self._since: dict[str, float] = {}
    self._busy: dict[str, float] = {}

  def span(self, lane: str, name: str = '') -> _Span:
    """Context manager: `with lanes.span('trainer', 'step'): ...`."""
    return _Span(self, lane, name)

  def finished(self, lane: str, seconds: float, name: str = '') -> None:
    """Notes a span of so many seconds that ends now; `busy` ignores it."""
    with self._lock:
      now = time.perf_counter()
      self._buffer.append((lane, now - seconds, now, name))

  def busy(self) -> dict[str, float]:
    """Share of the time since the last call that each lane was busy."""
    with self._lock:
      now = time.perf_counter()
      elapsed = max(now - self._asked, 1e-9)
      shares = {}
      for lane, seconds in self._busy.items():
        if self._open[lane]:
          seconds += now - self._since[lane]
          self._since[lane] = now
        shares[lane] = min(seconds / elapsed, 1.0)
        self._busy[lane] = 0.0
      self._asked = now
      return shares

  def flush(self) -> None:
    with self._lock:
      self._write()

  close = flush

  def _enter(self, lane: str) -> float:
    with self._lock:
      now = time.perf_counter()
      count = self._open.get(lane, 0)
      if not count:
        self._since[lane] = now
        self._busy.setdefault(lane, 0.0)
      self._open[lane] = count + 1
      return now

  def _leave(self, lane: str, start: float, name: str) -> None:
    with self._lock:
      now = time.perf_counter()
      self._open[lane] -= 1
      if not self._open[lane]:
        self._busy[lane] += now - self._since[lane]
      self._buffer.append((lane, start, now, name))
      late = now - self._flushed > LANES_SECONDS
      if late or len(self._buffer) >= LANES_BUFFER:
        self._write()

  def _write(self) -> None:
    if self._buffer:
      epoch = self._epoch
      data = b''.join(
        _dump(
          {
            'lane': lane,
            'start': round(epoch + start, 5),
            'end': round(epoch + end, 5),
            'name': name,
          }
        )
        for lane, start, end, name in self._buffer
      )
      self._buffer.clear()
      _append(self._path, data)
    self._flushed = time.perf_counter()


class _Span:
  """One open span of `Lanes`."""

  __slots__ = ('_lanes', '_lane', '_name', '_start')

  def __init__(self, lanes: Lanes, lane: str, name: str):
    self._lanes, self._lane, self._name = lanes, lane, name

  def __enter__(self) -> _Span:
    self._start = self._lanes._enter(self._lane)
    return self

  def __exit__(self, *exc: object) -> None:
    self._lanes._leave(self._lane, self._start, self._name)


def read_lanes(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Spans {lane, start, end, name}, in the order in which they ended."""
  return _lines(Path(workdir) / EVENTS)


# --- versions and summary ----------------------------------------------------


def record_version(
  workdir: str | os.PathLike[str], version: int, **figures: Any
) -> None:
  """Adds what is known of a published version; later lines add to earlier.

  The report reads `kind` ('base' or 'delta'), `bytes`, `full_bytes`, `ratio`
  (bytes / full_bytes), `seconds` (to publish) and `pause_s` (of an engine that
  swaps it in, known only later).
  """
  figures = {
    name: value if isinstance(value, str) else _finite(value)
    for name, value in figures.items()
    if value is not None
  }
  line = {'version': int(version), 'time': round(time.time(), 3), **figures}
  _append(Path(workdir) / VERSIONS, _dump(line))


def read_versions(workdir: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """One record a version, ascending; `time` is that of the first line."""
  versions: dict[int, dict[str, Any]] = {}
  for line in _lines(Path(workdir) / VERSIONS):
    known = versions.setdefault(line['version'], {})
    known.update(line, time=known.get('time', line['time']))
  return [versions[version] for version in sorted(versions)]


def write_summary(
  workdir: str | os.PathLike[str], summary: Mapping[str, Any]
) -> None:
  """Writes `summary.json`.

  `rows`: {set, who, solve_rate, se, sessions, best_of_k} each; `notes`: texts;
  `mismatch`: numerics -> figures, nested as deep as one likes (bitwise; fast
  with and without replay); `cost`: figures, nested alike.
  """
  for row in summary.get('rows', ()):
    for field in ('set', 'who', 'solve_rate'):
      if field not in row:
        raise ValueError(
          f'summary row {dict(row)} has no {field}; every row names its set, who'
          ' was measured and the solve rate'
        )
  text = json.dumps(_plain(summary), indent=1, allow_nan=False)
  _replace(Path(workdir) / SUMMARY, text.encode())


def read_summary(workdir: str | os.PathLike[str]) -> dict[str, Any] | None:
  """The summary, or None while the run has not written it."""
  path = Path(workdir) / SUMMARY
  return json.loads(path.read_bytes()) if path.exists() else None


def _plain(value: Any) -> Any:
  """JSON's own types: numpy scalars to numbers, what is not finite to None."""
  if isinstance(value, Mapping):
    return {str(key): _plain(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_plain(item) for item in value]
  if value is None or isinstance(value, (str, bool, int)):
    return value
  if isinstance(value, np.integer):
    return int(value)
  if isinstance(value, np.bool_):
    return bool(value)
  return _finite(value)


# --- trajectories ------------------------------------------------------------


def save_trajectories(
  workdir: str | os.PathLike[str],
  name: str,
  trajectories: Sequence[Trajectory],
  extra: Sequence[Mapping[str, Any] | None] | None = None,
  *,
  token_text: TokenText,
  tasks: Mapping[str, Task] | None = None,
  step: int | None = None,
  split: str | None = None,
) -> Path:
  """Saves a batch of whole sessions to `trajectories/<name>.json.zst`.

  Args:
    workdir: the run's directory.
    name: of the batch (letters, digits, '.', '_', '-'); one that exists already
      is replaced.
    trajectories: the sessions.
    extra: aligned with `trajectories`; each None or {'trainer_logprobs': per
      segment float [T], 'flips': per segment int [T]}. `flips` counts the layers
      whose native experts differ from the sampler's. NaN, and -1, are unknown.
    token_text: ids -> the text of each.
    tasks: task id -> task, for descriptions and splits.
    step: the optimizer step at which the batch was made.
    split: the set that they belong to; None takes each task's own
      `metadata['split']`.
  """
  if not re.fullmatch(r'[A-Za-z0-9][\w.-]*', name):
    raise ValueError(
      f'name={name!r} of a batch of trajectories becomes a file name; use'
      " letters, digits, '.', '_' and '-'"
    )
  if extra is None:
    extra = [None] * len(trajectories)
  if len(extra) != len(trajectories):
    raise ValueError(
      f'extra has {len(extra)} entries for {len(trajectories)} trajectories; pass'
      ' one each, None where nothing is known'
    )
  ids = sorted(
    {
      int(token)
      for trajectory in trajectories
      for segment in trajectory.segments
      for token in np.unique(segment.tokens)
    }
  )
  batch = {
    'name': name,
    'step': step,
    'time': round(time.time(), 3),
    'vocab': dict(zip(map(str, ids), token_text(ids), strict=True)),
    'trajectories': [
      _trajectory(
        trajectory, more, (tasks or {}).get(trajectory.task_id), split
      )
      for trajectory, more in zip(trajectories, extra, strict=True)
    ],
  }
  import zstandard

  path = Path(workdir) / TRAJECTORIES / (name + SUFFIX)
  path.parent.mkdir(parents=True, exist_ok=True)
  _replace(path, zstandard.ZstdCompressor(level=6).compress(_dump(batch)))
  return path


def _trajectory(
  trajectory: Trajectory,
  extra: Mapping[str, Any] | None,
  task: Task | None,
  split: str | None,
) -> dict[str, Any]:
  """One session as plain data."""
  unknown = [None] * len(trajectory.segments)
  logprobs = (extra or {}).get('trainer_logprobs') or unknown
  flips = (extra or {}).get('flips') or unknown
  metadata = task.metadata if task else {}
  return {
    'task': trajectory.task_id,
    'description': task.instruction if task else '',
    'split': split or str(metadata.get('split', '')),
    'group': trajectory.group_id,
    'index': trajectory.index,
    'reward': _finite(trajectory.reward),
    'parts': {k: _finite(v) for k, v in trajectory.reward_parts.items()},
    'stop_reason': trajectory.stop_reason,
    'timings': {k: _digits(v, 4) for k, v in trajectory.timings.items()},
    'provenance': {k: str(v) for k, v in trajectory.provenance.items()},
    'turns': [
      {
        'kind': turn.kind,
        'text': turn.text,
        'segment': turn.segment,
        'seconds': _digits(turn.seconds, 3),
      }
      for turn in trajectory.turns
    ],
    'segments': [
      _segment(*parts)
      for parts in zip(trajectory.segments, logprobs, flips, strict=True)
    ],
  }


def _segment(
  segment: Segment, trainer: Any | None, flips: Any | None
) -> dict[str, Any]:
  """One segment by columns.

  `ids` and `flips` have an entry for each token; `behaviour`, `trainer`,
  `difference`, `versions` and `auditable` for each position in `sampled`.
  """
  length = len(segment.tokens)
  for name, array in (('trainer_logprobs', trainer), ('flips', flips)):
    if array is not None and len(array) != length:
      raise ValueError(
        f'extra {name} has {len(array)} entries for a segment of {length} tokens;'
        ' pass one for each token'
      )
  at = np.flatnonzero(segment.sampled)
  behaviour = np.asarray(segment.logprobs, np.float64)[at]
  record = {
    'ids': np.asarray(segment.tokens).tolist(),
    'sampled': at.tolist(),
    'behaviour': _column(behaviour, 7),
    'versions': np.asarray(segment.versions)[at].tolist(),
    'auditable': np.asarray(segment.auditable)[at].astype(int).tolist(),
    'stop_reason': segment.stop_reason,
    'parent': int(segment.parent),
  }
  if trainer is not None:
    # float32 minus float32 is exact in float64: 0 means equal to the last bit.
    exact = np.asarray(np.asarray(trainer, np.float32)[at], np.float64)
    record['trainer'] = _column(exact, 7)
    record['difference'] = _column(np.abs(exact - behaviour), 4)
  if flips is not None:
    counts = np.asarray(flips)
    # Written so that NaN counts as unknown too.
    record['flips'] = [int(f) if f >= 0 else None for f in counts.tolist()]
  return record


def _digits(value: float, digits: int) -> float | None:
  number = _finite(value)
  return None if number is None else float(f'{number:.{digits}g}')


def _column(values: Iterable[float], digits: int) -> list[float | None]:
  return [_digits(value, digits) for value in values]


def read_trajectories(
  workdir: str | os.PathLike[str],
) -> Iterator[dict[str, Any]]:
  """Saved batches, oldest first: {name, step, time, vocab, trajectories}."""
  import zstandard

  folder = Path(workdir) / TRAJECTORIES
  batches = []
  for path in sorted(folder.glob(f'[!.]*{SUFFIX}')):
    batches.append((path.stat().st_mtime_ns, path))
  for _, path in sorted(batches):
    # A frame of our own says its size; nothing else is read here.
    yield json.loads(zstandard.ZstdDecompressor().decompress(path.read_bytes()))
