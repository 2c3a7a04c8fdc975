"""Roles on one machine: the whole loop as threads, or one role as a process.

all       mid-training, then trainer (this thread), rollout and evaluator
          (threads), meeting on the exchange just as separate processes do
trainer   mid-training, then the trainer alone, in one process or several
rollout   an engine and machines; any number may come and go
eval      evaluates every so many versions, read from the exchange
"""

from __future__ import annotations

from collections.abc import Sequence
import contextlib
import dataclasses
import pathlib
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from composer import checkpoint
from composer import config as config_lib
from composer import console
from composer import data
from composer import mesh as mesh_lib
from composer import metrics
from composer import midtrain
from composer.environments import machines
from composer.environments.tasks import sets as task_sets
from composer.fleet import evaluator
from composer.fleet import finish
from composer.fleet import processes
from composer.fleet import rollout as rollout_lib
from composer.fleet import start
from composer.fleet import stopping
from composer.fleet import trainer as trainer_lib
from composer.fleet import workdir as workdir_lib
from composer.model import tokenizer as tokenizer_lib
from composer.model import transformer
from composer.rollout import demonstrations
from composer.rollout import scripted
from composer.weights import store

ROLES = ('all', 'trainer', 'rollout', 'eval')
PLAYED = 'demonstrations'  # a stage of the progress


def run(
  experiment: config_lib.Experiment,
  *,
  workdir: pathlib.Path,
  resume: bool = False,
  role: str = 'all',
) -> int:
  """Runs one role of an experiment to its end; returns the exit status.

  Raises:
    ValueError: something that the user set cannot work (see the message);
      nothing was written.
    KeyboardInterrupt: stopped by a signal, in order; `resume` goes on.
  """
  if role not in ROLES:
    raise ValueError(f'unknown role {role!r}; known: {", ".join(ROLES)}')
  experiment = start.resolve(config_lib.validate(experiment))
  workdir = pathlib.Path(workdir)
  processes.join(experiment, role)
  if role != 'trainer':
    machines.probe(experiment.machine)
  stop = stopping.Stopper()
  with stopping.interruptible(stop), contextlib.suppress(stopping.Stopped):
    if role == 'rollout':
      rollout_lib.serve(experiment, workdir, stop)
    elif role == 'eval':
      evaluator.follow(experiment, workdir, stop)
    else:
      _train(experiment, workdir, resume, stop, alone=role == 'trainer')
  if stop.interrupted:
    raise KeyboardInterrupt
  return 0


def _train(experiment, workdir, resume, stop, alone: bool) -> None:
  """Both stages, and with `alone` false the other roles as threads."""
  mesh = _mesh(experiment)
  processes.lead_first(
    lambda: _prepare(experiment, workdir, resume, alone, mesh)
  )
  identity = checkpoint.identity(
    experiment.model, tokenizer_lib.load(experiment.tokenizer).fingerprint
  )
  lead = processes.leads()
  with contextlib.ExitStack() as held:
    held.enter_context(
      workdir_lib.locked(workdir, f'trainer-{jax.process_index()}')
    )
    kv = store.open_exchange(workdir_lib.exchange_url(experiment, workdir))
    progress = held.enter_context(
      console.Progress(experiment.name, live=None if lead else False)
    )
    lanes = held.enter_context(contextlib.closing(metrics.Lanes(workdir)))
    writer = None
    if lead:
      step = workdir_lib.last_step(experiment, workdir)
      writer = held.enter_context(
        metrics.Writer(workdir, resume=resume, step=step)
      )
    board = finish.Board(experiment, workdir, progress, writer, lanes)
    state = _midtrain(board, mesh, identity, resume, stop)
    if processes.any_of(stop()):
      return
    if not alone:
      finish.before(board, state.params, stop)
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
    _reinforce(board, trainer, stop, alone)
    if lead and trainer.finished and not stop():
      if not alone:
        finish.after(board, trainer, stop)
      board.conclude(trainer)
      (workdir / workdir_lib.DONE).write_text('')


