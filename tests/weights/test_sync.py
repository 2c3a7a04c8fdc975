"""Publisher and subscriber: order, fallback, hosts, and no way backwards."""

from __future__ import annotations

import concurrent.futures
import json

import ml_dtypes
import numpy as np
import pytest

from composer.weights import delta
from composer.weights import pieces
from composer.weights import store
from composer.weights import sync
from composer.weights import upkeep
from composer.weights import versions

FORM = 'bf16'


@pytest.fixture(params=['memory', 'file'])
def kv(request, tmp_path):
  if request.param == 'memory':
    return store.open_exchange('memory://')
  return store.open_exchange(f'file://{tmp_path}/exchange')


def _weights(version, names=('a', 'b/c', 'b/d')):
  rng = np.random.default_rng(7)
  flat = {}
  for index, name in enumerate(names):
    words = rng.integers(0, 2**16, (4, 30 + index), np.uint16)
    words[:, : version % 30] += np.uint16(version)
    flat[name] = words.view(ml_dtypes.bfloat16)
  return flat


def _same(got, version):
  assert delta.digest(got) == delta.digest(_weights(version))


def _publish(publisher, first, last):
  return [publisher.publish(_weights(v), v) for v in range(first, last + 1)]


def _damage(kv, key, offset=-20):
  data = bytearray(store.read(kv, key)[0])
  data[offset] ^= 1
  store.write(kv, key, bytes(data))


def test_flatten_and_unflatten_are_inverse():
  tree = {'layers': {'attention': {'q': 1, 'k': 2}, 'norm': 3}, 'embed': 4}
  flat = pieces.flatten(tree)
  assert flat == {
    'layers/attention/q': 1,
    'layers/attention/k': 2,
    'layers/norm': 3,
    'embed': 4,
  }
  assert pieces.unflatten(flat) == tree
  for bad in ({'a/b': 1}, {'': 1}, {3: 1}):
    with pytest.raises(ValueError, match='parameter name'):
      pieces.flatten(bad)
  for bad in ({'a': 1, 'a/b': 2}, {'a/b': 2, 'a': 1}):
    with pytest.raises(ValueError, match='array'):
      pieces.unflatten(bad)


def test_a_reader_follows(kv):
  publisher = sync.Publisher(kv, FORM, 5)
  reader = sync.Subscriber(kv, FORM)
  assert reader.head() is None and reader.poll() is None
  kinds = []
  for version in range(12):
    stats = publisher.publish(_weights(version), version)
    kinds.append(stats.kind)
    assert reader.head() == version
    number, got = reader.poll()
    assert number == version == reader.version and not reader.problems
    _same(got, version)
    assert reader.poll() is None
  assert kinds == (['base'] + ['delta'] * 4) * 2 + ['base', 'delta']
  _same(reader.fetch(7), 7)
  _same(reader.fetch(11), 11)


def test_stats_count_bytes_and_changes(kv):
  publisher = sync.Publisher(kv, FORM, 3)
  first, second, third, base = _publish(publisher, 3, 6)
  assert (first.kind, first.changed_share) == ('base', 1.0)
  assert first.full_bytes == sum(a.nbytes for a in _weights(3).values())
  want = delta.count_changed(_weights(3), _weights(4)) / (first.full_bytes / 2)
  assert second.kind == 'delta' and second.changed_share == want
  assert second.ratio == second.bytes / second.full_bytes < 1
  want = delta.count_changed(_weights(5), _weights(6)) / (first.full_bytes / 2)
  assert base.kind == 'base' and base.changed_share == want
  stored = sum(
    len(store.read(kv, key)[0])
    for key in store.keys(kv, versions.prefix_of(FORM, 3, 1))
    if not key.endswith('manifest')
  )
  assert first.bytes == stored


@pytest.mark.parametrize('behind', [0, 1, 3, 9, None])
def test_a_reader_any_number_of_versions_behind(kv, behind):
  publisher = sync.Publisher(kv, FORM, 4)
  reader = sync.Subscriber(kv, FORM)
  if behind is not None:
    _publish(publisher, 0, 9 - behind)
    reader.poll()
    _publish(publisher, 10 - behind, 9)
  else:
    _publish(publisher, 0, 9)
  got = reader.poll()
  if behind == 0:
    assert got is None
  else:
    assert got[0] == 9
    _same(got[1], 9)


def test_published_weights_are_a_copy(kv):
  publisher = sync.Publisher(kv, FORM, 9)
  weights = _weights(0)
  publisher.publish(weights, 0)
  weights['a'].view(np.uint16)[:] = 0  # the caller's buffer is reused
  publisher.publish(_weights(1), 1)
  number, got = sync.Subscriber(kv, FORM).poll()
  _same(got, 1)
  with pytest.raises(ValueError, match='read-only'):
    got['a'][0, 0] = 1


