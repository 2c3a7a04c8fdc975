"""Programs of engines of any number of sequences can be built for a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.bench import mismatch_inputs
from composer.inference import batches
from composer.inference import engine
from composer.inference import programs
from composer.model import transformer
from composer.model import upcycle
from pallas_kernels import dispatch
from pallas_kernels import mosaic


def prepared(model, numerics):
  params = params_lib.init(transformer.spec(model), jax.random.key(0))
  return engine.prepare(numerics, params, split=True)


# No whole eight, which is what the copy engine takes; one; a tile and some.
@pytest.mark.parametrize(
  'kind, sequences',
  [('grouped', 12), ('grouped', 1), ('grouped', 77), ('latent', 12)],
)
def test_programs_lower_for_cuda(kind, sequences, monkeypatch):
  """`ahead` and `mixed` of the most rows, and requests that cut what they draw."""
  monkeypatch.setattr(dispatch, 'platform', lambda: 'gpu')
  model = upcycle.sparse_config(
    mismatch_inputs.WIDE_MODELS[kind], mismatch_inputs.INTO
  )
  model = dataclasses.replace(model, layers=1)
  numerics = config_lib.NumericsConfig(
    compute='bfloat16', row_block=16, kv_block=64, moe='sorted'
  )
  assert numerics.mode == 'bitwise'
  config = config_lib.EngineConfig(
    rows=200, sequences=sequences, pages=2 * sequences + 1, max_context=128
  )
  maker = batches.Maker(model, numerics, config)
  params = jax.eval_shape(lambda: prepared(model, numerics))
  cache = jax.eval_shape(
    lambda: transformer.init_cache(model, numerics, config.pages)
  )
  state = params, cache, jnp.zeros(sequences + 1, jnp.int32)
  columns = programs.column_sizes(numerics, config)[-1]
  size = programs.ahead_sizes(numerics, config)[-1]
  text = mosaic.lower(
    lambda *a: programs.ahead.__wrapped__(model, numerics, 2, *a),
    *(*state, *maker.blank(size, columns, True, True)),
  )
  assert text.count('@mosaic_gpu') > 10
  size = programs.step_sizes(numerics, config)[-1]
  text = mosaic.lower(
    lambda *a: programs.mixed.__wrapped__(model, numerics, *a),
    *(*state, *maker.blank(size, columns, False, True)),
  )
  assert text.count('@mosaic_gpu') > 10
