"""Firecracker: its interface, its machines and their way to the agent.

Spoken to in HTTP on a Unix socket, as its `firecracker.yaml` describes; JSON
goes in, nothing or {"fault_message"} comes out. It has no channel that it would
take from us, so each machine has a process of ours beside it, which starts it,
carries bytes between the host's socket and the agent's port (vsock), and ends
with it. Files are opened here and named `/proc/self/fd/N`, alike in every
machine: so a saved state finds the disk of the machine that goes on from it, and
a Firecracker that has no rights reads what it could not reach.

It needs KVM. It keeps the memory of a saved state mapped privately, so forks
share what they do not change; a disk is a plain file, of which each fork has a
copy (shared blocks, where the filesystem can). Saving writes all of the memory.
"""

import json
import os
import select
import shutil
import signal
import socket
import struct
import time

import vm as vm_lib
from vm import Broken

PORT = 1024  # of the agent
GUEST = 3  # the least number that a machine may have
ROOT, OWN, FIRST, SECOND = 10, 11, 12, 13  # descriptors, in every machine
USERS = 0x60000000  # of machines of a root: one each, which owns nothing else
API_S = 60.0
CONNECT_S = 20.0
CHUNK = 1 << 16


class Refusal(Broken):
  """What Firecracker says that it cannot do."""


# --- its interface -----------------------------------------------------------


def ask(folder: str, method: str, path: str, body: dict, limit_s=API_S) -> dict:
  """One request to the Firecracker that works in `folder`.

  Raises:
    Refusal: with its own words.
    Broken: it has ended, or does not answer.
  """
  data = json.dumps(body).encode() if method != 'GET' else b''
  head = f'{method} {path} HTTP/1.1\r\nHost: localhost\r\n'
  head += 'Accept: application/json\r\nContent-Type: application/json\r\n'
  head += f'Content-Length: {len(data)}\r\n\r\n'
  with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(limit_s)
    try:
      reach(sock, folder, 'api')
      sock.sendall(head.encode() + data)
      status, answer = read_answer(sock)
    except OSError as error:
      said = vm_lib.log_of(folder)
      raise Broken(f'Firecracker: {method} {path}: {error} {said}') from error
  if status >= 300:
    fault = answer.get('fault_message', answer)
    raise Refusal(f'Firecracker: {method} {path}: {fault}')
  return answer


def read_answer(sock: socket.socket) -> tuple:
  """(status, JSON or {}) of an answer in HTTP/1.1 with its length."""
  data = b''
  while b'\r\n\r\n' not in data:
    data += more(sock)
  head, body = data.split(b'\r\n\r\n', 1)
  first, *lines = head.decode('latin-1').split('\r\n')
  length = 0
  for line in lines:
    name, _, value = line.partition(':')
    if name.lower() == 'content-length':
      length = int(value)
  while len(body) < length:
    body += more(sock)
  return int(first.split()[1]), json.loads(body or b'{}')


def more(sock: socket.socket) -> bytes:
  data = sock.recv(CHUNK)
  if not data:
    raise ConnectionError('it ended')
  return data


def reach(sock: socket.socket, folder: str, name: str) -> None:
  """Connects to a socket in a folder, however long the folder's path is.

  Whose folder it is must listen: a link could lead to any other socket of ours.
  """
  place = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
  try:
    sock.connect(f'/proc/self/fd/{place}/{name}')
    owner = os.fstat(place).st_uid
  finally:
    os.close(place)
  size = struct.calcsize('3i')
  peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
  if struct.unpack('3i', peer)[1] != owner:
    raise Refusal(f'Firecracker: another than user {owner} listens at {name}')


# --- a machine ---------------------------------------------------------------


def boot(config: dict, folder: str, initrd: str) -> tuple:
  """A machine that boots, with `disk0` in its folder; our end of its agent."""
  names = {
    ROOT: (config['root'], os.O_RDONLY),
    OWN: (os.path.join(folder, 'disk0'), os.O_RDWR),
    FIRST: (config['kernels']['firecracker'], os.O_RDONLY),
    SECOND: (initrd, os.O_RDONLY),
  }
  vm = vm_lib.Vm(launch(config, folder, names), folder)
  try:
    for path, body in first_requests(config):
      ask(folder, 'PUT', path, body)
    return vm, connect(vm, config['boot_s'])
  except BaseException:
    vm.end()
    raise


