"""Leases and groups on the exchange: one commit an id, whoever dies when."""

import dataclasses
import json
import subprocess
import sys
import textwrap

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest
import tensorstore as ts

from composer import groups
from composer import leases
from composer import wire
from composer.records import Group
from composer.records import Segment
from composer.records import Trajectory
from composer.records import Turn
from composer.records import group_id
from composer.weights import store

GID = group_id('task', 0, 0)


def memory():
  return ts.KvStore.open('memory://', context=ts.Context()).result()


def on_disk(path):
  context = ts.Context({'file_io_sync': False})
  return ts.KvStore.open(f'file://{path}/', context=context).result()


@pytest.fixture(params=['memory', 'file'])
def kv(request, tmp_path):
  return memory() if request.param == 'memory' else on_disk(tmp_path)


def make_segment(length=5, layers=2, k=2, seed=0):
  rng = np.random.default_rng(seed)
  sampled = rng.random(length) < 0.5
  return Segment(
    tokens=rng.integers(0, 700, length, dtype=np.int32),
    sampled=sampled,
    logprobs=np.where(sampled, -rng.random(length), 0).astype(np.float32),
    temperatures=np.ones(length, np.float32),
    versions=np.where(sampled, 7, -1).astype(np.int32),
    experts=rng.integers(-1, 8, (length, layers, k), dtype=np.int16),
    auditable=sampled & (rng.random(length) < 0.5),
    stop_reason='finished',
    parent=-1,
  )


def make_group(handle, produced_index=1, rollouts=2, reward=0.1 + 0.2):
  trajectories = tuple(
    Trajectory(
      task_id='task',
      group_id=handle.group_id,
      index=i,
      segments=(make_segment(seed=i), make_segment(3, seed=i + 9)),
      turns=(Turn('call', 'edit L1 <', 0, 2, 4, 0.25),),
      reward=reward,
      reward_parts={'tests': 1.0, 'effort': -0.03},
      stop_reason='finished',
      provenance={'cluster': handle.cluster, 'seed': i, 'isolation': ['user']},
      timings={'tools': 0.125},
    )
    for i in range(rollouts)
  )
  return Group(
    group_id=handle.group_id,
    task_id='task',
    draw=handle.draw,
    trajectories=trajectories,
    cluster=handle.cluster,
    incarnation=handle.incarnation,
    produced_index=produced_index,
  )


def take(kv, who='a', now=0.0, gid=GID, draw=0, seconds=10.0):
  return leases.lease(kv, gid, draw, 'local', who, seconds, now)


def assert_same(got, want):
  """Field by field, arrays by bits."""
  assert type(got) is type(want)
  if dataclasses.is_dataclass(want):
    for field in dataclasses.fields(want):
      assert_same(getattr(got, field.name), getattr(want, field.name))
  elif isinstance(want, np.ndarray):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()
  elif isinstance(want, tuple):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
      assert_same(a, b)
  else:
    assert got == want


# --- Segments as bytes -------------------------------------------------------


@st.composite
def segments(draw):
  length = draw(st.integers(0, 9))
  shape = length, draw(st.integers(0, 3)), draw(st.integers(1, 3))

  def array(dtype, elements, shape=(length,)):
    size = int(np.prod(shape))
    values = draw(st.lists(elements, min_size=size, max_size=size))
    return np.array(values, dtype).reshape(shape)

  i32 = st.integers(-(2**31), 2**31 - 1)
  f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
  kept = {}
  if draw(st.booleans()):
    counts = draw(st.lists(st.integers(0, 3), min_size=length, max_size=length))
    kept['kept_offsets'] = np.cumsum([0, *counts], dtype=np.int32)
    kept['kept_ids'] = array(np.int32, i32, (sum(counts),))
  return Segment(
    tokens=array(np.int32, i32),
    sampled=array(bool, st.booleans()),
    logprobs=array(np.float32, f32),
    temperatures=array(np.float32, st.floats(width=32)),
    versions=array(np.int32, i32),
    experts=array(np.int16, st.integers(-(2**15), 2**15 - 1), shape),
    auditable=array(bool, st.booleans()),
    stop_reason=draw(st.text()),
    parent=draw(st.integers(-1, 9)),
    **kept,
  )


