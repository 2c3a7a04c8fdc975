"""Tools of a coding agent: read, list, search, edit, write, shell, tests, todo.

`view` and `replace` are reading and editing by numbers of lines: for a model too
small to say the old text letter by letter, as `edit` wants it.

All of them act in the machine, and on the workspace alone: a path that is
absolute, climbs with `..` or goes through a link that leads out is refused, in
the machine, where the links are. An output that is too long is cut in its
middle, with a word on how much is gone. What the model got wrong is an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
import importlib.resources
import json
import re
from typing import TYPE_CHECKING, Any

from composer.environments.machines import ExecResult
from composer.environments.machines import Machine
from composer.environments.tools_records import Arguments
from composer.environments.tools_records import Tool
from composer.environments.tools_records import ToolResult
from composer.environments.tools_records import tool

if TYPE_CHECKING:
  from composer.records import Task

MOST_CHARACTERS = 24_000  # of an output
MOST_LINES = 400  # that `read` shows unless asked for others
MOST_ENTRIES = 400  # of a listing
MOST_MATCHES = 200
MOST_EDIT = 4 << 20  # bytes of a file that `edit` takes
MOST_TODO = 40  # items
DEPTH = 2  # of a listing
SEARCH_S = 10.0  # a pattern may take forever
_TODO = re.compile(r'[-*]?\s*\[([ xX~-])\]\s*(\S.*)')


# --- files -------------------------------------------------------------------


async def _read(machine: Machine, task: Task, arguments: Arguments):
  del task
  start, shown, total = await _lines(machine, arguments)
  text = cut(''.join(shown))
  if len(shown) == total:
    return ToolResult(text or '(empty)')
  if not text.endswith('\n'):
    text += '\n'
  last = start + len(shown) - 1
  return ToolResult(f'{text}(lines {start} to {last} of {total})')


async def _lines(
  machine: Machine, arguments: Arguments
) -> tuple[int, list[str], int]:
  """The number of the first line that is asked for, those, and how many are."""
  path = str(arguments['path'])
  data = await machine.read(path)
  _text(path, data)
  # By their ends alone, as `replace` counts: a form feed in a text ends no line.
  lines = [x.decode(errors='replace') for x in data.splitlines(keepends=True)]
  start = int(arguments.get('start', 1))
  end = int(arguments.get('end', start + MOST_LINES - 1))
  if start < 1 or end < start:
    raise ValueError(f'lines {start} to {end}; count from 1, the first first')
  if start > max(len(lines), 1):
    raise ValueError(f'{path} has {len(lines)} lines')
  return start, lines[start - 1 : end], len(lines)


def _text(path: str, data: bytes) -> str:
  if b'\0' in data[:8192]:
    raise ValueError(f'{path} is binary, {len(data)} bytes')
  return data.decode(errors='replace')


async def _view(machine: Machine, task: Task, arguments: Arguments):
  """As `read`, a line's number before each."""
  del task
  start, shown, total = await _lines(machine, arguments)
  numbered = ''.join(f'{start + i} {x}' for i, x in enumerate(shown))
  text = cut(numbered).rstrip('\n') or '(empty)'
  last = start + len(shown) - 1
  if 'end' not in arguments and last < total:
    text += f'\n(lines {start} to {last} of {total})'
  return ToolResult(text)


async def _replace(machine: Machine, task: Task, arguments: Arguments):
  """Lines by others; the first is indented as the first of them was."""
  del task
  path, text = str(arguments['path']), str(arguments['text'])
  start, end = int(arguments['start']), int(arguments['end'])
  data = await machine.read(path)
  if len(data) > MOST_EDIT:
    raise ValueError(f'{path} has {len(data)} bytes; {MOST_EDIT} is the most')
  lines = data.splitlines(keepends=True)
  if not 1 <= start <= end <= len(lines):
    raise ValueError(f'lines {start} to {end}; {path} has {len(lines)}')
  old = lines[start - 1]
  bare = old.rstrip(b'\r\n')
  if not text[:1].isspace():
    text = bare[: len(bare) - len(bare.lstrip())].decode() + text
  new = text.rstrip('\r\n').encode() + b'\n'
  if old.endswith(b'\r\n'):
    new = re.sub(rb'\r?\n', b'\r\n', new)
  lines[start - 1 : end] = [new] if text.strip() else []
  await machine.write(path, b''.join(lines))
  return ToolResult(f'replaced lines {start} to {end}')


