"""Text to token ids and back, as the model of a server reads and writes them.

What a harness needs that keeps contexts as ids: the ids of a conversation are
those that /v1/chat/completions would send to the engine, answers that were
sampled here included, and can be sent to /v1/completions.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from composer.inference import server_answers
from composer.inference import server_requests
from composer.inference import server_sampling
from composer.inference import server_text
from composer.inference.server_fields import refuse_unknown
from composer.inference.server_state import Server
from composer.inference.server_values import flag
from composer.inference.server_values import invalid

_OF_CHAT = ('messages', 'tools', 'tool_choice', 'metadata')


async def tokenize(
  server: Server, request: web.Request, body: bytes
) -> web.Response:
  """POST /tokenize: {"prompt": TEXT}, or {"messages": [...], "tools": [...]}.

  Answers {count, max_model_len, tokens}, and with `return_token_strs` the text
  of each as `token_strs`.
  """
  header = request.headers.get(server_answers.SESSION_HEADER, '')
  found = server_requests.load(body)
  known = ('model', 'return_token_strs')
  if 'messages' in found:
    refuse_unknown(found, (*known, *_OF_CHAT))
    named = {'model': server.config.model}
    asked = {key: found[key] for key in _OF_CHAT if key in found}
    parsed = server_requests.chat({**named, **asked}, header)
    messages, conversation = server.table.with_tokens(
      parsed.messages, parsed.wanted.session
    )
    ids = await asyncio.to_thread(
      lambda: server_answers.render(
        server, parsed, messages, conversation
      ).context.tolist()
    )
  else:
    refuse_unknown(found, (*known, 'prompt'))
    prompt = found.get('prompt')
    if not isinstance(prompt, str):
      raise invalid(
        'give a prompt, which must be a text, or messages',
        'prompt',
        'invalid_type' if 'prompt' in found else 'missing_required_parameter',
      )
    ids = await asyncio.to_thread(
      lambda: list(map(int, server.tokenizer.encode(prompt)))
    )
  _check_model(server, found)
  out: dict[str, Any] = {
    'count': len(ids),
    'max_model_len': server.max_context,
    'tokens': ids,
  }
  if flag(found, 'return_token_strs'):
    out['token_strs'] = [server_text.plain(server.tokenizer, [i]) for i in ids]
  return web.json_response(out)


async def detokenize(
  server: Server, request: web.Request, body: bytes
) -> web.Response:
  """POST /detokenize: {"tokens": [...]}, to {prompt}; control tokens by name,
  bytes that are no UTF-8 as U+FFFD."""
  found = server_requests.load(body)
  refuse_unknown(found, ('model', 'tokens'))
  _check_model(server, found)
  ids = server_requests.token_ids(found.get('tokens'), 'tokens')
  server_sampling.check_ids(server, ids, 'tokens')
  text = await asyncio.to_thread(server_text.plain, server.tokenizer, ids)
  return web.json_response({'prompt': text})


def _check_model(server: Server, body: dict[str, Any]) -> None:
  """There is but one: it need not be named."""
  if 'model' in body:
    server_answers.check_model(server, server_requests.model_of(body))
