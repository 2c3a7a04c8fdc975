"""An OpenAI-compatible HTTP server in front of an engine.

    POST /v1/chat/completions          tools, streaming, logprobs, n, stop, seed
    POST /v1/completions               text or token ids
    POST /tokenize, /detokenize        also below /v1
    GET  /v1/models, /v1/models/NAME
    GET  /v1/sessions/ID               what was recorded
    POST /v1/sessions/ID/feedback      what a user said of it
    GET  /health, /metrics

Beyond OpenAI's fields, requests take `structured_outputs`, `top_k`, `min_p`,
`stop_token_ids`, `min_tokens`, `ignore_eos`, `allowed_token_ids`,
`include_stop_str_in_output`, `skip_special_tokens`, `return_token_ids`,
`return_tokens_as_token_ids`, `return_tokens`, `return_experts`, `record`,
`stream_options.continuous_usage_stats` and the session (header X-Session-Id or
`metadata.session_id`); answers have `session_id`, `reasoning_content`,
`broken_calls`, `stop_reason` and `tokens` (`server_shapes`). What others take and
this server does not is refused with what there is instead (`server_fields`). The
header X-Request-Id names a request in its answer and in the log.

A server listens on loopback unless told otherwise, and elsewhere only with a
bearer token. What a client gets wrong is answered in OpenAI's shape and logged,
and touches nobody else: a body is refused by its length before it is read, a
request whose client leaves is cancelled in the engine.

Settings are in `server_state`, connections in `server_http`; bodies are read by
`server_requests`, bound to a form by `server_grammar`, sampled by
`server_sampling`, answered by `server_answers`, worded by `server_text` and
`server_shapes`.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
import contextlib
import hmac
import json
import math
import time
from typing import Any

from aiohttp import web

from composer import wire
from composer.inference import server_answers
from composer.inference import server_http
from composer.inference import server_metrics
from composer.inference import server_requests
from composer.inference import server_sessions
from composer.inference import server_tokens
from composer.inference.server_http import SERVER
from composer.inference.server_state import LOG
from composer.inference.server_state import Engine
from composer.inference.server_state import Server
from composer.inference.server_state import ServerConfig
from composer.inference.server_state import is_loopback
from composer.inference.server_state import validate
from composer.inference.server_values import ApiError
from composer.inference.server_values import invalid
from composer.templates.protocol import Template

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make(
  config: ServerConfig,
  engine: Engine,
  template: Template,
  tokenizer: Any,
  *,
  vocab_size: int,
  max_context: int,
  table: server_sessions.Table,
) -> Server:
  """A server that does not listen yet.

  Args:
    config: settings, checked here.
    engine: answers; it has weights.
    template, tokenizer: of the model.
    vocab_size: of the model; ids below are accepted.
    max_context: tokens of a sequence in the engine.
    table: of sessions.

  Raises:
    ValueError: see `server_state.validate`.
  """
  validate(config)
  return Server(
    config,
    engine,
    template,
    tokenizer,
    vocab_size,
    max_context,
    table,
    int(time.time()),
  )


def app(server: Server) -> web.Application:
  """The routes."""
  out = web.Application(middlewares=[_outermost])
  out[SERVER] = server
  out.on_response_prepare.append(server_http.name_answer)
  for path, handler in (
    ('/v1/chat/completions', _chat),
    ('/v1/completions', _completions),
    ('/v1/sessions/{id}/feedback', _feedback),
    ('/tokenize', _tokenize),
    ('/v1/tokenize', _tokenize),
    ('/detokenize', _detokenize),
    ('/v1/detokenize', _detokenize),
  ):
    out.router.add_post(path, handler, expect_handler=server_http.expect)
  for path, handler in (
    ('/v1/models', _models),
    ('/v1/models/{id:.+}', _model),
    ('/v1/sessions/{id}', _session),
    ('/health', _health),
    ('/metrics', _metrics),
  ):
    out.router.add_get(path, handler)
  return out


def listening(server: Server) -> contextlib.AbstractAsyncContextManager[str]:
  """Listens; gives the address, see `server_http.listening`."""
  return server_http.listening(server, app(server))


# --- around every request ----------------------------------------------------


@web.middleware
async def _outermost(
  request: web.Request, handler: Handler
) -> web.StreamResponse:
  """Who may ask, errors in OpenAI's shape, one line in the log for each."""
  server = request.app[SERVER]
  name = server_http.route(request)
  asked = server_http.request_id(request)
  try:
    _admit(server, request)
    response = await handler(request)
    server.metrics.requests[name, response.status] += 1
    return response
  except asyncio.CancelledError:
    if server.cut:
      server_answers.go_on()
      failed = server_answers.stopping()
      return _told(server, request, name, asked, failed)
    server.metrics.cancelled += 1
    LOG.info('%s %s: the client left (request %s)', request.method, name, asked)
    raise
  except ConnectionError as error:
    server.metrics.cancelled += 1
    LOG.info(
      '%s %s: the client left: %s (request %s)',
      request.method,
      name,
      error,
      asked,
    )
    if request.transport is not None:
      request.transport.abort()
    # It reaches nobody; raised, the error would be logged as a fault of ours.
    return web.Response(status=499)
  except ApiError as error:
    failed = error
  except web.HTTPException as error:
    failed = server_http.unknown(error, request)
  except RecursionError:  # what could be read may still be too deep to tell of
    failed = server_requests.too_deep()
  except Exception as error:  # ours: told, and the server goes on
    LOG.exception('%s %s (request %s)', request.method, name, asked)
    failed = server_answers.ours(error)
  return _told(server, request, name, asked, failed)


