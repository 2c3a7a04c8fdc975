"""Tools: what a session offers the model, executed in its machine.

A tool is a spec that the model sees and a function of (machine, task, arguments)
that does it. What the model got wrong is answered in text; only infrastructure
raises (`MachineError`). A task names its tools; where its kind has one of its
own by that name, that one is meant.

  tools_records.py  what a tool is, and what a call gives
  tools_code.py     those of a coding agent
  tools_inside.py   what `list` and `search` do in the machine
  mcp.py            tools of Model Context Protocol servers
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from composer.environments.machines import ExecResult
from composer.environments.machines import Machine
from composer.environments.tasks import repair
from composer.environments.tools_code import CODE_TOOLS
from composer.environments.tools_code import output
from composer.environments.tools_code import shell
from composer.environments.tools_records import Arguments as Arguments
from composer.environments.tools_records import Tool as Tool
from composer.environments.tools_records import ToolResult as ToolResult
from composer.environments.tools_records import tool

if TYPE_CHECKING:
  from composer.records import Task


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
  observe = OBSERVE_TESTS.get(task.kind, output)
  return ToolResult(observe(result))


async def _submit(machine: Machine, task: Task, arguments: Arguments):
  del machine, task, arguments
  return ToolResult('', ends=True)


def _observe_repair(result: ExecResult) -> str:
  return repair.observe_tests(result.stdout, result.exit_code)


OBSERVE_TESTS = {'repair': _observe_repair}
_REPAIR_EDIT = tool(
  'edit',
  _edit,
  'replace the one editable token of a line of the original file',
  ('line', 'line'),
  ('token', 'token'),
)
# `test`, `submit` and `run` are the short names of tasks whose acts are words.
TOOLS: Mapping[str, Tool] = {
  **{known.spec.name: known for known in CODE_TOOLS},
  'test': tool('test', _test, 'run the visible tests'),
  'submit': tool(
    'submit', _submit, 'end the session; what is there now is graded'
  ),
  'run': tool(
    'run', shell, 'run a shell command in the workspace', ('command', 'text')
  ),
  'repair/edit': _REPAIR_EDIT,
}


def choose(task: Task, known: Mapping[str, Tool] = TOOLS) -> dict[str, Tool]:
  """The tools that a task offers, by the names that the model calls.

  Raises:
    ValueError: the task names one that there is not, or one twice.
  """
  chosen: dict[str, Tool] = {}
  for name in task.tools:
    found = known.get(f'{task.kind}/{name}') or known.get(name)
    if found is None:
      plain = ', '.join(x for x in known if '/' not in x)
      raise ValueError(
        f'task {task.id} offers the tool {name!r}, which is not known; the'
        f' tools are {plain}'
      )
    if name in chosen:
      raise ValueError(f'task {task.id} offers the tool {name!r} twice')
    chosen[name] = found
  return chosen
