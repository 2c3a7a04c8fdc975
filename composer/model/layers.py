"""Row-wise pieces of a layer, and the mapping that fixes their numerics.

Everything here but the attention over keys is row-wise: row r of the result
depends on row r of the argument alone. `map_rows` uses that. In `bitwise` it
cuts the rows into blocks of one fixed number and loops over them, so that XLA
compiles one body for one shape, and a row has the same bits whatever stands
beside it. Kernels that add in a fixed order need no such blocks, and in `fast`
and `aligned` the rows go through at once.
"""

from __future__ import annotations

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer.model import operations
from pallas_kernels import dispatch
from pallas_kernels import norm

Array = jax.Array
CACHE_ROWS = 256  # rows of a block that `fast` computes at once on a CPU
ParamSpec = params_lib.ParamSpec
Operations = operations.Operations

DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


def map_rows(
  fn: Callable[..., Any],
  numerics: config_lib.NumericsConfig,
  *arrays: Array,
  used: Array | None = None,
) -> Any:
  """fn over rows: arrays [N, ...] -> pytree of [N, ...].

  In `bitwise`, N must be a multiple of `numerics.row_block`, at least two
  blocks: XLA unrolls a loop of one trip and then compiles its body anew, in
  the context of what surrounds it.

  Args:
    fn: of a block of rows.
    numerics: static.
    arrays: [N, ...].
    used: int32, the first rows that are read of the result; `bitwise` on a CPU
      then leaves out blocks without one, which are 0. None: all. Not
      differentiable.
  """
  rows, block = arrays[0].shape[0], numerics.row_block
  if numerics.mode != 'bitwise' or operations.of(numerics).fixed:
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
  if used is None:
    out = jax.lax.map(lambda block_arrays: fn(*block_arrays), blocks)
  else:
    out = _first_blocks(fn, -(-used // block), blocks)
  return jax.tree.map(lambda a: a.reshape(rows, *a.shape[2:]), out)


def _first_blocks(fn: Callable[..., Any], count: Array, blocks: Any) -> Any:
  """`lax.map` of fn over the first `count` of blocks [B, R, ...]; 0 beyond.

  The body is that of `lax.map`, so a row has the bits that the trainer's has.
  """

  def one(n: Array, out: Any) -> Any:
    found = fn(*jax.tree.map(lambda a: a[n], blocks))
    return jax.tree.map(lambda o, x: o.at[n].set(x), out, found)

  total = jax.tree.leaves(blocks)[0].shape[0]
  shapes = jax.eval_shape(fn, *jax.tree.map(lambda a: a[0], blocks))
  out = jax.tree.map(lambda s: jnp.zeros((total, *s.shape), s.dtype), shapes)
  return jax.lax.fori_loop(0, count, one, out)


def in_cache(fn: Callable[..., Any], block: int, *arrays: Array) -> Any:
  """fn over blocks of the leading axis whose intermediates fit a CPU's cache."""
  rows = arrays[0].shape[0]
  if dispatch.platform() != 'cpu' or rows % block or rows < 2 * block:
    return fn(*arrays)
  return in_blocks(fn, block, *arrays)


def in_blocks(fn: Callable[..., Any], block: int, *arrays: Array) -> Any:
  """fn over blocks of `block` rows, one after the other; [N, ...] -> [N, ...].

  The backward pass computes a block's intermediates again instead of reading
  them from memory, and adds the parameters' gradients up block by block. The
  last row fills the last block: zeros could be no valid row (a temperature).
  """
  rows = arrays[0].shape[0]
  blocks = -(-rows // block)

  def cut(a):
    rest = blocks * block - rows
    if rest:
      a = jnp.pad(a, [(0, rest)] + [(0, 0)] * (a.ndim - 1), mode='edge')
    return a.reshape(blocks, block, *a.shape[1:])

  out = jax.lax.map(
    jax.checkpoint(lambda part: fn(*part)), jax.tree.map(cut, arrays)
  )
  whole = blocks * block
  return jax.tree.map(lambda a: a.reshape(whole, *a.shape[2:])[:rows], out)


def dtype(numerics: config_lib.NumericsConfig) -> Any:
  """Of activations and products; sums and the islands stay in float32."""
  return DTYPES[numerics.compute]


def as_compute(numerics: config_lib.NumericsConfig, p: Any) -> Any:
  """A layer's parameters in the dtype of products; float32 ones as they are.

  Norm scales and the router keep float32. The cast stands inside the loops over
  rows, so that gradients of a parameter are added up in its own dtype.
  """
  if numerics.compute == 'float32':
    return p

  def cast(path, leaf):
    name = str(path[-1].key)
    wide = name.endswith('norm') or name.startswith('router')
    return leaf if wide else leaf.astype(dtype(numerics))

  return jax.tree_util.tree_map_with_path(cast, p)


def rms_norm(
  x: Array,
  scale: Array,
  eps: float,
  ops: Operations = operations.PLAIN,
) -> Array:
  """x / sqrt(mean(x^2) + eps) * scale, over the last axis, in float32.

  x [..., D], scale [D]; the result has the dtype of x.
  """
  if ops.dense != operations.XLA:
    return norm.rms_norm(x, scale, epsilon=eps, implementation=ops.dense)
  wide = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
  scale = jnp.expand_dims(scale, tuple(range(x.ndim - 1)))
  return (wide * jax.lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def add_norm(
  x: Array,
  more: Array,
  scale: Array,
  eps: float,
  ops: Operations = operations.PLAIN,
) -> tuple[Array, Array]:
  """(x + more, `rms_norm` of it), by one kernel where kernels norm."""
  if ops.dense == operations.XLA:
    total = operations.add(ops, x, more)
    return total, rms_norm(total, scale, eps, ops)
  return norm.add_rms_norm(
    x, more, scale, epsilon=eps, implementation=ops.dense
  )


def norm_heads(
  x: Array,
  scales: tuple[Array, ...],
  counts: tuple[int, ...],
  eps: float,
  ops: Operations = operations.PLAIN,
) -> Array:
  """`rms_norm` of the first counts[0] heads of x [R, H, K] by scales[0], ...

  Heads that follow them are left as they are; one kernel where kernels norm.
  """
  if ops.dense != operations.XLA:
    return norm.rms_norm_heads(
      x, scales, counts, epsilon=eps, implementation=ops.dense
    )
  one = functools.partial(rms_norm, eps=eps, ops=ops)
  return norm.reference.by_heads(x, scales, counts, one)


def yarn_scale(factor: float, mscale: float) -> float:
  """m = 0.1 mscale ln(factor) + 1 for a factor above 1, else 1."""
  return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def rope_dim(config: config_lib.ModelConfig) -> int:
  """Numbers of a head that turn with its position."""
  return config.rope_dim if config.kv_lora else config.head_dim


def rope_frequencies(config: config_lib.ModelConfig) -> np.ndarray:
  """Radians a token of every rotary pair, float64 or float32 [K / 2].

  Plain: theta^(-2i/K). YaRN (Peng et al., 2023, eq. 23) leaves pairs that turn
  more than `beta_fast` times within the original context, divides those that
  turn less than `beta_slow` times by the factor, and blends linearly, in i,
  between the whole indices around the two.

  Published models were trained with frequencies and angles that are rounded to
  float32 at every operation: at the ten-thousandth token that is half a
  thousandth of a radian, and shows in their logits. The same operations in the
  same order are taken for `rope_float32`, and wherever there is YaRN.
  """
  dim, yarn = rope_dim(config), config.yarn
  if yarn.factor == 1 and not config.rope_float32:
    return config.rope_theta ** (-np.arange(dim // 2) / (dim // 2))
  one = np.float32(1)
  exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
  periods = config.rope_theta ** exponents.astype(np.float64)
  periods = periods.astype(np.float32)  # tokens a radian
  if yarn.factor == 1:
    return one / periods
  kept = one - _yarn_ramp(config)
  stretched = one / (np.float32(yarn.factor) * periods)
  return stretched * (one - kept) + one / periods * kept


def _yarn_ramp(config: config_lib.ModelConfig) -> np.ndarray:
  """How far each pair is stretched, 0 to 1, float32 [K / 2]."""
  dim, yarn = rope_dim(config), config.yarn

  def index(turns: float) -> float:
    wavelength = yarn.original_context / (turns * 2 * math.pi)
    return dim * math.log(wavelength) / (2 * math.log(config.rope_theta))

  low = max(math.floor(index(yarn.beta_fast)), 0)
  high = min(math.ceil(index(yarn.beta_slow)), dim - 1)
  span = np.float32((high - low) or 1e-3)
  pairs = np.arange(dim // 2, dtype=np.float32)
  return np.clip((pairs - np.float32(low)) / span, 0, 1)


def rope_table(
  config: config_lib.ModelConfig, length: int
) -> tuple[np.ndarray, np.ndarray]:
  """cos and sin, float32 [length, K / 2], of the rotary angles (Su et al., 2021).

  Both are scaled by m(mscale) / m(mscale_all_dim) of YaRN. Host constants: a
  position's entry is the same in every program, which a sine computed inside
  differently fused loops would not promise.
  """
  frequencies, yarn = rope_frequencies(config), config.yarn
  positions = np.arange(length).astype(frequencies.dtype)
  angles = (positions[:, None] * frequencies[None, :]).astype(np.float64)
  scale = yarn_scale(yarn.factor, yarn.mscale)
  scale /= yarn_scale(yarn.factor, yarn.mscale_all_dim)
  cos, sin = scale * np.cos(angles), scale * np.sin(angles)
  return cos.astype(np.float32), sin.astype(np.float32)


def rotate(
  x: Array, cos: Array, sin: Array, ops: Operations = operations.PLAIN
) -> Array:
  """Rotates the two halves of x [R, H, K]; cos, sin float32 [R, K / 2]."""
  first, second = jnp.split(x, 2, axis=-1)
  cos, sin = (
    operations.factor(ops, turn[:, None, :], x.dtype) for turn in (cos, sin)
  )
  turned = jnp.concatenate(
    [first * cos - second * sin, second * cos + first * sin], axis=-1
  )
  return operations.narrow(ops, turned, x.dtype)


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


def feed_forward(
  p: Any,
  config: config_lib.ModelConfig,
  x: Array,
  ops: Operations = operations.PLAIN,
) -> Array:
  """Residual dense feed-forward of one layer; x [R, D]."""
  h = rms_norm(x, p['norm'], config.norm_eps, ops)
  return operations.add(ops, x, gated_rows(p, h, ops))


def gated_rows(p: Any, h: Array, ops: Operations) -> Array:
  """What a dense feed-forward adds; h [R, D] normed."""
  hidden = operations.gated(ops, h, p['gate_up'])
  return operations.matmul(ops, hidden, p['down'])
