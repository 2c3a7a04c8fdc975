"""A machine's process 1: requests over its socket, one at a time.

A message is two big-endian uint32 (bytes of JSON, bytes of data), the JSON, the
data. A request may ask for everything at once, in this order:

  {"write": [[path, bytes], ...],  files to write, their contents are the data
   "make": [[path, "d", mode] or [path, "l", target], ...],  folders, links
   "run": argv or null, "timeout": seconds,
   "read": [path, ...],
   "facts": true,                  what is really in force
   "save": true,                   all files, as `files.py` says
   "restore": "machine" or "image",  `write` and `make` are of a save
   "resume": {...}}                first of all, where the machine is a copy

Its answer is {"exit", "seconds", "cpu_seconds", "truncated", "timed_out", "out",
"err", "read": [bytes or -1, ...]} with stdout, stderr and the files read as data,
or
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
import struct
import sys

import execute
import files
import isolate

HEADER = struct.Struct('>II')
BUFFER = 1 << 16
MAX_JSON = BUFFER - HEADER.size


def _ignore(*_) -> None:
  """A handler, so that a child's end is written to the wake-up pipe."""


class Machine:
  """What a call needs to know of its machine."""

  def __init__(
    self,
    sock: socket.socket,
    config: dict,
    workspace: str,
    changes: int = -1,
    group=None,
  ):
    self.sock = sock
    self.workspace = workspace
    self.changes = changes  # descriptor of an overlay's upper folder
    self.image = config['image']
    self.group = group  # of the machine; its kernel kills what is over it
    self.kills = 0
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
    self.ticks = os.sysconf('SC_CLK_TCK')
    self.cpu_limit = config['cpu_s']
    self.cpu_before = 0.0
    self.own_memory = self._own_memory() if self.contained else 0

  def _own_memory(self) -> int:
    with open('/proc/self/statm', 'rb') as file:
      fields = file.read().split()
    return (int(fields[1]) - int(fields[2])) * self.page

  def begin_command(self) -> None:
    self.cpu_before = execute.cpu_of_children()

  def prepare_command(self) -> None:
    if not self.contained:
      isolate.die_with_parent()

  def end_command(self, result) -> None:
    """After everything that the command started is dead and reaped."""
    if self.group is not None:
      kills = self.group.kills()
      if kills > self.kills and not result.killed:  # between two looks
        result.killed = f'memory: more than {self.memory >> 20} MB'
      self.kills = kills

  def own_kill(self) -> bool:
    """Whether it kills what a command started in a way of its own."""
    return False

  def pressure(self) -> str:
    """Why the machine as a whole is over its limits, or ''.

    Limits of a process bound a process; this looks at all of them. Anonymous
    memory that a fork shares with process 1 is not counted.
    """
    if not self.contained:
      return ''
    if self.group is not None and self.group.kills() > self.kills:
      return f'memory: more than {self.memory >> 20} MB'
    total, count, ticks = 0, 0, 0
    for name in os.listdir('/proc'):
      if name.isdigit() and name != '1':
        try:
          with open(f'/proc/{name}/stat', 'rb') as file:
            fields = file.read().rpartition(b')')[2].split()
          with open(f'/proc/{name}/statm', 'rb') as file:
            pages = file.read().split()
        except OSError:
          continue
        count += 1
        size = (int(pages[1]) - int(pages[2])) * self.page
        total += max(0, size - self.own_memory)
        ticks += sum(
          map(int, fields[11:15])
        )  # its own, and its dead children's
    cpu = ticks / self.ticks + execute.cpu_of_children() - self.cpu_before
    if total > self.memory:
      return f'memory: {total >> 20} MB in use, {self.memory >> 20} allowed'
    if count > self.processes:
      return f'processes: {count} run, {self.processes} allowed'
    if cpu > self.cpu_limit:
      return f'cpu: {cpu:.1f} s used, {self.cpu_limit:.1f} allowed'
    return ''

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


def serve(
  sock: socket.socket, config: dict, workspace: str, changes: int, group
):
  """Answers until end of file; never returns."""
  loop(sock, Machine(sock, config, workspace, changes, group))


def loop(sock, machine: Machine) -> None:
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  signal.signal(signal.SIGPIPE, signal.SIG_IGN)
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
  if 'resume' in request:
    machine.resume(request['resume'])
  root = machine.workspace
  if request.get('restore'):
    root = '/' if request['restore'] == 'image' else os.path.dirname(root)
  try:
    files.write_all(root, reader, request.get('write', ()))
    files.make_all(root, request.get('make', ()))
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
      'cpu_seconds': result.cpu_seconds,
      'truncated': result.truncated,
      'timed_out': result.timed_out,
      'out': len(result.stdout),
      'err': len(result.stderr),
    }
    blobs = [result.stdout, result.stderr]
  sizes = []
  for path in request.get('read', ()):
    try:
      data = files.read(machine.workspace, path, machine.disk)
    except FileNotFoundError:
      sizes.append(-1)
      continue
    except OSError as error:
      return refusal(error), ()
    sizes.append(len(data))
    blobs.append(data)
  message['read'] = sizes
  if request.get('save'):
    try:
      folder = os.path.dirname(machine.workspace)
      message['tree'], saved = files.save(folder, machine.disk)
      blobs += saved
      if machine.changes >= 0:
        folder = f'/proc/self/fd/{machine.changes}'
        skip = isolate.MOUNTED
        message['image'], saved = files.save(folder, machine.disk, skip)
        blobs += saved
    except OSError as error:
      return refusal(error), ()
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


def facts(machine: Machine) -> dict:
  """What is in force, as this process sees it and not as it was asked for."""
  found: dict = {'python': sys.version.split()[0]}
  found['kernel'] = os.uname().release
  found['cgroup'] = machine.group.version if machine.group else 0
  if machine.contained:
    found['image_is_own'] = isolate.image_is_own()
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
