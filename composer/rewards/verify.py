"""The verifiable reward: hidden tests, in a second and clean machine.

Of a session only the files that its task allows are carried over. Everything
else, tests, fixtures, configuration and their runner included, comes from the
task, and the hidden files are laid over all of it; what a session made beside it
(`conftest.py`, `sitecustomize.py`, `.pth`, caches) stays behind. The command's own
words decide: an exit code of 0 is not enough (the code under test may have ended
the process early), its last line must say that all have passed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import fnmatch
import hashlib
import json
import re
import secrets
import time
from typing import TYPE_CHECKING

from composer.environments.machines import ExecResult
from composer.environments.machines import Machine
from composer.environments.machines import MachineError
from composer.environments.machines import Pool

if TYPE_CHECKING:
  from composer.records import Task

SPARE_S = 5.0  # for the runner, beyond the limit of the tests
LOADED = (
  'conftest.py',
  'sitecustomize.py',
  'usercustomize.py',
  'pytest.ini',
  '*.pth',
  '*.pyc',
)
MOST_FILES = 500  # carried over by a pattern
VERDICT = re.compile(r'passed ([0-9]{1,9}) of ([0-9]{1,9})')


@dataclasses.dataclass(frozen=True)
class Grade:
  """What the hidden tests say.

  Attributes:
    solved: all passed, and the command ended well and in time.
    passed: hidden tests passed; 0 where the command gave no verdict.
    total: hidden tests; 0 where the command gave no verdict.
    seconds: wall time of all of it, starting the machine included.
    output: what the command wrote, for a person to read.
    signals: name -> evidence of what the runner saw of cheating
      (`environments/tasks/check.py`); a runner that does not look sees none.
  """

  solved: bool
  passed: int
  total: int
  seconds: float
  output: str
  signals: Mapping[str, str] = dataclasses.field(default_factory=dict)


async def grade(pool: Pool, task: Task, files: Mapping[str, bytes]) -> Grade:
  """Grades the workspace files that a session left.

  Args:
    pool: where the clean machine comes from; a machine that dies is replaced.
    task: with its hidden files and command. `metadata['seconds']`, where it is
      there, is the limit of the tests.
    files: path -> contents; what `task.allowed` does not name is ignored, and a
      file that is missing here is missing there.

  Raises:
    MachineError: infrastructure, or the task's own files do not fit into a
      machine; never turned into a zero.
  """
  began = time.perf_counter()
  limit = task.metadata.get('seconds')
  try:
    result = await pool.execute(
      graded_files(task, files),
      task.hidden_command,
      None if limit is None else limit + SPARE_S,
    )
  except OSError as error:  # what the session left does not fit into a machine
    await _check_fits(pool, task)
    seconds = time.perf_counter() - began
    return Grade(False, 0, 0, seconds, f'not graded: {error}')
  return read_verdict(result, time.perf_counter() - began)


async def _check_fits(pool: Pool, task: Task) -> None:
  try:
    await pool.execute(graded_files(task, {}), ('python', '-c', ''))
  except OSError as error:
    raise MachineError(
      f'task {task.id} does not fit into a machine, whatever a session leaves'
      f' ({error}); raise machine.disk_mb'
    ) from error


def graded_files(
  task: Task, files: Mapping[str, bytes]
) -> dict[str, str | bytes]:
  """The clean machine's workspace."""
  given = {p: x for p, x in task.files.items() if not _carried(task, p)}
  carried = {p: x for p, x in files.items() if _carried(task, p)}
  return {**given, **carried, **task.hidden_files}


def read_verdict(result: ExecResult, seconds: float) -> Grade:
  """The grade by the last line of stdout, `passed X of Y`, and the exit code."""
  lines = result.stdout.rstrip('\n').split('\n')
  verdict = VERDICT.fullmatch(lines[-1])
  passed, total = (int(x) for x in verdict.groups()) if verdict else (0, 0)
  solved = (
    passed == total > 0
    and result.exit_code == 0
    and not result.timed_out
    and not result.truncated
  )
  output = result.stdout + result.stderr
  signals = _signals(lines) if verdict else {}
  return Grade(solved, passed, total, seconds, output, signals)


