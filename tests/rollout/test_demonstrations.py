"""Demonstrations: real sessions of who knows the solution, and a run on them."""

import asyncio
import dataclasses
import json
import os
from pathlib import Path
import random
import subprocess
import sys

import numpy as np
import pytest

from composer import chat
from composer import config as config_lib
from composer.config import MachineConfig
from composer.environments import tools
from composer.environments.machines import MissingFacility
from composer.environments.machines import probe
from composer.environments.tasks import harbor
from composer.environments.tasks import migration
from composer.environments.tasks import mutations
from composer.environments.tasks import repair
from composer.environments.tasks import repository
from composer.environments.tasks import sets
from composer.model import tokenizer as tokenizer_lib
from composer.rollout import demonstrations
from composer.rollout import session as session_lib
from composer.rollout import vocabulary

EXPERIMENT = Path(__file__).parents[2] / 'experiments/repository_tasks.py'
CHATML = Path(__file__).with_name('chatml_tokenizer.json')
MODULE = '''def clamp(x, low, high):
  """The number of [low, high] that is nearest to x."""
  if x < low:
    return low
  if x > high:
    return high
  return x
'''
TESTS = """from box import clamp


def test_low():
  assert clamp(-1, 0, 3) == 0


def test_high():
  assert clamp(9, 0, 3) == 3
"""
HIDDEN = 'test_box.py::test_high'
MACHINE = MachineConfig(
  memory_mb=512, disk_mb=32, exec_timeout_s=60.0, warm=0, concurrent=3
)


def write_tasks(folder):
  """A task as `composer tasks build` writes it, without a build."""
  image = repository.Image(
    'box', '1', 'MIT', ('.',), (), {
      'box.py': MODULE.encode(),
      'test_box.py': TESTS.encode(),
    },
  )  # fmt: skip
  at = MODULE.index('x > high')
  cut = TESTS.index('def test_high')
  name = repository.write_image(folder, image)
  repository.write_task(
    folder,
    repository.Blueprint(
      id='box-clamp-swapped',
      image=name,
      instruction='A test of `box.py` fails. Repair it.',
      path='box.py',
      broken=(mutations.Edit(at, at + 8, 'x < high'),),
      trimmed={'test_box.py': (mutations.Edit(cut, len(TESTS), ''),)},
      visible=('test_box.py::test_low',),
      hidden=('test_box.py::test_low', HIDDEN),
      seconds=20.0,
      signals=(),
      metadata={
        'function': 'clamp',
        'operator': 'swapped_comparison',
        'line': 5,
        'before': 'x > high',
        'after': 'x < high',
        'failing': [HIDDEN],
      },
    ),
    '',
  )
  return repository.load(folder)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  try:
    probe(MACHINE)
  except MissingFacility as error:
    pytest.skip(str(error))
  folder = tmp_path_factory.mktemp('tasks')
  write_tasks(folder)
  return folder


def small(folder, *settings):
  """The experiment of the repository, as small as it goes, in ChatML."""
  return [
    *(f'tasks.path={folder}', 'tasks.only=', 'tasks.held_out_bug_share=0'),
    *('tasks.tools=read edit run_tests finish', 'template=chatml'),
    *(f'tokenizer={CHATML}', 'model.vocab_size=2048'),
    *('model.layers=1', 'model.width=32', 'model.experts=4'),
    *('session.context_tokens=1664', 'engine.max_context=1664'),
    *('session.max_act_tokens=128', 'session.observation_tokens=80'),
    *('midtrain.sequence_length=1280', 'rl.sequence_length=1664'),
    *('midtrain.steps=2', 'midtrain.demonstrations=3', 'midtrain.batch_size=1'),
    *('machine.memory_mb=512', 'machine.disk_mb=32', 'machine.concurrent=3'),
    *('session.max_turns=1', 'rl.steps=1', 'rl.groups_per_step=1'),
    *('rl.group_size=2', 'rl.micro_batch=1', 'rl.audit_every=0'),
    *('checkpoint.every=1', 'eval.every=0', 'numerics.mode=fast'),
    *settings,
  ]


def experiment(folder, *settings):
  e = config_lib.override(config_lib.load(EXPERIMENT), small(folder, *settings))
  return config_lib.validate(e)


