"""HTTP beneath the routes: connections, bodies, and how a request is refused.

What cannot be read as HTTP at all (a flood of headers, a broken length, no host)
never reaches a route; it is refused in the same shape as everything else, logged
in one line and counted. A connection over which no request has come for `IDLE_S`
is closed, so that nobody keeps files of this process open by sending nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import re
import secrets
import socket
from typing import Any

from aiohttp import web

from composer.inference.server_state import LOG
from composer.inference.server_state import Server
from composer.inference.server_state import ServerConfig
from composer.inference.server_values import ApiError

BACKLOG = 4096  # connections that wait to be accepted; a group's come at once
IDLE_S = 75.0  # clients close theirs sooner, so none sends into a closed one
END_S = 6.0  # for those that are cut off to be told so
LINGER_S = 10.0  # in which a client may finish sending what was refused
REQUEST_ID = 'X-Request-Id'
UNREADABLE = 'unreadable'  # the route of what is no HTTP
SERVER = web.AppKey('server', Server)
_NAME = re.compile(r'[!-~]{1,128}')
_asked: contextvars.ContextVar[str] = contextvars.ContextVar('asked')


# --- connections -------------------------------------------------------------


class Connection(web.RequestHandler):
  """A connection whose unreadable requests are refused as any other."""

  __slots__ = ('_owner',)

  def __init__(self, owner: Server, manager: web.Server, **settings: Any):
    super().__init__(manager, **settings)
    self._owner = owner

  def handle_error(
    self,
    request: web.BaseRequest,
    status: int = 500,
    exc: BaseException | None = None,
    message: str | None = None,
  ) -> web.StreamResponse:
    """Tells of a request that no route has seen; the connection ends with it.

    Raises:
      ConnectionError: an answer has begun, so no other can be sent.
    """
    if request.writer.output_size > 0:
      raise ConnectionError('an answer has begun already')
    if status >= 500:
      LOG.error('a request failed outside its route', exc_info=exc)
      failed = ApiError('the server failed', status=500, kind='server_error')
    else:
      why = ' '.join((message or 'unknown').split())[:300]
      failed = ApiError(
        f'the request is no HTTP that is read here: {why}',
        status=status,
        code='invalid_http',
      )
      LOG.warning(
        '%s from %s: %d %s', UNREADABLE, request.remote, status, ascii(why)
      )
    self._owner.metrics.requests[UNREADABLE, status] += 1
    response = refusal(failed)
    response.force_close()
    return response


@contextlib.asynccontextmanager
async def listening(server: Server, routes: web.Application):
  """Listens; gives the address, as http://127.0.0.1:8000.

  At the end no new requests are taken, those under way have `drain_s` to end,
  and the rest are cancelled.

  Raises:
    ValueError: the address cannot be listened at.
  """
  config = server.config
  runner = web.AppRunner(
    routes, handler_cancellation=True, access_log=None, shutdown_timeout=1.0
  )
  await runner.setup()
  loop = asyncio.get_running_loop()
  connection = functools.partial(
    Connection,
    server,
    runner.server,
    loop=loop,
    access_log=None,
    keepalive_timeout=IDLE_S,
    lingering_time=LINGER_S,
  )
  try:
    listener = await loop.create_server(
      connection, config.host.strip('[]'), config.port, backlog=BACKLOG
    )
  except OSError as error:
    await runner.cleanup()
    raise _taken(config, error) from error
  try:
    host, port = listener.sockets[0].getsockname()[:2]
    yield f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'
  finally:
    server.draining = True
    listener.close()
    await _drain(server)
    await runner.cleanup()


def check_free(config: ServerConfig) -> None:
  """Refuses an address that is taken, before a model is read to serve there.

  Raises:
    ValueError: it cannot be listened at.
  """
  host = config.host.strip('[]')
  try:
    for family, kind, protocol, _, address in socket.getaddrinfo(
      host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
      with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
  except OSError as error:
    raise _taken(config, error) from error


def _taken(config: ServerConfig, error: OSError) -> ValueError:
  return ValueError(
    f'cannot listen at {config.host} port {config.port}:'
    f' {error.strerror or error}; choose another --port, or 0 for a free one'
  )


async def _drain(server: Server) -> None:
  left = set(server.active)
  if left:
    LOG.info('waiting for %d requests under way', len(left))
    _, left = await asyncio.wait(left, timeout=server.config.drain_s)
  server.cut = True
  for task in left:
    task.cancel()
  if left:
    LOG.warning(
      '%d requests did not end within %g s and were cancelled',
      len(left),
      server.config.drain_s,
    )
    await asyncio.wait(left, timeout=max(server.config.drain_s, END_S))


# --- names of requests -------------------------------------------------------


def request_id(request: web.Request) -> str:
  """What the client calls its request, or a name that is drawn for it.

  It stands in the log and in the head of the answer (`name_answer`), as
  clients show it to their users. Called once a request, on its task.
  """
  given = request.headers.get(REQUEST_ID, '')
  found = given if _NAME.fullmatch(given) else f'req_{secrets.token_hex(12)}'
  _asked.set(found)
  return found


async def name_answer(
  request: web.Request, response: web.StreamResponse
) -> None:
  """Before the head of any answer is sent."""
  response.headers[REQUEST_ID] = _asked.get()


# --- refusals ----------------------------------------------------------------


def refusal(failed: ApiError) -> web.Response:
  """The answer to a request that is refused, or could not be served."""
  response = web.json_response(failed.body(), status=failed.status)
  if failed.status == 401:
    response.headers['WWW-Authenticate'] = 'Bearer'
  if failed.status in (429, 503):
    response.headers['Retry-After'] = '1'
  if failed.allow:
    response.headers['Allow'] = ', '.join(sorted(failed.allow))
  return response


def route(request: web.Request) -> str:
  """The path of the route as it is declared, or 'unknown'."""
  found = request.match_info.route.resource
  return found.canonical if found is not None else 'unknown'


def unknown(error: web.HTTPException, request: web.Request) -> ApiError:
  """What there is instead of a path, or a method of one, that there is not."""
  asked = f'{request.method} {request.path[:200]}'
  if isinstance(error, web.HTTPMethodNotAllowed):
    allowed = tuple(sorted(error.allowed_methods))
    return ApiError(
      f'{asked}: {error.reason}; this path takes {" and ".join(allowed)}',
      status=error.status,
      code='method_not_allowed',
      allow=allowed,
    )
  if error.status != 404:
    return ApiError(f'{asked}: {error.reason}', status=error.status)
  known = sorted({x.canonical for x in request.app.router.resources()})
  return ApiError(
    f'{asked}: {error.reason}; this server has {", ".join(known)}',
    status=404,
    code='not_found',
  )


# --- bodies ------------------------------------------------------------------


async def expect(request: web.Request) -> web.Response | None:
  """A client that asks before it sends its body is told of the limit first."""
  request_id(request)
  try:
    _check_length(request.app[SERVER], request)
  except ApiError as error:  # no middleware is around this
    server = request.app[SERVER]
    server.metrics.requests[route(request), error.status] += 1
    LOG.warning('%s: %d %s', request.path[:200], error.status, error)
    return refusal(error)
  if request.headers.get('Expect', '').lower() == '100-continue':
    await request.writer.write(b'HTTP/1.1 100 Continue\r\n\r\n')
    request.writer.output_size = 0
  return None


async def body(server: Server, request: web.Request) -> bytes:
  """The body, no more of it than the limit, in limited time.

  Raises:
    ApiError: it is no JSON by its type, too large, late or broken.
  """
  if request.content_type != 'application/json':
    # Any page may have a browser send other types here, unasked.
    raise ApiError(
      f'Content-Type is {request.content_type}; send application/json',
      status=415,
      code='unsupported_media_type',
    )
  _check_length(server, request)
  parts, size, most = [], 0, server.config.max_body
  try:
    async with asyncio.timeout(server.config.body_s):
      async for part in request.content.iter_any():
        size += len(part)
        if size > most:
          raise _too_large(f'{size} bytes and more', most)
        parts.append(part)
  except TimeoutError:
    raise ApiError(
      f'the body did not arrive within {server.config.body_s:g} s', status=408
    ) from None
  except web.RequestPayloadError as error:
    raise ApiError(f'the body is broken: {error}') from error
  return b''.join(parts)


def _check_length(server: Server, request: web.Request) -> None:
  length, most = request.content_length, server.config.max_body
  if length is not None and length > most:
    raise _too_large(f'{length} bytes', most)


def _too_large(what: str, most: int) -> ApiError:
  return ApiError(
    f'a body of {what} is more than the {most} that are read',
    status=413,
    code='request_too_large',
  )
