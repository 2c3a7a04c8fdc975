"""What cannot work is refused with the remedy, and leaves nothing half done."""

import dataclasses
import errno
import importlib.util
import json
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import types

import numpy as np
import pytest

from composer import metrics
from composer import records
from composer.environments.machines import namespace
from composer.fleet import finish
from composer.fleet import local
from composer.fleet import processes
from composer.fleet import trainer
from composer.fleet import workdir as workdir_lib
from composer.inference.engine import Stats
from composer.model import transformer
from composer.rl import buffer
from composer.weights import store

HERE = Path(__file__).parent


def tiny():
  spec = importlib.util.spec_from_file_location('tiny', HERE / 'tiny.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config()


def changed(experiment, section, **fields):
  part = dataclasses.replace(getattr(experiment, section), **fields)
  return dataclasses.replace(experiment, **{section: part})


def refused(experiment, workdir, *texts, **named):
  named = {'role': 'trainer', **named}
  with pytest.raises(ValueError) as caught:
    local.run(experiment, workdir=workdir, **named)
  for text in texts:
    assert text in str(caught.value)


@pytest.mark.filterwarnings('ignore:machine.driver=process')
@pytest.mark.parametrize('resume', [False, True])
def test_a_workdir_of_another_experiment(tmp_path, resume):
  workdir_lib.make(tiny(), tmp_path)
  other = changed(tiny(), 'rl', steps=7, staleness=1)
  refused(
    other,
    tmp_path,
    *('another experiment', 'rl.staleness: 2 there, 1 here'),
    *('rl.steps: 6 there, 7 here', 'choose another --workdir'),
    resume=resume,
  )
  refused(other, tmp_path, 'another experiment', role='eval')
  assert [p.name for p in tmp_path.iterdir()] == ['config.json']


def test_a_workdir_that_is_older_than_a_field(tmp_path):
  """It did what the default says."""
  workdir_lib.make(tiny(), tmp_path)
  path = tmp_path / workdir_lib.CONFIG
  values = json.loads(path.read_text())
  del values['midtrain']['sampled_only'], values['parallel']
  path.write_text(json.dumps(values))
  assert workdir_lib.check(tiny(), tmp_path, resume=True)
  other = changed(tiny(), 'midtrain', sampled_only=True)
  with pytest.raises(ValueError, match='sampled_only: False there, True here'):
    workdir_lib.check(other, tmp_path, resume=True)


@pytest.mark.filterwarnings('ignore:machine.driver=process')
def test_tasks_that_are_not_there(tmp_path):
  other = changed(tiny(), 'tasks', kind='repository', path=str(tmp_path / 'x'))
  refused(other, tmp_path / 'run', 'holds no tasks', 'tasks build', role='all')
  assert not (tmp_path / 'run').exists()


def test_a_process_may_join_with_another_machine(tmp_path):
  workdir_lib.make(tiny(), tmp_path)
  workdir_lib.join(changed(tiny(), 'engine', pages=256), tmp_path)
  with pytest.raises(ValueError, match='another experiment'):
    workdir_lib.join(changed(tiny(), 'session', max_turns=3), tmp_path)


def test_a_workdir_in_use_or_finished(tmp_path):
  workdir_lib.make(tiny(), tmp_path)
  refused(tiny(), tmp_path, 'holds a run already', '--resume')
  with workdir_lib.locked(tmp_path, 'trainer-0'):
    refused(
      tiny(), tmp_path, "another process runs role 'trainer-0'", resume=True
    )
  (tmp_path / 'done').touch()
  for resume in (False, True):
    refused(tiny(), tmp_path, 'has finished', 'report.html', resume=resume)


def test_exchanges_that_cannot_be_used(tmp_path):
  workdir = tmp_path / 'run'
  unknown = changed(tiny(), 'weights', exchange='ftp://host/exchange')
  refused(unknown, workdir, "'ftp://host/exchange'", 'file://', 'gs://')
  relative = changed(tiny(), 'weights', exchange='file://exchange')
  refused(relative, workdir, 'file:///absolute/path')
  url = f'file://{tmp_path}/exchange'
  kv = store.open_exchange(url)
  store.claim_fence(kv, 'bf16')
  store.move_head(kv, 'bf16', store.Ref(3, 1, 'digest'))
  used = changed(tiny(), 'weights', exchange=url)
  refused(used, workdir, 'weights of another run', url)
  assert not workdir.exists()


def test_devices_and_processes_that_do_not_fit(tmp_path, monkeypatch):
  workdir = tmp_path / 'run'
  odd = changed(tiny(), 'rl', micro_batch=12)
  refused(odd, workdir, 'rl.micro_batch=12', '8 devices', 'multiple of 8')
  spread = changed(tiny(), 'numerics', mode='fast')
  drafting = changed(spread, 'model', mtp_layers=1)
  refused(drafting, workdir, 'model.mtp_layers=1', 'midtrain.mtp_weight=0')
  two = changed(tiny(), 'fleet', trainer_processes=2)
  refused(two, workdir, 'fleet.trainer_processes=2', '--role', role='all')
  monkeypatch.delenv(processes.COORDINATOR, raising=False)
  refused(two, workdir, processes.COORDINATOR, 'HOST:PORT', '0 to 1')
  assert not workdir.exists()


@pytest.mark.parametrize('role', ['all', 'rollout', 'eval'])
def test_no_user_namespaces(tmp_path, monkeypatch, role):
  def launch(settings, timeout_s):
    raise namespace.zygote_lib.Missing('unshare(CLONE_NEWUSER)', errno.EPERM)

  monkeypatch.setattr(namespace.zygote_lib, 'launch', launch)
  monkeypatch.setattr(sys, 'argv', ['composer', 'run', 'tiny.py'])
  workdir = tmp_path / 'run'
  experiment = changed(tiny(), 'machine', driver='namespace')
  refused(
    experiment,
    workdir,
    *('CLONE_NEWUSER', 'composer run tiny.py --set machine.driver=process'),
    role=role,
  )
  assert not workdir.exists()


def test_evaluating_a_checkpoint(runs):
  workdir = runs.directory / 'run'
  runs.run(
    '--workdir', str(workdir), '--role', 'trainer', die=('publish', 1), code=-9
  )
  kept = workdir / 'checkpoints' / 'midtrain'
  for path in (workdir, kept, kept / '4'):
    text = runs.run('--checkpoint', str(path), command='eval')
    assert f'{kept}, step 4' in text and 'held_out_functions: 0.' in text
  other = ('--set', 'model.width=64')
  text = runs.run('--checkpoint', str(kept), *other, command='eval', code=2)
  assert 'of another model: model.width: got 32, expected 64' in text
  text = runs.run('--checkpoint', str(HERE), command='eval', code=2)
  assert 'does not hold a checkpoint' in text


def test_a_broken_engine_is_said_at_once(runs):
  workdir = runs.directory / 'run'
  arguments = ('--workdir', str(workdir), '--set', 'midtrain.steps=0')
  runs.run(*arguments, die=('publish', 1), code=-signal.SIGKILL)
  text = runs.run(*arguments, '--resume', die=('engine', 5), code=1)
  assert 'EngineError: the engine failed' in text and 'broken by' in text
  cursor = json.loads((workdir / 'exchange' / 'cursor').read_bytes())
  assert not cursor['dropped'].get('infrastructure'), 'work went on'


def test_no_space_left_and_then_some(runs):
  """A small file system of a user namespace, filled; then not full any more."""
  full = runs.directory / 'full'
  full.mkdir()
  mount = f'mount -t tmpfs -o size=32m tmpfs {full}'
  unshare = ['unshare', '-rm', 'sh', '-c']
  if (
    not shutil.which('unshare') or subprocess.run([*unshare, mount]).returncode
  ):
    pytest.skip('no user namespaces: a full file system cannot be made here')
  # Room for mid-training, and for some of what comes then.
  script = (
    f'{mount} && head -c 32150000 /dev/zero > {full}/filler; "$@";'
    f' test $? = 1 && rm {full}/filler && "$@" --resume'
  )
  text = runs.run(
    '--workdir', str(full / 'run'), prefix=[*unshare, script, '-']
  )
  before, after = text.split('no space left')
  assert 'mid-training 1/4' in before and 'free some' in after
  assert 'reinforcement 6/6' in after and 'report: ' in after


def test_the_notes_say_what_happened_and_no_more():
  books, why = finish.notes(None, None)
  assert books.startswith('The books agree') and why.startswith('No step was')
  assert finish.notes('one is gone', 0.01) == [
    'The books do not agree: one is gone'
  ]
  assert '14% of all bf16 weights' in finish.notes(None, 0.14)[1]


def test_what_a_rollout_tells_is_of_one_step(tmp_path):
  """Not of the engine's life: a draft that grows worse would show late."""
  board = finish.Board(tiny(), tmp_path, None, None, None)
  engine = types.SimpleNamespace(stats=None)
  rollout = types.SimpleNamespace(engine=engine)
  told = []
  for proposed, accepted in ((10, 9), (10, 9), (30, 11)):
    engine.stats = Stats(rows=64, proposed=proposed, accepted=accepted)
    told.append(board._rollout_scalars(rollout))
  drafts = [scalars.get('rollout/drafts_accepted') for scalars in told]
  assert drafts == [0.9, None, 0.1]
  assert told[0]['rollout/tokens_per_s'] > 0 == told[1]['rollout/tokens_per_s']


def test_pauses_and_programs_are_told(tmp_path):
  """A pause once there was one: nothing is not a pause of no time."""
  board = finish.Board(tiny(), tmp_path, None, None, None)
  rollout = types.SimpleNamespace(
    engine=types.SimpleNamespace(stats=Stats(compilations=3))
  )
  assert 'weights/pause_s' not in board._rollout_scalars(rollout)
  for version, pause in ((4, 0.25), (5, 0.125)):
    board.version_active(version, pause)
    told = board._rollout_scalars(rollout)
    assert (told['weights/pause_s'], told['rollout/compiled']) == (pause, 3)
  versions = metrics.read_versions(tmp_path)
  assert [(x['version'], x['pause_s']) for x in versions] == [
    (4, 0.25),
    (5, 0.125),
  ]


def test_a_group_that_cannot_be_packed_does_not_stop_the_trainer(
  monkeypatch, caplog
):
  """It is dropped under a reason of its own, and why is said."""
  experiment = changed(tiny(), 'rl', groups_per_step=2, max_kept=2)
  model, rng = experiment.model, np.random.default_rng(0)
  layers = transformer.moe_layers(model)

  def trajectory(reward, most):
    """A token of it was drawn among `most` ids."""
    segment = records.Segment(
      tokens=np.arange(6, dtype=np.int32),
      sampled=np.arange(6) > 2,
      logprobs=np.zeros(6, np.float32),
      temperatures=np.ones(6, np.float32),
      versions=np.where(np.arange(6) > 2, 1, -1).astype(np.int32),
      experts=np.argsort(
        rng.random((6, layers, model.experts)), axis=-1
      ).astype(np.int16)[..., : model.experts_per_token],
      auditable=np.zeros(6, bool),
      stop_reason='finished',
      parent=-1,
      kept_ids=np.arange(5, 5 + most, dtype=np.int32),
      kept_offsets=np.array([0] * 6 + [most], np.int32),
    )
    return records.Trajectory(
      't', 'g', 0, (segment,), (), reward, {'tests': reward}, 'finished', {}, {}
    )

  parsed = {
    name: records.Group(
      name, 't', draw, (trajectory(1.0, 1), trajectory(0.0, most)), 'c', 'i', 1
    )
    for draw, (name, most) in enumerate([('good', 2), ('bad', 3)])
  }
  fake = types.SimpleNamespace(
    experiment=experiment, parsed=parsed, ledger=buffer.Ledger(), version=1
  )
  items = [types.SimpleNamespace(group_id=name) for name in parsed]
  monkeypatch.setattr(trainer, 'queue', lambda _: items)
  chosen = trainer._select(fake)
  assert chosen.verdicts == {'good': 'train', 'bad': 'unfit'}
  assert chosen.train == (parsed['good'],)
  assert 'dropped as unfit: group bad' in caplog.text
  assert 'among 3 kept ids and rl.max_kept is 2' in caplog.text
  told = buffer.scalars(buffer.record(fake.ledger, chosen))
  assert told['groups/dropped/unfit'] == 1
