"""An engine behind HTTP as a `Sampler`: `composer serve`, asked by token ids.

Ids go out and come back, with logprobs, versions and routes, so that a session
that acts through a server records what one beside its engine would. The server
is told not to record: whoever uses a `Sampler` records for itself.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
from typing import Any

import aiohttp
import numpy as np

from composer import wire
from composer.records import Completion
from composer.records import EngineError
from composer.records import Piece
from composer.records import SampleRequest
from composer.records import Segment

ATTEMPTS = 4  # of a request; equal seeds give equal answers, so none is lost
BACKOFF_S = 0.2  # before the second; four times as long before each next
_AGAIN = (408, 429, 502, 503, 504)


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A server: `url` as http://127.0.0.1:8000/v1; times in seconds."""

  url: str
  model: str
  token: str = ''
  request_s: float = 600.0
  connect_s: float = 10.0


class RemoteSampler:
  """`records.Sampler` over HTTP, of one event loop; `async with` closes it.

  Attributes:
    version: the newest that sampled a token, -1 before the first answer.
  """

  def __init__(self, endpoint: Endpoint):
    if not endpoint.url.startswith(('http://', 'https://')):
      raise ValueError(
        f'url={endpoint.url!r} must be as http://127.0.0.1:8000/v1'
      )
    self.version = -1
    self._endpoint = endpoint
    self._client: aiohttp.ClientSession | None = None

  async def __aenter__(self) -> RemoteSampler:
    return self

  async def __aexit__(self, *exc: object) -> None:
    await self.close()

  async def close(self) -> None:
    if self._client is not None:
      await self._client.close()
      self._client = None

  async def sample(self, request: SampleRequest) -> Completion:
    """Answers a request.

    Tokens are given to `on_tokens` in one piece, at the end.

    Raises:
      ValueError: the server refused the request, or it has a mask or wants
        `top_logprobs`.
      EngineError: the server could not be reached, failed, or answered with
        something else.
    """
    if request.mask is not None:
      raise ValueError(
        'SampleRequest.mask cannot be sent to a server; sample beside the engine'
      )
    if request.top_logprobs:
      raise ValueError(
        'SampleRequest.top_logprobs is not asked of a server; its API gives them'
        ' as text'
      )
    body = _body(self._endpoint.model, request)
    answer = await self._ask('POST', 'completions', body)
    completion = _completion(request, answer)
    if len(completion.versions):
      self.version = max(self.version, int(completion.versions.max()))
    if request.on_tokens is not None:
      kept, offsets = completion.kept_ids, completion.kept_offsets
      request.on_tokens(
        Piece(
          completion.tokens,
          completion.logprobs,
          completion.versions,
          None if kept is None else tuple(np.split(kept, offsets[1:-1])),
        )
      )
    return completion

  async def session(self, name: str) -> tuple[Segment, ...]:
    """The segments of a session that the server recorded.

    Raises:
      ValueError: there is none of that name.
      EngineError: as `sample`.
    """
    answer = await self._ask('GET', f'sessions/{name}', None)
    try:
      return tuple(
        wire.decode_segment(base64.b64decode(x['record'], validate=True))
        for x in answer['segments']
      )
    except (KeyError, TypeError, ValueError) as error:
      raise EngineError(
        f'{self._endpoint.url}: no session in the answer: {error!r}'
      ) from error

  async def feedback(self, name: str, kind: str, value: float) -> None:
    """Tells the server how a session went; raises as `session` does."""
    body = {'kind': kind, 'value': value}
    await self._ask('POST', f'sessions/{name}/feedback', body)

  async def _ask(self, method: str, path: str, body: Any) -> Any:
    url = f'{self._endpoint.url.rstrip("/")}/{path}'
    problem = ''
    for attempt in range(ATTEMPTS):
      if attempt:
        await asyncio.sleep(BACKOFF_S * 4 ** (attempt - 1))
      try:
        async with self._open().request(method, url, json=body) as response:
          if response.status == 200:
            return await _json(response)
          problem = await _problem(response)
          if 400 <= response.status < 500 and response.status not in _AGAIN:
            raise ValueError(f'{url}: {problem}')
          if response.status not in _AGAIN:
            break
      except (aiohttp.ClientError, TimeoutError, OSError) as error:
        problem = f'{type(error).__name__}: {error}'
    raise EngineError(f'{url}: {problem}')

  def _open(self) -> aiohttp.ClientSession:
    if self._client is None:
      token = self._endpoint.token
      self._client = aiohttp.ClientSession(
        headers={'Authorization': f'Bearer {token}'} if token else {},
        timeout=aiohttp.ClientTimeout(
          total=self._endpoint.request_s,
          sock_connect=self._endpoint.connect_s,
        ),
        # A rollout has hundreds of sessions at once.
        connector=aiohttp.TCPConnector(limit=0),
      )
    return self._client