def first_requests(config: dict) -> list:
  """Paths and bodies, in their order: a machine is described, then started."""
  line = (
    'quiet reboot=t panic=-1 random.trust_cpu=off mitigations=off console=none'
    f' ro 8250.nr_uarts=0 agent.vsock={PORT}'
  )
  source = {
    'kernel_image_path': fd_path(FIRST),
    'initrd_path': fd_path(SECOND),
    'boot_args': ' '.join([line, *config.get('boot_args', ())]),
  }
  size = config['memory_mb'] + vm_lib.EXTRA_MB
  return [
    ('/machine-config', {'vcpu_count': 1, 'mem_size_mib': size}),
    ('/boot-source', source),
    # The first is /dev/vda: neither is called the root, which would add to the
    # kernel's arguments.
    ('/drives/root', drive('root', ROOT, True)),
    ('/drives/own', drive('own', OWN, False)),
    ('/entropy', {}),
    ('/vsock', {'guest_cid': GUEST, 'uds_path': 'vsock'}),
    ('/actions', {'action_type': 'InstanceStart'}),
  ]


def drive(name: str, descriptor: int, readonly: bool) -> dict:
  return {
    'drive_id': name,
    'path_on_host': fd_path(descriptor),
    'is_root_device': False,
    'is_read_only': readonly,
    'cache_type': 'Unsafe',
  }


def fd_path(descriptor: int) -> str:
  return f'/proc/self/fd/{descriptor}'


def launch(config: dict, folder: str, names: dict) -> int:
  """Starts Firecracker and waits for its interface; its pid.

  Root starts it as a user of its own, who may reach KVM and this folder.

  Args:
    names: descriptor there -> (path, flags).
  """
  for name in ('api', 'vsock'):
    if os.path.lexists(os.path.join(folder, name)):
      os.unlink(os.path.join(folder, name))
  user, groups = 0, []
  if os.geteuid() == 0:
    user = give_away(folder)
    groups = vm_lib.groups_for(config['kvm_device'])
    os.chown(names[OWN][0], user, user)
  opened = {}
  try:
    for number, (path, flags) in names.items():
      opened[number] = os.open(path, flags | os.O_CLOEXEC)
    program = config['programs']['firecracker']
    argv = [program, '--api-sock', 'api', '--level', 'Warn']
    pid = vm_lib.spawn(argv, opened, folder, user, groups)
  finally:
    for descriptor in opened.values():
      os.close(descriptor)
  try:
    wait_for(pid, folder, lambda: ask(folder, 'GET', '/', {}), CONNECT_S)
  except BaseException:
    vm_lib.Vm(pid, folder).end()
    raise
  return pid


def give_away(folder: str) -> int:
  """Makes the folder that of a user of its own, or of nobody; who it is."""
  try:
    os.chown(folder, USERS + os.getpid(), USERS + os.getpid())
  except OSError:  # a root of few users
    os.chown(folder, vm_lib.NOBODY, vm_lib.NOBODY)
  return os.stat(folder).st_uid


def wait_for(pid: int, folder: str, act, limit_s: float):
  """What `act` gives as soon as it does not raise Broken or OSError."""
  deadline, pause = time.monotonic() + limit_s, 0.001
  while True:
    try:
      return act()
    except Refusal:
      raise
    except (Broken, OSError) as error:
      gone = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
      if gone is not None:
        said = vm_lib.log_of(folder)
        raise Broken(f'Firecracker ended ({gone.si_status}): {said}') from error
      if time.monotonic() > deadline:
        said = vm_lib.log_of(folder)
        raise Broken(
          f'Firecracker: no answer within {limit_s:.0f} s: {error} {said}'
        ) from error
    time.sleep(pause)
    pause = min(2 * pause, 0.03)


def connect(vm: vm_lib.Vm, limit_s: float) -> socket.socket:
  """A connection to the agent, as soon as it listens."""

  def once() -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
      sock.settimeout(limit_s)
      reach(sock, vm.folder, 'vsock')
      sock.sendall(b'CONNECT %d\n' % PORT)
      line = b''
      while not line.endswith(b'\n'):
        piece = sock.recv(1)  # what follows belongs to the agent
        if not piece:
          raise ConnectionError('nobody listens inside')
        line += piece
      if not line.startswith(b'OK '):
        raise Broken(f'Firecracker: {line!r} for a connection')
      sock.settimeout(None)
      return sock
    except BaseException:
      sock.close()
      raise

  return wait_for(vm.pid, vm.folder, once, limit_s)


def keep(config: dict, vm: vm_lib.Vm, folder: str) -> None:
  """Stops a booted machine and leaves its memory and state beside its disk."""
  del config
  ask(folder, 'PATCH', '/vm', {'state': 'Paused'})
  write_state(folder, 'state', 'memory')
  if os.geteuid() == 0:  # no longer the machine's own
    for path in (
      folder,
      *(os.path.join(folder, x) for x in os.listdir(folder)),
    ):
      os.chown(path, 0, 0, follow_symlinks=False)
  readable(folder)


