"""A layer that drafts: no answer changes, and drafts are what it says they are.

The oracle is the training form of the layer, over the whole text at once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import serving
from serving import CONFIG
from serving import NUMERICS
from serving import answer
from serving import assert_equal_answers
from serving import random_requests
from serving import request
from serving import whole

from composer import params as params_lib
from composer.inference import drafts
from composer.inference import engine as engine_lib
from composer.inference import speculate
from composer.model import mtp
from composer.model import transformer

MODEL = dataclasses.replace(serving.MODEL, mtp_layers=1)
DRAFTING = dataclasses.replace(CONFIG, rows=16, draft='mtp', draft_tokens=3)
FAST = dataclasses.replace(NUMERICS, mode='fast')
LONGEST = 48


@functools.cache
def params():
  """The next token hangs on the last one most, and the layer sees that."""
  drawn = params_lib.init(transformer.spec(MODEL), jax.random.key(0))

  def change(path, x):
    name = str(path[-1].key)
    if name in ('out', 'down', 'shared_down'):  # what layers add
      return 0.1 * x
    return 1.7 * x * (60 if name == 'embed' else 1)

  drawn = jax.tree_util.tree_map_with_path(change, drawn)
  rest = 0.3 * drawn['mtp']['join'][0, 1]
  join = jnp.stack([jnp.eye(MODEL.width), rest])[None]
  return {**drawn, 'mtp': {**drawn['mtp'], 'join': join}}


@pytest.fixture
def start():
  with serving.starting(MODEL) as go:

    def begin(config=DRAFTING, **more):
      engine = go(config, activate=False, **more)
      engine.activate(0, params())
      return engine

    yield begin


def ordinary(requests):
  """Answers of the same model without the layer."""
  with serving.starting() as go:
    engine = go(dataclasses.replace(CONFIG, rows=16), activate=False)
    engine.activate(0, {n: x for n, x in params().items() if n != 'mtp'})
    return answer(engine, *requests)


@jax.jit
def draft(own, tokens, size, chain):
  """Logits of the draft behind `size` tokens [48] and `chain` more, naively.

  The layer's rows are those of the true hidden states up to the last known
  token; behind it, of its own outputs.
  """
  ids = (jnp.arange(LONGEST) < size + chain).astype(jnp.int32)[None]
  positions = jnp.arange(LONGEST, dtype=jnp.int32)[None]
  hidden = transformer.forward(
    own, MODEL, FAST, tokens[None], ids, positions, audit=False
  ).hidden
  before = mtp.first(own, MODEL, hidden)[0]
  behind = jnp.roll(tokens, -1)
  own_rows = jnp.arange(LONGEST) > size - 2
  rows = jnp.arange(LONGEST, dtype=jnp.int32)[None]

  def once(_, g):
    # Rows from the second draft on read what the layer gave one row before.
    source = jnp.where(own_rows[:, None], jnp.roll(g, 1, axis=0), before)
    x = mtp.join(own, MODEL, FAST, source, behind)
    layer = mtp._as_model(own, MODEL, x)
    out = transformer.forward(*layer, FAST, rows, ids, positions, audit=False)
    return out.hidden[0]

  most = DRAFTING.draft_tokens
  g = jax.lax.fori_loop(0, most, once, jnp.zeros_like(before))
  at = size - 2 + chain
  return mtp.logits(own, MODEL, FAST, g, jnp.ones(LONGEST))[at]


def naive_drafts(text, most):
  """The likeliest `most` tokens behind a text, one after the other."""
  found = []
  for n in range(most):
    padded = np.zeros(LONGEST, np.int32)
    known = [*text, *found]
    padded[: len(known)] = known
    z = np.asarray(draft(params(), padded, len(text), n))
    found.append(int(z.argmax()))
  return found


def test_a_layer_that_drafts_changes_no_answer(start):
  """Bit for bit, with too few pages for all: preempted and computed again."""
  requests = random_requests(24, 5)
  want = ordinary(requests)
  engine = start(pages=14)
  assert_equal_answers(answer(engine, *requests), want)
  stats = engine.stats
  assert 0 < stats.accepted < stats.proposed and stats.preempted > 0
  assert stats.sampled == sum(len(c.tokens) for c in want)
  assert stats.steps < stats.sampled


def test_drafts_are_those_of_the_training_form(start, monkeypatch):
  seen, real = [], drafts.accepted

  def accepted(proposed, drawn):
    good = real(proposed, drawn)
    seen.append((proposed.tolist(), good))
    return good

  monkeypatch.setattr(drafts, 'accepted', accepted)
  engine = start()
  rng = np.random.default_rng(3)
  steps = hits = 0
  for size in (5, 9, 20):
    asked = request(rng.integers(0, 64, size), 0, 14, temperature=0.0)
    seen.clear()
    text = whole(asked, answer(engine, asked)[0]).tolist()
    at = size + 1
    for proposed, good in seen:
      if proposed:
        assert proposed == naive_drafts(text[:at], len(proposed))
      at += good + 1
      steps, hits = steps + 1, hits + good
    assert at == len(text)
  assert 8 < steps and 8 < hits


def test_what_the_layer_proposes_is_drawn_as_the_model_says(start):
  """Though a draft is drawn with the random numbers of the draw it is for."""
  engine, prompt, temperature = start(), [5, 9, 1], 0.8
  answers = answer(
    engine,
    *(request(prompt, n, 4, temperature=temperature) for n in range(2000)),
  )
  stats = engine.stats
  assert stats.proposed > 2000 and 0.1 < stats.accepted / stats.proposed < 0.9
  model = {n: x for n, x in params().items() if n != 'mtp'}
  for drafted in (1, 2):
    likely = serving.likelihood(model, prompt, temperature, answers, drafted)
    assert likely > 1e-3


def test_prefixes_are_found_with_what_the_layer_keeps_of_them(start):
  engine, asked = start(), request(range(20), 3, 12)
  found = []
  for _ in range(2):
    before = engine.stats
    found.append(answer(engine, asked)[0])
    after = engine.stats
    found.append(
      [getattr(after, n) - getattr(before, n) for n in ('proposed', 'accepted')]
    )
  assert_equal_answers(found[:1], found[2:3])
  assert engine.stats.reused and found[1] == found[3]


def test_nothing_is_compiled_while_it_serves(start):
  engine = start()
  engine.warm_up()
  before = speculate.compiled()
  answer(engine, *random_requests(8, 9))
  assert speculate.compiled() == before
  assert engine.stats.proposed


def test_a_model_without_the_layer_is_refused():
  with pytest.raises(ValueError, match='model.mtp_layers=0'):
    engine_lib.Engine(serving.MODEL, NUMERICS, DRAFTING)


def test_weights_without_the_layer_are_refused(start):
  engine = start()
  asked = request(range(5), 0, 4)
  before = answer(engine, asked)
  without = {n: x for n, x in params().items() if n != 'mtp'}
  with pytest.raises(ValueError, match='version 1 has no .mtp.'):
    engine.activate(1, without)
  assert_equal_answers(answer(engine, asked), before)
  assert engine.version == 0
