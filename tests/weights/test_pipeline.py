"""Publishing beside the trainer: never in its way, never lost, never silent."""

from __future__ import annotations

import errno
import threading
import time

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import ml_dtypes
import numpy as np
import pytest

from composer.weights import pieces
from composer.weights import pipeline
from composer.weights import store
from composer.weights import sync
from composer.weights import upkeep
from composer.weights import versions


def _weights(version):
  words = np.arange(300, dtype=np.uint16) // 7 + np.uint16(version)
  return {'a/w': words.view(ml_dtypes.bfloat16)}


def _make(version):
  return lambda form: pipeline.Form(_weights(version))


@pytest.fixture
def kv():
  return store.open_exchange('memory://')


@pytest.fixture
def opened(kv):
  made = []

  def open_one(forms=('bf16',), **settings):
    publishers = {form: sync.Publisher(kv, form, 4) for form in forms}
    made.append(pipeline.Pipeline(publishers, **settings))
    return made[-1]

  yield open_one
  for one in made:
    one.close(10)


def _block_writes(monkeypatch):
  """Writes wait for the event that is returned."""
  gate = threading.Event()
  monkeypatch.setattr(store, 'before_write', lambda key: gate.wait(20))
  return gate


def test_submitting_returns_while_the_store_hangs(kv, opened, monkeypatch):
  line = opened()
  gate = _block_writes(monkeypatch)
  started = time.monotonic()
  for version in range(20):
    line.submit(version, _make(version))
  waited = time.monotonic() - started
  assert waited < 10 and line.blocked_s < 10  # a write would have waited 20
  gate.set()
  line.flush(20)
  done = [item.stats.version for item in line.finished()]
  # The first was on its way (or not yet), the last is never left out.
  assert done[-1] == 19 and len(done) <= 3 and line.replaced == 20 - len(done)
  number, got = sync.Subscriber(kv, 'bf16').poll()
  assert number == 19
  assert got['a/w'].tobytes() == _weights(19)['a/w'].tobytes()
  assert upkeep.verify(kv, 'bf16').versions == tuple(done)


def test_several_forms_of_one_version(kv, opened):
  line = opened(('bf16', 'nvfp4'))
  for version in range(6):
    line.submit(
      version,
      lambda form, v=version: pipeline.Form(
        _weights(v if form == 'bf16' else 100 * v)
      ),
    )
    line.flush(20)
  assert [(x.form, x.stats.version) for x in line.finished()] == [
    (form, version) for version in range(6) for form in ('bf16', 'nvfp4')
  ]
  for form, shift in (('bf16', 5), ('nvfp4', 500)):
    number, got = sync.Subscriber(kv, form).poll()
    assert number == 5
    assert got['a/w'].tobytes() == _weights(shift)['a/w'].tobytes()


def test_a_store_that_fails_for_a_while(kv, opened, monkeypatch):
  monkeypatch.setattr(pipeline, 'RETRY_S', (0.001, 0.01))
  line = opened()
  line.submit(0, _make(0))
  line.flush(20)
  failing = [7]

  def before_write(key):
    if failing[0] and not key.startswith('readers/'):
      failing[0] -= 1
      raise OSError(errno.EAGAIN, 'slow down')

  monkeypatch.setattr(store, 'before_write', before_write)
  line.submit(1, _make(1))
  line.flush(20)
  done = line.finished()
  assert [x.stats.version for x in done] == [0, 1] and done[1].attempts > 4
  assert done[1].stats.kind == 'delta'  # no base for a failing store
  assert sync.Subscriber(kv, 'bf16').poll()[0] == 1


def test_what_comes_after_is_tried_again_without_the_publication(
  kv, opened, monkeypatch
):
  monkeypatch.setattr(pipeline, 'RETRY_S', (0.001, 0.01))
  seen = []

  def after(form, stats):
    seen.append(stats.version)
    if len(seen) < 3:
      raise OSError(errno.EAGAIN, 'slow down')

  line = opened(after=after)
  line.submit(0, _make(0))
  line.flush(20)
  line.submit(1, _make(1))
  line.flush(20)
  assert seen == [0, 0, 0, 1]
  assert [(x.stats.version, x.attempts) for x in line.finished()] == [
    (0, 3),
    (1, 1),
  ]
  assert upkeep.verify(kv, 'bf16').versions == (0, 1)


