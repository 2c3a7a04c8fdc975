"""Task directories: what a build writes, as tasks.

  DIR/build.json                    how it was built, and what came of it
  DIR/images/<package>/image.json   name, version, licence, roots, packages
  DIR/images/<package>/files/...    the repository as it was
  DIR/tasks/<id>/task.json          instruction, limits, checks, metadata
  DIR/tasks/<id>/bug.diff           for people: what was done to the repository

A task is an image and the edits of its files. In a session's machine the code is
broken and the hidden tests are cut out of their files; in the clean machine the
tests are whole. Only the one file that had to change is carried over.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import hashlib
import json
import pathlib
import sys
from typing import Any

from composer.config import TasksConfig
from composer.environments.tasks import mutations
from composer.environments.tasks import sources
from composer.environments.tasks import toolbox
from composer.environments.tasks.repair import TaskSet
from composer.records import Task

FORMAT = 1
KIND = 'repository'
TOOLS = (
  'read',
  'list',
  'search',
  'edit',
  'write',
  'shell',
  'run_tests',
  'finish',
)
BY_LINE = ('view', 'replace')  # are offered where `tasks.tools` asks for them
SPEC = toolbox.COMMAND[2]


@dataclasses.dataclass(frozen=True)
class Image:
  """A repository that tasks share; `packages` are those that its tests need."""

  name: str
  version: str
  licence: str
  roots: tuple[str, ...]
  packages: tuple[str, ...]
  files: Mapping[str, bytes]


@dataclasses.dataclass(frozen=True)
class Blueprint:
  """A task as `task.json` has it.

  Attributes:
    id: name of its folder.
    image: name of the image's folder.
    instruction: what the model is asked to do.
    path: the file to change, the only one that is carried to grading.
    broken: edits of the image that break it.
    trimmed: test file -> edits that cut the hidden tests out.
    visible, hidden: tests that a session can run, and all that grade it.
    seconds: limit of a test run.
    signals: those that the true solution gives as well.
    metadata: function, operator, line, package, ...; JSON-able.
  """

  id: str
  image: str
  instruction: str
  path: str
  broken: tuple[mutations.Edit, ...]
  trimmed: Mapping[str, tuple[mutations.Edit, ...]]
  visible: tuple[str, ...]
  hidden: tuple[str, ...]
  seconds: float
  signals: tuple[str, ...]
  metadata: Mapping[str, Any]


def task_of(blueprint: Blueprint, image: Image) -> Task:
  """The task, with everything that its machines need."""
  path = blueprint.path
  right = image.files[path].decode()
  original = {
    x: image.files[x] for x in image.files if sources.is_configuration(x)
  } | {x: image.files[x] for x in image.files if sources.is_test(x)}
  files: dict[str, str | bytes] = {
    **toolbox.files(('pytest', *image.packages)),
    **image.files,
    path: mutations.apply(right, blueprint.broken),
    **{
      test: mutations.apply(image.files[test].decode(), edits)
      for test, edits in blueprint.trimmed.items()
    },
  }
  common = {
    'roots': image.roots,
    'seconds': blueprint.seconds,
  }
  visible = toolbox.spec(
    **common,
    files=files_of(blueprint.visible),
    ids=blueprint.visible,
    asserts='rewrite',
  )
  hidden = toolbox.spec(
    **common,
    files=files_of(blueprint.hidden),
    ids=blueprint.hidden,
    suspects=[path],
    guarded=sorted(original),
    allowed=blueprint.signals,
    canaries=True,
    failing=list(blueprint.metadata.get('failing', ())),
  )
  return Task(
    id=blueprint.id,
    kind=KIND,
    instruction=blueprint.instruction,
    files={**files, SPEC: visible},
    tools=TOOLS,
    test_command=toolbox.COMMAND,
    allowed=(path,),
    hidden_files={**original, SPEC: hidden},
    hidden_command=toolbox.COMMAND,
    metadata={
      **blueprint.metadata,
      'package': image.name,
      'version': image.version,
      'licence': image.licence,
      'solution': {path: right},
      'visible': blueprint.visible,
      'hidden': blueprint.hidden,
      'seconds': blueprint.seconds,
    },
  )


def files_of(tests: tuple[str, ...]) -> list[str]:
  """Files of test ids, in order."""
  return list(dict.fromkeys(x.split('::')[0] for x in tests))


# --- disk --------------------------------------------------------------------


def write_image(folder: pathlib.Path, image: Image) -> str:
  """Writes the image below DIR; returns the name of its folder."""
  name = f'{image.name}-{image.version}'.strip('-').replace('/', '_')
  place = folder / 'images' / name
  for path, data in image.files.items():
    file = place / 'files' / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
  about = {
    key: getattr(image, key)
    for key in ('name', 'version', 'licence', 'roots', 'packages')
  }
  _write(place / 'image.json', {'format': FORMAT, **about, 'python': _python()})
  return name


def read_image(folder: pathlib.Path, name: str) -> Image:
  """Raises ValueError where there is none, or it is of another format."""
  place = folder / 'images' / name
  about = _read(place / 'image.json')
  files = place / 'files'
  return Image(
    name=about['name'],
    version=about['version'],
    licence=about['licence'],
    roots=tuple(about['roots']),
    packages=tuple(about['packages']),
    files={
      path.relative_to(files).as_posix(): path.read_bytes()
      for path in sorted(files.rglob('*'))
      if path.is_file()
    },
  )


def write_task(
  folder: pathlib.Path, blueprint: Blueprint, difference: str
) -> None:
  """Writes the task's folder; `difference` is for people."""
  place = folder / 'tasks' / blueprint.id
  place.mkdir(parents=True, exist_ok=True)
  (place / 'bug.diff').write_text(difference, encoding='utf-8')
  record = dataclasses.asdict(blueprint)
  _write(place / 'task.json', {'format': FORMAT, 'kind': KIND, **record})


