"""The tasks of an experiment, whatever their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import re

from composer.config import TasksConfig
from composer.environments.tasks import harbor
from composer.environments.tasks import migration
from composer.environments.tasks import repair
from composer.environments.tasks import repository
from composer.environments.tasks import toolbox
from composer.environments.tasks.repair import TaskSet as TaskSet
from composer.records import Task

KINDS: Mapping[str, Callable[[TasksConfig], TaskSet]] = {
  'repair': repair.build_tasks,
  'repository': repository.build_tasks,
  'harbor': harbor.build_tasks,
  'migration': migration.build_tasks,
}
# By kind, those that a task can offer beside its own.
MORE_TOOLS: Mapping[str, tuple[str, ...]] = {
  repository.KIND: repository.BY_LINE
}


def build_tasks(config: TasksConfig) -> TaskSet:
  """The tasks of `config.kind`; a pure function of the config and of its path.

  Raises:
    ValueError: an unknown kind, what the kind itself refuses, or nothing is
      left to train on.
  """
  if config.kind not in KINDS:
    raise ValueError(
      f'tasks.kind is {config.kind!r}; known kinds: {", ".join(KINDS)}'
    )
  found = KINDS[config.kind](config)
  if not (config.only or config.tools):
    return found
  chosen = {
    name: tuple(_offering(x, config) for x in tasks if _wanted(x, config))
    for name, tasks in vars(found).items()
  }
  if not chosen['train']:
    raise ValueError(
      f'tasks.only={config.only!r} leaves none of {len(found.train)} tasks to'
      f' train on, among them {found.train[0].id!r}'
    )
  return TaskSet(**chosen)


def _wanted(task: Task, config: TasksConfig) -> bool:
  try:
    return re.search(config.only, task.id) is not None
  except re.error as error:
    raise ValueError(
      f'tasks.only={config.only!r} is no regular expression: {error}'
    ) from error


def _offering(task: Task, config: TasksConfig) -> Task:
  """The task with the tools of the config, which it must be able to offer."""
  tools = tuple(config.tools.split())
  offered = (*task.tools, *MORE_TOOLS.get(task.kind, ()))
  unknown = [x for x in tools if x not in offered]
  if unknown:
    raise ValueError(
      f'tasks.tools={config.tools!r} names {unknown[0]!r}, which task {task.id}'
      f' does not offer; its tools are {", ".join(offered)}'
    )
  return dataclasses.replace(task, tools=tools) if tools else task


def harness() -> dict[str, str]:
  """Scripts that run in a machine's process 1, for `Pool(config, harness)`."""
  return {'runner.py': repair.runner(), **toolbox.harness()}
