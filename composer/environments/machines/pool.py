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
import itertools
import json
import os
import pathlib
import random
import time
from typing import Any, TypeVar

from composer.config import MachineConfig
from composer.environments.machines import microvm
from composer.environments.machines import namespace
from composer.environments.machines import pressure
from composer.environments.machines import process
from composer.environments.machines import scheduler as scheduler_lib
from composer.environments.machines import zygote as zygote_lib
from composer.environments.machines.machine import ExecResult
from composer.environments.machines.machine import Handle
from composer.environments.machines.machine import Machine
from composer.environments.machines.machine import MachineError
from composer.environments.machines.machine import Snapshot

DRIVERS = {'namespace': namespace, 'microvm': microvm, 'process': process}
ACCELERATORS = ('auto', 'kvm', 'tcg')
HERE = 'here'  # the one host of a pool
LOOK_S = 0.25  # between two looks at the pressure
SAVE_S = 120.0
TAKE_S = 10.0
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
    self._start_s = config.start_timeout_s
    if config.driver == 'microvm':
      self._start_s = max(config.start_timeout_s, microvm.START_S)
    self._zygote: zygote_lib.Zygote | None = None
    self._provenance: dict[str, Any] = {}
    self._idle: collections.deque[Machine] = collections.deque()
    self._live: dict[Machine, int] = {}  # the request that it serves
    self._starting = asyncio.Lock()
    self._closed = False
    self._requests = itertools.count(1)
    self._scheduler = scheduler_lib.Scheduler(random.random)
    self._scheduler.add_host(HERE, config.concurrent)
    self._turns: dict[int, asyncio.Future[None]] = {}
    self._timer: asyncio.TimerHandle | None = None
    self._looked = float('-inf')  # when the pressure was looked at last
    self._bearable = True

  async def open(self) -> None:
    """Starts the zygote now, so that what is missing is known at once."""
    await self._ready()

  async def acquire(
    self,
    files: Mapping[str, str | bytes],
    snapshot: Snapshot | None = None,
  ) -> Machine:
    """A machine of one's own with `files` in its workspace.

    Args:
      files: path -> contents.
      snapshot: of a machine of this driver, to go on from; None: a clean one.

    Raises:
      MissingFacility: the driver cannot work here.
      MachineError: no machine became free in time, or several died.
      OSError: the files do not fit into the machine.
    """

    if snapshot is not None and snapshot.driver != self.config.driver:
      raise ValueError(
        f'a snapshot of driver {snapshot.driver!r} cannot be forked by'
        f' machine.driver={self.config.driver!r}'
      )

    async def start(request: int) -> Machine:
      machine = await self._take(request, snapshot)
      try:
        if snapshot is not None:
          await machine.restore(snapshot)
        await machine.write_all(files, self._start_s)
      except BaseException:
        await self._drop(machine)
        raise
      return machine

    return await self._serve(start, next(self._requests))

  async def fork(self, machine: Machine) -> Machine:
    """A second machine that is what `machine` is now; errors as for `acquire`."""
    snapshot = await machine.snapshot()
    try:
      return await self.acquire({}, snapshot)
    finally:
      snapshot.discard()

  async def release(self, machine: Machine) -> None:
    """Stops the machine and makes room for another."""
    request = self._live.get(machine)
    if request is not None:
      try:
        await self._drop(machine)
      finally:
        self._end(request)

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

    async def once(request: int) -> ExecResult:
      machine = await self._take(request)
      try:
        return await machine.run(argv, timeout_s, write=files, read=read)
      finally:
        await self._drop(machine)

    request = next(self._requests)
    result = await self._serve(once, request)
    self._end(request)
    return result

  def pressure(self) -> dict[str, float]:
    """What the pool and its host are under now.

    Requests `waiting` (of them `held_back` after a failure) and `running`,
    machines `idle`; `memory_mb` that is available, and percent of the last 10 s
    in which something waited for `cpu` or `memory` (0 where it is not known).
    """
    return {
      **self._scheduler.counts(),
      'idle': len(self._idle),
      'memory_mb': pressure.available_mb(),
      'cpu': pressure.stalled('cpu'),
      'memory': pressure.stalled('memory'),
    }

  async def close(self) -> None:
    """Ends every machine; the pool is of no use afterwards."""
    self._closed = True
    if self._timer is not None:
      self._timer.cancel()
    for turn in self._turns.values():
      if not turn.done():
        turn.set_exception(MachineError('the pool is closed'))
    for machine in [*self._live, *self._idle]:
      await self._drop(machine)
    self._idle.clear()
    zygote, self._zygote = self._zygote, None
    if zygote is not None:
      await asyncio.to_thread(zygote_lib.close, zygote)

  async def _serve(self, act: Callable[[int], Awaitable[T]], request: int) -> T:
    """`act` in its turn; the request keeps its place until `_end`.

    Repeated on another machine if one dies, and then waits for its turn again.
    """
    self._scheduler.submit(request)
    failures = 0
    while True:
      await self._turn(request)
      try:
        return await act(request)
      except MachineError as error:
        failures += 1
        self.counters.failures += 1
        again = self._scheduler.failed(request, time.monotonic())
        if self._closed or not again:
          if again:
            self._scheduler.withdraw(request)
          self._pump()
          raise MachineError(
            f'{failures} machines failed, the last: {error}'
          ) from error
      except BaseException:
        self._end(request)
        raise

  def _end(self, request: int) -> None:
    self._scheduler.done(request)
    self._pump()

  async def _turn(self, request: int) -> None:
    """Waits until the request may have a machine."""
    turn = asyncio.get_running_loop().create_future()
    self._turns[request] = turn
    self._pump()
    try:
      async with asyncio.timeout(self._wait_s):
        await turn
    except BaseException as error:
      if self._turns.pop(request, None) is not None:
        self._scheduler.withdraw(request)
      else:  # it came too late
        self._end(request)
      if not isinstance(error, TimeoutError):
        raise
      raise MachineError(
        f'no machine became free within {self._wait_s} s, {len(self._live)} are'
        f' in use (machine.concurrent={self.config.concurrent}) and'
        f' {pressure.available_mb():.0f} MB of memory are free; raise it, or'
        ' look for sessions that hang'
      ) from error

  def _pump(self) -> None:
    """Gives turns while there is room; comes back when there may be more."""
    now = time.monotonic()
    if now - self._looked > LOOK_S:
      self._looked = now
      self._bearable = pressure.bearable(self.config.memory_mb)
    while True:
      alone = not self._scheduler.running  # one always may
      self._scheduler.set_open(HERE, alone or self._bearable)
      grant = self._scheduler.next(now)
      if grant is None:
        break
      turn = self._turns.pop(grant.request)
      if not turn.done():  # else cancelled, and ended where it is awaited
        turn.set_result(None)
    if self._turns and self._timer is None:
      wait = LOOK_S
      wake_at = self._scheduler.wake_at()
      if wake_at is not None:
        wait = min(wait, max(0.0, wake_at - now))
      loop = asyncio.get_running_loop()
      self._timer = loop.call_later(wait, self._pump_again)

  def _pump_again(self) -> None:
    self._timer = None
    self._pump()

  async def _take(
    self, request: int, snapshot: Snapshot | None = None
  ) -> Machine:
    """A started machine of which nothing is known yet."""
    zygote = await self._ready()
    began = time.perf_counter()
    folder = snapshot.folder if snapshot else ''
    machine = None
    if self._idle and not folder:
      machine = self._idle.popleft()
    while machine is None:
      machine = self._ask(zygote, folder)
      if machine is None:
        if time.perf_counter() - began > self.config.start_timeout_s:
          raise MachineError('the zygote does not keep up with its requests')
        await asyncio.sleep(0.002)
    self._live[machine] = request
    self.counters.started += 1
    while len(self._idle) < self.config.warm:
      spare = self._ask(zygote)
      if spare is None:
        break
      self._idle.append(spare)
    self.counters.seconds += time.perf_counter() - began
    return machine

  def _ask(self, zygote: zygote_lib.Zygote, saved: str = '') -> Machine | None:
    """A new machine, or None while the zygote is busy with earlier ones."""
    try:
      request = zygote_lib.ask_machine(zygote, saved)
    except BlockingIOError:
      return None
    handle = _handle(zygote, request.number) if zygote.virtual else None
    return Machine(
      request.sock,
      self._provenance,
      self.config.exec_timeout_s,
      handle=handle,
    )

  async def _drop(self, machine: Machine) -> None:
    self._live.pop(machine, None)
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
      try:
        self._zygote = await asyncio.to_thread(
          driver.launch, self.config, self._harness
        )
      except OSError as error:  # this host's, not that of a machine's files
        raise MachineError(f'no zygote could be started: {error}') from error
      self._provenance = driver.provenance(self.config, self._zygote.facts)
      return self._zygote

  async def _bury(self, zygote: zygote_lib.Zygote) -> None:
    """Machines of a dead zygote are dead; forget them and what it held."""
    self._zygote = None
    self.counters.restarts += 1
    while self._idle:
      await self._idle.popleft().stop()
    await asyncio.to_thread(zygote_lib.close, zygote)