async def _write(machine: Machine, task: Task, arguments: Arguments):
  del task
  path, text = str(arguments['path']), str(arguments['text'])
  await machine.write(path, text)
  lines = text.count('\n') + bool(text and not text.endswith('\n'))
  return ToolResult(f'wrote {path}: {lines} lines')


async def _edit(machine: Machine, task: Task, arguments: Arguments):
  """Replaces the one place where a text stands, to the letter."""
  del task
  path = str(arguments['path'])
  old, new = str(arguments['old']), str(arguments['new'])
  if not old:
    raise ValueError('old is empty; write makes a new file')
  if old == new:
    raise ValueError('old and new are equal; nothing to do')
  data = await machine.read(path)
  if len(data) > MOST_EDIT:
    raise ValueError(f'{path} has {len(data)} bytes; {MOST_EDIT} is the most')
  before = old.encode()
  count = _occurrences(data, before)
  if count != 1:
    raise ValueError(_why_not(path, data, before, count))
  at = data.index(before)
  line = data.count(b'\n', 0, at) + 1
  after = data[:at] + new.encode() + data[at + len(before) :]
  await machine.write(path, after)
  return ToolResult(f'edited {path} at line {line}')


def _occurrences(data: bytes, part: bytes) -> int:
  """How often a text stands there, overlaps counted; 3 stands for more."""
  count, at = 0, data.find(part)
  while at >= 0 and count < 3:
    count += 1
    at = data.find(part, at + 1)
  return count


def _why_not(path: str, data: bytes, before: bytes, count: int) -> str:
  if count:
    times = 'twice' if count == 2 else 'more than twice'
    return f'old stands {times} in {path}; give more of what is around it'
  close = b' '.join(before.split())
  if close and close in b' '.join(data.split()):
    return f'old is not in {path}: its spaces or line breaks differ there'
  return f'old is not in {path}; read it again'


# --- looking around ----------------------------------------------------------


async def _list(machine: Machine, task: Task, arguments: Arguments):
  del task
  depth = int(arguments.get('depth', DEPTH))
  if not 1 <= depth <= 20:
    raise ValueError(f'depth is {depth}; it lies between 1 and 20')
  request = {
    'do': 'list',
    'path': str(arguments.get('path', '.')),
    'depth': depth,
    'most': MOST_ENTRIES,
  }
  return await _look(machine, request, '(empty)')


async def _search(machine: Machine, task: Task, arguments: Arguments):
  del task
  request = {
    'do': 'search',
    'pattern': str(arguments['pattern']),
    'path': str(arguments.get('path', '.')),
    'glob': str(arguments.get('glob', '')),
    'most': MOST_MATCHES,
  }
  return await _look(machine, request, '(no line matches)')


async def _look(
  machine: Machine, request: Mapping[str, Any], nothing: str
) -> ToolResult:
  argv = ('python', '-c', inside(), json.dumps(request))
  result = await machine.run(argv, SEARCH_S)
  if result.timed_out:
    raise ValueError(f'not done after {result.seconds:.0f} s; ask for less')
  if result.exit_code:
    raise ValueError(result.stderr.strip()[-400:] or 'it was ended')
  text = result.stdout
  if result.truncated:
    text = text.rpartition('\n')[0] + '\n(the rest is left out; ask for less)'
  return ToolResult(cut(text.rstrip('\n')) or nothing)


@functools.cache
def inside() -> str:
  """The script that looks around in a machine."""
  folder = importlib.resources.files('composer.environments')
  return folder.joinpath('tools_inside.py').read_text(encoding='utf-8')


# --- commands ----------------------------------------------------------------


async def shell(machine: Machine, task: Task, arguments: Arguments):
  del task
  result = await machine.run(('sh', '-c', str(arguments['command'])))
  return ToolResult(output(result), ok=result.exit_code == 0)


async def _run_tests(machine: Machine, task: Task, arguments: Arguments):
  del arguments
  if not task.test_command:
    raise ValueError('the task has no visible tests')
  return ToolResult(output(await machine.run(task.test_command)))


