"""The evaluation role: pinned versions on held-out sets, on a thread of its own.

It has an engine and machines of its own, so that the version under test does
not move while its sessions run, and rollouts do not wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import pathlib
from typing import Any

from composer import checkpoint as checkpoint_lib
from composer import config as config_lib
from composer import evaluate
from composer import params as params_lib
from composer import records
from composer.environments.tasks import repair
from composer.fleet import rollout
from composer.inference import engine as engine_lib
from composer.model import tokenizer as tokenizer_lib
from composer.model import transformer
from composer.rollout import scripted

OnSession = Callable[[records.Trajectory], None]


def sets(
  experiment: config_lib.Experiment,
) -> dict[str, tuple[records.Task, ...]]:
  """The held-out sets by name."""
  tasks = repair.build_tasks(experiment.tasks)
  return {
    'held_out_bugs': tasks.held_out_bugs,
    'held_out_functions': tasks.held_out_functions,
  }


def evaluate_params(
  experiment: config_lib.Experiment,
  params: Any,
  version: int,
  sessions: int,
  names: Sequence[str] | None = None,
  on_session: OnSession = lambda trajectory: None,
) -> list[evaluate.Result]:
  """Evaluates published parameters on the held-out sets."""
  engine = rollout.engine(experiment)
  try:
    engine.activate(version, engine_lib.widen(params))
    engine.wait_active(version)
    return asyncio.run(
      _evaluate(experiment, engine, sessions, names, on_session)
    )
  finally:
    engine.close()


def evaluate_scripted(
  experiment: config_lib.Experiment, sessions: int
) -> dict[str, list[evaluate.Result]]:
  """What needs no learning: the demonstrator and a blind guesser."""
  tokenizer = tokenizer_lib.load(experiment.tokenizer)
  held_out = sets(experiment)
  known = scripted.answers([t for tasks in held_out.values() for t in tasks])
  agents: Mapping[str, records.Sampler] = {
    'demonstrator': scripted.Demonstrator(tokenizer, experiment, known),
    'blind guesser': scripted.BlindGuesser(tokenizer, experiment),
  }
  return {
    name: asyncio.run(
      _evaluate(experiment, agent, sessions, None, lambda trajectory: None)
    )
    for name, agent in agents.items()
  }


async def _evaluate(
  experiment: config_lib.Experiment,
  sampler: records.Sampler,
  sessions: int,
  names: Sequence[str] | None,
  on_session: OnSession,
) -> list[evaluate.Result]:
  tokenizer = tokenizer_lib.load(experiment.tokenizer)
  pool = rollout.open_pool(experiment)
  await pool.open()
  try:
    return [
      await evaluate.evaluate(
        name,
        sampler,
        pool,
        tasks,
        tokenizer,
        experiment,
        sessions,
        on_session=on_session,
      )
      for name, tasks in sets(experiment).items()
      if names is None or name in names
    ]
  finally:
    await pool.close()


def run(experiment: config_lib.Experiment, *, checkpoint: pathlib.Path) -> int:
  """`composer eval`: a checkpoint's solve rates, printed.

  Args:
    experiment: sets, budgets, sessions (`eval.sessions`).
    checkpoint: a directory of checkpoints (the newest is taken), or the
      workdir of a run.

  Raises:
    ValueError: no checkpoint there, or one of another model.
  """
  experiment = config_lib.validate(experiment)
  spec = transformer.spec(experiment.model)
  identity = checkpoint_lib.identity(
    experiment.model, tokenizer_lib.load(experiment.tokenizer).fingerprint
  )
  directory = next(
    (
      path
      for path in (
        checkpoint / 'checkpoints' / 'rl',
        checkpoint / 'checkpoints' / 'midtrain',
      )
      if path.is_dir() and checkpoint_lib.latest(str(path)) is not None
    ),
    checkpoint,
  )
  params, step = checkpoint_lib.restore_params(
    str(directory), params_lib.abstract(spec), identity=identity
  )
  published = params_lib.to_published(spec, params)
  print(f'{directory}, step {step}', flush=True)
  for result in evaluate_params(
    experiment, published, 0, experiment.eval.sessions
  ):
    print(
      f'{result.name}: {result.solve_rate:.3f} ± {result.solve_rate_se:.3f}'
      f' solved, best of {result.k} {result.best_of_k:.3f}'
      f' ({result.sessions} sessions)',
      flush=True,
    )
  return 0
