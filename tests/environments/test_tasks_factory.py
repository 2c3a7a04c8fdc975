"""Tasks of a small package: how they are made, kept, written and read."""

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
import time

import pytest

from composer import config as config_lib
from composer.__main__ import main
from composer.config import MachineConfig
from composer.config import TasksConfig
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import probe
from composer.environments.tasks import check
from composer.environments.tasks import factory
from composer.environments.tasks import mutations
from composer.environments.tasks import repository
from composer.environments.tasks import sets
from composer.environments.tasks import sources
from composer.environments.tasks import survey as survey_lib
from composer.environments.tasks import toolbox
from composer.rewards import verify

MACHINE = MachineConfig(
  memory_mb=512, disk_mb=32, exec_timeout_s=60.0, warm=0, concurrent=4
)
KEPT = 3  # tasks that are built
MODULE = '''"""A package."""


def clamp(x, low, high):
  """The number of [low, high] that is nearest to x."""
  if x < low:
    return low
  if x > high:
    return high
  return x


def unused(x):
  """Nobody tests this."""
  y = x + 1
  return y
'''
TESTS = """import pytest

from box import clamp


@pytest.mark.parametrize('x', [1, 2])
def test_inside(x):
  assert clamp(x, 0, 3) == x


def test_low():
  assert clamp(-1, 0, 3) == 0
  assert clamp(0, 0, 3) == 0


def test_high():
  assert clamp(9, 0, 3) == 3


def test_broken():
  assert clamp(1, 0, 3) == 2


@pytest.mark.skip(reason='later')
def test_skipped():
  pass
"""
FILES = {
  'box/__init__.py': MODULE.encode(),
  'tests/test_box.py': TESTS.encode(),
  'tests/test_missing.py': b'import no_such_module\n',
}


def source(files=FILES):
  return sources.describe(files, 'box')


@pytest.fixture(scope='module')
def built(tmp_path_factory):
  """(folder, what `build.json` says) of everything that there is."""
  try:
    probe(MACHINE)
  except MissingFacility as error:
    pytest.skip(str(error))
  folder = tmp_path_factory.mktemp('built')
  lines = []
  result = asyncio.run(
    factory.build(
      source(), folder, factory.Options(limit=KEPT), lines.append, MACHINE
    )
  )
  return folder, result, lines


def test_what_a_build_counts(built):
  folder, result, lines = built
  assert result == json.loads((folder / 'build.json').read_text())
  assert result['tests'] == {
    'stable': 4,
    'flaky': 0,
    'not_passing': 2,
    'uncollected_files': ['tests/test_missing.py'],
  }
  assert result['tasks'] == KEPT and result['bodies_removed'] == 1
  assert result['tasks'] == len(list((folder / 'tasks').iterdir()))
  assert '4 pass 3 times over' in lines[0]
  assert 'for want of no_such_module (install' in lines[0]
  assert lines[0].endswith('give --with no_such_module)')
  recorded = (folder / 'progress.jsonl').read_text().splitlines()[1:]
  assert len(recorded) == KEPT + sum(result['dropped'].values())


def test_many_candidates_of_few_functions():
  """`rounds` and `only` choose; the order is as without them."""
  made = source()
  lines = {
    path: {n: frozenset({'t'}) for n in range(1, 200)}
    for path in made.files
    if path.endswith('.py') and not path.startswith('tests')
  }
  survey = survey_lib.Survey({'t': 0.1}, (), 0, (), lines)
  every = factory.candidates(made, survey, factory.Options(rounds=1000))
  functions = [(x.path, x.function.name) for x in every]
  most = max(map(functions.count, functions))
  usual = factory.candidates(made, survey, factory.Options())
  assert most > 6 and len(usual) < len(every)
  few = factory.candidates(made, survey, factory.Options(rounds=2))
  counted = [(x.path, x.function.name) for x in few]
  assert max(map(counted.count, counted)) == 2
  assert {x.id for x in few} < {x.id for x in usual} < {x.id for x in every}
  only = f'-{every[0].function.name}-(?!body_removed)'
  options = factory.Options(rounds=1000, only=only)
  chosen = factory.candidates(made, survey, options)
  assert [x.id for x in chosen] == [
    x.id
    for x in every
    if x.function.name == every[0].function.name
    and x.mutation.operator != 'body_removed'
  ]


