"""What a run tells its user: live figures, scalars, saved sessions, the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from composer import params as params_lib
from composer import records
from composer import report
from composer.bench import mismatch
from composer.environments.tasks import sets as task_sets
from composer.fleet import evaluator
from composer.fleet import trainer as trainer_lib
from composer.fleet import workdir as workdir_lib
from composer.inference import engine as engine_lib
from composer.model import tokenizer as tokenizer_lib
from composer.model import transformer
from composer.rl import audit as audit_lib

MIDTRAIN = 'mid-training'
RL = 'reinforcement'
BEFORE, AFTER = 'after mid-training', 'after RL'  # rows of the table
SAVED = 32  # sessions kept of an audited step
MEASURED = 256  # prompts continued in either mode


@dataclasses.dataclass
class Board:
  """Collects what the roles of one process report; thread-safe.

  What evaluations found is kept in the run's directory as it comes, so that a
  resumed run has it.
  """

  experiment: config_lib.Experiment
  workdir: pathlib.Path
  progress: console.Progress
  writer: metrics.Writer | None  # None: not the first process
  lanes: metrics.Lanes
  rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  cost: dict[str, Any] = dataclasses.field(default_factory=dict)
  mismatch: dict[str, Any] = dataclasses.field(default_factory=dict)
  written: set[tuple[int, str]] = dataclasses.field(default_factory=set)
  started: float = dataclasses.field(default_factory=time.monotonic)
  lock: Any = dataclasses.field(default_factory=threading.Lock)
  pause_s: float | None = None  # of the newest swap; None: there was none yet
  done: int = 0
  last: engine_lib.Stats = engine_lib.Stats()  # of the step before
  last_time: float = dataclasses.field(default_factory=time.monotonic)

  def __post_init__(self):
    earlier = workdir_lib.read_results(self.workdir)
    self.rows += earlier.get('rows', [])
    self.cost.update(earlier.get('cost', {}))
    self.mismatch.update(earlier.get('mismatch', {}))
    self.started -= self.cost.get('seconds', 0.0)
    for line in metrics.read(self.workdir):
      self.written.update((line['step'], name) for name in line)

  def has(self, who: str) -> bool:
    """Whether a row of the table is there, from an earlier life even."""
    return any(row['who'] == who for row in self.rows)

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
      longest = max(t.timings['total'] for t in group.trajectories)
      self.lanes.finished('rollout', longest, group.task_id)
      self.progress.update(RL, self.done, reward=float(np.mean(rewards)))

  def version_active(self, version: int, pause: float) -> None:
    self.pause_s = pause
    metrics.record_version(self.workdir, version, pause_s=pause)

  def stepped(self, trainer, done, rollout) -> None:
    """After every step of the trainer; `rollout` is None in its own process."""
    scalars = dict(done.scalars)
    scalars.update(trainer_lib.counters(trainer))
    scalars['version'] = float(trainer.version)
    scalars['busy/trainer'] = self.lanes.busy().get('trainer', 0.0)
    if rollout is not None:
      scalars.update(self._rollout_scalars(rollout))
    self.write(trainer.at, scalars)
    self.done = trainer.done
    self._show(trainer, scalars)
    if done.trajectories:
      self.save_sessions(
        f'step-{trainer.at:06d}',
        done.trajectories[:SAVED],
        done.extra[:SAVED],
        step=trainer.at,
      )

  def _rollout_scalars(self, rollout) -> dict[str, float]:
    now, stats = time.monotonic(), rollout.engine.stats
    seconds = max(now - self.last_time, 1e-9)
    rate = (stats.rows - self.last.rows) / seconds
    busy = (stats.busy_s - self.last.busy_s) / seconds
    some, proposed = {}, stats.proposed - self.last.proposed
    if proposed:
      accepted = stats.accepted - self.last.accepted
      some['rollout/drafts_accepted'] = accepted / proposed
    # A run that is resumed may step on queued groups before its engine has any.
    if self.pause_s is not None:
      some['weights/pause_s'] = self.pause_s
    self.last_time, self.last = now, stats
    return {
      'busy/rollout': min(busy, 1.0),
      'rollout/tokens_per_s': rate,
      'rollout/reused_tokens': float(stats.reused),
      'rollout/sampled_tokens': float(stats.sampled),
      'rollout/compiled': float(stats.compilations),  # while it served
      **some,
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
    self, who: str, results: Sequence[evaluate.Result], step: int | None
  ) -> None:
    """An evaluation ended; with `who` it becomes rows of the table.

    `step` is None for agents that do not learn: they have no curve.
    """
    for result in results:
      if step is not None and not self._known(step, result):
        self.write(step, result.scalars())
      note = f', {who}' if who else ''
      self.progress.log(evaluator.describe(result) + note)
    if who:
      self.rows += [result.row(who) for result in results]
      self.keep()

  def _known(self, step: int, result: evaluate.Result) -> bool:
    """Whether an earlier life wrote this point of the curve."""
    return any((step, name) in self.written for name in result.scalars())

  def keep(self) -> None:
    """Keeps in the run's directory what was found so far."""
    with self.lock:
      self.cost['seconds'] = time.monotonic() - self.started
      workdir_lib.write_results(
        self.workdir,
        {'rows': self.rows, 'mismatch': self.mismatch, 'cost': self.cost},
      )

  def write(self, step: int, scalars: dict[str, float]) -> None:
    if self.writer is not None:
      self.writer.write(step, scalars)

  def save_sessions(self, name, trajectories, extra, step, split=None) -> None:
    tokenizer = tokenizer_lib.load(self.experiment.tokenizer)
    tasks = task_sets.build_tasks(self.experiment.tasks)
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
    problem = trainer_lib.check_books(trainer)
    if problem:
      self.progress.log(f'the books do not agree: {problem}')
    self.keep()
    metrics.write_summary(
      self.workdir,
      {
        'rows': self.rows,
        'notes': notes(problem, _changed_share(self.workdir)),
        'mismatch': self.mismatch,
        'cost': self.cost,
      },
    )
    if self.writer is not None:
      self.writer.close()
    self.lanes.flush()
    path = report.write(self.workdir)
    if not self.rows:
      self.progress.log(
        'no evaluation: the trainer alone has no machines. --role eval beside'
        ' it evaluates its versions, `composer eval` a checkpoint'
      )
    self.progress.table(self.rows, report=path)


