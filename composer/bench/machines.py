"""Latency of machines: a start, a tool call, a grade, one at a time.

    composer bench machines [--json FILE]

Every line is a median and a 99th percentile over `REPEATS`, of wall time as the
caller sees it, in milliseconds:

  start   a clean machine with its files, and its end
  call    24 cases of a small function, in a live machine
  python  `python -c pass` there
  exec    `true` there
  grade   start, call and end
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
import json
import pathlib
import time

from composer.config import MachineConfig
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines.pool import runner

REPEATS = 300
SOLUTION = """def f(xs, k):
  total = 0
  for x in xs:
    if x > k:
      total += x
  return total
"""


def run(json_path: str | None = None) -> int:
  """Prints a table for each driver that works here."""
  found = {}
  for driver in ('namespace', 'process'):
    try:
      found[driver] = asyncio.run(measure(MachineConfig(driver=driver)))
    except MissingFacility as error:
      print(error)
      continue
    for name, (median, p99) in found[driver].items():
      print(f'{driver:10} {name:6} p50 {median:7.2f} ms  p99 {p99:7.2f} ms')
  if json_path:
    pathlib.Path(json_path).write_text(json.dumps(found, indent=1) + '\n')
  return 0


async def measure(
  config: MachineConfig, repeats: int = REPEATS
) -> dict[str, tuple[float, float]]:
  """Name -> (median, 99th percentile) in milliseconds."""
  files: dict[str, str | bytes] = dict(runner())
  files['solution.py'] = SOLUTION
  files['cases.json'] = json.dumps(
    [[[[n, n + 1, 1], 1], 2 * n + 1] for n in range(2, 26)]
  )
  command = ('python', 'runner.py', 'solution.py', 'cases.json')
  pool = Pool(config)
  try:
    machine = await pool.acquire(files)

    async def start() -> None:
      await pool.release(await pool.acquire(files))

    async def call() -> None:
      await machine.run(command)

    async def program() -> None:
      await machine.run(('python', '-c', 'pass'))

    async def exec_() -> None:
      await machine.run(('true',))

    async def grade() -> None:
      await pool.execute(files, command)

    return {
      'start': await _times(start, repeats),
      'call': await _times(call, repeats),
      'python': await _times(program, repeats),
      'exec': await _times(exec_, repeats),
      'grade': await _times(grade, repeats),
    }
  finally:
    await pool.close()


async def _times(
  act: Callable[[], Awaitable[None]], repeats: int
) -> tuple[float, float]:
  await act()
  times = []
  for _ in range(repeats):
    began = time.perf_counter()
    await act()
    times.append((time.perf_counter() - began) * 1e3)
  times.sort()
  return times[len(times) // 2], times[int(len(times) * 0.99)]