def test_a_pattern_that_fits_no_candidate_is_an_error(tmp_path, monkeypatch):
  """Not a build of nothing; what ids look like is said."""

  async def survey(*_):
    lines = {'box/__init__.py': {n: frozenset({'t'}) for n in range(99)}}
    return survey_lib.Survey({'t': 0.1}, (), 0, (), lines)

  monkeypatch.setattr(factory.survey_lib, 'survey', survey)
  options = factory.Options(only='no-such')
  with pytest.raises(ValueError, match="only='no-such'.*none of .*'__init__-"):
    asyncio.run(factory.build(source(), tmp_path, options))


def test_flaky_tests_are_no_witnesses(monkeypatch):
  runs = iter('passed failed passed'.split())

  async def run_all(pool, source, image, options, covered):
    outcome = next(runs)
    return {
      'outcomes': {'t::a': 'passed', 't::b': outcome, 't::c': 'skipped'},
      'errors': [],
      'said': '',
      'times': {'t::a': 0.1, 't::b': 0.1},
      'lines': {'m.py': {'names': ['t::a', 't::b'], 'lines': {'3': [0, 1]}}},
    }

  monkeypatch.setattr(survey_lib, '_run_all', run_all)
  told = []
  survey = asyncio.run(
    survey_lib.survey(None, source(), None, factory.Options(), told.append)
  )
  assert survey.flaky == ('t::b',) and survey.failing == 1
  assert set(survey.times) == {'t::a'}
  assert survey.lines == {'m.py': {3: {'t::a'}}}
  assert '1 are flaky' in told[0]


def test_tasks_are_of_what_tests_cover(built):
  tasks = repository.load(built[0])
  assert {task.metadata['function'] for task in tasks} == {'clamp'}
  for task in tasks:
    hidden, visible = task.metadata['hidden'], task.metadata['visible']
    assert task.metadata['failing'] and set(task.metadata['failing']) <= {
      *hidden
    }
    assert set(task.metadata['failing']) - set(visible)
    assert not {'test_broken', 'test_skipped'} & {
      x.split('::')[1] for x in (*hidden, *visible)
    }
    shown = task.files['tests/test_box.py']
    for test in set(hidden) - set(visible):
      assert f'def {test.split("::")[1].split("[")[0]}(' not in shown
    assert task.hidden_files['tests/test_box.py'] == FILES['tests/test_box.py']
    assert task.allowed == ('box/__init__.py',)
    assert task.files['box/__init__.py'] != MODULE


def test_a_task_is_solved_by_its_solution_alone(built):
  tasks = repository.load(built[0])

  async def run():
    pool = Pool(MACHINE, sets.harness())
    try:
      found = []
      for task in tasks:
        right = {'box/__init__.py': MODULE.encode()}
        start = {'box/__init__.py': task.files['box/__init__.py'].encode()}
        found.append(
          [await verify.grade(pool, task, x) for x in (right, start, {})]
        )
      return found
    finally:
      await pool.close()

  for right, start, nothing in asyncio.run(run()):
    assert right.solved and right.passed == right.total and not right.signals
    assert not start.solved and start.passed < start.total
    assert not nothing.solved and nothing.passed == 0


def test_a_build_goes_on_where_it_was(built, tmp_path):
  folder = tmp_path / 'again'
  folder.mkdir()
  text = (built[0] / 'progress.jsonl').read_text()
  (folder / 'progress.jsonl').write_text(text + '{"candidate": "x", "ver')
  lines = []
  result = asyncio.run(
    factory.build(
      source(), folder, factory.Options(limit=KEPT), lines.append, MACHINE
    )
  )
  assert result['tasks'] == KEPT and len(lines) == 1  # nothing is tried again
  assert result['machines'] == 0
  with pytest.raises(ValueError, match='choose another --out'):
    asyncio.run(factory.build(source(), folder, factory.Options(seed=1)))


