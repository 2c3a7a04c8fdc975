"""What every hypervisor's machines are: a process, a folder, and how it starts."""

import ctypes
import fcntl
import os
import signal
import socket
import struct

EXTRA_MB = 96  # for the kernel, process 1 and the page cache of the tools
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NEWIPC, NEWNET = 0x8000000, 0x40000000
# In a folder of a machine's a name may have become a link to anything of ours.
READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
FICLONE = 0x40049409
NOBODY = 65534
# CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_KILL, CAP_SETGID, CAP_SETUID: to end another
# user's process and open his files is as little a matter of course as the rest.
POWERS = (0, 1, 5, 6, 7)
FIRST = 64  # descriptors are set aside above those that a program is told of

_libc = ctypes.CDLL(None, use_errno=True)


class Broken(Exception):
  """A virtual machine did not boot, or could not be saved."""


class Vm:
  """A running machine.

  Attributes:
    pid: of the process that it ends with, a child of this one.
    folder: what it writes to.
    monitor: our end of the hypervisor's own language, or None.
  """

  def __init__(self, pid: int, folder: str, monitor=None):
    self.pid = pid
    self.folder = folder
    self.monitor = monitor

  def close(self) -> None:
    """After its end."""
    if self.monitor is not None:
      self.monitor.close()

  def end(self) -> None:
    os.kill(self.pid, signal.SIGKILL)
    os.waitpid(self.pid, 0)
    self.close()


def user_for(number: int) -> int:
  """Whom a root's hypervisor becomes: that user, or nobody; 0: it stays who it is.

  It stays where it is started by another than root, or by a root who cannot
  become others.
  """
  if os.geteuid() != 0:
    return 0
  with open('/proc/self/status') as file:
    lines = dict(x.split(':', 1) for x in file if ':' in x)
  held = int(lines['CapEff'], 16)
  if not all(held >> power & 1 for power in POWERS):
    return 0
  for user in (number, NOBODY):
    if all(_is_mapped(user, name) for name in ('uid_map', 'gid_map')):
      return user
  return 0


def _is_mapped(user: int, name: str) -> bool:
  """Whether there is such a user, or group, in this namespace."""
  with open(f'/proc/self/{name}') as file:
    spans = [tuple(map(int, line.split())) for line in file]
  return any(first <= user < first + count for first, _, count in spans)


def groups_for(device: str) -> list:
  """Which a user without rights must be in to open the device."""
  about = os.stat(device)
  return [] if about.st_mode & 0o006 == 0o006 else [about.st_gid]


def die_with_parent(parent: int) -> None:
  """Also where it has ended already: no signal comes of that any more."""
  _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
  if os.getppid() != parent:
    os._exit(1)


def spawn(
  argv: list, descriptors: dict, folder: str, user: int = 0, groups=()
) -> int:
  """Starts a hypervisor, which ends with this process; its pid.

  Args:
    descriptors: number there -> descriptor here.
    folder: it works there; its output goes into the file `log` of it.
    user: it becomes, if not 0: `groups` are the others that it is in.
  """
  parent = os.getpid()
  pid = os.fork()
  if pid == 0:
    _become(argv, descriptors, folder, user, groups, parent)
  return pid


def _become(argv, descriptors, folder, user, groups, parent) -> None:
  """Never returns."""
  try:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    program = os.open(argv[0], os.O_RDONLY)
    _libc.unshare(NEWNET | NEWIPC)  # where it may: it needs neither
    null = os.open('/dev/null', os.O_RDWR)
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    out = os.open(os.path.join(folder, 'log'), flags, 0o600)
    wanted = {0: null, 1: out, 2: out, **descriptors}
    # First out of the way of each other's numbers.
    aside = {
      there: fcntl.fcntl(here, fcntl.F_DUPFD_CLOEXEC, FIRST)
      for there, here in wanted.items()
    }
    # Its path may be closed to the user, and a script is opened once more.
    program = fcntl.fcntl(program, fcntl.F_DUPFD, FIRST)
    for there, here in aside.items():
      os.dup2(here, there)
    os.chdir(folder)
    if user:
      os.setgroups(list(groups))
      os.setresgid(user, user, user)
      os.setresuid(user, user, user)
    die_with_parent(parent)  # a change of user would have cleared it
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.execve(program, argv, os.environ)
  finally:
    os._exit(127)


def log_of(folder: str) -> str:
  """The end of what a hypervisor said."""
  try:
    with open(os.open(os.path.join(folder, 'log'), READ), 'rb') as file:
      return file.read()[-500:].decode(errors='replace').strip()
  except OSError:
    return ''


def copy_sparse(source: str, target: str) -> None:
  """A copy that shares its blocks where the filesystem can, else its holes."""
  with open(os.open(source, READ), 'rb') as old, open(target, 'xb') as new:
    try:
      fcntl.ioctl(new, FICLONE, old.fileno())
      return
    except OSError:
      pass
    size = os.fstat(old.fileno()).st_size
    os.ftruncate(new.fileno(), size)
    start = 0
    while start < size:
      try:
        start = os.lseek(old.fileno(), start, os.SEEK_DATA)
      except OSError:  # nothing but a hole is left
        return
      end = os.lseek(old.fileno(), start, os.SEEK_HOLE)
      while start < end:
        data = os.pread(old.fileno(), min(end - start, 1 << 20), start)
        os.pwrite(new.fileno(), data, start)
        start += len(data)


def exactly(sock: socket.socket, count: int) -> bytes:
  data = b''
  while len(data) < count:
    piece = sock.recv(count - len(data))
    if not piece:
      raise Broken('it ended')
    data += piece
  return data


def hear(sock: socket.socket) -> bytes:
  """A line."""
  line = b''
  while not line.endswith(b'\n'):
    piece = sock.recv(65536)
    if not piece:
      raise Broken('end of file')
    line += piece
  return line


def unpack_descriptors(messages) -> list:
  """Those that came with a message."""
  return [
    number
    for _, _, body in messages
    for (number,) in struct.iter_unpack('i', body)
  ]
