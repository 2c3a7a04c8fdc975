"""A machine's process 1: requests over its socket, one at a time.

A message is two big-endian uint32 (bytes of JSON, bytes of data), the JSON, the
data. A request may ask for everything at once, in this order:

  {"write": [[path, bytes], ...],  files to write, their contents are the data
   "run": argv or null, "timeout": seconds,
   "read": [path, ...],
   "facts": true}                  what is really in force

Its answer is {"exit", "seconds", "truncated", "timed_out", "out", "err",
"read": [bytes or -1, ...]} with stdout, stderr and the files read as data, or
{"refused": text, "errno": n} when a file could not be written or read (nothing
runs then), or {"missing": facility, "errno": n} from a machine that could not
start.

Contents of files pass through one buffer that is wiped after them: programs are
forks of this process, and must not find a hidden test in their own memory.
"""

import _signal as signal  # these wrappers would double every fork's memory
import _socket as socket
import errno
import json
import os
import stat
import struct
import sys

import execute
import isolate

HEADER = struct.Struct('>II')
BUFFER = 1 << 16
MAX_JSON = BUFFER - HEADER.size


def _ignore(*_) -> None:
  """A handler, so that a child's end is written to the wake-up pipe."""


class Machine:
  """What a call needs to know of its machine."""

  def __init__(self, sock: socket.socket, config: dict, workspace: str):
    self.sock = sock
    self.workspace = workspace
    self.contained = config['driver'] == 'namespace'
    self.memory = config['memory_mb'] << 20
    self.processes = config['processes']
    self.disk = config['disk_mb'] << 20
    self.output_bytes = config['output_bytes']
    self.null = os.open('/dev/null', os.O_RDWR | os.O_CLOEXEC)
    self.wake, wake_write = os.pipe()
    os.set_blocking(self.wake, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, _ignore)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    self.page = os.sysconf('SC_PAGESIZE')
    self.own_memory = self._own_memory() if self.contained else 0

  def _own_memory(self) -> int:
    with open('/proc/self/statm', 'rb') as file:
      fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * self.page

  def prepare_command(self) -> None:
    if not self.contained:
      isolate.die_with_parent()

  def close(self) -> None:
    """Ends the machine; everything in it is dead already."""
    if not self.contained:
      isolate.remove_tree(os.path.dirname(self.workspace))
    os._exit(0)


class Reader:
  """Reads messages from a blocking socket through one wiped buffer."""

  def __init__(self, sock: socket.socket):
    self.sock = sock
    self.buffer = bytearray(BUFFER)
    self.view = memoryview(self.buffer)
    self.start = self.end = 0

  def fill(self, count: int) -> bool:
    """Has `count` bytes in the buffer; false at end of file."""
    if self.start + count > BUFFER:
      size = self.end - self.start
      self.view[:size] = bytes(self.view[self.start : self.end])
      self.start, self.end = 0, size
    while self.end - self.start < count:
      got = self.sock.recv_into(self.view[self.end :])
      if not got:
        return False
      self.end += got
    return True

  def take(self, count: int) -> bytes:
    data = bytes(self.view[self.start : self.start + count])
    self.start += count
    return data

  def copy(self, count: int, descriptor: int) -> int:
    """Moves `count` bytes to a file (-1: nowhere); an errno, or 0."""
    failed = 0
    while count:
      if self.start == self.end:
        self.start = self.end = 0
        if not self.fill(1):
          raise EOFError
      piece = self.view[self.start : min(self.end, self.start + count)]
      self.start += len(piece)
      count -= len(piece)
      while len(piece) and descriptor >= 0 and not failed:
        try:
          piece = piece[os.write(descriptor, piece) :]
        except OSError as error:
          failed = error.errno or errno.EIO
    return failed

  def wipe(self) -> None:
    self.view[: self.start] = bytes(self.start)
    if self.start == self.end:
      self.start = self.end = 0


def serve(sock: socket.socket, config: dict, workspace: str) -> None:
  """Answers until end of file; never returns."""
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  signal.signal(signal.SIGPIPE, signal.SIG_IGN)
  machine = Machine(sock, config, workspace)
  reader = Reader(sock)
  try:
    while reader.fill(HEADER.size):
      size, _ = HEADER.unpack(reader.take(HEADER.size))
      if size > MAX_JSON or not reader.fill(size):
        break
      request = json.loads(reader.take(size))
      message, blobs = answer(machine, reader, request)
      send(sock, message, blobs)
  except (EOFError, OSError):
    pass
  machine.close()


