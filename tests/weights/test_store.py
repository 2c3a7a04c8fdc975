"""Opening, compare-and-swap, HEAD, upkeep; and what is said when it fails."""

from __future__ import annotations

import errno
import json
import time

import ml_dtypes
import numpy as np
import pytest

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


def _weights(version):
  rng = np.random.default_rng(version // 3)  # some tensors rest for a while
  moving = np.random.default_rng(version)
  return {
    'embed': moving.standard_normal((6, 4)).astype(ml_dtypes.bfloat16),
    'layers/x/q': rng.standard_normal((2, 3, 5)).astype(ml_dtypes.bfloat16),
    'layers/x/bias': np.full((2, 3), -0.0, np.float32),
    'layers/packed': rng.integers(0, 256, 7).astype(np.uint8),
    'layers/none': np.zeros((0, 4), ml_dtypes.float8_e4m3fn),
  }


def _same(got, version):
  want = _weights(version)
  assert sorted(got) == sorted(want)
  for name, array in want.items():
    assert got[name].dtype == array.dtype and got[name].shape == array.shape
    assert got[name].tobytes() == array.tobytes(), name


def _publish(kv, count, base_every=4):
  publisher = sync.Publisher(kv, FORM, base_every)
  first = publisher.next_version or 0
  for version in range(first, first + count):
    publisher.publish(_weights(version), version)
  return publisher


@pytest.mark.parametrize(
  'url, message',
  [
    ('fil:///tmp/x', 'did you mean file://'),
    ('http://host/x', 'known: memory://, file://, gs://, s3://'),
    ('/tmp/x', 'file:///absolute/path'),
    ('', 'known'),
    ('file://relative/x', 'absolute'),
  ],
)
def test_a_wrong_url_says_what_is_right(url, message):
  with pytest.raises(ValueError, match=message):
    store.open_exchange(url)


def test_memory_is_private_unless_named():
  first, second = (store.open_exchange('memory://') for _ in range(2))
  store.write(first, 'k', b'1')
  assert store.read(second, 'k')[0] is None
  first, second = (store.open_exchange('memory://test_store') for _ in range(2))
  store.write(first, 'k', b'1')
  assert store.read(second, 'k')[0] == b'1'


def test_opening_leaves_nothing_behind(kv):
  assert kv.list().result() == []


def test_a_store_without_compare_and_swap_is_refused(monkeypatch):
  write = store.write

  def careless(kv, key, value, *, if_equal=None):
    del if_equal
    return write(kv, key, value)

  monkeypatch.setattr(store, 'write', careless)
  with pytest.raises(ValueError, match='stale compare-and-swap'):
    store.open_exchange('memory://')
  store.open_exchange('memory://', writable=False)


def test_a_place_that_cannot_be_written(tmp_path):
  (tmp_path / 'file').write_text('in the way')
  with pytest.raises((ValueError, OSError), match='exchange failed'):
    store.open_exchange(f'file://{tmp_path}/file')


class _Answer:
  def __init__(self, error):
    self.error = error

  def result(self, timeout):
    del timeout
    raise self.error


@pytest.mark.parametrize(
  'error, kind, number',
  [
    (
      ValueError(
        'RESOURCE_EXHAUSTED: Failed writing: "/x/a.__lock": Failed to write'
        " 134464 bytes to file 4: No space left on device [os_error_code='28']"
      ),
      OSError,
      errno.ENOSPC,
    ),
    (
      ValueError(
        'PERMISSION_DENIED: Failed to open: "/x/a.__lock": Read-only file'
        " system [os_error_code='30']"
      ),
      PermissionError,
      errno.EACCES,
    ),
    (ValueError('UNAVAILABLE: 503'), OSError, errno.EAGAIN),
    (ValueError('DATA_LOSS: x'), ValueError, None),
    (TimeoutError(), TimeoutError, None),
  ],
)
def test_the_drivers_errors_become_plain(error, kind, number):
  with pytest.raises(kind) as caught:
    store.await_result(_Answer(error), 'the/key', 'writing')
  assert 'the/key' in str(caught.value)
  assert getattr(caught.value, 'errno', None) == number


def test_keys_are_create_only(kv):
  store.create(kv, {'a': b'1', 'b': b'2'})
  store.create(kv, {'a': b'1'})
  with pytest.raises(ValueError, match='immutable'):
    store.create(kv, {'c': b'3', 'b': b'other'})
  assert store.read(kv, 'b')[0] == b'2'


def test_waiting_is_limited_and_names_the_key(kv):
  with pytest.raises(TimeoutError, match='some/key .*for a test'):
    store.wait_for(kv, 'some/key', wait_s=0.02, why='for a test')


def test_forms_have_their_own_fence_and_version(kv):
  first = sync.Publisher(kv, 'bf16', 4)
  other = sync.Publisher(kv, 'nvfp4', 4)
  first.publish(_weights(0), 0)
  other.publish(_weights(5), 5)
  first.publish(_weights(1), 1)
  assert store.read_head(kv, 'bf16').ref.version == 1
  assert store.read_head(kv, 'nvfp4').ref.version == 5
  assert store.read_head(kv, 'int4') == store.Head(0, None)


def test_head_never_moves_back(kv):
  publisher = _publish(kv, 3)
  head = store.read_head(kv, FORM).ref
  with pytest.raises(ValueError, match='not newer than HEAD'):
    store.move_head(kv, FORM, store.Ref(1, publisher.fence, 'x'))
  store.move_head(kv, FORM, head)  # an answer that was lost: no error
  assert store.read_head(kv, FORM).ref == head


def test_a_newer_format_is_refused(kv):
  for other, remedy in (
    (store.FORMAT + 1, 'update it'),
    (store.FORMAT - 1, 'begin another'),
  ):
    store.write(kv, 'HEAD', b'{"format": %d, "forms": {}}' % other)
    with pytest.raises(ValueError, match=f'format {other}.*{remedy}'):
      sync.Publisher(kv, FORM, 4)
  store.write(kv, 'HEAD', b'{"format": 1, "fo')
  with pytest.raises(ValueError, match='not JSON'):
    sync.Subscriber(kv, FORM).poll()


def test_every_version_can_be_fetched(kv):
  _publish(kv, 10)
  for version in range(10):
    number, got = versions.fetch(kv, FORM, version)
    assert number == version
    _same(got, version)
  assert versions.fetch(kv, FORM)[0] == 9
  with pytest.raises(ValueError, match='version 10 .*newest is 9'):
    versions.fetch(kv, FORM, 10)
  with pytest.raises(ValueError, match="no published version of 'int4'"):
    versions.fetch(kv, 'int4')


def test_a_base_is_plain_zarr(kv):
  """Metadata and layout as any zarr reader expects them, no own codec."""
  _publish(kv, 1)
  base = versions.prefix_of(FORM, 0, 1) + 'base/'
  group = json.loads(store.read(kv, base + 'zarr.json')[0])
  assert group['node_type'] == 'group' and group['zarr_format'] == 3
  assert store.read(kv, base + 'layers/x/zarr.json')[0]
  array = json.loads(store.read(kv, base + 'embed/zarr.json')[0])
  assert array['data_type'] == 'uint16'  # zarr has no bfloat16
  assert array['attributes'] == {'dtype': 'bfloat16'}
  assert [codec['name'] for codec in array['codecs']] == [
    'bytes',
    'zstd',
    'crc32c',
  ]


def test_listing_says_what_is_there_and_who_runs_it(kv):
  _publish(kv, 6)
  _publish(kv, 1)
  store.create(kv, {f'weights/{FORM}/9-2/0/0': b'left over'})
  reader = upkeep.Reader('lab', 'p1', FORM, 5, (), time.time())
  upkeep.announce(kv, reader, {'groups': 3})
  entries = upkeep.listing(kv)
  assert [(e.version, e.fence, e.kind, e.live) for e in entries] == [
    (0, 1, 'base', True),
    (1, 1, 'delta', True),
    (2, 1, 'delta', True),
    (3, 1, 'delta', True),
    (4, 1, 'base', True),
    (5, 1, 'delta', True),
    (6, 2, 'base', True),
    (9, 2, 'incomplete', False),
  ]
  assert [e.version for e in entries if e.head] == [6]
  assert {e.version: e.readers for e in entries if e.readers} == {
    5: ('lab/p1',)
  }
  assert all(e.bytes > 0 and e.ratio > 0 for e in entries if e.live)


def test_collect_keeps_what_a_living_reader_needs(kv):
  _publish(kv, 14)  # bases at 0, 4, 8, 12
  now = [0.0]
  watch = upkeep.Watch(timeout_s=10.0, clock=lambda: now[0])

  def say(process, version, pinned=(), form=FORM):
    reader = upkeep.Reader('a', process, form, version, pinned, now[0])
    upkeep.announce(kv, reader)

  say('dead', 1)
  say('1', 9)
  say('other', 2, form='nvfp4')
  assert upkeep.collect(kv, FORM, watch) == []  # who knows who is alive
  now[0] = 11.0
  say('1', 9)
  gone = upkeep.collect(kv, FORM, watch)
  assert gone == [(version, 1) for version in range(8)]
  report = upkeep.verify(kv, FORM)
  assert report.versions == tuple(range(8, 14)) and not report.problems
  say('1', 13)
  assert upkeep.collect(kv, FORM, watch, keep=4) == []
  say('1', 13, pinned=(8,))
  assert upkeep.collect(kv, FORM, watch) == []  # 8 is pinned
  say('1', 13, pinned=(9,))
  assert upkeep.collect(kv, FORM, watch) == []
  say('1', 13)
  assert upkeep.collect(kv, FORM, watch) == [(v, 1) for v in range(8, 12)]
  assert not any('/8-1/' in key for key in store.keys(kv, 'weights/'))
  _same(versions.fetch(kv, FORM, 13)[1], 13)
  with pytest.raises(ValueError, match='oldest 12'):
    versions.fetch(kv, FORM, 9)


@pytest.mark.parametrize('skew', [-1e6, 1e6])
def test_a_readers_clock_does_not_decide_whether_it_lives(kv, skew):
  _publish(kv, 6)
  now = [1e9]
  watch = upkeep.Watch(timeout_s=10.0, clock=lambda: now[0])
  for step in range(4):
    now[0] += 9.0
    reader = upkeep.Reader('a', '1', FORM, 2, (), now[0] + skew + step)
    upkeep.announce(kv, reader)
    assert upkeep.collect(kv, FORM, watch) == []
  now[0] += 11.0
  assert upkeep.collect(kv, FORM, watch) == [(v, 1) for v in range(4)]


def test_subscribers_announce_what_they_hold_and_are_forgotten(kv):
  _publish(kv, 6)
  now = [0.0]
  watch = upkeep.Watch(timeout_s=10.0, clock=lambda: now[0])
  reader = sync.Subscriber(kv, FORM, reader=('lab', 'p1'))
  idle = sync.Subscriber(kv, FORM, reader=('lab', 'p2'))
  reader.poll()
  idle.poll()
  _publish(kv, 4)
  assert [r.version for r in upkeep.readers(kv)] == [5, 5]
  assert upkeep.collect(kv, FORM, watch) == [(v, 1) for v in range(4)]
  reader.poll()
  idle.close()
  assert [r.version for r in upkeep.readers(kv)] == [9]
  assert upkeep.collect(kv, FORM, watch) == [(4, 1), (5, 1)]
  for now[0] in (11.0, 100.0):
    watch.alive(kv)
  assert upkeep.readers(kv) == []


def test_what_is_about_to_be_read_is_announced_first(kv, monkeypatch):
  """A collection between the announcement and the end of the read."""
  _publish(kv, 6)
  watch = upkeep.Watch()
  reader = sync.Subscriber(kv, FORM, reader=('lab', 'slow'))
  lineage = versions.lineage

  def slow(*arguments):
    monkeypatch.undo()
    _publish(kv, 9)
    upkeep.collect(kv, FORM, watch)
    return lineage(*arguments)

  monkeypatch.setattr(versions, 'lineage', slow)
  number, got = reader.poll()
  assert number == 5
  _same(got, 5)


def test_a_version_that_went_while_it_was_read_leads_to_the_next(
  kv, monkeypatch
):
  _publish(kv, 6)
  reader = sync.Subscriber(kv, FORM)  # it does not announce itself
  lineage = versions.lineage

  def slow(*arguments):
    monkeypatch.undo()
    _publish(kv, 9)
    upkeep.collect(kv, FORM, upkeep.Watch())
    return lineage(*arguments)

  monkeypatch.setattr(versions, 'lineage', slow)
  number, got = reader.poll()
  assert number == 14
  _same(got, 14)


def test_nothing_is_left_of_what_was_collected(tmp_path):
  kv = store.open_exchange(f'file://{tmp_path}/exchange')
  for _ in range(3):
    _publish(kv, 5)
    upkeep.collect(kv, FORM, upkeep.Watch())
  root = tmp_path / 'exchange' / 'weights' / FORM
  kept = {f'{v}-{f}' for v, f in _directories(kv)}
  assert {path.name for path in root.iterdir()} == kept
  assert len(kept) == 1


def _directories(kv):
  return {(e.version, e.fence) for e in upkeep.listing(kv)}


def test_collect_takes_left_overs_but_not_work_in_progress(kv):
  _publish(kv, 2)
  store.create(kv, {f'weights/{FORM}/2-1/0/0': b'of a publisher that died'})
  _publish(kv, 1)
  store.create(kv, {f'weights/{FORM}/3-2/0/0': b'being written now'})
  gone = upkeep.collect(kv, FORM, upkeep.Watch())
  assert (2, 1) in gone and (3, 2) not in gone


def test_verify_names_what_is_broken(kv):
  _publish(kv, 10)
  assert upkeep.verify(kv, FORM).versions == tuple(range(10))
  key = f'weights/{FORM}/5-1/0/0'
  blob = bytearray(store.read(kv, key)[0])
  blob[-20] ^= 4
  store.write(kv, key, bytes(blob))
  report = upkeep.verify(kv, FORM)
  assert report.versions == (0, 1, 2, 3, 4, 8, 9)
  assert len(report.problems) == 3 and key in report.problems[0]
  store.write(kv, f'weights/{FORM}/3-1/manifest', None)
  report = upkeep.verify(kv, FORM)
  assert report.versions == (4, 8, 9)  # a base at 4: 3 may have been collected
  store.write(kv, f'weights/{FORM}/7-1/manifest', b'{}')
  assert 'damaged' in upkeep.verify(kv, FORM).problems[0]


def test_a_damaged_manifest_stops_neither_publisher_nor_collection(kv):
  _publish(kv, 6)
  store.write(kv, f'weights/{FORM}/5-1/manifest', b'{}')
  _publish(kv, 2)
  _same(sync.Subscriber(kv, FORM).poll()[1], 7)
  assert upkeep.collect(kv, FORM, upkeep.Watch(), keep=6) == [
    (v, 1) for v in range(6)
  ]
  assert upkeep.verify(kv, FORM).versions == (6, 7)


def test_a_flipped_bit_of_head_is_noticed(kv):
  _publish(kv, 2)
  whole = store.read(kv, 'HEAD')[0]
  for at in range(len(whole)):
    bent = bytearray(whole)
    bent[at] ^= 1 << at % 7
    store.write(kv, 'HEAD', bytes(bent))
    reader = sync.Subscriber(kv, FORM)
    try:
      number, got = reader.poll()
    except ValueError:
      continue
    assert number == 1 and whole[at : at + 1] in b'"format'
    _same(got, 1)
