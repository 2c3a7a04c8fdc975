"""Tools: what a session offers the model, executed in its machine.

A tool is a spec that the model sees and a function of (machine, task, arguments)
that does it. What the model got wrong is answered in text; only infrastructure
raises (`MachineError`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
import dataclasses
import time
from typing import TYPE_CHECKING

from composer.chat import ToolSpec
from composer.environments.machines import ExecResult
from composer.environments.machines import Machine
from composer.environments.tasks import repair

if TYPE_CHECKING:
  from composer.records import Task

Arguments = Mapping[str, str | int]


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """What a call did.

  Attributes:
    text: the observation, before it is cut to the session's limit.
    ends: the session is over.
    ok: the tool could do what was asked (a failing test is ok).
    seconds: wall time that it took.
  """

  text: str
  ends: bool = False
  ok: bool = True
  seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool; `run` raises MachineError and nothing else that is expected."""

  spec: ToolSpec
  run: Callable[[Machine, Task, Arguments], Awaitable[ToolResult]]


async def _edit(machine: Machine, task: Task, arguments: Arguments):
  """Patches the original of the task's one editable file.

  Staged: it reaches the machine with the next command or read, in one message.
  """
  path = task.allowed[0]
  original = task.files[path]
  edit = repair.apply_edit(
    original, original, arguments['line'], str(arguments['token'])
  )
  if not edit.error:
    machine.stage(path, edit.text)
  return ToolResult(repair.observe_edit(edit.error), ok=not edit.error)


async def _test(machine: Machine, task: Task, arguments: Arguments):
  del arguments
  result = await machine.run(task.test_command)
  observe = OBSERVE_TESTS.get(task.kind, _observe_output)
  return ToolResult(observe(result))


async def _submit(machine: Machine, task: Task, arguments: Arguments):
  del machine, task, arguments
  return ToolResult('', ends=True)


async def _read(machine: Machine, task: Task, arguments: Arguments):
  del task
  data = await machine.read(str(arguments['path']))
  return ToolResult(' ' + data.decode(errors='replace'))


async def _write(machine: Machine, task: Task, arguments: Arguments):
  del task
  await machine.write(str(arguments['path']), str(arguments['text']))
  return ToolResult(' ok')


async def _run(machine: Machine, task: Task, arguments: Arguments):
  del task
  command = str(arguments['command'])
  result = await machine.run(('sh', '-c', command))
  return ToolResult(_observe_output(result), ok=result.exit_code == 0)


def _observe_repair(result: ExecResult) -> str:
  return repair.observe_tests(result.stdout, result.exit_code)


def _observe_output(result: ExecResult) -> str:
  """Output, then how it ended where that is worth a word."""
  lines = [result.stdout.rstrip(), result.stderr.rstrip()]
  if result.truncated:
    lines.append('(output truncated)')
  if result.timed_out:
    lines.append(f'(killed after {result.seconds:.1f} s)')
  elif result.exit_code:
    lines.append(f'(exit code {result.exit_code})')
  return ' ' + ('\n'.join(x for x in lines if x) or 'ok')


OBSERVE_TESTS: Mapping[str, Callable[[ExecResult], str]] = {
  'repair': _observe_repair
}


def _timed(function) -> Callable[..., Awaitable[ToolResult]]:
  """Adds the seconds; turns what the model asked for in vain into text."""

  async def run(
    machine: Machine, task: Task, arguments: Arguments
  ) -> ToolResult:
    began = time.perf_counter()
    try:
      result = await function(machine, task, arguments)
    except FileNotFoundError:
      result = ToolResult(' error no such file', ok=False)
    except (OSError, ValueError) as error:
      reason = getattr(error, 'strerror', None) or str(error)
      result = ToolResult(f' error {reason}', ok=False)
    return dataclasses.replace(result, seconds=time.perf_counter() - began)

  return run


def _tool(function, description: str, *parameters: tuple[str, str]) -> Tool:
  name = function.__name__.lstrip('_')
  return Tool(ToolSpec(name, description, parameters), _timed(function))


TOOLS: Mapping[str, Tool] = {
  tool.spec.name: tool
  for tool in (
    _tool(
      _edit,
      'replace the one editable token of a line of the original file',
      ('line', 'line'),
      ('token', 'token'),
    ),
    _tool(_test, 'run the visible tests'),
    _tool(_submit, 'end the session; what is there now is graded'),
    _tool(_read, 'show a file', ('path', 'path')),
    _tool(
      _write, 'replace a file by a text', ('path', 'path'), ('text', 'text')
    ),
    _tool(_run, 'run a shell command', ('command', 'text')),
  )
}
