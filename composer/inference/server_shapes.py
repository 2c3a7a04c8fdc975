"""Answers in OpenAI's shapes, with the project's own fields. Pure.

A choice has, where the request asked for it (`return_tokens`), a field `tokens`:

  prompt_ids, ids     of the whole context, and of what was sampled
  logprobs            of each sampled token, under the distribution that it was
                      really sampled from
  versions            of the policy that sampled each
  computed_versions   at which keys and values were computed, of context and
                      sampled tokens; -1 where they were not
  stop_reason         'stop', 'length' or 'context'
  kept                where the distribution was cut: {ids, offsets}; null where
                      those are more than the server keeps
  experts             with `return_experts`: int16 [P + S, L, K] as base64 of its
                      little-endian bytes, row by row, with its shape

Where a stop string, or a token of `stop_token_ids`, ended it, the choice has it as
`stop_reason`. With `return_token_ids` it has the ids alone, as vLLM names them: `token_ids`, and
`prompt_token_ids`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from composer.inference import server_text
from composer.inference.server_requests import Wanted
from composer.records import Completion
from composer.records import Piece


@dataclasses.dataclass(frozen=True)
class Choice:
  """One answer: what was sampled, and how it reads.

  `finish` is OpenAI's reason, `call_ids` name the calls of `said`. `trainable`:
  it is known what its tokens were drawn among. `ended_by` is the stop string or
  stop token of the request that ended it.
  """

  index: int
  context: np.ndarray  # int32 [P]
  completion: Completion
  said: server_text.Said
  finish: str
  call_ids: tuple[str, ...] = ()
  trainable: bool = True
  ended_by: str | int | None = None


def encode_array(array: np.ndarray) -> dict[str, Any]:
  data = np.ascontiguousarray(array, array.dtype.newbyteorder('<'))
  return {
    'shape': list(array.shape),
    'dtype': array.dtype.name,
    'base64': base64.b64encode(data.tobytes()).decode('ascii'),
  }


def tokens_field(choice: Choice, experts: bool) -> dict[str, Any]:
  """The field `tokens`. A float32 is written as the decimal of its double,
  which reads back equal."""
  x = choice.completion
  out = {
    'prompt_ids': choice.context.tolist(),
    'ids': x.tokens.tolist(),
    'logprobs': x.logprobs.tolist(),
    'versions': x.versions.tolist(),
    'computed_versions': x.computed_versions.tolist(),
    'stop_reason': x.stop_reason,
  }
  if not choice.trainable:
    out['kept'] = None
  elif x.kept_ids is not None and x.kept_offsets is not None:
    out['kept'] = {
      'ids': x.kept_ids.tolist(),
      'offsets': x.kept_offsets.tolist(),
    }
  if experts:
    out['experts'] = encode_array(x.experts)
  return out


def usage(choices: Sequence[Choice], n: int) -> dict[str, Any]:
  """Tokens of a whole answer, of n choices to each prompt in turn.

  A prompt counts once, whatever n is. So do those of its tokens that were cached,
  as of the choice that found the fewest: what that one had to compute the others
  may have found, and it was not there before the request.
  """
  groups = [choices[i : i + n] for i in range(0, len(choices), n)]
  out: dict[str, Any] = counts(
    sum(len(own[0].context) for own in groups),
    sum(len(x.completion.tokens) for x in choices),
  )
  cached = sum(min(x.completion.cached for x in own) for own in groups)
  out['prompt_tokens_details'] = {'cached_tokens': cached}
  return out


def counts(prompts: int, sampled: int) -> dict[str, int]:
  """Of an answer under way, of which it is not known yet what was cached."""
  return {
    'prompt_tokens': prompts,
    'completion_tokens': sampled,
    'total_tokens': prompts + sampled,
  }


def message(choice: Choice) -> dict[str, Any]:
  said = choice.said
  out: dict[str, Any] = {
    'role': 'assistant',
    'content': said.content or (None if said.calls else ''),
    'refusal': None,
  }
  if said.thinking:
    out['reasoning_content'] = said.thinking
  if said.calls:
    out['tool_calls'] = tool_calls(choice)
  if said.broken:
    out['broken_calls'] = [
      {'reason': x.reason, 'detail': x.detail, 'text': x.text}
      for x in said.broken
    ]
  return out


def tool_calls(choice: Choice) -> list[dict[str, Any]]:
  return [
    {
      'id': call_id,
      'type': 'function',
      'function': {
        'name': call.name,
        'arguments': server_text.arguments_text(call),
      },
    }
    for call_id, call in zip(choice.call_ids, choice.said.calls, strict=True)
  ]


def tool_deltas(choice: Choice) -> list[dict[str, Any]]:
  """The calls as pieces of a stream: each one's name, then its arguments."""
  out = []
  for i, call in enumerate(tool_calls(choice)):
    arguments = call['function']['arguments']
    begun = {**call, 'function': {**call['function'], 'arguments': ''}}
    out.append({'tool_calls': [{'index': i, **begun}]})
    out.append(
      {'tool_calls': [{'index': i, 'function': {'arguments': arguments}}]}
    )
  return out