@given(segments())
@settings(max_examples=60, deadline=None)
def test_segment_round_trip_is_exact(segment):
  blob = wire.encode_segment(segment)
  assert_same(wire.decode_segment(blob), segment)
  assert wire.encode_segment(segment) == blob


@given(segments(), st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_segment_is_refused(segment, data):
  blob = wire.encode_segment(segment)
  cut = data.draw(st.integers(0, len(blob) - 1))
  with pytest.raises(ValueError):
    wire.decode_segment(blob[:cut])
  with pytest.raises(ValueError):
    wire.decode_segment(blob + b'\0')
  flipped = bytearray(blob)
  flipped[cut] ^= 1 << data.draw(st.integers(0, 7))
  try:
    got = wire.decode_segment(bytes(flipped))
  except ValueError:
    return
  assert_same(got, segment)  # a bit of the frame header that says nothing


def test_strided_arrays_travel_by_value():
  segment = make_segment(6)
  wide = np.repeat(segment.experts, 2, axis=0)
  strided = dataclasses.replace(segment, experts=wide[::2])
  assert_same(wire.decode_segment(wire.encode_segment(strided)), segment)


def test_nothing_is_cast_silently():
  segment = make_segment()
  wrong = dataclasses.replace(
    segment, versions=segment.versions.astype(np.int64)
  )
  with pytest.raises(ValueError, match=r'Segment\.versions is int64.*int32'):
    wire.encode_segment(wrong)


def test_group_round_trip(kv):
  handle = take(kv)
  group = make_group(handle)
  item = groups.commit(kv, handle, group)
  assert_same(groups.read_group(kv, item), group)
  assert groups.committed(kv) == [item]


def test_group_without_rollouts_travels(kv):
  # What is left of a group whose machines never started.
  handle = take(kv)
  group = make_group(handle, rollouts=0)
  item = groups.commit(kv, handle, group)
  assert groups.read_group(kv, item) == group


def test_unwritable_group_leaves_nothing(kv):
  handle = take(kv)
  with pytest.raises(ValueError, match='reward of rollout 0'):
    groups.commit(kv, handle, make_group(handle, reward=float('nan')))
  assert store.keys(kv, 'groups/') == []
  groups.commit(kv, handle, make_group(handle))


@pytest.mark.parametrize('damage', ['gone', 'flipped', 'swapped'])
def test_damaged_group_is_refused(kv, damage):
  handle = take(kv)
  item = groups.commit(kv, handle, make_group(handle))
  key = item.path + '1-0'
  value = store.read(kv, key)[0]
  flipped = bytes([*value[:-1], value[-1] ^ 1])
  other = store.read(kv, item.path + '0-0')[0]
  new = {'gone': None, 'flipped': flipped, 'swapped': other}[damage]
  store.write(kv, key, new)
  with pytest.raises(ValueError, match='missing|damaged'):
    groups.read_group(kv, item)


# --- Leases ------------------------------------------------------------------


def test_lease_is_exclusive_until_it_expires(kv):
  first = take(kv, 'a', now=0.0)
  assert first is not None and not first.taken_over
  assert take(kv, 'b', now=9.9) is None
  second = take(kv, 'b', now=10.0)
  assert second is not None and second.taken_from == 'local/a'


def test_renewed_lease_is_not_taken_over(kv):
  handle = leases.renew(kv, take(kv, now=0.0), 10.0, now=8.0)
  assert handle.until == 18.0
  assert take(kv, 'b', now=12.0) is None
  assert take(kv, 'b', now=18.0).taken_over


def test_zombie_is_refused_and_leaves_nothing(kv):
  zombie = take(kv, 'a', now=0.0)
  heir = take(kv, 'b', now=11.0)
  with pytest.raises(leases.LeaseLost, match='held by local/b'):
    leases.renew(kv, zombie, 10.0, now=11.5)
  with pytest.raises(leases.LeaseLost):
    groups.commit(kv, zombie, make_group(zombie))
  assert store.keys(kv, 'groups/') == []
  item = groups.commit(kv, heir, make_group(heir))
  with pytest.raises(leases.LeaseLost):
    groups.commit(kv, zombie, make_group(zombie))
  assert groups.committed(kv) == [item]
  assert {
    key.rpartition('/')[0] + '/' for key in store.keys(kv, 'groups/')
  } == {item.path}


def test_lease_lost_while_the_group_is_written(kv, monkeypatch):
  """The window between the first check and the swap."""
  zombie = take(kv, 'a', now=0.0)
  heir = []
  create = store.create

  def slow(kv, objects):
    create(kv, objects)
    if not heir:
      heir.append(take(kv, 'b', now=11.0))

  monkeypatch.setattr(store, 'create', slow)
  with pytest.raises(leases.LeaseLost):
    groups.commit(kv, zombie, make_group(zombie))
  assert store.keys(kv, 'groups/') == []
  groups.commit(kv, heir[0], make_group(heir[0]))
  assert len(groups.committed(kv)) == 1


def test_killed_before_the_swap_is_not_committed(kv, monkeypatch):
  dead = take(kv, 'dead', now=0.0)

  def killed(*arguments):
    raise SystemExit

  with monkeypatch.context() as patch:
    patch.setattr(leases, 'swap', killed)
    with pytest.raises(SystemExit):
      groups.commit(kv, dead, make_group(dead))
  left = store.keys(kv, 'groups/')
  assert any(key.endswith('/manifest') for key in left)
  assert groups.committed(kv) == [] and groups.produced(kv) == 0
  heir = take(kv, 'heir', now=11.0)
  item = groups.commit(kv, heir, make_group(heir))
  assert groups.committed(kv) == [item], 'its objects stand beside the dead one'
  assert groups.produced(kv) == 1


def test_second_commit_is_refused_and_the_first_stays(kv):
  handle = take(kv)
  item = groups.commit(kv, handle, make_group(handle))
  with pytest.raises(leases.LeaseLost, match='committed already'):
    groups.commit(kv, handle, make_group(handle, produced_index=2))
  assert groups.committed(kv) == [item]
  assert_same(groups.read_group(kv, item), make_group(handle))
  assert take(kv, 'b', now=1e9) is None, (
    'a committed draw is never rolled again'
  )


def test_holder_keeps_the_lease_when_its_own_renewal_came_between(
  kv, monkeypatch
):
  handle = take(kv)
  write, renewed = store.write, []

  def late(kv, key, value, **options):
    if value and b'"committed"' in value and not renewed:
      renewed.append(True)
      leases.renew(kv, handle, 10.0, now=1.0)
    return write(kv, key, value, **options)

  monkeypatch.setattr(store, 'write', late)
  groups.commit(kv, handle, make_group(handle))
  assert renewed and len(groups.committed(kv)) == 1


def test_lost_answer_of_the_swap_is_recognised(kv, monkeypatch):
  handle = take(kv)
  write, lost = store.write, []

  def forgetful(kv, key, value, **options):
    generation = write(kv, key, value, **options)
    if value and b'"committed"' in value and not lost:
      lost.append(True)
      return b''
    return generation

  monkeypatch.setattr(store, 'write', forgetful)
  item = groups.commit(kv, handle, make_group(handle))
  assert lost and groups.committed(kv) == [item]


def test_failing_exchange_keeps_the_lease(kv, monkeypatch):
  handle = take(kv)

  def full(key):
    if key.endswith('manifest'):
      raise OSError(28, 'no space left')

  with monkeypatch.context() as patch:
    patch.setattr(store, 'before_write', full)
    with pytest.raises(OSError, match='no space left'):
      groups.commit(kv, handle, make_group(handle))
  assert groups.committed(kv) == []
  groups.commit(kv, handle, make_group(handle))
  assert len(groups.committed(kv)) == 1


def test_commit_checks_whose_group_it_is(kv):
  handle = take(kv)
  other = dataclasses.replace(make_group(handle), incarnation='b')
  with pytest.raises(ValueError, match=r'Group\.incarnation'):
    groups.commit(kv, handle, other)
  with pytest.raises(ValueError, match='counts from 1'):
    groups.commit(kv, handle, make_group(handle, produced_index=0))


def test_release_frees_at_once(kv):
  handle = take(kv)
  assert leases.release(kv, handle)
  assert not leases.release(kv, handle)
  again = take(kv, 'b', now=1.0)
  assert again is not None and not again.taken_over


def test_restart_frees_the_draws_of_the_life_before(kv):
  handles = [take(kv, 'old', gid=f'g{i}', draw=i) for i in range(4)]
  groups.commit(kv, handles[0], make_group(handles[0]))
  mine = take(kv, 'new', gid='g9', draw=9)
  other = leases.lease(kv, 'g8', 8, 'elsewhere', 'old', 10.0, 0.0)
  assert leases.release_cluster(kv, 'local', 'new') == 3
  assert leases.release_cluster(kv, 'local', 'new') == 0
  assert take(kv, 'new', now=1.0, gid='g1', draw=1) is not None
  leases.renew(kv, mine, 10.0, now=1.0)
  leases.renew(kv, other, 10.0, now=1.0)
  with pytest.raises(leases.LeaseLost):
    groups.commit(kv, handles[1], make_group(handles[1]))
  assert [item.draw for item in groups.committed(kv)] == [0]


@pytest.mark.parametrize('name', ['', 'a/b', '..', 'a b', 'x.'])
def test_names_that_do_not_fit_into_a_key(kv, name):
  with pytest.raises(ValueError, match='cannot name'):
    leases.lease(kv, GID, 0, name, 'a', 1.0, 0.0)


# --- The book, admission, deletion -------------------------------------------


def gid_of(draw):
  return group_id('task', 0, draw)


def book(kv, who, clock):
  return leases.LeaseBook(kv, 'local', who, 10.0, lambda: clock[0])


def test_book_claims_in_order_and_respects_the_limit(kv):
  clock = [0.0]
  a, b = book(kv, 'a', clock), book(kv, 'b', clock)
  assert leases.admission_limit(0, 0, 2) == 2
  assert leases.admission_limit(5, 2, 8) == 29
  draws = [a.claim(3, gid_of).draw, b.claim(3, gid_of).draw]
  assert draws == [0, 1]
  handle = a.claim(3, gid_of)
  assert handle.draw == 2
  assert a.claim(3, gid_of) is None and b.claim(3, gid_of) is None
  groups.commit(kv, handle, make_group(handle))
  # Committed is not consumed: only the trainer's verdict returns the slot.
  assert b.claim(3, gid_of) is None
  assert b.claim(4, gid_of).draw == 3


def test_book_takes_over_what_expired_and_never_what_is_committed(kv):
  clock = [0.0]
  dead, alive = book(kv, 'dead', clock), book(kv, 'alive', clock)
  first, second = dead.claim(2, gid_of), dead.claim(2, gid_of)
  groups.commit(kv, second, make_group(second))
  assert alive.claim(2, gid_of) is None
  clock[0] = 10.0
  handle = alive.claim(2, gid_of)
  assert handle.draw == first.draw and handle.taken_from == 'local/dead'
  clock[0] = 1e6
  assert alive.claim(2, gid_of).draw == 0  # its own, long expired
  assert dead.claim(1, gid_of) is None


def test_book_of_a_late_joiner_skips_what_is_done(kv):
  clock = [0.0]
  a = book(kv, 'a', clock)
  for i in range(150):
    handle = a.claim(1000, gid_of)
    assert handle.draw == i
    groups.commit(kv, handle, make_group(handle, i + 1, rollouts=0))
  assert book(kv, 'b', clock).claim(1000, gid_of).draw == 150


def test_book_reads_only_what_may_have_changed(kv, monkeypatch):
  clock = [0.0]
  a = book(kv, 'a', clock)
  for i in range(3):
    handle = a.claim(8, gid_of)
    groups.commit(kv, handle, make_group(handle, i + 1, rollouts=0))
  for _ in range(5):
    a.claim(8, gid_of)
  asked = []
  read_many = leases.read_many

  def counted(kv, keys):
    keys = list(keys)
    asked.extend(keys)
    return read_many(kv, keys)

  monkeypatch.setattr(leases, 'read_many', counted)
  assert a.claim(8, gid_of) is None
  assert asked == []
  clock[0] = 10.0
  assert a.claim(8, gid_of).draw == 3
  assert len(asked) == 8


def test_released_draw_is_claimed_again(kv):
  a = book(kv, 'a', [0.0])
  handle = a.claim(1, gid_of)
  leases.release(kv, handle)
  assert a.claim(1, gid_of) is None
  a.forget(handle.draw)
  assert a.claim(1, gid_of).draw == 0


def test_deletion_takes_orphans_along_and_keeps_the_lease(kv, tmp_path):
  dead = take(kv, 'dead', now=0.0)
  # Killed after some objects: nothing but a path that no lease names.
  orphan = f'groups/local/dead/{GID}.{dead.token}/0-0'
  store.write(kv, orphan, b'x')
  heir = take(kv, 'heir', now=11.0)
  groups.commit(kv, heir, make_group(heir))
  other = take(kv, 'heir', gid='other', draw=1)
  kept = groups.commit(kv, other, make_group(other, 2))
  assert groups.delete_groups(kv, [GID, 'never']) == 1
  assert groups.committed(kv) == [kept]
  assert all(key.startswith(kept.path) for key in store.keys(kv, 'groups/'))
  assert groups.delete_groups(kv, [GID]) == 0
  assert take(kv, 'x', now=1e9) is None
  assert groups.produced(kv) == 2
  left = {path.name for path in tmp_path.glob('groups/local/*/*')}
  assert left <= {f'other.{other.token}'}, 'listing would walk empty folders'


def test_listing_with_a_cache_sees_new_and_deleted_groups(kv):
  cache = groups.Cache()
  assert groups.committed(kv, cache) == []
  items = []
  for i in range(3):
    handle = take(kv, gid=f'g{i}', draw=2 - i)
    items.append(groups.commit(kv, handle, make_group(handle, i + 1)))
    assert groups.committed(kv, cache) == sorted(items, key=lambda x: x.draw)
  take(kv, gid='rolling', draw=7)
  groups.delete_groups(kv, ['g1'])
  assert groups.committed(kv, cache) == [items[2], items[0]]
  assert groups.committed(kv, cache) == groups.committed(kv)


# --- Counters ----------------------------------------------------------------


def test_produced_is_what_the_producers_counted(kv):
  assert groups.produced(kv) == 0
  beats = [('a', 3), ('b', 1)]
  for who, count in beats:
    groups.beat(kv, groups.Heartbeat('local', who, 4, count, 0, 1.0))
  assert groups.produced(kv) == 4
  # b died between a commit and its next heartbeat.
  handle = take(kv, 'b')
  groups.commit(kv, handle, make_group(handle, produced_index=2))
  cache = groups.Cache()
  assert groups.produced(kv, cache) == 5
  groups.beat(kv, groups.Heartbeat('local', 'b', 4, 2, 0, 2.0))
  assert groups.produced(kv, cache) == 5


def test_heartbeat_round_trip(kv):
  beat = groups.Heartbeat('eu.west', 'p1', None, 5, 16, 1.5, {'busy': 0.75})
  groups.beat(kv, beat, form='bf16')
  assert groups.heartbeats(kv) == [beat]
  newer = dataclasses.replace(beat, version=3, counters={})
  groups.beat(kv, newer)
  assert groups.heartbeats(kv) == [newer]


def test_cursor_round_trip(kv):
  assert groups.read_cursor(kv) == groups.Cursor()
  cursor = groups.Cursor(3, 7, ('x', 'y'), {'equal': ('z',)}, True)
  groups.write_cursor(kv, cursor)
  assert groups.read_cursor(kv) == cursor


# --- Everything at once ------------------------------------------------------

_STEPS = st.lists(
  st.tuples(
    st.sampled_from(['lease', 'renew', 'commit', 'release', 'wait', 'restart']),
    st.sampled_from('ab'),
    st.integers(0, 2),
  ),
  max_size=40,
)


@given(_STEPS)
@settings(max_examples=60, deadline=None)
def test_against_a_naive_model(steps):
  """Two holders, three draws, one clock: a dict says what must happen."""
  kv, now = memory(), 0.0
  held = {}  # draw -> (who, until) of the living lease
  done = {}  # draw -> who committed
  handles = {}  # (who, draw) -> the last handle it was given
  counts = dict.fromkeys('ab', 0)
  for action, who, draw in steps:
    handle = handles.get((who, draw))
    mine = held.get(draw, ('', 0))[0] == who and draw not in done
    if action == 'wait':
      now += 4.0
    elif action == 'lease':
      free = draw not in done and held.get(draw, ('', 0))[1] <= now
      got = take(kv, who, now, gid_of(draw), draw)
      assert (got is not None) == free
      if got is not None:
        assert got.taken_over == (draw in held)
        held[draw] = who, now + 10.0
        handles[who, draw] = got
    elif action == 'restart':
      freed = [
        d for d, (other, _) in held.items() if other != who and d not in done
      ]
      assert leases.release_cluster(kv, 'local', who) == len(freed)
      for d in freed:
        del held[d]
    elif handle is None:
      continue
    elif action == 'release':
      assert leases.release(kv, handle) == mine
      if mine:
        del held[draw]
    elif mine and action == 'renew':
      handles[who, draw] = leases.renew(kv, handle, 10.0, now)
      held[draw] = who, now + 10.0
    elif mine:
      counts[who] += 1
      groups.commit(kv, handle, make_group(handle, counts[who], rollouts=1))
      done[draw] = who
    else:
      with pytest.raises(leases.LeaseLost):
        if action == 'renew':
          leases.renew(kv, handle, 10.0, now)
        else:
          groups.commit(kv, handle, make_group(handle, counts[who] + 1))
    listed = {item.draw: item.incarnation for item in groups.committed(kv)}
    assert listed == done
  assert groups.produced(kv) == sum(counts.values()) == len(done)
  # Nothing of a refused commit stays.
  assert len(store.keys(kv, 'groups/')) == 3 * len(done)


_RACER = """
  import json, random, sys, time
  import tensorstore as ts
  from composer import groups, leases
  from composer.records import Group, group_id

  url, who, draws = sys.argv[1], sys.argv[2], int(sys.argv[3])
  context = ts.Context({'file_io_sync': False})
  kv = ts.KvStore.open(url, context=context).result()
  # So short that most leases are lost while their group is being written.
  book = leases.LeaseBook(kv, 'local', who, 0.004)
  won, lost, taken = [], 0, 0
  print('ready', flush=True)
  sys.stdin.readline()
  end = time.monotonic() + 120
  while len(groups.committed(kv)) < draws and time.monotonic() < end:
    handle = book.claim(draws, lambda draw: group_id('task', 0, draw))
    if handle is None:
      continue
    taken += handle.taken_over
    time.sleep(0.02 * random.random())
    group = Group(handle.group_id, 'task', handle.draw, (), 'local', who,
                  len(won) + 1)
    try:
      groups.commit(kv, handle, group)
      won.append(handle.group_id)
    except leases.LeaseLost:
      lost += 1
  print(json.dumps([won, lost, taken]))
"""


def test_racing_processes_never_both_commit(tmp_path):
  draws, url = 20, f'file://{tmp_path}/'
  racers = [
    subprocess.Popen(
      [sys.executable, '-c', textwrap.dedent(_RACER), url, who, str(draws)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
    )
    for who in ('a', 'b', 'c')
  ]
  try:
    for racer in racers:
      assert racer.stdout.readline() == 'ready\n'
    for racer in racers:
      racer.stdin.write('go\n')
      racer.stdin.flush()
    outcomes = [
      json.loads(racer.communicate(timeout=180)[0]) for racer in racers
    ]
  finally:
    for racer in racers:
      racer.kill()
      racer.communicate()
  won = [gid for ids, _, _ in outcomes for gid in ids]
  assert sorted(won) == sorted(gid_of(draw) for draw in range(draws))
  assert sum(taken for _, _, taken in outcomes) > 0, 'nothing was contested'
  kv = on_disk(tmp_path)
  items = groups.committed(kv)
  assert [item.draw for item in items] == list(range(draws))
  assert groups.produced(kv) == draws
  for item, (ids, _, _) in ((i, o) for i in items for o in outcomes):
    if item.group_id in ids:
      assert groups.read_group(kv, item).produced_index == item.produced_index
  paths = {key.rpartition('/')[0] + '/' for key in store.keys(kv, 'groups/')}
  assert paths == {item.path for item in items}, 'a refused commit left objects'
