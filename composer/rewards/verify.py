"""The verifiable reward: hidden tests, in a second and clean machine.

Of a session only the files that its task allows are carried over. Everything
else, tests and their runner included, comes from the task, and the hidden files
are laid over all of it. The command's own words decide: an exit code of 0 is not
enough (the code under test may have ended the process early), its last line must
say that all have passed.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import re
import time
from typing import TYPE_CHECKING

from composer.environments.machines import ExecResult
from composer.environments.machines import Pool

if TYPE_CHECKING:
  from composer.records import Task

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
  """

  solved: bool
  passed: int
  total: int
  seconds: float
  output: str


async def grade(pool: Pool, task: Task, files: Mapping[str, bytes]) -> Grade:
  """Grades the workspace files that a session left.

  Args:
    pool: where the clean machine comes from; a machine that dies is replaced.
    task: with its hidden files and command.
    files: path -> contents; what `task.allowed` does not name is ignored, and a
      file that is missing here is missing there.

  Raises:
    MachineError: infrastructure; never turned into a zero.
  """
  began = time.perf_counter()
  try:
    result = await pool.execute(graded_files(task, files), task.hidden_command)
  except OSError as error:  # what the session left does not fit into a machine
    seconds = time.perf_counter() - began
    return Grade(False, 0, 0, seconds, f'not graded: {error}')
  return read_verdict(result, time.perf_counter() - began)


def graded_files(
  task: Task, files: Mapping[str, bytes]
) -> dict[str, str | bytes]:
  """The clean machine's workspace."""
  given = {p: x for p, x in task.files.items() if p not in task.allowed}
  carried = {p: files[p] for p in task.allowed if p in files}
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
  return Grade(solved, passed, total, seconds, output)
