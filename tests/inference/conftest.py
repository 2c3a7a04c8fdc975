"""A server on a thread, in front of a scripted engine or of a real one."""

import asyncio
import contextlib
import dataclasses
import importlib.util
import pathlib
import threading

import jax
import numpy as np
import openai
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer import templates
from composer.inference import engine as engine_lib
from composer.inference import sequence
from composer.inference import server
from composer.inference import server_sessions
from composer.model import presets
from composer.model import tokenizer as tokenizer_lib
from composer.model import transformer
from composer.records import Completion
from composer.records import EngineError
from composer.records import Piece

SHAPE = (1, 2)  # MoE layers, experts a token
CONTEXT = 1200
SECONDS = 20.0


def _vocabularies():
  """Those of the tests of templates."""
  path = pathlib.Path(__file__).parent.parent / 'templates' / 'conftest.py'
  spec = importlib.util.spec_from_file_location('template_vocabularies', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  made = {
    'qwen': module.vocabulary(module.QWEN),
    'smollm': module.vocabulary(module.QWEN[:3]),
    'kimi': module.vocabulary((*module.KIMI_K2, '<think>', '</think>')),
    'kimi_k2': module.vocabulary(module.KIMI_K2),
  }
  return {
    'chatml': made['qwen'],
    'qwen3': made['qwen'],
    'qwen3-thinking': made['qwen'],
    'smollm2': made['smollm'],
    'kimi-k2': made['kimi_k2'],
    'kimi-k2.5': made['kimi'],
    'compact': tokenizer_lib.load(),
  }


@pytest.fixture(scope='session')
def vocabularies():
  """Template -> a tokenizer for it."""
  return _vocabularies()


@dataclasses.dataclass(frozen=True)
class Stats:
  steps: int = 7


@dataclasses.dataclass(frozen=True)
class Pages:
  held: int = 5
  free: int = 2


class Scripted:
  """Samples the given ids, request by request; an exception is raised, a
  function asked with the request, and None waits until it is cancelled. Told
  that it is enough, it ends one token later."""

  version = 3
  stats = Stats()
  pages = Pages()

  def __init__(self, *turns, pieces=True):
    self.turns, self.pieces = list(turns), pieces
    self.requests, self.cancelled = [], 0
    self.waiting = threading.Event()
    self.failure = None

  def check(self):
    if self.failure:
      raise EngineError(self.failure)

  async def sample(self, request):
    self.requests.append(request)
    turn = self.turns.pop(0)
    if isinstance(turn, Exception):
      raise turn
    if callable(turn):
      turn = turn(request)
    if turn is None:
      await self._forever(request)
    tokens = np.array(turn[: request.max_tokens], np.int32)
    tell = request.on_tokens if self.pieces else None
    for i in range(len(tokens) if tell else 0):
      await asyncio.sleep(0)
      enough = tell(_piece(tokens[i : i + 1]))
      if enough is not None and i >= enough:
        tokens = tokens[: i + 1]
        break
    answer = completion(request.tokens, tokens, request.stop_tokens)
    if request.mask is None:
      return answer
    return dataclasses.replace(answer, **_kept(request, tokens))

  async def _forever(self, request):
    if request.on_tokens:
      request.on_tokens(_piece(np.array([65], np.int32)))
    self.waiting.set()
    try:
      await asyncio.sleep(60)
    except asyncio.CancelledError:
      self.cancelled += 1
      raise


def _piece(tokens):
  return Piece(
    tokens, _logprobs(tokens), np.full(len(tokens), Scripted.version, np.int32)
  )


def _kept(request, tokens):
  """What the mask leaves of 300 ids, as an engine keeps it."""
  kept = []
  for i, token in enumerate(tokens):
    ids = np.flatnonzero(request.mask(tokens[:i])).astype(np.int32)
    if token not in ids:
      raise ValueError(f'token {token} at {i} is not among {ids.tolist()}')
    kept.append(ids[:0] if len(ids) == 300 else ids)
  if request.max_kept is not None and max(map(len, kept)) > request.max_kept:
    return {}
  return sequence.ragged(kept)


def _logprobs(tokens):
  return -tokens.astype(np.float32) / 100


def completion(context, tokens, stops=()):
  """An answer with routes of its own."""
  tokens = np.array(tokens, np.int32)
  total = len(context) + len(tokens)
  computed = np.full(total, Scripted.version, np.int32)
  experts = np.zeros((total, *SHAPE), np.int16)
  experts[..., 0] = np.arange(total)[:, None] % 4
  experts[..., 1] = 4 + experts[..., 0]
  computed[-1] = experts[-1] = -1
  ended = len(tokens) and int(tokens[-1]) in stops
  return Completion(
    tokens=tokens,
    logprobs=_logprobs(tokens),
    versions=np.full(len(tokens), Scripted.version, np.int32),
    experts=experts,
    computed_versions=computed,
    stop_reason='stop' if ended else 'length',
  )


@dataclasses.dataclass
class Running:
  """A server that listens, its address, and a client of OpenAI's."""

  server: server.Server
  url: str
  client: openai.OpenAI
  loop: asyncio.AbstractEventLoop
  stop: asyncio.Event
  thread: threading.Thread

  def end(self):
    if not self.loop.is_closed():
      self.loop.call_soon_threadsafe(self.stop.set)


@contextlib.contextmanager
def _listening(made):
  ready, failed, box = threading.Event(), [], {}

  async def main():
    box['loop'], box['stop'] = asyncio.get_running_loop(), asyncio.Event()
    async with server.listening(made) as url:
      box['url'] = url
      ready.set()
      await box['stop'].wait()

  def run():
    try:
      asyncio.run(main())
    except BaseException as error:
      failed.append(error)
    ready.set()

  thread = threading.Thread(target=run)
  thread.start()
  assert ready.wait(SECONDS)
  if failed:
    raise failed[0]
  client = openai.OpenAI(
    base_url=box['url'] + '/v1',
    api_key=made.config.token or 'none',
    timeout=SECONDS,
  )
  running = Running(made, box['url'], client, box['loop'], box['stop'], thread)
  try:
    yield running
  finally:
    client.close()
    running.end()
    thread.join(SECONDS)
    assert not thread.is_alive() and not failed, failed


@pytest.fixture
def serve(vocabularies):
  """serve(engine, template='qwen3', vocab_size=300, table=..., **settings)."""

  @contextlib.contextmanager
  def start(engine, template='qwen3', **settings):
    tokenizer = vocabularies[template]
    made = server.make(
      server.ServerConfig(**{'model': 'm', 'port': 0, **_of_config(settings)}),
      engine,
      templates.choose(template, tokenizer),
      tokenizer,
      vocab_size=settings.get('vocab_size', 300),
      max_context=settings.get('max_context', CONTEXT),
      table=settings.get('table', server_sessions.Table(SHAPE)),
    )
    with _listening(made) as running:
      yield running

  return start


def _of_config(settings):
  names = {field.name for field in dataclasses.fields(server.ServerConfig)}
  return {key: x for key, x in settings.items() if key in names}


@contextlib.contextmanager
def _real():
  """A real engine, of a vocabulary of 272, at version 5."""
  model = dataclasses.replace(presets.TINY, vocab_size=272)
  numerics = config_lib.NumericsConfig(row_block=8, kv_block=4)
  config = config_lib.EngineConfig(
    rows=16, sequences=8, pages=600, max_context=640
  )
  spec = transformer.spec(model)
  params = params_lib.to_published(
    spec, params_lib.init(spec, jax.random.key(0))
  )
  made = engine_lib.Engine(model, numerics, config)
  made.activate(5, engine_lib.widen(params))
  made.wait_active(5)
  try:
    yield made
  finally:
    made.close()


@pytest.fixture(scope='session')
def engine():
  """A real one, which served others before."""
  with _real() as made:
    yield made


@pytest.fixture
def fresh_engine():
  """A real one with nothing in its cache."""
  with _real() as made:
    yield made


@pytest.fixture
def scripted():
  return Scripted


@pytest.fixture
def complete():
  return completion
