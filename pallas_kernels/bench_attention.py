"""The rows of attention in the benchmark: packed, its gradient, and paged."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention
from pallas_kernels import bench
from pallas_kernels import bench_others
from pallas_kernels import dispatch
from pallas_kernels import paged_attention
from pallas_kernels.attention import shapes
from pallas_kernels.paged_attention import shapes as paged_shapes

LARGE = 1.2e10  # bytes of scores that XLA may be asked to hold


def exact(q, k, v, position, scale) -> jax.Array:
  """Rows [R, K] of one head over its keys [T, K] to `position` [R], float32."""
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  s = jnp.dot(q, k.T, precision='highest') * scale
  seen = jnp.arange(k.shape[0])[None, :] <= position[:, None]
  p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
  return jnp.dot(p, v, precision='highest')


# --- Packed ------------------------------------------------------------------


def packed(shape: shapes.Shape) -> Iterator[bench.Row]:
  """Forward and backward, ours and theirs; one segment a row of the batch."""
  b, t, h, g = shape.rows, shape.tokens, shape.heads, shape.groups
  keys = jax.random.split(jax.random.key(1), 4)
  draw = lambda i, *size: jax.random.normal(keys[i], size, jnp.bfloat16)  # noqa: E731
  q, k = draw(0, b, t, h, shape.key), draw(1, b, t, g, shape.key)
  v = None if shape.shared else draw(2, b, t, g, shape.width)
  dout = draw(3, b, t, h, shape.width)
  scale = shape.key**-0.5
  width = shape.width if shape.shared else 0

  def ours(q, k, v):
    ids = jnp.ones(q.shape[:2], jnp.int32)
    return attention.attention(
      q, k, v, ids, scale=scale, block=shape.block, width=width
    )

  out = jax.jit(ours)(q, k, v)
  some = jnp.asarray(sorted({0, t // 3, t // 2, t - 1}))
  own = k[-1, :, -1]
  values = own[:, : shape.width] if shape.shared else v[-1, :, -1]
  want = exact(q[-1, some, -1], own, values, some, scale)
  half = [None if x is None else x[-1:, : t // 2 + 3] for x in (q, k, v)]
  row = bench.Row(
    'attention',
    shape.name,
    'ours',
    flops=shape.flops,
    error=bench.relative(out[-1, some, -1], want),
    differing=int(jnp.sum(jax.jit(ours)(*half) != out[-1:, : t // 2 + 3])),
  )
  yield bench._timed(row, ours, q, k, v)
  wide = _padded(v, shape)
  for who in ('xla', 'cudnn'):
    if _possible(who, shape):
      theirs = functools.partial(_library, who=who, scale=scale)
      row = bench.Row('attention', shape.name, who, flops=shape.flops)
      yield bench._timed(row, theirs, q, k, wide)
  row = bench.Row('attention', shape.name, 'tokamax', flops=shape.flops)
  yield from bench_others.attention(row, q, k, v, scale)
  yield from _gradients(shape, ours, q, k, v, wide, dout, scale)
  torch = bench._torch()
  if torch is not None and not shape.shared:
    yield from _torch(shape, torch, q, k, wide, dout)


def _padded(v: jax.Array | None, shape: shapes.Shape) -> jax.Array | None:
  """Values as wide as keys, which the libraries want."""
  if v is None or shape.key == shape.width:
    return v
  return jnp.pad(v, ((0, 0),) * 3 + ((0, shape.key - shape.width),))


def _possible(who: str, shape: shapes.Shape) -> bool:
  scores = 4 * shape.rows * shape.tokens**2 * shape.heads
  if who == 'xla':
    return scores < LARGE and not shape.shared
  return dispatch.platform() == 'gpu' and not shape.shared


def _library(q, k, v, who: str, scale: float):
  return jax.nn.dot_product_attention(
    q, k, v, scale=scale, is_causal=True, implementation=who
  )


def _gradients(shape, ours, q, k, v, wide, dout, scale) -> Iterator[bench.Row]:
  flops = shape.flops * 5 // 2
  pull = jax.jit(lambda pull, dout: pull(dout))
  size = shape.key - shape.width
  wide_dout = jnp.pad(dout, ((0, 0),) * 3 + ((0, size),)) if size else dout
  found = jax.jit(lambda *a: jax.vjp(ours, *a)[1](dout))(q, k, v)
  row = bench.Row('attention gradient', shape.name, 'ours', flops=flops)
  want = None
  theirs = functools.partial(_library, who='cudnn', scale=scale)
  if _possible('cudnn', shape) and shape.key <= 128:
    want = jax.jit(lambda *a: jax.vjp(theirs, *a)[1](wide_dout))(q, k, wide)
    error = max(
      bench.relative(got, one) for got, one in zip(found, want, strict=True)
    )
    row = dataclasses.replace(row, error=error)
  _, saved = jax.jit(functools.partial(jax.vjp, ours))(q, k, v)
  yield bench._timed(row, pull, saved, dout)
  if want is not None:
    _, saved = jax.jit(functools.partial(jax.vjp, theirs))(q, k, wide)
    row = bench.Row('attention gradient', shape.name, 'cudnn', flops=flops)
    yield bench._timed(row, pull, saved, wide_dout)


def _torch(shape, torch: Any, q, k, v, dout) -> Iterator[bench.Row]:
  """PyTorch through cuDNN; values padded to the keys' width."""
  kinds = importlib.import_module('torch.nn.attention')
  function = torch.nn.functional.scaled_dot_product_attention
  size = shape.key - shape.width
  dout = jnp.pad(dout, ((0, 0),) * 3 + ((0, size),)) if size else dout
  q, k, v, dout = (
    torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v, dout)
  )
  arrays = [x.detach().requires_grad_() for x in (q, k, v)]
  call = functools.partial(
    function, is_causal=True, enable_gqa=shape.heads != shape.groups
  )
  row = bench.Row('attention', shape.name, 'torch', flops=shape.flops)
  with kinds.sdpa_kernel(kinds.SDPBackend.CUDNN_ATTENTION):
    yield bench._torch_timed(row, torch, lambda: call(q, k, v))
    try:
      out = call(*arrays)
    except RuntimeError:  # said above
      return
    row = dataclasses.replace(
      row, operation='attention gradient', flops=shape.flops * 5 // 2
    )
    yield bench._torch_timed(
      row,
      torch,
      lambda: torch.autograd.grad(out, arrays, dout, retain_graph=True),
    )


