"""Tools of Model Context Protocol servers, attached to a session.

    NAME = COMMAND              a process of this host, one for each session
    NAME in machine = COMMAND   a process in the session's machine

A server's tools are offered as NAME__TOOL with the schemas that it tells.

On the host a server lives as long as its session and may keep things in memory;
it runs with what a process may do here, so its command is the operator's, never
a task's or a model's, and its environment holds no secrets (the `mcp` package
passes a few harmless variables on). In the machine it sees the workspace and
nothing else, under the machine's limits; as everything that a command starts ends
with it, such a server is started for every call and keeps what it knows in files.

What a tool answers, an error too, is the model's to read, as is a call that takes
longer than the server's time: else a model could be rid of its bad sessions by
asking for slow things. A server that does not start, dies or speaks no MCP is
infrastructure: `ToolServerError`. Calls that the server says only read run side
by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import importlib.resources
import json
import os
import re
import shlex
import tempfile
import time
from typing import TYPE_CHECKING, Any

from composer.chat import ToolSpec
from composer.environments.machines import Machine
from composer.environments.tools_code import cut
from composer.environments.tools_records import Arguments
from composer.environments.tools_records import Tool
from composer.environments.tools_records import ToolResult

if TYPE_CHECKING:
  from composer.records import Task

START_S = 20.0
CALL_S = 30.0
END_S = 10.0
MOST_TOOLS = 64  # of a server
MOST_DESCRIPTION = 1000  # characters
MOST_NAME = 64  # characters that templates and clients take
_LINE = re.compile(r'([a-z][a-z0-9_-]{0,23})(\s+in\s+machine)?\s*=\s*(\S.*)')
_TOOL = re.compile(r'[A-Za-z0-9_.-]{1,40}')


class ToolServerError(RuntimeError):
  """A tool server could not do its work (infrastructure)."""


@dataclasses.dataclass(frozen=True)
class Server:
  """A server of a config; `inside` says that it runs in the machine."""

  name: str
  argv: tuple[str, ...]
  inside: bool


def read_servers(text: str) -> tuple[Server, ...]:
  """The servers of `session.tool_servers`, one a line; '#' begins a comment.

  Raises:
    ValueError: a line is none, or a name stands twice.
  """
  servers: dict[str, Server] = {}
  for line in map(str.strip, text.splitlines()):
    if not line or line.startswith('#'):
      continue
    match = _LINE.fullmatch(line)
    try:
      argv = tuple(shlex.split(match[3])) if match else ()
    except ValueError:
      argv = ()
    if not match or not argv:
      raise ValueError(
        f'session.tool_servers: {line[:60]!r} is no server; write NAME = COMMAND'
        ' or NAME in machine = COMMAND'
      )
    if match[1] in servers:
      raise ValueError(f'session.tool_servers: {match[1]!r} stands twice')
    servers[match[1]] = Server(match[1], argv, bool(match[2]))
  return tuple(servers.values())


@contextlib.asynccontextmanager
async def attach(text: str, machine: Machine) -> AsyncIterator[dict[str, Tool]]:
  """The tools of the servers of `text`, which live until the end.

  Raises:
    ToolServerError: a server does not start, or tells of no tools in time.
    ValueError: the config of the servers is none.
  """
  servers = read_servers(text)
  tools: dict[str, Tool] = {}
  async with contextlib.AsyncExitStack() as stack:
    for server in servers:
      if server.inside:
        tools.update(await _tools_inside(server, machine))
      else:
        tools.update(await stack.enter_async_context(_on_host(server)))
    yield tools


def _tool(server: Server, name: str, about: Mapping[str, Any], run) -> Tool:
  """The tool of a server as a session offers it."""
  if not _TOOL.fullmatch(name):
    raise ToolServerError(
      f'MCP server {server.name}: the name {name[:60]!r} of a tool; 1 to 40'
      ' letters, digits, "_", "-" and "."'
    )
  schema = about['schema']
  if not isinstance(schema, Mapping) or schema.get('type') != 'object':
    raise ToolServerError(
      f'MCP server {server.name}: the schema of {name} is of no object'
    )
  full = f'{server.name}__{name}'.replace('.', '_')
  if len(full) > MOST_NAME:
    raise ToolServerError(
      f'MCP server {server.name}: {full} has more than {MOST_NAME} characters;'
      ' give the server a shorter name'
    )
  description = (about['description'] or name)[:MOST_DESCRIPTION]
  spec = ToolSpec(full, description, schema=dict(schema))
  return Tool(spec, run, about['reads'])


def _named(tools: Sequence[Tool], server: Server) -> dict[str, Tool]:
  named = {tool.spec.name: tool for tool in tools}
  if not 1 <= len(named) == len(tools) <= MOST_TOOLS:
    raise ToolServerError(
      f'MCP server {server.name} tells of {len(tools)} tools, {len(named)} by'
      f' different names; from 1 to {MOST_TOOLS}'
    )
  return named


# --- on the host -------------------------------------------------------------


@contextlib.asynccontextmanager
async def _on_host(server: Server) -> AsyncIterator[dict[str, Tool]]:
  """A process of this host that speaks MCP over its stdin and stdout.

  It lives in a task of its own: what goes wrong in the session must not pass
  through the groups of tasks that the client is made of.
  """
  started: asyncio.Future[dict[str, Tool]] = (
    asyncio.get_running_loop().create_future()
  )
  stop = asyncio.Event()
  living = asyncio.create_task(_live(server, started, stop))
  try:
    async with asyncio.timeout(START_S):
      tools = await asyncio.shield(started)
  except BaseException as error:
    living.cancel()
    await asyncio.shield(asyncio.wait([living], timeout=END_S))
    if isinstance(error, TimeoutError):
      raise ToolServerError(
        f'MCP server {server.name} ({shlex.join(server.argv)}) did not start'
        f' within {START_S:g} s'
      ) from error
    raise
  try:
    yield tools
  finally:
    stop.set()
    await asyncio.shield(asyncio.wait([living], timeout=END_S))
    living.cancel()  # of one that will not end; else it is done


async def _live(
  server: Server, started: asyncio.Future, stop: asyncio.Event
) -> None:
  """Starts the server, tells of its tools, and ends it when `stop` is set."""
  with contextlib.ExitStack() as files:
    folder = files.enter_context(tempfile.TemporaryDirectory(prefix='mcp-'))
    log = files.enter_context(open(os.path.join(folder, 'stderr'), 'w+'))
    try:
      async with _client(server, folder, log) as client:
        started.set_result(await _tools_on_host(server, client))
        await stop.wait()
    except Exception as error:
      if not started.done():
        failure = ToolServerError(
          f'MCP server {server.name} ({shlex.join(server.argv)}) did not start:'
          f' {_innermost(error)}{_last_words(log)}'
        )
        failure.__cause__ = error
        started.set_exception(failure)
      # Else it died: whoever calls it is told.


def _client(server: Server, folder: str, log: Any) -> Any:
  """The client of a server that will run in `folder`."""
  try:
    import mcp
    from mcp.client import stdio
  except ImportError as error:
    raise RuntimeError(
      "the package mcp is not installed; pip install 'composer[mcp]'"
    ) from error
  command, *arguments = server.argv
  place = os.path.join(folder, 'cwd')
  os.mkdir(place)
  parameters = stdio.StdioServerParameters(
    command=command, args=arguments, cwd=place
  )
  transport = stdio.stdio_client(parameters, errlog=log)
  return mcp.Client(transport, read_timeout_seconds=START_S, cache=None)


async def _tools_on_host(server: Server, client: Any) -> dict[str, Tool]:
  tools = [
    _tool(
      server,
      tool.name,
      {
        'description': tool.description,
        'schema': tool.input_schema,
        'reads': bool(tool.annotations and tool.annotations.read_only_hint),
      },
      functools.partial(_call_host, server, client, tool.name),
    )
    for tool in await _listed(client)
  ]
  return _named(tools, server)


async def _listed(client: Any) -> list[Any]:
  """Every page of a server's tools."""
  listed, cursor = [], None
  for _ in range(MOST_TOOLS):
    page = await client.list_tools(cursor=cursor)
    listed += page.tools
    cursor = page.next_cursor
    if cursor is None or len(listed) > MOST_TOOLS:
      break
  return listed


