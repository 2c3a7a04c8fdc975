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
a freshly booted machine is kept in the cache. End of file ends this process, and
every machine with it.

`qemu.py` and `firecracker.py` have the same functions: `boot`, and `keep` what
has booted; `start` from a state, and `save` one.
"""

import ctypes
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
import types

_HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, _HERE)
import cache as cache_lib  # noqa: E402
import firecracker  # noqa: E402
import qemu  # noqa: E402
import vm as vm_lib  # noqa: E402
from vm import Broken  # noqa: E402
from vm import Vm  # noqa: E402
from vm import exactly  # noqa: E402
from vm import hear  # noqa: E402

KINDS = {'firecracker': firecracker, 'qemu': qemu}
# For a boot under KVM to show that it works: longer than an emulated one takes.
KVM_S = 10.0
KEPT_VERDICTS_S = 7 * 86_400.0
DOUBT_S = 3600.0  # a boot that failed may have met a busy moment: tried again
# (hypervisor, accelerator, processor), the best first. A processor is refused
# whole for one register that KVM does not have, so it is tried without it too.
LADDER = (
  ('firecracker', 'kvm', ''),
  ('qemu', 'kvm', 'host'),
  ('qemu', 'kvm', 'host,arch-capabilities=off'),
  ('qemu', 'tcg', 'max'),
)


class Refused(Exception):
  """What was asked for cannot be had here; says what to do."""


def main() -> None:
  control = socket.socket(fileno=int(sys.argv[1]))
  control.set_inheritable(False)  # not for a hypervisor, whom nobody trusts
  config = json.loads(hear(control))
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  try:
    template, facts = find_template(config)
  except Refused as error:
    say(control, {'refused': str(error)})
    return
  except (Broken, OSError) as error:
    say(control, {'error': str(error)})
    return
  say(control, {'ready': True, 'facts': facts})
  control.setblocking(True)
  machines: dict = {}
  try:
    serve(control, config, template, machines)
  finally:
    for vm in machines.values():
      vm.end()
    shutil.rmtree(config['scratch'], ignore_errors=True)


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
    data, messages, _, _ = control.recvmsg(
      65536, space, socket.MSG_CMSG_CLOEXEC
    )
    if not data:
      return
    descriptors += vm_lib.unpack_descriptors(messages)
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
      os.mkdir(folder)
      kind = kind_of(config)
      machines[number] = kind.start(config, folder, source, descriptor)
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
        vm.close()
        shutil.rmtree(vm.folder, ignore_errors=True)
        del machines[number]


def save_aside(config: dict, vm: Vm, to: str, descriptor: int) -> None:
  """Saves in a process of its own: requests go on meanwhile."""
  parent = os.getpid()
  if os.fork():
    return
  answer: dict = {}
  try:
    signal.set_wakeup_fd(-1)
    vm_lib.die_with_parent(parent)
    kind_of(config).save(config, vm, to)
    answer = {'saved': to}
  except BaseException as error:
    shutil.rmtree(to, ignore_errors=True)
    answer = {'error': str(error) or repr(error)}
  finally:
    os.write(descriptor, json.dumps(answer).encode() + b'\n')
    os._exit(0)


def kind_of(config: dict) -> types.ModuleType:
  return KINDS[config['hypervisor']]


# --- the first state ---------------------------------------------------------


def find_template(config: dict) -> tuple:
  """(folder of the booted machine's state, facts); boots where there is none.

  One host process boots a state, others wait for it.
  """
  cache = config['cache']
  os.makedirs(cache, exist_ok=True)
  config['khz'] = counter_khz()
  choose(config)
  folder = os.path.join(cache, key_of(config))
  began = time.monotonic()
  for used in (*config['kernels'].values(), *config['initrds']):
    if os.path.dirname(used) == cache:
      cache_lib.hold(used)  # as the state below, until this process ends
  path = os.path.join(folder, cache_lib.FACTS)
  with cache_lib.making(folder):
    if not os.path.exists(path):
      shutil.rmtree(folder, ignore_errors=True)
      try:
        facts = boot(config, folder)
      except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
      facts['boot_s'] = round(time.monotonic() - began, 2)
      with open(path + '.new', 'w') as file:  # the disk may be full
        json.dump(facts, file)
      os.rename(path + '.new', path)
    with open(path) as file:
      facts = json.load(file)
    cache_lib.hold(folder)
  prune_verdicts(cache)
  facts['removed'] = cache_lib.prune(cache)
  for name in ('kvm', 'accelerator', 'hypervisor'):
    facts[name] = config[name]
  facts['version'] = config['versions'][config['hypervisor']]
  facts['user'] = user_of(config['hypervisor'])
  return folder, facts


def user_of(name: str) -> str:
  """Who a machine's hypervisor is, in words."""
  if os.geteuid() != 0:
    return 'who started it'
  user = vm_lib.user_for(KINDS[name].USERS)
  words = {0: 'root', vm_lib.NOBODY: 'nobody'}
  return words.get(user, 'one of its own')


def key_of(config: dict) -> str:
  names = (
    *('image_digest', 'hypervisor', 'accelerator', 'cpu', 'memory_mb'),
    *('processes', 'disk_mb', 'output_bytes', 'cpu_s', 'start', 'agent'),
  )
  version = config['versions'][config['hypervisor']]
  clock = round(config['khz'] / 10_000)  # a state belongs to a host's counter
  user = os.geteuid()  # a root's machines could not open another user's
  text = json.dumps([[config[name] for name in names], version, clock, user])
  return hashlib.sha256(text.encode() + sources()).hexdigest()[:20]


def sources() -> bytes:
  """Of what boots a machine: what changes here makes other states."""
  read = b''
  for path in (
    __file__,
    vm_lib.__file__,
    *(x.__file__ for x in KINDS.values()),
  ):
    with open(path, 'rb') as file:
      read += file.read()
  return read


def prune_verdicts(cache: str) -> None:
  """What was found of KVM holds until this host boots again: old ones go."""
  for name in os.listdir(cache):
    path = os.path.join(cache, name)
    try:
      old = os.path.getmtime(path) < time.time() - KEPT_VERDICTS_S
      if name.startswith(cache_lib.OTHERS) and old:
        os.unlink(path)
    except FileNotFoundError:
      pass  # another process does the same


def boot(config: dict, folder: str) -> dict:
  """Boots, warms and saves a machine; what it told of itself."""
  os.makedirs(folder)
  make_blank(config, os.path.join(folder, 'disk0'))
  initrd = os.path.join(folder, 'initrd')
  with open(initrd, 'wb') as file:
    for path in config['initrds']:
      with open(path, 'rb') as part:
        shutil.copyfileobj(part, file)
  kind = kind_of(config)
  vm, sock = kind.boot(config, folder, initrd)
  try:
    facts = prepare(config, sock)
    kind.keep(config, vm, folder)
  except (OSError, Broken, ValueError) as error:
    log = vm_lib.log_of(folder)
    raise Broken(f'a machine did not boot: {error} {log}') from error
  finally:
    vm.end()
    sock.close()
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
    raise Broken(message['error'])
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


def make_blank(config: dict, disk: str) -> None:
  """The disk that a machine writes to: sparse, with an empty filesystem."""
  with open(disk, 'wb') as file:
    file.truncate(config['disk_bytes'])
  argv = [config['mke2fs'], '-q', '-t', 'ext4', '-m', '0']
  argv += ['-O', '^has_journal', '-E', 'lazy_itable_init=1', disk]
  status = os.spawnv(os.P_WAIT, argv[0], argv)
  if status:
    raise Broken(f'mke2fs failed ({status})')


# --- what works here ---------------------------------------------------------


def choose(config: dict) -> None:
  """Sets hypervisor, accelerator and processor: the best that boots.

  Raises:
    Refused: what was asked for by name does not.
  """
  rungs = [
    (name, accelerator, cpu)
    for name, accelerator, cpu in LADDER
    if name in config['programs']
    and config['accelerator'] in ('auto', accelerator)
  ]
  failures = [f'firecracker: {config["unfit"]}'] if config['unfit'] else []
  for name, accelerator, cpu in rungs:
    chosen = {'hypervisor': name, 'accelerator': accelerator, 'cpu': cpu}
    verdict = 'not asked for'
    if accelerator == 'kvm':
      verdict = verdict_on({**config, **chosen})
      if verdict != 'works':
        failures.append(f'{name}: {verdict}')
        continue
    config.update(chosen)
    config['kvm'] = '; '.join(failures) or verdict
    return
  remedy = 'set machine.accelerator=tcg'
  if 'qemu' not in config['programs']:
    remedy = 'set machine.hypervisor=qemu, which can do without it'
  why = '; '.join(failures) or 'no hypervisor that was asked for uses it'
  raise Refused(
    f'machine.accelerator={config["accelerator"]} cannot work here: {why};'
    f' {remedy}'
  )


def verdict_on(config: dict) -> str:
  """'works', which holds for this boot of the host; or why not, for an hour.

  It is one of the host, hypervisor and kernel, whatever the machines' limits.
  """
  with open('/proc/sys/kernel/random/boot_id') as file:
    mark = [file.read()]
  mark += [config[x] for x in ('hypervisor', 'cpu', 'image_digest', 'agent')]
  mark.append(config['versions'][config['hypervisor']])
  data = json.dumps(mark).encode() + sources()
  name = hashlib.sha256(data).hexdigest()[:12]
  path = os.path.join(config['cache'], f'kvm-{name}')
  try:
    with open(path) as file:
      verdict = file.read()
      age = time.time() - os.fstat(file.fileno()).st_mtime
    if verdict == 'works' or age < DOUBT_S:
      return verdict
  except FileNotFoundError:
    pass
  verdict = probe_kvm(config)
  # Whole or not at all: another process may look meanwhile.
  temporary = f'{path}.{os.getpid()}'
  with open(temporary, 'w') as file:
    file.write(verdict)
  os.replace(temporary, path)
  return verdict


def probe_kvm(config: dict) -> str:
  """'works', or why not: a device file alone shows nothing, a boot does."""
  try:
    os.close(os.open(config['kvm_device'], os.O_RDWR))
  except OSError as error:
    return f'{config["kvm_device"]}: {error.strerror}'
  trial = {**config, 'boot_s': KVM_S, 'start': ''}
  folder = os.path.join(config['scratch'], 'kvm')
  try:
    boot(trial, folder)
  except (Broken, OSError) as error:
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