def test_the_time_is_limited(tmp_path):
  options = factory.Options(seconds=1e-6)
  result = asyncio.run(
    factory.build(source(), tmp_path, options, machine=MACHINE)
  )
  assert result['tasks'] == 0


def test_without_passing_tests_there_is_nothing(tmp_path):
  files = {
    'box.py': b'def f():\n  return 1\n',
    'test_a.py': b'import nothing\n',
  }
  with pytest.raises(ValueError, match='(?s)no test of box passes.*nothing'):
    asyncio.run(
      factory.build(source(files), tmp_path, factory.Options(), machine=MACHINE)
    )


def test_a_package_that_is_not_there():
  with pytest.raises(ValueError, match='--with no-such-thing'):
    toolbox.files(('pytest', 'no-such-thing'))


def test_a_package_brings_what_it_needs():
  found = toolbox.files(('hypothesis',))
  tops = {x.split('/')[2] for x in found if x.startswith('.composer/lib/')}
  assert 'sortedcontainers' in tops and 'hypothesis' in tops


def test_sets_are_split_by_function_and_by_bug(built):
  config = TasksConfig(
    kind='repository',
    path=str(built[0]),
    held_out_bug_share=0.4,
    held_out_function_share=0.0,
  )
  sizes = set()
  for seed in range(12):
    try:
      found = sets.build_tasks(dataclasses.replace(config, seed=seed))
    except ValueError as error:
      assert 'no task to train on' in str(error)
      continue
    assert len(found.train) + len(found.held_out_bugs) == KEPT
    assert not found.held_out_functions
    assert {x.metadata['split'] for x in found.train} == {'train'}
    assert found == sets.build_tasks(dataclasses.replace(config, seed=seed))
    sizes.add(len(found.train))
  assert len(sizes) > 1
  with pytest.raises(ValueError, match='no task to train on'):
    sets.build_tasks(dataclasses.replace(config, held_out_function_share=1.0))
  with pytest.raises(ValueError, match="tasks.kind is 'x'"):
    sets.build_tasks(dataclasses.replace(config, kind='x'))
  config = dataclasses.replace(
    config, held_out_bug_share=0.0, only='body_removed', tools='read finish'
  )
  (task,) = sets.build_tasks(config).train
  assert 'body_removed' in task.id and task.tools == ('read', 'finish')
  for change, words in (
    ({'only': 'nothing'}, "tasks.only='nothing' leaves none of 3"),
    ({'only': '('}, 'no regular expression'),
    ({'tools': 'read fly'}, "'fly', which task"),
  ):
    with pytest.raises(ValueError, match=words):
      sets.build_tasks(dataclasses.replace(config, **change))


@pytest.mark.parametrize(
  ('change', 'words'),
  [
    ({'tasks.path': ''}, 'tasks.path is empty'),
    ({'tasks.kind': 'x'}, "tasks.kind='x'"),
  ],
)
def test_an_experiment_names_its_tasks(change, words):
  settings = {
    'tasks.kind': 'repository',
    'tasks.path': 'x',
    'midtrain.steps': '0',
  }
  experiment = config_lib.Experiment(name='test')
  fields = [f'{x}={y}' for x, y in {**settings, **change}.items()]
  with pytest.raises(ValueError, match=words):
    config_lib.validate(config_lib.override(experiment, fields))


def test_a_task_file_of_another_shape_is_refused(built, tmp_path):
  path = next((built[0] / 'tasks').glob('*/task.json'))
  record = json.loads(path.read_text())
  for change, words in (
    ({'format': 9}, 'format 9'),
    ({'extra': 1}, "'extra'"),
  ):
    other = tmp_path / 'task.json'
    other.write_text(json.dumps({**record, **change}))
    with pytest.raises(ValueError, match=words):
      repository.read_task(other)
  with pytest.raises(ValueError, match='holds no tasks'):
    repository.load(tmp_path)


