"""Roles on one machine: the whole loop as threads, or one role as a process.

all       mid-training, then trainer (this thread), rollout and evaluator
          (threads), meeting on the exchange just as separate processes do
trainer   mid-training, then the trainer alone
rollout   an engine and machines; any number may come and go
eval      evaluates every so many versions, read from the exchange
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import queue
import signal
import threading
import time
from typing import Any

import jax
import numpy as np

from composer import checkpoint
from composer import config as config_lib
from composer import console
from composer import data
from composer import groups
from composer import mesh as mesh_lib
from composer import metrics
from composer import midtrain
from composer import params as params_lib
from composer.environments import machines
from composer.environments.tasks import repair
from composer.fleet import evaluator
from composer.fleet import finish
from composer.fleet import rollout as rollout_lib
from composer.fleet import trainer as trainer_lib
from composer.fleet import workdir as workdir_lib
from composer.model import tokenizer as tokenizer_lib
from composer.model import transformer
from composer.rollout import scripted
from composer.weights import store
from composer.weights import sync

ROLES = ('all', 'trainer', 'rollout', 'eval')
MIDTRAIN = 'mid-training'
RL = 'reinforcement'


def run(
  experiment: config_lib.Experiment,
  *,
  workdir: pathlib.Path,
  resume: bool = False,
  role: str = 'all',
) -> int:
  """Runs one role of an experiment to its end; returns the exit status.

  Raises:
    ValueError: something that the user set cannot work (see the message).
  """
  if role not in ROLES:
    raise ValueError(f'unknown role {role!r}; known: {", ".join(ROLES)}')
  experiment = config_lib.validate(experiment)
  workdir = pathlib.Path(workdir)
  if role in ('all', 'rollout', 'eval'):
    machines.probe(experiment.machine)
  if role in ('all', 'trainer'):
    workdir_lib.prepare(experiment, workdir, resume)
  else:
    workdir.mkdir(parents=True, exist_ok=True)
  stop = workdir_lib.Stopper()
  with _interruptible(stop):
    if role in ('all', 'trainer'):
      name = f'trainer-{jax.process_index()}'
      with workdir_lib.locked(workdir, name):
        _train(experiment, workdir, resume, stop, alone=role == 'trainer')
    elif role == 'rollout':
      _rollout(experiment, workdir, stop)
    else:
      _evaluate(experiment, workdir, stop)
  if stop.why == INTERRUPTED:
    raise KeyboardInterrupt
  return 0


INTERRUPTED = 'interrupted'


class _interruptible:
  """First Ctrl-C: finish the step, save, stop. Second: leave at once."""

  def __init__(self, stop: workdir_lib.Stopper):
    self._stop = stop

  def __enter__(self):
    if threading.current_thread() is threading.main_thread():
      self._old = {
        s: signal.signal(s, self._handle)
        for s in (signal.SIGINT, signal.SIGTERM)
      }
    else:
      self._old = {}

  def __exit__(self, *unused):
    for number, handler in self._old.items():
      signal.signal(number, handler)

  def _handle(self, number, frame):
    if self._stop.why == INTERRUPTED:
      os._exit(130)
    self._stop.stop(INTERRUPTED)
    os.write(2, b'\nstopping after a checkpoint; once more leaves at once\n')


# --- trainer ------------------------------------------------------------------


def _train(experiment, workdir, resume, stop, alone: bool) -> None:
  """Both stages, and with `alone` false the other roles as threads."""
  lead = jax.process_index() == 0
  kv = store.open_exchange(workdir_lib.exchange_url(experiment, workdir))
  identity = checkpoint.identity(
    experiment.model, tokenizer_lib.load(experiment.tokenizer).fingerprint
  )
  done = checkpoint.latest(str(workdir / 'checkpoints' / 'rl'))
  with (
    console.Progress(experiment.name, live=None if lead else False) as progress,
    contextlib.closing(metrics.Lanes(workdir)) as lanes,
  ):
    writer = _writer(workdir, resume, lead)
    board = finish.Board(experiment, workdir, progress, writer, lanes)
    side = None if alone else _Side(board)
    state = _midtrain(board, identity, resume, stop)
    if stop():
      return
    if not alone and done is None:
      side.before(state.params)
    mesh = mesh_lib.make_mesh() if len(jax.devices()) > 1 else None
    trainer = trainer_lib.begin(
      experiment,
      kv,
      workdir,
      state.params,
      int(state.step),
      identity,
      lanes,
      mesh,
    )
    progress.stage(RL, experiment.rl.steps, trainer.done)
    _reinforce(board, trainer, stop, side)
    if stop() or not lead:
      return
    _conclude(board, trainer, side)


def _writer(workdir, resume, lead):
  if not lead:
    return None
  newest = checkpoint.latest(str(workdir / 'checkpoints' / 'rl'))
  if newest is None:
    newest = checkpoint.latest(str(workdir / 'checkpoints' / 'midtrain'))
  return metrics.Writer(workdir, resume=resume, step=newest or 0)


def _midtrain(board, identity, resume, stop):
  """Mid-training, or its result where it was finished before."""
  experiment, config = board.experiment, board.experiment.midtrain
  tokenizer = tokenizer_lib.load(experiment.tokenizer)
  spec = transformer.spec(experiment.model)
  params = params_lib.init(spec, jax.random.key(experiment.seed))
  state = midtrain.init_state(
    params, config, jax.random.key(experiment.seed + 1)
  )
  directory = str(board.workdir / 'checkpoints' / 'midtrain')
  if checkpoint.latest(directory) == config.steps:
    state, _ = checkpoint.restore(
      directory, checkpoint.abstract(state), identity=identity
    )
    return state
  board.progress.stage(MIDTRAIN, config.steps)
  batches = iter(mixture(experiment, tokenizer))
  with board.lanes.span('trainer', MIDTRAIN):
    return midtrain.run(
      experiment,
      directory,
      state,
      batches,
      identity=identity,
      report=board.midtrained,
      should_stop=stop,
      resume=resume,
    )


def mixture(experiment, tokenizer):
  """The data of mid-training: rendered sessions and Python source."""
  config = experiment.midtrain
  tasks = repair.build_tasks(experiment.tasks).train
  demos = scripted.render_demonstrations(
    tasks,
    tokenizer,
    experiment,
    np.random.default_rng(experiment.seed),
    config.demonstrations,
  )
  return data.midtraining(
    demos,
    data.python_source(config.source_bytes),
    tokenizer.encode,
    batch_size=config.batch_size,
    sequence_length=config.sequence_length,
    python_share=config.python_share,
    align=experiment.numerics.kv_block,
    seed=experiment.seed,
  )


def _reinforce(board, trainer, stop, side) -> None:
  """The RL stage; the rollout runs beside it unless it has its own process."""
  experiment, rollout = board.experiment, None
  if side is not None:
    rollout = rollout_lib.start(
      experiment,
      trainer.kv,
      stop,
      sole=True,
      lanes=board.lanes,
      on_group=board.group_finished,
      on_version=board.version_active,
    )
    side.start()

  def report_step(trainer, selection, done):
    board.stepped(trainer, selection, done, rollout)
    every = experiment.eval.every
    last = trainer.done >= experiment.rl.steps
    if side is not None and every and trainer.done % every == 0 and not last:
      side.submit(
        trainer.version,
        trainer.published[trainer.version],
        int(trainer.state.step),
      )

  try:
    trainer_lib.run(trainer, stop, report_step)
  finally:
    if rollout is not None:
      failed = rollout.failure
      rollout.stop.stop('finished') if not stop() else None
      rollout.join()
      if failed is not None:
        raise failed
      stop.flags[:] = [w for w in stop.flags if w != 'finished']


def _conclude(board, trainer, side) -> None:
  """The books, the evaluation after, the table and the report."""
  if side is not None:
    side.finish()
    side.after(trainer)
  board.conclude(trainer)
  (board.workdir / workdir_lib.DONE).write_text('')


class _Side:
  """The evaluator's thread: evaluations during the run, one at a time."""

  def __init__(self, board):
    self._board = board
    self._jobs: queue.Queue = queue.Queue()
    self._thread: threading.Thread | None = None
    self._failure: BaseException | None = None

  def before(self, params: Any) -> None:
    """The set's solve rates after mid-training, with all of the machine."""
    experiment, board = self._board.experiment, self._board
    spec = transformer.spec(experiment.model)
    with board.lanes.span('eval', 'before'):
      results = evaluator.evaluate_params(
        experiment,
        params_lib.to_published(spec, params),
        0,
        experiment.eval.sessions,
        on_session=board.session_evaluated,
      )
    board.evaluated('after mid-training', results, experiment.midtrain.steps)

  def start(self) -> None:
    self._thread = threading.Thread(
      target=self._work, name='evaluator', daemon=True
    )
    self._thread.start()

  def submit(self, version: int, params: Any, step: int) -> None:
    self._jobs.put((version, params, step))

  def finish(self, seconds: float = 300.0) -> None:
    """Waits for the evaluations that were asked for."""
    self._jobs.put(None)
    self._thread.join(seconds)
    if self._thread.is_alive():
      raise TimeoutError(f'an evaluation did not end within {seconds} s')
    if self._failure is not None:
      raise self._failure

  def after(self, trainer) -> None:
    finish.after(self._board, trainer)

  def _work(self) -> None:
    experiment = self._board.experiment
    try:
      while (job := self._jobs.get()) is not None:
        version, params, step = job
        with self._board.lanes.span('eval', f'version {version}'):
          results = evaluator.evaluate_params(
            experiment, params, version, experiment.eval.during_sessions
          )
        self._board.evaluated('', results, step)
    except BaseException as error:
      self._failure = error


