"""Faults at every point between two writes or reads, real kills included.

After each: a reader holds exactly what was published, and the next publisher
goes on at HEAD's version + 1.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from composer.weights import delta
from composer.weights import store
from composer.weights import sync
from composer.weights import upkeep

FORM = 'bf16'

# Publishes a base and a delta, and kills itself before write number argv[2].
_PUBLISHER = """
import os, signal, sys
import ml_dtypes, numpy as np
from composer.weights import store, sync

kv = store.open_exchange(sys.argv[1])
left = int(sys.argv[2])
def before_write(key):
  global left
  left -= 1
  if left == 0:
    print(key, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
store.before_write = before_write
publisher = sync.Publisher(kv, 'bf16', 9)
for _ in range(2):
  version = publisher.next_version or 0
  words = np.arange(50, dtype=np.uint16) // 5 + version
  publisher.publish({'w': words.view(ml_dtypes.bfloat16)}, version)
"""


def _weights(version):
  words = np.arange(50, dtype=np.uint16) // 5 + np.uint16(version)
  return {'w': words.view(ml_dtypes.bfloat16)}


def _same(got, version):
  assert delta.digest(got) == delta.digest(_weights(version))


@pytest.fixture(params=['memory', 'file'])
def kv(request, tmp_path):
  if request.param == 'memory':
    return store.open_exchange('memory://')
  return store.open_exchange(f'file://{tmp_path}/exchange')


def test_publisher_killed_before_every_write(tmp_path):
  """kill -9 of a real process, in one exchange that must stay sound."""
  url = f'file://{tmp_path}/exchange'
  kv = store.open_exchange(url)
  reader = sync.Subscriber(kv, FORM)
  killed_at = []
  for point in range(1, 40):
    done = subprocess.run(
      [sys.executable, '-c', _PUBLISHER, url, str(point)],
      capture_output=True,
      text=True,
      timeout=60,
      check=False,
      env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    head = reader.head()
    got = reader.poll()
    if got is not None:
      assert got[0] == head
      _same(got[1], head)
    assert upkeep.verify(kv, FORM).problems == ()
    if done.returncode == 0:
      break
    assert done.returncode == -signal.SIGKILL, done.stderr
    killed_at.append(done.stdout.strip().rpartition('/')[2])
  # The fence; content, manifest and HEAD of a base, then of a delta.
  assert killed_at[0] == 'HEAD' and killed_at.count('HEAD') == 3
  assert killed_at[-3:] == ['0', 'manifest', 'HEAD']
  assert len(killed_at) == 1 + 5 + 3
  assert done.returncode == 0
  # Published: none, then the base when only the delta died, then both.
  assert reader.version == 3 + 2 - 1
  upkeep.collect(kv, FORM, upkeep.Watch())
  kept = {e.version for e in upkeep.listing(kv)}
  assert kept == {3, 4}
  assert all(e.live for e in upkeep.listing(kv))


def _fail_at(monkeypatch, point, error):
  """Before write number `point` (from 1) raises, once; the count so far."""
  count = [0]

  def before_write(key):
    del key
    count[0] += 1
    if count[0] == point:
      raise error

  monkeypatch.setattr(store, 'before_write', before_write)
  return count


@pytest.mark.parametrize('resume', ['same', 'new'])
def test_a_failing_write_anywhere_publishes_nothing_by_half(
  kv, monkeypatch, resume
):
  """A full disk at every point; the same publisher or a new one goes on."""
  reader = sync.Subscriber(kv, FORM)
  publisher = sync.Publisher(kv, FORM, 3)
  point = 0
  full = OSError(errno.ENOSPC, 'no space left')
  failures, kinds = 0, []
  for _ in range(60):
    point += 1
    count = _fail_at(monkeypatch, point, full)
    start = publisher.next_version or 0
    try:
      for version in range(start, start + 4):  # a base, deltas, a base
        publisher.publish(_weights(version), version)
    except OSError as error:
      assert error is full
      failures += 1
    head = reader.head()
    monkeypatch.undo()
    got = reader.poll()
    assert reader.version == head
    if got is not None:
      _same(got[1], head)
    if count[0] < point:
      break
    if resume == 'new':
      publisher = sync.Publisher(kv, FORM, 3)
    version = 0 if head is None else head + 1
    stats = publisher.publish(_weights(version), version)
    # What this publisher holds is what HEAD names: it goes on with a delta.
    kinds.append(stats.kind)
    assert reader.poll()[0] == version
  else:
    raise AssertionError('the sweep did not end')
  assert failures == 3 + 3 + 5 + 3  # delta, delta, base, delta
  assert ('delta' in kinds) == (resume == 'same')
  assert upkeep.verify(kv, FORM).problems == ()
  upkeep.collect(kv, FORM, upkeep.Watch())
  assert len(upkeep.listing(kv)) <= 4


def test_a_failing_read_anywhere_moves_no_reader(kv, monkeypatch):
  publisher = sync.Publisher(kv, FORM, 4)
  for version in range(7):
    publisher.publish(_weights(version), version)
  plain = store.await_result
  for point in range(1, 60):
    count = 0

    def await_result(future, key, doing, wait_s=store.WAIT_S, point=point):
      nonlocal count
      count += 1
      if count == point:
        raise TimeoutError(f'{key} took too long')
      return plain(future, key, doing, wait_s)

    reader = sync.Subscriber(kv, FORM)
    monkeypatch.setattr(store, 'await_result', await_result)
    try:
      got = reader.poll()
    except TimeoutError:
      assert reader.version is None
      monkeypatch.setattr(store, 'await_result', plain)
      got = reader.poll()
    monkeypatch.setattr(store, 'await_result', plain)
    assert got[0] == 6
    _same(got[1], 6)
    if count < point:
      break
  assert 8 < point < 59


def test_a_swap_whose_answer_was_lost_counts_as_done(kv, monkeypatch):
  """The write of HEAD lands, and the driver's own retry is told 'stale'."""
  publisher = sync.Publisher(kv, FORM, 4)
  plain = store.write
  lost = []

  def write(kv, key, value, *, if_equal=None, wait_s=store.WAIT_S):
    generation = plain(kv, key, value, if_equal=if_equal, wait_s=wait_s)
    if key == 'HEAD' and generation:
      lost.append(generation)
      return b''
    return generation

  monkeypatch.setattr(store, 'write', write)
  for version in range(3):
    publisher.publish(_weights(version), version)
  assert len(lost) == 3
  assert sync.Subscriber(kv, FORM).poll()[0] == 2
