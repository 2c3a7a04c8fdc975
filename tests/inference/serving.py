"""Small engines for tests, requests for them, and answers to compare with."""

import asyncio
import collections
import contextlib
import dataclasses
import functools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.inference import engine as engine_lib
from composer.inference import pace
from composer.model import presets
from composer.model import transformer

MODEL = presets.TINY
NUMERICS = config_lib.NumericsConfig(row_block=8, kv_block=4)
CONFIG = config_lib.EngineConfig(
  rows=32, sequences=12, pages=160, max_context=48
)
SECONDS = 60.0  # that any wait here may take


def make_params(seed):
  drawn = params_lib.init(transformer.spec(MODEL), jax.random.key(seed))
  return jax.tree.map(lambda x: x * jnp.float32(1.7), drawn)


@functools.cache
def weights():
  return [make_params(0), make_params(1)]


@contextlib.contextmanager
def starting(model=MODEL, numerics=NUMERICS):
  """A function that starts engines, version 0 active; closed at the end."""
  engines = []

  def go(config=CONFIG, activate=True, pages=None, ahead=True):
    """`pages`: all that may be used; the cache keeps its compiled shape.

    `ahead`: every step is sent before the one before it is recorded, as on an
    accelerator; else as this device does it.
    """
    engine = engine_lib.Engine(model, numerics, config)
    engines.append(engine)
    if ahead:
      engine._pace = pace.Pace(shared=False)
    if pages is not None:
      engine._pool.allocate(config.pages - 1 - pages)
    if activate:
      engine.activate(0, weights()[0])
    return engine

  try:
    yield go
  finally:
    for engine in engines:
      engine.close()


def request(prompt, seed=0, max_tokens=6, stop=(), temperature=1.0):
  return records.SampleRequest(
    np.asarray(prompt, np.int32), max_tokens, tuple(stop), temperature, seed
  )


def random_requests(count, seed=0, longest=30):
  rng = np.random.default_rng(seed)
  return [
    request(
      rng.integers(0, 64, rng.integers(1, longest)),
      seed=int(rng.integers(0, 2**40)),
      max_tokens=int(rng.integers(1, 14)),
      stop=(3, 7),
      temperature=float(rng.choice([0.0, 0.5, 1.0, 1.3])),
    )
    for _ in range(count)
  ]


def answer(engine, *requests):
  async def go():
    waits = [engine.sample(r) for r in requests]
    return await asyncio.wait_for(asyncio.gather(*waits), SECONDS)

  return asyncio.run(go())


def one_by_one(engine, requests):
  return [answer(engine, r)[0] for r in requests]


def until(condition, what):
  deadline = time.monotonic() + SECONDS
  while not condition():
    assert time.monotonic() < deadline, what
    time.sleep(0.002)


def pause(engine, after):
  """Holds the loop once `after` tokens are sampled: (reached, go) events."""
  reached, go, send = threading.Event(), threading.Event(), engine._send

  def gated(plan, steps):
    if engine.stats.sampled >= after and not go.is_set():
      reached.set()
      assert go.wait(SECONDS)
    send(plan, steps)

  engine._send = gated
  return reached, go


def in_step(engine):
  """Sends nothing before the requesters have heard of all that was sampled."""
  heard, send, tell = collections.Counter(), engine._send, engine._tell

  def telling(sequence, piece):
    tell(sequence, piece)
    heard[sequence] += len(piece.tokens)

  def gated(plan, steps):
    for s in engine._running:
      if s.request.on_tokens is not None:
        told = s.told - s.prompt
        until(lambda s=s, n=told: s.future.done() or heard[s] >= n, 'it hears')
    send(plan, steps)

  engine._send, engine._tell = gated, telling


def assert_equal_answers(some, others):
  for a, b in zip(some, others, strict=True):
    for field in dataclasses.fields(a):
      if not field.compare:
        continue
      np.testing.assert_array_equal(
        getattr(a, field.name), getattr(b, field.name), field.name
      )


def whole(r, completion):
  return np.concatenate([r.tokens, completion.tokens])


@jax.jit
def trainer_logits(params, *arrays):
  fast = dataclasses.replace(NUMERICS, mode='fast')
  out = transformer.forward(params, MODEL, fast, *arrays)
  z = transformer.logits_rows(
    MODEL,
    params['final_norm'],
    transformer.unembedding(params),
    out.hidden[0],
    jnp.ones(out.hidden.shape[1]),
  )
  return z, out.experts[0]


def logits_of(params, tokens):
  """(float64 [T, V], experts) from the trainer's fast forward, alone."""
  size = len(tokens)
  arrays = np.zeros((3, 1, 48), np.int32)
  arrays[:, 0, :size] = tokens, np.ones(size), np.arange(size)
  z, experts = trainer_logits(params, *arrays)
  return np.asarray(z, np.float64)[:size], np.asarray(experts)[:size]


def log_softmax(z):
  z = z - z.max(-1, keepdims=True)
  return z - np.log(np.exp(z).sum(-1, keepdims=True))


def likelihood(params, prompt, temperature, answers, at, fewest=60):
  """How likely draws as far from the model's as those of answers at `at` are.

  Chi-square, over all beginnings that `fewest` answers share; the probabilities
  are those of the trainer's forward. Tokens of which fewer than five would come
  count as one.
  """
  drawn, far, degrees = collections.defaultdict(list), 0.0, 0
  for c in answers:
    drawn[tuple(c.tokens[:at].tolist())].append(c.tokens[at])
  for before, tokens in drawn.items():
    if len(tokens) < fewest:
      continue
    z, _ = logits_of(params, [*prompt, *before])
    want = len(tokens) * np.exp(log_softmax(z[-1] / temperature))
    seen = np.bincount(tokens, minlength=len(want))
    few = want < 5
    want = np.append(want[~few], want[few].sum())
    seen = np.append(seen[~few], seen[few].sum())
    far += np.sum((seen - want) ** 2 / want)
    degrees += len(want) - 1
  assert degrees, 'no beginning has enough answers'
  return scipy.stats.chi2.sf(far, degrees)
