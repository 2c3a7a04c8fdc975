"""Process 1 of a virtual machine: the same requests over a serial port, or vsock.

    python3 -S -s -P guest.py

Scripts of the host's own are ordinary commands here. Started by the first
filesystem's script with the disks mounted. It reads one line
of JSON, its settings, starts what the image wants started, says {"ready": true}
and then answers as `serve.py` says, until the other end hangs up: then it powers
the machine off. Where the kernel's arguments name a port of vsock, it listens
there instead; a connection ends with a saved state, so then it waits for the next.
A command is root here, in a control group of its own, without the capabilities
that reach the machine itself (mounts, modules, devices, reboot, other processes'
memory); what it started dies with it, services stay.

A machine that goes on from a saved state is told so by its first requests: it
mixes the entropy that came with them into its random pool, and sets its clock.
"""

import ctypes
import fcntl
import gc
import glob
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, _HERE)
import execute  # noqa: E402
import groups  # noqa: E402
import seccomp  # noqa: E402
import serve  # noqa: E402

WORK = '/machine/work'
PORT = '/dev/vport*'
VSOCK = 'agent.vsock='
START_S = 280.0  # for services
SERVICES = 32  # processes of their own
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
RB_POWER_OFF = 0x4321FEDC
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38
# What a command may do to its own files, users and processes, and no more.
KEPT = {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 18, 28, 29, 31}
MS_RDONLY, MS_REMOUNT, MS_BIND, MNT_DETACH = 1, 32, 4096, 2
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
CLOCK_SLACK_S = 0.01
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

_libc = ctypes.CDLL(None, use_errno=True)


