"""Makes tasks from a repository, as `composer tasks build REPO --out DIR` does.

  1. survey: all tests run three times in machines of their own, once with
     coverage. What passed every time is stable, what passed sometimes is flaky.
  2. candidates: functions that stable tests cover, each with mutations and the
     removal of its body, in an order drawn from the seed.
  3. trial: a candidate is kept if some of its witnesses (the stable tests that
     run its lines) fail, the same ones three times over; if the true solution,
     graded as a session's would be, passes all of them three times over and
     raises no signal that it did not raise before; and if the tests that a
     session would see pass with it.

What a candidate came to is written down at once, so that a build that is ended
goes on where it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
import dataclasses
import difflib
import hashlib
import json
import pathlib
import random
import re
import time
from typing import Any

from composer.config import MachineConfig
from composer.environments.machines import Pool
from composer.environments.tasks import mutations
from composer.environments.tasks import repository
from composer.environments.tasks import sources
from composer.environments.tasks import survey as survey_lib
from composer.environments.tasks import toolbox
from composer.environments.tasks import trimming
from composer.environments.tasks.repository import Blueprint
from composer.environments.tasks.repository import Image
from composer.environments.tasks.survey import REPORT
from composer.environments.tasks.survey import TIMES
from composer.environments.tasks.survey import Options as Options
from composer.environments.tasks.survey import Survey
from composer.records import Task
from composer.rewards import verify

CRUDE = ('wrong_return',)  # everybody sees it: only where there is no other
WITNESSES = 120  # tests that grade a task at most
# In which tasks are tried; a session's and a grading machine need as much.
MACHINE = MachineConfig(
  exec_timeout_s=60.0,
  exec_cpu_s=120.0,
  memory_mb=1024,
  processes=64,
  disk_mb=64,
  output_bytes=65_536,
  warm=1,
)
SURVEY_MEMORY_MB = 3072  # all tests in one process


@dataclasses.dataclass(frozen=True)
class Candidate:
  path: str
  function: mutations.Function
  mutation: mutations.Mutation
  witnesses: tuple[str, ...]

  @property
  def id(self) -> str:
    name = re.sub(r'\W+', '-', self.function.name).strip('-')
    edit = self.mutation.edit
    text = f'{self.path}/{edit.start}/{edit.end}/{edit.text}'
    digest = hashlib.blake2b(text.encode(), digest_size=3).hexdigest()
    module = pathlib.PurePosixPath(self.path).stem
    return f'{module}-{name}-{self.mutation.operator}-{digest}'


class Dropped(Exception):
  """Why a candidate is no task; `reason` is what is counted."""

  def __init__(self, reason: str):
    super().__init__(reason)
    self.reason = reason


async def build(
  source: sources.Source,
  folder: pathlib.Path,
  options: Options,
  report: Callable[[str], None] = lambda line: None,
  machine: MachineConfig = MACHINE,
) -> dict[str, Any]:
  """Builds tasks into `folder`; returns what `build.json` says.

  Raises:
    ValueError: no test passes, or the folder holds a build of something else.
    MachineError: machines fail again and again.
  """
  began = time.monotonic()
  image = Image(
    source.name,
    source.version,
    source.licence,
    source.roots,
    options.packages,
    source.files,
  )
  progress = _open_progress(folder, _identity(source, options))
  name = repository.write_image(folder, image)
  large = dataclasses.replace(
    machine,
    memory_mb=SURVEY_MEMORY_MB,
    exec_cpu_s=2 * options.survey_seconds,
    concurrent=min(options.jobs, TIMES),
  )
  pool = Pool(large, toolbox.harness())
  try:
    survey = await survey_lib.survey(pool, source, image, options, report)
  finally:
    await pool.close()
  config = dataclasses.replace(machine, concurrent=options.jobs + 1)
  pool = Pool(config, toolbox.harness())
  try:
    job = _Job(pool, image, name, survey, options, folder, progress, report)
    queue = candidates(source, survey, options)
    if options.only and not queue:
      raise ValueError(_unmatched(source, survey, options))
    await _try_all(job, queue, began)
  finally:
    await pool.close()
  return _finish(job, time.monotonic() - began)


# --- candidates --------------------------------------------------------------


def candidates(
  source: sources.Source, survey: Survey, options: Options
) -> list[Candidate]:
  """Candidates in the order in which they are tried.

  Every function has its turn before any has a second one: its removed body
  first where it has a docstring, then mutations.
  """
  rng = random.Random(options.seed)
  queues = []
  for path in sorted(survey.lines):
    try:
      text = mutations.Text(source.files[path].decode())
    except (UnicodeDecodeError, SyntaxError, ValueError):
      continue
    for function in mutations.functions(text):
      witnesses = _witnesses(function, survey, path, options)
      if not witnesses:
        continue
      found = mutations.mutations(text, function)
      rng.shuffle(found)
      found.sort(key=lambda x: x.operator in CRUDE)
      removed = mutations.removal(text, function)
      if removed is not None:
        found.insert(0, removed)
      made = [Candidate(path, function, x, witnesses) for x in found]
      made = [x for x in made if re.search(options.only, x.id)]
      queues.append(made[: options.rounds])
  rng.shuffle(queues)
  return [
    queue[turn]
    for turn in range(options.rounds)
    for queue in queues
    if turn < len(queue)
  ]


def _unmatched(source: sources.Source, survey: Survey, options: Options) -> str:
  every = candidates(source, survey, dataclasses.replace(options, only=''))
  known = f', as {every[0].id!r}' if every else ''
  return (
    f'--only={options.only!r} is found in the id of none of {len(every)}'
    f' candidates{known}; ids are MODULE-FUNCTION-OPERATOR-DIGEST'
  )


def _witnesses(
  function: mutations.Function, survey: Survey, path: str, options: Options
) -> tuple[str, ...]:
  """Stable tests that run the function's body, the quickest first."""
  found: set[str] = set()
  for line in function.lines:
    found |= survey.lines[path].get(line, frozenset())
  total, kept = 0.0, []
  for test in sorted(found, key=lambda x: (survey.times[x], x)):
    total += survey.times[test]
    if total <= options.test_seconds and len(kept) < WITNESSES:
      kept.append(test)
  return tuple(sorted(kept))


