"""Grades: the honest solution earns one, every cheat earns none."""

import asyncio
import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys

import pytest

from composer.config import MachineConfig
from composer.environments import machines
from composer.environments.machines import ExecResult
from composer.environments.machines import MachineError
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import process
from composer.environments.machines import zygote
from composer.environments.machines.pool import runner
from composer.records import Task
from composer.rewards import verify

CONFIG = MachineConfig(warm=0, concurrent=4, exec_timeout_s=30.0)
HASTY = dataclasses.replace(CONFIG, exec_timeout_s=2.0)  # some cheats hang
RUNNER = runner()['runner.py']
HONEST = 'def add(a, b):\n  return a + b\n'
BROKEN = 'def add(a, b):\n  return a - b\n'
CASES = [[[a, b], a + b] for a in range(4) for b in range(1, 5)]
FILES = {'solution.py': BROKEN, 'tests.json': '[]', 'runner.py': RUNNER}
TASK = Task(
  id='add',
  kind='repair',
  instruction='',
  files=FILES,
  tools=(),
  test_command=('python', 'runner.py', 'solution.py', 'tests.json'),
  allowed=('solution.py',),
  hidden_files={'cases.json': json.dumps(CASES), 'runner.py': RUNNER},
  hidden_command=('python', 'runner.py', 'solution.py', 'cases.json'),
  metadata={},
)
# The same text under another name is no script that a machine knows, so it runs
# as the program that it also is.
PROGRAM = dataclasses.replace(
  TASK,
  hidden_files={**TASK.hidden_files, 'check.py': RUNNER},
  hidden_command=('python', 'check.py', 'solution.py', 'cases.json'),
)

