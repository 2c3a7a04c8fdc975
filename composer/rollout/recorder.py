"""Turns the calls of one session into segments, by token prefix.

An engine is asked for one continuation at a time, each time with the whole
context. The recorder joins those calls again: a context that begins with every
token of a segment grows it (the newest, where it does with several: a harness
may go on with an older one after a helper of its own has spoken), any other
starts a new segment. What it keeps of a position is what the engine did when
the position was first used:

  routes      the experts of the first computation that reported them. A later
              call, after a weight swap or a restart, never replaces them; it
              fills the unknown ones (the last token of a completion has none
              until the next call computes it).
  versions    the policy version that sampled the token.
  auditable   see below.

A sampled token at position t, of version v, is auditable when a trainer at
version v that replays the recorded routes repeats the engine's own arithmetic:
  1. in the call that sampled it, every position before t had been computed at
     version v (`Completion.computed_versions`), and
  2. the recorded routes of every position before t, in that call or an earlier
     one, come from a computation at version v, or are unknown, in which case
     the trainer routes natively at v as the engine did.
Where a prefix was computed again at a newer version, the older routes were kept
and 2 fails for all that is sampled afterwards: the engine used routes that are
not the recorded ones. What was sampled before that stays auditable. A swap in
the middle of a completion fails 1 in the same way. Whether unknown routes were
filled from another version is judged when the segment is finished, by what it
holds then.

Legend: P tokens of a context, S sampled after it, T tokens of a segment, L MoE
layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import numpy as np

from composer.config import GREEDY
from composer.records import UNKNOWN_EXPERT
from composer.records import UNSAMPLED_VERSION
from composer.records import Completion
from composer.records import EngineError
from composer.records import Segment

_NONE = -1  # a version: not computed, or no routes recorded
_MIXED = -2  # a version: layers of one position from different versions


class BadCompletion(EngineError, ValueError):
  """An engine's answer that cannot be recorded (never the model's fault)."""


@dataclasses.dataclass
class _Open:
  """A segment that may still grow; arrays have room beyond `length`.

  `clean` is condition 1 of the module's docstring, `route_versions` what
  condition 2 is judged by. Should the last call be repeated, `last_context` is
  the length of its context, `undo` the routes that it found: (positions,
  experts, route_versions). `kept` has the ids that a token was drawn among, of
  the positions where the distribution was cut.
  """

  parent: int
  stop_reason: str
  length: int
  last_context: int
  tokens: np.ndarray  # int32 [T]
  sampled: np.ndarray  # bool [T]
  logprobs: np.ndarray  # float32 [T]
  temperatures: np.ndarray  # float32 [T]
  versions: np.ndarray  # int32 [T]
  clean: np.ndarray  # bool [T]
  route_versions: np.ndarray  # int32 [T]
  unknown: np.ndarray  # bool [T]; some layer has no route
  experts: np.ndarray  # int16 [T, L, K]
  undo: tuple[np.ndarray, ...] = ()
  kept: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Undo:
  """The call before: where it was recorded, and whether this one was fresh."""

  current: int
  fresh: bool


_FILL = {
  'tokens': 0,
  'sampled': False,
  'logprobs': 0.0,
  'temperatures': 1.0,
  'versions': UNSAMPLED_VERSION,
  'clean': False,
  'route_versions': _NONE,
  'unknown': True,
  'experts': UNKNOWN_EXPERT,
}


class Recorder:
  """Collects the calls of one trajectory; owned by one session.

  L and K are those of the model; a dense model has L = 0.
  """

  def __init__(self, layers: int, experts_per_token: int):
    self._shape = (layers, experts_per_token)
    self._segments: list[_Open] = []
    self._current = -1  # where the last call was recorded
    self._undo: _Undo | None = None

  def __len__(self) -> int:
    """Number of segments so far."""
    return len(self._segments)

  def lengths(self) -> list[int]:
    """Tokens of each segment so far."""
    return [segment.length for segment in self._segments]

  def record(
    self,
    context: Sequence[int] | np.ndarray,
    completion: Completion,
    temperature: float,
    parent: int = -1,
    trainable: bool = True,
  ) -> int:
    """Adds an answered call and returns the index of its segment.

    A call that repeats the context of a segment's last one is a retry: the
    caller never used the first answer, which is forgotten.

    Args:
      context: int [P], what was sent to the engine.
      completion: what it answered.
      temperature: under which it sampled; 0 is greedy.
      parent: of the segment, should the call start one: index of the segment
        whose summary the context holds, or -1.
      trainable: whether it is known what the tokens were drawn among. Where it
        is not, they are context: not sampled, though nobody else wrote them.

    Raises:
      BadCompletion: lengths differ, a value is not finite, or a sampled token
        has no version; nothing is recorded then.
    """
    context = np.asarray(context, np.int32)
    _check(context, completion, temperature, self._shape)
    index, kept = self._find(context)
    fresh = not kept
    segment = _new(self._shape, parent) if fresh else self._segments[index]
    retry = 0 < kept < segment.length
    open_rows = np.flatnonzero(segment.unknown[:kept])
    if retry:
      open_rows = segment.undo[0][segment.undo[0] < kept]
    end = len(context) + len(completion.tokens)
    at = np.concatenate((open_rows, np.arange(kept, end)))
    experts = np.asarray(completion.experts)[at]
    computed = np.asarray(completion.computed_versions)
    _check_routes(experts, computed[at])
    if retry:
      _forget(segment)
    self._undo = _Undo(self._current, fresh)
    if fresh:
      index = len(self._segments)
      self._segments.append(segment)
    if self._current not in (index, -1):
      reason = 'summary' if fresh and parent >= 0 else 'rewritten'
      self._segments[self._current].stop_reason = reason
    self._current = index
    _grow(segment, context, completion, temperature, trainable)
    _add_routes(segment, at, experts, computed[at])
    return index

  def _find(self, context: np.ndarray) -> tuple[int, int]:
    """(segment that the call belongs to, tokens of it that it keeps or 0)."""
    for index in range(len(self._segments) - 1, -1, -1):
      kept = _kept(self._segments[index], context)
      if kept:
        return index, kept
    return -1, 0

  def retract(self) -> None:
    """Forgets the last call's answer: nobody received it.

    What its context added to a segment stays there, unsampled. Nothing is done
    if the last call was retracted already, or there was none.
    """
    undo, self._undo = self._undo, None
    if undo is None:
      return
    if undo.fresh:
      self._segments.pop()
      self._current = undo.current
    else:
      _forget(self._segments[self._current])

  def append(self, tokens: Sequence[int]) -> None:
    """Adds unsampled tokens behind the current segment."""
    segment = self._segments[self._current]
    start, end = segment.length, segment.length + len(tokens)
    self._undo = None
    _reserve(segment, end)
    segment.tokens[start:end] = tokens
    segment.length = end

  def finish(self, stop_reason: str) -> tuple[Segment, ...]:
    """The segments; `stop_reason` is that of the one that grew last.

    More may be recorded afterwards.
    """
    if self._segments:
      self._segments[self._current].stop_reason = stop_reason
    return tuple(map(_close, self._segments))


def _check(
  context: np.ndarray,
  completion: Completion,
  temperature: float,
  shape: tuple[int, int],
) -> None:
  """Refuses what cannot be recorded, before anything is."""
  before, new = len(context), len(completion.tokens)
  wanted = {
    'tokens': (new,),
    'logprobs': (new,),
    'versions': (new,),
    'experts': (before + new, *shape),
    'computed_versions': (before + new,),
  }
  for name, want in wanted.items():
    got = np.shape(getattr(completion, name))
    if got != want:
      raise BadCompletion(
        f'Completion.{name} has shape {got} for {before} tokens of context and'
        f' {new} sampled; the engine must answer with {want}'
      )
  if context.ndim != 1 or not before:
    raise BadCompletion(
      f'the context has shape {context.shape}; send int32 [P] with P >= 1'
    )
  if not np.isfinite(completion.logprobs).all():
    where = np.flatnonzero(~np.isfinite(completion.logprobs))[:4].tolist()
    raise BadCompletion(
      f'Completion.logprobs is not finite at sampled tokens {where}; the engine'
      ' must give the log-probability of the token that it sampled'
    )
  if new and np.min(completion.versions) < 0:
    raise BadCompletion(
      f'Completion.versions holds {int(np.min(completion.versions))}; a sampled'
      ' token carries the version (>= 0) that sampled it'
    )
  if completion.kept_offsets is not None:
    _check_kept(completion)
  if not (np.isfinite(temperature) and temperature >= 0):
    raise BadCompletion(
      f'temperature is {temperature}; it must be finite, >= 0'
    )
  if 0 < temperature < GREEDY:
    raise BadCompletion(
      f'temperature is {temperature}; it must be 0, where the likeliest token'
      f' was taken, or at least {GREEDY:g}'
    )


def _check_kept(completion: Completion) -> None:
  """Refuses kept ids that do not hold the token that was drawn among them."""
  offsets, ids = completion.kept_offsets, completion.kept_ids
  total = -1 if ids is None else len(ids)
  if (
    len(offsets) != len(completion.tokens) + 1
    or offsets[0] != 0
    or offsets[-1] != total
    or np.any(np.diff(offsets) < 0)
  ):
    raise BadCompletion(
      f'Completion.kept_offsets must rise from 0 to the {total} kept ids, with'
      f' one more entry than the {len(completion.tokens)} sampled tokens'
    )
  for i, token in enumerate(completion.tokens):
    among = ids[offsets[i] : offsets[i + 1]]
    if len(among) and token not in among:
      raise BadCompletion(
        f'sampled token {i} is {token}, which is not among the ids that'
        ' Completion.kept_ids says it was drawn from'
      )


def _check_routes(experts: np.ndarray, computed: np.ndarray) -> None:
  """Refuses rows of `experts` [N, L, K] that no router could have chosen."""
  known = experts >= 0
  full, some = known.all(-1), known.any(-1)
  if (experts < UNKNOWN_EXPERT).any() or (full != some).any():
    raise BadCompletion(
      'Completion.experts holds a row that is neither all experts nor all -1;'
      ' an unknown route is -1 in every place'
    )
  ranked = np.sort(experts, axis=-1)
  if (full[..., None] & (ranked[..., 1:] == ranked[..., :-1])).any():
    raise BadCompletion(
      'Completion.experts names one expert twice for a token and layer; top-k'
      ' experts are distinct'
    )
  if (some.any(-1) & (computed < 0)).any():
    raise BadCompletion(
      'Completion.experts gives routes where Completion.computed_versions says'
      ' that nothing was computed (-1); both must be -1 there'
    )


def _kept(segment: _Open, context: np.ndarray) -> int:
  """How many of the segment's tokens the call keeps; 0 if it starts anew.

  All of them where the context begins with them; those before the last call's
  completion where it is that call once more.
  """
  for length in (segment.length, segment.last_context):
    fits = len(context) == length or length == segment.length < len(context)
    if fits and (segment.tokens[:length] == context[:length]).all():
      return length
  return 0


def _new(shape: tuple[int, int], parent: int) -> _Open:
  segment = _Open(
    parent=parent,
    stop_reason='',
    length=0,
    last_context=_NONE,
    tokens=np.zeros(0, np.int32),
    sampled=np.zeros(0, bool),
    logprobs=np.zeros(0, np.float32),
    temperatures=np.zeros(0, np.float32),
    versions=np.zeros(0, np.int32),
    clean=np.zeros(0, bool),
    route_versions=np.zeros(0, np.int32),
    unknown=np.zeros(0, bool),
    experts=np.zeros((0, *shape), np.int16),
  )
  _reserve(segment, 256)
  return segment


def _reserve(segment: _Open, length: int) -> None:
  """Makes room for `length` tokens, doubling, so that growing is linear."""
  room = len(segment.tokens)
  if length <= room:
    return
  room = max(length, 2 * room)
  for name, fill in _FILL.items():
    old = getattr(segment, name)
    new = np.full((room, *old.shape[1:]), fill, old.dtype)
    new[: segment.length] = old[: segment.length]
    setattr(segment, name, new)


def _forget(segment: _Open) -> None:
  """Forgets the last call's answer, and the routes that came with it."""
  at, experts, route_versions = segment.undo
  segment.experts[at] = experts
  segment.route_versions[at] = route_versions
  for name, fill in _FILL.items():
    getattr(segment, name)[segment.last_context : segment.length] = fill
  for position in range(segment.last_context, segment.length):
    segment.kept.pop(position, None)
  segment.length = segment.last_context