def _by_id(tasks: task_sets.TaskSet) -> dict[str, records.Task]:
  parts = (tasks.train, tasks.held_out_bugs, tasks.held_out_functions)
  return {task.id: task for part in parts for task in part}


def _changed_share(workdir: pathlib.Path) -> float | None:
  """Median share of weights that a version changed; None without one."""
  name = 'weights/changed_share'
  shares = [line[name] for line in metrics.read(workdir) if name in line]
  return float(np.median(shares)) if shares else None


def notes(problem: str | None, changed: float | None) -> list[str]:
  books = (
    'The books agree: produced = trained + dropped by reason + queued.'
    if problem is None
    else f'The books do not agree: {problem}'
  )
  if changed is None:
    return [
      books,
      'No step was trained: every group was dropped, groups/dropped in'
      ' metrics.jsonl says why.',
    ]
  if changed <= 0.03:
    return [books]
  return [
    books,
    f'{changed:.0%} of all bf16 weights moved in a step (median), so deltas are'
    ' large here: the learning rate is high. At the rates of large-scale RL'
    ' about one in a hundred moves.',
  ]


def before(board: Board, params: Any, stop: Callable[[], bool]) -> None:
  """The held-out sets after mid-training, with all of the machine."""
  experiment = board.experiment
  if board.has(BEFORE):
    return
  spec = transformer.spec(experiment.model)
  with board.lanes.span('eval', 'before'):
    results = evaluator.evaluate_params(
      experiment,
      params_lib.to_published(spec, params),
      0,
      experiment.eval.sessions,
      stop,
    )
  board.evaluated(BEFORE, results, experiment.midtrain.steps)


def after(board: Board, trainer, stop: Callable[[], bool]) -> None:
  """The held-out sets after RL, what needs no learning, and the mismatch.

  Each is kept when it is found, and not found again by a resumed run.
  """
  experiment = board.experiment
  if not board.has(AFTER):
    _after_rl(board, trainer, stop)
  for who in evaluator.SCRIPTED if experiment.eval.baselines else ():
    if not board.has(who):
      board.progress.log(f'{who}: {experiment.eval.sessions} sessions a set')
      found = evaluator.evaluate_scripted(
        experiment, who, experiment.eval.sessions, stop
      )
      board.evaluated(who, found, None)


def _after_rl(board: Board, trainer, stop: Callable[[], bool]) -> None:
  experiment = board.experiment
  params = trainer.published[trainer.version]
  board.progress.log(
    f'evaluating version {trainer.version}: {experiment.eval.sessions} sessions'
    ' a set'
  )
  with board.lanes.span('eval', 'after'):
    results = evaluator.evaluate_params(
      experiment, params, trainer.version, experiment.eval.sessions, stop
    )
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
      f'eval-{result.name}', kept, extra, step=trainer.at, split=result.name
    )
  contexts = [
    t.segments[0].tokens[: t.turns[0].end]
    for r in results
    for t in r.trajectories
  ]
  if contexts:
    board.progress.log('measuring the mismatch of both numerics modes')
    on_one_device = jax.tree.map(np.asarray, jax.device_get(params))
    found = mismatch.measure(experiment, on_one_device, contexts[:MEASURED])
    board.mismatch.update(mismatch.as_summary(found))
    board.cost.update(mismatch.as_cost(found))
  board.evaluated(AFTER, results, trainer.at)