def _told(
  server: Server, request: web.Request, name: str, asked: str, failed: ApiError
) -> web.Response:
  """An error, counted and logged."""
  server.metrics.requests[name, failed.status] += 1
  # A client's text may hold anything; one line of it, escaped.
  LOG.warning(
    '%s %s: %d %s (request %s)',
    request.method,
    name,
    failed.status,
    ascii(str(failed)),
    asked,
  )
  return server_http.refusal(failed)


def _admit(server: Server, request: web.Request) -> None:
  """Refuses who may not ask."""
  config = server.config
  if request.path == '/health':
    return
  if config.token:
    scheme, _, given = request.headers.get('Authorization', '').partition(' ')
    fits = hmac.compare_digest(
      given.encode('utf-8', 'surrogateescape'), config.token.encode()
    )
    if scheme.lower() != 'bearer' or not fits:
      raise ApiError(
        'give the token of this server as the API key (Authorization: Bearer'
        ' TOKEN)',
        status=401,
        code='invalid_api_key',
      )
  elif not is_loopback(request.url.host or ''):
    # A page in a browser may have had its name changed to this machine.
    raise ApiError(
      'without a token this server answers to localhost and 127.0.0.1 only',
      status=403,
      code='forbidden_host',
    )


async def _served(request: web.Request, answer) -> web.StreamResponse:
  """Answers a request that has a body, if there is room for one more."""
  server = request.app[SERVER]
  if server.draining:
    raise server_answers.stopping()
  if len(server.active) >= server.config.max_requests:
    count = len(server.active) + 1
    raise server_answers.too_many(f'{count} requests', server)
  task = asyncio.current_task()
  assert task is not None
  server.active.add(task)
  try:
    return await answer(
      server, request, await server_http.body(server, request)
    )
  finally:
    server.active.discard(task)


# --- routes ------------------------------------------------------------------


async def _chat(request: web.Request) -> web.StreamResponse:
  return await _served(request, server_answers.chat)


async def _completions(request: web.Request) -> web.StreamResponse:
  return await _served(request, server_answers.completions)


async def _tokenize(request: web.Request) -> web.StreamResponse:
  return await _served(request, server_tokens.tokenize)


async def _detokenize(request: web.Request) -> web.StreamResponse:
  return await _served(request, server_tokens.detokenize)


def _about(server: Server) -> dict[str, Any]:
  return {
    'id': server.config.model,
    'object': 'model',
    'created': server.began,
    'owned_by': 'composer',
    'version': server.engine.version,
    'max_context': server.max_context,
    'max_model_len': server.max_context,  # as others name it
    'template': server.template.name,
  }


async def _models(request: web.Request) -> web.Response:
  server = request.app[SERVER]
  return web.json_response({'object': 'list', 'data': [_about(server)]})