# --- trials ------------------------------------------------------------------


@dataclasses.dataclass
class _Job:
  """A build under way."""

  pool: Pool
  image: Image
  name: str
  survey: Survey
  options: Options
  folder: pathlib.Path
  progress: dict[str, str]  # candidate -> 'kept', or why not
  report: Callable[[str], None]


async def _try_all(job: _Job, queue: list[Candidate], began: float) -> None:
  """Tries candidates, some at once, until the limit or the time is reached."""
  options = job.options
  ahead = iter([x for x in queue if x.id not in job.progress])

  def wanted() -> bool:
    kept = sum(x == 'kept' for x in job.progress.values())
    late = options.seconds and time.monotonic() - began > options.seconds
    return not late and (not options.limit or kept < options.limit)

  async def work() -> None:
    while wanted():
      candidate = next(ahead, None)
      if candidate is None:
        return
      try:
        blueprint = await _try(job, candidate)
      except Dropped as dropped:
        _note(job, candidate, dropped.reason)
        continue
      if wanted():  # another may have been the last one
        repository.write_task(
          job.folder, blueprint, _difference(job.image, candidate)
        )
        _note(job, candidate, 'kept')

  async with asyncio.TaskGroup() as group:
    for _ in range(options.jobs):
      group.create_task(work())


def _note(job: _Job, candidate: Candidate, verdict: str) -> None:
  job.progress[candidate.id] = verdict
  line = json.dumps({'candidate': candidate.id, 'verdict': verdict})
  with (job.folder / 'progress.jsonl').open('a', encoding='utf-8') as file:
    file.write(line + '\n')
  kept = sum(x == 'kept' for x in job.progress.values())
  job.report(
    f'{kept:4d} kept of {len(job.progress):4d}  {verdict:10} {candidate.id}'
  )


async def _try(job: _Job, candidate: Candidate) -> Blueprint:
  """The candidate's blueprint; raises Dropped."""
  image, path = job.image, candidate.path
  right = image.files[path].decode()
  if not mutations.parses(right, candidate.mutation):
    raise Dropped('unparsed')
  broken = mutations.apply(right, (candidate.mutation.edit,))
  blueprint = _draft(job, candidate)
  task = repository.task_of(blueprint, image)
  failing = await _failures(job.pool, task, broken)
  for _ in range(TIMES - 1):
    if await _failures(job.pool, task, broken) != failing:
      raise Dropped('flaky')
  blueprint = _split(job, candidate, blueprint, failing)
  signals: set[str] = set()
  for turn in range(TIMES):
    task = repository.task_of(blueprint, image)
    grade = await verify.grade(job.pool, task, {path: right.encode()})
    if not grade.solved:
      raise Dropped('flaky')
    if turn and grade.signals:
      raise Dropped('signals')
    signals |= set(grade.signals)
    blueprint = dataclasses.replace(blueprint, signals=tuple(sorted(signals)))
  return await _seen(job.pool, blueprint, image)


