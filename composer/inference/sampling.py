"""Sampling: one seed per request and position, so that batches never matter.

The draw is the Gumbel maximum (argmax of logits / T plus Gumbel noise), whose
noise depends on (seed, position) alone. A request is therefore answered with
the same tokens whatever else is in the batch, as long as its logits have the
same bits. The logprob is taken afterwards by `transformer.row_logprobs`, the
very function that the trainer calls.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer.model import layers
from composer.model import transformer

Array = jax.Array

GREEDY = 1e-6  # temperatures below this take the argmax


def sample_rows(
  config: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  norm: Array,
  unembed: Array,
  hidden: Array,
  temperature: Array,
  seeds: Array,
  positions: Array,
) -> Array:
  """Draws one token a row.

  Args:
    config, numerics: static.
    norm: [D]; unembed: [D, V].
    hidden: [N, D].
    temperature: float32 [N]; 0 is greedy.
    seeds: uint32 [N]; positions: int32 [N].

  Returns:
    int32 [N].
  """

  def rows(x: Array, t: Array, seed: Array, position: Array) -> Array:
    greedy = t < GREEDY
    safe = jnp.where(greedy, 1.0, t)
    z = transformer.logits_rows(config, norm, unembed, x, safe)  # [R, V]
    keys = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s), p))(
      seed, position
    )
    noise = jax.vmap(lambda k: jax.random.gumbel(k, z.shape[1:]))(keys)
    noisy = z + jnp.where(greedy[:, None], 0.0, noise)
    return jnp.argmax(noisy, axis=-1).astype(jnp.int32)

  return layers.map_rows(rows, numerics, hidden, temperature, seeds, positions)


@functools.partial(
  jax.jit,
  static_argnums=(0, 1),
  static_argnames=('layout',),
  donate_argnums=(3,),
)
def engine_step(
  config: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  params: Any,
  cache: transformer.Cache,
  tokens: Array,
  positions: Array,
  table: Array,
  temperature: Array,
  seeds: Array,
  layout: mesh_lib.Layout | None = None,
) -> tuple[Array, Array, Array, transformer.Cache]:
  """One engine step over N rows.

  Args:
    config, numerics: static.
    params: float32 parameters.
    cache: donated.
    tokens, positions: int32 [N].
    table: int32 [N, M].
    temperature: float32 [N].
    seeds: uint32 [N].
    layout: static; see `transformer.step`.

  Returns:
    (next token int32 [N], its logprob float32 [N], experts int16 [N, L, K],
    cache). Rows that are not the last of their context are ignored by the
    caller.
  """
  hidden, experts, cache = transformer.step(
    params, config, numerics, cache, tokens, positions, table, layout
  )
  norm, unembed = params['final_norm'], transformer.unembedding(params)
  drawn = sample_rows(
    config, numerics, norm, unembed, hidden, temperature, seeds, positions
  )
  safe = jnp.where(temperature < GREEDY, 1.0, temperature)
  logprobs, _ = transformer.row_logprobs(
    config, numerics, norm, unembed, hidden, drawn, safe
  )
  return drawn, logprobs, experts, cache
