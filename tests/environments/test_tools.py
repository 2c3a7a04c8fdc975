"""Tools, in real machines, on a real task of the kind repair."""

import asyncio
import dataclasses

import pytest

from composer import chat
from composer.config import MachineConfig
from composer.config import TasksConfig
from composer.environments import machines
from composer.environments.machines import MachineError
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import process
from composer.environments.tasks import repair
from composer.environments.tools import TOOLS

CONFIG = MachineConfig(warm=0, concurrent=2, exec_timeout_s=2.0)


@pytest.fixture(scope='module')
def driver():
  try:
    machines.probe(CONFIG)
  except MissingFacility:
    return 'process'  # tools are the same; isolation has its own tests
  return 'namespace'


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
  monkeypatch.setattr(process, '_warned', [True])


@pytest.fixture(scope='module')
def task():
  return repair.build_tasks(TasksConfig()).train[0]


def session(driver, task, act):
  async def run():
    pool = Pool(dataclasses.replace(CONFIG, driver=driver))
    try:
      machine = await pool.acquire(task.files)
      return await act(machine)
    finally:
      await pool.close()

  return asyncio.run(run())


def call(machine, task, name, **arguments):
  return TOOLS[name].run(machine, task, arguments)


def test_names_and_specs_fit():
  for name, tool in TOOLS.items():
    assert tool.spec.name == name
    assert chat.json_schema(tool.spec)['function']['name'] == name
  assert set(repair.TOOLS) <= set(TOOLS)
  edit = TOOLS['edit'].spec
  assert edit.parameters == (('line', 'line'), ('token', 'token'))


def test_the_fix_makes_the_tests_pass(driver, task):
  bug = task.metadata['bug']
  line = f'L{bug["line"]}'

  async def act(machine):
    return [
      await call(machine, task, 'test'),
      await call(machine, task, 'edit', line=line, token=bug['right']),
      await call(machine, task, 'test'),
      await call(machine, task, 'edit', line=line, token=bug['wrong']),
      await call(machine, task, 'edit', line='L99', token='+'),
      await call(machine, task, 'test'),
      await call(machine, task, 'submit'),
    ]

  before, edit, after, undo, bad, again, submit = session(driver, task, act)
  assert before.text.endswith('of 6') and before.ok and not before.ends
  assert edit.text == ' ok' and edit.ok
  assert after.text == ' all pass'
  assert undo.ok
  assert not bad.ok and bad.text == repair.observe_edit('line')
  assert again.text == before.text  # the last good edit counts
  assert submit.ends and submit.text == ''
  assert all(r.seconds > 0 for r in (before, edit, submit))


def test_what_is_shown_is_what_trusted_code_gives(driver, task):
  """In the machine as in this process, for every wrong edit of a line."""
  original = task.files['solution.py']
  cases = repair.read_cases(task.files['tests.json'])
  lines = repair.functions.listing_lines(original)
  edits = repair.functions.candidate_edits(lines)[:12]

  async def act(machine):
    shown = []
    for line, token in edits:
      await call(machine, task, 'edit', line=line, token=token)
      shown.append((await call(machine, task, 'test')).text)
    return shown

  expected = []
  for line, token in edits:
    text = repair.apply_edit(original, original, line, token).text
    passed, total = repair.run_cases(text, cases)
    stdout = f'passed {passed} of {total}\n'
    expected.append(repair.observe_tests(stdout, int(passed != total)))
  assert session(driver, task, act) == expected


def test_an_edit_is_there_for_the_next_read(driver, task):
  bug = task.metadata['bug']

  async def act(machine):
    await call(machine, task, 'edit', line=bug['line'], token=bug['right'])
    return await machine.read('solution.py')

  original = task.files['solution.py']
  want = repair.apply_edit(original, original, bug['line'], bug['right']).text
  assert session(driver, task, act).decode() == want != original


def test_files_and_commands(driver, task):
  async def act(machine):
    await call(machine, task, 'run', command='ln -s / root')
    return [
      await call(machine, task, 'write', path='a/b.txt', text='hello'),
      await call(machine, task, 'read', path='a/b.txt'),
      await call(machine, task, 'read', path='none'),
      await call(machine, task, 'read', path='../x'),
      await call(machine, task, 'write', path='root/x', text='x'),
      await call(machine, task, 'run', command='cat a/b.txt; exit 3'),
      await call(machine, task, 'run', command='echo é; sleep 9'),
      await call(machine, task, 'run', command='yes'),
    ]

  short = dataclasses.replace(task)
  write, read, none, escape, link, failed, slow, loud = session(
    driver, short, act
  )
  assert (write.text, write.ok) == (' ok', True)
  assert read.text == ' hello'
  assert (none.text, none.ok) == (' error no such file', False)
  assert not escape.ok and 'workspace' in escape.text
  assert not link.ok and 'workspace' in link.text
  assert failed.text == ' hello\n(exit code 3)' and not failed.ok
  assert slow.text.startswith(' é\n(killed after 2.') and not slow.ok
  assert '(output truncated)' in loud.text and len(loud.text) < 20_000


def test_a_dead_machine_is_infrastructure(driver, task):
  async def act(machine):
    await machine.stop()
    for name in ('test', 'run'):
      with pytest.raises(MachineError):
        await call(machine, task, name, command='true')

  session(driver, task, act)