def output(result: ExecResult) -> str:
  """Output, then how it ended where that is worth a word."""
  lines = [cut(result.stdout.rstrip()), cut(result.stderr.rstrip())]
  if result.truncated:
    lines.append('(output truncated)')
  if result.timed_out:
    lines.append(f'(killed after {result.seconds:.1f} s)')
  elif result.exit_code:
    lines.append(f'(exit code {result.exit_code})')
  return '\n'.join(x for x in lines if x) or 'ok'


def cut(text: str, most: int = MOST_CHARACTERS) -> str:
  """`text`, its middle left out, with a word on it, if it is too long."""
  if len(text) <= most:
    return text
  tail = most // 2
  gone = len(text) - most
  head = text[: most - tail]
  return f'{head}\n[{gone} characters left out]\n{text[-tail:]}'


# --- the session itself ------------------------------------------------------


async def _todo(machine: Machine, task: Task, arguments: Arguments):
  """Replaces the list; it outlives summaries."""
  del machine, task
  items = parse_todo(str(arguments['items']))
  open_items = sum(mark != 'x' for mark, _ in items)
  text = '\n'.join(f'[{mark}] {item}' for mark, item in items)
  return ToolResult(f'{open_items} of {len(items)} open', todo=text)


def parse_todo(text: str) -> list[tuple[str, str]]:
  """[(mark, item)] of a list, one item a line; marks are ' ', '~' and 'x'.

  Raises:
    ValueError: a line is none, or there are too many.
  """
  items = []
  for line in filter(str.strip, text.splitlines()):
    match = _TODO.fullmatch(line.strip())
    if match is None:
      raise ValueError(
        f'{line.strip()[:60]!r} is no item; one a line: "[ ] open", "[~] begun"'
        ' or "[x] done"'
      )
    mark = {'X': 'x', '-': '~'}.get(match[1], match[1])
    items.append((mark, match[2].strip()[:200]))
  if not 1 <= len(items) <= MOST_TODO:
    raise ValueError(f'{len(items)} items; from 1 to {MOST_TODO}')
  return items


async def _finish(machine: Machine, task: Task, arguments: Arguments):
  del machine, task
  return ToolResult(str(arguments.get('message', '')), ends=True)


CODE_TOOLS: tuple[Tool, ...] = (
  tool(
    'read',
    _read,
    f'show a text file, or its lines from start to end ({MOST_LINES} at once)',
    ('path', 'path'),
    optional=(('start', 'integer'), ('end', 'integer')),
    reads=True,
  ),
  tool(
    'list',
    _list,
    'list the files below a directory, with their sizes in bytes',
    optional=(('path', 'path'), ('depth', 'integer')),
    reads=True,
  ),
  tool(
    'search',
    _search,
    'find the lines that a regular expression (of Python) matches, in the files'
    ' below path whose name fits glob',
    ('pattern', 'string'),
    optional=(('path', 'path'), ('glob', 'string')),
    reads=True,
  ),
  tool(
    'edit',
    _edit,
    'replace old, which must stand exactly once in the file, by new',
    ('path', 'path'),
    ('old', 'string'),
    ('new', 'text'),
  ),
  tool(
    'view',
    _view,
    'show lines of a text file, from start to end, with their numbers',
    ('path', 'path'),
    optional=(('start', 'integer'), ('end', 'integer')),
    reads=True,
  ),
  tool(
    'replace',
    _replace,
    'replace the lines from start to end of a file by text, which is indented'
    ' as they were unless it begins with spaces; without text they go',
    ('path', 'path'),
    ('start', 'integer'),
    ('end', 'integer'),
    ('text', 'text'),
  ),
  tool(
    'write',
    _write,
    'make a file, or replace all of it',
    ('path', 'path'),
    ('text', 'text'),
  ),
  tool(
    'shell',
    shell,
    'run a command of sh in the workspace; whatever it starts ends with it',
    ('command', 'text'),
  ),
  tool('run_tests', _run_tests, 'run the visible tests'),
  tool(
    'todo',
    _todo,
    'write down the plan: one item a line, "[ ] open", "[~] begun", "[x] done";'
    ' it replaces the list before it, and outlives summaries',
    ('items', 'text'),
    reads=True,
  ),
  tool(
    'finish',
    _finish,
    'end the session; what is there now is graded',
    optional=(('message', 'text'),),
  ),
)
