"""Checkpoints: whole or not at all, whatever happens in between."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import checkpoint
from composer import config as config_lib
from composer import optim
from composer import records

MODEL = config_lib.ModelConfig(width=64)
IDENTITY = checkpoint.identity(MODEL, 'tokenizer-1')


def make_state(seed=0, step=3, impl='threefry2x32', width=16):
  keys = jax.random.split(jax.random.key(seed), 3)
  params = {
    'embedding': jax.random.normal(keys[0], (32, width)),
    'layers': {
      'norm': jax.random.normal(keys[1], (3, width)),
      'router_bias': jnp.linspace(-1, 1, 12).reshape(3, 4),
      'half': jax.random.normal(keys[2], (3, width)).astype(jnp.bfloat16),
    },
  }
  optimizer = optim.adam(
    optim.schedule('constant', 1e-3, 0, 1), max_grad_norm=1.0
  )
  _, opt_state, _ = optim.apply(
    optimizer, params, optimizer.init(params), params
  )
  return records.TrainState(
    step=jnp.int32(step),
    version=jnp.int32(7),
    params=params,
    opt_state=opt_state,
    rng=jax.random.key(seed + 1, impl=impl),
  )


def save(directory, state, step=3, extras=None, keep=2):
  return checkpoint.save(
    str(directory), step, state, extras or {}, identity=IDENTITY, keep=keep
  ).wait()


def restore(directory, state, step=None):
  return checkpoint.restore(
    str(directory), checkpoint.abstract(state), identity=IDENTITY, step=step
  )


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@pytest.mark.parametrize('impl', ['threefry2x32', 'rbg'])
def test_round_trip(tmp_path, impl):
  """Every bit, special values and the key's generator included."""
  state = make_state(impl=impl)
  odd = jnp.array([jnp.nan, -jnp.inf, -0.0, 1e-45], jnp.float32)
  state = state.replace(params={**state.params, 'odd': odd})
  extras = {'ledger': {'trained': ['a', 'b']}, 'data': {'index': 4, 'x': [1]}}
  save(tmp_path, state, extras=extras)
  restored, got = restore(tmp_path, make_like(state))
  assert got == extras
  assert_same(state, restored)
  assert np.signbit(np.asarray(restored.params['odd'])[2])
  np.testing.assert_array_equal(
    jax.random.bits(state.rng, (8,)), jax.random.bits(restored.rng, (8,))
  )