def read_task(path: pathlib.Path) -> Blueprint:
  """Reads a `task.json`; raises ValueError as for an image."""
  record = dict(_read(path))
  record.pop('format')
  record.pop('kind', None)
  names = {field.name for field in dataclasses.fields(Blueprint)}
  if set(record) != names:
    raise ValueError(
      f'{path}: fields {sorted(names ^ set(record))} are missing or unknown;'
      ' build the tasks again'
    )
  for name in ('visible', 'hidden', 'signals'):
    record[name] = tuple(record[name])
  record['broken'] = _edits(record['broken'])
  record['trimmed'] = {x: _edits(y) for x, y in record['trimmed'].items()}
  return Blueprint(**record)


def _edits(found: list[Mapping[str, Any]]) -> tuple[mutations.Edit, ...]:
  return tuple(mutations.Edit(**x) for x in found)


def _python() -> str:
  return '.'.join(map(str, sys.version_info[:2]))


def _write(path: pathlib.Path, record: Mapping[str, Any]) -> None:
  """Whole or not at all: a build may be ended at any moment."""
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix('.partial')
  partial.write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')
  partial.replace(path)


def _read(path: pathlib.Path) -> Mapping[str, Any]:
  try:
    record = json.loads(path.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(f'{path} cannot be read: {error}') from error
  if record.get('format') != FORMAT:
    raise ValueError(
      f'{path} has format {record.get("format")!r}, not {FORMAT}; build the'
      ' tasks again'
    )
  return record


# --- the set -----------------------------------------------------------------


def load(folder: pathlib.Path) -> tuple[Task, ...]:
  """Every task of a folder that `composer tasks build` wrote, by id.

  Raises:
    ValueError: there are none, or one cannot be read.
  """
  paths = sorted((folder / 'tasks').glob('*/task.json'))
  if not paths:
    raise ValueError(
      f'{str(folder)!r} holds no tasks; build some: composer tasks build REPO'
      f' --out {folder}'
    )
  images: dict[str, Image] = {}
  tasks = []
  for path in paths:
    blueprint = read_task(path)
    if blueprint.image not in images:
      images[blueprint.image] = read_image(folder, blueprint.image)
    tasks.append(task_of(blueprint, images[blueprint.image]))
  return tuple(tasks)


def find(folder: pathlib.Path, name: str) -> Task:
  """One task by its id; raises ValueError where there is no such task."""
  path = folder / 'tasks' / name / 'task.json'
  if not path.is_file():
    raise ValueError(
      f'{str(folder)!r} holds no task {name!r}; composer tasks ls {folder}'
    )
  blueprint = read_task(path)
  return task_of(blueprint, read_image(folder, blueprint.image))


@functools.lru_cache(maxsize=4)
def build_tasks(config: TasksConfig) -> TaskSet:
  """The tasks of `config.path`, split by function and by bug, from the seed.

  Raises:
    ValueError: as `load`, or nothing is left to train on.
  """
  sets: dict[str, list[Task]] = {
    'train': [],
    'held_out_bugs': [],
    'held_out_functions': [],
  }
  for task in load(pathlib.Path(config.path)):
    about = task.metadata
    where = f'{about["package"]}/{task.allowed[0]}/{about["function"]}'
    split = 'train'
    if _share(config.seed, where) < config.held_out_function_share:
      split = 'held_out_functions'
    elif _share(config.seed, task.id) < config.held_out_bug_share:
      split = 'held_out_bugs'
    metadata = {**about, 'split': split}
    sets[split].append(dataclasses.replace(task, metadata=metadata))
  if not sets['train']:
    raise ValueError(
      f'tasks.path={config.path!r} leaves no task to train on; build more, or'
      ' lower tasks.held_out_function_share and tasks.held_out_bug_share'
    )
  return TaskSet(**{name: tuple(tasks) for name, tasks in sets.items()})


def _share(seed: int, name: str) -> float:
  """A number in [0, 1) that belongs to the name."""
  digest = hashlib.blake2b(f'{seed}/{name}'.encode(), digest_size=6).digest()
  return int.from_bytes(digest) / 2**48
