"""The rows of packed attention in the benchmark, and of its gradient."""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import attention
from pallas_kernels import bench_others
from pallas_kernels import bench_rows
from pallas_kernels import bench_shapes
from pallas_kernels import dispatch
from pallas_kernels.attention import shapes
from pallas_kernels.bench_rows import Row
from pallas_kernels.bench_rows import Rows

LARGE = 1.2e10  # bytes of scores that XLA may be asked to hold
BACKWARD = 5 / 2  # products of a backward pass, of those of a forward pass


def exact(q, k, v, position, scale, start=None) -> jax.Array:
  """Rows [R, K] of one head over its keys [T, K], float32.

  Args:
    q: [R, K].
    k: [T, K].
    v: [T, W].
    position: [R], the last key that each sees.
    scale: of the scores.
    start: [R], the first that it sees; None: 0.
  """
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  s = jnp.dot(q, k.T, precision='highest') * scale
  number = jnp.arange(k.shape[0])[None, :]
  seen = number <= position[:, None]
  if start is not None:
    seen &= number >= start[:, None]
  p = jax.nn.softmax(jnp.where(seen, s, -jnp.inf), axis=-1)
  return jnp.dot(p, v, precision='highest')


def _exact_gradients(shape, arrays, dout, start) -> tuple[jax.Array, ...]:
  """dq [T, H / G, K], dk [T, K] and dv [T, W] of the last row's last group.

  Head after head, so that float32 scores of one of them are held at a time.
  """
  q, k, v = arrays
  t, share = shape.tokens, shape.heads // shape.groups
  own = k[-1, :, -1].astype(jnp.float32)
  values = None if v is None else v[-1, :, -1].astype(jnp.float32)
  position = jnp.arange(t)

  def one(q, k, v):
    v = k[:, : shape.width] if v is None else v
    return exact(q, k, v, position, shape.key**-0.5, start)

  def add(total, head):
    q, dout = (x.astype(jnp.float32) for x in head)
    dq, *more = jax.vjp(one, q, own, values)[1](dout)
    return jax.tree.map(jnp.add, total, tuple(more)), dq

  heads = tuple(jnp.swapaxes(x[-1, :, -share:], 0, 1) for x in (q, dout))
  zero = jax.tree.map(jnp.zeros_like, (own, values))
  (dk, dv), dq = jax.lax.scan(add, zero, heads)
  return jnp.swapaxes(dq, 0, 1), dk, dv


def packed(shape: bench_shapes.Attention) -> Rows:
  """Forward and backward, ours and theirs."""
  own, ids = shape.shape, shape.segment_ids()
  b, t, h, g = own.rows, own.tokens, own.heads, own.groups

  def draw(seed):
    keys = bench_rows.keys(seed, 4)
    normal = bench_rows.normal
    v = None if own.shared else normal(keys[2], b, t, g, own.width)
    return (
      normal(keys[0], b, t, h, own.key),
      normal(keys[1], b, t, g, own.key),
      v,
      normal(keys[3], b, t, h, own.width),
      jnp.broadcast_to(jnp.asarray(ids), (b, t)),
    )

  ours = functools.partial(_ours, own)
  q, k, v, dout, segments = jax.eval_shape(draw, bench_rows.SEED)
  forward, pull = _passes(ours)
  _, saved = jax.eval_shape(forward, q, k, v, segments)
  gradients = jax.eval_shape(pull, saved, dout)
  programs = {
    'draw': (draw, bench_rows.SEED),
    'ours': (ours, q, k, v, segments),
    'error': (functools.partial(_error, shape), q, k, v, dout),
    'alone': (functools.partial(_alone, shape), q, k, v, segments, dout),
    'saved': (forward, q, k, v, segments),
    'gradient': (pull, saved, dout),
    'gradient error': (
      functools.partial(_gradient_error, shape),
      *(q, k, v, dout, gradients),
    ),
  }
  ready = bench_rows.ahead(programs, {'draw', 'error', 'gradient error'})
  yield None
  q, k, v, dout, segments = bench_rows.draw(ready['draw'])
  yield _forward(shape, ready, q, k, v, segments)
  yield from _others(shape, q, k, v)
  yield from _gradient(shape, ready, (q, k, v, segments, dout))
  yield from _their_gradient(shape, q, k, v, dout)
  torch = bench_rows.torch()
  if torch is not None and not own.shared and shape.segments == 1:
    yield from _torch(own, torch, q, k, _padded(v, own), dout)


def _forward(shape: bench_shapes.Attention, ready, q, k, v, ids) -> Row:
  out = ready['ours'](q, k, v, ids)
  row = Row('attention', shape.name, 'ours', flops=shape.flops)
  row = bench_rows.checked(
    row,
    error=lambda: ready['error'](q, k, v, out),
    differing=lambda: ready['alone'](q, k, v, ids, out),
  )
  return bench_rows.timed(row, ready['ours'], q, k, v, ids)


