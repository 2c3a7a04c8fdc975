"""A request at work: what is known of it, and what it becomes.

Host bookkeeping of one sequence. Three counts matter, all in tokens from the
start of the context:

  length     known tokens: the prompt, and what was sampled and recorded
  computed   of those, the ones whose keys and values exist
  sent, due  the same two once every step that the device still works on is
             recorded: sent tokens computed, due tokens known

`recorded` is how far routes and versions were ever written. Where a sequence is
computed again, they stay as they were up to there.
"""

from __future__ import annotations

import asyncio

import numpy as np

from composer import config as config_lib
from composer import records

Request = records.SampleRequest


class Sequence:
  """A request at work. Arrays reach to its last possible token."""

  def __init__(
    self,
    request: Request,
    future: asyncio.Future,
    layers: int,
    experts_per_token: int,
  ):
    prompt = np.asarray(request.tokens, np.int32)
    size = len(prompt) + request.max_tokens
    self.request = request
    self.future = future
    self.size = size
    self.prompt = len(prompt)
    self.length = self.due = len(prompt)
    self.computed = self.sent = self.recorded = 0
    self.tokens = np.zeros(size, np.int32)
    self.tokens[: self.prompt] = prompt
    self.logprobs = np.zeros(size, np.float32)
    self.versions = np.full(size, records.UNSAMPLED_VERSION, np.int32)
    self.computed_versions = np.full(size, -1, np.int32)
    self.experts = np.full(
      (size, layers, experts_per_token), records.UNKNOWN_EXPERT, np.int16
    )
    # Ids that each sampled token was drawn among, up to the first that had too
    # many.
    self.kept: list[np.ndarray] = []
    self.top_ids: list[np.ndarray] = []  # [N], of every sampled token
    self.top_logprobs: list[np.ndarray] = []
    self.pages: list[int] = []
    self.published = 0  # pages of this sequence already findable
    self.key = None  # key of the last of them
    self.coming: tuple | list = ()  # keys that this sequence will publish
    self.keys: list = []  # of `keys_of`: (version, length)
    self.keys_of: tuple[int, int] | None = None
    self.slot = -1  # of the running ones
    self.cached = 0  # tokens of the prompt that were found at its first start
    self.started, self.live = False, True
    self.stop_reason = ''
    self.cuts = cuts(request)
    self.allowed: np.ndarray | None = None  # packed, of the next token
    self.drafted = np.zeros(0, np.int32)  # by the device, behind `length`
    self.told = self.prompt  # tokens already given to `on_tokens`
    self.enough: int | None = None  # sampled tokens that its requester wants
    self.stop_ids = {int(t) for t in request.stop_tokens}
    self.stops = [tuple(s) for s in request.stop_sequences]


def cuts(request: Request) -> bool:
  """Whether the request draws from less than the whole distribution."""
  return bool(
    request.top_p < 1
    or request.top_k > 0
    or request.min_p > 0
    or request.mask is not None
  )


def rewind(sequence: Sequence) -> None:
  """Forgets keys and values, never what was sampled; pages are given back."""
  sequence.pages = []
  sequence.published, sequence.key, sequence.coming = 0, None, ()
  sequence.computed = sequence.sent = 0
  sequence.due, sequence.slot = sequence.length, -1
  if sequence.length == sequence.prompt:  # nobody has used its routes yet
    sequence.recorded = 0


def record(
  sequence: Sequence, start: int, experts: np.ndarray, version: int
) -> None:
  """Notes the routes [n, L, K] of n positions, computed at `version`."""
  end = start + len(experts)
  new = max(start, sequence.recorded)
  if new < end:
    sequence.experts[new:end] = experts[new - start :]
    sequence.computed_versions[new:end] = version
    sequence.recorded = end
  sequence.computed = end


def advance(
  sequence: Sequence,
  start: int,
  token: int,
  logprob: float,
  experts: np.ndarray,
  version: int,
) -> None:
  """`record` and `extend` of one row that drew one token, routes [L, K]."""
  if start >= sequence.recorded:
    sequence.experts[start] = experts
    sequence.computed_versions[start] = version
    sequence.recorded = start + 1
  sequence.computed = start + 1
  at = sequence.length
  sequence.tokens[at] = token
  sequence.logprobs[at] = logprob
  sequence.versions[at] = version
  sequence.length = at + 1
  if token in sequence.stop_ids or _stops(sequence, at + 1):
    sequence.stop_reason = 'stop'
  elif at + 1 == sequence.size:
    sequence.stop_reason = 'length'


def extend(
  sequence: Sequence, tokens: np.ndarray, logprobs: np.ndarray, version: int
) -> int:
  """Appends sampled tokens up to the first stop; how many were taken."""
  at = sequence.length
  new = tokens[: sequence.size - at]
  taken = len(new)
  sequence.tokens[at : at + taken] = new
  ids = new.tolist()
  if sequence.stops or not sequence.stop_ids.isdisjoint(ids):
    for n, token in enumerate(ids, 1):
      if token in sequence.stop_ids or _stops(sequence, at + n):
        sequence.stop_reason, taken = 'stop', n
        break
  end = at + taken
  sequence.logprobs[at:end] = logprobs[:taken]
  sequence.versions[at:end] = version
  sequence.length = end
  if end == sequence.size and not sequence.stop_reason:
    sequence.stop_reason = 'length'
  return taken


