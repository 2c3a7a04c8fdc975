"""Logits and logprobs of rows, in the numerics of either side.

The engine scores what it sampled, and the trainer what was sampled, by the one
function `row_logprobs`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer.model import layers

Array = jax.Array
NumericsConfig = config_lib.NumericsConfig
LOGITS = 2**27  # elements of [R, V] that `fast` holds at once: half a gigabyte


def as_fast(numerics: NumericsConfig) -> NumericsConfig:
  """The same numerics in mode `fast`."""
  return dataclasses.replace(numerics, mode='fast')


def unembedding(params: Any) -> Array:
  """[D, V]; the transposed embedding where they are tied."""
  return params['unembed'] if 'unembed' in params else params['embed'].T


def logits_rows(config, norm, unembed, x: Array, temperature: Array) -> Array:
  """Logits over the temperature, float32 [R, V], of rows x [R, D]."""
  h = layers.rms_norm(x, norm, config.norm_eps)
  z = jnp.matmul(h, unembed.astype(h.dtype), preferred_element_type=jnp.float32)
  return z / temperature[:, None]


def logprob_rows(config, norm, unembed, x, target, temperature):
  """(logprob [R], entropy [R]) of target [R] under softmax(logits / T)."""
  z = logits_rows(config, norm, unembed, x, temperature)
  shifted = z - jnp.max(z, axis=-1, keepdims=True)
  weights = jnp.exp(shifted)
  total = jnp.sum(weights, axis=-1)
  log_total = jnp.log(total)
  chosen = jnp.take_along_axis(shifted, target[:, None], axis=-1)[:, 0]
  entropy = log_total - jnp.sum(weights * shifted, axis=-1) / total
  return chosen - log_total, entropy


def row_logprobs(config, numerics, norm, unembed, x, target, temperature):
  """Logprob and entropy of one target a row, in the mode's numerics.

  The logits of all rows are never held at once: they go through in blocks, and
  the backward pass computes a block's again.

  Args:
    config, numerics: static.
    norm: [D]; unembed: [D, V].
    x: [N, D]; target: int32 [N]; temperature: float32 [N].

  Returns:
    (logprob [N], entropy [N]), float32.
  """

  def rows(*block):
    # One array: were they two, a caller that drops the entropy would get
    # another loop body compiled, and other last bits of the logprob.
    return jnp.stack(logprob_rows(config, norm, unembed, *block), axis=-1)

  block = max(LOGITS // config.vocab_size // 256, 1) * 256
  if numerics.mode == 'fast' and x.shape[0] > block:
    both = layers.in_blocks(rows, block, x, target, temperature)
  else:
    both = layers.map_rows(rows, numerics, x, target, temperature)
  return both[:, 0], both[:, 1]


def _row_logprobs_forward(config, numerics, *args):
  return row_logprobs(config, numerics, *args), args


def _row_logprobs_backward(config, numerics, args, cotangents):
  norm, unembed, x, target, temperature = args

  fast = as_fast(numerics)

  def again(norm, unembed, x):
    return row_logprobs(config, fast, norm, unembed, x, target, temperature)

  _, pull = jax.vjp(again, norm, unembed, x)
  return *pull(cotangents), None, None


row_logprobs_fixed = jax.custom_vjp(row_logprobs, nondiff_argnums=(0, 1))
row_logprobs_fixed.defvjp(_row_logprobs_forward, _row_logprobs_backward)
