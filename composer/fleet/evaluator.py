"""The evaluation role: pinned versions on held-out sets.

It has an engine and machines of its own, so that the version under test does
not move while its sessions run, and rollouts do not wait for it. `Queue` is a
thread beside a trainer, `follow` a process that reads versions from the
exchange, `run` the command `composer eval`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
import math
import pathlib
import queue
import threading
import time
from typing import Any

import jax
import numpy as np

from composer import checkpoint as checkpoint_lib
from composer import config as config_lib
from composer import console
from composer import evaluate
from composer import groups
from composer import leases
from composer import metrics
from composer import params as params_lib
from composer import records
from composer.environments import machines
from composer.environments.tasks import sets as task_sets
from composer.fleet import rollout
from composer.fleet import start
from composer.fleet import stopping
from composer.fleet import workdir as workdir_lib
from composer.model import tokenizer as tokenizer_lib
from composer.model import transformer
from composer.rollout import scripted
from composer.weights import forms
from composer.weights import store
from composer.weights import sync

Stop = Callable[[], bool]

SCRIPTED = ('demonstrator', 'blind guesser')
POLL_S = 0.1
EVALUATION_S = 3600.0  # limit of the evaluations of a run beside its trainer
QUIET_S = 3600.0  # without a new version for so long, `follow` says so and ends


def sets(
  experiment: config_lib.Experiment,
) -> dict[str, tuple[records.Task, ...]]:
  """The held-out sets by name, those that hold tasks."""
  tasks = task_sets.build_tasks(experiment.tasks)
  found = {
    'held_out_bugs': tasks.held_out_bugs,
    'held_out_functions': tasks.held_out_functions,
  }
  return {name: held_out for name, held_out in found.items() if held_out}


def evaluate_params(
  experiment: config_lib.Experiment,
  params: Any,
  version: int,
  sessions: int,
  stop: Stop = lambda: False,
) -> list[evaluate.Result]:
  """Evaluates published parameters on the held-out sets.

  Raises:
    Stopped: `stop()` said so.
    EngineError: the engine failed.
  """
  # One device of our own, wherever the trainer's copies lie.
  params = jax.tree.map(np.asarray, jax.device_get(params))
  engine = rollout.engine(experiment)
  try:
    computed = forms.computed(experiment.weights.form, params)
    engine.activate(version, jax.block_until_ready(computed))
    engine.wait_active(version)
    return asyncio.run(
      _evaluate(experiment, engine, sessions, stop, engine.check)
    )
  finally:
    engine.close()


def evaluate_scripted(
  experiment: config_lib.Experiment,
  who: str,
  sessions: int,
  stop: Stop = lambda: False,
) -> list[evaluate.Result]:
  """What needs no learning: `who` is one of `SCRIPTED`."""
  tokenizer = tokenizer_lib.load(experiment.tokenizer)
  held_out = sets(experiment)
  known = scripted.answers([t for tasks in held_out.values() for t in tasks])
  agents: dict[str, Callable[[], records.Sampler]] = {
    'demonstrator': lambda: scripted.Demonstrator(tokenizer, experiment, known),
    'blind guesser': lambda: scripted.BlindGuesser(tokenizer, experiment),
  }
  return asyncio.run(
    _evaluate(experiment, agents[who](), sessions, stop, lambda: None)
  )


async def _evaluate(
  experiment: config_lib.Experiment,
  sampler: records.Sampler,
  sessions: int,
  stop: Stop,
  check: Callable[[], None],
) -> list[evaluate.Result]:
  tokenizer = tokenizer_lib.load(experiment.tokenizer)
  pool = rollout.open_pool(experiment)
  await pool.open()
  try:
    return [
      await _until_stopped(
        evaluate.evaluate(
          name, sampler, pool, tasks, tokenizer, experiment, sessions
        ),
        stop,
        check,
      )
      for name, tasks in sets(experiment).items()
    ]
  finally:
    await pool.close()


async def _until_stopped(
  work: Coroutine[Any, Any, evaluate.Result],
  stop: Stop,
  check: Callable[[], None],
) -> evaluate.Result:
  task = asyncio.ensure_future(work)
  try:
    while not task.done():
      if stop():
        raise stopping.Stopped
      check()
      await asyncio.wait([task], timeout=POLL_S)
    check()
    return task.result()
  finally:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


# --- beside a trainer ---------------------------------------------------------


class Queue:
  """A thread that evaluates what it is given, one version after the other."""

  def __init__(
    self,
    experiment: config_lib.Experiment,
    stop: stopping.Stopper,
    lanes: metrics.Lanes,
    report: Callable[[list[evaluate.Result], int], None],
  ):
    """`report` gets each version's results and the step that came with it."""
    self._experiment, self._lanes, self._report = experiment, lanes, report
    self._stop = stopping.Stopper(above=stop)
    self._jobs: queue.Queue = queue.Queue()
    self._failure: BaseException | None = None
    self._thread = threading.Thread(
      target=self._work, name='evaluator', daemon=True
    )
    self._thread.start()

  def submit(self, version: int, params: Any, step: int) -> None:
    """Asks for a version; returns at once."""
    self._jobs.put((version, params, step))

  @property
  def failed(self) -> bool:
    return self._failure is not None

  def finish(self) -> None:
    """Waits for what was asked for; raises what made it fail."""
    self._jobs.put(None)
    self._join()

  def cancel(self) -> None:
    """Gives up what was asked for; raises what made it fail before."""
    self._stop.stop('cancelled')
    self._jobs.put(None)
    self._join()

  def _join(self) -> None:
    deadline = time.monotonic() + EVALUATION_S
    while self._thread.is_alive():
      self._thread.join(POLL_S)
      if time.monotonic() > deadline:
        raise TimeoutError(
          f'an evaluation did not end within {EVALUATION_S:.0f} s; lower'
          ' eval.during_sessions'
        )
    if self._failure is not None:
      raise self._failure

  def _work(self) -> None:
    experiment = self._experiment
    try:
      while (job := self._jobs.get()) is not None:
        version, params, step = job
        with self._lanes.span('eval', f'version {version}'):
          results = evaluate_params(
            experiment,
            params,
            version,
            experiment.eval.during_sessions,
            self._stop,
          )
        self._report(results, step)
    except stopping.Stopped:
      pass
    except BaseException as error:
      self._failure = error


