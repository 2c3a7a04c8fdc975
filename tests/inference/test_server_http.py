"""HTTP beneath the routes: what is unreadable, silent, or asks for nothing here."""

import json
import logging
import re
import socket
import time

import httpx2
import pytest

from composer.inference import server_http

JSON = 'Content-Type: application/json'
GOOD = json.dumps({'model': 'm', 'prompt': 'x', 'max_tokens': 1}).encode()


def connect(url):
  host, port = url.removeprefix('http://').split(':')
  return socket.create_connection((host, int(port)), timeout=10)


def exchanged(url, data):
  """All that comes back until the server closes."""
  with connect(url) as peer:
    peer.sendall(data)
    found = b''
    while part := peer.recv(65536):
      found += part
  return found


def head(first, *headers, host='localhost'):
  return '\r\n'.join([first, f'Host: {host}', *headers, '', '']).encode()


POST = 'POST /v1/completions HTTP/1.1'
UNREADABLE = {
  'flood': head('GET /health HTTP/1.1', *[f'X-{i}: a' for i in range(5000)]),
  'large': head('GET /health HTTP/1.1', 'X: ' + 'a' * 100_000),
  'path': head('GET /' + 'a' * 100_000 + ' HTTP/1.1'),
  'method': head('BREW /v1/completions HTTP/1.1'),
  'length': head(POST, JSON, 'Content-Length: -5'),
  'lengths': head(POST, JSON, 'Content-Length: 5', 'Content-Length: 6'),
  'both': head(POST, JSON, 'Content-Length: 5', 'Transfer-Encoding: chunked'),
  'chunk': head(POST, JSON, 'Transfer-Encoding: chunked') + b'zz\r\n',
  'host': b'GET /v1/models HTTP/1.1\r\n\r\n',
  'nul': head(POST, JSON, 'X-Session-Id: a\0b'),
  'preface': b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n',
  'tls': b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03' + bytes(64),
}


def test_unreadable_requests(serve, scripted, caplog):
  """OpenAI's shape, one line each in the log, counted; the next is served."""
  caplog.set_level(logging.INFO)
  engine = scripted([65])
  with serve(engine) as running:
    for name, data in UNREADABLE.items():
      caplog.clear()
      answer = exchanged(running.url, data)
      top, _, body = answer.partition(b'\r\n\r\n')
      error = json.loads(body)['error']
      assert b' 400 ' in top.splitlines()[0], name
      assert b'application/json' in top and len(error['message']) < 400, name
      assert error['type'] == 'invalid_request_error', name
      assert error['code'] == 'invalid_http', name
      (line,) = caplog.messages
      assert 'unreadable' in line and len(line) < 500 and '\n' not in line
      assert all(x.exc_info is None for x in caplog.records)
    count = running.server.metrics.requests['unreadable', 400]
    assert count == len(UNREADABLE) and engine.requests == []
    running.client.completions.create(model='m', prompt='x', max_tokens=1)


def test_silent_connections_are_closed(serve, scripted, monkeypatch):
  """Nothing, half a head, a head that never ends, and one kept open: all of
  them, but no request under way."""
  monkeypatch.setattr(server_http, 'IDLE_S', 0.5)

  def slow(request):
    time.sleep(1.0)
    return [65]

  with serve(scripted(slow)) as running:
    silent = [connect(running.url) for _ in range(3)]
    silent[1].sendall(b'GET /health HTTP/1.1\r\nHost: x\r\nX-')
    silent[2].sendall(head('GET /health HTTP/1.1'))
    assert b'200 OK' in silent[2].recv(65536)
    began = time.monotonic()
    with connect(running.url) as peer:
      with pytest.raises(OSError):
        peer.sendall(b'GET /health HTTP/1.1\r\nHost: x\r\n')
        while time.monotonic() < began + 10:
          peer.sendall(b'X: a\r\n')
          time.sleep(0.05)
    for peer in silent:
      assert peer.recv(65536) == b''
      peer.close()
    assert time.monotonic() - began < 9
    running.client.completions.create(model='m', prompt='x', max_tokens=1)


def test_paths_and_methods_that_are_not_there(serve, scripted):
  """What there is instead is told."""
  with (
    serve(scripted()) as running,
    httpx2.Client(base_url=running.url) as http,
  ):
    for path in ('/', '/v1', '/v1/models/', '/v1/responses', '/%00', '//x'):
      answer = http.get(path)
      error = answer.json()['error']
      assert (answer.status_code, error['code']) == (404, 'not_found'), path
      assert '/v1/chat/completions, ' in error['message']
    for method, path, allow in (
      ('GET', '/v1/completions', 'POST'),
      ('OPTIONS', '/v1/completions', 'POST'),
      ('DELETE', '/v1/models', 'GET, HEAD'),
      ('POST', '/health', 'GET, HEAD'),
    ):
      answer = http.request(method, path)
      error = answer.json()['error']
      assert answer.status_code == 405 and answer.headers['Allow'] == allow
      assert error['code'] == 'method_not_allowed'
      assert allow.replace(', ', ' and ') in error['message']
    assert http.head('/v1/completions').headers['Allow'] == 'POST'
    assert http.head('/health').status_code == 200


