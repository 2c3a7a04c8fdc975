"""Machines, from inside: every escape and every excess is tried for real."""

import asyncio
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

import pytest

from composer.config import MachineConfig
from composer.environments import machines
from composer.environments.machines import MachineError
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import namespace
from composer.environments.machines import process

CONFIG = MachineConfig(warm=1, concurrent=8, memory_mb=128, disk_mb=4)


def forbidden():
  try:
    machines.probe(CONFIG)
  except MissingFacility as error:
    return str(error)
  return ''


FORBIDDEN = forbidden()
needs_namespaces = pytest.mark.skipif(bool(FORBIDDEN), reason=FORBIDDEN)
DRIVERS = (
  pytest.param('namespace', marks=needs_namespaces),
  pytest.param('process'),
)
linux_only = pytest.mark.skipif(
  sys.platform != 'linux', reason='looks for processes in /proc'
)


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
  monkeypatch.setattr(process, '_warned', [True])


def config_of(driver, **changes):
  return dataclasses.replace(CONFIG, driver=driver, **changes)


def with_machine(config, files, act):
  """What `act(machine, pool)` returns, in a machine of a pool of its own."""

  async def run():
    pool = Pool(config)
    try:
      machine = await pool.acquire(files)
      result = await act(machine, pool)
      await pool.release(machine)
      return result
    finally:
      await pool.close()

  return asyncio.run(run())


def python(driver, code, timeout_s=None, **changes):
  """The result of a program in a machine."""
  return with_machine(
    config_of(driver, **changes),
    {'main.py': code},
    lambda machine, _: machine.run(['python', 'main.py'], timeout_s),
  )


def marked(marker):
  """Command lines of the live processes that contain the marker."""
  found = []
  for entry in pathlib.Path('/proc').iterdir():
    if entry.name.isdigit():
      try:
        line = (entry / 'cmdline').read_bytes()
        state = (entry / 'stat').read_text().rpartition(')')[2].split()[0]
      except OSError:
        continue
      if marker.encode() in line and state != 'Z':
        found.append(line)
  return found


def wait_until(condition, seconds=60.0):
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'still not so'
    time.sleep(0.01)


# --- what a machine does, whatever its driver ---------------------------------


