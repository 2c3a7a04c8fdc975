"""The host's side of a zygote: started once, asked for machines, ended.

A machine is asked for by sending one end of a socket pair; the zygote forks and
the fork serves it. Nothing is awaited: a machine that could not start shows as
end of file on the other end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import errno
import itertools
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
from typing import Any

from composer.environments.machines.machine import HEADER
from composer.environments.machines.machine import Answer
from composer.environments.machines.machine import MachineError
from composer.environments.machines.machine import MissingFacility
from composer.environments.machines.machine import check
from composer.environments.machines.machine import encode

# What a first machine has to do; an image need not have Python.
TRIAL = ('python', '-c', 'print(6 * 7)')
IMAGE_TRIAL = ('sh', '-c', 'echo $((6 * 7))')
INSIDE = pathlib.Path(__file__).parent / 'inside'


class Missing(Exception):
  """A facility that the kernel refused to the zygote or its first machine."""

  def __init__(self, facility: str, number: int):
    name = errno.errorcode.get(number, str(number))
    super().__init__(f'{facility} failed with {name} ({os.strerror(number)})')


@dataclasses.dataclass(frozen=True)
class Zygote:
  """A running zygote, or hypervisor, which takes lines of JSON.

  Attributes:
    process: its first process.
    control: where machines are asked for.
    scratch: its folder, or ''.
    facts: what it told of itself, and what its first machine saw in force.
    virtual: whether it is a hypervisor.
    numbers: of its machines and saved states.
  """

  process: subprocess.Popen
  control: socket.socket
  scratch: str
  facts: Mapping[str, Any]
  virtual: bool
  numbers: Iterator[int]


def launch(
  settings: Mapping[str, Any], timeout_s: float, script: str = 'zygote.py'
) -> Zygote:
  """Starts a zygote and tries one machine. Blocks for some 50 ms.

  Args:
    settings: the JSON that the script reads.
    timeout_s: for all of it.
    script: of `inside/`.

  Raises:
    Missing: the kernel refuses a facility.
    MachineError: anything else.
  """
  ours, theirs = socket.socketpair()
  interpreter = getattr(sys, '_base_executable', None) or sys.executable
  process = subprocess.Popen(
    [
      os.path.realpath(interpreter),
      *('-S', '-s', '-P', str(INSIDE / script), str(theirs.fileno())),
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
  zygote = Zygote(
    process,
    ours,
    settings['scratch'],
    {},
    settings['driver'] == 'microvm',
    itertools.count(1),
  )
  try:
    ours.settimeout(timeout_s)
    ours.sendall(json.dumps(settings).encode() + b'\n')
    ready = _read_line(ours)
    _check_ready(ready)
    trial = IMAGE_TRIAL if settings['image'] else TRIAL
    facts = ready.get('facts', {}) | _try_machine(zygote, trial, timeout_s)
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
  if 'refused' in message:
    raise MissingFacility(message['refused'])
  if 'error' in message:
    raise MachineError(f'the zygote failed: {message["error"]}')


def _try_machine(
  zygote: Zygote, trial: Sequence[str], timeout_s: float
) -> Mapping[str, Any]:
  """Starts a machine and runs a program in it: the probe is the thing."""
  request = ask_machine(zygote)
  with request.sock as sock:
    sock.setblocking(True)
    sock.settimeout(timeout_s)
    sock.sendall(encode({}, facts=True, resume=zygote.virtual))
    facts = _receive_blocking(sock).message
    if 'missing' in facts:
      raise Missing(facts['missing'], facts['errno'])
    sock.sendall(encode({}, trial, timeout_s))
    answer = check(_receive_blocking(sock))
    if answer.message['exit'] != 0 or answer.data[:3] != b'42\n':
      raise MachineError(f'a trial machine cannot run {trial[0]}: {answer}')
    if zygote.virtual:
      zygote.control.sendall(_line(do='stop', id=request.number))
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


@dataclasses.dataclass(frozen=True)
class Request:
  """A machine that was asked for: its number, and our end of its socket."""

  number: int
  sock: socket.socket


def ask_machine(zygote: Zygote, saved: str = '') -> Request:
  """Asks for a machine; `saved` is the folder of a state that it goes on from.

  Raises:
    BlockingIOError: the zygote has not taken earlier requests yet.
    MachineError: the zygote is gone, or this process has no descriptor left.
  """
  number = next(zygote.numbers)
  data = b'm'
  if zygote.virtual:
    data = _line(do='start', id=number, **{'from': saved})
  ours, theirs = _pair()
  try:
    _send(zygote, data, [theirs.fileno()])
  except BaseException:
    ours.close()
    raise
  finally:
    theirs.close()
  ours.setblocking(False)
  return Request(number, ours)


def ask_stop(zygote: Zygote, number: int) -> None:
  """Ends a virtual machine; errors as for `ask_machine`."""
  _send(zygote, _line(do='stop', id=number), [])


def ask_save(zygote: Zygote, number: int, folder: str) -> socket.socket:
  """Saves a virtual machine's state; a line of JSON comes when it is done."""
  ours, theirs = _pair()
  try:
    data = _line(do='save', id=number, to=folder)
    _send(zygote, data, [theirs.fileno()])
  except BaseException:
    ours.close()
    raise
  finally:
    theirs.close()
  ours.setblocking(False)
  return ours


def _pair() -> tuple[socket.socket, socket.socket]:
  try:
    return socket.socketpair()
  except OSError as error:
    raise MachineError(f'no socket for a machine: {error}') from error


def _line(**message: Any) -> bytes:
  return json.dumps(message).encode() + b'\n'


def _send(zygote: Zygote, data: bytes, descriptors: list[int]) -> None:
  try:
    sent = socket.send_fds(zygote.control, [data], descriptors)
  except BlockingIOError:
    raise
  except OSError as error:
    raise MachineError(f'the zygote takes no request: {error}') from error
  if sent != len(data):  # of some hundred bytes: the kernel takes all or none
    raise MachineError('the zygote took half a request')


def scratch() -> str:
  """A new folder of this process, by its name."""
  prefix = f'composer-machines-{os.getpid()}-'
  return os.path.realpath(tempfile.mkdtemp(prefix=prefix))


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