@pytest.mark.parametrize(
  'weights, version, message',
  [
    (_weights(2), 1, 'the next one is 2'),
    (_weights(2, ('a', 'b/c')), 2, 'different names'),
    ({**_weights(2), 'a': np.zeros(3, np.float32)}, 2, "'a' is"),
    ({**_weights(2), 'a': [1.0]}, 2, 'not a numpy array'),
    (_weights(2, ('a', 'b//c')), 2, 'parameter name'),
    (_weights(2, ('a', 'a/c')), 2, 'below'),
  ],
)
def test_what_cannot_be_published_writes_nothing(kv, weights, version, message):
  publisher = sync.Publisher(kv, FORM, 4)
  _publish(publisher, 0, 1)
  before = sorted(kv.list().result())
  with pytest.raises(ValueError, match=message):
    publisher.publish(weights, version)
  assert sorted(kv.list().result()) == before
  assert publisher.publish(_weights(2), 2).kind == 'delta'


def test_another_models_exchange_is_refused(kv):
  _publish(sync.Publisher(kv, FORM, 4), 0, 1)
  publisher = sync.Publisher(kv, FORM, 4)
  with pytest.raises(ValueError, match='another model'):
    publisher.publish(_weights(2, ('a', 'z')), 2)


def test_a_resumed_publisher_starts_with_a_base_after_head(kv):
  reader = sync.Subscriber(kv, FORM)
  _publish(sync.Publisher(kv, FORM, 9), 0, 2)
  reader.poll()
  publisher = sync.Publisher(kv, FORM, 9)
  assert publisher.next_version == 3 and publisher.fence == 2
  with pytest.raises(ValueError, match='the next one is 3'):
    publisher.publish(_weights(2), 2)
  assert [s.kind for s in _publish(publisher, 3, 4)] == ['base', 'delta']
  assert reader.poll()[0] == 4
  assert upkeep.verify(kv, FORM).versions == (0, 1, 2, 3, 4)


def test_a_zombie_cannot_publish(kv, monkeypatch):
  zombie = sync.Publisher(kv, FORM, 9)
  _publish(zombie, 0, 1)
  newer = sync.Publisher(kv, FORM, 9)
  with pytest.raises(store.PublisherFenced, match='replaced by publisher 2'):
    zombie.publish(_weights(2), 2)
  _publish(newer, 2, 3)
  with pytest.raises(store.PublisherFenced):
    zombie.publish(_weights(2), 2)

  def take_over(key):
    """The third publisher starts while the second is about to move HEAD."""
    if key == 'HEAD':
      monkeypatch.undo()
      _publish(sync.Publisher(kv, FORM, 9), 4, 4)

  monkeypatch.setattr(store, 'before_write', take_over)
  with pytest.raises(store.PublisherFenced, match='replaced by publisher 3'):
    newer.publish(_weights(5), 4)
  number, got = sync.Subscriber(kv, FORM).poll()
  assert number == 4
  _same(got, 4)
  assert upkeep.verify(kv, FORM).problems == ()


def test_racing_publishers_leave_one_line(tmp_path):
  """Each claims when it likes and publishes until it is fenced."""
  url = f'file://{tmp_path}/exchange'

  def run(seed):
    kv = store.open_exchange(url)
    done, rng = [], np.random.default_rng(seed)
    for _ in range(4):
      publisher = sync.Publisher(kv, FORM, 3)
      try:
        for _ in range(rng.integers(1, 6)):
          version = publisher.next_version or 0
          publisher.publish(_weights(version), version)
          done.append((version, publisher.fence))
      except store.PublisherFenced:
        pass
    return done

  with concurrent.futures.ThreadPoolExecutor(3) as pool:
    done = sum(pool.map(run, range(3)), [])
  kv = store.open_exchange(url)
  head = store.read_head(kv, FORM).ref
  line = [
    (ref.version, ref.fence) for ref, _ in versions.lineage(kv, FORM, head)
  ]
  assert sorted(done) == line[::-1]
  assert [version for version, _ in line] == list(range(len(line)))[::-1]
  assert upkeep.verify(kv, FORM).problems == ()
  _same(sync.Subscriber(kv, FORM).poll()[1], head.version)


_PLACES = [
  f'weights/{FORM}/6-1/0/0',
  f'weights/{FORM}/6-1/manifest',
  f'weights/{FORM}/7-1/0/0',
  f'weights/{FORM}/7-1/manifest',
]