# --- a process of its own -----------------------------------------------------


def follow(
  experiment: config_lib.Experiment,
  workdir: pathlib.Path,
  stop: stopping.Stopper,
) -> None:
  """Evaluates every `eval.every` versions, and the last one; then ends.

  Writes `eval/metrics.jsonl` in the run's directory, by version.

  Raises:
    TimeoutError: no new version for `QUIET_S`.
  """
  workdir_lib.join(experiment, workdir)
  kv = store.open_exchange(workdir_lib.exchange_url(experiment, workdir))
  form = experiment.weights.form
  subscriber = sync.Subscriber(
    kv,
    form,
    reader=(f'{experiment.fleet.cluster}.eval', leases.new_incarnation()),
  )
  every = experiment.eval.every or math.inf
  seen = max(
    (line['step'] for line in metrics.read(workdir / 'eval')), default=-1
  )
  held, rows, heard = None, [], time.monotonic()
  with (
    workdir_lib.locked(workdir, 'eval'),
    console.Progress(f'{experiment.name} eval') as progress,
    metrics.Writer(workdir / 'eval', resume=True) as writer,
  ):
    while not stop():
      finished = groups.read_cursor(kv).finished
      update, problem = rollout.poll(subscriber)
      if update is not None:
        held, heard = update, time.monotonic()
      new = held is not None and held[0] > seen
      if new and (seen < 0 or finished or held[0] - seen >= every):
        seen = held[0]
        params = params_lib.unnamed(forms.widen(form, held[1]))
        count = experiment.eval.during_sessions
        for result in evaluate_params(experiment, params, seen, count, stop):
          writer.write(seen, result.scalars())
          rows.append(result.row(f'version {seen}'))
          progress.log(f'version {seen}: {describe(result)}')
      elif finished:
        break
      elif time.monotonic() - heard > QUIET_S:
        raise TimeoutError(
          f'no new version appeared on the exchange within {QUIET_S:.0f} s; is'
          f' a trainer running on it?{problem}'
        )
      else:
        time.sleep(POLL_S)
    progress.table(sorted(rows, key=lambda row: row['set']))


def describe(result: evaluate.Result) -> str:
  """A line that says what an evaluation found."""
  error = result.row('')['se']
  return (
    f'{result.name}: {result.solve_rate:.3f}'
    + (f' ± {error:.3f}' if error is not None else '')
    + f' solved, best of {result.k} {result.best_of_k:.3f}'
    f' ({result.sessions} sessions'
    + (f', {result.failed} lost)' if result.failed else ')')
  )


def run(experiment: config_lib.Experiment, *, checkpoint: pathlib.Path) -> int:
  """`composer eval`: a checkpoint's solve rates, printed.

  Args:
    experiment: sets, budgets, sessions (`eval.sessions`).
    checkpoint: the workdir of a run or a directory of checkpoints, of which
      the newest is taken, or one checkpoint.

  Raises:
    ValueError: no checkpoint there, or one of another model.
  """
  experiment = start.resolve(config_lib.validate(experiment))
  machines.probe(experiment.machine)
  spec = transformer.spec(experiment.model)
  identity = checkpoint_lib.identity(
    experiment.model, tokenizer_lib.load(experiment.tokenizer).fingerprint
  )
  directory, step = _directory(checkpoint)
  params, step = checkpoint_lib.restore_params(
    str(directory), params_lib.abstract(spec), identity=identity, step=step
  )
  published = params_lib.to_published(spec, params)
  print(f'{directory}, step {step}', flush=True)
  for result in evaluate_params(
    experiment, published, 0, experiment.eval.sessions
  ):
    print(describe(result), flush=True)
  return 0


def _directory(path: pathlib.Path) -> tuple[pathlib.Path, int | None]:
  """(directory of checkpoints, step or None for the newest) that `path` names."""
  for stage in ('rl', 'midtrain'):
    directory = pathlib.Path(workdir_lib.checkpoints(path, stage))
    if checkpoint_lib.latest(str(directory)) is not None:
      return directory, None
  if path.name.isdigit() and checkpoint_lib.latest(str(path)) is None:
    return path.parent, int(path.name)
  return path, None
