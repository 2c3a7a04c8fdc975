"""Virtual machines on request: boots one, keeps its state, forks the rest from it.

    python -S -s -P hypervisor.py CONTROL_FD

Speaks as `zygote.py` does: a line of settings in, {"ready": true, "facts"} out,
then a line of JSON for each request:

  {"do": "start", "id": n, "from": folder or ""}   with one end of a socket pair
  {"do": "save", "id": n, "to": folder}            with a descriptor for the answer
  {"do": "stop", "id": n}

A saved state is a folder: `memory` (the machine's memory, mapped privately by
each fork, so that forks share what they do not change), `state` (its devices)
and `disk0`, `disk1`, ... (what it wrote, each over the one before). The state of
a freshly booted machine is kept in the cache. End of file ends this process, and every machine with it.

QEMU is told the frequency of the time stamp counter: its microvm has no other
clock to measure it by that this kernel would use.
"""

import ctypes
import fcntl
import hashlib
import json
import mmap
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, _HERE)
import qemu  # noqa: E402

KVM_S = 20.0  # for a boot under KVM to show that it works
KEPT_STATES = 6


class Refused(Exception):
  """What was asked for cannot be had here; says what to do."""


def main() -> None:
  control = socket.socket(fileno=int(sys.argv[1]))
  config = json.loads(hear(control))
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    template, facts = find_template(config)
  except Refused as error:
    say(control, {'refused': str(error)})
    return
  except (qemu.Broken, OSError) as error:
    say(control, {'error': str(error)})
    return
  say(control, {'ready': True, 'facts': facts})
  control.setblocking(True)
  machines: dict = {}
  try:
    serve(control, config, template, machines)
  finally:
    for vm in machines.values():
      os.kill(vm.pid, signal.SIGKILL)
      os.waitpid(vm.pid, 0)
    shutil.rmtree(config['scratch'], ignore_errors=True)


def hear(sock: socket.socket) -> bytes:
  line = b''
  while not line.endswith(b'\n'):
    piece = sock.recv(65536)
    if not piece:
      raise qemu.Broken('end of file')
    line += piece
  return line


def say(sock: socket.socket, message: dict) -> None:
  try:
    sock.sendall(json.dumps(message).encode() + b'\n')
  except OSError:
    pass  # the host is gone: end of file comes next


# --- requests ----------------------------------------------------------------


def serve(control, config: dict, template: str, machines: dict) -> None:
  """Until end of file. Ended machines are buried as they are noticed."""
  wake, wake_write = os.pipe()
  for descriptor in (wake, wake_write):
    os.set_blocking(descriptor, False)
  signal.signal(signal.SIGCHLD, lambda *_: None)
  signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
  text, descriptors = b'', []
  while True:
    ready, _, _ = select.select([control, wake], [], [])
    if wake in ready:
      os.read(wake, 4096)
      bury(machines)
    if control not in ready:
      continue
    space = socket.CMSG_SPACE(16 * 4)
    data, messages, _, _ = control.recvmsg(65536, space)
    if not data:
      return
    for _, _, body in messages:
      descriptors += [x for (x,) in struct.iter_unpack('i', body)]
    *lines, text = (text + data).split(b'\n')
    for line in lines:
      obey(json.loads(line), config, template, machines, descriptors)


def obey(request, config, template, machines, descriptors) -> None:
  number = request['id']
  if request['do'] == 'start':
    descriptor = descriptors.pop(0)
    try:
      folder = os.path.join(config['scratch'], f'vm{number}')
      source = request['from'] or template
      machines[number] = start(config, folder, source, descriptor)
    except OSError as error:
      sys.stderr.write(f'machine {number}: {error}\n')
    finally:
      os.close(descriptor)  # the host sees end of file where it did not start
  elif request['do'] == 'stop' and number in machines:
    os.kill(machines[number].pid, signal.SIGKILL)
  elif request['do'] == 'save':
    descriptor = descriptors.pop(0)
    if number in machines:
      save_aside(config, machines[number], request['to'], descriptor)
    else:
      os.write(descriptor, b'{"error": "the machine is gone"}\n')
    os.close(descriptor)


