"""Escapes and excesses, tried from inside, of both drivers that isolate."""

import asyncio
import contextlib
import io
import os
import pathlib
import socket
import time
import zipfile

import live
import pytest

from composer.bench import sessions

DRIVERS = (
  pytest.param({'driver': 'namespace'}, id='namespace'),
  *(
    pytest.param(
      {'driver': 'microvm', 'hypervisor': name},
      marks=live.needs_microvm(),
      id=name,
    )
    for name in ('qemu', 'firecracker')
  ),
)
SECRET = 'COMPOSER_TEST_SECRET_7c1'


@pytest.fixture(scope='module', params=DRIVERS)
def world(request):
  os.environ[SECRET] = SECRET  # the host's, before anything of a pool starts
  found = live.open_live(**request.param)
  yield found
  found.close()
  del os.environ[SECRET]


def _nothing():
  return contextlib.nullcontext()


def python(world, code, timeout_s=30.0, files=None):
  return world.run(['python', '-c', code], timeout_s, files)


def still_works(world, machine):
  result = world.call(machine.run(['sh', '-c', 'echo on'], 30.0))
  assert result.stdout == 'on\n'


def test_no_file_of_the_host(world, tmp_path):
  secret = tmp_path / 'secret'
  secret.write_text(SECRET)
  paths = [str(secret), str(pathlib.Path(__file__))]
  code = f"""
import os
print([os.path.exists(p) for p in {paths!r}])
found = [k for k in os.environ if 'COMPOSER' in k]
for pid in filter(str.isdigit, os.listdir('/proc')):
  for name in ('environ', 'cmdline'):
    try:
      if {SECRET!r}.encode() in open(f'/proc/{{pid}}/{{name}}', 'rb').read():
        found.append((pid, name))
    except OSError:
      pass
print(found)
"""
  # Its own command line is where the needle is.
  result = python(world, code.replace(SECRET, SECRET[:-1] + "' '1"))
  lines = result.stdout.splitlines()
  assert lines[0] == '[False, False]'
  assert lines[1] == '[]', result


def test_nothing_reaches_the_host_by_network(world):
  with socket.create_server(('127.0.0.1', 0)) as server:
    port = server.getsockname()[1]
    path = f'\0composer-test-{os.getpid()}'
    with socket.socket(socket.AF_UNIX) as local:
      local.bind(path)
      local.listen()
      code = f"""
import socket
for kind, address in (
    (socket.AF_INET, ('127.0.0.1', {port})),
    (socket.AF_INET, ('10.0.2.2', {port})),  # where QEMU's own network has us
    (socket.AF_INET, ('1.1.1.1', 53)),
    (socket.AF_UNIX, {path!r}),
    (getattr(socket, 'AF_VSOCK', socket.AF_INET), (2, {port})),
):
  try:
    with socket.socket(kind) as s:
      s.settimeout(2)
      s.connect(address)
    print('connected', address)
  except (OSError, TypeError):
    pass
print([name for _, name in socket.if_nameindex()])
"""
      result = python(world, code)
  assert result.stdout == "['lo']\n", result


def test_no_unusual_family_of_sockets(world):
  """A network namespace does not part vsock and the like from the host."""
  code = """
import errno, socket
for family in range(1, 46):
  for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    for call in (socket.socket, socket.socketpair):
      try:
        call(family, kind)
        print(family)
      except OSError as error:
        if family == 40 and error.errno != errno.EAFNOSUPPORT:
          print('vsock', error)
for kind in (socket.SOCK_RAW, 10):  # and SOCK_PACKET
  for family in (2, 10, 17):
    try:
      socket.socket(family, kind, 255)
      print('raw', family)
    except OSError:
      pass
"""
  result = python(world, code)
  assert result.exit_code == 0, result
  assert set(result.stdout.split()) <= {'1', '2', '10', '16'}, result