def make_like(state):
  """The same shapes with other values: nothing may come from the template."""

  def other(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      return jax.random.key(999, impl=jax.random.key_impl(leaf))
    return jnp.full_like(leaf, 77)

  return jax.tree.map(other, state)


def test_restores_from_shapes_alone(tmp_path):
  state = make_state()
  save(tmp_path, state)
  shapes = jax.eval_shape(lambda: make_state())
  restored, _ = checkpoint.restore(str(tmp_path), shapes, identity=IDENTITY)
  assert_same(state, restored)


def test_state_may_be_donated_while_it_is_written(tmp_path):
  """The next step overwrites the buffers; the checkpoint has the old ones."""
  overwrite = jax.jit(
    lambda state: state.replace(
      params=jax.tree.map(lambda p: p * 0 - 1, state.params)
    ),
    donate_argnums=0,
  )
  for step in range(4):
    state = make_state(seed=step)
    big = jnp.arange(1 << 20, dtype=jnp.float32) + step
    state = state.replace(params={**state.params, 'big': big})
    expected = jax.tree.map(jnp.copy, state)
    saving = checkpoint.save(str(tmp_path), step, state, {}, identity=IDENTITY)
    for _ in range(3):
      state = overwrite(state)
    saving.wait()
    restored, _ = restore(tmp_path, make_like(expected))
    assert_same(expected, restored)


def test_latest_keep_and_named_steps(tmp_path):
  assert checkpoint.latest(str(tmp_path / 'nowhere')) is None
  for step in (0, 9, 10, 100):
    save(tmp_path, make_state(step=step), step=step, extras={'at': step})
  assert checkpoint.latest(str(tmp_path)) == 100
  assert sorted(os.listdir(tmp_path)) == ['10', '100']
  state, extras = restore(tmp_path, make_state(), step=10)
  assert (int(state.step), extras['at']) == (10, 10)
  with pytest.raises(ValueError, match=r'step 9;.*\[10, 100\]'):
    restore(tmp_path, make_state(), step=9)
  with pytest.raises(ValueError, match='does not hold a checkpoint'):
    restore(tmp_path / 'nowhere', make_state())


def test_saved_again_at_the_same_step_the_last_one_counts(tmp_path):
  """A skipped step moves the ledger and leaves the state where it was."""
  for n in range(4):
    save(tmp_path, make_state(seed=n), step=5, extras={'n': n}, keep=3)
  assert sorted(os.listdir(tmp_path)) == ['5.1', '5.2', '5.3']
  state, extras = restore(tmp_path, make_state(), step=5)
  assert extras == {'n': 3}
  assert_same(state, make_state(seed=3))


def test_what_dead_processes_left_is_neither_read_nor_kept(tmp_path):
  save(tmp_path, make_state(), step=1)
  shutil.copytree(tmp_path / '1', tmp_path / '2.orbax-checkpoint-tmp')
  shutil.copytree(tmp_path / '1', tmp_path / '3.deleting')
  (tmp_path / 'notes').mkdir()
  assert checkpoint.latest(str(tmp_path)) == 1
  save(tmp_path, make_state(), step=2)
  assert sorted(os.listdir(tmp_path)) == ['1', '2', 'notes']


def test_another_model_is_refused(tmp_path):
  state = make_state()
  save(tmp_path, state)

  def ask(model, tokenizer='tokenizer-1'):
    return checkpoint.restore(
      str(tmp_path),
      checkpoint.abstract(state),
      identity=checkpoint.identity(model, tokenizer),
    )

  ask(MODEL)
  wider = dataclasses.replace(MODEL, width=80)
  with pytest.raises(
    ValueError, match=r'model\.width: got 64, expected 80.*workdir'
  ):
    ask(wider)
  # One that no shape tells of.
  scaled = dataclasses.replace(MODEL, router_scale=2.5)
  with pytest.raises(ValueError, match=r'model\.router_scale: got 1\.0'):
    ask(scaled)
  with pytest.raises(ValueError, match="tokenizer: got 'tokenizer-1'"):
    ask(MODEL, 'tokenizer-2')


def test_a_checkpoint_that_is_older_than_a_field_of_the_model(tmp_path):
  """It computed what the default says."""
  state, model = make_state(), dataclasses.asdict(MODEL)
  del model['mtp_layers'], model['yarn']['beta_fast']
  older = {**IDENTITY, 'model': model}
  checkpoint.save(str(tmp_path), 1, state, {}, identity=older).wait()
  assert checkpoint.restore(
    str(tmp_path), checkpoint.abstract(state), identity=IDENTITY
  )
  other = dataclasses.replace(MODEL, mtp_layers=1)
  with pytest.raises(ValueError, match=r'mtp_layers: got 0, expected 1'):
    checkpoint.restore(
      str(tmp_path),
      checkpoint.abstract(state),
      identity=checkpoint.identity(other, 'tokenizer-1'),
    )


def test_other_arrays_are_refused_by_name(tmp_path):
  state = make_state()
  save(tmp_path, state)
  with pytest.raises(
    ValueError, match=r'params/embedding: got \[\[32, 16\].*expected \[\[32, 8'
  ):
    restore(tmp_path, make_state(width=8))
  more = state.replace(params={**state.params, 'new': jnp.zeros(3)})
  with pytest.raises(ValueError, match=r'params/new: got \(absent\)'):
    restore(tmp_path, more)
  with pytest.raises(ValueError, match=r'rng: got .*fry.*expected .*rbg'):
    restore(tmp_path, make_state(impl='rbg'))


def test_params_alone(tmp_path):
  state = make_state()
  save(tmp_path, state, step=12)
  params, step = checkpoint.restore_params(
    str(tmp_path), checkpoint.abstract(state.params), identity=IDENTITY
  )
  assert step == 12
  assert_same(state.params, params)
  with pytest.raises(ValueError, match='params/embedding'):
    checkpoint.restore_params(
      str(tmp_path),
      checkpoint.abstract(make_state(width=8).params),
      identity=IDENTITY,
    )


@pytest.mark.parametrize(
  'change,named',
  [
    ({'extras': {'ledger': {1: 'a'}}}, 'ledger'),
    ({'extras': {'x': np.float32(1)}}, "extras\\['x'\\]"),
    ({'extras': {'x': float('nan')}}, "extras\\['x'\\]"),
    ({'keep': 0}, 'keep=0'),
    ({'step': -1}, '-1'),
  ],
)
def test_bad_arguments_write_nothing(tmp_path, change, named):
  arguments = {'step': 1, 'extras': {}, 'keep': 2, **change}
  step, extras = arguments.pop('step'), arguments.pop('extras')
  with pytest.raises(ValueError, match=named):
    checkpoint.save(
      str(tmp_path), step, make_state(), extras, identity=IDENTITY, **arguments
    )
  assert not os.listdir(tmp_path)


def test_a_relative_directory_is_read(tmp_path, monkeypatch):
  state = make_state()
  save(tmp_path / 'run', state, step=3)
  monkeypatch.chdir(tmp_path)
  restored, _ = restore('run', state)
  assert int(restored.step) == int(state.step)


def test_cost(tmp_path):
  """0.8M parameters with two moments: prints how long; only a hang fails."""
  big = {f'w{i}': jnp.ones((100_000,)) * i for i in range(8)}
  state = make_state().replace(params=big, opt_state={'mu': big, 'nu': big})
  save(tmp_path, state, step=0)
  blocked, total, restored = [], [], []
  for step in range(1, 4):
    start = time.perf_counter()
    saving = checkpoint.save(str(tmp_path), step, state, {}, identity=IDENTITY)
    blocked.append(time.perf_counter() - start)
    saving.wait()
    total.append(time.perf_counter() - start)
    start = time.perf_counter()
    restore(tmp_path, state)
    restored.append(time.perf_counter() - start)
  print(f'blocked {blocked}, total {total}, restored {restored}')
  assert min(blocked) < 30 and min(restored) < 30


# --- other processes --------------------------------------------------------

ROOT = str(pathlib.Path(checkpoint.__file__).parents[1])
PRELUDE = textwrap.dedent("""
  import os, sys
  import jax, jax.numpy as jnp, numpy as np
  from composer import checkpoint, records
  directory, identity = sys.argv[1], {'model': 'm'}
  def make(step, n=200_000):
    params = {f'w{i}': jnp.full((n,), step + i / 8, jnp.float32)
              for i in range(6)}
    return records.TrainState(jnp.int32(step), jnp.int32(0), params,
                              {'mu': params}, jax.random.key(step))
  def check(step=None):
    state, extras = checkpoint.restore(
        directory, jax.eval_shape(lambda: make(0)), identity=identity)
    step = int(state.step)
    want = make(step)
    assert extras['at'] == step
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(want.params)):
      np.testing.assert_array_equal(a, b)
    return step
""")


def launch(script, *arguments, prefix=(), env=None):
  return subprocess.Popen(
    [*prefix, sys.executable, '-c', PRELUDE + textwrap.dedent(script)]
    + list(arguments),
    env={
      **os.environ,
      'JAX_PLATFORMS': 'cpu',
      'PYTHONPATH': ROOT,
      **(env or {}),
    },
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process, limit=60):
  try:
    out, err = process.communicate(timeout=limit)
  finally:
    process.kill()
  return out, err


def test_killed_at_any_moment_the_previous_one_is_usable(tmp_path):
  """SIGKILL during saves, at delays that sweep over a whole save.

  A process saves in a loop; what it announced as committed must be there, and
  the newest that has a name must be whole (each process reads it first).
  """
  child = """
    step = (checkpoint.latest(directory) or 0)
    if step: assert check() == step
    print('start', step, flush=True)
    while True:
      step += 1
      checkpoint.save(directory, step, make(step), {'at': step},
                      identity=identity).wait()
      print('saved', step, flush=True)
  """
  rng = np.random.default_rng(0)
  for _ in range(3):
    process = launch(child, str(tmp_path))
    lines = [process.stdout.readline() for _ in range(2)]
    if not lines[1]:
      pytest.fail(process.communicate()[1])
    time.sleep(rng.uniform(0.0, 0.15))
    process.send_signal(signal.SIGKILL)
    out, _ = finish(process)
    told = int((lines + out.splitlines())[-1].split()[1])
    newest = checkpoint.latest(str(tmp_path))
    assert newest in (told, told + 1)
  out, err = finish(launch("print('whole', check())", str(tmp_path)))
  assert out.split() == ['whole', str(newest)], err


def test_writes_that_go_on_after_a_failure_leave_nothing(tmp_path, monkeypatch):
  left, writes = tmp_path / '2.orbax-checkpoint-tmp' / 'state', []

  def sleep(seconds):  # in which another write goes on, the first times
    if len(writes) < 8:
      left.mkdir(parents=True, exist_ok=True)
      (left / 'w0').write_bytes(b'1')
    writes.append(seconds)

  clock = types.SimpleNamespace(sleep=sleep, monotonic=time.monotonic)
  monkeypatch.setattr(checkpoint, 'time', clock)
  error = checkpoint._explained(OSError(errno.ENOSPC, ''), f'{tmp_path}/2', 2)
  assert error.errno == errno.ENOSPC and not list(tmp_path.iterdir())
  assert len(writes) == 1 + 8 + checkpoint.QUIET_SWEEPS


def test_no_space_left(tmp_path):
  """On a real file system that is full: a clear error, the old one intact."""
  script = """
    checkpoint.save(directory, 1, make(1), {'at': 1}, identity=identity).wait()
    free = os.statvfs(directory).f_bavail * os.statvfs(directory).f_frsize
    with open(directory + '/filler', 'wb') as f:
      f.write(os.urandom(free - int(sys.argv[2])))
    state = jax.tree.map(
        lambda p: jax.random.normal(jax.random.key(0), p.shape), make(2).params)
    state = make(2).replace(params=state)
    for when in ('early', 'late'):
      try:
        checkpoint.save(directory, 2, state, {'at': 2},
                        identity=identity).wait()
      except OSError as error:
        print(when, error.errno, error, flush=True)
      assert not [n for n in os.listdir(directory) if 'tmp' in n]
      checkpoint._require_space = lambda *_: None  # found out while writing
    assert check() == 1
    print('intact')
  """
  mounted = str(tmp_path / 'full')
  os.mkdir(mounted)
  mount = f'mount -t tmpfs -o size=24m tmpfs {mounted} && exec "$@"'
  prefix = ['unshare', '-rm', 'sh', '-c', mount, '-']
  probe = ['unshare', '-rm', 'sh', '-c', mount, '-', 'true']
  if not shutil.which('unshare') or subprocess.run(probe).returncode:
    pytest.skip('no user namespaces: a full file system cannot be made here')
  out, err = finish(launch(script, mounted, '2000000', prefix=prefix))
  assert len(out.splitlines()) == 3, out + err
  early, late, intact = out.splitlines()
  assert early.startswith('early 28 ') and 'MB); ' in early
  assert late.startswith('late 28 ') and 'MB); ' not in late
  for line in (early, late):
    assert 'no space left for the checkpoint of step 2' in line
    assert 'that of step 1 is intact' in line and '--resume' in line
  assert intact == 'intact', err


def test_two_processes_save_and_restore_one_state(tmp_path):
  """Sharded over two processes of two devices; then read by one."""
  script = """
    port, index = sys.argv[2], int(sys.argv[3])
    jax.distributed.initialize(f'localhost:{port}', 2, index)
    from jax.sharding import NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((4,), ('data',),
                         axis_types=(jax.sharding.AxisType.Auto,))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P('data'))
    def shardings(state):
      return jax.tree.map(lambda x: split if x.ndim else whole, state)
    like = jax.eval_shape(lambda: make(0))
    place = jax.jit(make, static_argnums=0, out_shardings=shardings(like))
    for step in (1, 2, 3):
      checkpoint.save(directory, step, place(step), {'at': step},
                      identity=identity).wait()
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        like, shardings(like))
    state, extras = checkpoint.restore(directory, abstract, identity=identity)
    assert extras == {'at': 3}
    for a, b in zip(jax.tree.leaves(state.params),
                    jax.tree.leaves(place(3).params)):
      assert a.sharding == split
      for x, y in zip(a.addressable_shards, b.addressable_shards):
        np.testing.assert_array_equal(x.data, y.data)
    print('key', jax.random.key_data(state.rng))
  """
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    port = str(probe.getsockname()[1])
  flags = {'XLA_FLAGS': '--xla_force_host_platform_device_count=2'}
  both = [
    launch(script, str(tmp_path), port, str(index), env=flags)
    for index in range(2)
  ]
  for process in both:
    out, err = finish(process)
    assert 'key [0 3]' in out, err
  assert sorted(os.listdir(tmp_path)) == ['2', '3']
  out, err = finish(launch("print('whole', check())", str(tmp_path)))
  assert out.split() == ['whole', '3'], err