def bury(machines: dict) -> None:
  """Reaps what ended; removes the folders of machines."""
  while True:
    try:
      pid, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
      return
    if not pid:
      return
    for number, vm in list(machines.items()):
      if vm.pid == pid:
        vm.monitor.close()
        shutil.rmtree(vm.folder, ignore_errors=True)
        del machines[number]


def save_aside(config: dict, vm: qemu.Vm, to: str, descriptor: int) -> None:
  """Saves in a process of its own: requests go on meanwhile."""
  if os.fork():
    return
  answer: dict = {}
  try:
    signal.set_wakeup_fd(-1)
    qemu.die_with_parent()
    save(config, vm, to)
    answer = {'saved': to}
  except BaseException as error:
    shutil.rmtree(to, ignore_errors=True)
    answer = {'error': str(error) or repr(error)}
  finally:
    os.write(descriptor, json.dumps(answer).encode() + b'\n')
    os._exit(0)


# --- a machine ---------------------------------------------------------------


def start(config: dict, folder: str, source: str, channel: int) -> qemu.Vm:
  """A machine that goes on where a saved one stopped, with its own disk."""
  os.utime(source)  # in use: `prune` leaves it
  os.mkdir(folder)
  depth = qemu.share_disks(source, folder)
  disk = qemu.write_overlay(folder, depth, config['disk_bytes'])
  state = os.open(os.path.join(source, 'state'), os.O_RDONLY)
  try:
    return qemu.launch(
      config,
      folder,
      channel,
      memory=(os.path.join(source, 'memory'), False),
      disk=(disk, 'qcow2'),
      state=state,
    )
  finally:
    os.close(state)


# --- saved states ------------------------------------------------------------


def save(config: dict, vm: qemu.Vm, to: str) -> None:
  """The state of a running fork, which goes on.

  What a fork changed of its memory is its own, so it travels in the state; a
  second QEMU takes that up and leaves memory and state apart, so that forks of
  this state are as quick as those of the first.
  """
  os.makedirs(to, exist_ok=True)
  monitor = qemu.Monitor(vm.monitor, 60.0)
  monitor.send(qemu.ignore_shared(False))
  whole = os.path.join(to, 'whole')
  depth = len(qemu.disks(vm.folder)) - 1
  monitor.ask('stop')
  try:
    qemu.write_state(monitor, whole)
    qemu.share_disks(vm.folder, to, depth)
    own = f'disk{depth}'
    shutil.copyfile(os.path.join(vm.folder, own), os.path.join(to, own))
  finally:
    monitor.ask('cont')
  divide(config, whole, to)
  os.unlink(whole)


def divide(config: dict, whole: str, to: str) -> None:
  memory = os.path.join(to, 'memory')
  disk = qemu.write_overlay(to, len(qemu.disks(to)), config['disk_bytes'])
  state = os.open(whole, os.O_RDONLY)
  ours, theirs = socket.socketpair()
  try:
    vm = qemu.launch(
      config,
      to,
      theirs.fileno(),
      memory=(memory, True),
      disk=(disk, 'qcow2'),
      state=state,
      boot=('-S',),
      ignore=False,
    )
  finally:
    os.close(state)
    theirs.close()
  try:
    monitor = qemu.Monitor(vm.monitor, 60.0)
    deadline = time.monotonic() + 60.0
    while monitor.ask('query-status')['status'] == 'inmigrate':
      if time.monotonic() > deadline:
        raise qemu.Broken('a saved state was not taken up within 60 s')
      time.sleep(0.003)
    monitor.send(qemu.ignore_shared(True))
    qemu.write_state(monitor, os.path.join(to, 'state'))
  finally:
    os.kill(vm.pid, signal.SIGKILL)
    os.waitpid(vm.pid, 0)
    ours.close()
  os.unlink(disk)


# --- the first state ---------------------------------------------------------


