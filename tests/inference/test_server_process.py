"""`composer serve`: a checkpoint, an exchange that is followed, and signals."""

import asyncio
import dataclasses
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from composer import params as params_lib
from composer.inference import server
from composer.inference import server_process
from composer.model import checkpoints
from composer.model import presets
from composer.model import transformer
from composer.records import EngineError
from composer.records import SampleRequest
from composer.rollout import remote
from composer.weights import forms
from composer.weights import store
from composer.weights import sync

MODEL = dataclasses.replace(presets.TINY, vocab_size=768)  # the built-in one's
SECONDS = 120


def weights(seed):
  rng = np.random.default_rng(seed)
  return {
    name: (0.3 * rng.standard_normal(s.shape)).astype(s.published)
    for name, s in params_lib.named(transformer.spec(MODEL)).items()
  }


def options(path, **changes):
  config = server.ServerConfig('m', port=0)
  return server_process.Options(checkpoint=str(path), server=config, **changes)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
  path = tmp_path_factory.mktemp('serve') / 'model'
  checkpoints.save(path, MODEL, params_lib.unnamed(weights(0)))
  tokenizer = checkpoints.sources.BUILT_IN
  (path / 'tokenizer.json').write_bytes(tokenizer.read_bytes())
  return path


@pytest.mark.slow
def test_serves_follows_and_ends(checkpoint, tmp_path):
  """Weights of the exchange, then newer ones; ids in and out; SIGTERM is 0."""
  exchange = f'file://{tmp_path}/exchange'
  (tmp_path / 'exchange').mkdir()
  publisher = sync.Publisher(
    store.open_exchange(exchange), 'bf16', 5, model=dataclasses.asdict(MODEL)
  )
  publish = {v: forms.publish('bf16', weights(v)) for v in (3, 4)}
  publisher.publish(publish[3], 3)
  environment = os.environ | {'XLA_FLAGS': ''}
  process = subprocess.Popen(
    [
      sys.executable, '-m', 'composer', 'serve', '--checkpoint', checkpoint,
      '--exchange', exchange, '--port', '0', '--max-context', '64',
      '--numerics', 'bitwise', '--sequences', '4', '--cache-gb', '0.01',
      '--draft', 'ngram', '--draft-tokens', '2',
      '--sessions', tmp_path / 'sessions', '--model', 'tiny',
    ],
    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
  )  # fmt: skip
  killer = threading.Timer(SECONDS, process.kill)
  killer.start()
  try:
    said = ''
    while (match := re.search(r'at (http://\S+)', said)) is None:
      line = process.stdout.readline()
      assert line, said
      said += line
    asyncio.run(_use(match[1], publisher, publish[4]))
    process.send_signal(signal.SIGTERM)
    said += process.stdout.read()
    assert process.wait() == 0, said
  finally:
    killer.cancel()
    process.kill()
    process.stdout.close()
    process.wait()
  for text in ('version 3 active', 'serving tiny', 'version 4', 'stopped'):
    assert text in said, said
  (folder,) = (tmp_path / 'sessions').iterdir()
  assert (folder / 'session.json').is_file()


async def _use(url, publisher, newer):
  tokens = np.array([9, 200, 31], np.int32)
  request = SampleRequest(tokens, 5, (), 1.0, 2)
  async with remote.RemoteSampler(remote.Endpoint(url, 'tiny')) as sampler:
    first, second = [await sampler.sample(request) for _ in range(2)]
    assert first.versions.tolist() == [3] * 5
    assert first.logprobs.tolist() == second.logprobs.tolist()
    assert first.experts.shape == (8, 2, 2)
    # One that the server records for us.
    client = sampler._open()
    body = {'model': 'tiny', 'prompt': tokens.tolist(), 'seed': 2}
    async with client.post(f'{url}/completions', json=body) as response:
      name = (await response.json())['session_id']
    (segment,) = await sampler.session(name)
    assert segment.tokens[:8].tolist() == [*tokens, *first.tokens]
    assert segment.auditable.tolist() == segment.sampled.tolist()
    await sampler.feedback(name, 'thumbs', 1.0)
    publisher.publish(newer, 4)
    async with asyncio.timeout(SECONDS):
      while sampler.version < 4:
        await asyncio.sleep(0.1)
        last = await sampler.sample(request)
    assert last.versions.tolist()[-1] == 4


