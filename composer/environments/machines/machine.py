"""A machine as the host sees it: a socket, and errors with a kind each.

A message is two big-endian uint32 (bytes of JSON, bytes of data), the JSON, the
data; `inside/serve.py` gives their fields. One request is in flight at a time,
and one request can write files, run a command and read files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
import dataclasses
import errno
import json
import socket
import struct
import time
from typing import Any

HEADER = struct.Struct('>II')
MAX_REQUEST_JSON = 65_528  # bytes
MAX_ANSWER = 1 << 30  # bytes; a larger length is a broken machine
GRACE_S = 5.0  # what a machine may take beyond the limit of a command
TRANSFER_S = 30.0  # for writing and reading files


class MachineError(RuntimeError):
  """A machine could not do its work: infrastructure, never the model's fault."""


class MissingFacility(ValueError):
  """The system forbids what a driver needs; says what to do instead."""


@dataclasses.dataclass(frozen=True)
class ExecResult:
  """What a command did.

  Attributes:
    stdout: at most `machine.output_bytes` bytes, decoded; the first ones.
    stderr: the same.
    exit_code: negative signal number if a signal ended it, as a shell's would
      not be.
    seconds: wall time inside the machine.
    truncated: more was written than is kept.
    timed_out: it was killed at its limit of time.
    files: contents of the files that were to be read afterwards.
  """

  stdout: str
  stderr: str
  exit_code: int
  seconds: float
  truncated: bool
  timed_out: bool
  files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Answer:
  """One decoded answer: its JSON, and its data still in one piece."""

  message: Mapping[str, Any]
  data: bytes


def encode(
  write: Mapping[str, str | bytes],
  run: Sequence[str] = (),
  timeout_s: float = 0.0,
  read: Iterable[str] = (),
  facts: bool = False,
) -> bytes:
  """A request as bytes."""
  blobs = [x.encode() if isinstance(x, str) else x for x in write.values()]
  sizes = [[p, len(x)] for p, x in zip(write, blobs, strict=True)]
  request: dict[str, Any] = {'write': sizes}
  if run:
    request.update(run=list(run), timeout=timeout_s)
  if read:
    request['read'] = list(read)
  if facts:
    request['facts'] = True
  text = json.dumps(request).encode()
  if len(text) > MAX_REQUEST_JSON:
    raise ValueError(
      f'a request of {len(text)} bytes of arguments and paths;'
      f' {MAX_REQUEST_JSON} is the most, put long texts into a file'
    )
  data = b''.join(blobs)
  return HEADER.pack(len(text), len(data)) + text + data


def check(answer: Answer) -> Answer:
  """Raises what the answer says went wrong."""
  message = answer.message
  if 'refused' in message:
    # OSError picks its subclass by number: FileNotFoundError, PermissionError.
    raise OSError(message['errno'], message['refused'])
  if 'missing' in message:
    raise MachineError(
      f'a machine could not start: {message["missing"]} failed with'
      f' {errno.errorcode.get(message["errno"], message["errno"])}'
    )
  return answer


def files_of(answer: Answer, paths: Sequence[str]) -> dict[str, bytes]:
  """Contents by path; a path without a regular file is left out."""
  message = answer.message
  start = message.get('out', 0) + message.get('err', 0)
  files = {}
  for path, size in zip(paths, message.get('read', ()), strict=True):
    if size >= 0:
      files[path] = answer.data[start : start + size]
      start += size
  return files


def result_of(answer: Answer, paths: Sequence[str]) -> ExecResult:
  message, data = answer.message, answer.data
  out, err = message['out'], message['out'] + message['err']
  return ExecResult(
    stdout=data[:out].decode(errors='replace'),
    stderr=data[out:err].decode(errors='replace'),
    exit_code=message['exit'],
    seconds=message['seconds'],
    truncated=message['truncated'],
    timed_out=message['timed_out'],
    files=files_of(answer, paths),
  )


