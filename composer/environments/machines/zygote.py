"""The host's side of a zygote: started once, asked for machines, ended.

A machine is asked for by sending one end of a socket pair; the zygote forks and
the fork serves it. Nothing is awaited: a machine that could not start shows as
end of file on the other end.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import errno
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
from typing import Any

from composer.environments.machines.machine import HEADER
from composer.environments.machines.machine import Answer
from composer.environments.machines.machine import MachineError
from composer.environments.machines.machine import check
from composer.environments.machines.machine import encode

SCRIPT = pathlib.Path(__file__).parent / 'inside' / 'zygote.py'


class Missing(Exception):
  """A facility that the kernel refused to the zygote or its first machine."""

  def __init__(self, facility: str, number: int):
    name = errno.errorcode.get(number, str(number))
    super().__init__(f'{facility} failed with {name} ({os.strerror(number)})')


@dataclasses.dataclass(frozen=True)
class Zygote:
  """A running zygote; `facts` are what its first machine saw in force."""

  process: subprocess.Popen
  control: socket.socket
  scratch: str
  facts: Mapping[str, Any]


def launch(settings: Mapping[str, Any], timeout_s: float) -> Zygote:
  """Starts a zygote and tries one machine. Blocks for some 50 ms.

  Args:
    settings: the JSON that `inside/zygote.py` reads.
    timeout_s: for all of it.

  Raises:
    Missing: the kernel refuses a facility.
    MachineError: anything else.
  """
  ours, theirs = socket.socketpair()
  interpreter = getattr(sys, '_base_executable', None) or sys.executable
  process = subprocess.Popen(
    [
      os.path.realpath(interpreter),
      *('-S', '-s', '-P', str(SCRIPT), str(theirs.fileno())),
    ],
    pass_fds=[theirs.fileno()],
    stdin=subprocess.DEVNULL,
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    env=_environment(),
    cwd='/',
    start_new_session=True,  # Ctrl-C is for the run, which ends us in order
  )
  theirs.close()
  zygote = Zygote(process, ours, settings['scratch'], {})
  try:
    ours.settimeout(timeout_s)
    ours.sendall(json.dumps(settings).encode() + b'\n')
    _check_ready(_read_line(ours))
    facts = _try_machine(zygote, timeout_s)
    ours.setblocking(False)
  except BaseException as error:
    close(zygote)
    if isinstance(error, OSError):
      raise MachineError(
        f'the zygote did not start within {timeout_s} s: {error!r}'
      ) from error
    raise
  return dataclasses.replace(zygote, facts=facts)


def _environment() -> dict[str, str]:
  """Nothing of the host's environment but where its libraries are."""
  folder = os.path.dirname(os.path.realpath(sys.executable))
  kept = {
    name: os.environ[name]
    for name in ('LD_LIBRARY_PATH', 'DYLD_LIBRARY_PATH', 'SYSTEMROOT')
    if name in os.environ
  }
  return kept | {
    'PATH': f'{folder}:/usr/local/bin:/usr/bin:/bin',
    'LANG': 'C.UTF-8',
    'PYTHONUTF8': '1',
    'PYTHONHASHSEED': '0',  # the same program, the same output
    'PYTHONDONTWRITEBYTECODE': '1',
  }


def _read_line(sock: socket.socket) -> dict[str, Any]:
  data = b''
  while not data.endswith(b'\n'):
    piece = sock.recv(65536)
    if not piece:
      raise MachineError('the zygote ended before it was ready')
    data += piece
  return json.loads(data)


def _check_ready(message: Mapping[str, Any]) -> None:
  if 'missing' in message:
    raise Missing(message['missing'], message['errno'])
  if 'error' in message:
    raise MachineError(f'the zygote failed: {message["error"]}')


def _try_machine(zygote: Zygote, timeout_s: float) -> Mapping[str, Any]:
  """Starts a machine and runs a program in it: the probe is the thing."""
  sock = ask_machine(zygote)
  with sock:
    sock.setblocking(True)
    sock.settimeout(timeout_s)
    sock.sendall(encode({}, facts=True))
    facts = _receive_blocking(sock).message
    if 'missing' in facts:
      raise Missing(facts['missing'], facts['errno'])
    sock.sendall(encode({}, ['python', '-c', 'print(6 * 7)'], timeout_s))
    answer = check(_receive_blocking(sock))
    if answer.message['exit'] != 0 or answer.data[:3] != b'42\n':
      raise MachineError(f'a trial machine cannot run Python: {answer}')
  return facts['facts']


def _receive_blocking(sock: socket.socket) -> Answer:
  def exactly(count: int) -> bytes:
    data = b''
    while len(data) < count:
      piece = sock.recv(count - len(data))
      if not piece:
        raise MachineError('a trial machine died')
      data += piece
    return data

  size, rest = HEADER.unpack(exactly(HEADER.size))
  return Answer(json.loads(exactly(size)), exactly(rest))


def ask_machine(zygote: Zygote) -> socket.socket:
  """Our end of a new machine's socket, non-blocking.

  Raises:
    BlockingIOError: the zygote has not taken earlier requests yet.
    MachineError: the zygote is gone.
  """
  ours, theirs = socket.socketpair()
  try:
    socket.send_fds(zygote.control, [b'm'], [theirs.fileno()])
  except BlockingIOError:
    ours.close()
    raise
  except OSError as error:
    ours.close()
    raise MachineError(f'the zygote takes no request: {error}') from error
  finally:
    theirs.close()
  ours.setblocking(False)
  return ours


def alive(zygote: Zygote) -> bool:
  return zygote.process.poll() is None


def close(zygote: Zygote, timeout_s: float = 5.0) -> None:
  """Ends the zygote and every machine of it. Blocks for some milliseconds."""
  zygote.control.close()
  try:
    zygote.process.wait(timeout_s)
  except subprocess.TimeoutExpired:
    zygote.process.kill()
    zygote.process.wait()
  if zygote.scratch:
    shutil.rmtree(zygote.scratch, ignore_errors=True)
