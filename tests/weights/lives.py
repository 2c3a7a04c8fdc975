"""Processes that are cheap to start, to be killed at every point of what they do.

One process imports everything and, before it has any thread, forks a life for
every command that it reads: a JSON list of arguments. The life runs `main` of
the script with them, may kill itself, and its end is told as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import traceback

LIMIT_S = 60

_SERVE = """
import sys
import lives
names = {'__name__': 'script'}
exec(sys.stdin.readline().encode().decode('unicode_escape'), names)
lives.serve(names['main'])
"""


@dataclasses.dataclass(frozen=True)
class End:
  """Of one life: its exit code (minus the signal), and what it printed."""

  code: int
  out: str


@contextlib.contextmanager
def lives(script: str) -> Iterator:
  """`live(*arguments) -> End`, one process each."""
  path = os.pathsep.join(p for p in sys.path if p)
  server = subprocess.Popen(
    [sys.executable, '-c', _SERVE],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': path},
  )
  assert server.stdin is not None and server.stdout is not None

  def live(*arguments) -> End:
    server.stdin.write(json.dumps([str(a) for a in arguments]) + '\n')
    server.stdin.flush()
    return End(**json.loads(server.stdout.readline()))

  try:
    server.stdin.write(script.encode('unicode_escape').decode() + '\n')
    yield live
  finally:
    server.stdin.close()
    server.wait(LIMIT_S)
    server.stdout.close()


def serve(main) -> None:
  """Forks a life a line, until there are no more."""
  for line in sys.stdin:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
      os.close(reading)
      _live(main, json.loads(line), writing)
    os.close(writing)
    with os.fdopen(reading) as out:
      text = out.read()
    _, status = os.waitpid(child, 0)
    end = {'code': os.waitstatus_to_exitcode(status), 'out': text}
    print(json.dumps(end), flush=True)


def _live(main, arguments, writing) -> None:
  code = 1
  try:
    os.dup2(writing, 1)
    os.dup2(writing, 2)
    main(*arguments)
    sys.stdout.flush()
    code = 0
  except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
  finally:
    os._exit(code)
