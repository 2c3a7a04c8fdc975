"""A machine as the host sees it: a socket, and errors with a kind each.

A message is two big-endian uint32 (bytes of JSON, bytes of data), the JSON, the
data; `inside/serve.py` gives their fields. One request is in flight at a time,
and one request can write files, run a command and read files.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
  Awaitable,
  Callable,
  Iterable,
  Iterator,
  Mapping,
  Sequence,
)
import contextlib
import dataclasses
import errno
import json
import os
import shutil
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
    cpu_seconds: of all its processes together.
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
  cpu_seconds: float = 0.0
  files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """What a machine was between two commands; any number of forks go on from it.

  Attributes:
    driver: that made it, and can fork it.
    tree: saved files of workspace and temporary folder, as `inside/files.py`
      lists them: all that outlives a command of a namespace's machine.
    image: the same of what it changed of its image.
    data: contents of the files of both, behind each other.
    folder: of a virtual machine's state, memory and processes included; it ends
      with its pool, or by `discard`.
  """

  driver: str
  tree: Sequence[Sequence[Any]] = ()
  image: Sequence[Sequence[Any]] = ()
  data: bytes = b''
  folder: str = ''

  def discard(self) -> None:
    """Frees its disk space; machines that were forked from it go on."""
    if self.folder:
      shutil.rmtree(self.folder, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class Handle:
  """What the owner of a virtual machine does to it from outside.

  Attributes:
    stop: ends it.
    save: its state into a folder.
  """

  stop: Callable[[], Awaitable[None]]
  save: Callable[[], Awaitable[str]]


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
  resume: bool = False,
  save: bool = False,
) -> bytes:
  """A request as bytes; fields as `inside/serve.py` lists them."""
  blobs = [x.encode() if isinstance(x, str) else x for x in write.values()]
  sizes = [[p, len(x)] for p, x in zip(write, blobs, strict=True)]
  request: dict[str, Any] = {'write': sizes}
  if resume:
    request['resume'] = {'time': time.time(), 'entropy': os.urandom(64).hex()}
  if save:
    request['save'] = True
  if run:
    request.update(run=list(run), timeout=timeout_s)
  if read:
    request['read'] = list(read)
  if facts:
    request['facts'] = True
  return pack(request, b''.join(blobs))


def pack(request: Mapping[str, Any], data: bytes) -> bytes:
  text = json.dumps(request).encode()
  if len(text) > MAX_REQUEST_JSON:
    raise ValueError(
      f'a request of {len(text)} bytes of arguments and paths;'
      f' {MAX_REQUEST_JSON} is the most, put long texts into a file'
    )
  return HEADER.pack(len(text), len(data)) + text + data


def restorations(snapshot: Snapshot) -> Iterator[bytes]:
  """Requests that lay a saved tree into a new machine."""
  size = sum(x[3] for x in snapshot.tree if x[1] == 'f')
  yield from _restore('machine', snapshot.tree, snapshot.data[:size])
  yield from _restore('image', snapshot.image, snapshot.data[size:])


def _restore(
  where: str, tree: Sequence[Sequence[Any]], data: bytes
) -> Iterator[bytes]:
  """Folders are open while files go in, links come after all files, so that
  nothing is written through one, and modes of folders last, the deepest first.
  """
  folders = [x for x in tree if x[1] == 'd']
  others = [x for x in tree if x[1] in 'lx']
  makes = [[path, 'd', mode | 0o700] for path, _, mode in folders]
  for part in _parts(makes):
    yield pack({'restore': where, 'make': part}, b'')
  start = 0
  for part in _parts([x for x in tree if x[1] == 'f']):
    size = sum(x[3] for x in part)
    writes = [[path, length, mode] for path, _, mode, length in part]
    request = {'restore': where, 'write': writes}
    yield pack(request, data[start : start + size])
    start += size
  deepest_first = [[p, 'd', m] for p, _, m in reversed(folders)]
  for part in _parts([*others, *deepest_first]):
    yield pack({'restore': where, 'make': part}, b'')


def _parts(entries: Sequence[Any]) -> Iterator[list[Any]]:
  """Entries in lists whose JSON a request can carry."""
  part: list[Any] = []
  size = 0
  for entry in entries:
    length = len(json.dumps(entry)) + 2
    if part and size + length > MAX_REQUEST_JSON - 256:
      yield part
      part, size = [], 0
    part.append(entry)
    size += length
  if part:
    yield part


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
    cpu_seconds=message['cpu_seconds'],
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
    handle: Handle | None = None,
  ):
    self.provenance = provenance
    self.execs = 0
    self.seconds = 0.0
    self._sock = sock
    self._timeout_s = timeout_s
    self._on_stop = on_stop
    self._handle = handle
    # Requests that bring time and chance: the first waits while the machine
    # starts, so it comes late, and the second is on time.
    self._resumes = 2 if handle is not None else 0
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

  async def snapshot(self) -> Snapshot:
    """What the machine is now; it goes on. Waits for a command in progress.

    Raises:
      OSError: of a namespace's machine: more files than a snapshot may hold.
    """
    driver = self.provenance['driver']
    await self._flush()
    if self._handle is not None:
      async with self._lock:
        folder = await self._handle.save()
        self._resumes = 1  # its clock stood still
        return Snapshot(driver, folder=folder)
    answer = await self._ask(TRANSFER_S, {}, save=True)
    message = answer.message
    return Snapshot(
      driver, message['tree'], message.get('image', ()), answer.data
    )

  async def restore(self, snapshot: Snapshot) -> None:
    """Lays a snapshot's files into this machine, which must be a new one."""
    for request in restorations(snapshot):
      async with self._lock:
        answer = await self._exchange(request, TRANSFER_S)
      check(answer)

  async def _flush(self) -> None:
    if self._staged or self._resumes:
      await self._ask(TRANSFER_S, {})

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
      if self._handle is None:
        self._sock.shutdown(socket.SHUT_WR)
      else:
        await self._handle.stop()
      async with asyncio.timeout(GRACE_S):
        while await loop.sock_recv(self._sock, 65536):
          pass
    except (OSError, TimeoutError, MachineError):
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
    save: bool = False,
  ) -> Answer:
    """One request and its answer; `limit_s` bounds both."""
    async with self._lock:
      files = {**self._staged, **write}
      request = encode(
        files, run, timeout_s, read, resume=self._resumes > 0, save=save
      )
      self._staged.clear()
      self._resumes = max(0, self._resumes - 1)
      answer = await self._exchange(request, limit_s)
    return check(answer)

  async def _exchange(self, request: bytes, limit_s: float) -> Answer:
    if self._sock.fileno() < 0:
      raise MachineError('the machine is stopped')
    try:
      async with asyncio.timeout(limit_s):
        await asyncio.get_running_loop().sock_sendall(self._sock, request)
        return await _receive(self._sock)
    except TimeoutError as error:
      await self._break()
      raise MachineError(
        f'the machine did not answer within {limit_s:.1f} s'
      ) from error
    except (OSError, ValueError, struct.error) as error:
      await self._break()
      raise MachineError(f'the machine died: {error}') from error
    except asyncio.CancelledError:
      await self._break()  # half an answer: nobody can use it any more
      raise

  async def _break(self) -> None:
    """Of no use any more. A virtual machine would not notice the closed end."""
    self._sock.close()
    if self._handle is not None:
      with contextlib.suppress(MachineError):
        await self._handle.stop()


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