@pytest.mark.parametrize('missing', [False, True])
@pytest.mark.parametrize('key', _PLACES)
def test_a_broken_chain_moves_nobody_past_it(kv, key, missing):
  """Bases at 0, 4, 8; HEAD is 7; one object of 6 or 7 is damaged or gone."""
  publisher = sync.Publisher(kv, FORM, 4)
  readers = {}
  for version in range(8):
    publisher.publish(_weights(version), version)
    if version in (2, 4, 5):
      readers[version] = sync.Subscriber(kv, FORM)
      readers[version].poll()
  readers[None] = sync.Subscriber(kv, FORM)
  if missing:
    store.write(kv, key, None)
  else:
    _damage(kv, key)
  intact = 5 if '/6-1/' in key else 6
  if key.endswith('manifest'):
    intact = -1  # what is before a manifest hangs on it
  for held, reader in readers.items():
    for attempt in range(2):
      if attempt or (held or 0) >= intact:
        with pytest.raises(store.BrokenWeights, match='7 of bf16'):
          reader.poll()
      else:
        number, got = reader.poll()
        assert number == intact
        _same(got, intact)
        assert reader.problems
    assert reader.version == (held if intact <= (held or 0) else intact)
  _publish(publisher, 8, 9)  # the next base heals everyone
  for reader in readers.values():
    number, got = reader.poll()
    assert number == 9 and not reader.problems
    _same(got, 9)


def test_a_broken_base_hurts_only_who_needs_it(kv):
  publisher = sync.Publisher(kv, FORM, 4)
  reader = sync.Subscriber(kv, FORM)
  _publish(publisher, 0, 5)
  reader.poll()
  for key in store.keys(kv, f'weights/{FORM}/4-1/base/a/'):
    if '/c/' in key:
      _damage(kv, key, 5)
  _publish(publisher, 6, 6)
  assert reader.poll()[0] == 6
  late = sync.Subscriber(kv, FORM)
  number, got = late.poll()
  assert number == 3 and '4-1/base' in late.problems[0]
  _same(got, 3)


def test_a_base_of_other_bits_is_found_out(kv):
  """Even when every checksum of the file format is right."""
  publisher = sync.Publisher(kv, FORM, 4)
  _publish(publisher, 0, 0)
  other = store.open_exchange('memory://')
  versions.write_base(other, f'weights/{FORM}/0-1/base/', _weights(1))
  for key in store.keys(other, 'weights/'):
    store.write(kv, key, store.read(other, key)[0])
  with pytest.raises(store.BrokenWeights, match='wrong digest'):
    sync.Subscriber(kv, FORM).poll()


def test_a_readers_own_copy_gone_bad_is_replaced(kv):
  publisher = sync.Publisher(kv, FORM, 9)
  reader = sync.Subscriber(kv, FORM)
  _publish(publisher, 0, 1)
  reader.poll()
  reader._held = _weights(0)  # memory that flipped
  _publish(publisher, 2, 2)
  number, got = reader.poll()
  assert number == 2 and 'wrong base' in reader.problems[0]
  _same(got, 2)


def test_a_stale_or_repeated_head(kv):
  publisher = sync.Publisher(kv, FORM, 9)
  reader = sync.Subscriber(kv, FORM)
  _publish(publisher, 0, 1)
  old = store.read(kv, 'HEAD')[0]
  _publish(publisher, 2, 2)
  assert reader.poll()[0] == 2
  store.write(kv, 'HEAD', old)
  assert reader.poll() is None and reader.version == 2
  forms = json.loads(old)['forms']
  forms[FORM]['version'] = 2
  fields = {
    'format': store.FORMAT,
    'forms': forms,
    'check': store._check(forms),
  }
  store.write(kv, 'HEAD', store.to_json(fields))
  with pytest.raises(store.BrokenWeights, match='again'):
    reader.poll()
  assert reader.version == 2


def test_a_missing_host_is_waited_for_and_named(kv):
  publisher = sync.Publisher(
    kv, FORM, 4, hosts=2, incarnation='one', wait_s=0.05
  )
  with pytest.raises(TimeoutError, match=r'0-1/1/done .*upload of host 1'):
    publisher.publish(_weights(0), 0)
  assert sync.Subscriber(kv, FORM).poll() is None
  with pytest.raises(TimeoutError, match='incarnations/two .*host 0'):
    sync.Publisher(kv, FORM, 4, host=1, hosts=2, incarnation='two', wait_s=0.05)
  with pytest.raises(ValueError, match='immutable'):
    sync.Publisher(kv, FORM, 4, hosts=2, incarnation='one')
  with pytest.raises(ValueError, match='incarnation'):
    sync.Publisher(kv, FORM, 4, hosts=2)


