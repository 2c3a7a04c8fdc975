"""A simulated fleet: 100,000 machines requested at once, hosts dying meanwhile.

    composer bench fleet [--json FILE]

The scheduler is the pool's own (`environments/machines/scheduler.py`), driven by
a clock of events instead of real machines. What a host does is a model with
latencies measured on this one just before: starts one after another in as many
lanes as it has pairs of cores, each taking one of the measured times. All other
assumptions are printed with the result. "All run" is when the last request's
machine has started, whatever died on the way; every request must have run to its
end, and none twice at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import json
import pathlib
import random
import time
from typing import Any

from composer.config import MachineConfig
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import scheduler as scheduler_lib

SAMPLES = 200
SEED = 0


@dataclasses.dataclass(frozen=True)
class Fleet:
  """Assumptions.

  Attributes:
    requests: all at time 0.
    hosts: at the start.
    cores: of a host; two of them start machines one after another, in a lane.
    slots: machines that a host may have at once.
    dying: share of the hosts that die, at random times of the first `window_s`.
    window_s: seconds.
    detect_s: from a host's death until the scheduler is told.
    replace_s: from there until a new host takes its place.
    message_s: from the scheduler to a host, and back.
    session_s: mean of how long a request keeps its machine (exponential); 0:
      for ever.
  """

  requests: int = 100_000
  hosts: int = 690
  cores: int = 16
  slots: int = 160
  dying: float = 0.05
  window_s: float = 2.0
  detect_s: float = 5.0
  replace_s: float = 90.0
  message_s: float = 0.001
  session_s: float = 0.0


FLEETS = {
  'a slot for each, and a tenth more': Fleet(),
  'six times as many as slots': Fleet(
    hosts=100, session_s=60.0, window_s=300.0
  ),
}


def run(json_path: str | None = None) -> int:
  """Prints assumptions and results."""
  try:
    starts = asyncio.run(measure_starts())
  except MissingFacility as error:
    print(error)
    return 1
  ordered = sorted(starts)
  print(
    f'start of a namespace machine, measured here: p50'
    f' {ordered[len(ordered) // 2] * 1e3:.1f} ms, p99'
    f' {ordered[int(len(ordered) * 0.99)] * 1e3:.1f} ms'
  )
  found: dict[str, Any] = {'starts_s': ordered}
  for name, fleet in FLEETS.items():
    found[name] = simulate(fleet, starts)
    for line in lines_of(name, fleet, found[name]):
      print(line)
  if json_path:
    pathlib.Path(json_path).write_text(json.dumps(found, indent=1) + '\n')
  return 0


def lines_of(name: str, fleet: Fleet, found: dict[str, Any]) -> list[str]:
  kept = (
    f'for {fleet.session_s:.0f} s (mean)' if fleet.session_s else 'for ever'
  )
  return [
    f'{name}: {fleet.requests:,} requests, {fleet.hosts} hosts of'
    f' {fleet.cores} cores and {fleet.slots} slots, a machine is kept {kept}',
    f'  {fleet.dying:.0%} of the hosts die within {fleet.window_s:.0f} s; that is'
    f' noticed after {fleet.detect_s:.0f} s, replaced after'
    f' {fleet.replace_s:.0f} s; a message takes {fleet.message_s * 1e3:.0f} ms',
    f'  half run after {found["half_s"]:.2f} s, 99 % after'
    f' {found["p99_s"]:.2f} s, all after {found["all_s"]:.2f} s;'
    f' {found["killed"]} machines died with {found["hosts_dead"]} hosts and ran'
    f' again, {found["given_up"]} requests failed {scheduler_lib.ATTEMPTS} times',
    f'  the scheduler itself took {found["scheduler_us"]:.1f} us a machine',
  ]


async def measure_starts() -> list[float]:
  """Seconds of real starts, one at a time, none of them kept warm."""
  pool = Pool(MachineConfig(warm=0))
  times = []
  try:
    await pool.release(await pool.acquire({}))
    for _ in range(SAMPLES):
      began = time.perf_counter()
      machine = await pool.acquire({})
      times.append(time.perf_counter() - began)
      await pool.release(machine)
  finally:
    await pool.close()
  return times


class World:
  """State of a simulation: the clock, the events, and the hosts that work."""

  def __init__(self, fleet: Fleet, starts: list[float]):
    self.fleet = fleet
    self.starts = starts
    self.random = random.Random(SEED)
    self.scheduler = scheduler_lib.Scheduler(self.random.random)
    self.now = 0.0
    self.events: list[tuple[float, int, str, Any]] = []
    self.number = 0
    self.lanes: dict[str, list[float]] = {}  # when each is free
    self.dead: set[str] = set()
    self.first_run: dict[int, float] = {}
    self.attempt: dict[int, int] = {}
    self.ended: set[int] = set()
    self.killed = self.given_up = self.hosts_dead = 0
    self.busy_s = 0.0  # of the scheduler, for real

  def later(self, seconds: float, what: str, argument: Any) -> None:
    self.number += 1
    heapq.heappush(
      self.events, (self.now + seconds, self.number, what, argument)
    )

  def add_host(self, name: str) -> None:
    self.scheduler.add_host(name, self.fleet.slots)
    self.lanes[name] = [self.now] * max(1, self.fleet.cores // 2)

  def pump(self) -> None:
    """Starts what the scheduler grants; on a dead host nothing comes of it."""
    began = time.perf_counter()
    grants = []
    while grant := self.scheduler.next(self.now):
      grants.append(grant)
    self.busy_s += time.perf_counter() - began
    for grant in grants:
      self.attempt[grant.request] = self.attempt.get(grant.request, 0) + 1
      if grant.host in self.dead:
        continue
      lanes = self.lanes[grant.host]
      free = heapq.heappop(lanes)
      ready = max(free, self.now + self.fleet.message_s)
      ready += self.random.choice(self.starts)
      heapq.heappush(lanes, ready)
      wait = ready + self.fleet.message_s - self.now
      mark = (grant.request, grant.host, self.attempt[grant.request])
      self.later(wait, 'started', mark)
    wake_at = self.scheduler.wake_at()
    if wake_at is not None and not grants:
      self.later(max(0.0, wake_at - self.now), 'wake', None)


def simulate(fleet: Fleet, starts: list[float]) -> dict[str, Any]:
  """Runs a fleet until every request's machine has started (and ended)."""
  world = World(fleet, starts)
  for number in range(fleet.hosts):
    world.add_host(f'host{number}')
  for request in range(fleet.requests):
    world.scheduler.submit(request)
  doomed = world.random.sample(
    range(fleet.hosts), int(fleet.dying * fleet.hosts)
  )
  for number in doomed:
    world.later(
      world.random.uniform(0, fleet.window_s), 'dies', f'host{number}'
    )
  world.pump()
  while world.events:
    world.now, _, what, argument = heapq.heappop(world.events)
    HAPPENS[what](world, argument)
    if what != 'dies':
      world.pump()
  times = sorted(world.first_run.values())
  lost = fleet.requests - len(times) - world.given_up
  assert lost == 0, f'{lost} requests were lost'
  return {
    'half_s': times[len(times) // 2],
    'p99_s': times[int(len(times) * 0.99)],
    'all_s': max(times),
    'killed': world.killed,
    'hosts_dead': world.hosts_dead,
    'given_up': world.given_up,
    'scheduler_us': world.busy_s / fleet.requests * 1e6,
  }


def _started(world: World, mark: tuple[int, str, int]) -> None:
  request, host, attempt = mark
  if host in world.dead or world.scheduler.running.get(request) != host:
    return
  if attempt != world.attempt[request]:
    return
  world.first_run[request] = world.now
  if world.fleet.session_s:
    mean = world.fleet.session_s
    world.later(world.random.expovariate(1 / mean), 'ends', mark)


def _ends(world: World, mark: tuple[int, str, int]) -> None:
  request, host, attempt = mark
  if host in world.dead or attempt != world.attempt[request]:
    return
  assert request not in world.ended, f'request {request} ended twice'
  world.ended.add(request)
  world.scheduler.done(request)


def _dies(world: World, host: str) -> None:
  world.dead.add(host)
  world.hosts_dead += 1
  world.later(world.fleet.detect_s, 'noticed', host)


def _noticed(world: World, host: str) -> None:
  for request in world.scheduler.remove_host(host):
    if request in world.first_run and not world.fleet.session_s:
      del world.first_run[request]  # it does not run any more
    world.killed += 1
    if not world.scheduler.failed(request, world.now):
      world.given_up += 1
  world.later(world.fleet.replace_s, 'replaced', f'{host}+')


def _replaced(world: World, host: str) -> None:
  world.add_host(host)


def _wake(world: World, _: None) -> None:
  del world


HAPPENS = {
  'started': _started,
  'ends': _ends,
  'dies': _dies,
  'noticed': _noticed,
  'replaced': _replaced,
  'wake': _wake,
}