def test_refused_before_anything_is_read(checkpoint, tmp_path):
  with pytest.raises(ValueError, match='is no model'):
    server_process.run(options(tmp_path))
  with pytest.raises(ValueError, match='COMPOSER_SERVE_TOKEN'):
    server_process.run(
      dataclasses.replace(
        options(tmp_path), server=server.ServerConfig('m', '0.0.0.0')
      )
    )
  with socket.create_server(('127.0.0.1', 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(ValueError, match=f'port {port}: .*another --port'):
      server_process.run(
        dataclasses.replace(
          options(tmp_path), server=server.ServerConfig('m', port=port)
        )
      )
  for change, field in (
    ({'cache_gb': -1.0}, 'cache-gb'),
    ({'max_context': -1}, 'max-context'),
    ({'draft': 'ngram', 'draft_tokens': 0}, 'draft-tokens=0'),
    ({'draft': 'mtp'}, 'no layer that drafts; use --draft ngram'),
    ({'session_s': 0.0}, 'session-minutes'),
    ({'template': 'qwen3'}, 'template'),
    ({'tokenizer': str(tmp_path / 'x')}, 'tokenizer'),
    ({'cache_gb': 1e-5, 'max_context': 64}, 'raise --cache-gb'),
  ):
    with pytest.raises(ValueError, match=field):
      server_process.run(options(checkpoint, **change), say=lambda line: None)


def test_files_for_connections(monkeypatch):
  """As many as may be, never fewer than there were."""
  infinite, given = resource.RLIM_INFINITY, []
  monkeypatch.setattr(
    resource, 'setrlimit', lambda what, limits: given.append(limits)
  )
  for limits in (
    (1024, 4096), (1024, infinite), (1024, 10**6), (4096, 4096),
    (infinite, infinite), (100_000, 10**6),
  ):  # fmt: skip
    monkeypatch.setattr(resource, 'getrlimit', lambda what, x=limits: x)
    server_process._allow_files()
  most = server_process.FILES
  assert given == [(4096, 4096), (most, infinite), (most, 10**6)]


def test_a_model_without_a_vocabulary(tmp_path):
  checkpoints.save(tmp_path / 'model', MODEL, params_lib.unnamed(weights(0)))
  with pytest.raises(ValueError, match='--tokenizer'):
    server_process.run(options(tmp_path / 'model'))


def test_following_goes_on_but_not_without_a_word(
  checkpoint, monkeypatch, caplog
):
  """A swap that was slow, and a fault of ours, are told and the next version is
  tried; with an engine that failed it ends, which is told too."""
  stop, polls = threading.Event(), []

  class Engine:
    version = 3
    failed = False

    def check(self):
      if self.failed:
        raise EngineError('the engine failed')

  class Subscriber:
    problems = ()

    def poll(self):
      polls.append(None)
      return len(polls), {}

    def close(self):
      pass

  def activate(subscriber, options, source, engine, update, say):
    if len(polls) == 1:
      raise EngineError('did not become active')
    if len(polls) == 2:
      raise KeyError('odd')
    engine.failed = True
    raise EngineError('the engine failed')

  monkeypatch.setattr(server_process, 'POLL_S', 0.001)
  monkeypatch.setattr(server_process, '_activate', activate)
  server_process._follow(
    Subscriber(), options(checkpoint), None, Engine(), stop, print
  )
  assert len(polls) == 3
  told = [x.getMessage() for x in caplog.records]
  assert len(told) == 3, told
  assert 'version 3 stays: did not become active' in told[0]
  assert told[1].startswith('following') and caplog.records[1].exc_info
  assert told[2] == 'no more weights are followed: the engine failed'


def test_an_exchange_of_another_model(checkpoint, tmp_path):
  class Engine:
    version = -1

  kv = store.open_exchange('memory://')
  other = dataclasses.replace(MODEL, width=64)
  publisher = sync.Publisher(kv, 'bf16', 5, model=dataclasses.asdict(other))
  publisher.publish(forms.publish('bf16', weights(1)), 0)
  subscriber = sync.Subscriber(kv, 'bf16')
  source = checkpoints.open_source(checkpoint)
  with pytest.raises(ValueError, match='another model.*width'):
    server_process._first(
      subscriber, options(checkpoint), source, Engine(), print
    )