# --- the other roles ----------------------------------------------------------


def _rollout(experiment, workdir, stop) -> None:
  """A rollout process: until the trainer has finished, or a signal."""
  kv = store.open_exchange(workdir_lib.exchange_url(experiment, workdir))
  with console.Progress(f'{experiment.name} rollout') as progress:
    rollout = rollout_lib.start(
      experiment,
      kv,
      stop,
      sole=False,
      on_version=lambda version, pause: progress.log(
        f'version {version} active after a pause of {pause * 1000:.0f} ms'
      ),
      on_group=lambda group: progress.log(
        f'group {group.group_id} of {group.task_id}: mean reward'
        f' {np.mean([t.reward for t in group.trajectories]):.3f}'
      ),
    )
    while any(t.name == 'sessions' and t.is_alive() for t in rollout.threads):
      time.sleep(0.1)
    stop.stop('finished')
    rollout.join()


def _evaluate(experiment, workdir, stop) -> None:
  """An evaluation process: every `eval.every` versions, as they are published."""
  kv = store.open_exchange(workdir_lib.exchange_url(experiment, workdir))
  subscriber = sync.Subscriber(kv, experiment.weights.form)
  seen = None
  with (
    console.Progress(f'{experiment.name} eval') as progress,
    metrics.Writer(workdir / 'eval', resume=True) as writer,
  ):
    while not stop():
      finished = groups.read_cursor(kv).finished
      update = subscriber.poll()
      due = update and (
        seen is None or finished or update[0] - seen >= experiment.eval.every
      )
      if due:
        seen = update[0]
        for result in evaluator.evaluate_params(
          experiment,
          params_lib.unnamed(update[1]),
          seen,
          experiment.eval.during_sessions,
        ):
          writer.write(seen, result.scalars())
          progress.log(
            f'version {seen}: {result.name} {result.solve_rate:.3f}'
            f' ± {result.solve_rate_se:.3f} ({result.sessions} sessions)'
          )
      elif finished:
        break
      else:
        time.sleep(0.2)