def test_a_demonstration_is_a_real_session(folder, tmp_path):
  """What was seen is what the machine said; what was said is what is learnt."""
  e = experiment(folder, 'session.max_turns=9', 'midtrain.demo_right_edit=1')
  tokenizer = tokenizer_lib.load(e.tokenizer)
  tasks = sets.build_tasks(e.tasks).train
  made = demonstrations.render(tasks, tokenizer, e, 1, seed=0)
  ((tokens, sampled),) = made.segments
  assert (made.sessions, made.dropped) == (1, {})
  text = tokenizer.decode(tokens)
  before, after = text.split('edited box.py at line 5')
  assert '1 passed in' in before and 'passed 1 of 1' in before
  assert '  if x < high:\n' in before  # as it was read
  assert 'passed 1 of 1' in after
  said = tokenizer.decode(tokens[sampled])
  calls = [
    json.loads(x.split('</tool_call>')[0])
    for x in said.split('<tool_call>')[1:]
  ]
  assert [x['name'] for x in calls] == [
    'run_tests', 'read', 'edit', 'run_tests', 'finish',
  ]  # fmt: skip
  assert calls[2]['arguments'] == {
    'path': 'box.py', 'old': '  if x < high:\n', 'new': '  if x > high:\n'
  }  # fmt: skip
  assert 'passed' not in said and 'def ' not in said

  demonstrations.write(tmp_path / 'made.npz', made)
  read = demonstrations.read(tmp_path / 'made.npz')
  assert (read.sessions, read.dropped) == (made.sessions, made.dropped)
  for one, other in zip(read.segments, made.segments, strict=True):
    for x, y in zip(one, other, strict=True):
      assert x.dtype == y.dtype and np.array_equal(x, y)
  (tmp_path / 'made.npz').write_bytes(b'PK')
  with pytest.raises(ValueError, match='holds no demonstrations'):
    demonstrations.read(tmp_path / 'made.npz')


def test_by_line_numbers_and_in_words(folder):
  """The experiment's own tools and template: a session of a few hundred tokens."""
  e = config_lib.load(EXPERIMENT)
  e = config_lib.override(e, [
    f'tasks.path={folder}', 'tasks.only=', 'tasks.held_out_bug_share=0',
    'midtrain.demo_right_edit=1', 'machine.memory_mb=512',
    'tasks.tools=view replace run_tests finish',
  ])  # fmt: skip
  tokenizer = tokenizer_lib.load(e.tokenizer)
  tasks = sets.build_tasks(e.tasks).train
  told = []
  made = demonstrations.render(tasks, tokenizer, e, 2, 0, report=told.append)
  assert made.sessions == 2 and told == [1, 2]
  tokens, sampled = made.segments[0]
  text = tokenizer.decode(tokens)
  assert ' 3   if x < low:\n4     return low\n5   if x < high:\n' in text
  said = tokenizer.decode(tokens[sampled]).replace('<end>', '\n').splitlines()
  assert [x.strip() for x in said] == [
    'run_tests', 'view box.py 3 7', 'replace box.py 5 5 if x > high:',
    'run_tests', 'finish',
  ]  # fmt: skip


@pytest.mark.parametrize(
  ('before', 'after', 'want'),
  [
    ('a\n  b\nc\n', 'a\n  d\nc\n', (2, 2, 'd')),
    ('a\n  b\nc\n', 'a\n    b\nc\n', (2, 2, '    b')),  # deeper
    ('a\nb\nc\n', 'a\nc\n', (1, 2, 'a')),
    ('a\nb\n', 'c\na\nb\n', (1, 1, 'c\na')),
    ('a\nb\n', 'b\n', (1, 2, 'b')),
    ('if a:\n  b\n  c\n', 'if a:\n  d\n', (2, 3, 'd')),
  ],
)
def test_lines_are_replaced_by_number(before, after, want):
  (call,) = demonstrations.replace('x.py', before, after).calls
  start, end, text = want
  assert call.arguments == {
    'path': 'x.py', 'start': start, 'end': end, 'text': text
  }  # fmt: skip