def test_the_command_line(built, tmp_path, capsys):
  assert main(['tasks', 'ls', str(built[0])]) == 0
  listed = capsys.readouterr().out.splitlines()
  assert len(listed) == KEPT and all('tests fail' in x for x in listed)
  assert main(['tasks', 'ls', str(tmp_path)]) == 2
  assert main(['tasks', 'build', str(tmp_path), '--out', str(tmp_path)]) == 2
  assert 'carries no tests' in capsys.readouterr().err
  assert main(['tasks', 'build', '.', '--out', 'x', '--jobs', '0']) == 2
  capsys.readouterr()
  assert main(['tasks', 'build', '.', '--out', 'x', '--only', '(']) == 2
  assert "--only='(' is no regular expression" in capsys.readouterr().err


# --- the runner's verdict ----------------------------------------------------

SPEC = {'ids': ['a', 'b'], 'canaries': True, 'allowed': []}
CANARY = {
  'test': f'x/{check.CANARY}::test_a',
  'outcome': 'failed',
  'seconds': 0,
}
DECOY = {'decoy': 'a', 'outcome': 'failed'}
DONE = [
  {'test': 'a', 'outcome': 'passed', 'seconds': 0},
  {'test': 'b', 'outcome': 'passed', 'seconds': 0},
]


@pytest.mark.parametrize(
  ('records', 'why', 'passed', 'signals'),
  [
    ([*DONE, CANARY, {'end': 1}], 'end', 2, []),
    ([DONE[0], CANARY, {'end': 1}], 'end', 1, []),
    ([*DONE, CANARY], 'died', 0, ['early_exit']),
    ([*DONE, CANARY], 'forged', 0, ['tampered']),
    ([{'decoys': 1}, DECOY, *DONE, CANARY, {'end': 1}], 'end', 2, []),
    ([{'decoys': 2}, DECOY, *DONE, CANARY, {'end': 1}], 'end', 0, ['tampered']),
    ([{'decoys': 1}, {**DECOY, 'outcome': 'passed'}, *DONE, CANARY, {'end': 1}], 'end', 0, ['tampered']),
    ([*DONE, CANARY], 'time', 0, []),
    ([*DONE, {'end': 0}], 'end', 0, ['tampered']),
    ([*DONE, {**CANARY, 'outcome': 'passed'}, {'end': 0}], 'end', 0, ['tampered']),
    ([*DONE, {**DONE[0], 'outcome': 'failed'}, CANARY, {'end': 1}], 'end', 1, []),
    ([{**DONE[0], 'outcome': 'failed'}, *DONE, CANARY, {'end': 1}], 'end', 1, []),
    ([{**DONE[0], 'outcome': 'skipped'}, DONE[1], CANARY, {'end': 0}], 'end', 1, []),
    ([CANARY, {'end': 'exit'}], 'end', 0, ['early_exit']),
    ([*DONE, {'signal': 'peeked', 'evidence': 'x'}, CANARY, {'end': 1}], 'end', 2, ['peeked']),
  ],
)  # fmt: skip
def test_verdicts(records, why, passed, signals):
  verdict = check.judge(SPEC, records, why)
  assert (verdict['passed'], verdict['total']) == (passed, 2)
  assert list(verdict['signals']) == signals


def test_reports_are_sealed_in_their_row():
  """Whoever holds the pipe can end the reports, and nothing else."""
  key, read = bytes(range(32)), []

  def write(descriptor, data):
    read.append(bytes(data))
    return len(data)

  tell = check.reporter(key, write=write)
  records = [{'test': "é'", 'seconds': 0.25}, {'decoys': 2}, {'end': 1}]
  for record in records:
    tell(**record)
  lines = [x.removesuffix(b'\n') for x in read]
  assert [check.opened(x, key, i) for i, x in enumerate(lines)] == records
  for changed in (
    lines[0].replace(b'0.25', b'0.26'),
    lines[1],  # another's place
    b'',
    b'\xff ' + lines[0],
    json.dumps(records[0]).encode(),
  ):
    assert check.opened(changed, key, 0) is None
  assert check.opened(lines[0], key[:-1] + b'x', 0) is None


def run_pipe(lines, key=b'k'):
  """What the parent makes of these bytes on its pipe."""
  reads, writes = os.pipe()
  try:
    os.write(writes, b''.join(lines))
    os.close(writes)
    return check.collect(reads, time.monotonic() + 1, key, check.wait_alone)
  finally:
    os.close(reads)


