"""What `composer tasks` prints: progress of a build, its outcome, a listing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import contextlib
import pathlib
import sys
import time
from typing import Any

from composer.environments.tasks import repository

EVERY_S = 10.0  # between two lines of progress where nobody watches


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
  """A function that shows a line: in place on a terminal, else now and then.

  A line that begins with a blank is progress, any other one is always printed.
  """
  live = sys.stderr.isatty()
  last = [0.0]

  def report(line: str) -> None:
    if not line.startswith(' '):
      print(line, file=sys.stderr, flush=True)
    elif live:
      print(f'\r\033[K{line[:100]}', end='', file=sys.stderr, flush=True)
    elif time.monotonic() - last[0] >= EVERY_S:
      last[0] = time.monotonic()
      print(line, file=sys.stderr, flush=True)

  yield report
  if live:
    print('\r\033[K', end='', file=sys.stderr, flush=True)


def outcome(result: Mapping[str, Any], folder: pathlib.Path) -> str:
  """The end of a build in a few lines."""
  tests, dropped = result['tests'], result['dropped']
  tried = result['tasks'] + sum(dropped.values())
  lines = [
    f'{result["tasks"]} tasks of {result["source"]} ({result["licence"] or "?"})'
    f' in {folder}: {result["bodies_removed"]} bodies removed,'
    f' {result["mutations"]} mutations',
    f'  tests: {tests["stable"]} stable, {tests["flaky"]} flaky,'
    f' {tests["not_passing"]} not passing',
    f'  candidates: {tried} tried, {sum(dropped.values())} dropped'
    + (f' ({", ".join(f"{y} {x}" for x, y in dropped.items())})')
    * bool(dropped),
    f'  {result["machines"]} machines, {result["seconds"]} s',
  ]
  return '\n'.join(lines)


def listing(folder: pathlib.Path) -> Iterator[str]:
  """A line a task: its id, what was done, tests that fail of those that grade."""
  for path in sorted((folder / 'tasks').glob('*/task.json')):
    blueprint = repository.read_task(path)
    about = blueprint.metadata
    what = ''
    if about['operator'] != 'body_removed':
      before, after = (' '.join(about[x].split()) for x in ('before', 'after'))
      what = f'  {before[:30]} -> {after[:30]}'
    yield (
      f'{blueprint.id:60} {len(about["failing"]):3d} of'
      f' {len(blueprint.hidden):3d} tests fail{what}'
    )
