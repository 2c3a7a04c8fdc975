"""Causal attention of packed segments, one block of keys after another.

  out[t] = sum_s p[t, s] v[s],  p[t, :] = softmax(scale q[t] . k[s]),
  over the keys s <= t of t's own segment

Keys are merged in blocks of `block` tokens in one order and by one expression
(see `reference`), the one that `paged_attention` uses. Where segments start at
multiples of the block, a block holds the same tokens of a segment wherever it
is packed, so a row has the same bits in training, prefill and decoding, and
whatever else is packed beside it.

Grouped-query attention has H heads of queries over G of keys. Latent attention
(DeepSeek-V2, 2024) is either expanded (H = G, K 192, W 128), or absorbed: G = 1,
K 576, and the values are the first `width` = 512 numbers of the keys.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels.attention import reference

NAME = 'attention'


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  segment_ids: jax.Array,
  *,
  scale: float,
  block: int,
  width: int = 0,
  split: int = 0,
  implementation: str | None = None,
  tiles: Any = None,
) -> jax.Array:
  """Causal attention within segments.

  Args:
    q: [B, T, H, K].
    k: [B, T, G, K], of the same dtype; H is a multiple of G.
    v: [B, T, G, W], or None: the first `width` numbers of the keys.
    segment_ids: int32 [B, T]. A segment is a run of equal ids above 0; 0 is
      padding, whose rows are 0 and get and give no gradient. Its numbers must
      be finite all the same: what is not seen is multiplied by 0.
    scale: of the scores, above 0.
    block: tokens of a block of keys; the kernel for GPUs takes 64 and 128. Part
      of what is computed: another block rounds elsewhere. For rows that do not
      depend on where their segment is packed, segments start at its multiples.
    width: see `v`.
    split: tokens of a split of keys, 0 for none: see `gpu_splits`. Part of what
      is computed, for those who want the bits of `paged_attention` with that
      split. The other implementations do not cut, nor do they in
      `paged_attention`.
    implementation: a name of `dispatch.NAMES`; None: the best there is.
    tiles: `gpu.Tiles` of the forward kernel, instead of those that fit best.

  Returns:
    [B, T, H, W] in q's dtype. Differentiable in q, k and v.

  Raises:
    ValueError: shapes and dtypes that do not fit each other, or an
      implementation that cannot run.
  """
  _check(q, k, v, segment_ids, scale, block, width)
  check_split(split, block)
  b, t, h = q.shape[:3]
  width = width if v is None else v.shape[-1]
  chosen = _choose(q, k, v, block, width, implementation)
  if not q.size:
    return jnp.zeros((b, t, h, width), q.dtype)
  if chosen.startswith('gpu') and tiles is None:
    from pallas_kernels.attention import gpu

    tiles = gpu.tuned(q.shape[-1], width, block, v is None, t)
  pad = -t % block
  if pad:
    grow = lambda x: jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))  # noqa: E731
    q, k, segment_ids = grow(q), grow(k), grow(segment_ids)
    v = None if v is None else grow(v)
  starts, ends = bounds(segment_ids)
  flat = lambda x: x.reshape(b * (t + pad), *x.shape[2:])  # noqa: E731
  out = _attention(
    flat(q),
    flat(k),
    None if v is None else flat(v),
    starts,
    ends,
    float(scale),
    block,
    width,
    chosen,
    tiles,
    split,
  )
  return out.reshape(b, t + pad, *out.shape[1:])[:, :t]


def bounds(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """First and last row that each row sees, int32 [B T], of ids [B, T].

  Rows are counted through the whole batch. The last one is the row itself, or
  -1 for padding.
  """
  b, t = segment_ids.shape
  row = jnp.arange(t, dtype=jnp.int32)[None, :]
  before = jnp.pad(segment_ids, ((0, 0), (1, 0)), constant_values=-1)[:, :t]
  begins = jnp.where(segment_ids != before, row, 0)
  offset = (jnp.arange(b, dtype=jnp.int32) * t)[:, None]
  starts = offset + lax.cummax(begins, axis=1)
  ends = jnp.where(segment_ids > 0, offset + row, -1)
  return starts.reshape(-1), ends.reshape(-1)


# --- Checks and choice -------------------------------------------------------


def check_heads(q, k, v, scale, block, width) -> None:
  """ValueError for queries [..., H, K], keys and values that do not fit."""
  if q.shape[-1] != k.shape[-1]:
    raise ValueError(
      f'q {q.shape} and k {k.shape} differ in the numbers of a head'
    )
  if not k.shape[-2]:
    raise ValueError(
      f'k {k.shape} has no heads; give [..., G, K] with G above 0'
    )
  if q.shape[-2] % k.shape[-2]:
    raise ValueError(
      f'{q.shape[-2]} heads of q are not a multiple of the {k.shape[-2]} of k'
    )
  if v is None and not 0 < width <= k.shape[-1]:
    raise ValueError(
      f'width={width}; without v, give how many of the {k.shape[-1]} numbers of'
      ' a key are its value'
    )
  if v is not None and v.shape[:-1] != k.shape[:-1]:
    raise ValueError(
      f'k {k.shape} and v {v.shape} differ in more than the last'
    )
  if v is not None and width not in (0, v.shape[-1]):
    raise ValueError(
      f'width={width} and v {v.shape}; give width only where v is None'
    )
  checks.floats(q=q)
  for name, array in (('k', k), ('v', v)):
    if array is not None and array.dtype != q.dtype:
      raise ValueError(
        f'q is {q.dtype} and {name} {array.dtype}; cast one, so that the rounding'
        ' is seen'
      )
  if not scale > 0:
    raise ValueError(f'scale={scale} must be above 0')
  if block < 1:
    raise ValueError(f'block={block} must be at least 1')


def check_split(split: int, block: int) -> None:
  """ValueError for a split that is no number of blocks, or too short."""
  if split and (split % block or split < 128):
    raise ValueError(
      f'split={split} must be a multiple of block={block} and at least 128, or 0'
    )


def _check(q, k, v, segment_ids, scale, block, width) -> None:
  if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2]:
    raise ValueError(
      f'q {q.shape} must be [B, T, H, K] and k {k.shape} [B, T, G, K]'
    )
  check_heads(q, k, v, scale, block, width)
  checks.shape('[B, T]', q.shape[:2], segment_ids=segment_ids)
  checks.integers(segment_ids=segment_ids)


def _choose(q, k, v, block, width, implementation) -> str:
  gpu_fault = tpu_fault = None
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.attention import gpu
    from pallas_kernels.attention import tpu

    gpu_fault = gpu.unsupported(q, k, v, block, width)
    tpu_fault = tpu.unsupported(q, k, v, block, width)
  return dispatch.choose(NAME, implementation, gpu_fault, tpu_fault)


# --- Values and gradients ----------------------------------------------------


def _module(chosen: str):
  """The module of an implementation, and what it takes besides."""
  if chosen == 'reference':
    return reference, {}
  from pallas_kernels.attention import gpu
  from pallas_kernels.attention import tpu

  module = gpu if chosen.startswith('gpu') else tpu
  return module, {'interpret': chosen.endswith('interpret')}


def _run(q, k, v, starts, ends, scale, block, width, chosen, tiles, split):
  module, more = _module(chosen)
  if chosen.startswith('gpu'):
    more |= dict(tiles=tiles, split=split)
  sizes = dict(block=block, width=width, scale=scale)
  return module.forward(q, k, v, starts, ends, **sizes, **more)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8, 9, 10))
def _attention(q, k, v, starts, ends, *constants):
  return _run(q, k, v, starts, ends, *constants)[0]


def _forward(q, k, v, starts, ends, *constants):
  out, log = _run(q, k, v, starts, ends, *constants)
  return out, (q, k, v, starts, ends, out, log)


def _backward(scale, block, width, chosen, tiles, split, saved, dout):
  del tiles, split
  q, k, v, starts, ends, out, log = saved
  dots = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
  module, more = _module(chosen)
  sizes = dict(block=block, width=width, scale=scale)
  dq, dk, dv = module.backward(
    q, k, v, starts, ends, log, dots, dout, **sizes, **more
  )
  zero = np.zeros(starts.shape, jax.dtypes.float0)
  return dq, dk, dv, zero, zero


_attention.defvjp(_forward, _backward)