class Port:
  """A virtio serial port with the methods of a socket that `serve` uses."""

  def __init__(self, path: str):
    self.descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)

  def fileno(self) -> int:
    return self.descriptor

  def recv(self, count: int) -> bytes:
    return os.read(self.descriptor, count)

  def recv_into(self, view) -> int:
    return os.readv(self.descriptor, [view])

  def sendall(self, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
      rest = rest[os.write(self.descriptor, rest[: 1 << 15]) :]


class Vsock:
  """Whoever connected last to a port of vsock, with those methods too.

  A saved machine goes on with a connection that nobody holds any more, and may
  not be told so: the next one takes its place.
  """

  def __init__(self, listener: socket.socket):
    self.listener = listener
    self.sock = self.listener.accept()[0]

  def fileno(self) -> int:
    return self.sock.fileno()

  def wait(self) -> None:
    """Until there is something to read, of the newest connection."""
    while True:
      ready, _, _ = select.select([self.listener, self.sock], [], [])
      if self.listener not in ready:
        return
      self.next()

  def next(self) -> None:
    sock, _ = self.listener.accept()
    self.sock.close()
    self.sock = sock

  def recv(self, count: int) -> bytes:
    view = bytearray(count)
    return bytes(view[: self.recv_into(view)])

  def recv_into(self, view) -> int:
    while True:
      self.wait()
      try:
        got = self.sock.recv_into(view)
      except OSError:
        got = 0
      if got:
        return got
      self.next()

  def sendall(self, data: bytes) -> None:
    self.sock.sendall(data)


class Machine(serve.Machine):
  """The virtual machine, as `execute` sees it."""

  def __init__(self, port, config: dict, parents: dict):
    super().__init__(port, config, WORK)
    self.image = ''  # its interpreter is this one
    self.parents = parents
    self.group = None
    self.calls = 0
    self.path, self.finders = sys.path[:], sys.meta_path[:]

  def seal(self) -> None:
    """Process 1 imports nothing any more that a command could have written.

    A command is root, and the standard library is on its disk.
    """
    sys.path.clear()
    sys.meta_path[:] = self.finders[:2]  # built in, frozen

  def begin_command(self) -> None:
    self.calls += 1
    name = f'call{self.calls}'
    self.group = groups.Group(self.parents, name, self.memory, self.processes)

  def prepare_command(self) -> None:
    self.group.enter()
    drop_privileges()
    sys.path[:], sys.meta_path[:] = self.path, self.finders

  def end_command(self, result) -> None:
    """Everything that the command started dies; services do not."""
    if self.group.kills() and not result.killed:
      result.killed = f'memory: more than {self.memory >> 20} MB'
    while not self.group.remove():
      time.sleep(0.001)
    self.group = None

  def own_kill(self) -> bool:
    if self.group is not None:
      self.group.kill()
      while not self.group.empty():
        execute.reap(block=False)
        time.sleep(0.001)
      execute.reap(block=False)
    return True

  def pressure(self) -> str:
    words = self.group.get('memory', 'cpu.stat').split()
    used = int(words[words.index('usage_usec') + 1]) / 1e6
    if used > self.cpu_limit:
      return f'cpu: {used:.1f} s used, {self.cpu_limit:.1f} allowed'
    return ''

  def resume(self, message: dict) -> None:
    """Makes a copy of a machine differ from the others, in time and chance."""
    entropy = bytes.fromhex(message['entropy'])
    with open('/dev/urandom', 'wb', buffering=0) as pool:
      packed = struct.pack('ii', len(entropy) * 8, len(entropy)) + entropy
      fcntl.ioctl(pool, RNDADDENTROPY, packed)
      fcntl.ioctl(pool, RNDRESEEDCRNG)
    if abs(time.time() - message['time']) > CLOCK_SLACK_S:
      time.clock_settime(time.CLOCK_REALTIME, message['time'])

  def close(self) -> None:
    power_off()


def main() -> None:
  # The one signal with a handler, so the one that programs could send process 1.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  port = open_port()
  try:
    config = json.loads(hear(port))
    mount_all(config)
    parents = control_groups(config)
    start_services(config['start'], parents)
    for name in execute.PRELOAD:
      __import__(name)
    hide()
  except BaseException as error:
    say(port, {'error': repr(error)})
    time.sleep(1)
    power_off()
  machine = Machine(port, config, parents)
  machine.seal()
  gc.collect()
  gc.freeze()
  say(port, {'ready': True})
  serve.loop(port, machine)


def open_port():
  with open('/proc/cmdline') as file:
    words = [x for x in file.read().split() if x.startswith(VSOCK)]
  if words:
    listener = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
    number = int(words[0].removeprefix(VSOCK))
    listener.bind((socket.VMADDR_CID_ANY, number))
    listener.listen(4)
    return Vsock(listener)
  return Port(wait_for_port())


def wait_for_port() -> str:
  for _ in range(200):
    found = glob.glob(PORT)
    if found:
      return found[0]
    time.sleep(0.05)
  power_off()
  return ''


def hear(port) -> bytes:
  line = b''
  while not line.endswith(b'\n'):
    piece = port.recv(65536)
    if not piece:
      power_off()
    line += piece
  return line


def say(port, message: dict) -> None:
  port.sendall(json.dumps(message).encode() + b'\n')


def power_off() -> None:
  os.sync()
  _libc.reboot(RB_POWER_OFF)
  time.sleep(10)
  os._exit(1)  # the kernel panics then, which ends the machine as well


def mount(source: str, target: str, kind: str, flags: int, data: str = ''):
  names = (source.encode(), target.encode(), kind.encode() or None)
  if _libc.mount(*names, ctypes.c_ulong(flags), data.encode() or None):
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), target)


def mount_all(config: dict) -> None:
  for path in ('/machine', WORK, '/machine/tmp', '/dev/pts', '/dev/shm'):
    os.makedirs(path, exist_ok=True)
  os.chmod('/tmp', 0o1777)
  os.chmod('/machine/tmp', 0o1777)
  mount('devpts', '/dev/pts', 'devpts', MS_NOSUID | MS_NOEXEC)
  # What is left there when a command ends is memory of the machine's.
  shm = f'mode=1777,size={config["disk_mb"]}m'
  mount('shm', '/dev/shm', 'tmpfs', MS_NOSUID | MS_NODEV, shm)
  for link, target in (
    ('fd', 'fd'),
    ('stdin', 'fd/0'),
    ('stdout', 'fd/1'),
    ('stderr', 'fd/2'),
  ):
    if not os.path.lexists(f'/dev/{link}'):
      os.symlink(f'/proc/self/{target}', f'/dev/{link}')
  with open('/proc/sys/kernel/hostname', 'w') as file:
    file.write('machine')
  loopback_up()
  environment = {
    'PATH': '/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin',
    'HOME': WORK,
    'TMPDIR': '/machine/tmp',
    'LANG': 'C.UTF-8',
    'PYTHONUTF8': '1',
    'PYTHONHASHSEED': '0',
    'PYTHONDONTWRITEBYTECODE': '1',
  }
  os.environ.clear()
  os.environ.update(environment)
  os.umask(0o022)
  os.chdir(WORK)