class Machine:
  """A live machine. Its owner calls `stop` (or gives it back to its pool).

  Attributes:
    provenance: driver, the isolation and the limits really in force.
    execs: commands run so far.
    seconds: wall time of them, the way to the machine and back included.
  """

  def __init__(
    self,
    sock: socket.socket,
    provenance: Mapping[str, Any],
    timeout_s: float,
    on_stop: Callable[[], Awaitable[None]] | None = None,
  ):
    self.provenance = provenance
    self.execs = 0
    self.seconds = 0.0
    self._sock = sock
    self._timeout_s = timeout_s
    self._on_stop = on_stop
    self._lock = asyncio.Lock()
    self._staged: dict[str, str | bytes] = {}

  async def run(
    self,
    argv: Sequence[str],
    timeout_s: float | None = None,
    *,
    write: Mapping[str, str | bytes] | None = None,
    read: Sequence[str] = (),
  ) -> ExecResult:
    """Writes files, runs `argv` in the workspace, reads files; one round trip.

    Everything that the command started is dead when this returns.

    Raises:
      MachineError: the machine died or does not answer.
      OSError: a file could not be written (no space, not in the workspace).
    """
    if not argv or not all(isinstance(x, str) and '\0' not in x for x in argv):
      raise ValueError(
        f'argv={argv!r} must be strings without NUL, at least one'
      )
    limit = self._timeout_s if timeout_s is None else timeout_s
    began = time.perf_counter()
    answer = await self._ask(limit + GRACE_S, write or {}, argv, limit, read)
    self.execs += 1
    self.seconds += time.perf_counter() - began
    return result_of(answer, read)

  def stage(self, path: str, data: str | bytes) -> None:
    """Writes a file by the next request, before whatever that does."""
    self._staged[path] = data

  async def write(self, path: str, data: str | bytes) -> None:
    await self.write_all({path: data})

  async def write_all(
    self, files: Mapping[str, str | bytes], timeout_s: float = TRANSFER_S
  ) -> None:
    await self._ask(timeout_s, files)

  async def read(self, path: str) -> bytes:
    """Raises FileNotFoundError unless `path` is a regular file."""
    answer = await self._ask(TRANSFER_S, {}, read=[path])
    files = files_of(answer, [path])
    if path not in files:
      raise FileNotFoundError(errno.ENOENT, 'no such file', path)
    return files[path]

  async def stop(self) -> None:
    """Ends the machine and everything in it; may be called again."""
    if self._sock.fileno() >= 0:
      await self._hang_up()
    if self._on_stop is not None:
      on_stop, self._on_stop = self._on_stop, None
      await on_stop()

  async def _hang_up(self) -> None:
    """Waits for its end of the socket to close: all in it is killed then."""
    loop = asyncio.get_running_loop()
    try:
      self._sock.shutdown(socket.SHUT_WR)
      async with asyncio.timeout(GRACE_S):
        while await loop.sock_recv(self._sock, 65536):
          pass
    except (OSError, TimeoutError):
      pass  # dead already, or its kernel will not let go: nothing more to do
    finally:
      self._sock.close()

  async def _ask(
    self,
    limit_s: float,
    write: Mapping[str, str | bytes],
    run: Sequence[str] = (),
    timeout_s: float = 0.0,
    read: Sequence[str] = (),
  ) -> Answer:
    """One request and its answer; `limit_s` bounds both."""
    async with self._lock:
      request = encode({**self._staged, **write}, run, timeout_s, read)
      self._staged.clear()
      if self._sock.fileno() < 0:
        raise MachineError('the machine is stopped')
      try:
        async with asyncio.timeout(limit_s):
          await asyncio.get_running_loop().sock_sendall(self._sock, request)
          answer = await _receive(self._sock)
      except TimeoutError as error:
        self._sock.close()
        raise MachineError(
          f'the machine did not answer within {limit_s:.1f} s'
        ) from error
      except (OSError, ValueError, struct.error) as error:
        self._sock.close()
        raise MachineError(f'the machine died: {error}') from error
      except asyncio.CancelledError:
        self._sock.close()  # half an answer: nobody can use it any more
        raise
    return check(answer)


async def _receive(sock: socket.socket) -> Answer:
  loop = asyncio.get_running_loop()
  data = await loop.sock_recv(sock, 65536)
  while len(data) < HEADER.size:
    data += await _more(loop, sock)
  size, rest = HEADER.unpack_from(data)
  total = HEADER.size + size + rest
  if total > MAX_ANSWER:
    raise ValueError(f'an answer of {total} bytes')
  if len(data) < total:
    pieces, have = [data], len(data)
    while have < total:
      pieces.append(await _more(loop, sock))
      have += len(pieces[-1])
    data = b''.join(pieces)
  text = data[HEADER.size : HEADER.size + size]
  return Answer(json.loads(text), data[HEADER.size + size : total])


async def _more(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bytes:
  data = await loop.sock_recv(sock, 65536)
  if not data:
    raise ConnectionError('end of file')
  return data