# --- Paged -------------------------------------------------------------------


def paged(shape: paged_shapes.Shape) -> Iterator[bench.Row]:
  """Sequences of half to all of the shape's tokens, in pages in any order."""
  n, queries, block = shape.sequences, shape.queries, shape.block
  h, g, count = shape.heads, shape.groups, shape.tokens // shape.block
  rng = np.random.default_rng(1)
  keys = jax.random.split(jax.random.key(1), 3)
  draw = lambda i, *size: jax.random.normal(keys[i], size, jnp.bfloat16)  # noqa: E731
  q = draw(0, n, queries, h, shape.key)
  k = draw(1, n * count, block, g, shape.key)
  v = None if shape.shared else draw(2, n * count, block, g, shape.width)
  table = jnp.asarray(rng.permutation(n * count).reshape(n, count), jnp.int32)
  first = rng.integers(shape.tokens // 2, shape.tokens - queries + 1, n)
  first = np.minimum(first, shape.tokens - queries)
  positions = jnp.asarray(first[:, None] + np.arange(queries), jnp.int32)
  scale = shape.key**-0.5
  seen = (first + queries - 1) // block + 1
  pairs = int((first + 1).sum()) * queries + n * queries * (queries - 1) // 2
  size = dict(
    flops=2 * pairs * h * (shape.key + shape.width),
    bytes=int(seen.sum()) * block * shape.token_bytes,
  )

  def ours(q, k, v, table, positions):
    return paged_attention.paged_attention(
      q,
      k,
      v,
      table,
      positions,
      scale=scale,
      width=shape.width if shape.shared else 0,
    )

  out = jax.jit(ours)(q, k, v, table, positions)
  own = k[table[-1], :, -1].reshape(-1, shape.key)
  values = own[:, : shape.width]
  if v is not None:
    values = v[table[-1], :, -1].reshape(-1, shape.width)
  want = exact(q[-1, -4:, -1], own, values, positions[-1, -4:], scale)
  moved = jnp.roll(k, 3, axis=0), None if v is None else jnp.roll(v, 3, axis=0)
  few = slice(n // 2, None)
  other = jax.jit(ours)(
    q[few], *moved, (table[few] + 3) % (n * count), positions[few]
  )
  row = bench.Row(
    'paged_attention',
    shape.name,
    'ours',
    error=bench.relative(out[-1, -4:, -1], want),
    differing=int(jnp.sum(other != out[few])),
    **size,
  )
  yield bench._timed(row, ours, q, k, v, table, positions)
  if 4 * n * h * queries * shape.tokens < LARGE:
    row = bench.Row('paged_attention', shape.name, 'xla', **size)
    naive = functools.partial(_naive, width=shape.width, scale=scale)
    yield bench._timed(row, naive, q, k, v, table, positions)


def _naive(q, k, v, table, positions, width, scale):
  """What one writes first: all pages side by side, then a softmax."""
  n, queries, h, key = q.shape
  g = k.shape[2]
  k = k[table].reshape(n, -1, g, key)
  v = k[..., :width] if v is None else v[table].reshape(n, -1, g, width)
  q = q.reshape(n, queries, g, h // g, key)
  s = attention.reference.product('nqgid,nsgd->ngqis', q, k) * scale
  seen = jnp.arange(k.shape[1])[None, None] <= positions[:, :, None]
  s = jnp.where(seen[:, None, :, None], s, -1e30)
  p = jax.nn.softmax(s, axis=-1).astype(v.dtype)
  out = attention.reference.product('ngqis,nsgd->nqgid', p, v)
  return out.reshape(n, queries, h, width).astype(q.dtype)