def test_a_newer_version_takes_the_place_of_one_that_fails(
  kv, opened, monkeypatch
):
  monkeypatch.setattr(pipeline, 'RETRY_S', (0.001, 0.01))
  line = opened()
  broken = threading.Event()
  broken.set()

  def before_write(key):
    if broken.is_set():
      raise OSError(errno.EAGAIN, 'slow down')

  monkeypatch.setattr(store, 'before_write', before_write)
  for version in range(5):
    line.submit(version, _make(version))
    time.sleep(0.02)
  broken.clear()
  line.flush(20)
  assert [x.stats.version for x in line.finished()][-1] == 4
  number, got = sync.Subscriber(kv, 'bf16').poll()
  assert number == 4
  assert got['a/w'].tobytes() == _weights(4)['a/w'].tobytes()


def test_an_answer_that_was_lost_is_no_second_version(kv, opened, monkeypatch):
  monkeypatch.setattr(pipeline, 'RETRY_S', (0.001, 0.01))
  line = opened()
  plain, lost = store.move_head, []

  def move_head(kv, form, ref):
    plain(kv, form, ref)
    if len(lost) < 2:
      lost.append(ref)
      raise TimeoutError('no answer')

  monkeypatch.setattr(store, 'move_head', move_head)
  for version in range(4):
    line.submit(version, _make(version))
    line.flush(20)
  assert [x.stats.version for x in line.finished()] == [0, 1, 2, 3]
  assert [v.fence for v in upkeep.listing(kv)] == [1, 1, 1, 1]


def test_what_fails_for_good_is_raised_by_the_next_call(
  kv, opened, monkeypatch
):
  monkeypatch.setattr(pipeline, 'RETRY_S', (0.001, 0.01))
  fenced = opened()
  sync.Publisher(kv, 'bf16', 4)
  fenced.submit(0, _make(0))
  with pytest.raises(store.PublisherFenced):
    fenced.flush(20)
  with pytest.raises(store.PublisherFenced):
    fenced.submit(1, _make(1))
  tired = opened(patience_s=0.05)

  def before_write(key):
    raise OSError(errno.EAGAIN, 'slow down')

  monkeypatch.setattr(store, 'before_write', before_write)
  tired.submit(0, _make(0))
  with pytest.raises(OSError, match='slow down'):
    tired.flush(20)
  monkeypatch.undo()
  wrong = opened()
  wrong.submit(0, lambda form: pipeline.Form({'a': [1]}))
  with pytest.raises(ValueError, match='not a numpy array'):
    wrong.flush(20)


def test_waiting_for_it_has_a_limit(opened, monkeypatch):
  line = opened()
  gate = _block_writes(monkeypatch)
  line.submit(0, _make(0))
  with pytest.raises(TimeoutError, match=r'within 0\.05 s'):
    line.flush(0.05)
  gate.set()
  line.flush(20)


# --- Hosts that have parts of tensors ----------------------------------------


def _sharded(version, mesh):
  """Arrays over eight devices: cut along one axis, along two, and whole."""
  rng = np.random.default_rng(version)
  values = {
    'layers/q': rng.integers(0, 2**16, (4, 16, 3), np.uint16),
    'layers/e': rng.integers(0, 2**16, (8, 4), np.uint16),
    'norm': rng.integers(0, 2**16, (5,), np.uint16),
  }
  where = {
    'layers/q': PartitionSpec(None, ('x', 'y')),
    'layers/e': PartitionSpec('x', 'y'),
    'norm': PartitionSpec(),
  }
  flat = {n: v.view(ml_dtypes.bfloat16) for n, v in values.items()}
  return flat, {
    n: jax.device_put(v, NamedSharding(mesh, where[n])) for n, v in flat.items()
  }


def _mine(arrays, host, hosts):
  """What one of several hosts would have on its part of the devices."""
  made, shapes = pieces.local(arrays, 0, 1)
  named = sorted(made)[host::hosts]
  cut = {pieces.parse(name)[0] for name in named}
  return (
    {name: np.asarray(made[name]) for name in named},
    {name: shape for name, shape in shapes.items() if name in cut},
  )


@pytest.fixture
def mesh():
  return Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))


