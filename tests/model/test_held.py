"""What an engine holds computes the very bits of what a trainer computes with."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.model import held
from composer.model import transformer

MODEL = config_lib.ModelConfig(
  vocab_size=256,
  width=128,
  layers=1,
  dense_layers=0,
  heads=1,
  kv_heads=1,
  head_dim=128,
  experts=4,
  experts_per_token=2,
  expert_hidden=64,
  tie_embeddings=True,
)
PLAIN = config_lib.NumericsConfig(
  mode='bitwise', compute='bfloat16', kv_block=8, row_block=4
)
KERNELS = dataclasses.replace(
  PLAIN, moe='sorted', kv_block=64, kernels='tpu_interpret'
)
ROWS = 8
# Compiled in half the time.
QUICK = {'xla_backend_optimization_level': 0}


def make_params():
  """Masters, more than bfloat16 can hold."""
  return params_lib.init(transformer.spec(MODEL), jax.random.key(0))


def scored(numerics, params):
  """(hidden, experts, logprobs) of rows of one sequence, as an engine does."""
  tokens, positions = jnp.arange(ROWS) * 31 % 256, jnp.arange(ROWS)

  @functools.partial(jax.jit, compiler_options=QUICK)
  def run(params):
    cache = transformer.init_cache(MODEL, numerics, 2)
    hidden, experts, _ = transformer.step(
      params,
      MODEL,
      numerics,
      cache,
      tokens,
      positions,
      jnp.ones((ROWS, 1), jnp.int32),
    )
    norm, unembed = params['final_norm'], transformer.unembedding(params)
    logprobs, _ = transformer.row_logprobs(
      MODEL, numerics, norm, unembed, hidden, tokens, jnp.ones(ROWS)
    )
    return hidden, experts, logprobs

  return jax.device_get(run(params))


@pytest.mark.parametrize('numerics', [PLAIN, KERNELS], ids=['xla', 'kernels'])
def test_the_same_bits(numerics):
  params = make_params()
  want = scored(numerics, params)
  got = scored(numerics, held.held(params, numerics))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)
  assert len(np.unique(want[2])) == ROWS


def test_what_stays_wide():
  params = make_params()
  got = held.held(params, KERNELS)
  kinds = {n: x.dtype for n, x in params_lib.named(got).items()}
  wide = {n.split('/')[-1] for n, kind in kinds.items() if kind == jnp.float32}
  assert wide == {'norm', 'final_norm', 'router', 'router_bias'}
  moe = got['layers']['moe']
  np.testing.assert_array_equal(
    moe['router'], params['layers']['moe']['router']
  )
  # Three times 4 experts, filled up to a line.
  assert moe[held.PARTS].shape == (1, 128, 64)
  whole = np.asarray(moe[held.PARTS], np.float64)
  whole = whole[..., :4] + whole[..., 4:8] + whole[..., 8:12]
  np.testing.assert_allclose(whole, moe['router'], rtol=2.0**-23)
  np.testing.assert_array_equal(got['unembed'], got['embed'].T)


def test_nothing_is_added_where_xla_multiplies():
  params = make_params()
  got = held.held(params, PLAIN)
  assert jax.tree.structure(got) == jax.tree.structure(params)
  wide = dataclasses.replace(PLAIN, compute='float32')
  got = held.held(params, wide)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(params), strict=True):
    assert a is b


def test_of_published_parameters():
  """They need not be widened first."""
  spec, params = transformer.spec(MODEL), make_params()
  published = params_lib.to_published(spec, params)
  got = held.held(published, KERNELS)
  want = held.held(params_lib.as_computed(spec, params), KERNELS)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)