# Each gives some way of passing without adding; none may.
CHEATS = {
  'exit': 'import os\nprint("passed 16 of 16", flush=True)\nos._exit(0)\n',
  'sys_exit': 'import sys\nprint("passed 16 of 16")\nsys.exit(0)\n',
  'exit_in_call': (
    'import os\ndef add(a, b):\n'
    '  os.write(1, b"passed 16 of 16\\n")\n  os._exit(0)\n'
  ),
  'always_equal': (
    'class Any(int):\n'
    '  def __eq__(self, other): return True\n'
    '  def __repr__(self): return "0"\n'
    '  __hash__ = None\n'
    'def add(a, b):\n  return Any(a - b)\n'
  ),
  'bools': 'def add(a, b):\n  return True\n',
  'floats': 'def add(a, b):\n  return float(a + b)\n',
  'patch_modules': (
    'import json, os, sys, builtins\n'
    'json.loads = lambda *a: [1]\njson.dumps = lambda *a: "1"\n'
    'builtins.sum = lambda *a: 16\nbuiltins.len = lambda *a: 16\n'
    'for m in list(sys.modules.values()):\n'
    '  if hasattr(m, "agrees"): m.agrees = lambda *a: True\n'
    'def add(a, b):\n  return a - b\n'
  ),
  'patch_frames': (
    'import sys\n'
    'frame = sys._getframe()\n'
    'while frame:\n'
    '  if "agrees" in frame.f_globals:\n'
    '    frame.f_globals["agrees"] = lambda *a: True\n'
    '    frame.f_globals["canonical"] = lambda *a: "same"\n'
    '  frame = frame.f_back\n'
    'def add(a, b):\n  return a - b\n'
  ),
  'read_cases': (
    'import glob, json, os\n'
    'found = {}\n'
    'for top in (".", os.environ.get("TMPDIR", "."), ".."):\n'
    '  for path in glob.glob(top + "/**", recursive=True):\n'
    '    try:\n'
    '      for args, want in json.load(open(path)): found[str(args)] = want\n'
    '    except Exception: pass\n'
    'def add(a, b):\n  return found.get(str([a, b]), -1)\n'
  ),
  'search_memory': (
    'import gc, sys\n'
    'found = {}\n'
    'def search(x):\n'
    '  if (isinstance(x, list) and len(x) == 2 and isinstance(x[0], list)\n'
    '      and len(x[0]) == 2 and isinstance(x[1], int)):\n'
    '    found[str(x[0])] = x[1]\n'
    'for x in gc.get_objects():\n'
    '  try: search(x)\n'
    '  except Exception: pass\n'
    '  try:\n'
    '    for y in gc.get_referents(x): search(y)\n'
    '  except Exception: pass\n'
    'def add(a, b):\n  return found.get(str([a, b]), -1)\n'
  ),
  'search_raw_memory': (
    'import ctypes, re\n'
    'found = {}\n'
    'for line in open("/proc/self/maps"):\n'
    '  f = line.split()\n'
    '  if not f[1].startswith("rw"): continue\n'
    '  a, b = (int(x, 16) for x in f[0].split("-"))\n'
    '  data = ctypes.string_at(a, b - a)\n'
    r'  for x in re.finditer(rb"\[\[(\d), (\d)\], (\d)\]", data):'
    '\n    found[int(x[1]), int(x[2])] = int(x[3])\n'
    'def add(a, b):\n  return found.get((a, b), -1)\n'
  ),
  'parent_memory': (
    'import os\n'
    'for pid in (os.getppid(), 1):\n'
    '  for name in ("mem", "fd/1", "fd/0", "environ"):\n'
    '    try:\n'
    '      file = open(f"/proc/{pid}/{name}", "r+b", buffering=0)\n'
    '      file.write(b"passed 16 of 16\\n")\n'
    '    except Exception: pass\n'
    'def add(a, b):\n  return a - b\n'
  ),
  'descriptors': (
    'import os\n'
    'for n in reversed(range(256)):\n'
    '  try: os.write(n, b"passed 16 of 16\\n")\n'
    '  except OSError: pass\n'
    'def add(a, b):\n  return a - b\n'
  ),
  'orphan': (
    'import os, time\n'
    'if os.fork() == 0:\n'
    '  os.setsid()\n'
    '  if os.fork() == 0:\n'
    '    while 1:\n'
    '      for n in range(9):\n'
    '        try: os.write(n, b"passed 16 of 16\\n")\n'
    '        except OSError: pass\n'
    '      time.sleep(0.001)\n'
    '  os._exit(0)\n'
    'def add(a, b):\n  return a - b\n'
  ),
  'kill_the_judge': (
    'import os, signal\n'
    'for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):\n'
    '  try: os.kill(os.getppid(), number)\n'
    '  except OSError: pass\n'
    'def add(a, b):\n  return a - b\n'
  ),
  'replace_files': (
    'import os\n'
    'for name in ("runner.py", "check.py"):\n'
    '  open(name, "w").write("print(\'passed 16 of 16\')")\n'
    'open("cases.json", "w").write("[[[1, 1], 0]]")\n'
    'open("json.py", "w").write("def loads(*a): return []")\n'
    'def add(a, b):\n  return a - b\n'
  ),
  'loop': 'def add(a, b):\n  while True: pass\n',
  'loop_at_import': 'while True: pass\n',
  'sleep': 'import time\ndef add(a, b):\n  time.sleep(60)\n',
  'huge': 'def add(a, b):\n  return [0] * 10_000_000\n',
  'deep': (
    'import os\nfor n in range(3, 9):\n'
    '  try: os.write(n, b"R" + b"[" * 50000 + b"\\n")\n'
    '  except OSError: pass\n'
  ),
  'digits': 'def add(a, b):\n  return 10 ** 4000\n',
  'nothing': '',
  'no_python': 'def add(a, b)\n',
  'bytes': '\udcff',
}


@pytest.fixture(scope='module')
def driver():
  try:
    machines.probe(CONFIG)
  except MissingFacility:
    return 'process'
  return 'namespace'


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
  monkeypatch.setattr(process, '_warned', [True])