@pytest.mark.parametrize('hosts', [2, 5])
def test_several_hosts_publish_one_version(kv, hosts):
  """Five hosts and three tensors: two of them own nothing."""
  sizes = {name: a.nbytes for name, a in _weights(0).items()}
  mine = [pieces.owned(sizes, host, hosts) for host in range(hosts)]
  assert sorted(sum(mine, ())) == sorted(sizes)

  def run(host):
    publisher = sync.Publisher(
      kv, FORM, 3, host=host, hosts=hosts, incarnation='i', wait_s=20
    )
    for version in range(5):
      whole = _weights(version)
      publisher.publish({name: whole[name] for name in mine[host]}, version)

  with concurrent.futures.ThreadPoolExecutor(hosts) as pool:
    list(pool.map(run, range(hosts)))
  assert upkeep.verify(kv, FORM).versions == (0, 1, 2, 3, 4)
  for version in range(5):
    _same(versions.fetch(kv, FORM, version)[1], version)


def test_large_trees_are_cut_into_blobs(kv, monkeypatch):
  monkeypatch.setattr(sync, 'BLOB_BYTES', 300)
  publisher = sync.Publisher(kv, FORM, 9)
  _publish(publisher, 0, 2)
  assert len(store.keys(kv, f'weights/{FORM}/2-1/0/')) == 3
  _same(sync.Subscriber(kv, FORM).poll()[1], 2)


def test_a_chain_that_grew_large_ends_in_a_base(kv):
  rng = np.random.default_rng(0)
  publisher = sync.Publisher(kv, FORM, 1000, chain_ratio=0.5)
  kinds = []
  for version in range(8):
    flat = {'w': rng.integers(0, 2**16, 5000, np.uint16)}  # all changes
    kinds.append(publisher.publish(flat, version).kind)
  assert kinds == ['base', 'delta'] * 4


def _cut(version):
  """Two tensors, one of them in four pieces of rows."""
  rng = np.random.default_rng(5)
  words = rng.integers(0, 2**16, (8, 40), np.uint16)
  words[:, version] += np.uint16(1 + version)
  array = words.view(ml_dtypes.bfloat16)
  flat = {f'w@{n}:{n + 2},0:40': array[n : n + 2] for n in (0, 2, 4, 6)}
  return flat | {'a': array[0].copy()}, {'w': (8, 40)}


def _last_rows(piece):
  name, box = pieces.parse(piece)
  return name == 'w' and box[0][0] >= 4


def test_a_reader_of_a_part_reads_only_its_part(kv, monkeypatch):
  """What it does not want may be missing, in the base and in the deltas."""
  monkeypatch.setattr(sync, 'BLOB_BYTES', 400)  # two blobs
  publisher = sync.Publisher(kv, FORM, 3)
  whole, part = sync.Subscriber(kv, FORM), None
  for version in range(5):
    flat, shapes = _cut(version)
    publisher.publish(flat, version, shapes=shapes)
    prefix = versions.prefix_of(FORM, version, publisher.fence)
    if version % 3 == 0:
      store.write(kv, f'{prefix}base/w/c/0/0', None)
    else:
      store.write(kv, f'{prefix}0/0', None)
    part = part or sync.Subscriber(kv, FORM, wanted=_last_rows)
    number, got = part.poll()
    assert number == version
    assert set(got) == {'w@4:6,0:40', 'w@6:8,0:40'}
    assert all(got[name].tobytes() == flat[name].tobytes() for name in got)
    with pytest.raises(store.BrokenWeights):
      whole.poll()
  assert part.fetch(4).keys() == part.fetch(3).keys() == got.keys()
  late = sync.Subscriber(kv, FORM, wanted=_last_rows).poll()
  assert late[0] == 4 and late[1]['w@4:6,0:40'].tobytes() == (
    flat['w@4:6,0:40'].tobytes()
  )


def test_damage_in_a_part_is_found(kv, monkeypatch):
  monkeypatch.setattr(sync, 'BLOB_BYTES', 400)
  publisher = sync.Publisher(kv, FORM, 9)
  part = sync.Subscriber(kv, FORM, wanted=_last_rows)
  for version in range(2):
    flat, shapes = _cut(version)
    publisher.publish(flat, version, shapes=shapes)
    if version:
      prefix = versions.prefix_of(FORM, version, publisher.fence)
      _damage(kv, f'{prefix}0/1')
      with pytest.raises(store.BrokenWeights, match='wrong digest'):
        part.poll()
    else:
      part.poll()
  assert part.version == 0


def test_parts_that_cannot_be_are_refused(kv, tmp_path):
  sync.Publisher(kv, FORM, 9).publish(_weights(0), 0)
  nothing = sync.Subscriber(kv, FORM, wanted=lambda piece: False)
  with pytest.raises(ValueError, match='none of the 3 pieces'):
    nothing.poll()
  with pytest.raises(ValueError, match='directory'):
    sync.Subscriber(kv, FORM, wanted=_last_rows, directory=tmp_path)
  # One blob has all: what is read is more than what is given.
  some = sync.Subscriber(kv, FORM, wanted=lambda piece: piece == 'a')
  assert set(some.poll()[1]) == {'a'}
