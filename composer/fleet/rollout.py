"""The rollout role: an engine, machines and a scheduler, in one thread each.

    weight thread     polls HEAD, decodes, activates
    engine thread     decodes tokens (`composer.inference.engine`)
    event loop        sessions, tools, grading, commits

It speaks with the rest of the world through the exchange alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
import dataclasses
import threading
import time

import tensorstore as ts

from composer import config as config_lib
from composer import leases
from composer import metrics
from composer import params as params_lib
from composer import records
from composer.environments import machines
from composer.environments.tasks import repair
from composer.fleet import workdir as workdir_lib
from composer.inference import engine as engine_lib
from composer.model import tokenizer as tokenizer_lib
from composer.rollout import schedule
from composer.weights import store
from composer.weights import sync

WEIGHTS_POLL_S = 0.05
QUIET_S = 600.0  # without weights for so long, a rollout says so and ends


def engine(experiment: config_lib.Experiment) -> engine_lib.Engine:
  return engine_lib.Engine(
    experiment.model, experiment.numerics, experiment.engine
  )


def open_pool(experiment: config_lib.Experiment) -> machines.Pool:
  """Machines with the runner compiled beforehand."""
  return machines.Pool(experiment.machine, {'runner.py': repair.runner()})


@dataclasses.dataclass
class Rollout:
  """A running rollout role; `start` makes one, `join` waits for its end."""

  experiment: config_lib.Experiment
  kv: ts.KvStore
  engine: engine_lib.Engine
  incarnation: str
  stop: workdir_lib.Stopper
  lanes: metrics.Lanes | None
  on_version: Callable[[int, float], None]
  failure: BaseException | None = None
  scheduler: schedule.Scheduler | None = None
  threads: list[threading.Thread] = dataclasses.field(default_factory=list)

  def join(self, seconds: float = 60.0) -> None:
    """Waits for the threads; raises what made one of them fail."""
    deadline = time.monotonic() + seconds
    for thread in self.threads:
      thread.join(max(0.0, deadline - time.monotonic()))
      if thread.is_alive():
        raise RuntimeError(
          f'thread {thread.name} did not end within {seconds} s'
        )
    self.engine.close()
    self.check()

  def check(self) -> None:
    if self.failure is not None:
      raise self.failure


def start(
  experiment: config_lib.Experiment,
  kv: ts.KvStore,
  stop: workdir_lib.Stopper,
  *,
  sole: bool,
  lanes: metrics.Lanes | None = None,
  on_group: Callable[[records.Group], None] = lambda group: None,
  on_version: Callable[[int, float], None] = lambda version, pause: None,
) -> Rollout:
  """Starts the role's threads.

  Args:
    experiment: all of it.
    kv: the exchange.
    stop: asked all the time.
    sole: this is the cluster's only process, so what its earlier life was
      rolling is free at once.
    lanes: for busy shares.
    on_group: called with each committed group.
    on_version: called with (version, pause in seconds) after each swap.
  """
  incarnation = leases.new_incarnation()
  rollout = Rollout(
    experiment, kv, engine(experiment), incarnation, stop, lanes, on_version
  )
  abandoned = 0
  if sole:
    freed = leases.release_cluster(kv, experiment.fleet.cluster, incarnation)
    abandoned = freed * experiment.rl.group_size
  for name, act in (
    ('weights', lambda: _follow(rollout)),
    (
      'sessions',
      lambda: asyncio.run(_sessions(rollout, abandoned, on_group)),
    ),
  ):
    thread = threading.Thread(
      target=_guard, args=(rollout, act), name=name, daemon=True
    )
    rollout.threads.append(thread)
    thread.start()
  return rollout


def _guard(rollout: Rollout, act: Callable[[], None]) -> None:
  try:
    act()
  except BaseException as error:
    if rollout.failure is None:
      rollout.failure = error
    rollout.stop.stop(f'rollout failed: {error!r}')


def _follow(rollout: Rollout) -> None:
  """Fetches every new version while the engine serves, and activates it."""
  subscriber = sync.Subscriber(rollout.kv, rollout.experiment.weights.form)
  last = time.monotonic()
  problem = ''
  while not rollout.stop():
    try:
      update = subscriber.poll()
      problem = ''
    except (store.BrokenWeights, OSError, TimeoutError) as error:
      # The version has not moved; the next poll tries again from the store.
      update, problem = None, f'; the last error was: {error}'
    if update is None:
      if subscriber.version is None and time.monotonic() - last > QUIET_S:
        raise TimeoutError(
          f'no weights appeared on the exchange within {QUIET_S:.0f} s; is a'
          f' trainer running on it?{problem}'
        )
      time.sleep(WEIGHTS_POLL_S)
      continue
    version, flat = update
    last = time.monotonic()
    widened = engine_lib.widen(params_lib.unnamed(flat))
    rollout.engine.activate(version, widened)
    rollout.engine.wait_active(version)
    rollout.on_version(version, rollout.engine.stats.pause_s)


async def _sessions(
  rollout: Rollout,
  abandoned: int,
  on_group: Callable[[records.Group], None],
) -> None:
  experiment = rollout.experiment
  while rollout.engine.version < 0:
    if rollout.stop():
      return
    await asyncio.sleep(0.02)
  tasks = repair.build_tasks(experiment.tasks).train
  tokenizer = tokenizer_lib.load(experiment.tokenizer)
  pool = open_pool(experiment)
  await pool.open()
  rollout.scheduler = schedule.Scheduler(
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
  )
  try:
    await rollout.scheduler.run(rollout.stop)
  finally:
    await pool.close()