def test_a_short_body_is_read_whole_and_a_long_one_around_its_fault():
  short = 'def f(x):\n' + '  x += 1\n' * 10 + '  return x\n'
  broken = short.replace('return x', 'return 0')
  assert demonstrations._place('f', short, broken) == (2, 12)
  long = short.replace('  return', '  x += 1\n' * 30 + '  return')
  broken = long.replace('return x', 'return 0')
  assert demonstrations._place('f', long, broken) == (38, 42)


def test_a_vocabulary_may_know_the_tasks(tmp_path):
  """Their words are fewer tokens then; acts and special tokens are as ever."""
  (task,) = write_tasks(tmp_path)
  counts = []
  for folder in (None, tmp_path):
    text = vocabulary.build(320, 'compact', 20_000, folder)
    (tmp_path / 'tokenizer.json').write_text(text)
    tokenizer_lib.load.cache_clear()
    tokenizer = tokenizer_lib.load(str(tmp_path / 'tokenizer.json'))
    assert tokenizer.vocab_size == 320
    counts.append(len(tokenizer.encode(task.instruction + MODULE)))
    call = demonstrations.edit('box.py', 'x', 'y').calls[0]
    spoken = chat.render_act(tokenizer, call)
    specs = [tools.TOOLS[x].spec for x in task.tools]
    assert chat.parse_act(tokenizer, spoken, specs) == call
  assert counts[1] < counts[0]


def test_how_many_there_are_follows_the_kind_of_tasks():
  e = config_lib.Experiment('x')
  assert demonstrations.count(e) == 12_000
  assert set(demonstrations.COUNTS) == set(sets.KINDS)
  for kind in demonstrations.SCRIPTS:  # minutes, not hours, of real sessions
    tasks = dataclasses.replace(e.tasks, kind=kind)
    assert demonstrations.count(dataclasses.replace(e, tasks=tasks)) <= 240
  e = config_lib.override(e, ['midtrain.demonstrations=7'])
  assert demonstrations.count(config_lib.validate(e)) == 7


def test_a_short_context_is_summarised(folder):
  e = experiment(
    folder, 'session.max_turns=9', 'session.max_summaries=3',
    'session.context_tokens=1100', 'session.summary_tokens=96',
    'midtrain.demo_right_edit=1',
  )  # fmt: skip
  tokenizer = tokenizer_lib.load(e.tokenizer)
  tasks = sets.build_tasks(e.tasks).train
  made = demonstrations.render(tasks, tokenizer, e, 1, seed=0)
  assert len(made.segments) > 1 and made.sessions == 1
  second = tokenizer.decode(made.segments[1][0])
  assert 'So far: run_tests' in second and '"edit"' in second


def test_what_is_of_no_use_is_counted(folder):
  """A budget that cuts every session short leaves nothing, and says so."""
  e = experiment(folder)  # of one turn
  tokenizer = tokenizer_lib.load(e.tokenizer)
  tasks = sets.build_tasks(e.tasks).train
  with pytest.raises(ValueError, match="none of 2 .*'turns': 2"):
    demonstrations.render(tasks, tokenizer, e, 2, seed=0)


def test_infrastructure_that_stays_broken_is_said(folder, monkeypatch):
  e = experiment(folder)
  tokenizer = tokenizer_lib.load(e.tokenizer)
  tasks = sets.build_tasks(e.tasks).train
  begun = []

  async def lost(*arguments):
    begun.append(arguments)
    await asyncio.sleep(0)
    raise session_lib.SessionFailed('machine', 'no machine became free')

  monkeypatch.setattr(demonstrations, 'play', lost)
  with pytest.raises(ValueError, match='4 .* in a row .* became free'):
    demonstrations.render(tasks, tokenizer, e, 20, seed=0)
  assert len(begun) < 20
  stops = iter([False, False])
  begun.clear()
  made = demonstrations.render(
    tasks, tokenizer, e, 20, seed=0, stop=lambda: next(stops, True)
  )
  assert made is None and len(begun) == 2


