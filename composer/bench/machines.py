"""Machines: latencies, starts a second, idle ones in 8 GB, and a burst.

    composer bench machines [--driver NAME] [--burst N] [--json FILE]

For each driver that works here (under emulation, some minutes), medians and 99th percentiles of wall time as the
caller sees it, one at a time, in milliseconds:

  start     a clean machine with its files, ready (its end is not counted)
  stop      its end
  exec      `true` in a live machine
  python    `python -c pass` there
  call      24 cases of a small function there, by the tasks' runner
  grade     start, call and end
  snapshot  of a machine with a few files
  fork      a machine from that snapshot, until it has answered

and `fork` of this process with `waitpid`, for scale: what the host was able to do
at that moment. Starts a second are with `AT_ONCE` in flight. Memory is the
proportional share (PSS) of a machine's processes and their page tables; what the
kernel keeps beside that is not in it. A burst is requested all at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
import dataclasses
import json
import os
import pathlib
import time
from typing import Any

from composer.config import MachineConfig
from composer.environments.machines import MachineError
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines.pool import runner

AT_ONCE = 8
WAIT_S = 3600.0  # the last of a burst may come late where all is emulated
IDLE_BYTES = 8 << 30
BURST = 1000
# Repeats, starts for the rate, idle machines looked at.
SIZES = {
  'namespace': (300, 500, 48),
  'microvm': (12, 16, 6),
  'process': (300, 500, 48),
}
SOLUTION = """def f(xs, k):
  total = 0
  for x in xs:
    if x > k:
      total += x
  return total