def find_template(config: dict) -> tuple:
  """(folder of the booted machine's state, facts); boots where there is none.

  One host process boots a state, others wait for it.
  """
  cache = config['cache']
  os.makedirs(cache, exist_ok=True)
  config['khz'] = counter_khz()
  choose_accelerator(config)
  folder = os.path.join(cache, key_of(config))
  began = time.monotonic()
  with open(folder + '.lock', 'w') as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    booted = not os.path.exists(os.path.join(folder, 'facts.json'))
    if booted:
      shutil.rmtree(folder, ignore_errors=True)
      facts = boot(config, folder)
      facts['boot_s'] = round(time.monotonic() - began, 2)
      with open(os.path.join(folder, 'facts.json'), 'w') as file:
        json.dump(facts, file)
      prune(cache, folder)
    with open(os.path.join(folder, 'facts.json')) as file:
      facts = json.load(file)
    os.utime(folder)
  facts['kvm'] = config['kvm']
  facts['accelerator'] = config['accelerator']
  return folder, facts


def key_of(config: dict) -> str:
  names = (
    *('image_digest', 'qemu_version', 'accelerator', 'memory_mb', 'processes'),
    *('disk_mb', 'output_bytes', 'cpu_s', 'start', 'agent'),
  )
  clock = round(config['khz'] / 10_000)  # a state belongs to a host's counter
  text = json.dumps([[config[name] for name in names], clock])
  sources = b''
  for path in (__file__, qemu.__file__):
    with open(path, 'rb') as file:
      sources += file.read()
  return hashlib.sha256(text.encode() + sources).hexdigest()[:20]


def prune(cache: str, keep: str) -> None:
  """Removes the states that were used longest ago, no sooner than an hour after.

  Machines that were forked from one go on: they have it mapped.
  """
  states = [
    entry.path
    for entry in os.scandir(cache)
    if os.path.exists(os.path.join(entry.path, 'facts.json'))
  ]
  states.sort(key=os.path.getmtime, reverse=True)
  for path in states[KEPT_STATES:]:
    if path != keep and os.path.getmtime(path) < time.time() - 3600:
      shutil.rmtree(path, ignore_errors=True)


def boot(config: dict, folder: str) -> dict:
  """Boots, warms and saves a machine; what it told of itself."""
  os.makedirs(folder)
  memory = os.path.join(folder, 'memory')
  disk = os.path.join(folder, 'disk0')
  initrd = os.path.join(folder, 'initrd')
  make_blank(config, disk)
  with open(initrd, 'wb') as file:
    for path in config['initrds']:
      with open(path, 'rb') as part:
        shutil.copyfileobj(part, file)
  ours, theirs = socket.socketpair()
  line = (
    f'quiet reboot=t panic=-1 random.trust_cpu=off tsc_early_khz={config["khz"]}'
    ' tsc=reliable mitigations=off console=none ro'
  )
  vm = qemu.launch(
    config,
    folder,
    theirs.fileno(),
    memory=(memory, True),
    disk=(disk, 'raw'),
    boot=('-kernel', config['kernel'], '-initrd', initrd, '-append', line),
  )
  theirs.close()
  try:
    facts = prepare(config, ours)
    monitor = qemu.Monitor(vm.monitor, 60.0)
    monitor.ask('stop')
    qemu.write_state(monitor, os.path.join(folder, 'state'))
  except (OSError, qemu.Broken, ValueError) as error:
    with open(os.path.join(folder, 'log'), 'rb') as file:
      log = file.read()[-500:].decode(errors='replace').strip()
    raise qemu.Broken(f'a machine did not boot: {error} {log}') from error
  finally:
    os.kill(vm.pid, signal.SIGKILL)
    os.waitpid(vm.pid, 0)
    ours.close()
  os.unlink(initrd)
  return facts


