"""QEMU: its arguments, its monitor, its saved states and its disks.

QEMU runs without a network, in a filter of system calls of its own, and ends with
the process that started it.
"""

import ctypes
import json
import os
import signal
import socket
import struct
import time

EXTRA_MB = 96  # for the kernel, process 1 and the page cache of the tools
TCG_BUFFER_MB = 32  # translated code of a machine
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
NEWIPC, NEWNET = 0x8000000, 0x40000000
# QEMU starts nothing and becomes nobody else.
SANDBOX = 'on,obsolete=deny,elevateprivileges=deny,spawn=deny'
SANDBOX += ',resourcecontrol=deny'

_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent() -> None:
  _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class Broken(Exception):
  """A virtual machine did not boot, or could not be saved."""


class Vm:
  """A running QEMU; `folder` holds its disk, `monitor` is our end of QMP."""

  def __init__(self, pid: int, folder: str, monitor: socket.socket):
    self.pid = pid
    self.folder = folder
    self.monitor = monitor


def launch(
  config, folder, channel, memory, disk, state=-1, boot=(), ignore=True
) -> Vm:
  """Starts QEMU.

  Args:
    channel: descriptor of the agent's socket.
    memory: path of the file, and whether it is changed or mapped privately.
    disk: path and format of the machine's own disk.
    state: descriptor of a saved state to go on from; -1 boots.
    boot: further arguments.
    ignore: saved states leave out memory that is a shared file.
  """
  ours, theirs = socket.socketpair()
  for message in opening(state, ignore):
    ours.sendall(json.dumps(message).encode() + b'\n')
  path, share = memory
  argv = [
    config['qemu'],
    *('-machine', 'microvm,memory-backend=memory'),
    *accelerator(config['accelerator']),
    *('-m', f'{config["memory_mb"] + EXTRA_MB}M', '-smp', '1'),
    *('-object', _memory(config, path, share)),
    *('-nodefaults', '-no-user-config', '-no-reboot', '-display', 'none'),
    *('-drive', _drive('root', config['root'], 'raw', 'on')),
    *('-device', 'virtio-blk-device,drive=root'),
    *('-drive', _drive('own', *disk, 'off')),
    *('-device', 'virtio-blk-device,drive=own'),
    *('-device', 'virtio-rng-device'),
    *('-device', 'virtio-serial-device'),
    *('-chardev', f'socket,id=agent,fd={channel}'),
    *('-device', 'virtserialport,chardev=agent,name=agent'),
    *('-chardev', f'socket,id=monitor,fd={theirs.fileno()}'),
    *('-mon', 'chardev=monitor,mode=control'),
    # Else a fork of a machine that was stopped to be saved stays stopped.
    *('-global', 'migration.store-global-state=off'),
    *boot,
  ]
  if state >= 0:
    argv += ['-incoming', 'defer']
  argv += ['-sandbox', SANDBOX]
  inherited = [channel, theirs.fileno(), *([state] if state >= 0 else [])]
  pid = os.fork()
  if pid == 0:
    become(argv, inherited, os.path.join(folder, 'log'))
  theirs.close()
  return Vm(pid, folder, ours)


def opening(state: int, ignore: bool) -> list:
  """What a monitor is told before anything: they are answered in their time."""
  messages = [{'execute': 'qmp_capabilities'}]
  if ignore:
    messages.append(ignore_shared(True))
  if state >= 0:
    uri = {'uri': f'fd:{state}'}
    messages.append({'execute': 'migrate-incoming', 'arguments': uri})
  return messages


def ignore_shared(state: bool) -> dict:
  """Whether saved states leave out memory that is a shared file already."""
  capability = {'capability': 'x-ignore-shared', 'state': state}
  return {
    'execute': 'migrate-set-capabilities',
    'arguments': {'capabilities': [capability]},
  }


def _memory(config: dict, path: str, share: bool) -> str:
  return (
    f'memory-backend-file,id=memory,size={config["memory_mb"] + EXTRA_MB}M'
    f',mem-path={path},share={"on" if share else "off"}'
  )


def _drive(name: str, path: str, kind: str, readonly: str) -> str:
  spelled = path.replace(',', ',,')
  return (
    f'id={name},file={spelled},format={kind},if=none,readonly={readonly}'
    ',cache=unsafe,aio=threads,discard=unmap'
  )


def accelerator(name: str) -> list:
  if name == 'kvm':
    return ['-accel', 'kvm', '-cpu', 'host']
  options = f'tcg,thread=single,tb-size={TCG_BUFFER_MB}'
  return ['-accel', options, '-cpu', 'max']


def become(argv: list, inherited: list, log: str) -> None:
  """Never returns."""
  try:
    die_with_parent()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _libc.unshare(NEWNET | NEWIPC)  # where it may: it needs neither
    _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    null = os.open('/dev/null', os.O_RDWR)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for target, source in ((0, null), (1, out), (2, out)):
      os.dup2(source, target)
    for descriptor in inherited:
      os.set_inheritable(descriptor, True)
    os.execv(argv[0], argv)
  finally:
    os._exit(127)


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
      os.symlink(below, link)
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