def loopback_up() -> None:
  """The only network that there is."""
  with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
    request = struct.pack('16sh', b'lo', IFF_UP)
    fcntl.ioctl(sock, SIOCSIFFLAGS, request.ljust(40, b'\0'))


def control_groups(config: dict) -> dict:
  """Descriptors of the root of the hierarchy, which nobody else can find.

  Services have a group with limits: a command may have them start programs.
  """
  os.makedirs('/run/groups', exist_ok=True)
  mount('cgroup2', '/run/groups', 'cgroup2', MS_NOSUID | MS_NODEV | MS_NOEXEC)
  with open('/run/groups/cgroup.subtree_control', 'w') as file:
    file.write('+memory +pids')
  root = os.open('/run/groups', os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
  os.mkdir('/run/groups/services')
  for name, value in (
    ('memory.max', config['memory_mb'] << 20),
    ('pids.max', config['processes'] + SERVICES),
  ):
    with open(f'/run/groups/services/{name}', 'w') as file:
      file.write(str(value))
  _libc.umount2(b'/run/groups', MNT_DETACH)
  os.rmdir('/run/groups')
  return {kind: root for kind in groups.KINDS}


def start_services(script: str, parents: dict) -> None:
  if not script:
    return

  def enter() -> None:
    path = os.open('services/cgroup.procs', os.O_WRONLY, dir_fd=parents['pids'])
    os.write(path, b'0')
    os.close(path)

  # A file, not a pipe: services inherit it and hold it open.
  with open('/run/start.log', 'wb') as log:
    done = subprocess.run(
      ['/bin/sh', '-c', script],
      stdin=subprocess.DEVNULL,
      stdout=log,
      stderr=log,
      timeout=START_S,
      preexec_fn=enter,
      check=False,
    )
  if done.returncode:
    with open('/run/start.log', 'rb') as log:
      text = log.read()[-800:].decode(errors='replace')
    raise RuntimeError(f'the services did not start: {text}')


def hide() -> None:
  """What reaches the machine itself goes out of sight, before any command."""
  for pattern in (
    '/dev/vport*',
    '/dev/vsock',
    '/dev/vd*',
    '/dev/mem',
    '/dev/port',
    '/dev/cpu_dma_latency',
    '/dev/hpet',
    '/dev/rtc*',
    '/dev/kmsg',
    '/dev/snapshot',
    '/dev/hwrng',
    '/dev/tty?*',
    '/dev/vcs*',
    '/dev/vga_arbiter',
    '/dev/userfaultfd',
  ):
    for path in glob.glob(pattern):
      os.unlink(path)
  readonly = MS_REMOUNT | MS_BIND | MS_RDONLY
  for path in ('/proc/sys', '/sys', '/run/agent'):
    mount(path, path, '', MS_BIND)
    mount('none', path, '', readonly)
  mount('none', '/dev', '', readonly)  # its files would be memory too
  mount('/dev/null', '/proc/sysrq-trigger', '', MS_BIND)
  _libc.prctl(4, 0, 0, 0, 0)  # not dumpable: no way in through /proc/1


def drop_privileges() -> None:
  """What reaches the machine is refused to the command, root though it is."""
  for capability in range(64):
    if capability not in KEPT:
      if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
        break  # beyond the last one that this kernel knows
  low = sum(1 << x for x in KEPT)
  header = struct.pack('Ii', 0x20080522, 0)
  data = struct.pack('IIIIII', low, low, 0, 0, 0, 0)
  if _libc.capset(header, data):
    raise OSError(ctypes.get_errno(), 'capset')
  _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
  failed = seccomp.install(_libc)
  if failed:
    raise OSError(failed, 'seccomp')
  resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == '__main__':
  main()
