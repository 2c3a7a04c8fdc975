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
from composer.model import operations
from pallas_kernels import token_logprob

Array = jax.Array
NumericsConfig = config_lib.NumericsConfig
LOWEST = -1e30  # a logit of what cannot be drawn; finite, so that 0 x it is 0
LOGITS = 2**27  # elements of [R, V] that `fast` holds at once: half a gigabyte


def as_fast(numerics: NumericsConfig) -> NumericsConfig:
  """The same numerics in mode `fast`."""
  return dataclasses.replace(numerics, mode='fast')


def unembedding(params: Any) -> Array:
  """[D, V]; the transposed embedding where they are tied."""
  return params['unembed'] if 'unembed' in params else params['embed'].T


def logits_rows(
  config,
  norm,
  unembed,
  x: Array,
  temperature: Array,
  ops: operations.Operations = operations.PLAIN,
) -> Array:
  """Logits over the temperature, float32 [R, V], of rows x [R, D]."""
  h = layers.rms_norm(x, norm, config.norm_eps, ops)
  z = operations.logits(ops, h, unembed.astype(h.dtype))
  return z / temperature[:, None]


def logprob_rows(
  config,
  norm,
  unembed,
  x,
  target,
  temperature,
  kept=None,
):
  """(logprob [R], entropy [R]) of target [R] under softmax(logits / T).

  `kept` restricts the distribution; see `row_logprobs`.
  """
  z = logits_rows(config, norm, unembed, x, temperature)
  if kept is not None:
    # Whichever way they are given, the rest is compiled alike.
    among = jax.lax.optimization_barrier(_among(kept, config.vocab_size))
    z = jnp.where(among, z, LOWEST)
  shifted = z - jnp.max(z, axis=-1, keepdims=True)
  weights = jnp.exp(shifted)
  total = jnp.sum(weights, axis=-1)
  log_total = jnp.log(total)
  chosen = jnp.take_along_axis(shifted, target[:, None], axis=-1)[:, 0]
  entropy = log_total - jnp.sum(weights * shifted, axis=-1) / total
  return chosen - log_total, entropy


def _among(kept: Array, vocabulary: int) -> Array:
  """bool [R, V]: what each row was drawn among."""
  if kept.dtype == jnp.uint8:
    return jnp.unpackbits(kept, axis=-1, count=vocabulary).astype(bool)
  rows = jnp.arange(kept.shape[0])[:, None]
  place = jnp.where(kept < 0, vocabulary, kept)  # beyond the last: dropped
  among = jnp.zeros((kept.shape[0], vocabulary), bool)
  among = among.at[rows, place].set(True, mode='drop')
  return among | jnp.all(kept < 0, axis=-1, keepdims=True)


def row_logprobs(
  config, numerics, norm, unembed, x, target, temperature, kept=None, used=None
):
  """Logprob and entropy of one target a row, in the mode's numerics.

  The logits of all rows are never held at once: the kernel goes over the
  vocabulary, XLA over blocks of rows, and the backward pass computes a block's
  again.

  Args:
    config, numerics: static.
    norm: [D]; unembed: [D, V].
    x: [N, D]; target: int32 [N]; temperature: float32 [N].
    kept: None, or what each row was drawn among, to renormalise over: int32
      [N, J], ids, then -1 (-1 alone is all of them); or uint8 [N, ceil(V / 8)],
      packed bits.
    used: see `layers.map_rows`.

  Returns:
    (logprob [N], entropy [N]), float32.
  """
  ops = operations.of(numerics)
  if ops.sparse != operations.XLA:
    # One kernel, whether rows are cut and however it is said: what a row keeps
    # is all that its bits depend on.
    h = layers.rms_norm(x, norm, config.norm_eps, ops)
    return token_logprob.token_logprob(
      h,
      unembed.astype(h.dtype),
      target,
      temperature,
      kept=kept,
      implementation=ops.sparse,
    )

  def rows(*block):
    # One array: were they two, a caller that drops the entropy would get
    # another loop body compiled, and other last bits of the logprob.
    both = logprob_rows(config, norm, unembed, *block)
    return jnp.stack(both, axis=-1)

  block = max(LOGITS // config.vocab_size // 256, 1) * 256
  arrays = (x, target, temperature, *(() if kept is None else (kept,)))
  if numerics.mode != 'bitwise' and x.shape[0] > block:
    both = layers.in_blocks(rows, block, *arrays)
  else:
    both = layers.map_rows(rows, numerics, *arrays, used=used)
  return both[:, 0], both[:, 1]


def row_scores(
  config, numerics, norm, unembed, x, temperature
) -> token_logprob.Scored | None:
  """The logits of rows that are yet to be drawn from, and their statistics.

  One pass over `unembed` then gives the draw and, with the bits of
  `row_logprobs`, the logprob of what is drawn. The arguments are those there.

  Returns:
    None where no kernel gives both.
  """
  ops = operations.of(numerics)
  if ops.sparse == operations.XLA:
    return None
  h = layers.rms_norm(x, norm, config.norm_eps, ops)
  return token_logprob.scored(
    h, unembed.astype(h.dtype), temperature, implementation=ops.sparse
  )


def _row_logprobs_forward(config, numerics, *args):
  return row_logprobs(config, numerics, *args), args


def _row_logprobs_backward(config, numerics, args, cotangents):
  norm, unembed, x, target, temperature, kept, _ = args

  fast = as_fast(numerics)

  def again(norm, unembed, x):
    return row_logprobs(
      config, fast, norm, unembed, x, target, temperature, kept
    )

  _, pull = jax.vjp(again, norm, unembed, x)
  return *pull(cotangents), None, None, None, None


row_logprobs_fixed = jax.custom_vjp(row_logprobs, nondiff_argnums=(0, 1))
row_logprobs_fixed.defvjp(_row_logprobs_forward, _row_logprobs_backward)