def _ours(own: shapes.Shape, q, k, v, ids):
  return attention.attention(
    *(q, k, v, ids),
    scale=own.key**-0.5,
    block=own.block,
    width=own.width if own.shared else 0,
  )


def _passes(function):
  """Forward and backward pass of a function of q, k, v and ids.

  What is saved in between goes as arrays: the pullback that jax.vjp returns is
  equal to no other trace's, and the passes are compiled and run apart.
  """
  structure = None

  def forward(*arrays):
    nonlocal structure
    out, pull = jax.vjp(function, *arrays)
    saved, structure = jax.tree.flatten(pull)
    return out, saved

  def backward(saved, dout):
    return jax.tree.unflatten(structure, saved)(dout)[:3]

  return jax.jit(forward), jax.jit(backward)


def _error(shape: bench_shapes.Attention, q, k, v, out) -> jax.Array:
  """Of some rows of the last head."""
  own, t = shape.shape, shape.shape.tokens
  some = jnp.asarray(sorted({0, t // 3, t // 2, t - 1}))
  keys = k[-1, :, -1]
  values = keys[:, : own.width] if own.shared else v[-1, :, -1]
  start = jnp.asarray(shape.starts())[some]
  rows = q[-1, some, -1]
  want = exact(rows, keys, values, some, own.key**-0.5, start)
  return bench_rows.relative(out[-1, some, -1], want)


def _alone(shape: bench_shapes.Attention, q, k, v, ids, out) -> jax.Array:
  """Elements that differ where there is less: what begins the last segment.

  Of the last row of the batch, from where its last segment starts, some more
  than half of it.
  """
  start = int(shape.starts()[-1])
  end = start + (shape.shape.tokens - start) // 2 + 3
  half = [None if x is None else x[-1:, start:end] for x in (q, k, v, ids)]
  other = _ours(shape.shape, *half)
  return bench_rows.differing(other, out[-1:, start:end])


def _gradient_error(shape, q, k, v, dout, found) -> jax.Array:
  """The greatest of dq, dk and dv, of the last row's last group of heads."""
  own = shape.shape
  share = own.heads // own.groups
  start = jnp.asarray(shape.starts())
  wanted = _exact_gradients(own, (q, k, v), dout, start)
  dq, dk, dv = found
  got = dq[-1, :, -share:], dk[-1, :, -1], None if v is None else dv[-1, :, -1]
  pairs = zip(got, wanted, strict=True)
  errors = [bench_rows.relative(a, b) for a, b in pairs if b is not None]
  return jnp.max(jnp.stack(errors))


def _gradient(shape: bench_shapes.Attention, ready, arrays) -> Iterator[Row]:
  q, k, v, ids, dout = arrays
  flops = int(shape.flops * BACKWARD)
  row = Row('attention gradient', shape.name, 'ours', flops=flops)
  try:
    _, saved = ready['saved'](q, k, v, ids)
  except Exception as error:
    yield dataclasses.replace(row, note=bench_rows.reason(error))
    return

  def check():
    found = ready['gradient'](saved, dout)
    return ready['gradient error'](q, k, v, dout, found)

  row = bench_rows.checked(row, error=check)
  yield bench_rows.timed(row, ready['gradient'], saved, dout)


# --- Theirs ------------------------------------------------------------------


def _others(shape: bench_shapes.Attention, q, k, v) -> Iterator[Row]:
  """Forward: XLA's, cuDNN's and tokamax's, where they can do it."""
  own = shape.shape
  wide = _padded(v, own)
  for who in ('xla', 'cudnn'):
    if _possible(who, shape):
      row = Row('attention', shape.name, who, flops=shape.flops)
      note = 'segments as a bias' if shape.segments > 1 else ''
      row = dataclasses.replace(row, note=note)
      yield bench_rows.timed(row, _library(shape, who), q, k, wide)
  if shape.segments == 1:
    row = Row('attention', shape.name, 'tokamax', flops=shape.flops)
    yield from bench_others.attention(row, q, k, v, own.key**-0.5)


def _padded(v: jax.Array | None, own: shapes.Shape) -> jax.Array | None:
  """Values as wide as keys, which the libraries want."""
  if v is None or own.key == own.width:
    return v
  return jnp.pad(v, ((0, 0),) * 3 + ((0, own.key - own.width),))


def _possible(who: str, shape: bench_shapes.Attention) -> bool:
  own = shape.shape
  if who == 'xla':
    return 4 * own.rows * own.tokens**2 * own.heads < LARGE
  return dispatch.platform() == 'gpu' and not own.shared


def _library(shape: bench_shapes.Attention, who: str):
  """Causal attention of q, k and v as wide, by jax; absorbed: by XLA."""
  own, starts = shape.shape, jnp.asarray(shape.starts())
  scale = own.key**-0.5

  def run(q, k, v):
    if own.shared:
      return naive(q, k, own.width, scale)
    mask = None
    if shape.segments > 1:
      number = jnp.arange(own.tokens)
      mask = (number[None, :] >= starts[:, None])[None, None]
    return jax.nn.dot_product_attention(
      *(q, k, v),
      mask=mask,
      scale=scale,
      is_causal=True,
      implementation=who,
    )

  return run


def naive(q, k, width: int, scale: float) -> jax.Array:
  """Absorbed attention as one writes it first: q [B, T, H, K], k [B, T, 1, K]."""
  k = k[:, :, 0]
  s = attention.reference.product('bthd,bsd->bhts', q, k) * scale
  number = jnp.arange(k.shape[1])
  seen = number[None, :] <= number[:, None]
  p = jax.nn.softmax(jnp.where(seen[None, None], s, -1e30), axis=-1)
  p = p.astype(k.dtype)
  out = attention.reference.product('bhts,bsd->bthd', p, k[..., :width])
  return out.astype(q.dtype)


def _their_gradient(shape, q, k, v, dout) -> Iterator[Row]:
  """cuDNN's and tokamax's; of absorbed attention XLA's, whole and in blocks."""
  own, wide = shape.shape, _padded(v, shape.shape)
  flops = int(shape.flops * BACKWARD)
  row = Row('attention gradient', shape.name, 'cudnn', flops=flops)
  if own.shared:
    row = dataclasses.replace(row, who='xla')
    if _possible('xla', shape):
      yield _pulled(row, _library(shape, 'xla'), (q, k, wide), dout)
    if dispatch.platform() == 'gpu' and shape.segments == 1:
      yield _in_blocks(
        dataclasses.replace(row, who='xla blocks'), own, q, k, dout
      )
    return
  run = bench_others.attention_of(own.key**-0.5)
  if run is not None and shape.segments == 1:
    who = dataclasses.replace(row, who='tokamax', note=bench_others.UNTUNED)
    yield _pulled(who, run, (q, k, v), dout)
  if own.key != own.width:
    dout = jnp.pad(dout, ((0, 0),) * 3 + ((0, own.key - own.width),))
  if _possible('cudnn', shape):
    yield _pulled(row, _library(shape, 'cudnn'), (q, k, wide), dout)


def _pulled(row: Row, function, arrays, dout) -> Row:
  """Of the gradient alone, from what a forward pass saved."""
  try:
    _, saved = jax.jit(functools.partial(jax.vjp, function))(*arrays)
  except Exception as error:
    return dataclasses.replace(row, note=bench_rows.reason(error))
  return bench_rows.timed(row, lambda saved, dout: saved(dout), saved, dout)


def _in_blocks(row: Row, own: shapes.Shape, q, k, dout) -> Row:
  """XLA's, a block of keys at a time, from our kernel's log-sum-exp."""
  from pallas_kernels.attention import gpu

  sizes = dict(width=own.width, scale=own.key**-0.5)
  bounds = attention.bounds(jnp.ones((1, own.tokens), jnp.int32))
  q, k, dout = q[-1], k[-1], dout[-1]
  forward = functools.partial(gpu.forward, block=own.block, **sizes)
  try:
    out, log = jax.jit(forward)(q, k, None, *bounds)
  except Exception as error:
    return dataclasses.replace(row, note=bench_rows.reason(error))
  dots = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)

  def run(q, k, log, dots, dout):
    back = attention.reference.backward
    return back(*(q, k, None, *bounds, log, dots, dout), block=512, **sizes)

  return bench_rows.timed(row, run, q, k, log, dots, dout)


def _torch(own: shapes.Shape, torch: Any, q, k, v, dout) -> Iterator[Row]:
  """PyTorch through cuDNN; values padded to the keys' width."""
  kinds = importlib.import_module('torch.nn.attention')
  function = torch.nn.functional.scaled_dot_product_attention
  size = own.key - own.width
  dout = jnp.pad(dout, ((0, 0),) * 3 + ((0, size),)) if size else dout
  q, k, v, dout = (
    torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v, dout)
  )
  arrays = [x.detach().requires_grad_() for x in (q, k, v)]
  call = functools.partial(
    function, is_causal=True, enable_gqa=own.heads != own.groups
  )
  row = Row('attention', own.name, 'torch', flops=own.flops)
  with kinds.sdpa_kernel(kinds.SDPBackend.CUDNN_ATTENTION):
    yield bench_rows.torch_timed(row, torch, lambda: call(q, k, v))
    flops = int(own.flops * BACKWARD)
    row = dataclasses.replace(row, operation='attention gradient', flops=flops)
    try:
      out = call(*arrays)
    except RuntimeError as error:
      yield dataclasses.replace(row, note=bench_rows.reason(error))
      return

    def pull():
      return torch.autograd.grad(out, arrays, dout, retain_graph=True)

    yield bench_rows.torch_timed(row, torch, pull)
