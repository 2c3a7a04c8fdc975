"""Weights kept on a reader's disk: whole or not at all, whatever happens."""

from __future__ import annotations

import errno
import signal

import lives
import ml_dtypes
import numpy as np
import pytest

from composer.weights import local
from composer.weights import store
from composer.weights import sync

FORM = 'bf16'


def _weights(version):
  rng = np.random.default_rng(5)
  words = rng.integers(0, 2**16, 400, np.uint16)
  words[version % 400] = version
  return {
    'a/w': words.view(ml_dtypes.bfloat16).reshape(20, 20),
    'b': np.full((3,), -0.0, np.float32),
    'none': np.zeros((0, 2), np.float32),
  }


def _same(got, version):
  for name, value in _weights(version).items():
    assert got[name].tobytes() == value.tobytes()
    assert got[name].shape == value.shape and got[name].dtype == value.dtype


@pytest.fixture
def kv():
  return store.open_exchange('memory://')


def _publish(kv, first, last, publisher=None, base_every=100):
  publisher = publisher or sync.Publisher(kv, FORM, base_every, chain_ratio=1e9)
  for version in range(first, last + 1):
    publisher.publish(_weights(version), version)
  return publisher


def _kept(directory):
  return sorted(path.name for path in (directory / FORM).iterdir())


def _watch_reads(monkeypatch):
  """Bases that are read from now on."""
  read, plain = [], sync.versions.read_base

  def read_base(kv, manifest, names=None):
    read.append(manifest.version)
    return plain(kv, manifest, names)

  monkeypatch.setattr(sync.versions, 'read_base', read_base)
  return read


@pytest.mark.parametrize('behind', [0, 1, 50])
def test_a_restart_fetches_only_what_changed(kv, tmp_path, monkeypatch, behind):
  publisher = _publish(kv, 0, 5)
  reader = sync.Subscriber(kv, FORM, directory=tmp_path)
  reader.poll()
  assert reader.save() and reader.save()
  assert _kept(tmp_path) == ['5-1']
  if behind:
    _publish(kv, 6, 5 + behind, publisher)
  read = _watch_reads(monkeypatch)
  again = sync.Subscriber(kv, FORM, directory=tmp_path)
  number, got = again.poll()
  assert number == 5 + behind and read == [] and not again.problems
  _same(got, number)
  assert again.poll() is None
  assert again.save() and _kept(tmp_path) == [f'{number}-1']


def test_a_base_that_is_nearer_is_read_instead(kv, tmp_path, monkeypatch):
  publisher = _publish(kv, 0, 3, base_every=10)
  reader = sync.Subscriber(kv, FORM, directory=tmp_path)
  reader.poll()
  reader.save()
  _publish(kv, 4, 12, publisher)
  read = _watch_reads(monkeypatch)
  again = sync.Subscriber(kv, FORM, directory=tmp_path)
  number, got = again.poll()
  assert number == 12 and read == [10]
  _same(got, 12)


@pytest.mark.parametrize('place', ['words', 'index', 'short', 'gone', 'json'])
def test_what_is_damaged_is_not_believed(kv, tmp_path, place):
  _publish(kv, 0, 5)
  reader = sync.Subscriber(kv, FORM, directory=tmp_path)
  reader.poll()
  reader.save()
  folder = tmp_path / FORM / '5-1'
  words, index = folder / local.WORDS, folder / local.INDEX
  if place == 'words':
    data = bytearray(words.read_bytes())
    data[100] ^= 1
    words.write_bytes(bytes(data))
  elif place == 'index':
    index.write_bytes(index.read_bytes().replace(b'20,20', b'10,40'))
  elif place == 'short':
    words.write_bytes(words.read_bytes()[:-1])
  elif place == 'gone':
    words.unlink()
  else:
    index.write_bytes(b'{"form')
  again = sync.Subscriber(kv, FORM, directory=tmp_path)
  number, got = again.poll()
  assert number == 5 and 'damaged' in again.problems[0]
  _same(got, 5)
  assert not folder.exists()