def write_state(folder: str, state: str, memory: str) -> None:
  body = {'snapshot_path': state, 'mem_file_path': memory}
  ask(folder, 'PUT', '/snapshot/create', {'snapshot_type': 'Full', **body})


def readable(folder: str) -> None:
  """For machines of other users; the folders above it are closed to others."""
  for name in ('state', 'memory', 'disk0'):
    descriptor = os.open(os.path.join(folder, name), vm_lib.READ)
    try:
      os.fchmod(descriptor, 0o644)
    finally:
      os.close(descriptor)


def start(config: dict, folder: str, source: str, channel: int) -> vm_lib.Vm:
  """A machine that goes on where a saved one stopped, with its own disk."""
  parent = os.getpid()
  pid = os.fork()
  if pid == 0:
    try:
      signal.set_wakeup_fd(-1)
      signal.signal(signal.SIGCHLD, signal.SIG_DFL)
      vm_lib.die_with_parent(parent)
      accompany(config, folder, source, socket.socket(fileno=os.dup(channel)))
    except (Broken, OSError):
      pass  # the host sees end of file, and starts another
    finally:
      os._exit(0)
  return vm_lib.Vm(pid, folder)


def accompany(config, folder: str, source: str, channel: socket.socket) -> None:
  """Starts a machine and carries bytes until either side ends."""
  wake, wake_write = os.pipe()
  for descriptor in (wake, wake_write):
    os.set_blocking(descriptor, False)
  signal.signal(signal.SIGUSR1, lambda *_: None)
  signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
  vm_lib.copy_sparse(
    os.path.join(source, 'disk0'), os.path.join(folder, 'disk0')
  )
  names = {
    ROOT: (config['root'], os.O_RDONLY),
    OWN: (os.path.join(folder, 'disk0'), os.O_RDWR),
    FIRST: (os.path.join(source, 'memory'), os.O_RDONLY),
    SECOND: (os.path.join(source, 'state'), os.O_RDONLY),
  }
  vm = vm_lib.Vm(launch(config, folder, names), folder)
  ask(folder, 'PUT', '/snapshot/load', load_request())
  carry(vm, channel, wake)


def load_request() -> dict:
  return {
    'snapshot_path': fd_path(SECOND),
    'mem_backend': {'backend_type': 'File', 'backend_path': fd_path(FIRST)},
    'resume_vm': True,
  }


def carry(vm: vm_lib.Vm, channel: socket.socket, wake: int) -> None:
  """Bytes from the host to the agent and back, of one request at a time.

  A machine that is saved loses its connections, by the nature of vsock; a signal
  says so. Another is made when there is something to say.
  """
  agent, asked = None, False
  while True:
    sources = [channel, wake, *([agent] if agent else [])]
    ready, _, _ = select.select(sources, [], [])
    if wake in ready:
      os.read(wake, 512)
      agent = hang_up(agent)
    elif agent in ready:
      data = receive(agent)
      if data:
        channel.sendall(data)
      elif asked:
        return  # it died of the request
      else:
        agent = hang_up(agent)
      asked = False
    elif channel in ready:
      data = channel.recv(CHUNK)
      if not data:
        return
      agent = agent or connect(vm, CONNECT_S)
      agent.sendall(data)
      asked = True


def hang_up(agent) -> None:
  if agent is not None:
    agent.close()


def receive(sock: socket.socket) -> bytes:
  """Nothing at the end, however it came."""
  try:
    return sock.recv(CHUNK)
  except OSError:
    return b''


# --- saved states ------------------------------------------------------------


def save(config: dict, vm: vm_lib.Vm, to: str) -> None:
  """The state of a running machine, which goes on."""
  del config
  os.makedirs(to, exist_ok=True)
  ask(vm.folder, 'PATCH', '/vm', {'state': 'Paused'})
  try:
    write_state(vm.folder, 'saved-state', 'saved-memory')
    own = os.path.join(vm.folder, 'disk0')
    vm_lib.copy_sparse(own, os.path.join(to, 'disk0'))
    for name in ('state', 'memory'):
      shutil.move(
        os.path.join(vm.folder, f'saved-{name}'), os.path.join(to, name)
      )
    readable(to)
  finally:
    ask(vm.folder, 'PATCH', '/vm', {'state': 'Resumed'})
    os.kill(vm.pid, signal.SIGUSR1)