async def _call_host(
  server: Server,
  client: Any,
  name: str,
  machine: Machine,
  task: Task,
  arguments: Arguments,
) -> ToolResult:
  del machine, task
  import mcp.types

  began = time.perf_counter()
  ok, text = False, ''
  try:
    result = await client.call_tool(
      name, dict(arguments), read_timeout_seconds=CALL_S
    )
    ok, text = not result.is_error, _text(result.content)
  except mcp.MCPError as error:
    code = error.error.code
    if code == mcp.types.REQUEST_TIMEOUT:
      text = f'error no answer within {CALL_S:g} s'
    elif code == mcp.types.CONNECTION_CLOSED:
      raise ToolServerError(
        f'MCP server {server.name} ended in the middle of {name}'
      ) from error
    else:
      text = f'error {error.error.message}'
  except Exception as error:
    raise ToolServerError(
      f'MCP server {server.name}, tool {name}: {_innermost(error)}'
    ) from error
  return ToolResult(cut(text), ok=ok, seconds=time.perf_counter() - began)


def _text(content: Sequence[Any]) -> str:
  """The text of an answer; other contents are named."""
  pieces = []
  for part in content:
    text = getattr(part, 'text', None)
    pieces.append(text if isinstance(text, str) else f'({part.type})')
  return '\n'.join(pieces) or 'ok'


