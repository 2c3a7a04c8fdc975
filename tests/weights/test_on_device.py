"""Changes found on devices give the very bytes that whole arrays give."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest

from composer.weights import delta
from composer.weights import on_device
from composer.weights import store
from composer.weights import sync
from composer.weights import versions

FORM = 'bf16'
SHAPES = {
  'bf': ((64, 33), np.dtype(ml_dtypes.bfloat16)),
  'codes': ((2500,), np.dtype(np.uint8)),
  'empty': ((0, 3), np.dtype(ml_dtypes.bfloat16)),
  'f8': ((7, 300), np.dtype(ml_dtypes.float8_e4m3fn)),
  'one': ((), np.dtype(np.float32)),
  'wide': ((2048,), np.dtype(np.float32)),
}
VERSIONS = 7


def _versions():
  """Words of any pattern; few change, then more than there is room for."""
  rng = np.random.default_rng(0)
  flat = {
    name: np.frombuffer(
      rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype
    ).reshape(shape)
    for name, (shape, dtype) in SHAPES.items()
  }
  for version in range(VERSIONS):
    yield version, flat
    share = 0.9 if version == 3 else 0.02
    for name, array in flat.items():
      words = array.reshape(-1).view(f'u{array.itemsize}').copy()
      moved = rng.random(words.size) < share
      words[moved] ^= rng.integers(1, 255, moved.sum()).astype(words.dtype)
      if name == 'wide' and version == 4:
        words = array.reshape(-1).view('u4')  # nothing moves
      flat = flat | {name: words.view(array.dtype).reshape(array.shape)}


def _placed(flat):
  return {
    name: jax.device_put(array, jax.devices()[i % 2])
    for i, (name, array) in enumerate(flat.items())
  }


def _objects(kv):
  """All that was published, but manifests, which have the time in them."""
  keys = [key.decode() for key in kv.list().result()]
  return {
    key: store.read(kv, key)[0]
    for key in keys
    if key.startswith('weights/') and not key.endswith('/manifest')
  }


@pytest.fixture
def exchanges():
  return [store.open_exchange('memory://') for _ in range(2)]


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
  monkeypatch.setattr(on_device, 'LEAST_ROOM', 16)
  monkeypatch.setattr(on_device, 'IN_FLIGHT_BYTES', 2000)


def test_the_same_objects_are_published(exchanges, monkeypatch):
  asked = []
  find = on_device.find
  monkeypatch.setattr(
    on_device, 'find', lambda *args: asked.append(find(*args)) or asked[-1]
  )
  host = sync.Publisher(exchanges[0], FORM, 4)
  device = sync.Publisher(exchanges[1], FORM, 4, on_device=True)
  for version, flat in _versions():
    told = host.publish(flat, version)
    assert told.changed_share == (
      device.publish(_placed(flat), version).changed_share
    )
  assert _objects(exchanges[0]) == _objects(exchanges[1])
  assert len(asked) == VERSIONS - 2, 'bases are taken whole'
  assert set(asked[0]) == set(SHAPES) - {'empty'}
  for kv in exchanges:
    version, got = versions.fetch(kv, FORM)
    assert version == VERSIONS - 1
    assert delta.digest(got) == delta.digest(flat)


def test_what_has_too_many_changes_is_copied_whole():
  steps = dict(_versions())
  found = on_device.find(_placed(steps[3]), _placed(steps[4]))
  assert set(found) == {'one'}
  found = on_device.find(_placed(steps[4]), _placed(steps[5]))
  assert len(found['wide'][0]) == 0


def test_a_publication_that_fails_leaves_the_mirror_as_it_was(
  exchanges, monkeypatch
):
  """Deltas go on from what HEAD names, not from what was tried."""
  device = sync.Publisher(exchanges[0], FORM, 99, on_device=True)
  for version, flat in _versions():
    if version == 2:
      with monkeypatch.context() as patched:

        def fail(key):
          if key.endswith('HEAD'):
            raise OSError('no answer')

        patched.setattr(store, 'before_write', fail)
        with pytest.raises(OSError, match='no answer'):
          device.publish(_placed(flat), version)
      continue
    stats = device.publish(_placed(flat), version)
    assert stats.kind == ('delta' if version else 'base')
    got = versions.fetch(exchanges[0], FORM)[1]
    assert delta.digest(got) == delta.digest(flat)


def test_arrays_on_a_cpu_are_compared_on_the_host(exchanges, monkeypatch):
  monkeypatch.setattr(on_device, 'find', None)
  publisher = sync.Publisher(exchanges[0], FORM, 4)
  for version, flat in _versions():
    publisher.publish(_placed(flat), version)
    got = versions.fetch(exchanges[0], FORM)[1]
    assert delta.digest(got) == delta.digest(flat)


def test_other_trees_are_refused(exchanges):
  publisher = sync.Publisher(exchanges[0], FORM, 4, on_device=True)
  flat = dict(_versions())[0]
  publisher.publish(_placed(flat), 0)
  wrong = flat | {'bf': flat['bf'][:3]}
  with pytest.raises(ValueError, match="'bf' is"):
    publisher.publish(_placed(wrong), 1)
  with pytest.raises(ValueError, match='only'):
    publisher.publish(_placed({'bf': flat['bf']}), 1)
