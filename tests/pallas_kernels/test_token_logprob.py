"""Token log-probabilities against log_softmax of whole logits."""

import hypothesis
from hypothesis import strategies as st
from implementations import NAMES
from implementations import needs_interpreter
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mosaic
from pallas_kernels import token_logprob as ops
from pallas_kernels.token_logprob import gpu
from pallas_kernels.token_logprob import reference
from pallas_kernels.token_logprob import shapes

D = 64


def draw(t, v=320, seed=0):
  rng = np.random.default_rng(seed)
  hidden = jnp.asarray(rng.normal(size=(t, D)), jnp.bfloat16)
  unembed = jnp.asarray(rng.normal(size=(D, v)) * 0.3, jnp.bfloat16)
  tokens = jnp.asarray(rng.integers(0, v, t), jnp.int32)
  temperatures = jnp.asarray(rng.uniform(0.3, 2, t), jnp.float32)
  return hidden, unembed, tokens, temperatures


def by_hand(hidden, unembed, tokens, temperatures, inside=None):
  """Whole logits, float32: log-probability and entropy."""
  z = hidden.astype(jnp.float32) @ unembed.astype(jnp.float32)
  z = z / temperatures[:, None]
  if inside is not None:
    z = jnp.where(inside, z, -jnp.inf)
  log_p = jax.nn.log_softmax(z)
  p = jnp.exp(log_p)
  entropy = -jnp.sum(p * jnp.where(p > 0, log_p, 0.0), axis=1)
  return log_p[jnp.arange(len(tokens)), tokens], entropy


@pytest.mark.parametrize('name', NAMES)
def test_values_and_gradients(name, monkeypatch):
  monkeypatch.setattr(reference, 'CHUNK', 192)  # so that there is a rest
  hidden, unembed, tokens, temperatures = draw(70)
  weights = jnp.cos(jnp.arange(70.0)), jnp.sin(jnp.arange(70.0))

  def loss(function):
    def weighed(hidden, unembed):
      found = function(hidden, unembed, tokens, temperatures)
      return sum(jnp.vdot(w, f) for w, f in zip(weights, found, strict=True)), (
        found
      )

    return jax.value_and_grad(weighed, (0, 1), has_aux=True)

  def ours(*arguments):
    return ops.token_logprob(*arguments, implementation=name)

  (_, found), gots = loss(ours)(hidden, unembed)
  (_, want), wants = loss(by_hand)(
    hidden.astype(jnp.float32), unembed.astype(jnp.float32)
  )
  for got, exact in zip(found, want, strict=True):
    np.testing.assert_allclose(got, exact, rtol=1e-5, atol=1e-5)
  for got, exact in zip(gots, wants, strict=True):
    assert got.dtype == jnp.bfloat16
    off = np.linalg.norm(np.asarray(got, np.float32) - exact)
    assert off <= 4e-3 * np.linalg.norm(exact)  # bfloat16 rounds to 2^-9


