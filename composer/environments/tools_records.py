"""What a tool is, and what a call of it gives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
import dataclasses
import time
from typing import TYPE_CHECKING, Any

from composer.chat import ToolSpec
from composer.environments.machines import Machine

if TYPE_CHECKING:
  from composer.records import Task

Arguments = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class ToolResult:
  """What a call did.

  Attributes:
    text: the observation, before it is cut to the session's limit.
    ends: the session is over.
    ok: the tool could do what was asked (a failing test is ok).
    seconds: wall time that it took.
    todo: the session's todo list from now on; None leaves it as it is.
  """

  text: str
  ends: bool = False
  ok: bool = True
  seconds: float = 0.0
  todo: str | None = None


@dataclasses.dataclass(frozen=True)
class Tool:
  """A tool; what `run` raises is infrastructure (`MachineError`, or typed).

  `reads` says that a call changes nothing in the world: calls of such tools
  that follow one another in a turn run side by side.
  """

  spec: ToolSpec
  run: Callable[[Machine, Task, Arguments], Awaitable[ToolResult]]
  reads: bool = False


def timed(function) -> Callable[..., Awaitable[ToolResult]]:
  """Adds the seconds; turns what the model asked for in vain into text."""

  async def run(
    machine: Machine, task: Task, arguments: Arguments
  ) -> ToolResult:
    began = time.perf_counter()
    try:
      result = await function(machine, task, arguments)
    except FileNotFoundError as error:
      where = f': {error.filename}' if error.filename else ''
      result = ToolResult(f'error no such file{where}', ok=False)
    except (OSError, ValueError) as error:
      reason = getattr(error, 'strerror', None) or str(error)
      result = ToolResult(f'error {reason}', ok=False)
    return dataclasses.replace(result, seconds=time.perf_counter() - began)

  return run


def tool(
  name: str,
  function,
  description: str,
  *parameters: tuple[str, str],
  optional: tuple[tuple[str, str], ...] = (),
  reads: bool = False,
) -> Tool:
  """A tool of a function that may raise OSError and ValueError."""
  spec = ToolSpec(name, description, parameters, optional)
  return Tool(spec, timed(function), reads)
