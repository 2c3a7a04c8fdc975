"""The pages of the KV cache: who holds them, and what may be used again.

A page holds `kv_block` tokens of every layer. A full page is published under a
key that chains the policy version, the page before it and its own tokens, so a
later request with the same tokens finds it, at the same version only. Host
bookkeeping; the arrays live on the device. Owned by the engine loop.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
import dataclasses

import numpy as np

Key = tuple


@dataclasses.dataclass
class Page:
  """One page in use or kept: its holders, its key, the routes of its tokens."""

  holders: int
  key: Key | None
  experts: np.ndarray | None  # int16 [S, L, K]


@dataclasses.dataclass(frozen=True)
class Count:
  """How many pages there are of each kind.

  `kept` ones hold what an earlier request computed, for a later one with the same
  tokens; where free ones run out they are taken, the least recently used first.
  """

  held: int  # by running sequences
  kept: int
  free: int


def chain(
  version: int, tokens: np.ndarray, block: int, parent: Key | None = None
) -> list[Key]:
  """Keys of the full pages of `tokens`, first to last."""
  keys = []
  for start in range(0, len(tokens) - block + 1, block):
    parent = (
      version,
      parent and hash(parent),
      tokens[start : start + block].tobytes(),
    )
    keys.append(parent)
  return keys


class PagePool:
  """Allocates pages, shares full ones, evicts the least recently used."""

  def __init__(self, pages: int):
    # Page 0 is scratch: rows that only fill the batch write there.
    self._free = list(range(pages - 1, 0, -1))
    self._pages: dict[int, Page] = {}
    self._by_key: dict[Key, int] = {}
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
    self.total = pages - 1

  @property
  def available(self) -> int:
    """Pages that an allocation could have, kept ones included."""
    return len(self._free) + len(self._idle)

  @property
  def held(self) -> int:
    return self.total - self.available

  @property
  def count(self) -> Count:
    """From any thread; the sum is always the total."""
    free = len(self._free)  # first: pages go from kept to free, never back
    kept = len(self._idle)
    return Count(self.total - kept - free, kept, free)

  def lookup(self, keys: Sequence[Key]) -> list[int]:
    """The longest run of kept pages for `keys`, from the first on."""
    found = []
    for key in keys:
      page = self._by_key.get(key)
      if page is None:
        break
      found.append(page)
    return found

  def hold(self, pages: Sequence[int]) -> None:
    for page in pages:
      self._pages[page].holders += 1
      self._idle.pop(page, None)

  def allocate(self, count: int) -> list[int]:
    """`count` fresh pages; the caller has checked `available`."""
    fresh = []
    for _ in range(count):
      if not self._free:
        page, _ = self._idle.popitem(last=False)
        self._forget(page)
      page = self._free.pop()
      self._pages[page] = Page(1, None, None)
      fresh.append(page)
    return fresh

  def publish(self, page: int, key: Key, experts: np.ndarray) -> None:
    """Makes a full page findable; the first page of a key wins."""
    if key not in self._by_key:
      entry = self._pages[page]
      entry.key, entry.experts = key, experts
      self._by_key[key] = page

  def experts(self, page: int) -> np.ndarray:
    """Routes of a published page, int16 [S, L, K]."""
    experts = self._pages[page].experts
    assert experts is not None, f'page {page} was never published'
    return experts

  def release(self, pages: Sequence[int]) -> None:
    """Gives pages back; published ones stay findable until evicted."""
    for page in pages:
      entry = self._pages[page]
      entry.holders -= 1
      if not entry.holders:
        if entry.key is None:
          self._forget(page)
        else:
          self._idle[page] = None

  def drop_versions_but(self, version: int) -> None:
    """After a weight swap: pages of other versions are never found again."""
    for key, page in list(self._by_key.items()):
      if key[0] != version:
        del self._by_key[key]
        self._pages[page].key = None
        if page in self._idle:
          del self._idle[page]
          self._forget(page)

  def _forget(self, page: int) -> None:
    entry = self._pages.pop(page)
    if entry.key is not None:
      del self._by_key[entry.key]
    self._free.append(page)
