"""An S3 server on this machine that throttles, hangs, fails and loses answers.

moto's server (the extra `test`) behind a layer that spoils requests.
"""

from __future__ import annotations

import collections
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from composer.weights import delta
from composer.weights import store
from composer.weights import sync
from composer.weights import upkeep
from composer.weights import versions

FORM = 'bf16'

server_lib = pytest.importorskip('moto.server')
serving = pytest.importorskip('werkzeug.serving')

# moto warns of its own dependencies.
pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')


class _Spoiled:
  """A WSGI application that fails as `faults` says, in turn.

  `faults` maps a kind to its share of requests:
    500, 503      answered at once, without having done anything
    lost          done, and then answered with 500
    slow          answered after 0.2 s
    reset         the connection is closed without an answer
  """

  def __init__(self, app):
    self.app, self.faults = app, {}
    self.rng = np.random.default_rng(0)
    self.lock = threading.Lock()
    self.count = collections.Counter()

  def __call__(self, environ, start):
    with self.lock:
      kind = self._draw()
      self.count[kind] += 1
    if kind in (500, 503):
      return self._fail(start, kind)
    if kind == 'reset':
      environ['werkzeug.socket'].close()
      return [b'']
    if kind == 'slow':
      time.sleep(0.2)
    answer = self.app(environ, start if kind != 'lost' else lambda *a: None)
    if kind != 'lost':
      return answer
    list(answer)
    return self._fail(start, 500)

  def _draw(self):
    draw = self.rng.random()
    for kind, share in self.faults.items():
      draw -= share
      if draw < 0:
        return kind
    return None

  def _fail(self, start, status):
    code = 'SlowDown' if status == 503 else 'InternalError'
    start(f'{status} {code}', [('Content-Type', 'application/xml')])
    return [f'<Error><Code>{code}</Code></Error>'.encode()]


class _Quiet(serving.WSGIRequestHandler):
  def log(self, *arguments):
    pass


@pytest.fixture(scope='module')
def spoiled():
  app = _Spoiled(
    server_lib.DomainDispatcherApplication(server_lib.create_backend_app)
  )
  server = serving.make_server(
    '127.0.0.1', 0, app, threaded=True, request_handler=_Quiet
  )
  thread = threading.Thread(target=server.serve_forever, daemon=True)
  thread.start()
  app.url = f'http://127.0.0.1:{server.server_port}'
  yield app
  server.shutdown()
  thread.join(10)
  server.server_close()


@pytest.fixture
def url(spoiled, monkeypatch, tmp_path):
  """A fresh place in a bucket; credentials as anyone has them."""
  import urllib.request

  spoiled.faults = {}
  spoiled.count.clear()
  monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'test')
  monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'test')
  monkeypatch.setenv('AWS_REGION', 'us-east-1')
  monkeypatch.setenv('AWS_ENDPOINT_URL', spoiled.url)
  monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
  request = urllib.request.Request(f'{spoiled.url}/weights', method='PUT')
  urllib.request.urlopen(request, timeout=10).close()
  return f's3://weights/{tmp_path.name}'


def _weights(version):
  words = np.arange(2000, dtype=np.uint16) // 9
  words[version::97] += np.uint16(version)
  return {'a/w': words.view(ml_dtypes.bfloat16), 'b': np.ones(3, np.float32)}


def _same(got, version):
  assert delta.digest(got) == delta.digest(_weights(version))


def test_the_whole_exchange_over_s3(url):
  kv = store.open_exchange(url)
  publisher = sync.Publisher(kv, FORM, 3)
  reader = sync.Subscriber(kv, FORM, reader=('lab', 'p'))
  watch = upkeep.Watch()
  for version in range(8):
    publisher.publish(_weights(version), version)
    number, got = reader.poll()
    assert number == version
    _same(got, version)
  assert upkeep.verify(kv, FORM).versions == tuple(range(8))
  assert upkeep.collect(kv, FORM, watch) == [(v, 1) for v in range(6)]
  assert [e.version for e in upkeep.listing(kv)] == [6, 7]
  assert [r.version for r in upkeep.readers(kv)] == [7]
  _same(versions.fetch(kv, FORM)[1], 7)
  other = sync.Publisher(kv, FORM, 3)
  with pytest.raises(store.PublisherFenced):
    publisher.publish(_weights(8), 8)
  other.publish(_weights(8), 8)
  assert reader.poll()[0] == 8


@pytest.mark.parametrize(
  'faults',
  [
    {503: 0.3},
    {500: 0.2, 'slow': 0.1},
    {'lost': 0.2},
    {'reset': 0.2},
    {500: 0.06, 503: 0.06, 'lost': 0.06, 'reset': 0.06, 'slow': 0.06},
  ],
  ids=lambda faults: '+'.join(str(kind) for kind in faults),
)
def test_a_server_that_fails(url, spoiled, faults):
  """Publisher and reader get through, and nothing is ever wrong."""
  kv = store.open_exchange(url)
  spoiled.faults = faults
  store.open_exchange(url)  # the proof of compare-and-swap bears it too
  publisher = _patiently(lambda: sync.Publisher(kv, FORM, 3))
  reader = sync.Subscriber(kv, FORM)
  for version in range(6):
    _patiently(lambda v=version: publisher.publish(_weights(v), v))
    number, got = _patiently(reader.poll)
    assert number == version
    _same(got, version)
  spoiled.faults = {}
  assert set(faults) <= set(spoiled.count), 'a fault never happened'
  assert upkeep.verify(kv, FORM).problems == ()
  assert upkeep.verify(kv, FORM).versions == tuple(range(6))


def _patiently(act):
  """As pipeline and rollout do: what fails for now is tried again."""
  for attempt in range(30):
    try:
      return act()
    except OSError as error:
      last = error
      time.sleep(0.01 * attempt)
  raise last


def test_a_server_that_hangs_is_given_up_in_time(url, spoiled, monkeypatch):
  kv = store.open_exchange(url)
  sync.Publisher(kv, FORM, 3).publish(_weights(0), 0)
  reader = sync.Subscriber(kv, FORM)
  plain = spoiled.app
  gate = threading.Event()

  def hanging(environ, start):
    gate.wait(60)
    return plain(environ, start)

  monkeypatch.setattr(store, 'WAIT_S', 0.3)
  monkeypatch.setattr(store.read, '__kwdefaults__', {'wait_s': 0.3})
  spoiled.app = hanging
  started = time.monotonic()
  with pytest.raises(TimeoutError, match='longer than'):
    reader.poll()
  assert time.monotonic() - started < 30 and reader.version is None
  spoiled.app = plain
  gate.set()
  monkeypatch.undo()
  number, got = reader.poll()
  assert number == 0
  _same(got, 0)


def test_missing_credentials_are_said_at_once(url, monkeypatch, tmp_path):
  monkeypatch.delenv('AWS_ACCESS_KEY_ID')
  monkeypatch.delenv('AWS_SECRET_ACCESS_KEY')
  monkeypatch.setenv('HOME', str(tmp_path))
  monkeypatch.setattr(store, 'OPEN_S', 1.0)
  with pytest.raises(ValueError, match='no credentials .*AWS_ACCESS_KEY_ID'):
    store.open_exchange(url)


def test_a_bucket_must_be_named():
  with pytest.raises(ValueError, match='names no bucket'):
    store.open_exchange('s3://')


def test_credentials_that_are_refused(url, monkeypatch):
  with pytest.raises((OSError, ValueError), match='exchange'):
    store.open_exchange('s3://another-bucket-that-is-not-there/x')
