"""A vocabulary in parts against the whole of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import token_logprob
from pallas_kernels.token_logprob import shards

T, D, V, PARTS = 16, 64, 384, 3


def make_rows(dtype):
  rng = np.random.default_rng(0)
  return (
    jnp.asarray(rng.normal(size=(T, D)), dtype),
    jnp.asarray(0.3 * rng.normal(size=(D, V)), dtype),
    jnp.asarray([0, 127, 128, 383, *rng.integers(0, V, T - 4)], jnp.int32),
    jnp.asarray(rng.uniform(0.5, 1.5, T), jnp.float32),
  )


@functools.partial(jax.jit, static_argnums=0)
def in_parts(name, hidden, unembed, tokens, temperatures, cotangents):
  """((logprob, entropy), dhidden, dunembed) of one part after another."""
  size = V // PARTS
  cut = [unembed[:, i * size : (i + 1) * size] for i in range(PARTS)]
  own = [tokens - i * size for i in range(PARTS)]
  run = {'implementation': name}
  parts = [
    shards.statistics(hidden, w, t, temperatures, **run)
    for w, t in zip(cut, own, strict=True)
  ]
  whole = shards.merge(jax.tree.map(lambda *x: jnp.stack(x), *parts))
  found = [
    shards.gradients(hidden, w, t, temperatures, whole, cotangents, **run)
    for w, t in zip(cut, own, strict=True)
  ]
  dhidden = sum(one[0] for one in found)
  dunembed = jnp.concatenate([one[1] for one in found], axis=1)
  return (whole.chosen - whole.log, whole.entropy), dhidden, dunembed


@pytest.mark.parametrize('name', ['reference', 'tpu_interpret'])
def test_parts_are_the_whole(name):
  half = name != 'reference'
  rows = make_rows(jnp.bfloat16 if half else jnp.float32)
  rng = np.random.default_rng(1)
  cotangents = tuple(jnp.asarray(rng.normal(size=(2, T)), jnp.float32))
  both, dhidden, dunembed = in_parts(name, *rows, cotangents)
  hidden, unembed, tokens, temperatures = rows
  run = lambda h, u: token_logprob.token_logprob(  # noqa: E731
    h, u, tokens, temperatures, implementation='reference'
  )
  want, pull = jax.vjp(run, hidden, unembed)
  for a, b in zip(both, want, strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
  off = 0.02 if half else 1e-5
  for a, b in zip((dhidden, dunembed), pull(cotangents), strict=True):
    a, b = (np.asarray(x, np.float32) for x in (a, b))
    np.testing.assert_allclose(a, b, rtol=0, atol=off * np.abs(b).max())


def test_a_token_in_padding_is_in_no_part():
  """100 columns are filled up to a tile, whose logits are far below zero."""
  hidden, unembed, _, temperatures = make_rows(jnp.bfloat16)
  tokens = jnp.full((T,), 100, jnp.int32)
  got = shards.statistics(
    hidden,
    unembed[:, :100],
    tokens,
    temperatures,
    implementation='tpu_interpret',
  )
  np.testing.assert_array_equal(got.chosen, np.zeros(T))