def _grow(
  segment: _Open,
  context: np.ndarray,
  completion: Completion,
  temperature: float,
  trainable: bool,
) -> None:
  """Adds context [P] and completion [S] behind the tokens already there."""
  known, before = segment.length, len(context)
  end = before + len(completion.tokens)
  _reserve(segment, end)
  segment.tokens[known:before] = context[known:]
  new = slice(before, end)
  segment.tokens[new] = completion.tokens
  segment.length, segment.last_context = end, before
  if not trainable:
    return
  segment.sampled[new] = True
  segment.logprobs[new] = completion.logprobs
  segment.temperatures[new] = temperature
  segment.versions[new] = completion.versions
  offsets = completion.kept_offsets
  if offsets is not None:
    for i in range(len(completion.tokens)):
      ids = completion.kept_ids[offsets[i] : offsets[i + 1]]
      if len(ids):
        segment.kept[before + i] = np.array(ids, np.int32)
  # Condition 1: one version all the way to the token, and that is its own.
  computed = np.asarray(completion.computed_versions)
  uniform = _leading(computed == computed[0])
  segment.clean[new] = (np.asarray(completion.versions) == computed[0]) & (
    np.arange(before, end) <= uniform
  )


def _add_routes(
  segment: _Open, at: np.ndarray, experts: np.ndarray, computed: np.ndarray
) -> None:
  """Fills the routes that are unknown so far; the known ones stay.

  A layer's row of K experts is taken whole or not at all. `experts` [N, L, K]
  and `computed` [N] are those of the positions `at` [N].
  """
  old = segment.experts[at]
  missing = (old < 0).any(-1)  # [N, L]
  given = (experts >= 0).all(-1)
  take = missing & given
  before = segment.route_versions[at]
  segment.undo = (at, old, before)
  segment.experts[at] = np.where(take[..., None], experts, old)
  segment.unknown[at] = (missing & ~given).any(-1)
  mixed = ~missing.all(-1) & (before != computed)
  version = np.where(mixed, _MIXED, computed)
  segment.route_versions[at] = np.where(take.any(-1), version, before)


