"""QEMU: its arguments, its monitor, its saved states and its disks.

QEMU runs without a network, in a filter of system calls of its own, and ends with
the process that started it. The agent's end of a serial port is its to hold.
A root's QEMU is another user, one for each machine, who owns the disk that it
writes to (and, while it boots, its memory) and nothing else: the folder is not
its own. What it could not reach is opened here and named `/proc/self/fd/N`. It
maps a saved memory privately, but wants the right to write to it all the same;
so the folder of a saved state is closed to all others.

Under emulation QEMU is told the frequency of the time stamp counter: its microvm
has no other clock to measure it by that this kernel would use.
"""

import itertools
import json
import os
import shutil
import socket
import struct
import time

import vm as vm_lib
from vm import Broken
from vm import Vm

# Descriptors, in every machine.
CHANNEL, MONITOR, STATE, ROOT, MEMORY, KERNEL, INITRD = range(10, 17)
USERS = (
  0x70000000  # of machines of a root; 4096 of each process that starts them
)
TCG_BUFFER_MB = 32  # translated code of a machine
# QEMU starts nothing and becomes nobody else.
SANDBOX = 'on,obsolete=deny,elevateprivileges=deny,spawn=deny'
SANDBOX += ',resourcecontrol=deny'


def boot(config: dict, folder: str, initrd: str) -> tuple:
  """A machine that boots, with `disk0` in its folder; our end of its agent."""
  ours, theirs = socket.socketpair()
  khz = config['khz']
  line = (
    f'quiet reboot=t panic=-1 random.trust_cpu=off tsc_early_khz={khz}'
    ' tsc=reliable mitigations=off console=none ro'
  )
  try:
    vm = launch(
      config,
      folder,
      theirs.fileno(),
      memory=(os.path.join(folder, 'memory'), True),
      disk=(os.path.join(folder, 'disk0'), 'raw'),
      boot=(config['kernels']['qemu'], initrd, line),
    )
  finally:
    theirs.close()
  return vm, ours


def keep(config: dict, vm: Vm, folder: str) -> None:
  """Stops a booted machine and leaves its state beside its memory and disk."""
  del config
  monitor = Monitor(vm.monitor, 60.0)
  monitor.ask('stop')
  write_state(monitor, os.path.join(folder, 'state'))
  take_back(folder)


def start(config: dict, folder: str, source: str, channel: int) -> Vm:
  """A machine that goes on where a saved one stopped, with its own disk."""
  depth = share_disks(source, folder)
  disk = write_overlay(folder, depth, config['disk_bytes'])
  state = os.open(os.path.join(source, 'state'), os.O_RDONLY)
  try:
    return launch(
      config,
      folder,
      channel,
      memory=(os.path.join(source, 'memory'), False),
      disk=(disk, 'qcow2'),
      state=state,
    )
  finally:
    os.close(state)


_numbers = itertools.count()


def launch(
  config, folder, channel, memory, disk, state=-1, boot=(), paused=False
) -> Vm:
  """Starts QEMU, as a user of its own where this one is root.

  Args:
    channel: descriptor of the agent's socket.
    memory: path of the file, and whether it is made and changed, or mapped
      privately.
    disk: path, in the folder, and format of the machine's own disk.
    state: descriptor of a saved state to go on from; -1 boots.
    boot: kernel, first filesystem and the kernel's arguments.
    paused: it does not run on, and its saved state holds all of its memory.
  """
  user = vm_lib.user_for(
    USERS + os.getpid() % 65_536 * 4096 + next(_numbers) % 4096
  )
  files = {ROOT: (config['root'], os.O_RDONLY), MEMORY: (memory[0], os.O_RDWR)}
  if boot:
    files |= {KERNEL: (boot[0], os.O_RDONLY), INITRD: (boot[1], os.O_RDONLY)}
  if memory[1]:
    make_memory(config, memory[0])
  for path in (disk[0], *([memory[0]] if memory[1] else [])):
    if user:
      os.chown(path, user, user)
  ours, theirs = socket.socketpair()
  for message in opening(state >= 0, not paused):
    ours.sendall(json.dumps(message).encode() + b'\n')
  given = {CHANNEL: channel, MONITOR: theirs.fileno()}
  if state >= 0:
    given[STATE] = state
  argv = arguments(config, memory[1], disk, state >= 0, boot, paused)
  groups = []
  if user and config['accelerator'] == 'kvm':
    groups = vm_lib.groups_for(config['kvm_device'])
  opened = {}
  try:
    for number, (path, flags) in files.items():
      opened[number] = os.open(path, flags | os.O_CLOEXEC)
    pid = vm_lib.spawn(argv, given | opened, folder, user, groups)
  except BaseException:
    ours.close()
    raise
  finally:
    theirs.close()
    for descriptor in opened.values():
      os.close(descriptor)
  return Vm(pid, folder, ours)


def make_memory(config: dict, path: str) -> None:
  with open(path, 'xb') as file:
    os.fchmod(file.fileno(), 0o600)
    file.truncate((config['memory_mb'] + vm_lib.EXTRA_MB) << 20)


