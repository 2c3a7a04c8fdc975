"""Tasks in the directory layout of Harbor (Terminal-Bench 2), without containers.

  task.toml         limits and metadata        instruction.md   the prompt
  environment/      Dockerfile and its context tests/test.sh    writes a reward
  solution/solve.sh what solves it: for demonstrations, never in a machine

Read are tasks whose image is no more than a base with Python or a shell and files
copied into it, and whose tests need no network. Everything else is refused by
name of what it needs: nothing is run that only looks like the task. The image's
working folder is the machine's workspace; `/tests`, `/logs` and the working
folder in scripts are pointed there when the tests run (`harbor_run.py`).
Layout: https://www.harborframework.com/docs/tasks
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import pathlib
import re
import shlex
import tomllib
from typing import Any

from composer.config import TasksConfig
from composer.environments.tasks.repair import TaskSet
from composer.environments.tasks.toolbox import FOLDER
from composer.records import Task

KIND = 'harbor'
TOOLS = (
  'read',
  'list',
  'search',
  'edit',
  'write',
  'shell',
  'finish',
)
RUN = f'{FOLDER}/harbor_run.py'
TESTS = f'{FOLDER}/tests'
BASES = ('python', 'debian', 'ubuntu', 'alpine', 'busybox', 'bash')
IGNORED = ('LABEL', 'MAINTAINER', 'CMD', 'EXPOSE', 'STOPSIGNAL', 'ARG')
NETWORK = re.compile(
  r'\b(?:curl|wget|apt-get|apt|apk|pip3?|uvx?|conda|npm|git\s+clone)\b'
)
WORKDIR = '/app'  # where the image names none
MOST_FILE = 4 << 20


@dataclasses.dataclass(frozen=True)
class Context:
  """What a Dockerfile comes to: the working folder, its files, variables."""

  workdir: str
  files: dict[str, bytes]
  environment: dict[str, str]


def load(folder: pathlib.Path) -> tuple[Task, ...]:
  """The task in a folder, or all tasks in the folders below it, by name.

  Raises:
    ValueError: there are none, or one needs what a machine does not have.
  """
  if (folder / 'task.toml').is_file():
    return (read(folder),)
  found = sorted(x.parent for x in folder.glob('*/task.toml'))
  if not found:
    raise ValueError(
      f'{str(folder)!r} holds no Harbor task (task.toml, instruction.md,'
      ' tests/test.sh), nor folders that do'
    )
  return tuple(read(x) for x in found)


def build_tasks(config: TasksConfig) -> TaskSet:
  """All tasks of `config.path`, to train on; none is held out."""
  return TaskSet(load(pathlib.Path(config.path)), (), ())


def read(folder: pathlib.Path) -> Task:
  """One task; raises ValueError as `load`."""
  about = _toml(folder)
  _check(folder, about)
  context = _image(folder)
  tests = _tree(folder / 'tests')
  script = tests.get('test.sh')
  if script is None:
    raise ValueError(f'{folder.name}: tests/test.sh is missing')
  for name, data in tests.items():
    needed = NETWORK.search(data.decode(errors='replace'))
    if needed and name.endswith('.sh'):
      raise ValueError(
        f'{folder.name}: tests/{name} calls {needed[0]!r}, which needs a network'
        ' that machines do not have; use tests that run with what the image has'
      )
  seconds = float(about.get('verifier', {}).get('timeout_sec', 600.0))
  spec = {
    'workdir': context.workdir,
    'seconds': seconds,
    'environment': {
      **context.environment,
      **about.get('verifier', {}).get('env', {}),
    },
  }
  runner = importlib.resources.files('composer.environments.tasks')
  return Task(
    id=folder.name,
    kind=KIND,
    instruction=_instruction(folder, context.workdir),
    files=context.files,
    tools=TOOLS,
    test_command=(),
    allowed=('*',),
    hidden_files={
      **{f'{TESTS}/{name}': data for name, data in tests.items()},
      RUN: runner.joinpath('harbor_run.py').read_text(encoding='utf-8'),
      f'{FOLDER}/harbor.json': json.dumps(spec),
    },
    hidden_command=('python', RUN, f'{FOLDER}/harbor.json'),
    metadata={
      **about.get('metadata', {}),
      **_solution(folder, context.workdir),
      'name': about.get('task', {}).get('name', folder.name),
      'seconds': seconds,
      'agent_seconds': float(about.get('agent', {}).get('timeout_sec', 600.0)),
      'memory_mb': about.get('environment', {}).get('memory_mb', 2048),
    },
  )


def _toml(folder: pathlib.Path) -> dict[str, Any]:
  path = folder / 'task.toml'
  try:
    return tomllib.loads(path.read_text(encoding='utf-8'))
  except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
    raise ValueError(f'{path} cannot be read: {error}') from error


def _check(folder: pathlib.Path, about: dict[str, Any]) -> None:
  """Refuses what would need a container engine, before anything is read."""
  environment = about.get('environment', {})
  for name, needs in (
    ('docker_image', 'an image from a registry'),
    ('gpus', 'a GPU'),
  ):
    if environment.get(name):
      raise ValueError(
        f'{folder.name}: environment.{name}={environment[name]!r} needs'
        f' {needs}; run it where a container engine is'
      )
  if 'steps' in about or (folder / 'steps').is_dir():
    raise ValueError(f'{folder.name}: tasks of several steps are not read')
  for name in ('docker-compose.yaml', 'docker-compose.yml'):
    if (folder / 'environment' / name).exists():
      raise ValueError(
        f'{folder.name}: environment/{name} needs a container engine'
      )


def _instruction(folder: pathlib.Path, workdir: str) -> str:
  try:
    text = (folder / 'instruction.md').read_text(encoding='utf-8')
  except OSError as error:
    raise ValueError(f'{folder.name}: no instruction.md ({error})') from error
  return (
    f'{text.rstrip()}\n\n(`{workdir}` is your workspace, the folder in which'
    ' commands run and to which paths are relative.)'
  )


def _solution(folder: pathlib.Path, workdir: str) -> dict[str, str]:
  """The script that solves the task, its paths as they are in a workspace."""
  try:
    text = (folder / 'solution' / 'solve.sh').read_text(encoding='utf-8')
  except (OSError, UnicodeDecodeError):
    return {}
  pattern = rf'(?<![\w./-]){re.escape(workdir)}(?![\w-])'
  return {'solve': re.sub(pattern, '.', text)}


def _tree(folder: pathlib.Path) -> dict[str, bytes]:
  files = {}
  for path in sorted(folder.rglob('*')) if folder.is_dir() else ():
    if path.is_file() and not path.is_symlink():
      if path.stat().st_size > MOST_FILE:
        raise ValueError(f'{path} is larger than {MOST_FILE >> 20} MB')
      files[path.relative_to(folder).as_posix()] = path.read_bytes()
  return files


# --- the image ---------------------------------------------------------------


def _image(folder: pathlib.Path) -> Context:
  """What environment/Dockerfile makes of its context."""
  path = folder / 'environment' / 'Dockerfile'
  context = _tree(folder / 'environment')
  if 'Dockerfile' not in context:
    return Context(WORKDIR, context, {})
  text = context.pop('Dockerfile').decode(errors='replace')
  text = re.sub(r'^\s*#.*\n', '', text, flags=re.M)
  image = Context(WORKDIR, {}, {})
  for line in re.sub(r'\\\s*\n', ' ', text).splitlines():
    if line.strip():
      image = _instructed(folder.name, path, image, line.strip(), context)
  return image


def _instructed(
  task: str,
  path: pathlib.Path,
  image: Context,
  line: str,
  context: dict[str, bytes],
) -> Context:
  """The image after one instruction."""
  word, _, rest = line.partition(' ')
  word, rest = word.upper(), rest.strip()
  if word == 'FROM':
    base = rest.split()[0].rpartition('/')[2].split(':')[0]
    if base in BASES and len(rest.split()) == 1:
      return image
  elif word == 'WORKDIR':
    if not image.files:
      return dataclasses.replace(image, workdir=rest.rstrip('/') or '/')
  elif word == 'ENV':
    pairs = dict(x.partition('=')[::2] for x in shlex.split(rest))
    return dataclasses.replace(
      image, environment={**image.environment, **pairs}
    )
  elif word in ('COPY', 'ADD') and not rest.startswith('--'):
    *sources, target = shlex.split(rest)
    files = _copied(image.workdir, sources, target, context)
    if files is not None:
      return dataclasses.replace(image, files={**image.files, **files})
  elif word == 'RUN' and re.fullmatch(r'mkdir -p [^;&|$]+', rest):
    return image  # a folder is made with its first file
  elif word in IGNORED:
    return image
  raise ValueError(
    f'{task}: {path.name} says {line[:80]!r}, which needs a container engine;'
    f' read are FROM {"|".join(BASES)}, one WORKDIR, ENV, and COPY of files'
    ' below it'
  )


def _copied(
  workdir: str, sources: list[str], target: str, context: dict[str, bytes]
) -> dict[str, bytes] | None:
  """Workspace path -> contents; None where it is not in the workspace."""
  place = target if target.startswith('/') else f'{workdir}/{target}'
  folder = place.endswith(('/', '/.')) or len(sources) > 1
  place = re.sub(r'/(\./?|)$', '', place)
  if place != workdir and not place.startswith(workdir + '/'):
    return None
  place = place.removeprefix(workdir).strip('/')
  found = {}
  for source in sources:
    source = source.removeprefix('./').strip('/')
    if source in context:
      name = source.rsplit('/', 1)[-1]
      whole = folder or not place
      found['/'.join(x for x in (place, name) if x) if whole else place] = (
        context[source]
      )
      continue
    prefix = '' if source in ('', '.') else source + '/'
    below = {x: y for x, y in context.items() if x.startswith(prefix)}
    if not below:
      return None
    for name, data in below.items():
      rest = name.removeprefix(prefix)
      found['/'.join(x for x in (place, rest) if x)] = data
  return found