def grades(driver, task, solutions, config=CONFIG):
  """Grades of solution texts, at once."""

  async def run():
    pool = Pool(dataclasses.replace(config, driver=driver))
    try:
      jobs = [
        verify.grade(
          pool, task, {'solution.py': x.encode(errors='surrogateescape')}
        )
        for x in solutions
      ]
      return await asyncio.gather(*jobs), pool.counters
    finally:
      await pool.close()

  return asyncio.run(run())


@pytest.mark.parametrize('task', [TASK, PROGRAM], ids=['harness', 'program'])
def test_honest_solutions(driver, task):
  partly = 'def add(a, b):\n  return a + b if a else 1 // a\n'
  tuples = 'import os, sys\ndef helper(): pass\n' + HONEST + 'print("hi")\n'
  (good, bad, some, also), _ = grades(
    driver, task, [HONEST, BROKEN, partly, tuples]
  )
  assert (good.solved, good.passed, good.total) == (True, 16, 16)
  assert not bad.solved and bad.passed == 4 * 0 + sum(
    a - b == want for (a, b), want in CASES
  )
  assert not some.solved and some.passed == 12
  assert also.solved
  assert good.output == 'passed 16 of 16\n' and good.seconds > 0


@pytest.mark.parametrize('task', [TASK, PROGRAM], ids=['harness', 'program'])
def test_no_cheat_is_solved(driver, task):
  found, counters = grades(driver, task, CHEATS.values(), HASTY)
  for name, result in zip(CHEATS, found, strict=True):
    assert not result.solved, (name, result)
    assert result.passed <= 2, (name, result)  # what some constant gets right
  assert counters.failures == 0  # a cheat is no infrastructure failure


def test_cheats_under_the_process_driver():
  names = ['exit', 'exit_in_call', 'always_equal', 'read_cases', 'patch_frames']
  found, _ = grades('process', TASK, [CHEATS[x] for x in names])
  assert not any(x.solved for x in found)
  (good,), _ = grades('process', TASK, [HONEST])
  assert good.solved


def test_only_allowed_files_are_carried(driver):
  files = {
    'solution.py': BROKEN.encode(),
    'runner.py': b'print("passed 1 of 1")',
    'cases.json': b'[[[1, 0], 1]]',
    'sitecustomize.py': b'print("passed 1 of 1")',
    'json.py': b'',
  }
  carried = verify.graded_files(TASK, files)
  assert set(carried) == {
    'solution.py',
    'tests.json',
    'runner.py',
    'cases.json',
  }
  assert carried['runner.py'] == RUNNER
  assert carried['cases.json'] == TASK.hidden_files['cases.json']
  # A file that the session deleted is not taken from the task.
  assert 'solution.py' not in verify.graded_files(TASK, {})

  async def run():
    pool = Pool(dataclasses.replace(CONFIG, driver=driver))
    try:
      return (
        await verify.grade(pool, TASK, files),
        await verify.grade(pool, TASK, {}),
        await verify.grade(pool, TASK, {'solution.py': bytes(20 << 20)}),
      )
    finally:
      await pool.close()

  bad, empty, large = asyncio.run(run())
  assert not bad.solved and bad.total == 16
  assert not empty.solved
  assert not large.solved and large.total in (0, 16)


@pytest.mark.parametrize(
  ('stdout', 'exit_code', 'changes', 'solved'),
  [
    ('passed 3 of 3\n', 0, {}, True),
    ('noise\npassed 3 of 3', 0, {}, True),
    ('passed 3 of 3\n', 1, {}, False),
    ('passed 3 of 3\n', 0, {'timed_out': True}, False),
    ('passed 3 of 3\n', 0, {'truncated': True}, False),
    ('passed 3 of 3\nbye\n', 0, {}, False),
    ('passed 0 of 0\n', 0, {}, False),
    ('passed 2 of 3\n', 0, {}, False),
    ('', 0, {}, False),
  ],
)
def test_verdicts(stdout, exit_code, changes, solved):
  fields = {'truncated': False, 'timed_out': False, **changes}
  result = ExecResult(stdout, '', exit_code, 0.1, **fields)
  assert verify.read_verdict(result, 0.2).solved is solved


