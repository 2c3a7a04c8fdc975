"""The command line: quick to start, one line an error, nothing half done."""

import errno
import importlib
import os
from pathlib import Path
import signal
import subprocess
import sys
import textwrap
import types

import ml_dtypes
import numpy as np
import pytest

from composer import __main__ as cli
from composer.weights import store
from composer.weights.sync import Publisher

ROOT = Path(__file__).resolve().parent.parent

EXPERIMENT = """
from composer.config import Experiment

def get_config():
  return Experiment(name='tiny')
"""


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch):
  """Tests share one process; its allocator stays as it is."""
  monkeypatch.setattr(cli, 'tune_malloc', lambda: True)


@pytest.fixture
def experiment(tmp_path):
  path = tmp_path / 'tiny.py'
  path.write_text(EXPERIMENT)
  return path


@pytest.fixture
def fake_run(monkeypatch):
  """Puts a function in the place of `composer.fleet.local.run`."""

  def install(run):
    module = types.ModuleType('composer.fleet.local')
    module.run = run
    monkeypatch.setitem(sys.modules, 'composer.fleet.local', module)
    import composer.fleet

    monkeypatch.setattr(composer.fleet, 'local', module, raising=False)

  return install


def python(*arguments, **options):
  environment = os.environ | {'PYTHONPATH': str(ROOT)}
  return subprocess.run(
    [sys.executable, *arguments],
    capture_output=True,
    text=True,
    timeout=60,
    env=environment,
    **options,
  )


def test_help_shows_what_exists():
  result = python('-m', 'composer', '--help')
  assert result.returncode == 0
  for name in (
    'run',
    'eval',
    'convert',
    'upcycle',
    'score',
    'serve',
    'tasks',
    'plan',
    'weights',
    'bench',
    'view',
  ):
    assert f'\n    {name} ' in result.stdout


def test_what_is_shown_exists():
  for name in (
    'composer.fleet.local',
    'composer.fleet.evaluator',
    'composer.inference.server_command',
    *(f'composer.bench.{bench}' for bench in cli.BENCHES),
  ):
    module = importlib.import_module(name)
    assert callable(module.run)


def test_import_is_light():
  code = 'import composer, composer.__main__, sys; print(*sys.modules)'
  names = python('-X', 'importtime', '-c', code).stdout.split()
  heavy = {'numpy', 'jax', 'flax', 'rich', 'tensorstore', 'asyncio'}
  assert not heavy & set(names)
  assert not [
    name
    for name in names
    if name.startswith('composer.') and name != 'composer.__main__'
  ]


@pytest.mark.parametrize(
  'arguments',
  [
    ['run'],
    ['run', 'x.py', '--role', 'boss'],
    ['bench', 'nothing'],
    ['weights'],
    ['serve'],
    [],
  ],
)
def test_bad_usage_exits_with_2(arguments, capsys):
  with pytest.raises(SystemExit) as caught:
    cli.main(arguments)
  assert caught.value.code == 2
  assert 'usage: composer' in capsys.readouterr().err


# --- run ---------------------------------------------------------------------


def test_run_hands_everything_over(experiment, fake_run, monkeypatch, tmp_path):
  calls = []
  fake_run(lambda experiment, **options: calls.append((experiment, options)))
  monkeypatch.chdir(tmp_path)
  assert cli.main(['run', str(experiment)]) == 0
  got, options = calls.pop()
  assert got.name == 'tiny'
  assert options == {
    'workdir': Path('runs/tiny'),
    'resume': False,
    'role': 'all',
  }
  words = ['--workdir', 'w', '--resume', '--role', 'rollout']
  words += ['--set', 'rl.steps=3', '--set', 'seed=7']
  assert cli.main(['run', str(experiment), *words]) == 0
  got, options = calls.pop()
  assert (got.rl.steps, got.seed) == (3, 7)
  assert options['workdir'] == Path('w') and options['resume']
  assert options['role'] == 'rollout'


def test_exit_code_of_a_run_is_passed_on(experiment, fake_run):
  fake_run(lambda experiment, **options: 3)
  assert cli.main(['run', str(experiment)]) == 3


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    (['--set', 'rl.stalenes=1'], 'did you mean rl.staleness?'),
    (['--set', 'rl.steps=x'], 'is not a whole number'),
    (['--set', 'rl.group_size=1'], 'rl.group_size=1'),
    (['--set', 'weights.exchange=ftp://x'], 'unknown scheme'),
  ],
)
def test_what_is_refused_leaves_nothing(experiment, words, message, tmp_path):
  """In a process of its own, as a user sees it."""
  result = python(
    '-m', 'composer', 'run', str(experiment), *words, cwd=tmp_path
  )
  assert result.returncode == 2
  assert result.stdout == ''
  assert result.stderr.startswith('composer: error: ')
  assert message in result.stderr
  assert result.stderr.count('\n') == 1
  left = {path.name for path in tmp_path.iterdir()} - {'__pycache__'}
  assert left == {'tiny.py'}