def prepare(config: dict, sock: socket.socket) -> dict:
  """Settings in, readiness out; then one call, so that its code is in memory."""
  sock.settimeout(config['boot_s'])
  names = ('memory_mb', 'processes', 'disk_mb', 'output_bytes', 'cpu_s')
  settings = {name: config[name] for name in (*names, 'start')}
  settings |= {'driver': 'microvm', 'image': ''}
  sock.sendall(json.dumps(settings).encode() + b'\n')
  message = json.loads(hear(sock))
  if 'error' in message:
    raise qemu.Broken(message['error'])
  calls = (
    {'facts': True},
    {'run': ['python', '-c', 'pass'], 'timeout': 20},
    {'run': ['sh', '-c', 'ls | cat'], 'timeout': 20},
  )
  facts: dict = {}
  for request in calls:
    text = json.dumps(request).encode()
    sock.sendall(struct.pack('>II', len(text), 0) + text)
    size, rest = struct.unpack('>II', exactly(sock, 8))
    answer = json.loads(exactly(sock, size))
    exactly(sock, rest)
    facts = answer.get('facts', facts)
  return facts


def exactly(sock: socket.socket, count: int) -> bytes:
  data = b''
  while len(data) < count:
    piece = sock.recv(count - len(data))
    if not piece:
      raise qemu.Broken('it ended')
    data += piece
  return data


def make_blank(config: dict, disk: str) -> None:
  """The disk that a machine writes to: sparse, with an empty filesystem."""
  with open(disk, 'wb') as file:
    file.truncate(config['disk_bytes'])
  argv = [config['mke2fs'], '-q', '-t', 'ext4', '-m', '0']
  argv += ['-O', '^has_journal', '-E', 'lazy_itable_init=1', disk]
  status = os.spawnv(os.P_WAIT, argv[0], argv)
  if status:
    raise qemu.Broken(f'mke2fs failed ({status})')


def choose_accelerator(config: dict) -> None:
  """KVM where a boot under it works; the answer is kept for this boot of ours."""
  wanted = config['accelerator']
  config['kvm'] = 'not asked for'
  if wanted == 'tcg':
    return
  with open('/proc/sys/kernel/random/boot_id') as file:
    mark = file.read() + key_of(config)
  name = hashlib.sha256(mark.encode()).hexdigest()[:12]
  path = os.path.join(config['cache'], f'kvm-{name}')
  try:
    with open(path) as file:
      config['kvm'] = file.read()
  except FileNotFoundError:
    config['kvm'] = probe_kvm(config)
    with open(path, 'w') as file:
      file.write(config['kvm'])
  if config['kvm'] != 'works' and wanted == 'kvm':
    raise Refused(
      f'machine.accelerator=kvm cannot work here: {config["kvm"]}; set'
      ' machine.accelerator=tcg'
    )
  config['accelerator'] = 'kvm' if config['kvm'] == 'works' else 'tcg'


def probe_kvm(config: dict) -> str:
  """'works', or why not: a device file alone shows nothing, a boot does."""
  try:
    os.close(os.open('/dev/kvm', os.O_RDWR))
  except OSError as error:
    return f'/dev/kvm: {error.strerror}'
  trial = {**config, 'accelerator': 'kvm', 'boot_s': KVM_S, 'start': ''}
  folder = os.path.join(config['scratch'], 'kvm')
  try:
    boot(trial, folder)
  except (qemu.Broken, OSError) as error:
    return str(error)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  return 'works'


def counter_khz(seconds: float = 0.05) -> int:
  """Frequency of the time stamp counter, in kHz: RDTSC against the clock.

  A guest that is told another frequency has a clock that goes wrong, so an
  interruption between the two readings must not count: of several pairs, the
  one that was read fastest is taken.
  """
  page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | 4)
  page.write(bytes.fromhex('0f31 48c1e220 4809d0 c3'))
  anchor = ctypes.c_char.from_buffer(page)
  read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(anchor))

  def pair() -> tuple:
    tries = []
    for _ in range(50):
      before = time.perf_counter_ns()
      ticks = read()
      after = time.perf_counter_ns()
      tries.append((after - before, before + after, ticks))
    _, twice, ticks = min(tries)
    return twice / 2, ticks

  first, second = pair(), (time.sleep(seconds), pair())[1]
  return round((second[1] - first[1]) * 1e6 / (second[0] - first[0]))


if __name__ == '__main__':
  main()