def test_machines_do_not_meet(world):
  """Two at once: no socket, process or file of one is seen by the other."""
  name = f'\0meet-{os.getpid()}'
  serve = f"""
import socket, time
s = socket.socket(socket.AF_UNIX); s.bind({name!r}); s.listen()
open('/tmp/mine', 'w').write('x'); print('up', flush=True); time.sleep(3)
"""
  look = f"""
import os, socket, time
met = os.path.exists('/tmp/mine')
for _ in range(20):
  s = socket.socket(socket.AF_UNIX)
  try:
    s.connect({name!r}); met = True
  except OSError:
    pass
  time.sleep(0.1)
print(met)
"""
  with world.machine() as one, world.machine() as other:

    async def both():
      return await asyncio.gather(
        one.run(['python', '-c', serve], 30.0),
        other.run(['python', '-c', look], 30.0),
      )

    first, second = world.call(both())
  assert first.stdout == 'up\n' and second.stdout == 'False\n', (first, second)


def test_the_agent_believes_nothing_on_the_disk(world):
  """What process 1 runs is not to be had by writing to its library."""
  code = """
import glob, os
trap = 'import os; open("/machine/work/by" + str(os.getpid()), "w")\\n'
library = os.path.dirname(os.__file__)
for path in (*glob.glob(library + '/**/*.py', recursive=True),
             *glob.glob('/run/agent/*.py')):
  try:
    with open(path, 'w') as file:
      file.write(trap)
  except OSError:
    pass
print(len(glob.glob(library + '/*.py')) > 50)
"""
  with world.machine() as machine:
    result = world.call(machine.run(['python', '-c', code], 50.0))
    assert result.stdout == 'True\n', result
    still_works(world, machine)
    with pytest.raises(PermissionError):
      world.call(machine.read('../x'))
    world.call(machine.write('a', 'b'))
    assert world.call(machine.read('a')) == b'b'
    world.call(machine.run(['sleep', '10'], 0.2))
    look = world.call(machine.run(['ls', '/machine/work'], 30.0))
    assert 'a' in look.stdout.split() and 'by1' not in look.stdout.split()


def test_the_agent_survives(world):
  script = (
    'kill -9 1; kill -TERM 1; kill -INT 1; kill -STOP 1; kill -9 -1; true'
  )
  with world.machine() as machine:
    world.call(machine.run(['sh', '-c', script], 30.0))
    still_works(world, machine)


def test_no_limits_or_priorities_of_others(world):
  """The agent has the same user: without files or time it would be no more."""
  code = """
import os, resource
for kind in ('NOFILE', 'CPU', 'AS', 'FSIZE', 'NPROC', 'STACK', 'DATA'):
  try:
    resource.prlimit(1, getattr(resource, 'RLIMIT_' + kind), (0, 0))
    print(kind)
  except OSError:
    pass
for call, *args in (
    (os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0)),
    (os.sched_setparam, 1, os.sched_param(0)),
    (os.sched_setaffinity, 1, [0]), (os.setpriority, os.PRIO_PROCESS, 1, 19),
    (os.setpriority, os.PRIO_USER, 0, 19), (os.setpriority, os.PRIO_PGRP, 0, 9),
):
  try:
    call(*args)
    print(call.__name__)
  except OSError:
    pass
os.nice(1)
os.setpriority(os.PRIO_PROCESS, 0, 19)
os.sched_setaffinity(0, [0])
resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
"""
  with world.machine() as machine:
    result = world.call(machine.run(['python', '-c', code], 30.0))
    assert (result.stdout, result.exit_code) == ('', 0), result
    still_works(world, machine)


