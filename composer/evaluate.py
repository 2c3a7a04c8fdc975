"""Evaluation: whole sessions on held-out tasks, at one version of the weights.

A set's solve rate is the mean over its tasks of the share of their sessions
that earn the full 'tests' part; its standard error is over tasks, since the
sessions of one task are not independent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import numpy as np

from composer import chat
from composer import config as config_lib
from composer import records
from composer.rewards import combine
from composer.rollout import schedule
from composer.rollout import session as session_lib

BEST_OF = 4


@dataclasses.dataclass(frozen=True)
class Result:
  """What an evaluation of one set found.

  Attributes:
    name: of the set.
    solve_rate, solve_rate_se: see the module's docstring.
    best_of_k: share of tasks of which one of the first `k` sessions solved it.
    k: sessions a task, at least.
    sessions, failed: finished, and lost to infrastructure.
    turns: mean turns a session.
    trajectories: all of them.
  """

  name: str
  solve_rate: float
  solve_rate_se: float
  best_of_k: float
  k: int
  sessions: int
  failed: int
  turns: float
  trajectories: tuple[records.Trajectory, ...]

  def scalars(self) -> dict[str, float]:
    """Under the names of the metrics file."""
    prefix = f'eval/{self.name}'
    return {
      f'{prefix}/solve_rate': self.solve_rate,
      f'{prefix}/solve_rate_se': self.solve_rate_se,
      f'{prefix}/best_of_k': self.best_of_k,
      f'{prefix}/turns': self.turns,
      f'{prefix}/sessions': float(self.sessions),
    }

  def row(self, who: str) -> dict[str, Any]:
    """A row of the table before/after."""
    return {
      'set': self.name,
      'who': who,
      'solve_rate': self.solve_rate,
      # One task alone has no error to show.
      'se': self.solve_rate_se if math.isfinite(self.solve_rate_se) else None,
      'sessions': self.sessions,
      'best_of_k': self.best_of_k,
      'k': self.k,
    }


def plan(
  tasks: Sequence[records.Task], sessions: int, seed: int
) -> list[tuple[records.Task, int]]:
  """(task, draw) of every session: `BEST_OF` a task, tasks spread evenly."""
  count = max(1, min(len(tasks), sessions // BEST_OF))
  order = np.random.default_rng([seed, 7]).permutation(len(tasks))[:count]
  return [(tasks[order[i % count]], i // count) for i in range(sessions)]


async def evaluate(
  name: str,
  sampler: records.Sampler,
  pool: Any,
  tasks: Sequence[records.Task],
  tokenizer: chat.Tokenizer,
  experiment: config_lib.Experiment,
  sessions: int,
  *,
  concurrent: int | None = None,
  on_session: Callable[[records.Trajectory], None] = lambda trajectory: None,
) -> Result:
  """Runs `sessions` sessions of a set; names and seeds do not depend on when.

  Args:
    name: of the set.
    sampler: an engine at one version, or a scripted agent.
    pool: machines.
    tasks: the set.
    tokenizer, experiment: as for `run_session`.
    sessions: how many.
    concurrent: how many at once; None is `engine.sequences`.
    on_session: called with each that is finished.
  """
  if not tasks:
    raise ValueError(f'the set {name!r} holds no tasks; see the tasks config')
  gate = asyncio.Semaphore(concurrent or experiment.engine.sequences)
  session = dataclasses.replace(
    experiment.session, temperature=experiment.eval.temperature
  )
  experiment = dataclasses.replace(experiment, session=session)

  async def one(task: records.Task, draw: int):
    # Draws of evaluation lie apart from those of training.
    drawn = schedule.redraw(task, 1_000_000 + draw)
    group_id = records.group_id(task.id, -1, draw)
    async with gate:
      try:
        trajectory = await session_lib.run_session(
          sampler,
          pool,
          drawn,
          tokenizer,
          experiment,
          group_id=group_id,
          index=draw,
          seed=schedule.session_seed(experiment.seed, 'eval', group_id),
          provenance={'cluster': 'eval'},
        )
      except session_lib.SessionFailed:
        return task.id, None
    on_session(trajectory)
    return task.id, trajectory

  planned = plan(tasks, sessions, experiment.tasks.seed)
  done = await asyncio.gather(*(one(task, draw) for task, draw in planned))
  return summarise(name, done)


def summarise(
  name: str, done: Sequence[tuple[str, records.Trajectory | None]]
) -> Result:
  """Statistics of finished sessions, given as (task id, trajectory or None)."""
  by_task: dict[str, list[float]] = {}
  kept = []
  for task_id, trajectory in done:
    if trajectory is not None:
      kept.append(trajectory)
      solved = float(combine.earned(trajectory.reward_parts) >= 1.0)
      by_task.setdefault(task_id, []).append(solved)
  means = [float(np.mean(values)) for values in by_task.values()]
  n = len(means)
  k = min((len(v) for v in by_task.values()), default=0)
  best = [max(values[:k]) for values in by_task.values()]
  error = float(np.std(means, ddof=1)) / math.sqrt(n) if n > 1 else float('nan')
  return Result(
    name=name,
    solve_rate=float(np.mean(means)) if n else float('nan'),
    solve_rate_se=error,
    best_of_k=float(np.mean(best)) if n else 0.0,
    k=k,
    sessions=len(kept),
    failed=len(done) - len(kept),
    turns=float(np.mean([_acts(t) for t in kept])) if kept else 0.0,
    trajectories=tuple(kept),
  )


def _acts(trajectory: records.Trajectory) -> int:
  return sum(t.kind in ('call', 'text', 'broken') for t in trajectory.turns)