def _innermost(error: BaseException) -> str:
  """What really went wrong below groups of exceptions."""
  while isinstance(error, BaseExceptionGroup):
    error = error.exceptions[0]
  return f'{type(error).__name__}: {error}'


def _last_words(log: Any) -> str:
  log.flush()
  log.seek(0)
  said = log.read()[-400:].strip()
  return f'; it said: {said}' if said else ''


# --- in the machine ----------------------------------------------------------


async def _tools_inside(server: Server, machine: Machine) -> dict[str, Tool]:
  answer = await _ask_inside(server, machine, {}, START_S)
  if 'tools' not in answer:
    raise ToolServerError(
      f'MCP server {server.name} ({shlex.join(server.argv)}) in the machine did'
      f' not start: {answer.get("failed") or answer.get("error")}'
    )
  return _named(
    [
      _tool(
        server,
        tool['name'],
        tool,
        functools.partial(_call_inside, server, tool['name']),
      )
      for tool in answer['tools']
    ],
    server,
  )


async def _call_inside(
  server: Server,
  name: str,
  machine: Machine,
  task: Task,
  arguments: Arguments,
) -> ToolResult:
  del task
  began = time.perf_counter()
  call = {'name': name, 'arguments': dict(arguments)}
  answer = await _ask_inside(server, machine, call, CALL_S)
  if 'failed' in answer:
    raise ToolServerError(
      f'MCP server {server.name} in the machine, tool {name}:'
      f' {answer["failed"]}'
    )
  ok = 'error' not in answer and not answer.get('is_error', False)
  text = f'error {answer["error"]}' if 'error' in answer else answer['text']
  return ToolResult(cut(text), ok=ok, seconds=time.perf_counter() - began)


async def _ask_inside(
  server: Server, machine: Machine, call: Mapping[str, Any], limit_s: float
) -> dict[str, Any]:
  """Starts the server in the machine, asks one thing, and ends it."""
  request = json.dumps({'argv': server.argv, 'call': call})
  argv = ('python', '-c', inside(), request)
  try:
    result = await machine.run(argv, limit_s)
  except ValueError as error:  # more arguments than a request holds
    return {'error': str(error)}
  if result.timed_out:
    return {'error': f'no answer within {limit_s:g} s'}
  if result.truncated:
    return {'error': 'the answer is longer than machine.output_bytes'}
  try:
    answer = json.loads(result.stdout)
  except ValueError:
    said = (result.stderr or result.stdout)[-300:].strip()
    return {'failed': f'exit code {result.exit_code}: {said}'}
  return answer


@functools.cache
def inside() -> str:
  """The client that runs in a machine."""
  folder = importlib.resources.files('composer.environments')
  return folder.joinpath('mcp_inside.py').read_text(encoding='utf-8')