def _handle(zygote: zygote_lib.Zygote, number: int) -> Handle:
  """A virtual machine's, by its number at the hypervisor."""

  async def stop() -> None:
    await _until_taken(lambda: zygote_lib.ask_stop(zygote, number))

  async def save() -> str:
    folder = os.path.join(zygote.scratch, f'saved{next(zygote.numbers)}')
    sock = await _until_taken(
      lambda: zygote_lib.ask_save(zygote, number, folder)
    )
    with sock:
      try:
        async with asyncio.timeout(SAVE_S):
          data = await asyncio.get_running_loop().sock_recv(sock, 65536)
      except TimeoutError as error:
        raise MachineError(f'no snapshot within {SAVE_S} s') from error
    answer = json.loads(data) if data else {'error': 'the machine is gone'}
    if 'error' in answer:
      raise MachineError(f'no snapshot of a machine: {answer["error"]}')
    return folder

  return Handle(stop, save)


async def _until_taken(ask: Callable[[], T]) -> T:
  deadline = time.monotonic() + TAKE_S
  while True:
    try:
      return ask()
    except BlockingIOError:
      if time.monotonic() > deadline:
        raise MachineError('the zygote does not take requests') from None
      await asyncio.sleep(0.002)


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
    'exec_cpu_s',
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
  if config.accelerator not in ACCELERATORS:
    raise ValueError(
      f'machine.accelerator={config.accelerator!r} is unknown; the known ones are'
      f' {", ".join(ACCELERATORS)}'
    )
  if config.hypervisor not in microvm.HYPERVISORS:
    raise ValueError(
      f'machine.hypervisor={config.hypervisor!r} is unknown; the known ones are'
      f' {", ".join(microvm.HYPERVISORS)}'
    )
  if config.driver == 'process' and config.image:
    raise ValueError(
      f'machine.driver=process has no image, and machine.image={config.image!r};'
      ' use namespace or microvm'
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