async def _seen(pool: Pool, blueprint: Blueprint, image: Image) -> Blueprint:
  """With the visible tests that are left: a class may inherit one cut out."""
  task = repository.task_of(blueprint, image)
  path = blueprint.path
  right = {path: image.files[path].decode()}
  outcomes = await _run(pool, {**task.files, **right}, task.test_command)
  visible = tuple(x for x in blueprint.visible if x in outcomes['outcomes'])
  if any(outcomes['outcomes'][x] != 'passed' for x in visible):
    raise Dropped('visible')  # what was cut out is used by what was not
  return dataclasses.replace(blueprint, visible=visible)


async def _failures(pool: Pool, task: Task, broken: str) -> tuple[str, ...]:
  """Witnesses that fail in the broken repository."""
  files = verify.graded_files(task, {task.allowed[0]: broken.encode()})
  run = await _run(pool, files, task.hidden_command)
  if run['errors']:
    raise Dropped('import')
  failing = tuple(
    x for x in task.metadata['hidden'] if run['outcomes'].get(x) != 'passed'
  )
  if not failing:
    raise Dropped('survived')
  return failing


async def _run(
  pool: Pool, files: Mapping[str, str | bytes], command: Sequence[str]
) -> dict[str, Any]:
  """The report of a run that came to its end."""
  spec = json.loads(files[repository.SPEC])
  reporting = {repository.SPEC: json.dumps({**spec, 'cover': []})}
  result = await pool.execute(
    {**files, **reporting}, command, spec['seconds'] + 10, [REPORT]
  )
  if REPORT not in result.files:
    raise Dropped('lost')
  run = json.loads(result.files[REPORT])
  if run['why'] == 'time':
    raise Dropped('endless')
  if run['why'] != 'end':
    raise Dropped('crash')
  return run


def _draft(job: _Job, candidate: Candidate) -> Blueprint:
  """A blueprint in which nothing is hidden yet."""
  mutation, function = candidate.mutation, candidate.function
  seconds = sum(job.survey.times[x] for x in candidate.witnesses)
  return Blueprint(
    id=candidate.id,
    image=job.name,
    instruction='',
    path=candidate.path,
    broken=(mutation.edit,),
    trimmed={},
    visible=candidate.witnesses,
    hidden=candidate.witnesses,
    seconds=round(10.0 + 5 * seconds, 1),
    signals=(),
    metadata={
      'function': function.name,
      'operator': mutation.operator,
      'line': mutation.line,
      'before': mutation.before,
      'after': mutation.after,
      'memory_mb': job.pool.config.memory_mb,
      'disk_mb': job.pool.config.disk_mb,
    },
  )