"""
CALL = ('python', 'runner.py', 'solution.py', 'cases.json')


def run(
  json_path: str | None = None, driver: str = '', burst: int = BURST
) -> int:
  """Prints a table for each driver that works here, or for one.

  Raises:
    ValueError: an unknown driver, or no burst.
  """
  if driver and driver not in SIZES:
    raise ValueError(
      f'--driver {driver} is unknown; the known ones are {", ".join(SIZES)}'
    )
  if burst < 1:
    raise ValueError(f'--burst {burst} must be at least 1')
  found: dict[str, Any] = {}
  for name in [driver] if driver else SIZES:
    try:
      found[name] = asyncio.run(measure(name, burst, *SIZES[name]))
    except (MissingFacility, MachineError) as error:
      print(f'{name:10} not measured: {error}')
      continue
    for line in lines_of(name, found[name]):
      print(line)
  if json_path:
    pathlib.Path(json_path).write_text(json.dumps(found, indent=1) + '\n')
  return 0


def lines_of(driver: str, found: dict[str, Any]) -> list[str]:
  lines = [
    f'{driver:10} {name:9} p50 {median:8.2f} ms  p99 {p99:8.2f} ms'
    for name, (median, p99) in found['ms'].items()
  ]
  if 'hypervisor' in found:
    about = f'{found["hypervisor"]}, {found["accelerator"]}'
    lines.insert(0, f'{driver:10} {about}')
  idle, burst = found['idle'], found['burst']
  lines.append(f'{driver:10} starts    {found["starts_per_s"]:.0f} a second')
  lines.append(
    f'{driver:10} idle      {idle["bytes"] / 2**20:.2f} MB each,'
    f' {idle["fit"]} in 8 GB'
  )
  lines.append(
    f'{driver:10} burst     {burst["served"]} of {burst["requested"]} served in'
    f' {burst["seconds"]:.1f} s, {burst["failures"]} machines failed'
  )
  return lines


async def measure(
  driver: str, burst: int, repeats: int, starts: int, idle: int
) -> dict[str, Any]:
  """All figures of a driver."""
  config = MachineConfig(driver=driver, warm=1)
  if driver == 'microvm':  # they compete for the cores long before memory
    config = dataclasses.replace(
      config, memory_mb=128, concurrent=AT_ONCE, start_timeout_s=60.0
    )
  files: dict[str, str | bytes] = dict(runner())
  files['solution.py'] = SOLUTION
  files['cases.json'] = json.dumps(
    [[[[n, n + 1, 1], 1], 2 * n + 1] for n in range(2, 26)]
  )
  pool = Pool(config, wait_s=WAIT_S)
  try:
    await pool.open()
    strength = {
      name: pool._provenance[name]
      for name in ('hypervisor', 'accelerator')
      if name in pool._provenance
    }
    return {
      **strength,
      'ms': await latencies(pool, files, repeats),
      'starts_per_s': await rate(pool, starts),
      'idle': await idle_memory(config, idle),
      'burst': await burst_of(pool, burst),
      'limits': pool.config.concurrent,
    }
  finally:
    await pool.close()


async def latencies(
  pool: Pool, files: dict[str, str | bytes], repeats: int
) -> dict[str, tuple[float, float]]:
  """Name -> (median, 99th percentile) in milliseconds."""
  times: dict[str, list[float]] = {}

  async def timed(name: str, act: Awaitable[Any]) -> Any:
    began = time.perf_counter()
    result = await act
    times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
    return result

  async def fork_here() -> None:
    pid = os.posix_spawn('/bin/true', ['true'], {})
    os.waitpid(pid, 0)

  for turn in range(repeats + 1):
    if turn == 1:
      times.clear()  # the first of everything warmed up
    await timed('true here', fork_here())
    machine = await timed('start', pool.acquire(files))
    try:
      await timed('exec', machine.run(('true',)))
      await timed('python', machine.run(('python', '-c', 'pass')))
      await timed('call', machine.run(CALL))
      snapshot = await timed('snapshot', machine.snapshot())
      fork = await timed('fork', pool.acquire({}, snapshot))
      snapshot.discard()
      await pool.release(fork)
    finally:
      await timed('stop', pool.release(machine))
    await timed('grade', pool.execute(files, CALL))
  return {name: percentiles(values) for name, values in times.items()}


def percentiles(values: list[float]) -> tuple[float, float]:
  ordered = sorted(values)
  return ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]


async def rate(pool: Pool, starts: int) -> float:
  """Starts a second, `AT_ONCE` of them at a time, each then ended."""
  left = iter(range(starts))

  async def worker() -> None:
    for _ in left:
      await pool.release(await pool.acquire({}))

  began = time.perf_counter()
  await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
  return starts / (time.perf_counter() - began)


async def burst_of(pool: Pool, count: int) -> dict[str, float]:
  """All requested at once; each writes a number and reads it back."""
  failures = pool.counters.failures

  async def one(number: int) -> bool:
    machine = await pool.acquire({'n': str(number)})
    try:
      return int(await machine.read('n')) == number
    finally:
      await pool.release(machine)

  began = time.perf_counter()
  served = await asyncio.gather(*map(one, range(count)), return_exceptions=True)
  return {
    'requested': count,
    'served': sum(x is True for x in served),
    'seconds': time.perf_counter() - began,
    'failures': pool.counters.failures - failures,
  }


async def idle_memory(config: MachineConfig, count: int) -> dict[str, float]:
  """Memory of a machine that has started and waits."""
  config = dataclasses.replace(config, warm=0, concurrent=count)
  pool = Pool(config, wait_s=WAIT_S)
  try:
    await pool.open()
    assert pool._zygote is not None
    root = pool._zygote.process.pid
    base = memory_of(root)
    for _ in range(count):
      await pool.acquire({})
    each = (memory_of(root) - base) / count
  finally:
    await pool.close()
  return {'bytes': each, 'fit': int((IDLE_BYTES - base) / each), 'base': base}


def memory_of(pid: int) -> int:
  """Bytes of a process and its descendants: PSS and page tables."""
  total = 0
  try:
    with open(f'/proc/{pid}/smaps_rollup') as file:
      total += _kilobytes(file.read(), 'Pss:')
    with open(f'/proc/{pid}/status') as file:
      total += _kilobytes(file.read(), 'VmPTE:')
    for task in os.listdir(f'/proc/{pid}/task'):
      with open(f'/proc/{pid}/task/{task}/children') as file:
        total += sum(memory_of(int(x)) for x in file.read().split())
  except OSError:
    pass  # it ended meanwhile
  return total


def _kilobytes(text: str, name: str) -> int:
  for line in text.splitlines():
    if line.startswith(name):
      return int(line.split()[1]) * 1024
  return 0