def test_missing_experiment(capsys, tmp_path):
  assert cli.main(['run', str(tmp_path / 'no.py')]) == 2
  assert 'does not exist' in capsys.readouterr().err


def test_errors_of_the_run(experiment, fake_run, capsys, monkeypatch):
  def failing(error):
    def run(experiment, **options):
      raise error

    return run

  fake_run(failing(ValueError('driver=namespace\n  cannot work')))
  assert cli.main(['run', str(experiment)]) == 2
  line = 'composer: error: driver=namespace cannot work\n'
  assert capsys.readouterr().err == line
  fake_run(failing(OSError(errno.ENOSPC, 'No space left', 'ckpt/3')))
  assert cli.main(['run', str(experiment)]) == 1
  error = capsys.readouterr().err
  assert 'no space left for ckpt/3' in error and '--resume' in error
  fake_run(failing(TimeoutError('reading HEAD took longer than 60 s')))
  assert cli.main(['run', str(experiment)]) == 1
  assert 'reading HEAD took longer' in capsys.readouterr().err
  # What is our own fault is shown whole, and anything is, on demand.
  fake_run(failing(AssertionError('ours')))
  with pytest.raises(AssertionError):
    cli.main(['run', str(experiment)])
  monkeypatch.setenv(cli.TRACEBACK, '1')
  fake_run(failing(ValueError('theirs')))
  with pytest.raises(ValueError, match='theirs'):
    cli.main(['run', str(experiment)])


_SLOW = """
  import sys, time, types
  from composer import __main__ as cli

  def run(experiment, **options):
    try:
      print('started', flush=True)
      time.sleep(60)
    except KeyboardInterrupt:
      print('stopping', flush=True)
      if sys.argv[2] == 'hangs':
        time.sleep(60)
      raise

  module = types.ModuleType('composer.fleet.local')
  module.run = run
  import composer.fleet
  composer.fleet.local = sys.modules['composer.fleet.local'] = module
  sys.exit(cli.main(['run', sys.argv[1], '--set', 'name=a-b', '--resume']))
"""


@pytest.mark.parametrize('how', ['stops', 'hangs'])
def test_ctrl_c(experiment, how):
  with subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(_SLOW), str(experiment), how],
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
    env=os.environ | {'PYTHONPATH': str(ROOT)},
  ) as process:
    try:
      assert process.stdout.readline() == 'started\n'
      process.send_signal(signal.SIGINT)
      assert process.stdout.readline() == 'stopping\n'
      if how == 'hangs':
        process.send_signal(signal.SIGINT)
      _, error = process.communicate(timeout=10)
    finally:
      process.kill()
  assert process.returncode == 130
  assert 'Ctrl-C again leaves at once' in error
  assert 'Traceback' not in error
  command = (
    f'composer run {experiment} --workdir runs/a-b --resume --set name=a-b'
  )
  assert (command in error) == (how == 'stops')


# --- weights, view -----------------------------------------------------------


@pytest.fixture
def workdir(tmp_path):
  """The exchange of a run with two versions: a base and a delta."""
  (tmp_path / 'exchange').mkdir()
  kv = store.open_exchange(f'file://{tmp_path}/exchange')
  publisher = Publisher(kv, 'bf16', base_every=10)
  flat = {'a/kernel': np.arange(64).reshape(8, 8).astype(ml_dtypes.bfloat16)}
  publisher.publish(flat, 0)
  flat = {'a/kernel': flat['a/kernel'] * 2}
  publisher.publish(flat, 1)
  return tmp_path, flat


