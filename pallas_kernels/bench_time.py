"""How long a call takes: by the clock, and by the kernels on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import glob
import gzip
import json
import pathlib
import statistics
import tempfile
import time
from typing import Any

import jax

SHORT = (
  2e-4  # seconds; below it, launching a call takes a good part of its time
)
CALLS = 9  # that the profiler sees
PAUSE = 0.02  # seconds between calls whose kernels are counted
TURNS = 0.15, 5, 31  # seconds that all turns take, about; fewest; most


def seconds(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
  """Median over five of the mean over some calls, after two to warm up."""
  wait(call())
  start = time.perf_counter()
  wait(call())
  once = time.perf_counter() - start
  calls = int(min(max(0.04 / max(once, 1e-6), 2), 200))
  found = []
  for _ in range(5):
    start = time.perf_counter()
    for _ in range(calls):
      out = call()
    wait(out)
    found.append((time.perf_counter() - start) / calls)
  return statistics.median(found)


def device_seconds(
  call: Callable[[], Any], wait: Callable[[Any], Any]
) -> float | None:
  """A call's kernels, whoever launches them, without the gaps between.

  The median of calls, where each launches as many kernels as the others, else
  the mean. None where the profiler sees no GPU.
  """
  wait(call())

  def calls():
    for _ in range(CALLS):
      out = call()
    wait(out)

  spent = [one['dur'] * 1e-6 for one in _traced(calls)]
  if not spent:
    return None
  if len(spent) % CALLS:
    return sum(spent) / CALLS
  each = len(spent) // CALLS
  return statistics.median(
    sum(spent[i : i + each]) for i in range(0, len(spent), each)
  )


def in_turns(
  calls: Sequence[Callable[[], Any]], wait: Callable[[Any], Any]
) -> list[tuple[float, ...]]:
  """Seconds of each call, a tuple for each turn in which all come once.

  What slows the device for a while slows all of them. All are measured alike:
  by their kernels where they can be seen, else by the clock.
  """
  once = 0.0
  for call in calls:
    wait(call())
    start = time.perf_counter()
    wait(call())
    once += time.perf_counter() - start
  goal, fewest, most = TURNS
  turns = int(min(max(goal / max(once, 1e-6), fewest), most))

  def run():
    for call in calls:  # shows how many kernels each of them has
      wait(call())
      time.sleep(PAUSE)
    for _ in range(turns):
      for call in calls:
        out = call()
    wait(out)

  return _by_turn(_traced(run), len(calls), turns) or [
    tuple(_clocked(call, wait) for call in calls) for _ in range(turns)
  ]


def _clocked(call: Callable[[], Any], wait: Callable[[Any], Any]) -> float:
  start = time.perf_counter()
  wait(call())
  return time.perf_counter() - start


def _by_turn(
  events: Sequence[dict[str, Any]], calls: int, turns: int
) -> list[tuple[float, ...]] | None:
  """Seconds of each call in each turn, or None where that cannot be told.

  Args:
    events: kernels in their order: those of each call once, with pauses, then
      those of the turns.
    calls: how many.
    turns: how many.
  """
  counts, left = [], list(events)
  for _ in range(calls):
    count = 0
    while count < len(left):
      count += 1
      if count == len(left) or _gap(left[count - 1], left[count]) > PAUSE / 2:
        break
    counts.append(count)
    left = left[count:]
  if not all(counts) or len(left) != turns * sum(counts):
    return None
  found = iter(left)
  return [
    tuple(
      sum(next(found)['dur'] for _ in range(count)) * 1e-6 for count in counts
    )
    for _ in range(turns)
  ]


def _gap(one: dict[str, Any], other: dict[str, Any]) -> float:
  """Seconds from the end of one kernel to the start of another."""
  return (other['ts'] - one['ts'] - one['dur']) * 1e-6


def _traced(run: Callable[[], Any]) -> list[dict[str, Any]]:
  """Kernels that run while `run` does, by their start; 'ts' and 'dur' in us."""
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      run()
    events = []
    for name in glob.glob(f'{folder}/**/*.trace.json.gz', recursive=True):
      text = gzip.decompress(pathlib.Path(name).read_bytes())
      events += json.loads(text)['traceEvents']
  return sorted(_on_streams(events), key=lambda one: one.get('ts', 0.0))


def _on_streams(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """What ran on streams of a GPU."""

  def named(kind: str, part: str) -> list[dict[str, Any]]:
    return [
      one
      for one in events
      if one.get('name') == kind and part in str(one['args'])
    ]

  devices = {one['pid'] for one in named('process_name', 'GPU')}
  streams = {(one['pid'], one['tid']) for one in named('thread_name', 'Stream')}
  return [
    one
    for one in events
    if one.get('ph') == 'X'
    and one['pid'] in devices
    and (one['pid'], one['tid']) in streams
  ]