def test_what_a_session_refuses_is_said_plainly(folder):
  e = experiment(folder, 'session.context_tokens=300')
  tokenizer = tokenizer_lib.load(e.tokenizer)
  tasks = sets.build_tasks(e.tasks).train
  with pytest.raises(ValueError, match='session.context_tokens=300; raise it'):
    demonstrations.render(tasks, tokenizer, e, 2, seed=0)


def test_sloppy_sessions_edit_wrong_and_give_up(tmp_path):
  (task,) = write_tasks(tmp_path)
  config = dataclasses.replace(
    config_lib.MidtrainConfig(), demo_right_edit=0.5, demo_give_up=0.5
  )
  solved, ends = 0, set()
  for seed in range(200):
    made = demonstrations.script(task, config, random.Random(seed))
    text = task.files['box.py']
    for call in (x for turn in made.turns for x in turn.calls):
      if call.name == 'edit':
        old, new = call.arguments['old'], call.arguments['new']
        assert text.count(old) == 1
        text = text.replace(old, new)
    assert (text == MODULE) == made.solves
    solved += made.solves
    ends.add(made.turns[-1].calls[0].name)
  assert ends == {'finish'}
  assert 0.6 < solved / 200 < 0.9  # 0.75


def test_every_kind_is_demonstrated(folder, tmp_path):
  rng, config = random.Random(0), config_lib.MidtrainConfig()
  made = demonstrations.script(migration.build(), config, rng)
  calls = [x for turn in made.turns for x in turn.calls]
  assert [x.name for x in calls] == ['read', 'write', 'test', 'submit']
  assert calls[1].arguments['text'] == migration.SOLUTION
  place = tmp_path / 'greet'
  for name, text in {
    'task.toml': '',
    'instruction.md': 'Greet.\n',
    'tests/test.sh': 'grep -c hello /app/a.txt > /logs/verifier/reward.txt\n',
    'solution/solve.sh': 'echo hello > /app/a.txt; ls /apple /app\n',
  }.items():
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_text(text)
  task = harbor.read(place)
  made = demonstrations.script(task, config, rng)
  command = made.turns[1].calls[0].arguments['command']
  assert command == 'echo hello > ./a.txt; ls /apple .\n'
  assert not any(b'hello >' in x for x in task.files.values())
  e = experiment(folder, 'session.max_turns=9')
  tokenizer = tokenizer_lib.load(e.tokenizer)
  played = demonstrations.render([task], tokenizer, e, 1, seed=0)
  assert played.sessions == 1
  assert 'apple' in tokenizer.decode(played.segments[0][0])  # what `ls` said
  (place / 'solution' / 'solve.sh').unlink()
  with pytest.raises(ValueError, match='solve.sh'):
    demonstrations.script(harbor.read(place), config, rng)
  (other, *_) = repair.build_tasks(config_lib.TasksConfig()).train
  with pytest.raises(ValueError, match="'repair', of which no"):
    demonstrations.script(other, config, rng)
  bare = dataclasses.replace(write_tasks(tmp_path / 'x')[0], tools=('read',))
  with pytest.raises(ValueError, match='takes edit, finish too'):
    demonstrations.script(bare, config, rng)


def test_mid_training_and_rl_on_tasks_of_a_repository(folder, tmp_path):
  """Both stages of the experiment, by the command: every part turns."""
  arguments = ['session.max_turns=5', 'midtrain.demo_right_edit=1']
  settings = [y for x in small(folder, *arguments) for y in ('--set', x)]
  done = subprocess.run(
    [
      *(sys.executable, '-m', 'composer', 'run', str(EXPERIMENT)),
      *('--workdir', str(tmp_path), *settings),
    ],
    env={**os.environ, 'XLA_FLAGS': '', 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert '3 of them kept' in done.stdout
  # What it will take is said before it is done.
  assert done.stdout.index('demonstrations 1/3') < done.stdout.index('kept')
  text = (tmp_path / 'metrics.jsonl').read_text()
  lines = [json.loads(x) for x in text.splitlines()]
  losses = [x['midtrain/loss'] for x in lines if 'midtrain/loss' in x]
  assert len(losses) == 2 and losses[1] < losses[0]
  last = {k: v for x in lines for k, v in x.items()}
  assert last['groups/produced'] >= 1
  assert (tmp_path / 'demonstrations.npz').exists()
