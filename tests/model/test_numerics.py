"""One model in every form, mode and dtype: the same but for rounding."""

import dataclasses
import functools

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.model import logprobs
from composer.model import presets
from composer.model import transformer

BITWISE = config_lib.NumericsConfig(row_block=8, kv_block=4)
MODES = {
  'bitwise, absorbed': BITWISE,
  'fast, expanded': dataclasses.replace(BITWISE, mode='fast', mla='expanded'),
  'fast, sorted': dataclasses.replace(BITWISE, mode='fast', moe='sorted'),
}
HALF = {
  name: dataclasses.replace(MODES[name], compute='bfloat16')
  for name in ('bitwise, absorbed', 'fast, sorted')
}
MODEL = presets.TINY_LATENT
SHAPE = (2, 20)


@functools.cache
def make(gain=1.7):
  spec = transformer.spec(MODEL)
  drawn = params_lib.init(spec, jax.random.key(0))
  published = params_lib.to_published(
    spec, jax.tree.map(lambda x: gain * x, drawn)
  )
  return params_lib.widen(published)


def make_batch():
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, 64, SHAPE).astype(np.int32)
  ids, positions = np.ones((2, *SHAPE), np.int32)
  ids[0, 12:], positions[0] = 2, np.r_[np.arange(12), np.arange(8)]
  positions[1] = np.arange(20)
  return tokens, ids, positions


@functools.partial(jax.jit, static_argnums=(0, 1))
def run(model, numerics, params, experts):
  """((out, scores), gradient of a weighted sum of the logprobs)."""
  tokens, ids, positions = make_batch()
  weights = np.random.default_rng(1).normal(size=SHAPE) * (positions > 0)

  def total(params):
    out = transformer.forward(
      params, model, numerics, tokens, ids, positions, experts
    )
    found, _ = transformer.token_logprob(
      params, model, numerics, out.hidden, tokens, jnp.ones(SHAPE)
    )
    return jnp.sum(found * weights.astype(np.float32)), (out, found)

  (_, found), grads = jax.value_and_grad(total, has_aux=True)(params)
  return found, grads


@functools.cache
def reference(gain=1.7):
  """In `fast`, expanded, float32; its routes are replayed by all others."""
  model = MODEL
  shape = (*SHAPE, transformer.moe_layers(model), model.experts_per_token)
  unknown = np.full(shape, -1, np.int16)
  return run(model, MODES['fast, expanded'], make(gain), unknown)


@pytest.mark.parametrize('mode', ('bitwise, absorbed', 'fast, sorted'))
def test_values_and_gradients(mode):
  (out, scored), grads = reference()
  (got, found), gradient = run(MODEL, MODES[mode], make(), out.experts)
  real = make_batch()[2] > 0
  np.testing.assert_array_equal(got.native, out.native)
  np.testing.assert_allclose(found[real], scored[real], atol=1e-4)
  wanted = params_lib.named(grads)
  for key, value in params_lib.named(gradient).items():
    scale = float(np.max(np.abs(wanted[key]))) + 1e-7
    np.testing.assert_allclose(
      value, wanted[key], atol=3e-4 * scale, err_msg=key
    )
    assert np.any(value) or key.endswith('router_bias'), key


@pytest.mark.parametrize('mode', HALF)
def test_bfloat16(mode):
  """Within its rounding of float32; gradients arrive in float32."""
  (out, scored), grads = reference(1.0)
  (got, found), gradient = run(MODEL, HALF[mode], make(1.0), out.experts)
  real = make_batch()[2] > 0
  assert got.hidden.dtype == jnp.bfloat16 and found.dtype == jnp.float32
  np.testing.assert_array_equal(got.experts, out.experts)
  gap = np.abs(np.asarray(found) - scored)[real]
  assert 1e-3 < np.max(gap) < 0.2 and np.mean(gap) < 0.03
  wanted = params_lib.named(grads)
  for key, value in params_lib.named(gradient).items():
    assert value.dtype == jnp.float32
    if key.endswith('router_bias'):
      continue
    a, b = np.asarray(value).ravel(), np.asarray(wanted[key]).ravel()
    cosine = a @ b / (np.linalg.norm(a) * np.linalg.norm(b))
    assert cosine > 0.99, (key, cosine)


def test_the_cache_is_kept_in_the_dtype_of_products():
  cache = transformer.init_cache(MODEL, HALF['bitwise, absorbed'], 5)
  assert cache.keys.dtype == jnp.bfloat16 and cache.values is None
  assert cache.keys.shape == (3 * 5, 4, 1, 20)
  cache = transformer.init_cache(MODEL, MODES['fast, expanded'], 5)
  assert cache.keys.shape == (3 * 5, 4, 4, 12)
  assert cache.values.shape == (3 * 5, 4, 4, 6)


# --- the memory of logits -----------------------------------------------------


def sizes(jaxpr):
  """Elements of every array that a program computes, those of its loops too."""
  for equation in jaxpr.eqns:
    yield from (v.aval.size for v in equation.outvars)
    for inner in jax.extend.core.jaxprs_in_params(equation.params):
      yield from sizes(inner)


@functools.partial(jax.jit, static_argnums=0)
def logprob_gradient(model, params, hidden, tokens, temperatures):
  def total(params, hidden):
    both = transformer.token_logprob(
      params, model, MODES['fast, expanded'], hidden, tokens, temperatures
    )
    return jnp.sum(both[0] * tokens) + jnp.sum(both[1]), both

  return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, hidden)


def test_all_logits_are_never_held(monkeypatch):
  """At a large vocabulary; values and gradients are those of one product."""
  model = dataclasses.replace(
    presets.TINY, vocab_size=1000, width=8, tie_embeddings=True
  )
  rows = 3 * 251  # no multiple of a block
  rng = np.random.default_rng(0)
  params = {
    'embed': jnp.asarray(rng.normal(size=(1000, 8)), jnp.float32),
    'final_norm': jnp.ones(8),
  }
  hidden = jnp.asarray(rng.normal(size=(3, 251, 8)), jnp.float32)
  tokens = jnp.asarray(rng.integers(0, 1000, (3, 251)), jnp.int32)
  warm = jnp.asarray(rng.choice([0.5, 2.0], (3, 251)), jnp.float32)
  want = logprob_gradient(model, params, hidden, tokens, warm)
  arguments = (params, hidden, tokens, warm)
  whole = logprob_gradient.trace(model, *arguments).jaxpr
  assert max(sizes(whole.jaxpr)) >= rows * 1000  # what the next one must not
  jax.clear_caches()
  monkeypatch.setattr(logprobs, 'LOGITS', 256 * 1000)
  traced = logprob_gradient.trace(model, *arguments).jaxpr
  assert max(sizes(traced.jaxpr)) <= 256 * 1000
  got = logprob_gradient(model, *arguments)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)
  jax.clear_caches()
