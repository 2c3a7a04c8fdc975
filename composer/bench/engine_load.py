"""A load of multi-turn sessions, and what an engine makes of it.

A trace is JSON: a list of sessions, each a list of turns; a turn is
{"at": seconds after the turn before (for the first: after the start),
 "prompt": tokens that are added to the context, "new": tokens to sample}, and
the first may share its leading tokens: {"shared": name, "shared_tokens": n}.
Without one, `DEFAULT` draws sessions in groups: all begin with one system
prompt, the sessions of a group with the same task, tools answer between turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import time
import zlib

import numpy as np

from composer import config as config_lib
from composer import records
from composer.bench import engine_roofline
from composer.inference import engine as engine_lib


@dataclasses.dataclass(frozen=True)
class Turn:
  """Waits, adds tokens to the context, asks for a continuation."""

  at: float  # seconds since the turn before: what a tool took
  prompt: int  # tokens added
  new: int  # tokens sampled
  shared: str = ''  # whose leading tokens these are
  shared_tokens: int = 0  # of `prompt`, common to all of that name


Trace = tuple[tuple[Turn, ...], ...]


def draw(
  groups: int = 6,
  size: int = 8,
  turns: int = 5,
  system: int = 64,
  task: int = 48,
  observation: int = 24,
  new: int = 16,
  pause: float = 0.05,
  seed: int = 0,
) -> Trace:
  """Groups of sessions; lengths and pauses are exponential around the means."""
  rng = np.random.default_rng(seed)

  def about(mean: float) -> int:
    return 1 + int(min(rng.exponential(mean), 4 * mean))

  sessions = []
  for group in range(groups):
    task_tokens = system + about(task)
    start = float(rng.exponential(pause) * group)
    for _ in range(size):
      first = Turn(start, task_tokens, about(new), f'{group}', task_tokens)
      later = (
        Turn(float(rng.exponential(pause)), about(observation), about(new))
        for _ in range(turns - 1)
      )
      sessions.append((first, *later))
  return tuple(sessions)


DEFAULT = draw()


def read(path: pathlib.Path) -> Trace:
  """A trace from a file.

  Raises:
    ValueError: it is none; says where.
  """
  try:
    raw = json.loads(path.read_text(encoding='utf-8'))
    trace = tuple(tuple(Turn(**turn) for turn in session) for session in raw)
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(f'--load {path}: no trace of sessions: {error}') from error
  for number, session in enumerate(trace):
    if not session or any(t.prompt < 1 or t.new < 1 for t in session):
      raise ValueError(
        f'--load {path}: session {number} has no turn, or a turn of no tokens;'
        ' `prompt` and `new` are 1 or more'
      )
  if not trace:
    raise ValueError(f'--load {path}: the trace holds no session')
  return trace


@dataclasses.dataclass(frozen=True)
class Served:
  """What the engine made of a trace; times in seconds."""

  seconds: float
  sampled_per_s: float
  computed_per_s: float  # prompt tokens too
  first_token: dict[str, float]  # p50, p90, p99 of a turn
  between_tokens: dict[str, float]  # of two pieces of an answer, a token
  occupancy: float  # sequences of a step, on average
  hit_rate: float  # of prompt tokens
  pages: int  # held at once, at most
  preempted: int
  compilations: int  # while serving
  roofline: float  # share that the steps reached


def context(trace: Trace) -> int:
  """Tokens of the longest session."""
  return max(sum(t.prompt + t.new for t in session) for session in trace)


def engine_config(
  trace: Trace, numerics: config_lib.NumericsConfig, rows: int
) -> config_lib.EngineConfig:
  """Of an engine that takes all sessions at once, up to 128; `rows` of a step."""
  block = numerics.kv_block
  most = -(-context(trace) // block) * block
  sequences = min(len(trace), 128)
  return config_lib.EngineConfig(
    rows=rows,
    sequences=sequences,
    pages=sequences * most // block + 1,
    max_context=most,
  )


def measure(
  model: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  trace: Trace,
  ceilings: engine_roofline.Ceilings,
  engine: engine_lib.Engine,
) -> Served:
  """Plays the trace once to warm up and once for the figures; closes the engine.

  `engine` is of `engine_config`, and has compiled what it will run.
  """
  try:
    asyncio.run(_play(engine, model, trace, seed=1))
    before = engine.stats
    started = time.perf_counter()
    played = asyncio.run(_play(engine, model, trace, seed=2))
    seconds = time.perf_counter() - started
    stats = engine.stats
  finally:
    engine.close()
  sampled = stats.sampled - before.sampled
  steps = stats.steps - before.steps
  prompts = sum(sum(p.prompts) for p in played)
  occupied = (stats.occupied - before.occupied) / max(steps, 1)
  ideal = engine_roofline.decode_seconds(
    model, numerics, max(round(occupied), 1), context(trace) / 2, ceilings
  )
  return Served(
    seconds=seconds,
    sampled_per_s=sampled / seconds,
    computed_per_s=(stats.rows - before.rows) / seconds,
    first_token=_percentiles([t for p in played for t in p.first]),
    between_tokens=_percentiles([t for p in played for t in p.between]),
    occupancy=occupied,
    hit_rate=(stats.reused - before.reused) / prompts,
    pages=max(p.pages for p in played),
    preempted=stats.preempted - before.preempted,
    compilations=stats.compilations - before.compilations,
    roofline=ideal * steps / (stats.busy_s - before.busy_s),
  )


@dataclasses.dataclass
class _Played:
  """What a session saw."""

  prompts: list[int] = dataclasses.field(default_factory=list)
  first: list[float] = dataclasses.field(default_factory=list)
  between: list[float] = dataclasses.field(default_factory=list)
  pages: int = 0


async def _play(engine, model, trace: Trace, seed: int) -> list[_Played]:
  return await asyncio.gather(
    *(
      _session(engine, model, session, seed * 10_000 + n)
      for n, session in enumerate(trace)
    )
  )


async def _session(engine, model, session, seed: int) -> _Played:
  rng, played = np.random.default_rng(seed), _Played()
  tokens = np.zeros(0, np.int32)
  for number, turn in enumerate(session):
    await asyncio.sleep(turn.at)
    own = np.random.default_rng(
      zlib.crc32(turn.shared.encode()) + seed // 10_000
    )
    common = own.integers(0, model.vocab_size, turn.shared_tokens)
    rest = rng.integers(0, model.vocab_size, turn.prompt - turn.shared_tokens)
    tokens = np.concatenate([tokens, common, rest]).astype(np.int32)
    sent = time.perf_counter()
    arrived: list[tuple[float, int]] = []

    def tell(piece, arrived=arrived):
      arrived.append((time.perf_counter(), len(piece.tokens)))

    answer = await engine.sample(
      records.SampleRequest(
        tokens, turn.new, (), 1.0, seed + number, on_tokens=tell
      )
    )
    played.prompts.append(len(tokens))
    played.first.append(arrived[0][0] - sent)
    for (t0, _), (t1, count) in zip(arrived, arrived[1:], strict=False):
      played.between += [(t1 - t0) / count] * count
    played.pages = max(played.pages, engine.pages_held)
    tokens = np.concatenate([tokens, answer.tokens])
  return played


def _percentiles(values: list[float]) -> dict[str, float]:
  if not values:
    return {f'p{p}': 0.0 for p in (50, 90, 99)}
  return {f'p{p}': float(np.percentile(values, p)) for p in (50, 90, 99)}


def table(trace: Trace, served: Served) -> str:
  """The sessions as text."""

  def milliseconds(by: dict[str, float]) -> str:
    return '  '.join(f'{name} {1e3 * s:,.1f}' for name, s in by.items())

  turns = sum(len(session) for session in trace)
  lines = (
    ('sessions, turns', f'{len(trace)}, {turns} in {served.seconds:.1f} s'),
    ('sampled tokens/s', f'{served.sampled_per_s:,.0f}'),
    ('computed tokens/s', f'{served.computed_per_s:,.0f}'),
    ('first token, ms', milliseconds(served.first_token)),
    ('between tokens, ms', milliseconds(served.between_tokens)),
    ('sequences a step', f'{served.occupancy:.1f}'),
    ('prompt from cache', f'{served.hit_rate:.1%}'),
    ('pages held, most', f'{served.pages}'),
    ('preempted', f'{served.preempted}'),
    ('compiled serving', f'{served.compilations}'),
    ('of the roofline', f'{served.roofline:.1%}'),
  )
  return '\n'.join(f'{name:20s} {value}' for name, value in lines)