def test_weights_of_another_run_are_left_alone(kv, tmp_path):
  _publish(kv, 0, 5)
  reader = sync.Subscriber(kv, FORM, directory=tmp_path)
  reader.poll()
  reader.save()
  other = store.open_exchange('memory://')
  publisher = sync.Publisher(other, FORM, 4)
  for version in range(3):
    publisher.publish(_weights(version + 50), version)
  again = sync.Subscriber(other, FORM, directory=tmp_path)
  number, got = again.poll()
  assert number == 2
  _same(got, 52)


def test_an_exchange_that_is_broken_leaves_what_was_kept(kv, tmp_path):
  publisher = _publish(kv, 0, 5)
  reader = sync.Subscriber(kv, FORM, directory=tmp_path)
  reader.poll()
  reader.save()
  _publish(kv, 6, 6, publisher)
  store.write(kv, f'weights/{FORM}/6-1/0/0', None)
  again = sync.Subscriber(kv, FORM, directory=tmp_path)
  number, got = again.poll()
  assert number == 5 and 'missing' in again.problems[0]
  _same(got, 5)
  with pytest.raises(store.BrokenWeights):
    again.poll()


def test_a_full_disk_costs_only_the_way_back(kv, tmp_path, monkeypatch):
  publisher = _publish(kv, 0, 1)
  reader = sync.Subscriber(kv, FORM, directory=tmp_path)
  reader.poll()
  reader.save()
  steps = 0
  for point in range(1, 20):
    version = 1 + point
    _publish(kv, version, version, publisher)
    assert reader.poll()[0] == version
    before = _kept(tmp_path)
    count = [0]

    def before_step(path, count=count, point=point):
      count[0] += 1
      if count[0] == point:
        raise OSError(errno.ENOSPC, 'no space left', str(path))

    monkeypatch.setattr(local, 'before_step', before_step)
    saved = reader.save()
    monkeypatch.undo()
    if count[0] < point:
      assert saved
      break
    steps += 1
    assert 'restart will fetch' in reader.problems[-1]
    whole = [name for name in _kept(tmp_path) if not name.endswith('.part')]
    assert whole and (before[0] in whole or f'{version}-1' in whole)
    again = sync.Subscriber(kv, FORM, directory=tmp_path)
    number, got = again.poll()
    assert number == version
    _same(got, version)
  assert steps == 7  # the folder, three tensors, the index, two names
  assert len(_kept(tmp_path)) == 1


_READER = """
import os, signal
from composer.weights import local, store, sync

def main(url, directory, point):
  left = int(point)
  def step(*unused):
    nonlocal left
    left -= 1
    if left == 0:
      os.kill(os.getpid(), signal.SIGKILL)
  local.before_step = step
  load = sync.versions.load
  def counted(*arguments):
    step()
    result = load(*arguments)
    step()
    return result
  sync.versions.load = counted
  kv = store.open_exchange(url)
  reader = sync.Subscriber(
    kv, 'bf16', directory=directory, reader=('c', point)
  )
  number, _ = reader.poll()
  assert reader.save(), reader.problems
  print('done', number, *reader.problems)
"""


def test_a_reader_killed_at_every_point_of_applying_and_keeping(tmp_path):
  """kill -9 of real processes; each next life starts where it can."""
  url = f'file://{tmp_path}/exchange'
  kv = store.open_exchange(url)
  publisher = sync.Publisher(kv, FORM, 4)
  directory = tmp_path / 'cache'
  ended = []
  with lives.lives(_READER) as live:
    for point in range(1, 30):
      for _ in range(2):
        version = publisher.next_version or 0
        publisher.publish(_weights(version), version)
      done = live(url, directory, point)
      if done.code == 0:
        assert done.out.split() == ['done', str(publisher.next_version - 1)]
        ended.append(point)
        if len(ended) == 2:
          break
        continue
      assert done.code == -signal.SIGKILL, done.out
      kept = local.load(directory, FORM)
      if kept is not None:
        _same(kept.flat, kept.ref.version)
      got = sync.Subscriber(kv, FORM, directory=directory).poll()
      assert got[0] == publisher.next_version - 1
      _same(got[1], got[0])
  assert len(ended) == 2 and point > 12
  assert len(_kept(directory)) == 1
