"""The rollout role: an engine, machines and a scheduler, in one thread each.

    weight thread     polls HEAD, decodes, activates; has an accelerator's
                      programs compiled before the first session
    engine thread     decodes tokens (`composer.inference.engine`)
    event loop        sessions, tools, grading, commits

It speaks with the rest of the world through the exchange alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
import contextlib
import dataclasses
import math
import pathlib
import threading
import time

import jax
import numpy as np
import tensorstore as ts

from composer import config as config_lib
from composer import console
from composer import leases
from composer import params as params_lib
from composer import records
from composer.environments import machines
from composer.environments.tasks import sets as task_sets
from composer.fleet import stopping
from composer.fleet import workdir as workdir_lib
from composer.inference import engine as engine_lib
from composer.model import tokenizer as tokenizer_lib
from composer.rollout import schedule
from composer.weights import forms
from composer.weights import store
from composer.weights import sync
from pallas_kernels import dispatch

WEIGHTS_POLL_S = 0.05
CACHE_S = 60.0  # between two versions that are kept in `weights.cache`
WARM_S = 600.0  # for an accelerator's programs to be compiled
QUIET_S = 600.0  # without weights for so long, a rollout says so and ends
END_S = 60.0  # for sessions to be given up and machines to stop
SESSIONS = 'sessions'  # name of the thread that runs them


def engine(experiment: config_lib.Experiment) -> engine_lib.Engine:
  return engine_lib.Engine(
    experiment.model, experiment.numerics, experiment.engine
  )


def open_pool(experiment: config_lib.Experiment) -> machines.Pool:
  """Machines with the runner compiled beforehand."""
  return machines.Pool(experiment.machine, task_sets.harness())


@dataclasses.dataclass
class Rollout:
  """A running rollout role; `start` makes one, `end` or `join` ends it."""

  experiment: config_lib.Experiment
  kv: ts.KvStore
  engine: engine_lib.Engine
  incarnation: str
  stop: stopping.Stopper
  on_version: Callable[[int, float], None]
  say: Callable[[str], None]
  ready: threading.Event  # weights are active, and what must be is compiled
  failure: BaseException | None = None
  threads: list[threading.Thread] = dataclasses.field(default_factory=list)

  def end(self, seconds: float = END_S) -> None:
    """Stops the threads and waits for them.

    Raises:
      Exception: what made one of them fail.
      TimeoutError: one did not end in time.
    """
    self.stop.stop('finished')
    if not self.ready.is_set():
      self.engine.close(seconds)  # it may be compiling: nobody waits for that
    deadline = time.monotonic() + seconds
    for thread in self.threads:
      thread.join(max(0.0, deadline - time.monotonic()))
      if thread.is_alive():
        raise TimeoutError(
          f'thread {thread.name} of the rollout did not end within {seconds} s'
        )
    self.engine.close()
    self.check()

  def join(self) -> None:
    """Waits for the trainer to have finished, or `stop`; then `end`."""
    while any(t.name == SESSIONS and t.is_alive() for t in self.threads):
      time.sleep(0.05)
    self.end()

  def check(self) -> None:
    """Raises what made a thread fail, if one did."""
    if self.failure is not None:
      raise self.failure


def start(
  experiment: config_lib.Experiment,
  kv: ts.KvStore,
  stop: stopping.Stopper,
  *,
  sole: bool,
  on_group: Callable[[records.Group], None] = lambda group: None,
  on_version: Callable[[int, float], None] = lambda version, pause: None,
  say: Callable[[str], None] = lambda line: None,
) -> Rollout:
  """Starts the role's threads.

  Args:
    experiment: all of it.
    kv: the exchange.
    stop: asked all the time.
    sole: this is the cluster's only process, so what its earlier life was
      rolling is free at once.
    on_group: called with each committed group.
    on_version: called with (version, pause in seconds) after each swap.
    say: is told how far the compiling before the first session is.
  """
  incarnation = leases.new_incarnation()
  abandoned = 0
  if sole:
    freed = leases.release_cluster(kv, experiment.fleet.cluster, incarnation)
    abandoned = freed * experiment.rl.group_size
  rollout = Rollout(
    experiment,
    kv,
    engine(experiment),
    incarnation,
    stopping.Stopper(above=stop),
    on_version,
    say,
    threading.Event(),
  )
  for name, act in (
    ('weights', lambda: _follow(rollout)),
    (SESSIONS, lambda: asyncio.run(_sessions(rollout, abandoned, on_group))),
  ):
    thread = threading.Thread(
      target=_guard, args=(rollout, act), name=name, daemon=True
    )
    rollout.threads.append(thread)
    thread.start()
  return rollout


def serve(
  experiment: config_lib.Experiment,
  workdir: pathlib.Path,
  stop: stopping.Stopper,
) -> None:
  """A rollout process: until the trainer has finished, or a signal."""
  workdir_lib.join(experiment, workdir)
  kv = store.open_exchange(workdir_lib.exchange_url(experiment, workdir))
  with console.Progress(f'{experiment.name} rollout') as progress:

    def version_active(version: int, pause: float) -> None:
      # By now the trainer has said what experiment it runs.
      workdir_lib.join(experiment, workdir)
      progress.log(
        f'version {version} active after a pause of {pause * 1000:.0f} ms'
      )

    def group_finished(group: records.Group) -> None:
      rewards = [t.reward for t in group.trajectories]
      mean = f'{np.mean(rewards):.3f}' if rewards else 'none, all were lost'
      progress.log(
        f'group {group.group_id} of {group.task_id}: mean reward {mean}'
      )

    start(
      experiment,
      kv,
      stop,
      sole=False,
      on_version=version_active,
      on_group=group_finished,
      say=progress.log,
    ).join()


def _guard(rollout: Rollout, act: Callable[[], None]) -> None:
  try:
    act()
  except BaseException as error:
    early = rollout.stop() and not rollout.ready.is_set()
    if early and isinstance(error, records.EngineError):
      return  # `end` has closed the engine under it
    if rollout.failure is None:
      rollout.failure = error
    rollout.stop.stop(f'rollout failed: {error!r}')


def _follow(rollout: Rollout) -> None:
  """Fetches every new version while the engine serves, and activates it."""
  weights = rollout.experiment.weights
  subscriber = sync.Subscriber(
    rollout.kv,
    weights.form,
    reader=(rollout.experiment.fleet.cluster, rollout.incarnation),
    directory=weights.cache or None,
  )
  try:
    _follow_with(rollout, subscriber)
  finally:
    with contextlib.suppress(OSError):
      subscriber.close()


def _follow_with(rollout: Rollout, subscriber: sync.Subscriber) -> None:
  form = rollout.experiment.weights.form
  well = time.monotonic()  # when the exchange was last seen in order
  saved, widened = -math.inf, None
  while not rollout.stop():
    rollout.engine.check()
    update, problem = poll(subscriber)
    if subscriber.version is not None and not problem:
      well = time.monotonic()
    if update is None:
      if time.monotonic() - well > QUIET_S:
        raise TimeoutError(
          f'no weights could be read from the exchange for {QUIET_S:.0f} s; is'
          f' a trainer running on it?{problem}'
        )
      time.sleep(WEIGHTS_POLL_S)
      continue
    version, flat = update
    # Those before are let go after the swap, by this thread: giving memory back
    # may take longer than all else of the pause.
    before, widened = widened, params_lib.unnamed(forms.widen(form, flat))
    rollout.engine.activate(version, jax.block_until_ready(widened))
    rollout.engine.wait_active(version)
    del before
    rollout.on_version(version, rollout.engine.stats.pause_s)
    if not rollout.ready.is_set():
      _warm(rollout)
    if time.monotonic() - saved > CACHE_S:
      subscriber.save()
      saved = time.monotonic()


def _warm(rollout: Rollout) -> None:
  """Compiles what sessions need before there is one, on an accelerator.

  Its programs take a minute or two, which would count as a session's own. A
  CPU compiles one in some seconds, and a small run needs few of all shapes: it
  is at work sooner if only those are compiled, once they are needed.
  """
  if dispatch.platform() != 'cpu':
    began = time.monotonic()
    rollout.say('compiling what sessions need')
    # Sessions draw from whole distributions: nothing is cut.
    shapes = rollout.engine.warm_up(seconds=WARM_S, say=rollout.say)
    rollout.say(f'{shapes} shapes compiled in {time.monotonic() - began:.1f} s')
  rollout.ready.set()


def poll(
  subscriber: sync.Subscriber,
) -> tuple[tuple[int, dict[str, np.ndarray]] | None, str]:
  """(newer weights or None, what is wrong with the exchange or '').

  After an error the version held has not moved, so the next poll tries again.
  """
  try:
    return subscriber.poll(), ''
  except (store.BrokenWeights, OSError) as error:
    return None, f' The last error was: {error}'


async def _sessions(
  rollout: Rollout,
  abandoned: int,
  on_group: Callable[[records.Group], None],
) -> None:
  experiment = rollout.experiment
  while not rollout.ready.is_set():
    if rollout.stop():
      return
    await asyncio.sleep(0.02)
  tasks = task_sets.build_tasks(experiment.tasks).train
  tokenizer = tokenizer_lib.load(experiment.tokenizer)
  pool = open_pool(experiment)
  await pool.open()
  try:
    scheduler = schedule.Scheduler(
      rollout.kv,
      rollout.engine,
      pool,
      tasks,
      tokenizer,
      experiment,
      rollout.incarnation,
      version=lambda: rollout.engine.version,
      provenance={
        'numerics': experiment.numerics.mode,
        'engine': dataclasses.asdict(experiment.engine),
      },
      abandoned=abandoned,
      on_group=on_group,
      check=rollout.engine.check,
    )
    await scheduler.run(rollout.stop)
  finally:
    await pool.close()
