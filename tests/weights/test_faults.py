"""Faults at every point between two writes or reads, real kills included.

After each: a reader holds exactly what was published, and the next publisher
goes on at HEAD's version + 1.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys

import lives
import ml_dtypes
import numpy as np
import pytest

from composer.weights import delta
from composer.weights import store
from composer.weights import sync
from composer.weights import upkeep
from composer.weights import versions

FORM = 'bf16'

# Publishes a base and a delta, collects what is older, and is killed (or
# stopped) before write number `point`.
_PUBLISHER = """
import os, signal, sys
import ml_dtypes, numpy as np
from composer.weights import store, sync, upkeep

def main(url, point, what='SIGKILL'):
  left = int(point)
  def before_write(key):
    nonlocal left
    left -= 1
    if left == 0:
      print(key, flush=True)
      os.kill(os.getpid(), getattr(signal, what))
  kv = store.open_exchange(url)
  store.before_write = before_write
  publisher = sync.Publisher(kv, 'bf16', 9)
  for _ in range(2):
    version = publisher.next_version or 0
    words = np.arange(50, dtype=np.uint16) // 5 + version
    publisher.publish({'w': words.view(ml_dtypes.bfloat16)}, version)
  upkeep.collect(kv, 'bf16', upkeep.Watch())

if __name__ == '__main__':
  main(*sys.argv[1:])
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
  with lives.lives(_PUBLISHER) as live:
    for point in range(1, 40):
      done = live(url, point)
      head = reader.head()
      got = reader.poll()
      if got is not None:
        assert got[0] == head
        _same(got[1], head)
      assert upkeep.verify(kv, FORM).problems == ()
      if done.code == 0:
        break
      assert done.code == -signal.SIGKILL, done.out
      if point < 9:
        upkeep.collect(kv, FORM, upkeep.Watch())
      killed_at.append(done.out.strip().removeprefix('weights/'))
  # The fence; content, manifest and HEAD of a base, then of a delta; then what
  # is older: manifest and content of each version.
  ends = [key.rpartition('/')[2] for key in killed_at]
  assert ends[0] == 'HEAD' and ends.count('HEAD') == 3
  assert ends[6:9] == ['0', 'manifest', 'HEAD']
  assert len(ends) > 1 + 5 + 3 + 6 and '' in ends[9:] and done.code == 0
  kept = {entry.version for entry in upkeep.listing(kv)}
  assert kept == {reader.version - 1, reader.version}
  assert all(entry.live for entry in upkeep.listing(kv))
  folders = [
    path.name for path in (tmp_path / 'exchange/weights/bf16').iterdir()
  ]
  assert len(folders) == 2, folders


def test_what_a_killed_write_leaves_on_the_disk_is_collected(tmp_path):
  """A folder without keys; a key that was being written when it was killed."""
  kv = store.open_exchange(f'file://{tmp_path}/exchange')
  folder = tmp_path / 'exchange/weights/bf16'
  publishers = [sync.Publisher(kv, FORM, 9) for _ in range(2)]
  publishers[1].publish(_weights(0), 0)
  for name in ('0-1/base/w/c', '7-1/0', '9-2/0'):  # fence 2 may be at work
    (folder / name).mkdir(parents=True)
  (folder / '7-1/0/0.__lock').write_bytes(b'half')
  (folder / 'other').mkdir()
  upkeep.collect(kv, FORM, upkeep.Watch())
  left = sorted(path.name for path in folder.iterdir())
  assert left == ['0-2', '9-2', 'other']
  assert upkeep.verify(kv, FORM).problems == ()


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


def _everything(kv):
  return {key: store.read(kv, key)[0] for key in store.keys(kv, 'weights/')}