async def _json(response: aiohttp.ClientResponse) -> Any:
  try:
    return await response.json()
  except ValueError as error:  # not the request's fault
    raise EngineError(
      f'{response.url}: the answer is no JSON: {error}'
    ) from error


async def _problem(response: aiohttp.ClientResponse) -> str:
  try:
    text = (await response.json())['error']['message']
  except (aiohttp.ClientError, KeyError, TypeError, ValueError):
    text = response.reason or ''
  return f'HTTP {response.status}: {text}'


def _body(model: str, request: SampleRequest) -> dict[str, Any]:
  stops = [*request.stop_tokens, *map(list, request.stop_sequences)]
  return {
    'model': model,
    'prompt': np.asarray(request.tokens).tolist(),
    'max_tokens': request.max_tokens,
    'stop_token_ids': stops,
    'temperature': request.temperature,
    'seed': request.seed,
    'top_p': request.top_p,
    'top_k': request.top_k,
    'min_p': request.min_p,
    'return_tokens': True,
    'return_experts': True,
    'record': False,
  }


def _completion(request: SampleRequest, answer: Any) -> Completion:
  """Reads the field `tokens` of an answer (`inference.server_shapes`).

  Raises:
    EngineError: something is missing, or arrays do not fit each other.
  """
  try:
    found = answer['choices'][0]['tokens']
    kept = found.get('kept', ())
    if kept is None:  # not the same as all ids: nobody could train on it
      raise EngineError(
        'an answer was drawn among more ids a token than the server keeps;'
        ' lower top_p or top_k, or serve with a higher --max-kept'
      )
    completion = Completion(
      tokens=np.array(found['ids'], np.int32),
      logprobs=np.array(found['logprobs'], np.float32),
      versions=np.array(found['versions'], np.int32),
      experts=_array(found['experts']),
      computed_versions=np.array(found['computed_versions'], np.int32),
      stop_reason=str(found['stop_reason']),
      kept_ids=np.array(kept['ids'], np.int32) if kept else None,
      kept_offsets=np.array(kept['offsets'], np.int32) if kept else None,
    )
  except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
    raise EngineError(
      f'the server answered without the tokens: {error!r}'
    ) from error
  sampled = len(completion.tokens)
  total = len(request.tokens) + sampled
  lengths = {
    'logprobs': (len(completion.logprobs), sampled),
    'versions': (len(completion.versions), sampled),
    'experts': (len(completion.experts), total),
    'computed_versions': (len(completion.computed_versions), total),
  }
  for name, (got, wanted) in lengths.items():
    if got != wanted:
      raise EngineError(
        f'the server answered {got} {name} where {wanted} belong to the tokens'
      )
  return completion


def _array(value: Any) -> np.ndarray:
  """int16, of base64 and a shape."""
  try:
    data = base64.b64decode(value['base64'], validate=True)
  except binascii.Error as error:
    raise ValueError(f'experts: {error}') from error
  if value['dtype'] != 'int16':
    raise ValueError(f'experts are {value["dtype"]}, and not int16')
  return np.frombuffer(data, '<i2').astype(np.int16).reshape(value['shape'])
