"""The tasks of an experiment, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from composer.config import TasksConfig
from composer.environments.tasks import harbor
from composer.environments.tasks import migration
from composer.environments.tasks import repair
from composer.environments.tasks import repository
from composer.environments.tasks import toolbox
from composer.environments.tasks.repair import TaskSet as TaskSet

KINDS: Mapping[str, Callable[[TasksConfig], TaskSet]] = {
  'repair': repair.build_tasks,
  'repository': repository.build_tasks,
  'harbor': harbor.build_tasks,
  'migration': migration.build_tasks,
}


def build_tasks(config: TasksConfig) -> TaskSet:
  """The tasks of `config.kind`; a pure function of the config and of its path.

  Raises:
    ValueError: an unknown kind, or what the kind itself refuses.
  """
  if config.kind not in KINDS:
    raise ValueError(
      f'tasks.kind is {config.kind!r}; known kinds: {", ".join(KINDS)}'
    )
  return KINDS[config.kind](config)


def harness() -> dict[str, str]:
  """Scripts that run in a machine's process 1, for `Pool(config, harness)`."""
  return {'runner.py': repair.runner(), **toolbox.harness()}
