"""What a run tells its user: live figures, scalars, saved sessions, the table."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import pathlib
import threading
import time
from typing import Any

import jax
import numpy as np

from composer import config as config_lib
from composer import console
from composer import evaluate
from composer import metrics
from composer import records
from composer import report
from composer.bench import mismatch
from composer.environments.tasks import repair
from composer.fleet import evaluator
from composer.fleet import trainer as trainer_lib
from composer.model import tokenizer as tokenizer_lib
from composer.rl import audit as audit_lib
from composer.rl import buffer

MIDTRAIN = 'mid-training'
RL = 'reinforcement'
SAVED = 32  # sessions kept of an audited step
MEASURED = 256  # prompts continued in either mode


@dataclasses.dataclass
class Board:
  """Collects what the roles of one process report; thread-safe."""

  experiment: config_lib.Experiment
  workdir: pathlib.Path
  progress: console.Progress
  writer: metrics.Writer | None
  lanes: metrics.Lanes
  rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  cost: dict[str, Any] = dataclasses.field(default_factory=dict)
  mismatch: dict[str, Any] = dataclasses.field(default_factory=dict)
  started: float = dataclasses.field(default_factory=time.monotonic)
  lock: Any = dataclasses.field(default_factory=threading.Lock)
  pause_s: float = 0.0
  done: int = 0
  evaluated_sessions: int = 0
  last_rows: int = 0
  last_time: float = dataclasses.field(default_factory=time.monotonic)

  # --- from the stages -------------------------------------------------------

  def midtrained(self, step: int, scalars: dict[str, float]) -> None:
    self.progress.update(
      MIDTRAIN,
      step,
      loss=scalars.get('midtrain/loss'),
      tokens_per_s=scalars.get('midtrain/tokens_per_s'),
    )
    self.write(step, scalars)

  def group_finished(self, group: records.Group) -> None:
    """A finished group: the first reward shows as soon as there is one."""
    rewards = [t.reward for t in group.trajectories]
    if rewards:
      self.progress.update(RL, self.done, reward=float(np.mean(rewards)))

  def session_evaluated(self, trajectory: records.Trajectory) -> None:
    self.evaluated_sessions += 1

  def version_active(self, version: int, pause: float) -> None:
    self.pause_s = pause
    metrics.record_version(self.workdir, version, pause_s=pause)

  def stepped(self, trainer, selection, done, rollout) -> None:
    """After every step of the trainer."""
    if jax.process_index():
      return
    scalars = dict(done.scalars)
    scalars.update(trainer_lib.counters(trainer, selection))
    scalars['version'] = float(trainer.version)
    if rollout is not None:
      rollout.check()
      scalars.update(self._rollout_scalars(rollout))
    step = int(trainer.state.step)
    self.write(step, scalars)
    self.done = trainer.done
    self._show(trainer, scalars)
    if done.trajectories:
      self.save_sessions(
        f'step-{step:06d}',
        done.trajectories[:SAVED],
        done.extra[:SAVED],
        step=step,
      )

  def _rollout_scalars(self, rollout) -> dict[str, float]:
    now, stats = time.monotonic(), rollout.engine.stats
    seconds = max(now - self.last_time, 1e-9)
    rate = (stats.rows - self.last_rows) / seconds
    busy = self.lanes.busy()
    engine_busy = (stats.busy_s - self.cost.get('_engine', 0.0)) / seconds
    self.cost['_engine'] = stats.busy_s
    self.last_time, self.last_rows = now, stats.rows
    return {
      'busy/trainer': busy.get('trainer', 0.0),
      'busy/rollout': min(engine_busy, 1.0),
      'weights/pause_s': self.pause_s,
      'rollout/tokens_per_s': rate,
      'rollout/reused_tokens': float(stats.reused),
      'rollout/sampled_tokens': float(stats.sampled),
    }

  def _show(self, trainer, scalars) -> None:
    self.progress.update(
      RL,
      trainer.done,
      reward=scalars.get('reward/mean'),
      solve_rate=scalars.get('reward/tests'),
      entropy=scalars.get('train/entropy'),
      mismatch=scalars.get('mismatch/kl'),
      staleness=scalars.get('staleness/mean'),
      staleness_max=scalars.get('staleness/max'),
      tokens_per_s=scalars.get('trainer/tokens_per_s'),
      version=trainer.version,
      busy_trainer=scalars.get('busy/trainer'),
      busy_rollout=scalars.get('busy/rollout'),
    )

  def evaluated(
    self, who: str, results: Sequence[evaluate.Result], step: int
  ) -> None:
    """An evaluation ended; with `who` it becomes a row of the table."""
    for result in results:
      self.write(step, result.scalars())
      self.progress.log(
        f'{result.name}: {result.solve_rate:.3f} ± {result.solve_rate_se:.3f}'
        f' solved, best of {result.k} {result.best_of_k:.3f}'
        f' ({result.sessions} sessions{", " + who if who else ""})'
      )
      if who:
        self.rows.append(result.row(who))

  def write(self, step: int, scalars: dict[str, float]) -> None:
    if self.writer is not None:
      self.writer.write(step, scalars)

  def save_sessions(self, name, trajectories, extra, step, split=None) -> None:
    tokenizer = tokenizer_lib.load(self.experiment.tokenizer)
    tasks = repair.build_tasks(self.experiment.tasks)
    metrics.save_trajectories(
      self.workdir,
      name,
      trajectories,
      extra,
      token_text=lambda ids: [tokenizer.decode([i]) for i in ids],
      tasks=_by_id(tasks),
      step=step,
      split=split,
    )

  # --- the end ---------------------------------------------------------------

  def conclude(self, trainer) -> None:
    """Checks the books, writes the summary and the report, shows the table."""
    queued = [c.group_id for c in trainer_lib.queue(trainer)]
    produced = trainer_lib.groups.produced(trainer.kv, trainer.cache)
    problem = buffer.check_conservation(produced, trainer.ledger, queued)
    if problem:
      self.progress.log(f'the books do not agree: {problem}')
    self.cost.pop('_engine', None)
    self.cost['seconds'] = time.monotonic() - self.started
    metrics.write_summary(
      self.workdir,
      {
        'rows': self.rows,
        'notes': notes(problem),
        'mismatch': self.mismatch,
        'cost': self.cost,
      },
    )
    if self.writer is not None:
      self.writer.close()
    self.lanes.flush()
    path = report.write(self.workdir)
    self.progress.table(self.rows, report=path)


def _by_id(tasks: repair.TaskSet) -> dict[str, records.Task]:
  parts = (tasks.train, tasks.held_out_bugs, tasks.held_out_functions)
  return {task.id: task for part in parts for task in part}


def notes(problem: str | None) -> list[str]:
  return [
    'The books agree: produced = trained + dropped by reason + queued.'
    if problem is None
    else f'The books do not agree: {problem}',
    'At this learning rate more than half of all bf16 weights move in a step,'
    ' so deltas are large here; at the rates of large-scale RL about one in a'
    ' hundred moves.',
  ]


def after(board: Board, trainer) -> None:
  """The held-out sets after RL, what needs no learning, and the mismatch."""
  experiment, step = board.experiment, int(trainer.state.step)
  params = trainer.published[trainer.version]
  with board.lanes.span('eval', 'after'):
    results = evaluator.evaluate_params(
      experiment, params, trainer.version, experiment.eval.sessions
    )
  board.evaluated('after RL', results, step)
  for result in results:
    kept = result.trajectories[:SAVED]
    segments = [s for t in kept for s in t.segments]
    audited = audit_lib.audit(
      trainer.step,
      segments,
      {trainer.version: params},
      experiment.rl,
      experiment.model,
      experiment.numerics.kv_block,
    )
    extra = trainer_lib.extras(list(kept), audited)
    board.save_sessions(
      f'eval-{result.name}', kept, extra, step=step, split=result.name
    )
  if experiment.eval.baselines:
    scripted = evaluator.evaluate_scripted(experiment, experiment.eval.sessions)
    for who, found in scripted.items():
      board.evaluated(who, found, step)
  contexts = [
    t.segments[0].tokens[: t.turns[0].end]
    for r in results
    for t in r.trajectories
  ]
  found = mismatch.measure(experiment, params, contexts[:MEASURED])
  board.mismatch.update(mismatch.as_summary(found))
  board.cost.update(mismatch.as_cost(found))
