"""Bad input, clients that leave, tokens, limits: errors that touch nobody else."""

import asyncio
import json
import logging
import socket
import threading
import time

import httpx2
import numpy as np
import openai
import pytest

from composer.inference import server
from composer.inference import server_answers
from composer.inference import server_fields
from composer.inference import server_requests
from composer.inference import server_state
from composer.records import Completion
from composer.records import Piece

ASK = [{'role': 'user', 'content': 'hi'}]
TOOL = {'type': 'function', 'function': {'name': 'f', 'parameters': {}}}


def wait_for(what, seconds=10.0):
  until = time.monotonic() + seconds
  while not what():
    assert time.monotonic() < until
    time.sleep(0.01)


def tool(**function):
  return [{'type': 'function', 'function': {'name': 'f', **function}}]


def nested(depth):
  schema = {'type': 'object'}
  for _ in range(depth):
    schema = {'type': 'object', 'properties': {'x': schema}}
  return schema


def schema(value, **more):
  described = {'name': 'x', 'schema': value, **more}
  return {'response_format': {'type': 'json_schema', 'json_schema': described}}


# What is changed of a right body -> (status, code, param).
CHATS = [
  ({'model': 'other'}, 404, 'model_not_found', 'model'),
  ({'model': None}, 400, 'missing_required_parameter', 'model'),
  ({'temperature': -0.1}, 400, 'invalid_value', 'temperature'),
  ({'temperature': 1e-7}, 400, 'invalid_value', 'temperature'),
  ({'temperature': 'hot'}, 400, 'invalid_type', 'temperature'),
  ({'temperature': True}, 400, 'invalid_type', 'temperature'),
  ({'top_p': 0}, 400, 'invalid_value', 'top_p'),
  ({'top_p': 1.5}, 400, 'invalid_value', 'top_p'),
  ({'n': 0}, 400, 'invalid_value', 'n'),
  ({'n': 10**6}, 400, 'invalid_value', 'n'),
  ({'max_tokens': 0}, 400, 'invalid_value', 'max_tokens'),
  ({'max_tokens': 2.5}, 400, 'invalid_type', 'max_tokens'),
  ({'max_tokens': 1200}, 400, 'context_length_exceeded', 'messages'),
  ({'stop': ['']}, 400, 'invalid_value', 'stop'),
  ({'stop': ['x'] * 17}, 400, 'invalid_value', 'stop'),
  ({'stream': 'yes'}, 400, 'invalid_type', 'stream'),
  ({'temprature': 1}, 400, 'unknown_parameter', 'temprature'),
  ({'logit_bias': {'5': 1}}, 400, 'unsupported_value', 'logit_bias'),
  ({'top_logprobs': 5}, 400, 'invalid_value', 'top_logprobs'),
  ({'logprobs': True, 'top_logprobs': 21}, 400, 'invalid_value',
   'top_logprobs'),
  ({'min_tokens': 5, 'max_tokens': 4}, 400, 'invalid_value', 'min_tokens'),
  ({'min_tokens': 1, 'response_format': {'type': 'json_object'}}, 400,
   'invalid_value', 'min_tokens'),
  ({'ignore_eos': True, 'response_format': {'type': 'json_object'}}, 400,
   'invalid_value', 'ignore_eos'),
  ({'min_tokens': 1, 'tools': tool(strict=True)}, 400, 'invalid_value',
   'min_tokens'),
  ({'ignore_eos': 1}, 400, 'invalid_type', 'ignore_eos'),
  ({'parallel_tool_calls': 'no'}, 400, 'invalid_type', 'parallel_tool_calls'),
  ({'frequency_penalty': 1}, 400, 'unsupported_value', 'frequency_penalty'),
  ({'response_format': {'type': 'yaml'}}, 400, 'invalid_value',
   'response_format'),
  ({'response_format': {'type': 'json_schema'}}, 400, 'invalid_value',
   'response_format'),
  (schema({'type': 'strnig'}), 400, 'invalid_function_parameters',
   'response_format.json_schema.schema'),
  (schema({'$ref': '#/$defs/x'}), 400, 'invalid_schema', 'response_format'),
  (schema({'not': {}}, strict=True), 400, 'invalid_schema', 'response_format'),
  (schema({'enum': []}), 400, 'invalid_function_parameters',
   'response_format.json_schema.schema'),
  ({'structured_outputs': {'choice': []}}, 400, 'invalid_value',
   'structured_outputs'),
  ({'structured_outputs': {'regex': '('}}, 400, 'invalid_schema',
   'structured_outputs'),
  ({'structured_outputs': {'choice': ['x' * 2**20]}}, 400, 'invalid_schema',
   'structured_outputs'),
  ({'structured_outputs': {'regex': 'a', 'json': {}}}, 400, 'invalid_value',
   'structured_outputs'),
  ({'tools': tool(strict='yes')}, 400, 'invalid_type',
   'tools[0].function.strict'),
  ({'tools': tool(strict=True, parameters={'type': 'object', 'properties':
    {'x': {'pattern': '((', 'type': 'string'}}})}, 400, 'invalid_schema',
   'tools'),
  ({'stop_token_ids': [300]}, 400, 'invalid_value', 'stop_token_ids'),
  ({'stop_token_ids': [[1, -1]]}, 400, 'invalid_value', 'stop_token_ids'),
  ({'metadata': {'session_id': '../x'}}, 400, 'invalid_value',
   'metadata.session_id'),
  ({'messages': []}, 400, 'invalid_type', 'messages'),
  ({'messages': [1]}, 400, 'invalid_type', 'messages[0]'),
  ({'messages': [{'role': 'robot', 'content': ''}]}, 400, 'invalid_value',
   'messages[0].role'),
  ({'messages': [{'role': 'user', 'content': 5}]}, 400, 'invalid_type',
   'messages[0].content'),
  ({'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]}, 400,
   'invalid_type', 'messages[0].content'),
  ({'messages': [*ASK, {'role': 'tool', 'tool_call_id': 'x', 'content': ''}]},
   400, 'invalid_value', 'messages[1].tool_call_id'),
  ({'messages': [{'role': 'assistant', 'tool_calls': [{'id': 'x', 'function':
    {'name': 'f', 'arguments': '[1]'}}]}]}, 400, 'invalid_value',
   'messages[0].tool_calls[0]'),
  ({'messages': [{'role': 'user', 'content': 'x' * 1300}]}, 400,
   'context_length_exceeded', 'messages'),
  ({'tools': {}}, 400, 'invalid_value', 'tools'),
  ({'tools': [{'type': 'web'}]}, 400, 'invalid_function_parameters',
   'tools[0]'),
  ({'tools': [TOOL, TOOL]}, 400, 'invalid_value', 'tools[1].function.name'),
  ({'tools': tool(name='a b')}, 400, 'invalid_value',
   'tools[0].function.name'),
  ({'tools': tool(parameters=[])}, 400, 'invalid_function_parameters',
   'tools[0].function.parameters'),
  ({'tools': tool(parameters={'type': 'string'})}, 400,
   'invalid_function_parameters', 'tools[0].function.parameters'),
  ({'tools': tool(parameters={'type': 'object', 'properties': {'x':
    {'type': 'strnig'}}})}, 400, 'invalid_function_parameters',
   'tools[0].function.parameters.properties.x'),
  ({'tools': tool(parameters={'type': 7})}, 400,
   'invalid_function_parameters', 'tools[0].function.parameters'),
  ({'tools': tool(parameters={'type': 'object', 'required': 'x'})}, 400,
   'invalid_function_parameters', 'tools[0].function.parameters'),
  ({'tool_choice': 'required'}, 400, 'invalid_value', 'tool_choice'),
  ({'tools': [TOOL], 'tool_choice': {'type': 'function', 'function':
    {'name': 'g'}}}, 400, 'invalid_value', 'tool_choice'),
]  # fmt: skip
TEXTS = [
  ({'prompt': []}, 400, 'invalid_type', 'prompt'),
  ({'prompt': ''}, 400, 'invalid_value', 'prompt'),
  ({'prompt': [1, 'x']}, 400, 'invalid_type', 'prompt'),
  ({'prompt': [5, 300]}, 400, 'invalid_value', 'prompt'),
  ({'prompt': [-1]}, 400, 'invalid_value', 'prompt'),
  ({'prompt': [[5], [10**30]]}, 400, 'invalid_value', 'prompt'),
  ({'logprobs': 21}, 400, 'invalid_value', 'logprobs'),
  (
    schema({'enum': []}),
    400,
    'invalid_function_parameters',
    'response_format.json_schema.schema',
  ),
  ({'echo': True}, 400, 'unsupported_value', 'echo'),
  ({'prompt': ['x'] * 200}, 400, 'invalid_value', 'n'),
  ({'messages': ASK}, 400, 'unknown_parameter', 'messages'),
]


# Words of a schema that are written wrongly, and what is told of where.
SCHEMAS = [
  ({'enum': 'a'}, ''),
  ({'enum': []}, ''),
  ({'required': 'x'}, ''),
  ({'anyOf': {'type': 'string'}}, ''),
  ({'anyOf': []}, ''),
  ({'oneOf': [3]}, '.oneOf[0]'),
  ({'allOf': [{'type': 'string'}, {'type': 'strnig'}]}, '.allOf[1]'),
  ({'additionalProperties': 7}, '.additionalProperties'),
  ({'not': []}, '.not'),
  ({'items': {'type': ['string', 'text']}}, '.items'),
  ({'prefixItems': ['string']}, '.prefixItems[0]'),
  ({'$defs': {'a': 1}}, '.$defs.a'),
  ({'definitions': []}, ''),
  ({'patternProperties': {'^a': None}}, '.patternProperties.^a'),
  ({'$ref': 3}, ''),
  ({'pattern': 5}, ''),
  ({'description': ['x']}, ''),
  ({'minLength': -1}, ''),
  ({'maxItems': 1.5}, ''),
  ({'maxItems': True}, ''),
  ({'minProperties': '1'}, ''),
  ({'minimum': '0'}, ''),
]
FINE = {
  'type': 'object',
  '$defs': {'a': {'type': ['string', 'null'], 'maxLength': 4.0}},
  'properties': {
    'enum': {'$ref': '#/$defs/a', 'description': None},
    'required': {'anyOf': [{'minimum': 0.5}, True], 'default': []},
    'items': {'type': 'array', 'items': {}, 'minItems': 0},
  },
  'patternProperties': {'^x': False},
  'additionalProperties': {'not': {'enum': [None, 1]}},
}


def test_malformed_schemas(serve, scripted):
  """Whether or not an answer must keep to it; what is well formed is taken."""
  engine = scripted([65])
  with serve(engine) as running, httpx2.Client(base_url=running.url) as http:

    def post(schema):
      found = tool(parameters={'type': 'object', 'properties': {'x': schema}})
      body = {'model': 'm', 'messages': ASK, 'tools': found, 'max_tokens': 1}
      return http.post('/v1/chat/completions', json=body)

    for bad, inner in SCHEMAS:
      for schema, end in (
        (bad, ''), ({'items': bad}, '.items'), ({'anyOf': [bad]}, '.anyOf[0]'),
      ):  # fmt: skip
        answer = post(schema)
        error = answer.json()['error']
        where = f'tools[0].function.parameters.properties.x{end}{inner}'
        assert answer.status_code == 400, schema
        assert error['code'] == 'invalid_function_parameters', error
        assert error['param'] == where, (schema, error)
        assert where in error['message'], error
    assert engine.requests == []
    assert post(FINE).status_code == 200


def test_bad_bodies(serve, scripted):
  """Each is told by its name, and the engine never hears of it."""
  engine = scripted([65])
  with serve(engine) as running, httpx2.Client(base_url=running.url) as http:
    for path, right, cases in (
      ('chat/completions', {'model': 'm', 'messages': ASK}, CHATS),
      ('completions', {'model': 'm', 'prompt': 'x'}, TEXTS),
    ):
      for change, status, code, param in cases:
        answer = http.post(f'/v1/{path}', json={**right, **change})
        error = answer.json()['error']
        told = answer.status_code, error['code'], error['param']
        assert told == (status, code, param), (change, error)
        assert error['type'] == 'invalid_request_error' and error['message']
    deep = nested(200)
    answer = http.post(
      '/v1/chat/completions',
      json={'model': 'm', 'messages': ASK, 'tools': tool(parameters=deep)},
    )
    assert answer.status_code == 400
    assert engine.requests == [] and len(running.server.table) == 0
    # And all that can be left as it is, is taken.
    fine = {'user': 'u', 'store': False, 'logit_bias': {}, 'n': 1}
    fine |= {'response_format': {'type': 'text'}, 'parallel_tool_calls': True}
    running.client.completions.create(
      model='m', prompt='x', max_tokens=1, extra_body=fine
    )


ANY = (
  None, True, False, 0, -1, 2.5, 1e308, 10**30, 10**900, '', 'x', '\0\ud800', [], {},
  [None], [{}], {'x': None},
)  # fmt: skip
FIELDS = (
  *server_requests._SHARED, *server_fields.FIXED, *server_fields.NEUTRAL, '', 'x',
)  # fmt: skip
INNER = {  # body -> where in it any value may stand
  'messages[0]': lambda x: {'messages': [x]},
  'content': lambda x: {'messages': [{'role': 'user', 'content': x}]},
  'part': lambda x: {'messages': [{'role': 'user', 'content': [
    {'type': 'text', 'text': x}]}]},
  'thought': lambda x: {'messages': [*ASK, {'role': 'assistant', 'content': x,
    'reasoning_content': x}]},
  'call': lambda x: {'messages': [{'role': 'assistant', 'tool_calls': [
    {'id': 'a', 'type': 'function', 'function': x}]}]},
  'call id': lambda x: {'messages': [{'role': 'assistant', 'tool_calls': [
    {'id': x, 'function': {'name': 'f', 'arguments': '{}'}}]}]},
  'tool id': lambda x: {'messages': [*ASK, {'role': 'tool', 'content': 'x',
    'tool_call_id': x}]},
  'tool': lambda x: {'tools': [x]},
  'function': lambda x: {'tools': [{'type': 'function', 'function': x}]},
  'parameters': lambda x: {'tools': tool(parameters=x)},
  'forced': lambda x: {'tools': tool(parameters=x), 'tool_choice': 'required'},
  'choice': lambda x: {'tools': [TOOL], 'tool_choice': x},
  'session': lambda x: {'metadata': {'session_id': x}},
  'options': lambda x: {'stream': True, 'stream_options': {'include_usage': x}},
  'schema': lambda x: schema(x),
  'words': lambda x: {'structured_outputs': {'choice': x}},
  'json': lambda x: {'structured_outputs': {'json': x}},
  'regex': lambda x: {'structured_outputs': {'regex': x}},
}  # fmt: skip


class Always:
  """Answers everybody with one token, whatever may be drawn."""

  def __init__(self, scripted, complete):
    self.version, self.stats, self.pages = 3, scripted.stats, scripted.pages
    self.complete = complete

  def check(self):
    pass

  async def sample(self, request):
    return self.complete(request.tokens, [65], request.stop_tokens)


def test_any_value_anywhere(serve, scripted, complete):
  """An answer, or the client's error: never ours, and never none."""
  engine = Always(scripted, complete)
  with serve(engine) as running, httpx2.Client(base_url=running.url) as http:

    def post(path, body):
      return http.post(
        f'/v1/{path}',
        content=json.dumps(body).encode(),
        headers={'Content-Type': 'application/json'},
      )

    chat = {'model': 'm', 'messages': ASK, 'max_tokens': 1}
    text = {'model': 'm', 'prompt': 'x', 'max_tokens': 1}
    cases = [('completions', {**text, f: x}) for f in FIELDS for x in ANY]
    fields = (*server_requests._OF_CHAT, 'max_tokens', 'metadata', 'stop', 'n')
    cases += [('chat/completions', {**chat, f: x}) for f in fields for x in ANY]
    cases += [
      ('chat/completions', {**chat, **f(x)})
      for f in INNER.values()
      for x in ANY
    ]
    refused = 0
    for path, body in cases:
      answer = post(path, body)
      if answer.status_code == 200:
        continue
      refused += 1
      error = answer.json()['error']
      assert answer.status_code in (400, 404), (body, error)
      assert error['type'] == 'invalid_request_error', (body, error)
      assert 0 < len(error['message']) < 600, (body, error)
    assert refused > len(cases) // 2
    assert not running.server.active and not running.server.answers


@pytest.mark.parametrize(
  ('body', 'status', 'code'),
  [
    (b'{"model": "\xff"}', 400, 'invalid_utf8'),
    (b'{"model": ', 400, 'invalid_json'),
    (b'[1]', 400, 'invalid_json'),
    (b'{"temperature": NaN}', 400, 'invalid_json'),
    (b'[' * 100_000, 400, 'invalid_json'),
    (b'', 400, 'invalid_json'),
  ],
)
def test_bodies_that_are_no_json(serve, scripted, caplog, body, status, code):
  caplog.set_level(logging.WARNING)
  with serve(scripted()) as running:
    answer = httpx2.post(
      running.url + '/v1/completions',
      content=body,
      headers={'Content-Type': 'application/json'},
    )
  assert (answer.status_code, answer.json()['error']['code']) == (status, code)
  assert '/v1/completions: 400' in caplog.text


def request_line(url, path, *headers):
  host = url.removeprefix('http://')
  lines = [f'POST {path} HTTP/1.1', f'Host: {host}', *headers, '', '']
  return '\r\n'.join(lines).encode()


def connect(url):
  host, port = url.removeprefix('http://').split(':')
  return socket.create_connection((host, int(port)), timeout=10)


JSON = 'Content-Type: application/json'


def test_large_bodies(serve, scripted):
  """Refused by their length before they are read, or where they pass it."""
  engine = scripted([65])
  with serve(engine) as running:
    length = f'Content-Length: {100_000_000}'
    for extra in ((), ('Expect: 100-continue',)):
      with connect(running.url) as peer:
        peer.sendall(
          request_line(running.url, '/v1/completions', JSON, length, *extra)
        )
        answer = peer.recv(65536)  # nothing was sent of it
        assert b' 413 ' in answer and b'request_too_large' in answer
    with connect(running.url) as peer:  # without a length
      peer.sendall(
        request_line(
          running.url, '/v1/completions', JSON, 'Transfer-Encoding: chunked'
        )
      )
      chunk = b'100000\r\n' + b' ' * 0x100000 + b'\r\n'
      for _ in range(17):
        peer.sendall(chunk)
      assert b' 413 ' in peer.recv(65536)
    # A client that sends it all has its answer, too.
    answer = httpx2.post(
      running.url + '/v1/completions',
      content=b' ' * 100_000_000,
      headers={'Content-Type': 'application/json'},
    )
    assert answer.status_code == 413
    running.client.completions.create(model='m', prompt='x', max_tokens=1)


def test_slow_and_broken_bodies(serve, scripted):
  with serve(scripted(), body_s=0.2) as running:
    with connect(running.url) as peer:
      peer.sendall(
        request_line(running.url, '/v1/completions', JSON, 'Content-Length: 50')
      )
      assert b' 408 ' in peer.recv(65536)
    with connect(running.url) as peer:
      peer.sendall(b'\x00\xff nonsense\r\n\r\n')
      assert b' 400 ' in peer.recv(65536)
    answer = httpx2.post(running.url + '/v1/completions', content=b'{}')
    assert answer.status_code == 415
    assert (
      httpx2.get(running.url + '/v2').json()['error']['code'] == 'not_found'
    )
    assert httpx2.get(running.url + '/v1/completions').status_code == 405


@pytest.mark.parametrize('stream', [False, True])
def test_client_that_leaves(serve, scripted, stream):
  """Its request is cancelled in the engine; nothing of it is recorded."""
  engine = scripted(None, [66])
  with serve(engine) as running:
    body = {'model': 'm', 'messages': ASK, 'stream': stream}
    data = json.dumps(body).encode()
    with connect(running.url) as peer:
      peer.sendall(
        request_line(
          running.url,
          '/v1/chat/completions',
          JSON,
          f'Content-Length: {len(data)}',
        )  # fmt: skip
        + data
      )
      assert engine.waiting.wait(10)
    wait_for(lambda: engine.cancelled == 1)
    wait_for(lambda: running.server.metrics.cancelled == 1)
    assert len(running.server.table) == 0 and not running.server.active
    running.client.completions.create(model='m', prompt='x', max_tokens=1)


def test_engine_that_fails(serve, scripted):
  """Typed errors, before the answer has begun and after."""
  failed = RuntimeError('no such thing')
  engine = scripted(failed, ValueError('passes engine.max_context'), None)
  with serve(engine, request_s=0.3) as running:
    client = running.client.with_options(max_retries=0)
    with pytest.raises(openai.InternalServerError) as caught:
      client.completions.create(model='m', prompt='x')
    assert 'no such thing' not in str(caught.value)  # ours alone to read
    with pytest.raises(openai.BadRequestError, match='max_context'):
      client.completions.create(model='m', prompt='x')
    with pytest.raises(openai.APIError, match='no answer within 0.3 s'):
      list(client.completions.create(model='m', prompt='x', stream=True))
    wait_for(lambda: engine.cancelled == 1)
    assert not running.server.metrics.prompt_tokens  # of answered requests
    engine.turns.append(None)
    with pytest.raises(openai.InternalServerError) as caught:
      client.completions.create(model='m', prompt='x')
    assert caught.value.status_code == 504

    async def fails_late(request):
      ids, zero = np.array([65], np.int32), np.zeros(1, np.float32)
      request.on_tokens(Piece(ids, zero, ids))
      await asyncio.sleep(0.1)  # it is sent
      raise failed

    engine.sample = fails_late
    with pytest.raises(openai.APIError, match='server failed: RuntimeError'):
      list(client.completions.create(model='m', prompt='x', stream=True))


def test_an_answer_that_nobody_reads(serve, scripted, caplog):
  """One that is more than the sockets hold, past its time: it is broken off,
  and nothing of it is recorded."""
  engine = scripted()
  with serve(engine, request_s=0.5) as running:
    table = running.server.table
    table.shape = (2500, 400)  # 6 MB of routes
    long = np.zeros((3, *table.shape), np.int16)
    long[:] = np.arange(400)
    answer = Completion(
      tokens=np.array([65, 66], np.int32),
      logprobs=np.zeros(2, np.float32),
      versions=np.zeros(2, np.int32),
      experts=long,
      computed_versions=np.zeros(3, np.int32),
      stop_reason='stop',
    )

    async def sample(request):
      return answer

    engine.sample = sample
    body = {'model': 'm', 'prompt': [65], 'return_experts': True}
    data = json.dumps(body).encode()
    with connect(running.url) as peer:
      peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      peer.sendall(
        request_line(
          running.url, '/v1/completions', JSON, f'Content-Length: {len(data)}'
        )
        + data
      )
      wait_for(lambda: running.server.metrics.cancelled == 1, 60)
    assert 'after the answer had begun' in caplog.text
    assert not running.server.active and not running.server.answers
    assert len(table) == 0


def test_the_end_of_a_stream_that_nobody_reads(monkeypatch):
  """Its task does not wait for ever; the connection is cut."""
  monkeypatch.setattr(server_answers, 'LAST_S', 0.05)

  class Stuck:
    aborted = False

    @property
    def transport(self):
      return self

    def abort(self):
      self.aborted = True

    async def write(self, data):
      await asyncio.sleep(60)

  async def go():
    with pytest.raises(ConnectionResetError, match='did not read'):
      await server_answers._send_last(stuck, stuck, {})

  stuck = Stuck()
  asyncio.run(asyncio.wait_for(go(), 5))
  assert stuck.aborted


def test_tokens_and_hosts(serve, scripted):
  for host in ('0.0.0.0', '::', '192.0.2.1', 'example.org', ''):
    with pytest.raises(ValueError, match='COMPOSER_SERVE_TOKEN'):
      server_state.validate(server.ServerConfig('m', host))
    server_state.validate(server.ServerConfig('m', host, token='secret'))
  for host in ('127.0.0.1', '127.8.9.1', '::1', 'localhost'):
    server_state.validate(server.ServerConfig('m', host))
  with pytest.raises(ValueError, match='printable'):
    server_state.validate(server.ServerConfig('m', token='a\nb'))
  with serve(scripted([65]), token='secret') as running:
    path = running.url + '/v1/models'
    for headers in ({}, {'Authorization': 'Bearer wrong'}, {'X': 'secret'}):
      answer = httpx2.get(path, headers=headers)
      assert answer.status_code == 401
      assert answer.json()['error']['code'] == 'invalid_api_key'
    assert httpx2.get(running.url + '/health').status_code == 200
    assert running.client.models.list().data[0].id == 'm'
  with serve(scripted()) as running:
    answer = httpx2.get(
      running.url + '/v1/models', headers={'Host': 'evil.example'}
    )
    assert answer.status_code == 403


def test_too_many_at_once(serve, scripted):
  """By requests, feedback included, and by the answers that they ask for."""
  engine = scripted(None)
  with serve(engine, max_requests=1) as running:
    client = running.client.with_options(max_retries=0)
    stream = client.completions.create(model='m', prompt='x', stream=True)
    with pytest.raises(openai.RateLimitError):
      client.completions.create(model='m', prompt='x')
    feedback = f'{running.url}/v1/sessions/x/feedback'
    good = {'kind': 'thumbs', 'value': 1}
    assert httpx2.post(feedback, json=good).status_code == 429
    stream.close()
    wait_for(lambda: engine.cancelled)
    wait_for(lambda: not running.server.active)
    assert httpx2.post(feedback, json=good).status_code == 404
  engine = scripted(None, None, None, [65])
  with serve(engine, max_requests=3) as running:
    client = running.client.with_options(max_retries=0)
    create = client.completions.create
    stream = create(model='m', prompt='x', n=3, stream=True)
    with pytest.raises(openai.RateLimitError, match='4 answers'):
      create(model='m', prompt='x')
    stream.close()
    wait_for(lambda: engine.cancelled == 3)
    wait_for(lambda: running.server.answers == 0)
    assert create(model='m', prompt='x', max_tokens=1).choices


def test_draining(serve, scripted):
  """Requests under way may end, up to a limit; no new ones are taken."""
  engine = scripted(None)
  with serve(engine, drain_s=0.3) as running:
    client = running.client.with_options(max_retries=0)
    stream = client.completions.create(model='m', prompt='x', stream=True)
    began = time.monotonic()
    running.end()
    wait_for(lambda: running.server.draining)
    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
      client.models.list()
      client.completions.create(model='m', prompt='x')
    running.thread.join(60)  # the stream would go on for ever
    assert engine.cancelled == 1 and not running.thread.is_alive()
    assert time.monotonic() - began > 0.2
    stream.close()


def test_what_is_cut_off_is_told(serve, scripted, caplog):
  """Of a stream by its last event, else by its status; not as one who left."""
  engine = scripted(None, None)
  ends = []
  with serve(engine, drain_s=0.2) as running:
    client = running.client.with_options(max_retries=0)

    def ask():
      try:
        client.completions.create(model='m', prompt='x')
      except openai.APIError as error:
        ends.append((type(error), str(error)))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: len(engine.requests) == 1)
    stream = client.completions.create(model='m', prompt='x', stream=True)
    running.end()
    with pytest.raises(openai.APIError, match='the server stops'):
      list(stream)
    running.thread.join(60)
    asking.join(10)
  ((kind, text),) = ends
  assert kind is openai.InternalServerError and 'the server stops' in text
  assert engine.cancelled == 2 and len(running.server.table) == 0
  assert running.server.metrics.cancelled == 0
  assert running.server.metrics.requests['/v1/completions', 503] == 1
  assert 'the client left' not in caplog.text


def test_address_in_use(serve, scripted):
  with serve(scripted()) as running:
    port = int(running.url.rpartition(':')[2])
    with pytest.raises(ValueError, match='cannot listen'):
      with serve(scripted(), port=port):
        pass


def test_a_template_without_conversations(serve, scripted, vocabularies):
  """The quick start's model has none: chats are refused, ids are served."""
  tokenizer = vocabularies['compact']
  ids = [*tokenizer.encode(' edit L3'), tokenizer.token_id('<end>')]
  with serve(scripted(ids), 'compact', vocab_size=768) as running:
    with pytest.raises(openai.BadRequestError, match='conversations'):
      running.client.chat.completions.create(model='m', messages=ASK)
    answer = running.client.completions.create(
      model='m', prompt=tokenizer.encode(' x'), max_tokens=9
    )
    assert answer.choices[0].text == ' edit L3'
    assert answer.choices[0].finish_reason == 'stop'
