"""Segments to micro-batches of one fixed shape, and values back to segments.

First-fit decreasing over rows, in whole KV blocks: a segment starts at a
multiple of the block, so that its attention blocks lie where they lay in the
engine, and never crosses a row. The result depends on the items alone, so that
every process of a trainer packs the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from composer.config import GREEDY
from composer.records import UNKNOWN_EXPERT
from composer.records import UNSAMPLED_VERSION
from composer.records import Batch
from composer.records import Segment


class Item(NamedTuple):
  """What is packed: a segment and the advantage of its whole trajectory.

  `reference_logprobs` is float32 [T], or None where no reference was scored:
  the behaviour logprobs then stand in, so that a KL read from them is 0.
  `origin` is (group id, index of the trajectory, index of the segment), for the
  way back.
  """

  segment: Segment
  advantage: float
  reference_logprobs: np.ndarray | None = None
  origin: tuple[str, int, int] = ('', 0, 0)


class Fit(NamedTuple):
  """What a segment must fit, of a run; see `pack` for the values."""

  length: int
  layers: int
  experts_per_token: int
  experts: int | None = None
  max_kept: int = 0


class Placement(NamedTuple):
  """Where an item went: columns [start, start + length) of a row of a batch."""

  batch: int
  row: int
  start: int
  length: int


def pack(
  items: Sequence[Item],
  rows: int,
  length: int,
  kv_block: int,
  layers: int,
  experts_per_token: int,
  loss_tokens: int | None = None,
  experts: int | None = None,
  max_kept: int = 0,
) -> tuple[list[Batch], list[Placement]]:
  """Packs the segments of one global step.

  Args:
    items: in any order; (segment, advantage, reference logprobs or None).
    rows: B of every micro-batch; the last one is filled up with padding rows.
    length: T of every row, a multiple of `kv_block`.
    kv_block: tokens of a KV block.
    layers: L, MoE layers of `segment.experts`.
    experts_per_token: K.
    loss_tokens: N of the loss, a constant of the run; None is the number of
      sampled tokens of `items`.
    experts: E, of which routes name `experts_per_token` distinct ones, or -1;
      None leaves the routes unchecked.
    max_kept: J, ids at most that a token whose distribution was cut was drawn
      among; 0 where none was.

  Returns:
    Micro-batches of numpy arrays [B, T], with segments counted from 1 in each
    row, and the placement of every item, in the order of the items. Where a
    token was not sampled, advantage and weight are 0; padding has segment id 0.

  Raises:
    ValueError: for a segment that is empty or longer than a row, routes that
      no router of this model chose, reference logprobs of another length, more
      than `max_kept` ids, or a bad shape.
  """
  items = [Item(*item) for item in items]
  _check_shape(rows, length, kv_block, loss_tokens)
  fit = Fit(length, layers, experts_per_token, experts, max_kept)
  for index, item in enumerate(items):
    where = f'item {index} (origin {item.origin})'
    _check_item(where, item)
    check(item.segment, fit, where)
  placements = _place(items, rows, length, kv_block)
  if loss_tokens is None:
    sampled = sum(int(np.count_nonzero(i.segment.sampled)) for i in items)
    loss_tokens = max(sampled, 1)
  weight = np.float32(1.0 / loss_tokens)
  count = 1 + max((p.batch for p in placements), default=-1)
  shape = (rows, length)
  batches = [
    empty_batch(shape, layers, experts_per_token, max_kept)
    for _ in range(count)
  ]
  placed = np.zeros((count, rows), np.int32)  # segments so far in each row
  order = sorted(range(len(items)), key=lambda i: placements[i])
  for index in order:
    place = placements[index]
    placed[place.batch, place.row] += 1
    number = placed[place.batch, place.row]
    _write(batches[place.batch], items[index], place, number, weight)
  return batches, placements


def unpack(
  values: Sequence[np.ndarray], placements: Sequence[Placement]
) -> list[np.ndarray]:
  """Brings values [B, T, ...] of every micro-batch back to their segments.

  Args:
    values: one array a micro-batch, in the order of `pack`.
    placements: of `pack`.

  Returns:
    A copy [T_i, ...] for every item, in the order of the items.
  """
  values = [np.asarray(v) for v in values]  # one transfer a batch
  return [
    values[p.batch][p.row, p.start : p.start + p.length].copy()
    for p in placements
  ]


def fill(placements: Sequence[Placement], rows: int, length: int) -> float:
  """Share of the columns of all micro-batches that hold a token."""
  if not placements:
    return 0.0
  batches = 1 + max(p.batch for p in placements)
  return sum(p.length for p in placements) / (batches * rows * length)


def _check_shape(
  rows: int, length: int, kv_block: int, loss_tokens: int | None
) -> None:
  if rows < 1 or kv_block < 1 or length < 1 or length % kv_block:
    raise ValueError(
      f'rl.micro_batch={rows}, rl.sequence_length={length} and'
      f' numerics.kv_block={kv_block} must be positive, and the length a'
      ' multiple of the block, as segments start at its multiples'
    )
  if loss_tokens is not None and loss_tokens < 1:
    raise ValueError(f'rl.loss_tokens={loss_tokens} must be at least 1')


def _check_item(where: str, item: Item) -> None:
  size = len(item.segment.tokens)
  if size == 0:
    raise ValueError(f'{where} has no tokens; leave empty segments out')
  if not np.isfinite(item.advantage):
    raise ValueError(f'{where} has advantage {item.advantage}; not finite')
  reference = item.reference_logprobs
  if reference is not None and np.shape(reference) != (size,):
    raise ValueError(
      f'{where} has reference_logprobs {np.shape(reference)} for {size} tokens'
    )


def check(segment: Segment, fit: Fit, where: str) -> None:
  """Refuses a segment that cannot be packed; `where` names it.

  Raises:
    ValueError: see `pack`.
  """
  size = len(segment.tokens)
  if size > fit.length:
    raise ValueError(
      f'{where} has {size} tokens and rl.sequence_length is {fit.length}; raise'
      ' rl.sequence_length or lower session.context_tokens'
    )
  routes = (fit.layers, fit.experts_per_token)
  if segment.experts.shape[1:] != routes:
    raise ValueError(
      f'{where} has routes {segment.experts.shape[1:]} a token and the model'
      f' has (layers, experts_per_token) = {routes}; it was sampled by another'
      ' model'
    )
  _check_kept(segment, fit.max_kept, where)
  if fit.experts is not None:
    _check_routes(segment, fit.experts, where)


def _check_kept(segment: Segment, max_kept: int, where: str) -> None:
  if segment.kept_offsets is None:
    return
  counts = np.diff(segment.kept_offsets)
  most = int(np.max(counts, initial=0))
  if most > max_kept:
    raise ValueError(
      f'{where} has a token drawn among {most} kept ids and rl.max_kept is'
      f' {max_kept}; raise it (its cost is that many numbers a token), or sample'
      ' with top_p 1, top_k 0, min_p 0 and no mask'
    )
  owner = np.repeat(np.arange(len(counts)), counts)
  own = owner[segment.kept_ids == segment.tokens[owner]]
  found = np.bincount(own, minlength=len(counts)) > 0
  lost = np.flatnonzero((counts > 0) & ~found)
  if lost.size:
    raise ValueError(
      f'{where} has a token {segment.tokens[lost[0]]} at {lost[0]} that is not'
      ' among the kept ids that it was drawn among; its logprob would be that of'
      ' the impossible'
    )


def _check_routes(segment: Segment, experts: int, where: str) -> None:
  """Replay trusts the routes: an index out of range would gather anything."""
  routes = segment.experts
  if not routes.size:
    return
  low, high = int(routes.min()), int(routes.max())
  if low < UNKNOWN_EXPERT or high >= experts:
    raise ValueError(
      f'{where} has routes from {low} to {high} and the model has {experts}'
      ' experts; it was sampled by another model'
    )
  ranked = np.sort(routes, axis=-1)
  twice = (ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] >= 0)
  if twice.any():
    token, layer = np.argwhere(twice)[0][:2].tolist()
    raise ValueError(
      f'{where} names an expert twice at token {token} of MoE layer {layer}:'
      f' {routes[token, layer].tolist()}; top-k experts are distinct'
    )


def _place(
  items: Sequence[Item], rows: int, length: int, kv_block: int
) -> list[Placement]:
  """First-fit decreasing; ties keep the order of the items."""
  sizes = np.array([len(item.segment.tokens) for item in items], np.int64)
  blocks = -(-sizes // kv_block)
  free = np.full(len(items), length // kv_block)  # an item a row at worst
  found: list[Placement] = [None] * len(items)  # type: ignore[list-item]
  for index in np.argsort(-blocks, kind='stable'):
    row = int(np.argmax(free >= blocks[index]))
    start = length - int(free[row]) * kv_block
    free[row] -= blocks[index]
    batch, row = divmod(row, rows)
    found[index] = Placement(batch, row, start, int(sizes[index]))
  return found


def empty_batch(
  shape: tuple[int, int],
  layers: int,
  experts_per_token: int,
  max_kept: int = 0,
) -> Batch:
  """A micro-batch of padding."""
  routes = (*shape, layers, experts_per_token)
  return Batch(
    tokens=np.zeros(shape, np.int32),
    segment_ids=np.zeros(shape, np.int32),
    positions=np.zeros(shape, np.int32),
    loss_mask=np.zeros(shape, bool),
    behaviour_logprobs=np.zeros(shape, np.float32),
    reference_logprobs=np.zeros(shape, np.float32),
    temperatures=np.ones(shape, np.float32),
    advantages=np.zeros(shape, np.float32),
    experts=np.full(routes, UNKNOWN_EXPERT, np.int16),
    versions=np.full(shape, UNSAMPLED_VERSION, np.int32),
    weights=np.zeros(shape, np.float32),
    auditable=np.zeros(shape, bool),
    kept=np.full((*shape, max_kept), -1, np.int32) if max_kept else None,
  )


def _write(
  batch: Batch, item: Item, place: Placement, number: int, weight: np.float32
) -> None:
  """Writes one segment into its columns."""
  segment = item.segment
  at = (place.row, slice(place.start, place.start + place.length))
  reference = item.reference_logprobs
  batch.tokens[at] = segment.tokens
  batch.segment_ids[at] = number
  batch.positions[at] = np.arange(place.length)
  batch.loss_mask[at] = segment.sampled
  batch.behaviour_logprobs[at] = segment.logprobs
  batch.reference_logprobs[at] = (
    segment.logprobs if reference is None else reference
  )
  # The engine's logprobs of greedy tokens are those at temperature 1.
  greedy = segment.temperatures < GREEDY
  batch.temperatures[at] = np.where(greedy, 1.0, segment.temperatures)
  batch.advantages[at] = np.where(segment.sampled, item.advantage, 0.0)
  batch.experts[at] = segment.experts
  batch.versions[at] = segment.versions
  batch.weights[at] = np.where(segment.sampled, weight, 0.0)
  batch.auditable[at] = segment.auditable
  if segment.kept_ids is not None and len(segment.kept_ids):
    counts = np.diff(segment.kept_offsets)
    within = np.arange(batch.kept.shape[-1])[None, :] < counts[:, None]
    batch.kept[at][within] = segment.kept_ids