def test_weights_ls_and_verify(workdir, capsys):
  path, _ = workdir
  assert cli.main(['weights', 'ls', str(path)]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert 'HEAD' in lines[2] and ' base ' in lines[1]
  assert lines[3].startswith('2 versions')
  assert cli.main(['weights', 'verify', f'file://{path}/exchange']) == 0
  assert '2 versions of bf16 rebuilt' in capsys.readouterr().out
  assert cli.main(['weights', 'verify', str(path), '--form', 'fp9']) == 2
  assert "no version of form 'fp9'" in capsys.readouterr().err


def test_weights_verify_finds_damage(workdir, capsys):
  path, _ = workdir
  blobs = [
    blob
    for blob in (path / 'exchange' / 'weights').rglob('*')
    if blob.is_file() and blob.name.isdigit() and 'base' not in blob.parts
  ]
  data = bytearray(blobs[-1].read_bytes())
  data[-1] ^= 1
  blobs[-1].write_bytes(data)
  assert cli.main(['weights', 'verify', str(path)]) == 1
  assert 'broken: ' in capsys.readouterr().out


def test_weights_fetch(workdir, tmp_path):
  from safetensors.numpy import load_file

  path, flat = workdir
  out = tmp_path / 'w.safetensors'
  assert cli.main(['weights', 'fetch', str(path), '--out', str(out)]) == 0
  got = load_file(out)
  assert got.keys() == flat.keys()
  assert got['a/kernel'].dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(got['a/kernel'], flat['a/kernel'])
  assert not out.with_name(out.name + '.part').exists()
  words = ['weights', 'fetch', str(path), '--out', str(out), '--version', '99']
  assert cli.main(words) == 2


def test_weights_of_nothing(tmp_path, capsys):
  assert cli.main(['weights', 'ls', str(tmp_path / 'none')]) == 2
  assert 'neither a URL nor a directory' in capsys.readouterr().err
  assert cli.main(['weights', 'ls', f'file://{tmp_path}/none']) == 2
  assert 'there is no directory' in capsys.readouterr().err
  assert cli.main(['weights', 'ls', 'ftp://x']) == 2
  assert cli.main(['weights', 'ls', str(tmp_path)]) == 0
  assert list(tmp_path.iterdir()) == [], 'a reader writes nothing'


def test_view(tmp_path, capsys, monkeypatch):
  import webbrowser

  from composer import report

  opened = []
  monkeypatch.setattr(webbrowser, 'open', opened.append)
  monkeypatch.setattr(report, 'write', lambda path: path / 'report.html')
  assert cli.main(['view', str(tmp_path)]) == 2
  assert 'is not the workdir of a run' in capsys.readouterr().err
  (tmp_path / 'config.json').write_text('{}')
  assert cli.main(['view', str(tmp_path), '--no-open']) == 0
  assert capsys.readouterr().out == f'{tmp_path}/report.html\n'
  assert opened == []
  assert cli.main(['view', str(tmp_path)]) == 0
  assert opened == [f'file://{tmp_path}/report.html']


# --- The process -------------------------------------------------------------


def test_malloc_is_tuned_on_glibc_only():
  code = 'from composer.__main__ import tune_malloc; print(tune_malloc())'
  glibc = b'gnu_get_libc_version' in Path(sys.executable).resolve().read_bytes()
  result = python('-c', code)
  assert result.stderr == ''
  assert result.stdout in ('True\n', 'False\n')
  if glibc:
    assert result.stdout == 'True\n'


@pytest.mark.parametrize(
  ('libtpu', 'before', 'after'),
  [(True, None, 'cpu'), (False, None, None), (True, 'tpu', 'tpu')],
)
def test_default_platform(monkeypatch, libtpu, before, after):
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  if before:
    monkeypatch.setenv('JAX_PLATFORMS', before)
  spec = (lambda name: object()) if libtpu else (lambda name: None)
  monkeypatch.setattr(cli.importlib.util, 'find_spec', spec)
  monkeypatch.setattr(Path, 'exists', lambda self: False)
  cli.default_platform()
  assert os.environ.get('JAX_PLATFORMS') == after


# --- convert ------------------------------------------------------------------


@pytest.fixture
def model_directory(tmp_path):
  import jax

  from composer import config
  from composer import params
  from composer.model import checkpoints
  from composer.model import transformer

  model = config.ModelConfig(layers=2, width=32, vocab_size=50)
  spec = transformer.spec(model)
  values = params.init(spec, jax.random.key(0))
  checkpoints.save(tmp_path / 'model', model, values)
  return tmp_path / 'model'


def test_convert_says_what_it_made(model_directory, tmp_path, capsys):
  there = tmp_path / 'hf'
  assert cli.main(['convert', str(model_directory), str(there)]) == 0
  line = capsys.readouterr().out
  assert line.startswith(f'{there}: ') and "Hugging Face's layout" in line
  back = tmp_path / 'back'
  arguments = ['convert', str(there), str(back), '--dtype', 'bfloat16']
  assert cli.main(arguments) == 0
  assert 'our layout' in capsys.readouterr().out
  assert (back / 'model.json').is_file()


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    (['absent', 'x'], "'absent' is no model"),
    (['{model}', '{model}'], 'exists already'),
    (['{model}', 'x', '--shard-gb', '0'], '--shard-gb=0.0'),
  ],
)
def test_convert_refuses_in_one_line(
  model_directory, tmp_path, capsys, monkeypatch, arguments, words
):
  monkeypatch.chdir(tmp_path)
  arguments = [x.format(model=model_directory) for x in arguments]
  assert cli.main(['convert', *arguments]) == 2
  error = capsys.readouterr().err
  assert words in error and len(error.splitlines()) == 1
  assert [p.name for p in tmp_path.iterdir()] == ['model']


def test_convert_names_what_it_skips(model_directory, tmp_path, capsys):
  import json

  path = model_directory / 'model.json'
  document = json.loads(path.read_text())
  document['skipped'] = ['vision_tower.* (3 tensors)']
  path.write_text(json.dumps(document))
  cli.main(['convert', str(model_directory), str(tmp_path / 'hf')])
  assert 'skipped: vision_tower.* (3 tensors)' in capsys.readouterr().out