def test_no_power_over_the_machine(world):
  code = r"""
import ctypes, glob, os
libc = ctypes.CDLL(None, use_errno=True)
for name, args in (
    ('mount', (b'none', b'/tmp', b'tmpfs', 0, None)),
    ('umount2', (b'/proc', 2)),
    ('setns', (0, 0)), ('unshare', (0x20000,)),
    ('ptrace', (16, 1, 0, 0)), ('reboot', (0x1234567,)),
    ('iopl', (3,)), ('swapon', (b'/tmp/x', 0)), ('sethostname', (b'x', 1)),
):
  if getattr(libc, name)(*args) == 0:
    print('could', name)
for path in ('/proc/1/mem', '/proc/1/environ', '/proc/kcore', '/dev/mem',
             '/dev/vda', '/dev/vdb', '/dev/kmsg', *glob.glob('/dev/vport*')):
  try:
    open(path, 'rb').read(1)
    print('read', path)
  except OSError:
    pass
for path in ('/proc/sysrq-trigger', '/proc/sys/kernel/core_pattern',
             '/proc/sys/kernel/panic', '/sys/power/state', '/proc/1/oom_score_adj',
             '/run/agent/serve.py'):
  try:
    with open(path, 'w') as file:
      file.write('c')
    if os.stat(path).st_rdev != os.stat('/dev/null').st_rdev:
      print('wrote', path)
  except OSError:
    pass
try:
  os.mknod('/tmp/vda', 0o60600, os.makedev(254, 0))
  open('/tmp/vda', 'rb').read(1)
  print('made a device')
except OSError:
  pass
"""
  with world.machine() as machine:
    result = world.call(machine.run(['python', '-c', code], 60.0))
    assert (result.stdout, result.exit_code) == ('', 0), result
    still_works(world, machine)


def test_fork_bomb(world):
  code = 'import os\nwhile 1:\n  try: os.fork()\n  except OSError: pass\n'
  with world.machine() as machine:
    result = world.call(machine.run(['python', '-c', code], 1.0))
    assert result.timed_out or 'processes' in result.stderr, result
    still_works(world, machine)


def test_memory(world):
  code = """
import os, time
for _ in range(4):
  if os.fork() == 0:
    hog = []
    for _ in range(60):
      hog.append(b'x' * (1 << 20))
    time.sleep(60)
time.sleep(60)
"""
  with world.machine() as machine:
    result = world.call(machine.run(['python', '-c', code], 50.0))
    assert 'machine: killed, memory' in result.stderr, result
    assert not result.timed_out
    still_works(world, machine)


def test_disk_and_a_zip_bomb(world):
  """A file of 40 MB in 40 kB, unpacked by a tool of the machine."""
  packed = io.BytesIO()
  with zipfile.ZipFile(packed, 'w', zipfile.ZIP_DEFLATED) as archive:
    archive.writestr('zeros', bytes(40 << 20))
  unpack = 'import zipfile; zipfile.ZipFile("b.zip").extractall("out")'
  with world.machine({'b.zip': packed.getvalue()}) as machine:
    result = world.call(machine.run(['python', '-c', unpack], 50.0))
    assert result.exit_code != 0
    assert 'No space left' in result.stderr or 'too large' in result.stderr
    world.call(machine.run(['rm', '-rf', 'out'], 30.0))
    still_works(world, machine)


def test_memory_that_outlives_a_command(world):
  """Files in memory, of one command after the other, end at a limit."""
  code = """
import os, sys
for folder in ('/dev/shm', '/dev', '/run', '/tmp'):
  try:
    with open(f'{folder}/hog{sys.argv[1]}', 'wb') as file:
      for _ in range(40):
        file.write(bytes(1 << 20))
  except OSError:
    pass
"""
  with world.machine({'hog.py': code}) as machine:
    for number in range(3):
      world.call(machine.run(['python', 'hog.py', str(number)], 50.0))
      still_works(world, machine)
    look = 'rm -f /dev/shm/hog* /tmp/hog*; ls /dev | grep hog; echo gone'
    result = world.call(machine.run(['sh', '-c', look], 30.0))
    assert result.stdout == 'gone\n', result


def test_many_and_deep_files(world):
  """More names than there is room for, and a path longer than any."""
  many = """
import os
try:
  for number in range(200_000):
    open(f'f{number}', 'x').close()
except OSError as error:
  print(error.strerror)
"""
  deep = """
import os
for number in range(1500):
  os.mkdir('d' * 200)
  os.chdir('d' * 200)
"""
  with world.machine() as machine:
    result = world.call(machine.run(['python', '-c', many], 60.0))
    assert result.stdout == 'No space left on device\n', result
    with pytest.raises(OSError):
      world.call(machine.write('one/more', b'x'))
    clean = ['python', '-c', 'import os; [os.remove(x) for x in os.listdir()]']
    world.call(machine.run(clean, 60.0))
    result = world.call(machine.run(['python', '-c', deep], 60.0))
    assert result.exit_code in (0, 1) and 'File name' not in result.stderr
    if world.pool.config.driver == 'namespace':
      with pytest.raises(OSError):
        world.call(machine.snapshot())
    still_works(world, machine)