def test_pieces_of_sharded_arrays_tile_them(mesh):
  flat, arrays = _sharded(0, mesh)
  made, shapes = pieces.local(arrays, 0, 1)
  assert len(made) == 8 + 8 + 1 and set(shapes) == {'layers/q', 'layers/e'}
  assert 'layers/e@2:4,0:2' in made and 'norm' in made
  pieces.check_tiling(shapes, made)
  whole = pieces.assemble(
    {name: np.asarray(value) for name, value in made.items()}, shapes
  )
  for name, value in flat.items():
    assert whole[name].tobytes() == value.tobytes(), name


def test_hosts_publish_their_shards_and_readers_join_them(tmp_path, mesh):
  kv = store.open_exchange(f'file://{tmp_path}/exchange')
  hosts, kinds = 3, []

  def run(host):
    publisher = sync.Publisher(
      kv, 'bf16', 3, host=host, hosts=hosts, incarnation='i', wait_s=20
    )
    for version in range(5):
      mine, shapes = _mine(_sharded(version, mesh)[1], host, hosts)
      stats = publisher.publish(mine, version, shapes=shapes)
      if host == 0:
        kinds.append(stats.kind)

  reader = sync.Subscriber(kv, 'bf16')
  threads = [threading.Thread(target=run, args=(h,)) for h in range(hosts)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
  assert kinds == ['base', 'delta', 'delta', 'base', 'delta']
  assert upkeep.verify(kv, 'bf16').versions == (0, 1, 2, 3, 4)
  for version in range(5):
    got = versions.fetch(kv, 'bf16', version)[1]
    for name, value in _sharded(version, mesh)[0].items():
      assert got[name].tobytes() == value.tobytes() and got[
        name
      ].dtype.name == ('bfloat16')
  assert sorted(reader.poll()[1]) == ['layers/e', 'layers/q', 'norm']
  # Every host wrote its own blobs and nobody else's.
  keys = store.keys(kv, versions.prefix_of('bf16', 4, 1))
  assert {key.split('/')[3] for key in keys} >= {'0', '1', '2'}


def test_a_base_in_pieces_is_one_array_to_zarr(tmp_path, mesh):
  zarr = pytest.importorskip('zarr')
  kv = store.open_exchange(f'file://{tmp_path}/exchange')
  flat, arrays = _sharded(3, mesh)
  made, shapes = pieces.local(arrays, 0, 1)
  made = {name: np.asarray(value) for name, value in made.items()}
  sync.Publisher(kv, 'bf16', 3).publish(made, 0, shapes=shapes)
  base = f'{tmp_path}/exchange/weights/bf16/0-1/base'
  group = zarr.open_group(store=base, mode='r')
  for name, value in flat.items():
    array = group[name]
    assert array.attrs['dtype'] == 'bfloat16'
    assert array[:].tobytes() == value.tobytes()


def test_resharding_is_the_same_model(kv, mesh):
  flat, arrays = _sharded(0, mesh)
  made, shapes = pieces.local(arrays, 0, 1)
  made = {name: np.asarray(value) for name, value in made.items()}
  sync.Publisher(kv, 'bf16', 3).publish(made, 0, shapes=shapes)
  reader = sync.Subscriber(kv, 'bf16')
  reader.poll()
  other, _ = _sharded(1, mesh)
  sync.Publisher(kv, 'bf16', 3).publish(other, 1)  # whole, after a restart
  number, got = reader.poll()
  assert number == 1
  for name, value in other.items():
    assert got[name].tobytes() == value.tobytes()
  with pytest.raises(ValueError, match='another model'):
    sync.Publisher(kv, 'bf16', 3).publish(
      {**other, 'norm': other['norm'][:4]}, 2
    )


@pytest.mark.parametrize(
  ('names', 'shapes', 'message'),
  [
    (['w@0:2', 'w@2:4'], {}, 'whose shape is not given'),
    (['w@0:2'], {'w': (4,)}, 'do not make it whole'),
    (['w@0:2', 'w@2:4', 'w'], {'w': (4,)}, 'in pieces and as a whole'),
    (['w@0:2', 'w@2:3'], {'w': (3,)}, 'not parts of one size'),
    (['w@0:2', 'w@1:3'], {'w': (4,)}, 'not parts of one size'),
    (['w@0:2,0:1', 'w@2:4,0:1'], {'w': (4,)}, 'not parts of one size'),
    (['w@a:b'], {'w': (4,)}, 'not the name of a piece'),
  ],
)
def test_pieces_that_do_not_tile_are_refused(names, shapes, message):
  with pytest.raises(ValueError, match=message):
    pieces.check_tiling(shapes, names)