def _stops(sequence: Sequence, end: int) -> bool:
  for stop in sequence.stops:
    start = end - len(stop)
    if start >= sequence.prompt:
      if tuple(sequence.tokens[start:end].tolist()) == stop:
        return True
  return False


def keep(sequence: Sequence, packed: np.ndarray, vocab: int) -> None:
  """Notes what n tokens were drawn among; packed uint8 [n, ceil(V / 8)].

  Ids of a large vocabulary are many: all of them are noted as none, and more
  than the request wants end the noting. The tokens are noted already.
  """
  most = sequence.request.max_kept
  if len(sequence.kept) != sequence.length - sequence.prompt - len(packed):
    return  # it has ended
  for row in packed:
    ids = np.flatnonzero(np.unpackbits(row, count=vocab)).astype(np.int32)
    if len(ids) == vocab:
      ids = ids[:0]
    if most is not None and len(ids) > most:
      return
    sequence.kept.append(ids)


def tell(
  sequence: Sequence, top_ids: np.ndarray, top_logprobs: np.ndarray
) -> None:
  """Notes the likeliest tokens of n distributions, [n, N].

  Copies: a view would hold what all sequences of the step were told.
  """
  sequence.top_ids += list(top_ids.copy())
  sequence.top_logprobs += list(top_logprobs.copy())


def piece(sequence: Sequence) -> records.Piece | None:
  """What `on_tokens` has not been told yet."""
  if sequence.request.on_tokens is None or sequence.told == sequence.length:
    return None
  new = slice(sequence.told, sequence.length)
  drawn = slice(new.start - sequence.prompt, new.stop - sequence.prompt)
  sequence.told = sequence.length
  return records.Piece(
    tokens=sequence.tokens[new].copy(),
    logprobs=sequence.logprobs[new].copy(),
    versions=sequence.versions[new].copy(),
    kept=tuple(sequence.kept[drawn]) if sequence.cuts else None,
    **_told(sequence, drawn),
  )


def _told(sequence: Sequence, drawn: slice) -> dict[str, np.ndarray]:
  """`top_ids` and `top_logprobs` of some sampled tokens."""
  if not sequence.request.top_logprobs:
    return {}
  return {
    name: np.stack(getattr(sequence, name)[drawn])
    for name in ('top_ids', 'top_logprobs')
  }


def ragged(kept: list[np.ndarray]) -> dict[str, np.ndarray]:
  """`kept_ids` and `kept_offsets` of a completion."""
  return {
    'kept_ids': np.concatenate(kept),
    'kept_offsets': np.cumsum([0, *map(len, kept)]).astype(np.int32),
  }


def has_enough(sequence: Sequence) -> bool:
  """Whether its requester wants no more, and the routes of that are known."""
  enough = sequence.enough
  return enough is not None and sequence.recorded >= sequence.prompt + enough


def completion(sequence: Sequence) -> records.Completion:
  """The answer."""
  sampled = slice(sequence.prompt, sequence.length)
  kept = sequence.kept if sequence.cuts else []
  keeps = 0 < len(kept) == sequence.length - sequence.prompt
  return records.Completion(
    tokens=sequence.tokens[sampled].copy(),
    logprobs=sequence.logprobs[sampled].copy(),
    versions=sequence.versions[sampled].copy(),
    experts=sequence.experts[: sequence.length].copy(),
    computed_versions=sequence.computed_versions[: sequence.length].copy(),
    stop_reason=sequence.stop_reason,
    **(ragged(kept) if keeps else {}),
    **_told(sequence, slice(None)),
    cached=sequence.cached,
  )


def check(request: Request, max_context: int, vocab: int) -> None:
  """Refuses what cannot be served.

  Raises:
    ValueError: names the field, its value and the remedy.
  """
  tokens = request.tokens
  if not len(tokens):
    raise ValueError('SampleRequest.tokens is empty; give at least one token')
  if request.max_tokens < 1:
    raise ValueError(
      f'SampleRequest.max_tokens is {request.max_tokens}; ask for at least 1'
    )
  if len(tokens) + request.max_tokens > max_context:
    raise ValueError(
      f'a context of {len(tokens)} tokens plus max_tokens'
      f' {request.max_tokens} passes engine.max_context={max_context}; shorten'
      ' it or raise engine.max_context'
    )
  if np.min(tokens) < 0 or np.max(tokens) >= vocab:
    raise ValueError(
      f'token ids must lie in [0, {vocab}); got {int(np.min(tokens))} to'
      f' {int(np.max(tokens))}'
    )
  if not 0 <= request.temperature < np.inf:
    raise ValueError(
      f'temperature {request.temperature} is below 0 or not finite'
    )
  if 0 < request.temperature < config_lib.GREEDY:
    raise ValueError(
      f'temperature {request.temperature} is between 0 and'
      f' {config_lib.GREEDY:g}; give 0, which takes the likeliest token, or more'
    )
  if not 0 < request.top_p <= 1:
    raise ValueError(f'top_p {request.top_p} is not in (0, 1]; 1 keeps all')
  if request.top_k < 0:
    raise ValueError(f'top_k {request.top_k} is below 0; 0 keeps all')
  if not 0 <= request.min_p <= 1:
    raise ValueError(f'min_p {request.min_p} is not in [0, 1]; 0 keeps all')
  if any(not len(stop) for stop in request.stop_sequences):
    raise ValueError('an empty sequence in stop_sequences; leave it out')
