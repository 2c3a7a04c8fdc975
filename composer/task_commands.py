"""`composer tasks`: build tasks of a repository, list them, play one.

Only arguments are here; what is heavy is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import contextlib
import os
from pathlib import Path
import re
import sys
from typing import Any

Interruptible = Callable[[], contextlib.AbstractContextManager[None]]


def add(
  commands: Any,
  command: Callable[..., argparse.ArgumentParser],
  interruptible: Interruptible,
) -> None:
  """Adds the command; `command` makes a parser, as `__main__` does."""
  parser = commands.add_parser(
    'tasks',
    help='tasks from a repository',
    description='Make tasks from a repository, list them, or play one.',
  )
  actions = parser.add_subparsers(metavar='ACTION', required=True)
  _add_build(actions, command, interruptible)
  ls = command(actions, 'ls', _ls, 'list tasks that were built')
  ls.add_argument('folder', type=Path, metavar='DIR', help='of a build')
  play = command(
    actions,
    'play',
    lambda arguments: _play(arguments, interruptible),
    'play a session of a task without a model',
  )
  play.add_argument('folder', type=Path, metavar='DIR', help='of a build')
  play.add_argument('task', metavar='ID', help='of a task, as ls shows it')
  play.add_argument(
    '--script',
    type=Path,
    metavar='FILE',
    help='turns to take, as JSON: [[[tool, {argument: value}], ...], ...]'
    ' (default: those of the true solution)',
  )


def _add_build(
  actions: Any,
  command: Callable[..., argparse.ArgumentParser],
  interruptible: Interruptible,
) -> None:
  build = command(
    actions,
    'build',
    lambda arguments: _build(arguments, interruptible),
    'make tasks from a repository with tests',
  )
  build.add_argument(
    'repository',
    type=Path,
    metavar='REPO',
    help='a folder or a source distribution (.tar.gz, .zip)',
  )
  build.add_argument(
    '--out',
    type=Path,
    metavar='DIR',
    required=True,
    help='where they go; a build that was ended goes on there',
  )
  for name, default, text in (
    ('limit', 0, 'tasks at most (default: all that there are)'),
    ('seed', 0, 'of the order in which candidates are tried'),
    ('rounds', 6, 'candidates of one function at most (default: 6)'),
    ('jobs', min(8, os.cpu_count() or 1), 'machines at once'),
    ('seconds', 0, 'for all of it (default: no limit)'),
    ('survey-seconds', 120, 'for one run of all tests (default: 120)'),
  ):
    build.add_argument(
      f'--{name}', type=int, default=default, metavar='N', help=text
    )
  build.add_argument(
    '--only',
    default='',
    metavar='PATTERN',
    help='try candidates in whose id (MODULE-FUNCTION-OPERATOR-...) it is found',
  )
  build.add_argument(
    '--with',
    dest='packages',
    action='append',
    default=[],
    metavar='PACKAGE',
    help='an installed package that the tests need; may be repeated',
  )


def _build(arguments: argparse.Namespace, interruptible: Interruptible) -> int:
  import asyncio

  from composer.environments.machines import MachineError
  from composer.environments.tasks import factory
  from composer.environments.tasks import sources
  from composer.environments.tasks import telling

  for name, least in (
    ('limit', 0),
    ('seconds', 0),
    ('rounds', 1),
    ('jobs', 1),
    ('survey_seconds', 1),
  ):
    value = getattr(arguments, name)
    if value < least:
      option = name.replace('_', '-')
      raise ValueError(f'--{option}={value}; use {least} or more')
  try:
    re.compile(arguments.only)
  except re.error as error:
    raise ValueError(
      f'--only={arguments.only!r} is no regular expression: {error}'
    ) from error
  options = factory.Options(
    limit=arguments.limit,
    seed=arguments.seed,
    jobs=arguments.jobs,
    seconds=arguments.seconds,
    survey_seconds=arguments.survey_seconds,
    packages=tuple(arguments.packages),
    rounds=arguments.rounds,
    only=arguments.only,
  )
  source = sources.read(arguments.repository)
  failures: list[str] = []
  result: dict[str, Any] = {}
  try:
    with interruptible(), telling.progress() as report:
      result = asyncio.run(
        factory.build(source, arguments.out, options, report)
      )
  except* MachineError as errors:
    failures.append(str(errors.exceptions[0]))
  if failures:
    print(f'composer: error: {failures[0]}', file=sys.stderr)
    return 1
  print(telling.outcome(result, arguments.out))
  return 0 if result['tasks'] else 1


def _play(arguments: argparse.Namespace, interruptible: Interruptible) -> int:
  import asyncio

  from composer.environments.tasks import repository
  from composer.rollout import player

  task = repository.find(arguments.folder, arguments.task)
  turns = (
    player.solution(task)
    if arguments.script is None
    else player.read_script(arguments.script)
  )
  with interruptible():
    trajectory = asyncio.run(player.play(task, turns))
  print('\n'.join(player.told(trajectory)))
  return 0 if trajectory.reward_parts['tests'] >= 1 else 1


def _ls(arguments: argparse.Namespace) -> int:
  from composer.environments.tasks import telling

  lines = list(telling.listing(arguments.folder))
  if not lines:
    raise ValueError(
      f'{str(arguments.folder)!r} holds no tasks; build some: composer tasks'
      f' build REPO --out {arguments.folder}'
    )
  print('\n'.join(lines))
  return 0