def take_back(folder: str) -> None:
  """Memory and disks from the users who wrote them; for others to go on from."""
  if os.geteuid() != 0:
    return
  for name in ('memory', *disks(folder)):
    descriptor = os.open(os.path.join(folder, name), vm_lib.READ)
    try:
      os.fchown(descriptor, 0, 0)
      os.fchmod(descriptor, 0o666 if name == 'memory' else 0o644)
    finally:
      os.close(descriptor)
  os.chmod(folder, 0o700)


def arguments(config, share, disk, restored, boot, paused) -> list:
  """QEMU's, as `launch` has them."""
  argv = [
    config['programs']['qemu'],
    *('-machine', 'microvm,memory-backend=memory'),
    *accelerator(config['accelerator'], config['cpu']),
    *('-m', f'{config["memory_mb"] + vm_lib.EXTRA_MB}M', '-smp', '1'),
    *('-object', _memory(config, share)),
    *('-nodefaults', '-no-user-config', '-no-reboot', '-display', 'none'),
    *('-drive', _drive('root', fd_path(ROOT), 'raw', 'on')),
    *('-device', 'virtio-blk-device,drive=root'),
    # By its name in the folder, where it finds the disks below it.
    *('-drive', _drive('own', os.path.basename(disk[0]), disk[1], 'off')),
    *('-device', 'virtio-blk-device,drive=own'),
    *('-device', 'virtio-rng-device'),
    *('-device', 'virtio-serial-device'),
    *('-chardev', f'socket,id=agent,fd={CHANNEL}'),
    *('-device', 'virtserialport,chardev=agent,name=agent'),
    *('-chardev', f'socket,id=monitor,fd={MONITOR}'),
    *('-mon', 'chardev=monitor,mode=control'),
    # Else a fork of a machine that was stopped to be saved stays stopped.
    *('-global', 'migration.store-global-state=off'),
    *('-sandbox', SANDBOX),
  ]
  if boot:
    argv += ['-kernel', fd_path(KERNEL), '-initrd', fd_path(INITRD)]
    argv += ['-append', boot[2]]
  if paused:
    argv += ['-S']
  if restored:
    argv += ['-incoming', 'defer']
  return argv


def fd_path(descriptor: int) -> str:
  return f'/proc/self/fd/{descriptor}'


def opening(restored: bool, ignore: bool) -> list:
  """What a monitor is told before anything: they are answered in their time."""
  messages = [{'execute': 'qmp_capabilities'}]
  if ignore:
    messages.append(ignore_shared(True))
  if restored:
    uri = {'uri': f'fd:{STATE}'}
    messages.append({'execute': 'migrate-incoming', 'arguments': uri})
  return messages


def ignore_shared(state: bool) -> dict:
  """Whether saved states leave out memory that is a shared file already."""
  capability = {'capability': 'x-ignore-shared', 'state': state}
  return {
    'execute': 'migrate-set-capabilities',
    'arguments': {'capabilities': [capability]},
  }


def _memory(config: dict, share: bool) -> str:
  return (
    f'memory-backend-file,id=memory,size={config["memory_mb"] + vm_lib.EXTRA_MB}M'
    f',mem-path={fd_path(MEMORY)},share={"on" if share else "off"}'
  )


def _drive(name: str, path: str, kind: str, readonly: str) -> str:
  return (
    f'id={name},file={path},format={kind},if=none,readonly={readonly}'
    ',cache=unsafe,aio=threads,discard=unmap'
  )


def accelerator(name: str, cpu: str) -> list:
  if name == 'kvm':
    return ['-accel', 'kvm', '-cpu', cpu]
  options = f'tcg,thread=single,tb-size={TCG_BUFFER_MB}'
  return ['-accel', options, '-cpu', cpu]


# --- saved states ------------------------------------------------------------


class Monitor:
  """QMP, the language of QEMU's monitor: JSON lines."""

  def __init__(self, sock: socket.socket, limit_s: float):
    self.sock = sock
    self.text = b''
    sock.settimeout(limit_s)

  def read(self) -> dict:
    while b'\n' not in self.text:
      piece = self.sock.recv(65536)
      if not piece:
        raise Broken('QEMU ended')
      self.text += piece
    line, self.text = self.text.split(b'\n', 1)
    try:
      return json.loads(line)
    except ValueError:
      return {}  # the end of an event that an earlier save began to read

  def send(self, message: dict, descriptor: int = -1) -> dict:
    """Its answer; those to earlier messages and events are passed over."""
    name = os.urandom(8).hex()
    data = json.dumps({**message, 'id': name}).encode() + b'\n'
    if descriptor >= 0:
      socket.send_fds(self.sock, [data], [descriptor])
    else:
      self.sock.sendall(data)
    while True:
      answer = self.read()
      if 'id' not in answer and 'error' in answer:
        raise Broken(str(answer['error'].get('desc')))
      if answer.get('id') == name:
        if 'error' in answer:
          what = message['execute']
          raise Broken(f'{what}: {answer["error"].get("desc")}')
        return answer['return']

  def ask(self, command: str, descriptor: int = -1, **arguments) -> dict:
    return self.send({'execute': command, 'arguments': arguments}, descriptor)