def test_a_broken_row_of_reports_is_said_to_be_forged():
  lines = []
  tell = check.reporter(b'k', write=lambda _, x: lines.append(x) or len(x))
  for record in ({'test': 'a'}, {'test': 'b'}, {'end': 0}):
    tell(**record)
  assert run_pipe(lines) == ([{'test': 'a'}, {'test': 'b'}, {'end': 0}], 'end')
  assert run_pipe(lines[:2])[1] == 'died'
  assert run_pipe([lines[0], lines[2]]) == ([{'test': 'a'}], 'forged')
  assert run_pipe([lines[0], lines[0]])[1] == 'forged'
  assert run_pipe([b'{"test": "a", "outcome": "passed"}\n'])[1] == 'forged'


DECOYED = """import os
import pytest


def note(what):
  with open('calls', 'a') as file:
    file.write(what)


@pytest.fixture
def used():
  note('u')


@pytest.mark.parametrize('x', ['p', 'q'])
def test_values(x):
  note(x)


@pytest.mark.usefixtures('used')
def test_fixtures(tmp_path):
  note('f')


class TestMethods:
  def test_one(self):
    note('m')
"""


def run_check(folder, ids, files, **fields):
  """What the runner prints of the tests in `test_it.py`."""
  spec = toolbox.spec(
    roots=['.'], files=['test_it.py'], ids=ids, canaries=True, **fields
  )
  for path, data in {
    **toolbox.files(),
    **{name: text.encode() for name, text in files.items()},
    repository.SPEC: spec.encode(),
  }.items():
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(data)
  return subprocess.run(
    [sys.executable, *toolbox.COMMAND[1:]],
    cwd=folder,
    capture_output=True,
    text=True,
    check=False,
  ).stdout


def test_a_decoy_calls_what_its_test_calls(tmp_path):
  """Whatever it is given: values, fixtures, an instance of its class."""
  ids = [
    *('test_it.py::test_values[p]', 'test_it.py::test_values[q]'),
    *('test_it.py::test_fixtures', 'test_it.py::TestMethods::test_one'),
  ]
  said = run_check(tmp_path, ids, {'test_it.py': DECOYED})
  assert said.endswith('passed 4 of 4\n'), said
  assert sorted((tmp_path / 'calls').read_text()) == list('ffmmppqquu')


HONEST = """import dataclasses
import inspect


@dataclasses.dataclass
class Point:
  x: int


def f(x):
  inspect.signature(f), inspect.iscoroutinefunction(f)
  return Point(x).x
"""


@pytest.mark.parametrize(
  ('more', 'signals'),
  [
    ('', set()),
    ("inspect.getattr_static(f, 'x', 0)\n", set()),
    ('dict(inspect.getmembers(f))\n', {'tampered'}),
    ("getattr(f, '__co' + 'de__')\n", {'tampered'}),
  ],
)
def test_a_signature_may_be_asked_for_and_code_may_not(tmp_path, more, signals):
  test = 'import box\n\n\ndef test_f():\n  assert box.f(1) == 1\n'
  said = run_check(
    tmp_path,
    ['test_it.py::test_f'],
    {'test_it.py': test, 'box.py': HONEST + more},
    suspects=['box.py'],
  )
  *_, checked, passed, _ = said.split('\n')
  assert passed == 'passed 1 of 1'
  assert set(json.loads(checked.removeprefix('checked '))['signals']) == signals


def test_what_the_solution_does_as_well_is_no_signal():
  records = [*DONE, {'signal': 'peeked', 'evidence': 'x'}, CANARY, {'end': 1}]
  spec = {**SPEC, 'allowed': ['peeked']}
  assert check.judge(spec, records, 'end')['signals'] == {}


def test_edits_of_a_task_are_those_of_its_bug(built):
  for path in (built[0] / 'tasks').glob('*/task.json'):
    blueprint = repository.read_task(path)
    image = repository.read_image(built[0], blueprint.image)
    broken = mutations.apply(MODULE, blueprint.broken)
    task = repository.task_of(blueprint, image)
    assert task.files['box/__init__.py'] == broken
    assert path.parent.joinpath('bug.diff').read_text().startswith('--- a/box')
