"""The page pool against a model of it that remembers everything."""

import itertools

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from composer.inference import cache

BLOCK = 4


def routes(tokens):
  """A page's routes that tell which tokens they belong to."""
  return np.asarray(tokens, np.int16).reshape(BLOCK, 1, 1)


def publish(pool, version, tokens):
  """Computes and publishes all full pages of `tokens`; gives them, held."""
  tokens = np.asarray(tokens, np.int32)
  keys = cache.chain(version, tokens, BLOCK)
  found = pool.lookup(keys)
  pool.hold(found)
  pages = found + pool.allocate(len(keys) - len(found))
  for i in range(len(found), len(keys)):
    span = tokens[i * BLOCK : (i + 1) * BLOCK]
    pool.publish(pages[i], keys[i], routes(span))
  return pages


def lookup(pool, version, tokens):
  return pool.lookup(cache.chain(version, np.asarray(tokens, np.int32), BLOCK))


def test_chain_names_full_pages_by_version_and_whole_prefix():
  tokens = np.arange(11, dtype=np.int32)
  keys = cache.chain(3, tokens, BLOCK)
  assert len(keys) == 2
  assert keys == cache.chain(3, np.arange(8, dtype=np.int32), BLOCK)
  assert not set(keys) & set(cache.chain(4, tokens, BLOCK))
  other = tokens.copy()
  other[0] = 9
  changed = cache.chain(3, other, BLOCK)
  assert changed[0] != keys[0] and changed[1] != keys[1]
  (late,) = cache.chain(3, tokens[BLOCK:8], BLOCK, keys[0])
  assert late == keys[1]
  assert cache.chain(3, tokens[:3], BLOCK) == []


def test_scratch_is_never_given_out():
  pool = cache.PagePool(6)
  assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 5]
  assert pool.available == 0 and pool.held == 5


def test_published_pages_are_found_after_release_until_evicted():
  pool = cache.PagePool(5)
  first = publish(pool, 0, range(8))
  assert lookup(pool, 0, range(8)) == first  # already while it is held
  pool.release(first)
  assert pool.available == 4 and lookup(pool, 0, range(8)) == first
  assert [pool.experts(p)[0, 0, 0] for p in first] == [0, 4]
  assert lookup(pool, 0, [*range(4), 9, 9, 9, 9]) == first[:1]
  assert lookup(pool, 0, range(4, 8)) == []  # another place, other keys
  pool.allocate(2)
  assert lookup(pool, 0, range(8)) == first  # free pages go first
  pool.allocate(1)
  assert lookup(pool, 0, range(8)) == []  # its first page was evicted


def test_eviction_takes_the_least_recently_used():
  pool = cache.PagePool(4)
  pages = [publish(pool, 0, [i] * 4) for i in range(3)]
  for page in pages:
    pool.release(page)
  pool.hold(pages[0])
  pool.release(pages[0])  # used again: now the newest
  pool.allocate(1)
  found = [bool(lookup(pool, 0, [i] * 4)) for i in range(3)]
  assert found == [True, False, True]


def test_a_page_held_twice_is_freed_by_the_second_release():
  pool = cache.PagePool(3)
  (page,) = publish(pool, 0, range(4))
  pool.hold([page])
  pool.release([page])
  assert pool.held == 1
  pool.release([page])
  assert pool.held == 0 and lookup(pool, 0, range(4)) == [page]


def test_two_pages_of_one_key():
  """The first stays findable; the second is plain and freed at once."""
  pool = cache.PagePool(4)
  (key,) = cache.chain(0, np.arange(4, dtype=np.int32), BLOCK)
  a, b = pool.allocate(2)
  pool.publish(a, key, routes(range(4)))
  pool.publish(b, key, routes(range(4)))
  pool.release([b])
  assert pool.lookup([key]) == [a] and pool.held == 1
  with pytest.raises(KeyError):
    pool.experts(b)


def test_a_swap_forgets_other_versions_only():
  pool = cache.PagePool(8)
  idle, held = publish(pool, 0, range(4)), publish(pool, 0, range(10, 14))
  kept = publish(pool, 1, range(4))
  pool.release(idle)
  pool.release(kept)
  pool.drop_versions_but(1)
  assert lookup(pool, 0, range(4)) == lookup(pool, 0, range(10, 14)) == []
  assert lookup(pool, 1, range(4)) == kept
  assert pool.held == 1
  pool.release(held)
  assert pool.held == 0
  assert sorted(pool.allocate(7)) == list(range(1, 8))


operations = st.lists(
  st.tuples(
    st.sampled_from(['open', 'close', 'swap', 'grow']),
    st.integers(0, 5),
    st.integers(1, 4),
  ),
  max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(operations)
def test_random_use(steps):
  """No page is ever lost, held by two contexts of other tokens, or stale."""
  pool, version, live = cache.PagePool(12), 0, []
  content = {}  # page -> (version, prefix) that was written to it
  for what, pick, size in steps:
    if what == 'swap':
      version += 1
      pool.drop_versions_but(version)
    elif what == 'close' and live:
      pool.release(live.pop(pick % len(live)))
    elif what == 'grow' and pool.available >= size:
      live.append(pool.allocate(size))
      content.update({page: None for page in live[-1]})
    elif what == 'open':
      tokens = np.repeat(np.arange(size) * (pick % 3), BLOCK).astype(np.int32)
      found = lookup(pool, version, tokens)
      for i, page in enumerate(found):
        prefix = tuple(tokens[: (i + 1) * BLOCK])
        assert content[page] == (version, prefix)
        assert tuple(pool.experts(page).ravel()) == prefix[-BLOCK:]
      pool.hold(found)
      enough = pool.available >= size - len(found)
      pool.release(found)
      if enough:
        pages = publish(pool, version, tokens)
        live.append(pages)
        for i, page in enumerate(pages):
          content[page] = (version, tuple(tokens[: (i + 1) * BLOCK]))
    held = set(itertools.chain(*live))
    assert 0 not in held and pool.held == len(held)
    assert pool.available == pool.total - len(held)
  for pages in live:
    pool.release(pages)
  assert sorted(pool.allocate(11)) == list(range(1, 12))