def test_kept_ids(monkeypatch):
  monkeypatch.setattr(reference, 'CHUNK', 96)
  hidden, unembed, tokens, temperatures = draw(9)
  rng = np.random.default_rng(1)
  kept = np.full((9, 6), -1)
  for row in range(9):
    others = rng.permutation(320)[: row % 6]
    ids = np.unique([*others, tokens[row]])[:6]
    kept[row, : len(ids)] = ids
    if tokens[row] not in ids:
      kept[row, 0] = tokens[row]
  inside = np.zeros((9, 320), bool)
  for row in range(9):
    inside[row, kept[row][kept[row] >= 0]] = True

  def ours(hidden):
    return ops.token_logprob(
      hidden, unembed, tokens, temperatures, kept=jnp.asarray(kept)
    )

  def plain(hidden):
    return by_hand(hidden, unembed, tokens, temperatures, jnp.asarray(inside))

  for got, want in zip(ours(hidden), plain(hidden), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
  got = jax.grad(lambda h: jnp.sum(ours(h)[0]))(hidden)
  want = jax.grad(lambda h: jnp.sum(plain(h)[0]))(hidden.astype(jnp.float32))
  off = np.linalg.norm(np.asarray(got, np.float32) - want)
  assert off <= 4e-3 * np.linalg.norm(want)
  with pytest.raises(ValueError, match='kept ids'):
    ops.token_logprob(
      hidden, unembed, tokens, kept=jnp.asarray(kept), implementation='gpu'
    )


@needs_interpreter
@hypothesis.settings(
  max_examples=2,
  deadline=None,
  derandomize=True,
  phases=[hypothesis.Phase.generate],
)
@hypothesis.given(
  t=st.integers(1, 100),
  rows=st.integers(1, 100),
  tiles=st.sampled_from(
    [gpu.TILES, gpu.matmul.Tiles(consumers=1, stages=2, panel=1)]
  ),
)
def test_bits_depend_on_the_row_alone(t, rows, tiles):
  # Sums of such products are exact. The CPU's own matmul, which stands for the
  # tensor core here, adds a row in an order that depends on its place.
  hidden, unembed, tokens, temperatures = draw(t)
  hidden, unembed = (jnp.round(4 * a) / 4 for a in (hidden, unembed))
  arguments = hidden, unembed, tokens, temperatures
  want = np.stack(gpu.statistics(*arguments, interpret=True))
  kept = np.random.default_rng(rows).permutation(t)[:rows]
  got = np.stack(
    gpu.statistics(
      hidden[kept],
      unembed,
      tokens[kept],
      temperatures[kept],
      tiles=tiles,
      interpret=True,
    )
  )
  np.testing.assert_array_equal(
    got.view(np.int32), want[:, kept].view(np.int32)
  )


@pytest.mark.parametrize('shape', (shapes.TRAINING[0], shapes.DECODING[0]))
def test_lowers_for_cuda(shape):
  t, d, v = shape.tokens, shape.depth, shape.vocabulary
  text = mosaic.lower(
    gpu.statistics,
    jax.ShapeDtypeStruct((t, d), jnp.bfloat16),
    jax.ShapeDtypeStruct((d, v), jnp.bfloat16),
    jax.ShapeDtypeStruct((t,), jnp.int32),
    jax.ShapeDtypeStruct((t,), jnp.float32),
  )
  assert text.count('mosaic_gpu') >= 2


def test_bad_input():
  hidden, unembed, tokens, temperatures = draw(4)

  def call(**change):
    arguments = dict(
      hidden=hidden, unembed=unembed, tokens=tokens, temperatures=temperatures
    )
    ops.token_logprob(**(arguments | change))

  for message, change in {
    'differ in D': dict(unembed=unembed.T),
    'cast one': dict(unembed=unembed.astype(jnp.float32)),
    'must be \\[T\\]': dict(tokens=tokens[:2]),
    'must be in 0..319': dict(tokens=tokens.at[1].set(320)),
    'must be above 0': dict(temperatures=temperatures.at[0].set(0)),
    'must be \\[T, J\\]': dict(kept=tokens),
    'default device is a cpu': dict(implementation='gpu'),
  }.items():
    with pytest.raises(ValueError, match=message):
      call(**change)


@pytest.mark.gpu
@pytest.mark.skipif(mosaic.available() is not None, reason='needs a Hopper GPU')
def test_on_the_device():
  rng = np.random.default_rng(0)
  t, d, v = 1000, 2048, 151936
  hidden = jnp.asarray(rng.normal(size=(t, d)), jnp.bfloat16)
  unembed = jnp.asarray(rng.normal(size=(d, v)) * 2 / d**0.5, jnp.bfloat16)
  tokens = jnp.asarray(rng.integers(0, v, t), jnp.int32)
  temperatures = jnp.asarray(rng.uniform(0.3, 2, t), jnp.float32)
  found = np.stack(ops.token_logprob(hidden, unembed, tokens, temperatures))
  want = by_hand(hidden[:50], unembed, tokens[:50], temperatures[:50])
  np.testing.assert_allclose(found[:, :50], np.stack(want), rtol=2e-3)
  for rows in (1, 64, 777):
    kept = rng.permutation(t)[:rows]
    some = ops.token_logprob(
      hidden[kept], unembed, tokens[kept], temperatures[kept]
    )
    np.testing.assert_array_equal(
      np.stack(some).view(np.int32), found[:, kept].view(np.int32)
    )
