"""Sampling: right frequencies, one draw per (seed, position), T handled once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer.inference import sampling
from composer.model import transformer
from pallas_kernels import mosaic

MODEL = config_lib.ModelConfig(vocab_size=10, width=8)
BITWISE = config_lib.NumericsConfig(row_block=8)
FAST = dataclasses.replace(BITWISE, mode='fast')
# The 0.999 quantile of chi-square with 9 degrees of freedom.
CHI_SQUARE_9 = 27.88


def make_weights():
  keys = jax.random.split(jax.random.key(0), 3)
  norm = 1 + 0.3 * jax.random.normal(keys[0], (8,))
  unembed = jax.random.normal(keys[1], (8, 10)) / 2
  return norm, unembed, jax.random.normal(keys[2], (8,))


NORM, UNEMBED, HIDDEN = make_weights()


def distribution(temperature):
  """float64 [V], written from the equations."""
  x = np.asarray(HIDDEN, np.float64)
  h = x / np.sqrt(np.mean(x**2) + MODEL.norm_eps) * np.asarray(NORM)
  z = h @ np.asarray(UNEMBED, np.float64) / temperature
  p = np.exp(z - z.max())
  return p / p.sum()


@functools.partial(jax.jit, static_argnums=0)
def draw_rows(numerics, temperature, seeds, positions):
  hidden = jnp.tile(HIDDEN[None], (len(seeds), 1))
  return sampling.sample_rows(
    MODEL,
    numerics,
    NORM,
    UNEMBED,
    hidden,
    sampling.Draws(temperature, seeds, positions),
  )


def draw(temperature, seeds, positions, numerics=BITWISE):
  return np.asarray(
    draw_rows(
      numerics,
      np.full(len(seeds), temperature, np.float32),
      np.asarray(seeds, np.uint32),
      np.asarray(positions, np.int32),
    )
  )


@pytest.mark.parametrize('temperature', (0.6, 1.0, 2.0))
@pytest.mark.parametrize('over', ('seeds', 'positions'))
def test_frequencies(temperature, over):
  count = 8000
  many, one = np.arange(count), np.full(count, 11)
  seeds, positions = (many, one) if over == 'seeds' else (one, many)
  drawn = draw(temperature, seeds, positions)
  seen = np.bincount(drawn, minlength=10)
  want = distribution(temperature) * count
  assert want.min() > 5
  assert np.sum((seen - want) ** 2 / want) < CHI_SQUARE_9
  other = distribution(temperature * 1.5) * count
  assert np.sum((seen - other) ** 2 / other) > CHI_SQUARE_9


@pytest.mark.parametrize('numerics', (FAST, BITWISE))
def test_logprobs_of_what_is_drawn(numerics):
  """In `fast` they come from the sums of the draw; greedy rows have T = 1."""
  params = {'final_norm': NORM, 'unembed': UNEMBED}
  temperature = np.tile(np.float32([0.6, 1, 2, 0]), 8)
  seeds, positions = np.arange(32, dtype=np.uint32), np.full(32, 3, np.int32)
  draws = sampling.Draws(temperature, seeds, positions)
  answer = jax.jit(sampling.answer, static_argnums=(0, 1))(
    MODEL, numerics, params, jnp.tile(HIDDEN[None], (32, 1)), draws
  )
  tokens = np.asarray(draw_rows(numerics, temperature, seeds, positions))
  np.testing.assert_array_equal(answer.tokens, tokens)
  for token, logprob, t in zip(
    tokens, np.asarray(answer.logprobs), temperature, strict=True
  ):
    want = np.log(distribution(t or 1.0)[token])
    assert logprob == pytest.approx(want, abs=2e-6)


@pytest.mark.skipif(not mosaic.interprets(), reason='needs jax 0.11')
def test_one_pass_of_the_kernel_draws_and_scores():
  """Rows whole, cut, masked and greedy: the bits of the trainer's logprobs."""
  rows, v = 10, 128
  model = config_lib.ModelConfig(vocab_size=v, width=64)
  numerics = dataclasses.replace(
    BITWISE, mode='bitwise', compute='bfloat16', kernels='gpu_interpret'
  )
  rng = np.random.default_rng(0)
  norm = jnp.asarray(1 + 0.3 * rng.normal(size=64), jnp.float32)
  unembed = jnp.asarray(0.5 * rng.normal(size=(64, v)), jnp.bfloat16)
  hidden = jnp.asarray(rng.normal(size=(rows, 64)), jnp.bfloat16)
  cycle = lambda *x: np.resize(np.float32(x), rows)  # noqa: E731
  temperature = cycle(0.6, 1, 2, 0, 1)
  draws = sampling.Draws(
    temperature, np.arange(rows, dtype=np.uint32), np.full(rows, 3, np.int32)
  )
  allowed = np.packbits(rng.random((rows, v)) < 0.5, axis=1)
  allowed[[0, 3, 5, 8]] = 255
  cuts = sampling.Cuts(
    some=np.resize([False, True, True, False, True], rows),
    top_k=cycle(0, 0, 7, 0, 0).astype(np.int32),
    top_p=cycle(1, 0.7, 1, 1, 1),
    min_p=cycle(0, 0, 0.01, 0, 0),
    allowed=allowed,
  )
  params = {'final_norm': norm, 'unembed': unembed}
  answer = functools.partial(sampling.answer, model, numerics, params, hidden)
  whole, some = jax.device_get((answer(draws), answer(draws, cuts)))
  kept = np.unpackbits(some.kept, axis=1).astype(bool)
  assert kept[np.arange(rows), some.tokens].all()
  assert kept[[0, 3, 5, 8]].all() and (kept.sum(1)[[2, 7]] <= 7).all()
  for one, among in ((whole, None), (some, some.kept)):
    want, _ = transformer.row_logprobs(
      *(model, numerics, norm, unembed, hidden, one.tokens),
      jnp.where(temperature > 0, temperature, 1.0),
      among,
    )
    np.testing.assert_array_equal(
      np.asarray(one.logprobs).view(np.int32), np.asarray(want).view(np.int32)
    )
  uncut = ~cuts.some
  np.testing.assert_array_equal(some.tokens[uncut], whole.tokens[uncut])
  np.testing.assert_array_equal(some.logprobs[uncut], whole.logprobs[uncut])
  z = transformer.logits_rows(
    model, norm, unembed, hidden, np.ones(rows, np.float32)
  )
  np.testing.assert_array_equal(
    whole.tokens[[3, 8]], np.argmax(np.asarray(z), axis=1)[[3, 8]]
  )