def _mesh(experiment: config_lib.Experiment) -> Mesh:
  """A mesh of all devices, over which the rows of a batch must divide."""
  mesh = mesh_lib.make_mesh(parallel=experiment.parallel)
  rl, mid = experiment.rl, experiment.midtrain
  for path, rows, length in (
    ('rl.micro_batch', rl.micro_batch, rl.sequence_length),
    ('midtrain.batch_size', mid.batch_size, mid.sequence_length),
  ):
    mesh_lib.check_batch(mesh, path, rows, length)
  return mesh


def _prepare(experiment, workdir, resume, alone: bool, mesh: Mesh) -> None:
  """Refuses what cannot work; else the directory is this run's."""
  if workdir_lib.check(experiment, workdir, resume):
    return
  layout = mesh_lib.train_layout(experiment.numerics, mesh, experiment.parallel)
  midtrain.check_layout(experiment.model, experiment.midtrain, layout)
  if not alone or _plays(experiment):
    task_sets.build_tasks(experiment.tasks)
  if experiment.weights.exchange:
    kv = store.open_exchange(experiment.weights.exchange)
    if store.read_head(kv, experiment.weights.form).ref is not None:
      raise ValueError(
        f'weights.exchange={experiment.weights.exchange!r} holds the weights of'
        ' another run; choose another, or the --workdir of that run and'
        ' --resume'
      )
  workdir_lib.make(experiment, workdir)


# --- mid-training -------------------------------------------------------------


def _midtrain(board, mesh, identity, resume, stop):
  """Mid-training, or its result where it was finished before."""
  experiment, config = board.experiment, board.experiment.midtrain
  tokenizer = tokenizer_lib.load(experiment.tokenizer)
  spec = transformer.spec(experiment.model)
  by_name = mesh_lib.shardings(
    spec, mesh_lib.RULES[experiment.parallel.rules], mesh
  )
  params = start.params(experiment, by_name)
  state = midtrain.init_state(
    params, config, jax.random.key(experiment.seed + 1)
  )
  state = processes.place(
    state, mesh_lib.like_params(state, spec, by_name, mesh)
  )
  directory = workdir_lib.checkpoints(board.workdir, 'midtrain')
  if checkpoint.latest(directory) == config.steps:
    state, _ = checkpoint.restore(
      directory, checkpoint.abstract(state), identity=identity
    )
    return state
  sessions = _played(board, tokenizer, stop)
  board.progress.stage(finish.MIDTRAIN, config.steps)
  batches = iter(mixture(experiment, tokenizer, sessions))
  with board.lanes.span('trainer', finish.MIDTRAIN):
    return midtrain.run(
      experiment,
      directory,
      state,
      batches,
      identity=identity,
      report=board.midtrained,
      place=lambda batch: _place(mesh, batch),
      should_stop=lambda: processes.any_of(stop()),
      resume=resume,
      layout=mesh_lib.train_layout(
        experiment.numerics, mesh, experiment.parallel
      ),
    )


def _place(mesh: Mesh, batch: Any) -> Any:
  """Host arrays [B, T], equal in every process, onto the mesh by rows."""
  rows = NamedSharding(mesh, PartitionSpec(mesh_lib.ROWS))
  return {
    name: jax.make_array_from_callback(
      np.shape(value), rows, lambda at, value=value: value[at]
    )
    for name, value in batch.items()
  }


def mixture(experiment, tokenizer, sessions=()):
  """The data of mid-training: sessions, solutions and Python source.

  `sessions` are demonstrations that were played; those of `repair` tasks need
  no machine, and are rendered here.
  """
  config = experiment.midtrain
  rng = np.random.default_rng(experiment.seed)
  documents: list[Any] = list(sessions)
  if experiment.tasks.kind == 'repair':
    documents = _sessions(experiment, tokenizer, rng)
  share = config.python_share if documents else 1.0
  return data.midtraining(
    documents,
    data.python_source(config.source_bytes) if share else (),
    tokenizer.encode,
    batch_size=config.batch_size,
    sequence_length=config.sequence_length,
    python_share=share,
    sampled_only=config.sampled_only,
    align=experiment.numerics.kv_block,
    seed=experiment.seed,
  )