def answer(machine: Machine, reader: Reader, request: dict) -> tuple:
  try:
    write_files(machine, reader, request.get('write', ()))
  except OSError as error:
    return refusal(error), ()
  finally:
    reader.wipe()
  message: dict = {}
  blobs = []
  if request.get('facts'):
    message['facts'] = facts(machine)
  if request.get('run'):
    result = execute.run(machine, request['run'], request['timeout'])
    if result.killed:
      result.stderr += f'\nmachine: killed, {result.killed}\n'.encode()
    message = {
      'exit': result.exit_code,
      'seconds': result.seconds,
      'truncated': result.truncated,
      'timed_out': result.timed_out,
      'out': len(result.stdout),
      'err': len(result.stderr),
    }
    blobs = [result.stdout, result.stderr]
  sizes = []
  for path in request.get('read', ()):
    try:
      data = read_file(machine, path)
    except FileNotFoundError:
      sizes.append(-1)
      continue
    except OSError as error:
      return refusal(error), ()
    sizes.append(len(data))
    blobs.append(data)
  message['read'] = sizes
  return message, blobs


def refusal(error: OSError) -> dict:
  text = f'{error.filename}: {error.strerror}'
  return {'refused': text, 'errno': error.errno}


def send(sock: socket.socket, message: dict, blobs) -> None:
  text = json.dumps(message).encode()
  data = b''.join(blobs)
  sock.sendall(HEADER.pack(len(text), len(data)) + text + data)


def reply_missing(sock: socket.socket, facility: str, number: int) -> None:
  send(sock, {'missing': facility, 'errno': number}, ())


# --- files -------------------------------------------------------------------


def locate(machine: Machine, path: str, make: bool) -> str:
  """The absolute path of a workspace path; never one outside it."""
  parts = path.split('/')
  if not path or path.startswith('/') or '..' in parts or '\0' in path:
    text = 'not a path inside the workspace (relative, without ..)'
    raise PermissionError(errno.EPERM, text, path)
  full = os.path.join(machine.workspace, path)
  if len(parts) > 1:
    parent = os.path.dirname(full)
    root = os.path.realpath(machine.workspace)
    real = os.path.realpath(parent)
    if real != root and not real.startswith(root + '/'):
      text = 'a link on the way leads out of the workspace'
      raise PermissionError(errno.EPERM, text, path)
    if make:
      os.makedirs(real, exist_ok=True)
  return full


def write_files(machine: Machine, reader: Reader, files) -> None:
  """Writes every file; consumes all data even when one is refused."""
  refused = None
  for path, size in files:
    descriptor = -1
    try:
      if not refused:
        descriptor = open_new(machine, path)
    except OSError as error:
      refused = error
    failed = reader.copy(size, descriptor)
    if descriptor >= 0:
      os.close(descriptor)
    if failed and not refused:
      refused = OSError(failed, os.strerror(failed), path)
  if refused:
    raise refused


def open_new(machine: Machine, path: str) -> int:
  full = locate(machine, path, make=True)
  flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK
  try:
    return os.open(full, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
  except OSError as error:
    raise OSError(error.errno, error.strerror, path) from None


def read_file(machine: Machine, path: str) -> bytes:
  """A regular file; anything else of that name counts as no file."""
  flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
  try:
    descriptor = os.open(locate(machine, path, make=False), flags)
  except PermissionError:
    raise
  except OSError:
    raise FileNotFoundError(errno.ENOENT, 'no such file', path) from None
  try:
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode):
      raise FileNotFoundError(errno.ENOENT, 'not a regular file', path)
    if about.st_size > machine.disk:
      raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    pieces = []
    while piece := os.read(descriptor, 1 << 20):
      pieces.append(piece)
    return b''.join(pieces)
  finally:
    os.close(descriptor)


def facts(machine: Machine) -> dict:
  """What is in force, as this process sees it and not as it was asked for."""
  found: dict = {'python': sys.version.split()[0]}
  if machine.contained:
    found['namespaces'] = {
      name: os.stat(f'/proc/self/ns/{name}').st_ino
      for name in ('user', 'mnt', 'pid', 'net', 'ipc', 'uts')
    }
    with open('/proc/self/status') as file:
      status = dict(line.split(':', 1) for line in file if ':' in line)
    found['capabilities'] = status['CapEff'].strip()
    found['no_new_privs'] = status.get('NoNewPrivs', '?').strip()
    found['seccomp'] = status.get('Seccomp', '?').strip()
  return found
