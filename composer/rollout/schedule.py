"""From draws to groups: admission, leases, sessions, commits.

A rollout process claims the next free draw below the admission limit, runs the
G sessions of its group side by side, and commits the group. Any number of
processes do the same over one exchange; the leases keep them apart. Draw i is
the same task with the same variable names in every process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import hashlib
import time
from typing import Any

import numpy as np
import tensorstore as ts

from composer import chat
from composer import config as config_lib
from composer import groups
from composer import leases
from composer import records
from composer.environments.tasks import repair
from composer.rollout import session as session_lib

POLL_S = 0.05
LOST = 'infrastructure'

REDRAW = {'repair': repair.redraw}  # task kind -> a draw of it


@dataclasses.dataclass(frozen=True)
class Counts:
  """What this process counts of its own work."""

  produced: int = 0
  abandoned: int = 0
  sessions: int = 0
  failed_sessions: int = 0
  sampled_tokens: int = 0
  turns: int = 0
  solved: int = 0


def draw_of(
  tasks: Sequence[records.Task], seed: int, draw: int
) -> tuple[records.Task, int]:
  """Task and epoch of a draw; each epoch is its own permutation of the tasks."""
  epoch, position = divmod(draw, len(tasks))
  order = np.random.default_rng([seed, epoch]).permutation(len(tasks))
  return tasks[order[position]], epoch


def group_of(tasks: Sequence[records.Task], seed: int, draw: int) -> str:
  """Group id of a draw."""
  task, epoch = draw_of(tasks, seed, draw)
  return records.group_id(task.id, epoch, draw)


def session_seed(seed: int, *names: Any) -> int:
  """A 32-bit seed of a session, from what it is."""
  text = '/'.join(map(str, (seed, *names)))
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())


class Scheduler:
  """Owner of the draws that one rollout process works on."""

  def __init__(
    self,
    kv: ts.KvStore,
    sampler: records.Sampler,
    pool: Any,
    tasks: Sequence[records.Task],
    tokenizer: chat.Tokenizer,
    experiment: config_lib.Experiment,
    incarnation: str,
    *,
    version: Callable[[], int],
    provenance: Mapping[str, Any] | None = None,
    abandoned: int = 0,
    on_group: Callable[[records.Group], None] = lambda group: None,
    gauges: Callable[[], Mapping[str, float]] = dict,
  ):
    self._kv, self._sampler, self._pool = kv, sampler, pool
    self._tasks, self._tokenizer = tasks, tokenizer
    self._experiment = experiment
    self._cluster = experiment.fleet.cluster
    self._incarnation = incarnation
    self._version, self._gauges = version, gauges
    self._provenance = dict(provenance or {})
    self._on_group = on_group
    self._book = leases.LeaseBook(
      kv, self._cluster, incarnation, experiment.fleet.lease_s
    )
    self._running: dict[asyncio.Task, leases.LeaseHandle] = {}
    self._cursor = groups.Cursor()
    self._committing = asyncio.Lock()
    self.counts = Counts(abandoned=abandoned)

  async def run(self, stop: Callable[[], bool]) -> None:
    """Works until the trainer wants no more groups or `stop()` says so."""
    side = [
      asyncio.create_task(self._every(self._renew, self._lease_s / 4)),
      asyncio.create_task(
        self._every(self._beat, self._experiment.fleet.heartbeat_s)
      ),
    ]
    try:
      while not stop():
        self._cursor = await asyncio.to_thread(groups.read_cursor, self._kv)
        if self._cursor.finished:
          break
        self._reap(side)
        await self._fill()
        await self._pause()
    finally:
      await _cancel([*self._running, *side])
      await self._give_up()
      await self._beat()

  @property
  def _lease_s(self) -> float:
    return self._experiment.fleet.lease_s

  async def _pause(self) -> None:
    if self._running:
      await asyncio.wait(
        self._running, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED
      )
    else:
      await asyncio.sleep(POLL_S)

  def _reap(self, side: Sequence[asyncio.Task]) -> None:
    """Forgets finished groups; what went wrong in ours is raised."""
    for task in side:
      if task.done():
        task.result()
    for task in [t for t in self._running if t.done()]:
      del self._running[task]
      task.result()

  async def _fill(self) -> None:
    """Claims draws while sessions may be added."""
    rl = self._experiment.rl
    limit = leases.admission_limit(
      self._cursor.consumed, rl.staleness, rl.groups_per_step
    )
    # One group more than the engine holds, so that it never runs dry.
    most = 1 + -(-self._experiment.engine.sequences // rl.group_size)
    while len(self._running) < most:
      handle = await asyncio.to_thread(self._book.claim, limit, self._group_of)
      if handle is None:
        return
      if handle.taken_over:
        self._count(abandoned=rl.group_size)
      task = asyncio.create_task(self._roll(handle))
      self._running[task] = handle

  def _group_of(self, draw: int) -> str:
    return group_of(self._tasks, self._experiment.tasks.seed, draw)

  async def _roll(self, handle: leases.LeaseHandle) -> None:
    """One group: its sessions, then its commit."""
    seed, draw = self._experiment.seed, handle.draw
    task, _ = draw_of(self._tasks, self._experiment.tasks.seed, draw)
    task = REDRAW[task.kind](task, draw)
    sessions = [
      asyncio.create_task(
        session_lib.run_session(
          self._sampler,
          self._pool,
          task,
          self._tokenizer,
          self._experiment,
          group_id=handle.group_id,
          index=index,
          seed=session_seed(seed, handle.group_id, index),
          provenance={
            'cluster': self._cluster,
            'incarnation': self._incarnation,
            **self._provenance,
          },
        )
      )
      for index in range(self._experiment.rl.group_size)
    ]
    try:
      results = await asyncio.gather(*sessions, return_exceptions=True)
    except asyncio.CancelledError:
      await _cancel(sessions)
      raise
    trajectories = []
    for result in results:
      if isinstance(result, session_lib.SessionFailed):
        self._count(failed_sessions=1)
      elif isinstance(result, BaseException):
        raise result
      else:
        trajectories.append(result)
    await self._commit(handle, task, tuple(trajectories))

  async def _commit(self, handle, task, trajectories) -> None:
    # One commit at a time: a group's index is the count of those before it.
    async with self._committing:
      group = records.Group(
        group_id=handle.group_id,
        task_id=task.id,
        draw=handle.draw,
        trajectories=trajectories,
        cluster=self._cluster,
        incarnation=self._incarnation,
        produced_index=self.counts.produced + 1,
      )
      try:
        await asyncio.to_thread(groups.commit, self._kv, handle, group)
      except leases.LeaseLost:
        self._count(abandoned=len(trajectories))
        return
      self._count(produced=1)
    self._count(
      sessions=len(trajectories),
      sampled_tokens=sum(
        int(s.sampled.sum()) for t in trajectories for s in t.segments
      ),
      turns=sum(len(t.turns) for t in trajectories),
      solved=sum(int(t.reward_parts['tests'] >= 1) for t in trajectories),
    )
    self._on_group(group)

  def _count(self, **more: int) -> None:
    self.counts = dataclasses.replace(
      self.counts, **{k: getattr(self.counts, k) + v for k, v in more.items()}
    )

  async def _every(self, act: Callable, seconds: float) -> None:
    while True:
      await act()
      await asyncio.sleep(seconds)

  async def _renew(self) -> None:
    for handle in list(self._running.values()):
      try:
        await asyncio.to_thread(
          leases.renew, self._kv, handle, self._lease_s, time.time()
        )
      except leases.LeaseLost:
        pass  # its commit will be refused and counted

  async def _give_up(self) -> None:
    """Frees the draws of groups that will not be finished here."""
    for task, handle in self._running.items():
      if task.cancelled():
        await asyncio.to_thread(leases.release, self._kv, handle)
    self._running.clear()

  async def _beat(self) -> None:
    version = self._version()
    heartbeat = groups.Heartbeat(
      cluster=self._cluster,
      incarnation=self._incarnation,
      version=version if version >= 0 else None,
      produced=self.counts.produced,
      abandoned=self.counts.abandoned,
      time=time.time(),
      counters={**dataclasses.asdict(self.counts), **self._gauges()},
    )
    await asyncio.to_thread(
      groups.beat, self._kv, heartbeat, self._experiment.weights.form
    )


async def _cancel(tasks: Sequence[asyncio.Task]) -> None:
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)
