"""From draws to groups: admission, leases, sessions, commits.

A rollout process claims the next free draw below the admission limit, runs the
G sessions of its group side by side, and commits the group. Any number of
processes do the same over one exchange; the leases keep them apart. Draw i is
the same task with the same variable names in every process.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
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
from composer.rewards import combine
from composer.rollout import session as session_lib

POLL_S = 0.05
QUIET_S = 900.0  # idle for so long, without a word of the trainer, is the end
MOST_LOST = 3  # groups in a row whose every session infrastructure lost

REDRAW = {'repair': repair.redraw}  # task kind -> a draw of it


def redraw(task: records.Task, draw: int) -> records.Task:
  """The task as draw `draw` has it; most kinds are the same in each."""
  return REDRAW[task.kind](task, draw) if task.kind in REDRAW else task


@dataclasses.dataclass(frozen=True)
class Counts:
  """What this process counts of its own work.

  `failed_by` are the `failed_sessions` by the reason of `SessionFailed`.
  """

  produced: int = 0
  abandoned: int = 0
  sessions: int = 0
  failed_sessions: int = 0
  failed_by: Mapping[str, int] = dataclasses.field(default_factory=dict)
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
    check: Callable[[], None] = lambda: None,
    quiet_s: float = QUIET_S,
  ):
    """Nothing is claimed before `run`.

    Args:
      kv: the exchange.
      sampler: the engine.
      pool: machines.
      tasks: of the training set, the same in every process.
      tokenizer, experiment: as for `run_session`.
      incarnation: of this process, from `leases.new_incarnation`.
      version: of the engine's weights now.
      provenance: noted in every trajectory.
      abandoned: sessions that an earlier life of this process left.
      on_group: called with each committed group.
      check: raises if the sampler is beyond use; asked before what sessions
        failed in is committed as lost to infrastructure.
      quiet_s: limit of a wait for the trainer.
    """
    self._kv, self._sampler, self._pool = kv, sampler, pool
    self._tasks, self._tokenizer = tasks, tokenizer
    self._experiment = experiment
    self._cluster = experiment.fleet.cluster
    self._incarnation = incarnation
    self._version, self._check, self._quiet_s = version, check, quiet_s
    self._provenance = dict(provenance or {})
    self._on_group = on_group
    self._book = leases.LeaseBook(
      kv, self._cluster, incarnation, experiment.fleet.lease_s
    )
    self._running: dict[asyncio.Task, leases.LeaseHandle] = {}
    self._cursor = groups.Cursor()
    self._moved = time.monotonic()  # when the cursor or a group last did
    self._lost = 0  # groups in a row that infrastructure lost
    self._committing = asyncio.Lock()
    self.counts = Counts(abandoned=abandoned)

  async def run(self, stop: Callable[[], bool]) -> None:
    """Works until the trainer wants no more groups or `stop()` says so.

    Raises:
      TimeoutError: nothing to do, and no sign of the trainer, for `quiet_s`.
      RuntimeError: infrastructure loses whole groups, one after the other.
    """
    side = [
      asyncio.create_task(self._every(self._renew, self._lease_s / 4)),
      asyncio.create_task(
        self._every(self._beat, self._experiment.fleet.heartbeat_s)
      ),
    ]
    try:
      while not stop():
        self._follow(await asyncio.to_thread(groups.read_cursor, self._kv))
        if self._cursor.finished:
          break
        self._reap(side)
        await self._fill()
        await self._pause()
    finally:
      await _cancel([*self._running, *side])
      await self._beat()

  def _follow(self, cursor: groups.Cursor) -> None:
    now = time.monotonic()
    if cursor != self._cursor or self._running:
      self._cursor, self._moved = cursor, now
    elif now - self._moved > self._quiet_s:
      raise TimeoutError(
        f'all {cursor.consumed} consumed groups and as many as may be queued'
        ' are rolled, and the trainer has not taken one of them for'
        f' {self._quiet_s:.0f} s; is it running on this exchange?'
      )

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
    # Weights are published beside the trainer's next step and may come after
    # its cursor; what older ones would sample is stale before it begins.
    if self._version() < self._cursor.version - rl.staleness:
      return
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
    """One group: its sessions, then its commit; else the draw is free again."""
    try:
      task, _ = draw_of(self._tasks, self._experiment.tasks.seed, handle.draw)
      task = redraw(task, handle.draw)
      trajectories = await self._sessions(handle, task)
      await self._commit(handle, task, trajectories)
    except BaseException:
      with contextlib.suppress(OSError):  # then the lease runs out
        if await _to_end(leases.release, self._kv, handle):
          self._count(abandoned=self._experiment.rl.group_size)
      raise

  async def _sessions(
    self, handle: leases.LeaseHandle, task: records.Task
  ) -> tuple[records.Trajectory, ...]:
    """The group's sessions, side by side; without those that were lost."""
    seed = self._experiment.seed
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
    kept = [r for r in results if isinstance(r, records.Trajectory)]
    failed = [r for r in results if isinstance(r, BaseException)]
    for error in failed:
      if not isinstance(error, session_lib.SessionFailed):
        raise error
    if failed:
      self._check()
      self._count(failed_sessions=len(failed))
      self._count_reasons(error.reason for error in failed)
    self._lost = 0 if kept else self._lost + 1
    if self._lost >= MOST_LOST:
      raise RuntimeError(
        f'every session of {MOST_LOST} groups in a row was lost to'
        f' infrastructure, the last one so: {failed[-1]}'
      ) from failed[-1]
    return tuple(kept)

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
        await _to_end(groups.commit, self._kv, handle, group)
      except leases.LeaseLost:
        self._count(abandoned=len(trajectories))
        return
      except asyncio.CancelledError:
        self._count(produced=1)  # it was committed all the same
        raise
      self._count(produced=1)
    self._count(
      sessions=len(trajectories),
      sampled_tokens=sum(
        int(s.sampled.sum()) for t in trajectories for s in t.segments
      ),
      turns=sum(len(t.turns) for t in trajectories),
      solved=sum(
        int(combine.earned(t.reward_parts) >= 1) for t in trajectories
      ),
    )
    self._on_group(group)

  def _count(self, **more: int) -> None:
    self.counts = dataclasses.replace(
      self.counts, **{k: getattr(self.counts, k) + v for k, v in more.items()}
    )

  def _count_reasons(self, reasons: Iterable[str]) -> None:
    by = collections.Counter(self.counts.failed_by)
    by.update(reasons)
    self.counts = dataclasses.replace(self.counts, failed_by=dict(by))

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

  async def _beat(self) -> None:
    version = self._version()
    counters = dataclasses.asdict(self.counts)
    for reason, count in counters.pop('failed_by').items():
      counters[f'failed_sessions/{reason}'] = count
    heartbeat = groups.Heartbeat(
      cluster=self._cluster,
      incarnation=self._incarnation,
      version=version if version >= 0 else None,
      produced=self.counts.produced,
      abandoned=self.counts.abandoned,
      time=time.time(),
      counters=counters,
    )
    await asyncio.to_thread(
      groups.beat, self._kv, heartbeat, self._experiment.weights.form
    )


async def _to_end(act: Callable, *arguments: Any) -> Any:
  """`asyncio.to_thread` that a cancellation waits for, and then follows.

  A thread cannot be cancelled; what it does must not go on unseen.
  """
  running = asyncio.ensure_future(asyncio.to_thread(act, *arguments))
  try:
    return await asyncio.shield(running)
  except asyncio.CancelledError:
    await running  # raises what the act did, if it failed
    raise


async def _cancel(tasks: Sequence[asyncio.Task]) -> None:
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)
