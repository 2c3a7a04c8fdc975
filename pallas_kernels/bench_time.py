"""How long a call takes: by the clock, and by the kernels on the device."""

from __future__ import annotations

from collections.abc import Callable
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
CALLS = 5  # that the profiler sees


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
  """Sum of a call's kernels, whoever launches them, without the gaps between.

  None where the profiler sees no GPU.
  """
  wait(call())
  with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder):
      for _ in range(CALLS):
        out = call()
      wait(out)
    events = []
    for name in glob.glob(f'{folder}/**/*.trace.json.gz', recursive=True):
      text = gzip.decompress(pathlib.Path(name).read_bytes())
      events += json.loads(text)['traceEvents']
  spent = [one['dur'] for one in _on_streams(events)]
  return sum(spent) * 1e-6 / CALLS if spent else None


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
