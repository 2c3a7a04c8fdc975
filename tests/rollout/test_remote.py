"""A sampler over HTTP gives what the engine behind the server gives."""

import asyncio
import base64
import dataclasses

from aiohttp import test_utils
from aiohttp import web
import numpy as np
import pytest

from composer.records import EngineError
from composer.records import SampleRequest
from composer.rollout import remote

REQUEST = SampleRequest(np.array([1, 2, 3], np.int32), 4, (9,), 0.5, 17)


def answer(**changes):
  """A right answer of two tokens, of one MoE layer and K = 2."""
  experts = np.arange(10, dtype='<i2')
  tokens = {
    'ids': [4, 9],
    'logprobs': [-0.1, float(np.float32(-1.7))],
    'versions': [3, 4],
    'computed_versions': [3, 3, 3, 4, -1],
    'stop_reason': 'stop',
    'kept': {'ids': [4, 5, 9], 'offsets': [0, 2, 3]},
    'experts': {
      'shape': [5, 1, 2],
      'dtype': 'int16',
      'base64': base64.b64encode(experts.tobytes()).decode(),
    },
  }
  return {'choices': [{'tokens': {**tokens, **changes}}]}


def ask(replies, request=REQUEST, token='', **fields):
  """What a sampler makes of replies (status, JSON), and what it sent."""
  bodies = []

  async def reply(got):
    bodies.append((await got.json(), got.headers.get('Authorization')))
    status, body = replies.pop(0)
    if status is None:
      got.transport.close()
    if isinstance(body, bytes):
      return web.Response(body=body, content_type='application/json')
    return web.json_response(body, status=status or 200)

  async def go():
    app = web.Application()
    app.router.add_post('/v1/completions', reply)
    async with test_utils.TestServer(app) as server:
      endpoint = remote.Endpoint(
        str(server.make_url('/v1')), 'm', token, **fields
      )
      async with remote.RemoteSampler(endpoint) as sampler:
        return await sampler.sample(request), sampler.version

  return *asyncio.run(go()), bodies


def test_all_that_an_engine_tells():
  pieces = []
  request = SampleRequest(
    REQUEST.tokens, 4, (9,), 0.5, 17, 0.9, 5, 0.01, ((1, 2),),
    on_tokens=pieces.append,
  )  # fmt: skip
  got, version, bodies = ask([(200, answer())], request, token='secret')
  assert got.tokens.tolist() == [4, 9] and got.tokens.dtype == np.int32
  assert got.logprobs.tolist() == [np.float32(-0.1), np.float32(-1.7)]
  assert got.experts.tolist() == np.arange(10).reshape(5, 1, 2).tolist()
  assert got.experts.dtype == np.int16 and got.stop_reason == 'stop'
  assert got.computed_versions.tolist() == [3, 3, 3, 4, -1]
  assert got.kept_offsets.tolist() == [0, 2, 3] and version == 4
  assert [x.tokens.tolist() for x in pieces] == [[4, 9]]
  assert [x.tolist() for x in pieces[0].kept] == [[4, 5], [9]]
  ((body, token),) = bodies
  assert token == 'Bearer secret'
  wanted = {'prompt': [1, 2, 3], 'seed': 17, 'temperature': 0.5, 'top_k': 5}
  wanted |= {'stop_token_ids': [9, [1, 2]], 'record': False, 'max_tokens': 4}
  assert {key: body[key] for key in wanted} == wanted


def test_tries_again(monkeypatch):
  monkeypatch.setattr(remote, 'BACKOFF_S', 0.0)
  error = {'error': {'message': 'the server stops'}}
  replies = [(503, error), (None, None), (429, error), (200, answer())]
  got, _, bodies = ask(replies)
  assert got.tokens.tolist() == [4, 9]
  assert len({str(x) for x in bodies}) == 1  # the very same request
  with pytest.raises(EngineError, match='the server stops'):
    ask([(503, error)] * remote.ATTEMPTS)


def test_refused_and_failed():
  with pytest.raises(ValueError, match='too long'):
    ask([(400, {'error': {'message': 'too long'}})])
  with pytest.raises(EngineError, match='HTTP 500: Internal'):
    ask([(500, 'x')])
  masked = SampleRequest(REQUEST.tokens, 1, (), 1.0, 0, mask=lambda x: x)
  with pytest.raises(ValueError, match='mask'):
    ask([], masked)
  with pytest.raises(ValueError, match='top_logprobs'):
    ask([], dataclasses.replace(REQUEST, top_logprobs=True))
  with pytest.raises(ValueError, match='http'):
    remote.RemoteSampler(remote.Endpoint('localhost:8000', 'm'))


@pytest.mark.parametrize(
  'body',
  [
    [],
    b'{"choices": [',
    {'choices': []},
    answer(ids=[4]),
    answer(ids=['x', 1]),
    answer(experts={'shape': [4, 1, 2], 'dtype': 'int16', 'base64': ''}),
    answer(experts={'shape': [5, 1, 2], 'dtype': 'int8', 'base64': ''}),
    answer(experts={'shape': [5, 1, 2], 'dtype': 'int16', 'base64': '%'}),
    answer(computed_versions=[1]),
    answer(versions=[2**40, 1]),
    answer(kept=None),
  ],
)
def test_something_else_is_an_engine_error(body):
  with pytest.raises(EngineError):
    ask([(200, body)])


def test_nobody_there(monkeypatch):
  monkeypatch.setattr(remote, 'BACKOFF_S', 0.0)

  async def go():
    endpoint = remote.Endpoint('http://127.0.0.1:9/v1', 'm')
    async with remote.RemoteSampler(endpoint) as sampler:
      await sampler.sample(REQUEST)

  with pytest.raises(EngineError, match='127.0.0.1:9/v1/completions'):
    asyncio.run(go())