def test_a_file_larger_than_the_machine(world):
  with world.machine() as machine:
    sparse = 'import os; os.truncate("f", 1 << 40)'
    world.call(machine.write('f', b'x'))
    result = world.call(machine.run(['python', '-c', sparse], 30.0))
    with pytest.raises(OSError) if not result.exit_code else _nothing():
      world.call(machine.read('f'))
    still_works(world, machine)


def test_output(world):
  with world.machine() as machine:
    result = world.call(
      machine.run(['sh', '-c', 'yes | head -c 9000000'], 50.0)
    )
    assert result.truncated
    assert len(result.stdout) == world.pool.config.output_bytes
    still_works(world, machine)


def test_a_background_process_neither_holds_the_call_nor_stays(world):
  script = 'sh -c "setsid sleep 300 &" ; (sleep 300 &) ; echo done'
  with world.machine() as machine:
    result = world.call(machine.run(['sh', '-c', script], 60.0))
    assert result.stdout == 'done\n' and not result.timed_out
    assert result.seconds < 30
    look = 'cat /proc/[0-9]*/cmdline | tr "\\0" " "'
    seen = world.call(machine.run(['sh', '-c', look], 60.0)).stdout
    assert 'sleep 300' not in seen


def test_paths_of_the_file_tools(world):
  with world.machine() as machine:
    world.call(
      machine.run(['sh', '-c', 'ln -s / up; ln -s /etc/passwd p'], 30.0)
    )
    for path in (
      '../x',
      '/etc/passwd',
      'a/../../x',
      '',
      'up/tmp/x',
      'up/etc/x',
    ):
      with pytest.raises(PermissionError):
        world.call(machine.write(path, b'x'))
      with pytest.raises(PermissionError):
        world.call(machine.read(path))
    with pytest.raises(OSError):
      world.call(machine.write('p', b'x'))
    with pytest.raises(FileNotFoundError):
      world.call(machine.read('p'))
    still_works(world, machine)


def test_time_and_cpu_are_counted(world):
  code = """
import os
for _ in range(3):
  if os.fork() == 0:
    while True: pass
while True: pass
"""
  result = python(world, code, 1.0)
  assert result.timed_out and result.exit_code == -9
  assert 0.01 < result.cpu_seconds < 20  # others may have had the processor
  idle = world.run(['sleep', '0.5'], 30.0)
  assert idle.seconds > 0.45 and idle.cpu_seconds < idle.seconds


def test_a_command_has_so_much_cpu():
  """All its processes together, before its time is over."""
  world = live.open_live('namespace', exec_cpu_s=0.5)
  spin = 'import os\nfor _ in range(3): os.fork()\nwhile True: pass'
  result = world.run(['python', '-c', spin], 50.0)
  world.close()
  assert 'killed, cpu' in result.stderr and not result.timed_out, result


def test_nothing_outlives_a_pool(world):
  """Processes, mounts, folders and control groups, as they were before."""
  config = world.pool.config
  before = sessions.leftovers()
  other = live.open_live(config.driver, hypervisor=config.hypervisor, warm=1)
  with other.machine({'a': 'b'}) as machine:
    other.call(machine.run(['sh', '-c', '(sleep 300 &); echo x > y'], 60.0))
  other.call(other.pool.acquire({}))  # still there when the pool closes
  assert sessions.leftovers() - before
  other.close()
  deadline = time.monotonic() + 60
  while sessions.leftovers() - before and time.monotonic() < deadline:
    time.sleep(0.05)
  assert sessions.leftovers() - before == set()
