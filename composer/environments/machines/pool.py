"""A pool of machines: bounded, warm, and not impressed by a death.

Machines are never used twice. A few stand ready; one is asked for by a message
of some microseconds, so a burst is served by forking, not by keeping. A machine
or a zygote that dies costs a retry on another.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Awaitable, Callable, Mapping, Sequence
import dataclasses
import pathlib
import random
import time
from typing import Any, TypeVar

from composer.config import MachineConfig
from composer.environments.machines import namespace
from composer.environments.machines import process
from composer.environments.machines import zygote as zygote_lib
from composer.environments.machines.machine import ExecResult
from composer.environments.machines.machine import Machine
from composer.environments.machines.machine import MachineError

DRIVERS = {'namespace': namespace, 'process': process}
ATTEMPTS = 5
BACKOFF_S = 0.02  # doubled after every failure
T = TypeVar('T')


@dataclasses.dataclass
class Counters:
  """Totals of a pool.

  Attributes:
    started: machines handed out.
    execs: commands that ran in them.
    failures: machines that failed to start or died.
    restarts: zygotes started after the first.
    seconds: wall time of starting and of commands, summed over machines.
  """

  started: int = 0
  execs: int = 0
  failures: int = 0
  restarts: int = 0
  seconds: float = 0.0


class Pool:
  """Owner of a zygote and of every machine that it hands out.

  Used from one event loop. `harness` (path -> text) are scripts of the host that
  a machine may call in its process 1, where no program of the model runs; by
  default the runner of the tasks.
  """

  def __init__(
    self,
    config: MachineConfig,
    harness: Mapping[str, str] | None = None,
    wait_s: float = 120.0,
  ):
    validate(config)
    self.config = config
    self.counters = Counters()
    self._harness = runner() if harness is None else dict(harness)
    self._wait_s = wait_s
    self._zygote: zygote_lib.Zygote | None = None
    self._provenance: dict[str, Any] = {}
    self._idle: collections.deque[Machine] = collections.deque()
    self._live: set[Machine] = set()
    self._free = asyncio.Semaphore(config.concurrent)
    self._starting = asyncio.Lock()
    self._closed = False

  async def open(self) -> None:
    """Starts the zygote now, so that what is missing is known at once."""
    await self._ready()

  async def acquire(self, files: Mapping[str, str | bytes]) -> Machine:
    """A machine of one's own with `files` in its workspace.

    Raises:
      MissingFacility: the driver cannot work here.
      MachineError: no machine became free in time, or several died.
      OSError: the files do not fit into the machine.
    """

    async def start() -> Machine:
      machine = await self._take()
      try:
        await machine.write_all(files, self.config.start_timeout_s)
      except BaseException:
        await self._drop(machine)
        raise
      return machine

    await self._wait_free()
    try:
      return await self._retry(start)
    except BaseException:
      self._free.release()
      raise

  async def release(self, machine: Machine) -> None:
    """Stops the machine and makes room for another."""
    if machine in self._live:
      await self._drop(machine)
      self._free.release()

  async def execute(
    self,
    files: Mapping[str, str | bytes],
    argv: Sequence[str],
    timeout_s: float | None = None,
    read: Sequence[str] = (),
  ) -> ExecResult:
    """Runs one command in a machine of its own, which then ends.

    Repeated on another machine if the machine dies. Errors as for `acquire`.
    """

    async def once() -> ExecResult:
      machine = await self._take()
      try:
        return await machine.run(argv, timeout_s, write=files, read=read)
      finally:
        await self._drop(machine)

    await self._wait_free()
    try:
      return await self._retry(once)
    finally:
      self._free.release()

  async def close(self) -> None:
    """Ends every machine; the pool is of no use afterwards."""
    self._closed = True
    for machine in [*self._live, *self._idle]:
      await self._drop(machine)
    self._idle.clear()
    zygote, self._zygote = self._zygote, None
    if zygote is not None:
      await asyncio.to_thread(zygote_lib.close, zygote)

  async def _wait_free(self) -> None:
    try:
      async with asyncio.timeout(self._wait_s):
        await self._free.acquire()
    except TimeoutError as error:
      raise MachineError(
        f'no machine became free within {self._wait_s} s, {len(self._live)} are'
        f' in use (machine.concurrent={self.config.concurrent}); raise it, or'
        ' look for sessions that hang'
      ) from error

  async def _retry(self, act: Callable[[], Awaitable[T]]) -> T:
    for attempt in range(ATTEMPTS):
      try:
        return await act()
      except MachineError as error:
        self.counters.failures += 1
        if self._closed or attempt == ATTEMPTS - 1:
          raise MachineError(
            f'{attempt + 1} machines failed, the last: {error}'
          ) from error
      await asyncio.sleep(BACKOFF_S * 2**attempt * random.uniform(0.5, 1.5))
    raise AssertionError('unreachable')

  async def _take(self) -> Machine:
    """A started machine of which nothing is known yet."""
    zygote = await self._ready()
    began = time.perf_counter()
    machine = self._idle.popleft() if self._idle else None
    while machine is None:
      machine = self._ask(zygote)
      if machine is None:
        if time.perf_counter() - began > self.config.start_timeout_s:
          raise MachineError('the zygote does not keep up with its requests')
        await asyncio.sleep(0.002)
    self._live.add(machine)
    self.counters.started += 1
    while len(self._idle) < self.config.warm:
      spare = self._ask(zygote)
      if spare is None:
        break
      self._idle.append(spare)
    self.counters.seconds += time.perf_counter() - began
    return machine

  def _ask(self, zygote: zygote_lib.Zygote) -> Machine | None:
    """A new machine, or None while the zygote is busy with earlier ones."""
    try:
      sock = zygote_lib.ask_machine(zygote)
    except BlockingIOError:
      return None
    return Machine(sock, self._provenance, self.config.exec_timeout_s)

  async def _drop(self, machine: Machine) -> None:
    self._live.discard(machine)
    self.counters.execs += machine.execs
    self.counters.seconds += machine.seconds
    await machine.stop()

  async def _ready(self) -> zygote_lib.Zygote:
    if self._closed:
      raise MachineError('the pool is closed')
    if self._zygote is not None and zygote_lib.alive(self._zygote):
      return self._zygote
    async with self._starting:
      if self._zygote is not None:
        if zygote_lib.alive(self._zygote):
          return self._zygote
        await self._bury(self._zygote)
      driver = DRIVERS[self.config.driver]
      self._zygote = await asyncio.to_thread(
        driver.launch, self.config, self._harness
      )
      self._provenance = driver.provenance(self.config, self._zygote.facts)
      return self._zygote

  async def _bury(self, zygote: zygote_lib.Zygote) -> None:
    """Machines of a dead zygote are dead; forget them and what it held."""
    self._zygote = None
    self.counters.restarts += 1
    while self._idle:
      await self._idle.popleft().stop()
    await asyncio.to_thread(zygote_lib.close, zygote)


def runner() -> dict[str, str]:
  """The script that checks a solution against cases, by its usual name."""
  folder = pathlib.Path(__file__).parents[1] / 'tasks'
  return {'runner.py': (folder / 'runner.py').read_text(encoding='utf-8')}


def validate(config: MachineConfig) -> None:
  """Raises ValueError on a field that cannot work."""
  if config.driver not in DRIVERS:
    raise ValueError(
      f'machine.driver={config.driver!r} is unknown; the known ones are'
      f' {", ".join(DRIVERS)}'
    )
  for name in (
    'start_timeout_s',
    'exec_timeout_s',
    'memory_mb',
    'processes',
    'disk_mb',
    'output_bytes',
    'concurrent',
  ):
    if getattr(config, name) <= 0:
      raise ValueError(
        f'machine.{name}={getattr(config, name)} must be positive'
      )
  if config.warm < 0:
    raise ValueError(f'machine.warm={config.warm} must not be negative')
  if config.memory_mb < 64:
    raise ValueError(
      f'machine.memory_mb={config.memory_mb} is less than an interpreter needs;'
      ' give at least 64'
    )


def probe(config: MachineConfig) -> dict[str, Any]:
  """Tries the driver for real and returns what would be in force.

  Raises:
    MissingFacility: what the system refuses, and the command without it.
  """
  validate(config)
  driver = DRIVERS[config.driver]
  zygote = driver.launch(config, {})
  zygote_lib.close(zygote)
  return driver.provenance(config, zygote.facts)


async def start(
  config: MachineConfig, files: Mapping[str, str | bytes]
) -> Machine:
  """One machine with a zygote of its own, which ends with it."""
  pool = Pool(dataclasses.replace(config, warm=0, concurrent=1))
  try:
    machine = await pool.acquire(files)
  except BaseException:
    await pool.close()
    raise
  machine._on_stop = pool.close
  return machine
