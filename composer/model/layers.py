"""Row-wise pieces of a layer, and the mapping that fixes their numerics.

Everything here but the attention over keys is row-wise: row r of the result
depends on row r of the argument alone. `map_rows` uses that. In `bitwise` it
cuts the rows into blocks of one fixed number and loops over them, so that XLA
compiles one body for one shape, and a row has the same bits whatever stands
beside it. In `fast` the rows go through at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import params as params_lib

Array = jax.Array
CACHE_ROWS = 256  # rows of a block that `fast` computes at once on a CPU
ParamSpec = params_lib.ParamSpec


def map_rows(
  fn: Callable[..., Any],
  numerics: config_lib.NumericsConfig,
  *arrays: Array,
) -> Any:
  """fn over rows: arrays [N, ...] -> pytree of [N, ...].

  In `bitwise`, N must be a multiple of `numerics.row_block`, at least two
  blocks: XLA unrolls a loop of one trip and then compiles its body anew, in
  the context of what surrounds it.
  """
  rows, block = arrays[0].shape[0], numerics.row_block
  if numerics.mode == 'fast':
    return in_cache(fn, CACHE_ROWS, *arrays)
  if rows % block or rows < 2 * block:
    raise ValueError(
      f'bitwise numerics need a multiple of numerics.row_block={block} rows,'
      f' at least two blocks; got {rows} (engine.rows, or'
      ' rl.micro_batch * rl.sequence_length)'
    )
  blocks = jax.tree.map(
    lambda a: a.reshape(rows // block, block, *a.shape[1:]), arrays
  )
  out = jax.lax.map(lambda block_arrays: fn(*block_arrays), blocks)
  return jax.tree.map(lambda a: a.reshape(rows, *a.shape[2:]), out)


def in_cache(fn: Callable[..., Any], block: int, *arrays: Array) -> Any:
  """fn over blocks of the leading axis whose intermediates fit a CPU's cache.

  The backward pass computes a block's intermediates again instead of reading
  them from memory, and adds the parameters' gradients up block by block.
  """
  rows = arrays[0].shape[0]
  if jax.default_backend() != 'cpu' or rows % block or rows < 2 * block:
    return fn(*arrays)
  blocks = jax.tree.map(
    lambda a: a.reshape(rows // block, block, *a.shape[1:]), arrays
  )
  out = jax.lax.map(jax.checkpoint(lambda part: fn(*part)), blocks)
  return jax.tree.map(lambda a: a.reshape(rows, *a.shape[2:]), out)


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
  """x / sqrt(mean(x^2) + eps) * scale, over the last axis; x [R, D]."""
  mean_square = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
  return x * jax.lax.rsqrt(mean_square + eps) * scale[None, :]


def rope_table(
  config: config_lib.ModelConfig, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """cos and sin [length, head_dim / 2] of the rotary angles (Su et al., 2021).

  Host constants: a position's entry is the same in every program, which a sine
  computed inside differently fused loops would not promise.
  """
  half = config.head_dim // 2
  inverse = config.rope_theta ** (-np.arange(half) / half)
  angles = np.arange(length)[:, None] * inverse[None, :]
  return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
  """Rotates the two halves of x [R, H, K]; cos, sin [R, K / 2]."""
  first, second = jnp.split(x, 2, axis=-1)
  cos, sin = cos[:, None, :], sin[:, None, :]
  return jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )


def gated(x: Array, gate_up: Array) -> Array:
  """silu(x W_gate) * (x W_up); x [R, D], gate_up [D, 2, F] -> [R, F]."""
  width, _, hidden = gate_up.shape
  both = x @ gate_up.reshape(width, 2 * hidden)  # [R, 2 F]
  return jax.nn.silu(both[:, :hidden]) * both[:, hidden:]


def feed_forward_spec(config: config_lib.ModelConfig, layers: int) -> Any:
  """A dense gated feed-forward, stacked over `layers`."""
  d, f = config.width, config.dense_hidden
  return {
    'norm': ParamSpec((layers, d), ('layers', 'embed'), 'ones'),
    'gate_up': ParamSpec(
      (layers, d, 2, f), ('layers', 'embed', 'pair', 'mlp'), fan_in=d
    ),
    'down': ParamSpec((layers, f, d), ('layers', 'mlp', 'embed'), fan_in=f),
  }


def feed_forward(p: Any, config: config_lib.ModelConfig, x: Array) -> Array:
  """Residual dense feed-forward of one layer; x [R, D]."""
  h = rms_norm(x, p['norm'], config.norm_eps)
  return x + gated(h, p['gate_up']) @ p['down']