async def _model(request: web.Request) -> web.Response:
  server = request.app[SERVER]
  if request.match_info['id'] != server.config.model:
    raise ApiError(
      f'there is no model {request.match_info["id"][:80]!r}',
      status=404,
      param='model',
      code='model_not_found',
    )
  return web.json_response(_about(server))


async def _health(request: web.Request) -> web.Response:
  """200 while requests are taken and the engine works, else 503."""
  server = request.app[SERVER]
  status, problem = 'ok', ''
  try:
    server.engine.check()
  except Exception as error:
    status, problem = 'failed', str(error)
  if server.draining:
    status = 'draining'
  body = {'status': status, 'version': server.engine.version}
  if problem:
    body['error'] = problem
  return web.json_response(body, status=200 if status == 'ok' else 503)


async def _metrics(request: web.Request) -> web.Response:
  server = request.app[SERVER]
  gauges = {
    'active_requests': len(server.active),
    'sessions': len(server.table),
    'answers': server.answers,
    'session_tokens': server.table.tokens,
    'session_feedback_bytes': server.table.feedback_bytes,
    'sessions_expired': server.table.expired,
  }
  engine = server.engine
  lines = server_metrics.text(
    server.metrics, engine.stats, engine.pages, gauges
  )
  return web.Response(
    text='\n'.join([*lines, '']),
    headers={'Content-Type': 'text/plain; version=0.0.4; charset=utf-8'},
  )


def _found(request: web.Request) -> server_sessions.Session:
  name = request.match_info['id']
  session = request.app[SERVER].table.get(name)
  if session is None:
    raise ApiError(
      f'there is no session {name[:128]!r}; it may have expired',
      status=404,
      code='session_not_found',
    )
  return session


async def _session(request: web.Request) -> web.Response:
  """The session, each segment with its tokens, and whole as `wire` writes it.

  `record` is the base64 of `wire.encode_segment`: routes, logprobs, versions.
  """
  server, session = request.app[SERVER], _found(request)
  segments = server.table.segments(session)
  encoded = await asyncio.to_thread(
    lambda: [
      base64.b64encode(wire.encode_segment(x)).decode() for x in segments
    ]
  )
  body = {
    **server_sessions.describe(session),
    'segments': [
      {
        'tokens': x.tokens.tolist(),
        'sampled': x.sampled.tolist(),
        'stop_reason': x.stop_reason,
        'parent': x.parent,
        'record': record,
      }
      for x, record in zip(segments, encoded, strict=True)
    ],
  }
  return web.json_response(body)


async def _feedback(request: web.Request) -> web.Response:
  """Keeps {"kind": TEXT, "value": NUMBER, "detail": ANYTHING} of a session.

  `kind` says what was observed ('thumbs', 'accepted', 'follow_up', ...), and
  `value` how good it was, larger being better. A second one does not replace
  the first.
  """
  return await _served(request, _add_feedback)


async def _add_feedback(
  server: Server, request: web.Request, data: bytes
) -> web.Response:
  body = server_requests.load(data)
  session = _found(request)
  kind, value = body.get('kind'), body.get('value')
  if not isinstance(kind, str) or not 0 < len(kind) <= 64:
    raise invalid('kind must be 1 to 64 characters', 'kind')
  if type(value) not in (int, float) or not math.isfinite(value):
    raise invalid('value must be a finite number', 'value')
  surplus = sorted(set(body) - {'kind', 'value', 'detail'})
  if surplus:
    raise invalid(
      f'unknown parameter: {surplus[0][:80]!r}', surplus[0][:80],
      'unknown_parameter',
    )  # fmt: skip
  detail = body.get('detail')
  if len(json.dumps(detail)) > 65536:
    raise invalid('detail is more than 64 KB', 'detail')
  feedback = {
    'kind': kind, 'value': value, 'detail': detail, 'time': time.time(),
  }  # fmt: skip
  try:
    count = await server.table.add_feedback(session, feedback)
  except ValueError as error:
    raise ApiError(str(error), status=409) from error
  except OSError as error:
    raise ApiError(
      f'the feedback could not be written: {error.strerror or error}',
      status=507,
      kind='server_error',
    ) from error
  return web.json_response({'session_id': session.id, 'feedback': count})
