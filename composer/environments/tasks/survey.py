"""What the tests of a repository do as they are: `survey`.

All of them run three times in machines of their own, once with coverage. What
passed every time is stable, what passed sometimes is flaky.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import json
import re
from typing import Any

from composer.environments.machines import ExecResult
from composer.environments.machines import Pool
from composer.environments.tasks import repository
from composer.environments.tasks import sources
from composer.environments.tasks import toolbox
from composer.environments.tasks.repository import Image

TIMES = 3  # that everything is seen before it is believed
REPORT = f'{toolbox.FOLDER}/report.json'


@dataclasses.dataclass(frozen=True)
class Options:
  """How tasks are built.

  Attributes:
    limit: tasks to keep at most; 0 for all that there are.
    seed: of the order of candidates.
    jobs: machines at once.
    seconds: for all of it; what is done by then stays. 0: no limit.
    survey_seconds: for one run of all tests.
    test_seconds: sum of the times of the tests of one task.
    packages: installed packages that the tests need.
    rounds: candidates of one function at most.
    only: a pattern; candidates in whose id it is not found are not tried.
  """

  limit: int = 0
  seed: int = 0
  jobs: int = 2
  seconds: float = 0.0
  survey_seconds: float = 120.0
  test_seconds: float = 8.0
  packages: tuple[str, ...] = ()
  rounds: int = 6
  only: str = ''


@dataclasses.dataclass(frozen=True)
class Survey:
  """What the tests do as they are.

  `times` are seconds by stable test; `lines` is path -> line -> stable tests.
  """

  times: Mapping[str, float]
  flaky: tuple[str, ...]
  failing: int
  errors: tuple[str, ...]
  lines: Mapping[str, Mapping[int, frozenset[str]]]


async def survey(
  pool: Pool,
  source: sources.Source,
  image: Image,
  options: Options,
  report: Callable[[str], None],
) -> Survey:
  runs = await asyncio.gather(
    *(_run_all(pool, source, image, options, n == 0) for n in range(TIMES))
  )
  every = set().union(*(run['outcomes'] for run in runs))
  passed = [
    {x for x, y in run['outcomes'].items() if y == 'passed'} for run in runs
  ]
  stable = set.intersection(*passed)
  flaky = set.union(*passed) - stable
  errors = tuple(x['error'] for x in runs[1]['errors'])
  report(
    f'{source.name} {source.version}: {len(every)} tests, {len(stable)} pass'
    f' {TIMES} times over, {len(flaky)} are flaky,'
    f' {len(every) - len(stable) - len(flaky)} do not pass; {len(errors)} files'
    ' cannot be collected' + missing(runs[1]['errors'])
  )
  if not stable:
    why = runs[1]['errors'][0]['text'] if errors else runs[1]['said']
    raise ValueError(
      f'no test of {source.name} passes here, so none can witness a task. A'
      ' package that the tests need is given by --with NAME (installed here).'
      f' The first trouble: {why[-400:]}'
    )
  lines: dict[str, dict[int, frozenset[str]]] = {}
  for path, found in runs[0]['lines'].items():
    names = found['names']
    lines[path] = {
      int(n): frozenset(names[x] for x in tests) & stable
      for n, tests in found['lines'].items()
    }
  times = {x: runs[1]['times'][x] for x in stable}
  return Survey(
    times, tuple(sorted(flaky)), len(every - stable - flaky), errors, lines
  )


def missing(errors: Sequence[Mapping[str, str]]) -> str:
  """Which packages the files would need, and how they are given."""
  found = {
    name.split('.')[0]
    for error in errors
    for name in re.findall(r"No module named '([\w.]+)'", error['text'])
  }
  if not found:
    return ''
  given = ' '.join(f'--with {name}' for name in sorted(found))
  return f' for want of {", ".join(sorted(found))} (install, and give {given})'


async def _run_all(
  pool: Pool,
  source: sources.Source,
  image: Image,
  options: Options,
  covered: bool,
) -> dict[str, Any]:
  packages = ('pytest', *image.packages, *(('coverage',) if covered else ()))
  files: dict[str, str | bytes] = {
    **toolbox.files(packages),
    **image.files,
    repository.SPEC: toolbox.spec(
      roots=image.roots,
      files=source.tests,
      seconds=options.survey_seconds,
      cover=list(source.modules) if covered else [],
    ),
  }
  limit = options.survey_seconds + 10
  result = await pool.execute(files, toolbox.COMMAND, limit, [REPORT])
  if REPORT not in result.files:
    raise ValueError(
      f'the tests of {source.name} could not be run: {_said(result)}'
    )
  run = json.loads(result.files[REPORT])
  if run['why'] == 'time':
    raise ValueError(
      f'the tests of {source.name} took more than'
      f' {options.survey_seconds:g} s (or the memory of a machine); raise'
      ' --survey-seconds'
    )
  return {**run, 'said': _said(result)}


def _said(result: ExecResult) -> str:
  return (result.stdout + result.stderr).strip()[-600:]