def _name(i: int, text: str, wanted: Wanted) -> str:
  return f'token_id:{i}' if wanted.by_id else text


def chat_logprobs(
  tokenizer: Any, sampled: Piece | Completion, wanted: Wanted
) -> dict[str, Any]:
  """Of every sampled token, with the `wanted.top` likeliest in its place."""

  def told(i: int, logprob: float) -> dict[str, Any]:
    text, data = server_text.token_text(tokenizer, int(i))
    text = _name(int(i), text, wanted)
    return {'token': text, 'logprob': float(logprob), 'bytes': data}

  content = []
  for n, (i, logprob) in enumerate(
    zip(sampled.tokens, sampled.logprobs, strict=True)
  ):
    likely = [told(*pair) for pair in _likeliest(sampled, n, wanted.top)]
    content.append({**told(i, logprob), 'top_logprobs': likely})
  return {'content': content, 'refusal': None}


def _likeliest(
  sampled: Piece | Completion, n: int, top: int
) -> list[tuple[int, float]]:
  """(id, logprob) of the likeliest in the place of the n-th sampled token."""
  if not top or sampled.top_ids is None or sampled.top_logprobs is None:
    return []
  pairs = zip(sampled.top_ids[n, :top], sampled.top_logprobs[n], strict=False)
  return [(int(i), float(x)) for i, x in pairs if np.isfinite(x)]


def text_logprobs(
  tokenizer: Any, sampled: Piece | Completion, wanted: Wanted, offset: int = 0
) -> dict[str, Any]:
  """`offset`: characters of the answer before these tokens. Half a character
  counts as one. The likeliest are told by their text, and the sampled one with
  them; of those that read alike, the likeliest."""

  def text(i: int) -> str:
    return server_text.token_text(tokenizer, int(i))[0]

  def name(i: int) -> str:
    return _name(int(i), text(i), wanted)

  offsets, likely = [], []
  for n, (i, logprob) in enumerate(
    zip(sampled.tokens, sampled.logprobs, strict=True)
  ):
    offsets.append(offset)
    offset += len(text(i))
    found: dict[str, float] = {}
    for other, x in _likeliest(sampled, n, wanted.top):
      found.setdefault(name(other), x)
    likely.append({name(i): float(logprob), **found})
  return {
    'tokens': [name(i) for i in sampled.tokens],
    'token_logprobs': [float(x) for x in sampled.logprobs],
    'top_logprobs': likely if wanted.top else None,
    'text_offset': offsets,
  }


def characters(tokenizer: Any, ids: Iterable[int]) -> int:
  """By which `text_offset` grows over some tokens."""
  return sum(len(server_text.token_text(tokenizer, int(i))[0]) for i in ids)


def chat_choice(
  tokenizer: Any, choice: Choice, wanted: Wanted
) -> dict[str, Any]:
  said = {'message': message(choice)}
  return _choice(tokenizer, choice, said, chat_logprobs, wanted)


def text_choice(
  tokenizer: Any, choice: Choice, wanted: Wanted
) -> dict[str, Any]:
  said = {'text': choice.said.content}
  return _choice(tokenizer, choice, said, text_logprobs, wanted)


def _choice(tokenizer, choice, said, logprobs, wanted):
  """A choice that says `said`; `logprobs` is a function of their shape."""
  told = None
  if wanted.logprobs:
    told = logprobs(tokenizer, choice.completion, wanted)
  return {
    'index': choice.index,
    **said,
    'finish_reason': choice.finish,
    'logprobs': told,
    **extras(choice, wanted),
  }


def extras(choice: Choice, wanted: Wanted) -> dict[str, Any]:
  """What of a choice is told beyond OpenAI's fields, where it is asked for."""
  out: dict[str, Any] = {}
  if choice.ended_by is not None:
    out['stop_reason'] = choice.ended_by
  if wanted.ids:
    out['prompt_token_ids'] = choice.context.tolist()
    out['token_ids'] = choice.completion.tokens.tolist()
  if wanted.tokens or wanted.experts:
    out['tokens'] = tokens_field(choice, wanted.experts)
  return out


def envelope(
  kind: str, answer_id: str, created: int, model: str, session: str
) -> dict[str, Any]:
  """The outer fields; `kind` as 'chat.completion.chunk'."""
  out = {'id': answer_id, 'object': kind, 'created': created, 'model': model}
  return {**out, 'session_id': session} if session else out


def chunk(
  outer: Mapping[str, Any], index: int, inner: Mapping[str, Any]
) -> dict[str, Any]:
  """A piece of a stream, of one choice; `inner` has its delta or text."""
  choice = {'index': index, 'logprobs': None, 'finish_reason': None, **inner}
  return {**outer, 'choices': [choice]}