def _leading(flags: np.ndarray) -> int:
  """Number of leading true entries."""
  false_at = flags.argmin()
  return len(flags) if flags[false_at] else int(false_at)


def _ragged(segment: _Open) -> tuple[np.ndarray | None, np.ndarray | None]:
  """(kept ids [n], offsets [T + 1]); none where nothing was cut."""
  if not segment.kept:
    return None, None
  lengths = np.zeros(segment.length, np.int32)
  for position, ids in segment.kept.items():
    lengths[position] = len(ids)
  offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
  ids = [segment.kept[position] for position in sorted(segment.kept)]
  return np.concatenate(ids), offsets


def _close(segment: _Open) -> Segment:
  length = segment.length
  kept_ids, kept_offsets = _ragged(segment)
  route_versions = segment.route_versions[:length]
  versions = segment.versions[:length]
  auditable = segment.clean[:length].copy()
  for version in np.unique(versions[auditable]):
    same = (route_versions == version) | (route_versions == _NONE)
    beyond = np.arange(length) > _leading(same)
    auditable &= ~(beyond & (versions == version))
  return Segment(
    tokens=segment.tokens[:length].copy(),
    sampled=segment.sampled[:length].copy(),
    logprobs=segment.logprobs[:length].copy(),
    temperatures=segment.temperatures[:length].copy(),
    versions=versions.copy(),
    experts=segment.experts[:length].copy(),
    auditable=auditable,
    stop_reason=segment.stop_reason,
    parent=segment.parent,
    kept_ids=kept_ids,
    kept_offsets=kept_offsets,
  )