@pytest.mark.parametrize('driver', DRIVERS)
class TestInterface:
  def test_python_is_an_interpreter_of_its_own(self, driver):
    code = (
      'import sys, os, atexit\n'
      'atexit.register(print, "at exit")\n'
      'print(__name__, sys.argv, os.path.basename(__file__))\n'
      'import helper\n'
      'print(helper.x, file=sys.stderr)\n'
      'sys.exit(3)\n'
    )

    async def act(machine, _):
      return await machine.run(['python', 'main.py', 'a', 'b c'])

    files = {'main.py': code, 'helper.py': 'x = 7'}
    result = with_machine(config_of(driver), files, act)
    assert result.stdout == (
      "__main__ ['main.py', 'a', 'b c'] main.py\nat exit\n"
    )
    assert result.stderr == '7\n'
    assert result.exit_code == 3
    assert not result.truncated and not result.timed_out

  def test_ends_of_programs(self, driver):
    cases = {
      'pass': (0, ''),
      'raise SystemExit("bye")': (1, 'bye\n'),
      'import os; os._exit(5)': (5, ''),
      'import os, signal; os.kill(os.getpid(), signal.SIGKILL)': (-9, ''),
    }

    async def act(machine, _):
      return [await machine.run(['python', '-c', code]) for code in cases]

    got = with_machine(config_of(driver), {}, act)
    assert [(r.exit_code, r.stderr) for r in got] == list(cases.values())

  def test_traceback_shows_the_program_only(self, driver):
    result = python(driver, 'def f():\n  return 1 / 0\n\nf()\n')
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith('ZeroDivisionError')
    assert 'main.py", line 2, in f' in result.stderr
    assert 'execute.py' not in result.stderr

  def test_exec_modules_and_what_is_missing(self, driver):
    async def act(machine, _):
      return [
        await machine.run(['sh', '-c', 'echo $((6 * 7)); pwd >&2; exit 4']),
        await machine.run(['python', '-m', 'json.tool', 'x.json']),
        await machine.run(['no-such-program']),
        await machine.run(['python', 'no-such-file.py']),
        await machine.run(['python', '-V']),
      ]

    shell, module, gone, no_file, version = with_machine(
      config_of(driver), {'x.json': '[1]'}, act
    )
    assert (shell.stdout, shell.exit_code) == ('42\n', 4)
    assert shell.stderr.strip().endswith('work')
    assert json.loads(module.stdout) == [1]
    assert gone.exit_code == 127 and 'not found' in gone.stderr
    assert no_file.exit_code == 2
    assert version.stdout.split()[1] == sys.version.split()[0]

  def test_files_go_in_and_out(self, driver):
    big = bytes(range(256)) * 4000  # many times the buffer of process 1

    async def act(machine, _):
      await machine.write('deep/er/big', big)
      assert await machine.read('deep/er/big') == big
      with pytest.raises(FileNotFoundError):
        await machine.read('gone')
      with pytest.raises(FileNotFoundError):
        await machine.read('deep')  # a folder is no file
      machine.stage('a.txt', 'staged')
      result = await machine.run(
        [
          'python',
          '-c',
          'open("b.txt", "w").write(open("a.txt").read()[::-1])',
        ],
        write={'c.txt': b'\xff'},
        read=['b.txt', 'none', 'c.txt'],
      )
      return result.files

    files = with_machine(config_of(driver), {'start.txt': 'é'}, act)
    assert files == {'b.txt': b'degats', 'c.txt': b'\xff'}

  def test_paths_stay_in_the_workspace(self, driver):
    async def act(machine, _):
      await machine.run(
        ['sh', '-c', 'ln -s / root; ln -s /etc/passwd link; mkfifo fifo']
      )
      for path in ('../x', '/etc/passwd', 'a/../../x', '', 'root/tmp/x'):
        with pytest.raises(PermissionError):
          await machine.write(path, b'x')
        with pytest.raises(PermissionError):
          await machine.read(path)
      with pytest.raises(FileNotFoundError):
        await machine.read('link')
      with pytest.raises(OSError, match='link'):
        await machine.write('link', b'x')
      with pytest.raises(FileNotFoundError):
        await machine.read('fifo')  # and does not hang
      with pytest.raises(OSError, match='fifo'):
        await machine.write('fifo', b'x')
      return await machine.run(['true'])

    assert with_machine(config_of(driver), {}, act).exit_code == 0

  def test_output_is_cut_and_does_not_block(self, driver):
    code = 'import sys\nfor _ in range(3000):\n  sys.stdout.write("x" * 1000)\n'
    result = python(driver, code, timeout_s=60, output_bytes=5000)
    assert result.truncated and result.exit_code == 0
    assert result.stdout == 'x' * 5000

  def test_timeout(self, driver):
    result = python(driver, 'print("a", flush=True)\nwhile 1: pass', 1.0)
    assert result.timed_out and result.exit_code == -9
    assert result.stdout == 'a\n'
    assert 0.9 < result.seconds < 30

  def test_memory_of_a_process(self, driver):
    result = python(
      driver, 'try:\n  bytes(1 << 28)\nexcept MemoryError:\n  1/0'
    )
    assert 'ZeroDivisionError' in result.stderr

  @linux_only
  def test_a_call_ends_with_all_that_it_started(self, driver):
    marker = f'marker-{os.getpid()}-{driver}'
    # One in the group, one that left the session and lost its parent, holding
    # the pipes.
    script = (
      f'sh -c "sleep 60; : {marker}" & '
      f'sh -c "setsid sh -c \'while :; do sleep 1; done\' {marker} &" & '
      'sleep 0.05; echo done'
    )

    async def act(machine, _):
      began = time.monotonic()
      result = await machine.run(['sh', '-c', script])
      assert time.monotonic() - began < 20
      assert not marked(marker)
      timed = await machine.run(['sh', '-c', script + '; sleep 60'], 0.2)
      assert timed.timed_out
      assert not marked(marker)
      return result

    assert with_machine(config_of(driver), {}, act).stdout == 'done\n'

  def test_stop_and_close(self, driver):
    async def act():
      machine = await machines.start(config_of(driver), {'a': 'b'})
      assert await machine.read('a') == b'b'
      await machine.stop()
      await machine.stop()
      with pytest.raises(MachineError, match='stopped'):
        await machine.run(['true'])

    asyncio.run(act())

  @linux_only
  def test_nothing_is_left(self, driver, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
    before = set(marked('inside/zygote.py'))
    mounts = pathlib.Path('/proc/mounts').read_text()

    async def act():
      pool = Pool(config_of(driver, warm=3))
      held = [await pool.acquire({'a': 'b'}) for _ in range(3)]
      await pool.release(held.pop())
      await pool.close()  # with two in use

    asyncio.run(act())
    wait_until(lambda: set(marked('inside/zygote.py')) <= before)
    assert pathlib.Path('/proc/mounts').read_text() == mounts
    assert not list(tmp_path.iterdir())

  @linux_only
  def test_a_killed_host_leaves_nothing(self, driver):
    marker = f'orphan-{os.getpid()}-{driver}'
    code = f"""
import asyncio, os, signal, warnings
warnings.simplefilter('ignore')
from composer.config import MachineConfig
from composer.environments.machines import Pool
async def main():
  pool = Pool(MachineConfig(driver={driver!r}))
  machine = await pool.acquire({{}})
  task = asyncio.ensure_future(
    machine.run(['sh', '-c', 'sleep 60; : {marker}'], 60))
  await asyncio.sleep(0.2)
  print('ready', flush=True)
  await task
asyncio.run(main())
"""
    with subprocess.Popen(
      [sys.executable, '-c', code], stdout=subprocess.PIPE
    ) as host:
      assert host.stdout.readline() == b'ready\n'
      assert marked(marker)
      host.kill()
    wait_until(lambda: not marked(marker))


# --- isolation ----------------------------------------------------------------


@needs_namespaces
class TestIsolation:
  def test_the_hosts_files_are_not_there(self, tmp_path):
    secret = tmp_path / 'secret'
    secret.write_text('top')
    here = pathlib.Path(machines.__file__)
    code = f"""
import os
for path in {[str(secret), str(here), str(pathlib.Path.cwd())]!r}:
  print(os.path.exists(path))
for path in ('/usr/x', '/etc/x', '/x', os.__file__, '/dev/x', '/proc/sys/x'):
  try:
    open(path, 'a')
    print('written', path)
  except OSError:
    pass
print(sorted(os.listdir('/dev')))
print([x for x in os.listdir('/proc') if x.isdigit()])
import importlib.util
print([importlib.util.find_spec(x) for x in ('jax', 'numpy', 'composer')])
print(sorted(os.environ))
"""
    lines = python('namespace', code).stdout.splitlines()
    assert lines[:3] == ['False'] * 3
    assert 'written' not in '\n'.join(lines)
    devices = 'fd full null random shm stderr stdin stdout urandom zero'
    assert lines[3] == repr(devices.split())
    assert len(eval(lines[4])) == 2
    assert lines[5] == '[None, None, None]'
    expected = {'HOME', 'LANG', 'PATH', 'TMPDIR'}
    expected |= {'PYTHONDONTWRITEBYTECODE', 'PYTHONHASHSEED', 'PYTHONUTF8'}
    assert set(eval(lines[6])) - {'LC_CTYPE', 'LD_LIBRARY_PATH'} == expected

  def test_no_network(self):
    with socket.create_server(('127.0.0.1', 0)) as server:
      port = server.getsockname()[1]
      code = f"""
import socket
print(socket.if_nameindex())
for address in (('127.0.0.1', {port}), ('1.1.1.1', 53)):
  try:
    socket.create_connection(address, timeout=1)
    print('connected')
  except OSError as error:
    print(type(error).__name__)
"""
      lines = python('namespace', code).stdout.splitlines()
    assert lines[0] == "[(1, 'lo')]"
    assert lines[1:] == ['OSError', 'OSError']

  def test_no_power(self):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for name, args in (
    ('unshare', (0x10000000,)),
    ('mount', (b'none', b'/machine/tmp', b'tmpfs', 0, None)),
    ('setns', (0, 0)),
    ('ptrace', (16, 1, 0, 0)),
    ('sethostname', (b'x', 1)),
    ('memfd_create', (b'x', 0)),
    ('shmget', (0, 1 << 20, 0o1600)),
):
  print(name, getattr(libc, name)(*args), ctypes.get_errno())
for path in ('/proc/1/mem', '/proc/1/environ', '/proc/1/fd/0'):
  try:
    open(path, 'rb').read(1)
    print('read', path)
  except OSError:
    pass
os.kill(1, 9)
print(os.getuid(), open('/proc/self/uid_map').read().split()[2])
"""
    lines = python('namespace', code).stdout.splitlines()
    assert all(line.split()[1:] == ['-1', '1'] for line in lines[:7]), lines
    assert lines[7:] == ['0 1']

  def test_fork_bomb(self):
    code = """
import os, time
forks = 0
try:
  while forks < 500:
    if os.fork() == 0:
      time.sleep(5)
      os._exit(0)
    forks += 1
except OSError as error:
  print(type(error).__name__, forks)
"""
    result = python('namespace', code, timeout_s=10, processes=20)
    name, forks = result.stdout.split()
    assert name == 'BlockingIOError' and int(forks) <= 20
    bomb = 'import os\nwhile 1:\n  try: os.fork()\n  except OSError: pass\n'
    config = config_of('namespace', processes=20)

    async def act(machine, _):
      assert (await machine.run(['python', '-c', bomb], 0.3)).timed_out
      return await machine.run(['python', '-c', 'print("alive")'])

    assert with_machine(config, {}, act).stdout == 'alive\n'

  def test_memory_of_the_machine(self):
    """Four processes, each below its own limit."""
    code = """
import os, time
for _ in range(4):
  if os.fork() == 0:
    hog = bytearray(b'x') * (60 << 20)
    time.sleep(30)
time.sleep(30)
"""
    result = python('namespace', code, timeout_s=60)
    assert not result.timed_out and result.seconds < 25  # by itself after 30
    assert 'killed, memory' in result.stderr

  def test_disk(self):
    code = """
size = 0
try:
  for n in range(100):
    with open(f'f{n}', 'wb', buffering=0) as file:
      size += file.write(bytes(1 << 19))
except OSError as error:
  print(error.strerror, size >> 19)
try:
  with open('/tmp/x', 'wb') as file:
    file.write(bytes(1 << 16))
except OSError as error:
  print('tmp is the same')
"""
    lines = python('namespace', code).stdout.splitlines()
    assert lines[0].startswith('No space left')
    assert int(lines[0].split()[-1]) <= 8
    assert lines[1] == 'tmp is the same'

  def test_files_too_large_are_refused_and_the_machine_lives(self):
    async def act(machine, _):
      with pytest.raises(OSError, match='big'):
        await machine.write('big', bytes(5 << 20))
      return await machine.run(['true'])

    assert with_machine(config_of('namespace'), {}, act).exit_code == 0

  def test_provenance_is_what_is_in_force(self):
    async def act(machine, _):
      code = 'print(open("/proc/self/status").read())'
      return machine.provenance, await machine.run(['python', '-c', code])

    provenance, result = with_machine(config_of('namespace'), {}, act)
    json.dumps(provenance)
    assert set(provenance['isolation']) == set(namespace.NAMESPACES)
    assert int(provenance['capabilities'], 16) == 0
    assert provenance['seccomp'] and provenance['no_new_privs']
    status = dict(
      line.split(':\t', 1)
      for line in result.stdout.splitlines()
      if ':\t' in line
    )
    assert status['Seccomp'] == '2' and int(status['CapEff'], 16) == 0


# --- the pool -----------------------------------------------------------------


def children(pid):
  """Children, and theirs, of a process of this host."""
  found = []
  for task in pathlib.Path(f'/proc/{pid}/task').iterdir():
    for child in (task / 'children').read_text().split():
      found += [int(child), *children(int(child))]
  return found


class TestPool:
  @needs_namespaces
  def test_survives_a_killed_machine(self):
    async def act(machine, pool):
      server = children(pool._zygote.process.pid)[0]
      wait_until(
        lambda: len(children(server)) >= 4
      )  # this one, three idle ones
      for pid in children(server):
        os.kill(pid, signal.SIGKILL)
      with pytest.raises(MachineError, match='died'):
        await machine.run(['true'])
      other = await pool.acquire({'a': 'print(1)'})
      result = await other.run(['python', 'a'])
      await pool.release(other)
      return result.stdout, pool.counters

    stdout, counters = with_machine(config_of('namespace', warm=3), {}, act)
    assert stdout == '1\n'
    assert counters.failures >= 1 and counters.restarts == 0

  @linux_only
  @pytest.mark.parametrize('driver', DRIVERS)
  def test_survives_a_killed_zygote(self, driver):
    async def act(machine, pool):
      os.kill(pool._zygote.process.pid, signal.SIGKILL)
      with pytest.raises(MachineError, match='died'):
        while True:  # until the kernel has brought it the news
          await machine.run(['true'])
      results = await asyncio.gather(
        *(pool.execute({'a': f'print({n})'}, ['python', 'a']) for n in range(6))
      )
      return [r.stdout for r in results], pool.counters

    stdouts, counters = with_machine(config_of(driver, warm=2), {}, act)
    assert stdouts == [f'{n}\n' for n in range(6)]
    assert counters.restarts == 1

  @needs_namespaces
  def test_a_burst_is_served_and_bounded(self):
    async def act():
      pool = Pool(config_of('namespace', concurrent=6, warm=2))
      most = 0

      async def one(n):
        nonlocal most
        machine = await pool.acquire({'n': str(n)})
        most = max(most, len(pool._live))
        try:
          return int(await machine.read('n'))
        finally:
          await pool.release(machine)

      try:
        return await asyncio.gather(*map(one, range(150))), most, pool.counters
      finally:
        await pool.close()

    got, most, counters = asyncio.run(act())
    assert got == list(range(150))
    assert most == 6 and counters.started == 150 and counters.failures == 0

  @pytest.mark.parametrize('driver', DRIVERS)
  def test_a_full_pool_says_so(self, driver):
    async def act():
      pool = Pool(config_of(driver, concurrent=1), wait_s=0.1)
      try:
        held = await pool.acquire({})
        with pytest.raises(MachineError, match='machine.concurrent=1'):
          await pool.acquire({})
        await pool.release(held)
        await pool.release(held)  # twice is once
        await pool.release(await pool.acquire({}))
        assert pool.pressure()['running'] == 0
      finally:
        await pool.close()

    asyncio.run(act())

  @pytest.mark.parametrize('driver', DRIVERS)
  def test_a_cancelled_call_costs_its_machine_only(self, driver):
    async def act(machine, pool):
      with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
          await machine.run(['sleep', '5'], 5)
      with pytest.raises(MachineError):
        await machine.run(['true'])
      return await pool.execute({}, ['echo', 'on'])

    assert with_machine(config_of(driver), {}, act).stdout == 'on\n'

  def test_bad_config_is_named(self):
    for change, words in (
      ({'driver': 'docker'}, 'machine.driver.*namespace, microvm'),
      ({'concurrent': 0}, 'machine.concurrent=0'),
      ({'memory_mb': 8}, 'machine.memory_mb=8.*64'),
      ({'warm': -1}, 'machine.warm=-1'),
    ):
      with pytest.raises(ValueError, match=words):
        Pool(dataclasses.replace(CONFIG, **change))

  def test_process_driver_is_loud_and_honest(self, monkeypatch):
    monkeypatch.setattr(process, '_warned', [])
    with pytest.warns(process.NoIsolation, match='trusted'):
      found = machines.probe(config_of('process'))
    assert found['isolation'] == 'none'
    machines.probe(config_of('process'))  # once is enough

  def test_missing_facility_gives_the_command(self, monkeypatch):
    """A kernel without user namespaces, as the zygote would meet it."""
    argv = [
      '/x/bin/composer',
      'run',
      'e.py',
      '--set',
      'machine.driver=namespace',
    ]
    monkeypatch.setattr(sys, 'argv', argv)

    def refuse(*_):
      raise namespace.zygote_lib.Missing('unshare(CLONE_NEWUSER)', 1)

    monkeypatch.setattr(namespace.zygote_lib, 'launch', refuse)
    monkeypatch.setattr(sys, 'platform', 'linux')
    with pytest.raises(MissingFacility) as caught:
      machines.probe(CONFIG)
    text = str(caught.value)
    assert 'unshare(CLONE_NEWUSER) failed with EPERM' in text
    assert '\n  composer run e.py --set machine.driver=process' in text
    monkeypatch.setattr(sys, 'platform', 'darwin')
    with pytest.raises(MissingFacility, match='darwin'):
      machines.probe(CONFIG)


@needs_namespaces
def test_the_limit_on_processes_is_each_machines_own():
  """Many machines at once, more processes in all than one of them may have."""
  config = config_of('namespace', processes=4, concurrent=24)

  async def run():
    pool = Pool(config)
    try:
      held = [await pool.acquire({}) for _ in range(24)]
      results = await asyncio.gather(
        *(m.run(['python', '-c', 'print(6 * 7)']) for m in held)
      )
      for machine in held:
        await pool.release(machine)
      return results
    finally:
      await pool.close()

  results = asyncio.run(run())
  assert [r.stdout for r in results] == ['42\n'] * 24, {
    r.stderr for r in results
  }