def _offsets(size):
  """One of every class: ends, the header's fields, streams, the digest."""
  wanted = {0, 3, 7, 8, 9, 12, 13, 40, size // 4, size // 2, 3 * size // 4}
  wanted |= {size - 17, size - 16, size - 8, size - 1}
  return sorted(at for at in wanted if 0 <= at < size)


def test_every_object_bent_and_cut_at_every_class_of_offset(kv):
  """Blobs, manifests, chunks and descriptions of arrays."""
  publisher = sync.Publisher(kv, FORM, 3)
  for version in range(5):  # bases at 0 and 3
    publisher.publish(_weights(version), version)
  objects = _everything(kv)
  held = sync.Subscriber(kv, FORM)
  trials = refused = 0
  for key, whole in objects.items():
    for at in _offsets(len(whole)):
      bent = bytearray(whole)
      bent[at] ^= 1 << at % 8
      for damaged in (bytes(bent), whole[:at]):
        store.write(kv, key, damaged)
        trials += 1
        reader = sync.Subscriber(kv, FORM)
        try:
          got = reader.poll()
        except store.BrokenWeights:
          got, refused = None, refused + 1
          assert reader.version is None
        if got is not None:
          _same(got[1], got[0])
    store.write(kv, key, whole)
  assert trials > 300 and refused
  number, got = held.poll()
  assert number == 4
  _same(got, 4)


def test_every_object_missing(kv):
  publisher = sync.Publisher(kv, FORM, 3)
  for version in range(5):
    publisher.publish(_weights(version), version)
  for key, whole in _everything(kv).items():
    store.write(kv, key, None)
    reader = sync.Subscriber(kv, FORM)
    try:
      got = reader.poll()
      _same(got[1], got[0])
    except store.BrokenWeights as error:
      assert key.rpartition('/')[0][:20] in str(error) or 'missing' in str(
        error
      )
    store.write(kv, key, whole)
    number, got = reader.poll() or (reader.version, None)
    assert number == 4


def test_versions_of_two_lines_do_not_mix(kv):
  """A blob of another line in the place of one: the right size, other bits."""
  publisher = sync.Publisher(kv, FORM, 9)
  for version in range(4):
    publisher.publish(_weights(version), version)
  blobs = [f'weights/{FORM}/{v}-1/0/0' for v in (1, 2, 3)]
  first, second, third = (store.read(kv, key)[0] for key in blobs)
  for wrong in ((second, second, third), (first, third, second)):
    for key, blob in zip(blobs, wrong, strict=True):
      store.write(kv, key, blob)
    reader = sync.Subscriber(kv, FORM)
    number, got = reader.poll()
    assert number < 3 and reader.problems
    _same(got, number)


def test_a_stale_head_for_a_while(kv, monkeypatch):
  """Reads of HEAD that lag behind by up to three versions, in any order."""
  rng = np.random.default_rng(0)
  seen, plain = [], store.read

  def read(kv, key, *, wait_s=store.WAIT_S):
    value, generation = plain(kv, key, wait_s=wait_s)
    if key != 'HEAD' or value is None:
      return value, generation
    seen.append((value, generation))
    return seen[-1 - min(int(rng.integers(0, 4)), len(seen) - 1)]

  publisher = sync.Publisher(kv, FORM, 4)
  reader = sync.Subscriber(kv, FORM)
  newest = -1
  for version in range(60):
    publisher.publish(_weights(version), version)
    with monkeypatch.context() as patched:
      patched.setattr(store, 'read', read)
      got = reader.poll()
    if got is not None:
      assert got[0] > newest
      newest = got[0]
      _same(got[1], newest)
  reader.poll()
  assert reader.version == 59


def test_a_slow_and_a_dead_cluster_beside_a_fast_one(kv):
  """What they hold back is bounded, and each converges when it comes again."""
  now = [0.0]
  watch = upkeep.Watch(timeout_s=30.0, clock=lambda: now[0])
  publisher = sync.Publisher(kv, FORM, 5)
  readers = {
    name: sync.Subscriber(kv, FORM, reader=(name, 'p'))
    for name in ('fast', 'slow', 'dead')
  }
  most = 0
  for version in range(120):
    now[0] += 1.0
    stats = publisher.publish(_weights(version), version)
    for name, reader in readers.items():
      turn = {'fast': 1, 'slow': 20, 'dead': 1000}[name]
      if version % turn == 0:
        reader.poll()
    if stats.kind == 'base':
      upkeep.collect(kv, FORM, watch)
    most = max(most, len(store.keys(kv, f'weights/{FORM}/')))
    if version == 60:
      early = most
    if readers['slow'].version is not None and version % 20 == 19:
      # What the slow one holds can still be rebuilt.
      _same(
        versions.fetch(kv, FORM, readers['slow'].version)[1],
        readers['slow'].version,
      )
  assert most <= early + 5, 'it grows'
  for reader in readers.values():
    reader.poll()
    assert reader.version == 119 and not reader.problems


def test_two_publishers_race_as_processes(tmp_path):
  """Both claim and publish until fenced; one line of versions is left."""
  url = f'file://{tmp_path}/exchange'
  kv = store.open_exchange(url)
  processes = [
    subprocess.Popen(
      [sys.executable, '-c', _RACER, url, str(seed)],
      stdout=subprocess.PIPE,
      text=True,
      env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    for seed in range(3)
  ]
  done = []
  for process in processes:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    done += [tuple(map(int, line.split())) for line in out.splitlines()]
  head = store.read_head(kv, FORM).ref
  line = [(r.version, r.fence) for r, _ in versions.lineage(kv, FORM, head)]
  assert sorted(done) == line[::-1] and line
  assert upkeep.verify(kv, FORM).problems == ()
  number, got = sync.Subscriber(kv, FORM).poll()
  _same(got, number)
  upkeep.collect(kv, FORM, upkeep.Watch())
  assert all(entry.live for entry in upkeep.listing(kv))


_RACER = """
import sys
import ml_dtypes, numpy as np
from composer.weights import store, sync

kv = store.open_exchange(sys.argv[1])
rng = np.random.default_rng(int(sys.argv[2]))
for _ in range(6):
  publisher = sync.Publisher(kv, 'bf16', 3)
  try:
    for _ in range(rng.integers(1, 9)):
      version = publisher.next_version or 0
      words = np.arange(50, dtype=np.uint16) // 5 + np.uint16(version)
      publisher.publish({'w': words.view(ml_dtypes.bfloat16)}, version)
      print(version, publisher.fence)
  except store.PublisherFenced:
    pass
"""


def test_a_disk_that_is_really_full(tmp_path):
  """A file system of 1 MB in a user namespace: publish, fail, and go on."""
  full = tmp_path / 'full'
  full.mkdir()
  mount = f'mount -t tmpfs -o size=1m tmpfs {full}'
  unshare = ['unshare', '-rm', 'sh', '-c']
  if (
    not shutil.which('unshare') or subprocess.run([*unshare, mount]).returncode
  ):
    pytest.skip('no user namespaces: a full file system cannot be made here')
  done = subprocess.run(
    [*unshare, f'{mount} && exec "$@"', '-', sys.executable, '-c', _FULL, full],
    capture_output=True,
    text=True,
    timeout=60,
    env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.split() == ['full', 'went', 'on']


_FULL = """
import errno, os, pathlib, sys
import ml_dtypes, numpy as np
from composer.weights import store, sync, upkeep

root = pathlib.Path(sys.argv[1])
kv = store.open_exchange(f'file://{root}/exchange')
publisher = sync.Publisher(kv, 'bf16', 2)
reader = sync.Subscriber(kv, 'bf16')
rng = np.random.default_rng(0)
filler = root / 'filler'
filler.write_bytes(bytes(500_000))
def weights():
  return {'w': rng.integers(0, 2**16, 50_000, np.uint16)}
sent = {}
def publish():
  version = publisher.next_version or 0
  sent[version] = weights()
  publisher.publish(sent[version], version)
for _ in range(40):
  try:
    publish()
  except OSError as error:
    assert error.errno == errno.ENOSPC, error
    break
else:
  raise SystemExit('it never was full')
got = reader.poll()
assert got[0] == reader.head()
assert (got[1]['w'] == sent[got[0]]['w']).all()
print('full')
filler.unlink()
publish()
upkeep.collect(kv, 'bf16', upkeep.Watch())
for _ in range(20):
  publish()
  upkeep.collect(kv, 'bf16', upkeep.Watch())
  got = reader.poll()
  assert got[0] == max(sent) and (got[1]['w'] == sent[got[0]]['w']).all()
print('went on')
"""


def test_a_zombie_process_wakes_after_a_new_epoch(tmp_path):
  """SIGSTOP in the middle of a publication, a new publisher, SIGCONT."""
  url = f'file://{tmp_path}/exchange'
  kv = store.open_exchange(url)
  for point in (2, 6, 7, 9):
    start = store.read_head(kv, FORM).ref
    zombie = subprocess.Popen(
      [sys.executable, '-c', _PUBLISHER, url, str(point), 'SIGSTOP'],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=os.environ | {'PYTHONPATH': os.pathsep.join(sys.path)},
    )
    assert os.waitid(os.P_PID, zombie.pid, os.WSTOPPED | os.WEXITED)
    newer = sync.Publisher(kv, FORM, 9)
    version = newer.next_version or 0
    newer.publish(_weights(version), version)
    os.kill(zombie.pid, signal.SIGCONT)
    _, errors = zombie.communicate(timeout=30)
    assert zombie.returncode == 1 and 'PublisherFenced' in errors
    head = store.read_head(kv, FORM).ref
    assert (head.version, head.fence) == (version, newer.fence)
    assert start is None or head.version > start.version
    number, got = sync.Subscriber(kv, FORM).poll()
    assert number == version
    _same(got, number)
  assert upkeep.verify(kv, FORM).problems == ()