def test_requests_have_names(serve, scripted, caplog):
  """The client's or one of ours, in the answer and in the log."""
  caplog.set_level(logging.INFO)
  with serve(scripted([65], [65]), max_body=1000) as running:
    create = running.client.completions.create
    about = {'model': 'm', 'prompt': 'x', 'max_tokens': 1}
    found = create(**about, extra_headers={'X-Request-Id': 'mine-1'})
    assert found._request_id == 'mine-1'
    stream = running.client.completions.with_raw_response.create(
      **about, stream=True
    )
    ours = stream.headers['X-Request-Id']
    assert re.fullmatch('req_[0-9a-f]{24}', ours)
    for odd in ('', 'a b', 'é', 'x' * 129):
      answer = httpx2.get(
        running.url + '/nowhere', headers={'X-Request-Id': odd.encode()}
      )
      assert answer.headers['X-Request-Id'].startswith('req_')
      assert answer.headers['X-Request-Id'] in caplog.text
    # One that is refused before its body is asked for, on a kept connection.
    asking = head(POST, JSON, 'Content-Length: 5000', 'Expect: 100-continue')
    with connect(running.url) as peer:
      peer.sendall(head('GET /health HTTP/1.1', 'X-Request-Id: first'))
      assert b'X-Request-Id: first\r\n' in peer.recv(65536)
      peer.sendall(asking)
      answer = peer.recv(65536)
    assert b' 413 ' in answer and b'X-Request-Id: req_' in answer
    assert '/v1/completions: 413' in caplog.text
    assert running.server.metrics.requests['/v1/completions', 413] == 1


def test_requests_one_behind_the_other(serve, scripted):
  """Pipelined, chunked and asked for: each has its own answer, in order."""
  length = f'Content-Length: {len(GOOD)}'
  chunked = b'%x\r\n' % len(GOOD) + GOOD + b'\r\n0\r\n\r\n'
  bad = head(POST, JSON, 'Content-Length: 1', 'X-Request-Id: two') + b'{'
  last = head('GET /health HTTP/1.1', 'Connection: close')
  data = (
    head(POST, JSON, length) + GOOD + bad
    + head(POST, JSON, 'Transfer-Encoding: chunked') + chunked + last
  )  # fmt: skip
  with serve(scripted([65], [66])) as running:
    answer = exchanged(running.url, data)
    codes = re.findall(rb'HTTP/1\.1 (\d+)', answer)
    assert codes == [b'200', b'400', b'200', b'200']
    assert answer.index(b'X-Request-Id: two') < answer.index(b'"text": "B"')
    answer = exchanged(
      running.url, head('GET /v1/models HTTP/1.1', host='evil.example')[:-2]
      + b'Connection: close\r\n\r\n',
    )  # fmt: skip
    assert b' 403 ' in answer


def test_the_scheme_of_a_token(serve, scripted):
  """It may be written as anybody likes; nothing else is one."""
  with serve(scripted(), token='secret') as running:
    for given, status in (
      ('Bearer secret', 200), ('bearer secret', 200), ('Basic secret', 401),
      ('secret', 401), ('Bearer', 401),
      ('Bearer  secret', 401), ('Bearer Secret', 401), ('Bearer \xff', 401),
    ):  # fmt: skip
      answer = httpx2.get(
        running.url + '/v1/models',
        headers={'Authorization': given.encode('latin1')},
      )
      assert answer.status_code == status, given
      if status == 401:
        assert answer.headers['WWW-Authenticate'] == 'Bearer'


@pytest.mark.parametrize('depth', [900, 960, 985, 992, 2000, 50_000])
def test_bodies_too_deep(serve, scripted, depth):
  """However deep: it is the client's error, and told."""
  with serve(scripted()) as running:
    for name, start, inner, end in (
      ('tools', b'{"a":', b'1', b'}'), ('stop', b'[', b'', b']'),
      ('response_format', b'{"type":', b'1', b'}'), ('x', b'[', b'1', b']'),
    ):  # fmt: skip
      value = start * depth + inner + end * depth
      answer = httpx2.post(
        running.url + '/v1/completions',
        content=b'{"model":"m","prompt":"x","%s":%s}' % (name.encode(), value),
        headers={'Content-Type': 'application/json'},
      )
      assert answer.status_code == 400, (name, answer.text[:200])
