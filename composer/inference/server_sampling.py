"""From a context to answers: requests to the engine, read as they are sampled.

A stop string may end within a token, and be spelt by any tokens, so the engine
cannot know it. Once a reader has found one, the engine is told how many tokens
are enough; it ends when it knows their routes. What it sampled behind them is cut
off, and neither told, nor counted, nor recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np

from composer.inference import sequence
from composer.inference import server_grammar
from composer.inference import server_text
from composer.inference.server_requests import Wanted
from composer.inference.server_state import Server
from composer.inference.server_values import ApiError
from composer.inference.server_values import invalid
from composer.records import Completion
from composer.records import Piece
from composer.records import SampleRequest

_OF_A_TOKEN = ('tokens', 'logprobs', 'versions', 'top_ids', 'top_logprobs')


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A context to go on from, and how the answer reads.

  Attributes:
    context: int32 [P].
    turn: see there.
    conversation: the digest of a chat's messages, b'' of a completion's.
    masks: gives the mask of one answer; None: it may be anything.
  """

  context: np.ndarray
  turn: server_text.Turn
  conversation: bytes = b''
  masks: Callable[[], server_grammar.Mask] | None = None


def sample_requests(
  server: Server, prompt: Prompt, wanted: Wanted, seed: int
) -> list[SampleRequest]:
  """n requests to the engine, the seeds counting up from `seed`."""
  limit = _limit(server, prompt, wanted)
  stops = _stops(server, prompt, wanted)
  told = wanted.record or wanted.tokens or wanted.experts
  most = server.config.max_kept if told else 0
  return [
    SampleRequest(
      tokens=prompt.context,
      max_tokens=limit,
      stop_tokens=stops,
      temperature=wanted.temperature,
      seed=(seed + i) & 0xFFFFFFFF,
      top_p=wanted.top_p,
      top_k=wanted.top_k,
      min_p=wanted.min_p,
      stop_sequences=wanted.stop_sequences,
      mask=_mask(server, prompt, wanted, stops),
      max_kept=most,
      top_logprobs=wanted.top > 0,
    )
    for i in range(wanted.n)
  ]


def _limit(server: Server, prompt: Prompt, wanted: Wanted) -> int:
  room = server.max_context - len(prompt.context)
  limit = wanted.max_tokens
  if limit is None:
    limit = max(min(server.config.max_tokens, room), 1)
  if limit > room:
    raise ApiError(
      f"this model's context is {server.max_context} tokens; the prompt has"
      f' {len(prompt.context)}, and {limit} are to be sampled. Shorten either',
      param='messages' if prompt.conversation else 'prompt',
      code='context_length_exceeded',
    )
  if wanted.min_tokens > limit:
    raise invalid(
      f'min_tokens={wanted.min_tokens} is more than the {limit} that may be'
      ' sampled',
      'min_tokens',
    )
  return limit


def _stops(server: Server, prompt: Prompt, wanted: Wanted) -> tuple[int, ...]:
  ends = tuple(server.template.stops(server.tokenizer))
  stops = wanted.stop_tokens
  if stops is None:
    stops = ends
  else:
    check_ids(server, stops, 'stop_token_ids')
  for run in wanted.stop_sequences:
    check_ids(server, run, 'stop_token_ids')
  if prompt.masks is not None and ends[0] not in stops:
    stops = (*stops, ends[0])  # which its form ends with
  return stops


def check_ids(server: Server, ids: Sequence[int], param: str) -> None:
  """Refuses ids that the model does not have."""
  if len(ids) and not 0 <= min(ids) <= max(ids) < server.vocab_size:
    bad = min(ids) if min(ids) < 0 else max(ids)
    raise invalid(
      f'token id {bad} must lie in 0..{server.vocab_size - 1}', param
    )


def _mask(
  server: Server, prompt: Prompt, wanted: Wanted, stops: tuple[int, ...]
) -> Callable[[np.ndarray], np.ndarray] | None:
  """What may be drawn next, of the ids sampled so far; None: anything.

  Raises:
    ApiError: nothing could be drawn, or ids that the model does not have.
  """
  if prompt.masks is not None:
    return prompt.masks()
  late = wanted.min_tokens and stops
  if not late and wanted.allowed is None and not wanted.banned:
    return None
  later = np.ones(server.vocab_size, bool)
  if wanted.allowed is not None:
    check_ids(server, wanted.allowed, 'allowed_token_ids')
    later[:] = False
    later[list(wanted.allowed)] = True
  check_ids(server, wanted.banned, 'logit_bias')
  later[list(wanted.banned)] = False
  first = later.copy()
  if late:
    first[list(stops)] = False
  if not (first.any() and later.any()):
    raise invalid(
      'allowed_token_ids, logit_bias and min_tokens leave no token to be drawn;'
      ' allow one that does not end the answer',
      'allowed_token_ids' if wanted.allowed is not None else 'logit_bias',
    )

  def mask(sampled: np.ndarray) -> np.ndarray:
    return first if len(sampled) < wanted.min_tokens else later

  return mask


async def sample(
  server: Server,
  request: SampleRequest,
  reader: server_text.Reader,
  on_piece: Callable[[Piece, server_text.Delta], None] | None = None,
) -> Completion:
  """Samples one answer, read by `reader` as it comes.

  Args:
    on_piece: called with new tokens and the text that they made certain.
  """
  if on_piece is None and not reader.turn.stop:
    completion = await server.engine.sample(request)
    reader.feed(completion.tokens)
    return completion
  pieces: list[Piece] = []

  def take(piece: Piece) -> int | None:
    if reader.stopped:
      return reader.count
    pieces.append(piece)
    before = reader.count
    delta = reader.feed(piece.tokens)
    if on_piece is not None:
      on_piece(_part(piece, slice(reader.count - before)), delta)
    return reader.count if reader.stopped else None

  completion = await server.engine.sample(
    dataclasses.replace(request, on_tokens=take)
  )
  seen = sum(len(piece.tokens) for piece in pieces)
  if seen < len(completion.tokens):  # an engine that gives no pieces
    take(_part(completion, slice(seen, None)))
  if not reader.stopped:
    return completion
  return _cut(completion, reader.count, pieces)


def _part(source: Piece | Completion, where: slice) -> Piece:
  """Some tokens of a piece or of an answer, but for what they were drawn from."""
  return Piece(**_of_tokens(source, where))


def _of_tokens(source: Any, where: slice) -> dict[str, Any]:
  found = {name: getattr(source, name) for name in _OF_A_TOKEN}
  return {k: x if x is None else x[where] for k, x in found.items()}


def _cut(
  completion: Completion, count: int, pieces: Sequence[Piece]
) -> Completion:
  """The answer up to its `count`-th token; `pieces` are what came of it."""
  end = len(completion.experts) - len(completion.tokens) + count
  ids, offsets = completion.kept_ids, completion.kept_offsets
  if offsets is not None:
    kept = {
      'kept_ids': ids[: offsets[count]],
      'kept_offsets': offsets[: count + 1],
    }
  else:
    # A later token may have been drawn among too many for all to be kept.
    known = [ids for piece in pieces for ids in piece.kept or ()]
    told = 0 < count <= len(known)
    kept = sequence.ragged(known[:count]) if told else {}
  return dataclasses.replace(
    completion,
    **_of_tokens(completion, slice(count)),
    **kept,
    experts=completion.experts[:end],
    computed_versions=completion.computed_versions[:end],
    stop_reason='stop',
  )


def trainable(request: SampleRequest, completion: Completion) -> bool:
  """Whether the answer tells what its tokens were drawn among."""
  return not sequence.cuts(request) or completion.kept_ids is not None