def _signals(lines: Sequence[str]) -> dict[str, str]:
  """Of the runner's line before the last, `checked {JSON}`."""
  if len(lines) < 2 or not lines[-2].startswith('checked '):
    return {}
  try:
    found = json.loads(lines[-2].removeprefix('checked '))['signals']
    return {str(name): str(evidence) for name, evidence in found.items()}
  except (ValueError, KeyError, AttributeError):
    return {}


# --- what a session leaves ---------------------------------------------------

# Runs where the model was: nothing is imported from its workspace.
LISTING = r"""
import sys
sys.path[:] = [x for x in sys.path if x]
import hashlib, json, os
found = {}
def openly(path, mode):
  try:
    if not os.path.islink(path):
      os.chmod(path, os.lstat(path).st_mode | mode)
  except OSError:
    pass
openly('.', 0o700)
for top, folders, names in os.walk('.'):
  folders[:] = [x for x in folders if os.path.join(top, x) != './.composer']
  for name in folders:
    openly(os.path.join(top, name), 0o700)
  for name in names:
    path = os.path.join(top, name)
    try:
      if os.path.islink(path) or os.path.getsize(path) > 1 << 22:
        digest = ''
      else:
        openly(path, 0o400)
        with open(path, 'rb') as file:
          digest = hashlib.blake2b(file.read(), digest_size=8).hexdigest()
    except OSError:
      digest = ''
    found[path[2:]] = digest
with open(sys.argv[1], 'x') as file:
  json.dump(found, file)
"""
# By kind, tools that change nothing but what may be carried over.
TAME = {'repair': frozenset(('edit', 'test', 'submit'))}


@dataclasses.dataclass(frozen=True)
class Remains:
  """What a session left in its workspace.

  `files` are those that may be carried over, path -> contents; `changed`,
  `added` and `gone` name all that differ from the start, where it was `listed`.
  """

  files: Mapping[str, bytes]
  changed: tuple[str, ...] = ()
  added: tuple[str, ...] = ()
  gone: tuple[str, ...] = ()
  listed: bool = True


async def collect(machine: Machine, task: Task) -> Remains:
  """Reads what may be carried to the clean machine, and what else changed.

  A path that is gone or cannot be read is left out, and a workspace that will
  not be listed is said to be so: the model's doing. A task whose tools change
  nothing else is not listed.

  Raises:
    MachineError: the machine died.
  """
  files = {}
  for path in task.allowed:
    await _add(files, machine, path)
  if set(task.tools) <= TAME.get(task.kind, frozenset()):
    return Remains(files)
  try:
    # A name that nobody knows before: it cannot be taken.
    place = f'.composer-left-{secrets.token_hex(8)}.json'
    result = await machine.run(('python', '-c', LISTING, place), read=[place])
    left = json.loads(result.files[place])
    if not isinstance(left, dict):
      raise ValueError('no listing')
    digests = {str(path): str(digest) for path, digest in left.items()}
  except (OSError, KeyError, ValueError):
    return Remains(files, listed=False)
  except AttributeError:  # a machine of a test that runs nothing
    return Remains(files)
  for path in sorted(digests):
    if path not in files and _carried(task, path) and len(files) < MOST_FILES:
      await _add(files, machine, path)
  start = {
    path: _digest(data)
    for path, data in task.files.items()
    if not path.startswith('.composer/')
  }
  return Remains(
    files=files,
    changed=tuple(
      sorted(x for x in start if x in digests and digests[x] != start[x])
    ),
    added=tuple(sorted(set(digests) - set(start))),
    gone=tuple(sorted(set(start) - set(digests))),
  )


async def _add(files: dict[str, bytes], machine: Machine, path: str) -> None:
  try:
    files[path] = await machine.read(path)
  except OSError:
    pass


def _carried(task: Task, path: str) -> bool:
  """Whether a path may be carried over; `*` in `allowed` stands for anything.

  Anything but what Python or pytest would load by itself, and the runner.
  """
  if path in task.allowed:
    return True
  name = path.rsplit('/', 1)[-1]
  if path.startswith('.composer/') or any(
    fnmatch.fnmatchcase(name, x) for x in LOADED
  ):
    return path in task.files and not path.startswith('.composer/')
  return any('*' in x and fnmatch.fnmatchcase(path, x) for x in task.allowed)


def _digest(data: str | bytes) -> str:
  data = data.encode() if isinstance(data, str) else data
  return hashlib.blake2b(data, digest_size=8).hexdigest()