def test_a_dying_machine_is_infrastructure(monkeypatch):
  async def die(*_, **__):
    raise MachineError('gone')

  async def run():
    pool = Pool(dataclasses.replace(CONFIG, driver='process'))
    try:
      monkeypatch.setattr(machines.Machine, 'run', die)
      with pytest.raises(MachineError, match='5 machines failed.*gone'):
        await verify.grade(pool, TASK, {'solution.py': HONEST.encode()})
      assert pool.counters.failures == 5
    finally:
      await pool.close()

  asyncio.run(run())


def test_a_task_that_does_not_fit_is_infrastructure(driver):
  large = {**TASK.hidden_files, 'data': bytes(20 << 20)}
  task = dataclasses.replace(TASK, hidden_files=large)
  with pytest.raises(MachineError, match=r'raise machine\.disk_mb'):
    grades(driver, task, [HONEST])


@pytest.mark.parametrize('what', ['a socket', 'a zygote'])
def test_a_host_without_means_is_infrastructure(monkeypatch, what):
  def none(*_, **__):
    raise OSError(errno.EMFILE, 'Too many open files')

  async def run():
    pool = Pool(dataclasses.replace(CONFIG, driver='process', warm=0))
    try:
      if what == 'a socket':
        await pool.open()
        monkeypatch.setattr(zygote.socket, 'socketpair', none)
      else:
        monkeypatch.setattr(process, 'launch', none)
      with pytest.raises(MachineError, match='Too many open files'):
        await verify.grade(pool, TASK, {'solution.py': HONEST.encode()})
      monkeypatch.undo()
    finally:
      await pool.close()

  asyncio.run(run())


def test_the_runner_stands_alone_and_restores_the_cases(tmp_path):
  """By a plain interpreter; values by type, exceptions, case by case."""
  (tmp_path / 'runner.py').write_text(RUNNER)
  solution = tmp_path / 'solution.py'
  solution.write_text(
    'def f(x):\n  return {0: 1, 1: True, 2: 1.0, 3: (1, [2]), 4: {"b": 1, "a": 2},'
    ' 5: "é", 6: float("nan")}[x]\n'
  )
  wants = [1, 1, 1, [1, [2]], {'a': 2, 'b': 1}, 'é', float('nan'), 'KeyError']
  cases = json.dumps([[[x], want] for x, want in enumerate(wants)])
  (tmp_path / 'tests.json').write_text(cases)
  command = [sys.executable, '-I', 'runner.py', 'solution.py', 'tests.json']
  for _ in range(2):
    result = subprocess.run(
      command, cwd=tmp_path, capture_output=True, text=True, timeout=30
    )
    assert result.stdout == 'passed 5 of 8\n'
    assert result.returncode == 1
  assert (tmp_path / 'tests.json').read_text() == cases
  assert sorted(x.name for x in tmp_path.iterdir()) == [
    'runner.py',
    'solution.py',
    'tests.json',
  ]


def test_the_candidate_inherits_no_descriptor(tmp_path):
  (tmp_path / 'solution.py').write_text(CHEATS['descriptors'])
  (tmp_path / 'cases.json').write_text(json.dumps(CASES))
  (tmp_path / 'runner.py').write_text(RUNNER)
  read, low = os.pipe()
  high = fcntl.fcntl(low, fcntl.F_DUPFD, 220)  # above the runner's own
  command = [sys.executable, '-I', 'runner.py', 'solution.py', 'cases.json']
  result = subprocess.run(
    command, cwd=tmp_path, capture_output=True, pass_fds=[high], timeout=30
  )
  os.close(low)
  os.close(high)
  with os.fdopen(read, 'rb') as file:
    assert file.read() == b''
  assert result.returncode == 1 and result.stderr == b''
  assert result.stdout.count(b'\n') == 1