def _sessions(experiment, tokenizer, rng) -> list[Any]:
  """Rendered sessions and solutions of `repair` tasks."""
  config = experiment.midtrain
  tasks = task_sets.build_tasks(experiment.tasks).train
  documents = scripted.render_demonstrations(
    tasks, tokenizer, experiment, rng, demonstrations.count(experiment)
  )
  documents += scripted.render_solutions(
    tasks, tokenizer, rng, config.solutions
  )
  return documents


def _plays(experiment: config_lib.Experiment) -> bool:
  """Whether mid-training sees sessions that take machines."""
  config = experiment.midtrain
  wanted = config.steps > 0 and config.python_share < 1
  return wanted and experiment.tasks.kind != 'repair'


def _played(board, tokenizer, stop) -> Sequence[Any]:
  """Demonstrations of tasks that need machines; none of `repair` tasks.

  Played once and kept in the run's directory: every process of the trainer, and
  a run that is resumed, has to see the same.
  """
  experiment, progress = board.experiment, board.progress
  if not _plays(experiment):
    return ()
  path = board.workdir / workdir_lib.DEMONSTRATIONS

  def play() -> None:
    if path.exists():
      return
    tasks = task_sets.build_tasks(experiment.tasks).train
    count = demonstrations.count(experiment)
    progress.log(
      f'mid-training begins with demonstrations: {count} sessions are played in'
      ' machines (midtrain.demonstrations); the time they take is shown after a'
      ' few'
    )
    progress.stage(PLAYED, count)
    made = demonstrations.render(
      tasks,
      tokenizer,
      experiment,
      count,
      experiment.seed,
      stop,
      lambda done: progress.update(PLAYED, done),
    )
    if made is None:
      return
    demonstrations.write(path, made)
    lost = ', '.join(f'{y} {x}' for x, y in made.dropped.items())
    progress.log(f'{made.sessions} of them kept' + f' ({lost})' * bool(lost))

  processes.lead_first(play)
  if processes.any_of(stop()):
    raise stopping.Stopped
  return demonstrations.read(path).segments


# --- reinforcement ------------------------------------------------------------


def _reinforce(board, trainer, stop, alone: bool) -> None:
  """The RL stage; rollout and evaluator beside it unless it is `alone`."""
  experiment = board.experiment
  board.progress.stage(finish.RL, experiment.rl.steps, trainer.done)
  board.done = trainer.done
  rollout = evaluations = None
  if not alone and not trainer.finished:
    rollout = rollout_lib.start(
      _own_cluster(experiment),
      trainer.kv,
      stop,
      sole=True,
      on_group=board.group_finished,
      on_version=board.version_active,
      say=board.progress.log,
    )
    evaluations = evaluator.Queue(
      experiment,
      stop,
      board.lanes,
      lambda results, step: board.evaluated('', results, step),
    )

  def broken() -> bool:
    return rollout is not None and bool(rollout.failure or evaluations.failed)

  def report_step(trainer, done):
    if processes.leads():
      board.stepped(trainer, done, rollout)
    every = experiment.eval.every
    due = every and trainer.done % every == 0 and not trainer.finished
    if evaluations is not None and due:
      evaluations.submit(
        trainer.version, trainer.published[trainer.version], trainer.at
      )

  try:
    trainer_lib.run(trainer, lambda: stop() or broken(), report_step)
  finally:
    if rollout is not None:
      _end(rollout, evaluations, trainer.finished and not stop())


def _end(rollout, evaluations, finished: bool) -> None:
  """Both threads' end; what made one of them fail is raised."""
  try:
    rollout.end()
  except BaseException:
    with contextlib.suppress(Exception):  # the first failure is what counts
      evaluations.cancel()
    raise
  if finished:
    evaluations.finish()
  else:
    evaluations.cancel()


def _own_cluster(experiment: config_lib.Experiment) -> config_lib.Experiment:
  """The rollout of the one process is a cluster of its own.

  So what its dead predecessor was rolling can be told from what rollout
  processes that joined this run are.
  """
  fleet = dataclasses.replace(
    experiment.fleet, cluster=f'{experiment.fleet.cluster}.own'
  )
  return dataclasses.replace(experiment, fleet=fleet)
