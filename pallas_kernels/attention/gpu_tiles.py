"""How the GPU kernel's work is cut, and what is constant while it runs."""

from __future__ import annotations

import dataclasses

from pallas_kernels import mosaic

ROWS = 64  # of a consumer: what one instruction of the tensor core takes
LONG = 8192  # tokens


@dataclasses.dataclass(frozen=True)
class Tiles:
  """How the work is cut; it changes the speed and no bit of the result.

  Attributes:
    consumers: warpgroups that compute, 1 or 2, of 64 rows each. The absorbed
      form always has 2, of the same rows.
    stages: blocks of keys and values in shared memory.
    slots: tiles of queries in shared memory.
    turns: whether two consumers take turns in the tensor core.
    overlap: whether a consumer multiplies a block's values while it is in the
      softmax of the next; not in the absorbed form.
  """

  consumers: int = 2
  stages: int = 2
  slots: int = 1
  turns: bool = True
  overlap: bool = False

  def __post_init__(self):
    if self.consumers not in (1, 2) or self.stages < 2:
      raise ValueError(
        f'consumers={self.consumers}, stages={self.stages}; there are 1 or 2'
        ' consumers and at least 2 stages'
      )
    if self.slots not in (1, 2):
      raise ValueError(f'slots={self.slots}; give 1 or 2')


@dataclasses.dataclass(frozen=True)
class Work:
  """What is constant while a kernel runs.

  Attributes:
    key: numbers of a key.
    width: of a value.
    block: tokens of a block of keys.
    factor: of scores, log2(e) included.
    shared: whether values are the first numbers of the keys.
    paged: whether blocks are looked up in a table of pages.
    log: whether the log-sum-exp is written.
    split: blocks of a split, or 0: keys are not cut.
    long: whether a row can have more than one split.
    apart: whether an item is one split, whose sums are written as they are.
    heads: of queries in a tile, for each of its tokens, as they lie in memory;
      1: a tile is tokens of one head. Rows are counted in these.
    interpret: whether this runs on CPU.
  """

  tiles: Tiles
  key: int
  width: int
  block: int
  factor: float
  sms: int
  shared: bool
  paged: bool
  log: bool
  split: int = 0
  long: bool = False
  apart: bool = False
  heads: int = 1
  interpret: bool = False

  @property
  def parts(self) -> int:
    """Consumers that share rows and divide the columns of the output."""
    return self.tiles.consumers if self.shared else 1

  @property
  def units(self) -> int:
    """Consumers with rows of their own."""
    return 1 if self.shared else self.tiles.consumers

  @property
  def columns(self) -> int:
    """Of the output of a consumer."""
    return self.width // self.parts

  @property
  def pieces(self) -> int:
    """Copies that fill 64 rows of queries."""
    return ROWS // self.heads if self.heads > 1 else 1

  @property
  def merges(self) -> bool:
    """Whether a block of threads merges the splits of its rows."""
    return self.long and not self.apart

  @property
  def rest(self) -> int:
    """Numbers of a key that are loaded apart: those past the width."""
    return self.key - self.width


def fitting(
  key: int, width: int, block: int, shared: bool, few: bool, length: int
) -> Tiles:
  """The most stages, then slots, that there is room for.

  Args:
    key, width, block, shared: see `Work`.
    few: whether an item has at most 64 rows.
    length: tokens that a segment can have. Two consumers of long ones keep out
      of each other's way without taking turns, and lose by waiting; not where
      keys are wide and their blocks short.
  """
  if shared:
    return Tiles()
  consumers = 1 if few else 2
  stage = 2 * block * (key + width)
  room = mosaic.SHARED_BYTES - 4096
  query = 2 * ROWS * consumers * key
  stages = min((room - query) // stage, 4)
  slots = 2 if room >= stages * stage + 2 * query else 1
  if slots == 1 and stages > 2:
    stages, slots = stages - 1, 2
  turns = consumers == 2 and (length < LONG or (key > 128 and block < 128))
  return Tiles(consumers, stages, slots, turns, overlap=consumers == 2)