def write_state(monitor: Monitor, path: str, limit_s: float = 60.0) -> None:
  """The stopped machine's state into a file, unshared memory included."""
  file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
  try:
    monitor.ask('getfd', file, fdname='state')
  finally:
    os.close(file)
  monitor.ask('migrate-set-parameters', **{'max-bandwidth': 1 << 40})
  monitor.ask('migrate', uri='fd:state')
  deadline = time.monotonic() + limit_s
  while True:
    about = monitor.ask('query-migrate')
    if about.get('status') == 'completed':
      return
    if about.get('status') in ('failed', 'cancelled'):
      raise Broken(f'its state could not be saved: {about}')
    if time.monotonic() > deadline:
      raise Broken(f'its state was not saved within {limit_s:.0f} s')
    time.sleep(0.003)


def save(config: dict, vm: Vm, to: str) -> None:
  """The state of a running fork, which goes on.

  What a fork changed of its memory is its own, so it travels in the state; a
  second QEMU takes that up and leaves memory and state apart, so that forks of
  this state are as quick as those of the first.
  """
  os.makedirs(to, exist_ok=True)
  monitor = Monitor(vm.monitor, 60.0)
  monitor.send(ignore_shared(False))
  whole = os.path.join(to, 'whole')
  depth = len(disks(vm.folder)) - 1
  monitor.ask('stop')
  try:
    write_state(monitor, whole)
    share_disks(vm.folder, to, depth)
    own = f'disk{depth}'
    shutil.copyfile(os.path.join(vm.folder, own), os.path.join(to, own))
  finally:
    monitor.ask('cont')
  divide(config, whole, to)
  os.unlink(whole)


def divide(config: dict, whole: str, to: str) -> None:
  memory = os.path.join(to, 'memory')
  disk = write_overlay(to, len(disks(to)), config['disk_bytes'])
  state = os.open(whole, os.O_RDONLY)
  ours, theirs = socket.socketpair()
  try:
    vm = launch(
      config,
      to,
      theirs.fileno(),
      memory=(memory, True),
      disk=(disk, 'qcow2'),
      state=state,
      paused=True,
    )
  finally:
    os.close(state)
    theirs.close()
  try:
    monitor = Monitor(vm.monitor, 60.0)
    deadline = time.monotonic() + 60.0
    while monitor.ask('query-status')['status'] == 'inmigrate':
      if time.monotonic() > deadline:
        raise Broken('a saved state was not taken up within 60 s')
      time.sleep(0.003)
    monitor.send(ignore_shared(True))
    write_state(monitor, os.path.join(to, 'state'))
  finally:
    vm.end()
    ours.close()
  os.unlink(disk)
  take_back(to)


# --- disks -------------------------------------------------------------------


def disks(folder: str) -> list:
  return [x for x in os.listdir(folder) if x.startswith('disk')]


def share_disks(source: str, folder: str, count: int = -1) -> int:
  """Links disks that do not change any more, the lowest `count`, or all.

  So a state can be discarded while machines and states go on from it.
  """
  count = len(disks(source)) if count < 0 else count
  for depth in range(count):
    below = os.path.realpath(os.path.join(source, f'disk{depth}'))
    link = os.path.join(folder, f'disk{depth}')
    try:
      os.link(below, link)
    except OSError:  # the cache may be on another filesystem; it stays
      if os.geteuid() != 0:
        os.symlink(below, link)
        continue
      vm_lib.copy_sparse(below, link)  # no other user could reach it there
      os.chmod(link, 0o644)
  return count


def write_overlay(folder: str, depth: int, size: int) -> str:
  """An empty qcow2 disk (version 3) over the last: docs/interop/qcow2.txt.

  One cluster each for header, table of reference counts, their one block, and
  the first-level table, whose entry covers 512 MB. Its path is returned.
  """
  cluster, bits = 1 << 16, 16
  path = os.path.join(folder, f'disk{depth}')
  name = b'disk%d' % (depth - 1)  # relative to this one
  entries = -(-size // (cluster * cluster // 8))
  kind = b'qcow2' if depth > 1 else b'raw'
  head = struct.pack(
    '>4sIQIIQIIQQIIQQQQII',
    *(b'QFI\xfb', 3, 112 + 8 + 8 + 8, len(name), bits, size, 0, entries),
    *(3 * cluster, cluster, 1, 0, 0, 0, 0, 0, 4, 104),
  )
  # The format of the disk below, so that its contents cannot choose it.
  extension = struct.pack('>II8s', 0xE2792ACA, len(kind), kind)
  head += extension + bytes(8)
  head = head[:8] + struct.pack('>Q', len(head)) + head[16:] + name
  counts = struct.pack('>HHHH', 1, 1, 1, 1)
  with open(path, 'wb') as file:
    file.write(head)
    file.seek(cluster)
    file.write(struct.pack('>Q', 2 * cluster))
    file.seek(2 * cluster)
    file.write(counts)
    file.truncate(4 * cluster)
  os.chmod(path, 0o600)
  return path