def _split(
  job: _Job, candidate: Candidate, draft: Blueprint, failing: Sequence[str]
) -> Blueprint:
  """Hides half of the failing test functions, one at least."""
  groups = sorted({x.partition('[')[0] for x in failing})
  random.Random(f'{job.options.seed}/{candidate.id}').shuffle(groups)
  hide = set(groups[: (len(groups) + 1) // 2])
  trimmed: dict[str, tuple[mutations.Edit, ...]] = {}
  gone: set[str] = set()
  for path in sorted({x.split('::')[0] for x in hide}):
    names = {trimming.function_of(x) for x in hide if x.startswith(path + '::')}
    try:
      text = mutations.Text(job.image.files[path].decode())
    except (UnicodeDecodeError, SyntaxError):
      continue
    edits, found = trimming.cut(text, names)
    if found:
      trimmed[path] = edits
      gone |= {f'{path}::{name}' for name in found}
  if not gone:
    raise Dropped('uncut')
  visible = _companions(job, draft.hidden, gone)
  return dataclasses.replace(
    draft,
    trimmed=trimmed,
    visible=visible,
    instruction=_instruction(candidate, failing, visible, gone),
    metadata={**draft.metadata, 'failing': list(failing)},
  )


def _companions(
  job: _Job, witnesses: Sequence[str], gone: set[str]
) -> tuple[str, ...]:
  """Stable tests of the witnesses' files, but for those cut out."""
  files = {x.split('::')[0] for x in witnesses}
  times = {
    test: seconds
    for test, seconds in job.survey.times.items()
    if test.split('::')[0] in files and test.partition('[')[0] not in gone
  }
  if not times:  # a file of one test: others at least show what still works
    times = dict(job.survey.times)
    for test in [x for x in times if x.partition('[')[0] in gone]:
      del times[test]
  # The witnesses that are left come first, then the quickest.
  order = sorted(times, key=lambda x: (x not in witnesses, times[x], x))
  total, kept = 0.0, []
  for test in order[: 2 * WITNESSES]:
    total += times[test]
    if total <= job.options.test_seconds:
      kept.append(test)
  return tuple(sorted(kept))


def _instruction(
  candidate: Candidate,
  failing: Sequence[str],
  visible: Sequence[str],
  gone: set[str],
) -> str:
  path, name = candidate.path, candidate.function.name
  shown = sum(x in visible for x in failing)
  if candidate.mutation.operator == 'body_removed':
    text = (
      f'The body of `{name}` in `{path}` has been removed. Write it anew, from'
      ' its docstring and from how the rest of the project uses it.'
    )
  else:
    text = (
      f'A recent change to `{path}` broke something: tests of the project that'
      ' passed before fail now. Find the fault and repair it.'
    )
  hidden = ', '.join(sorted(x.rpartition('::')[2] for x in gone)[:6])
  return (
    f'{text} Of {len(failing)} failing tests you can run {shown}; hidden ones'
    f' decide too ({hidden}). Only `{path}` counts: tests and configuration are'
    ' put back before grading.'
  )


def _difference(image: Image, candidate: Candidate) -> str:
  right = image.files[candidate.path].decode()
  broken = mutations.apply(right, (candidate.mutation.edit,))
  return ''.join(
    difflib.unified_diff(
      right.splitlines(keepends=True),
      broken.splitlines(keepends=True),
      f'a/{candidate.path}',
      f'b/{candidate.path}',
    )
  )


# --- the record of a build ---------------------------------------------------


def _identity(source: sources.Source, options: Options) -> dict[str, Any]:
  """What a build that goes on must have in common with its beginning."""
  digest = hashlib.blake2b(digest_size=12)
  for path in sorted(source.files):
    digest.update(f'{path}\0{len(source.files[path])}\0'.encode())
    digest.update(source.files[path])
  return {
    'name': source.name,
    'version': source.version,
    'files': digest.hexdigest(),
    'seed': options.seed,
    'packages': list(options.packages),
  }


def _open_progress(
  folder: pathlib.Path, identity: Mapping[str, Any]
) -> dict[str, str]:
  """Verdicts so far; a new folder begins its record."""
  path = folder / 'progress.jsonl'
  if not path.exists():
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(identity) + '\n', encoding='utf-8')
    return {}
  head, *lines = path.read_text(encoding='utf-8').splitlines()
  if json.loads(head) != identity:
    raise ValueError(
      f'{str(folder)!r} holds tasks of another source, seed or --with'
      f' ({head}); choose another --out'
    )
  verdicts = {}
  for line in lines:
    try:
      record = json.loads(line)
    except ValueError:
      continue  # the build was ended in the middle of it
    verdicts[record['candidate']] = record['verdict']
  return verdicts


def _finish(job: _Job, seconds: float) -> dict[str, Any]:
  counts: dict[str, int] = {}
  for verdict in job.progress.values():
    counts[verdict] = counts.get(verdict, 0) + 1
  kept = counts.pop('kept', 0)
  removed = sum(
    verdict == 'kept' and '-body_removed-' in name
    for name, verdict in job.progress.items()
  )
  result = {
    'source': f'{job.image.name} {job.image.version}',
    'licence': job.image.licence,
    'tests': {
      'stable': len(job.survey.times),
      'flaky': len(job.survey.flaky),
      'not_passing': job.survey.failing,
      'uncollected_files': list(job.survey.errors),
    },
    'tasks': kept,
    'bodies_removed': removed,
    'mutations': kept - removed,
    'dropped': dict(sorted(counts.items())),
    'machines': job.pool.counters.execs,
    'lost_machines': job.pool.counters.failures,
    'seconds': round(seconds, 1),
    'options': {
      **dataclasses.asdict(job.options),
      'packages': list(job.options.packages),
    },
  }
  path = job.folder / 'build.json'
  path.write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
  return result