def test_a_draw_depends_on_seed_and_position_alone():
  seeds, positions = np.divmod(np.arange(64), 8)
  drawn = draw(1.0, seeds, positions)
  order = np.random.default_rng(0).permutation(64)
  np.testing.assert_array_equal(
    draw(1.0, seeds[order], positions[order]), drawn[order]
  )
  np.testing.assert_array_equal(
    draw(1.0, seeds[:16], positions[:16]), drawn[:16]
  )
  np.testing.assert_array_equal(draw(1.0, seeds, positions, FAST), drawn)


@pytest.mark.parametrize('temperature', (0.0, 1e-7))
def test_greedy_takes_the_argmax(temperature):
  drawn = draw(temperature, np.arange(16), np.arange(16))
  assert np.all(drawn == np.argmax(distribution(1.0)))


def test_logprob_is_looked_up_by_the_token():
  """Of every token and temperature, by the trainer's own function."""
  tokens = np.tile(np.arange(10), 4)
  temperatures = np.repeat([0.5, 1.0, 1.5, 3.0], 10).astype(np.float32)
  logprobs, entropy = transformer.row_logprobs(
    MODEL,
    BITWISE,
    NORM,
    UNEMBED,
    jnp.tile(HIDDEN[None], (40, 1)),
    jnp.asarray(tokens),
    jnp.asarray(temperatures),
  )
  for i, (token, t) in enumerate(zip(tokens, temperatures, strict=True)):
    p = distribution(float(t))
    np.testing.assert_allclose(logprobs[i], np.log(p[token]), rtol=1e-5)
    np.testing.assert_allclose(entropy[i], -np.sum(p * np.log(p)), rtol=1e-5)
