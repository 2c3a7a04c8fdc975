"""Which implementation of an operation the model runs, by its numerics.

On a CPU, and in `fast` wherever XLA is good at it, an operation is the plain
expression, and XLA picks the algorithm. On an accelerator `aligned` and
`bitwise` take the kernels of `pallas_kernels`, which add in one order whatever
the number of rows: trainer and engine call the same ones, so a row has the same
bits on both sides. `aligned` falls back to XLA, with one warning, where a kernel
cannot take a shape; `bitwise` names the kernel, so that it raises instead.

`fast` on an accelerator takes kernels only where XLA is slow: the experts'
matmul, attention, and the logprob of a token without its logits.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from composer import config as config_lib
from pallas_kernels import attention as attention_lib
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import matmul as matmul_lib
from pallas_kernels import paged_attention as paged_attention_lib

Array = jax.Array
XLA = 'xla'  # the plain expression, not the kernel's reference
LINE = 64  # of whose multiples the kernels take columns


@dataclasses.dataclass(frozen=True)
class Operations:
  """Names for `dispatch.choose`, or `XLA`; None is the best there is."""

  dense: str | None = XLA  # matrix products of all rows, norms
  sparse: str | None = XLA  # experts, attention, logprobs

  @property
  def fixed(self) -> bool:
    """Whether every product adds in one order for any number of rows."""
    return XLA not in (self.dense, self.sparse)


PLAIN = Operations()


def of(numerics: config_lib.NumericsConfig) -> Operations:
  """What the model runs on this kind of device."""
  device = dispatch.platform()
  if numerics.kernels:
    return Operations(numerics.kernels, numerics.kernels)
  if device == 'cpu':
    return PLAIN
  if numerics.mode == 'fast':
    return Operations(XLA, None)
  if numerics.mode == 'aligned':
    return Operations(None, None)
  return Operations(device, device)


def matmul(ops: Operations, x: Array, w: Array) -> Array:
  """x [R, K] @ w [K, N] in x's dtype."""
  if ops.dense == XLA:
    return x @ w
  return matmul_lib.matmul(x, w, implementation=ops.dense)


def wide_matmul(ops: Operations, x: Array, w: Array) -> Array:
  """x [R, K] @ w float32 [K, N] in float32, as the router needs it.

  Kernels multiply 16-bit numbers. x in bfloat16 is one already; w is the sum of
  three of them to within 2^-24 of itself, and their products are exact in
  float32. The sums of the three are added smallest first.
  """
  if ops.dense == XLA or x.dtype == jnp.float32:
    wide = x.astype(jnp.float32)
    return jnp.matmul(wide, w, precision=jax.lax.Precision.HIGHEST)
  return _wide_matmul(ops, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide_matmul(ops, x, w):
  parts, rest = [], w
  kind = jnp.finfo(x.dtype)
  for _ in range(3):
    # Not a cast there and back: XLA may leave both out, and nothing remains.
    part = jax.lax.reduce_precision(rest, kind.nexp, kind.nmant)
    parts.append(part.astype(x.dtype))
    rest = rest - part
  n = w.shape[1]
  stacked = jnp.concatenate(parts, axis=1)
  stacked = jnp.pad(stacked, ((0, 0), (0, -3 * n % LINE)))
  chosen = matmul_lib.choose(x, stacked, implementation=ops.dense)
  if chosen == 'reference':
    return wide_matmul(PLAIN, x, w)
  sums = grouped_matmul.product(x, stacked, chosen)
  return sums[:, :n] + (sums[:, n : 2 * n] + sums[:, 2 * n : 3 * n])


def _wide_matmul_forward(ops, x, w):
  return _wide_matmul(ops, x, w), (x, w)


def _wide_matmul_backward(ops, saved, dy):
  return jax.vjp(functools.partial(wide_matmul, PLAIN), *saved)[1](dy)


_wide_matmul.defvjp(_wide_matmul_forward, _wide_matmul_backward)


def logits(ops: Operations, h: Array, unembed: Array) -> Array:
  """h [R, D] @ unembed [D, V] in float32. Not differentiable by a kernel."""
  if ops.dense == XLA:
    return jnp.matmul(h, unembed, preferred_element_type=jnp.float32)
  chosen = matmul_lib.choose(h, unembed, implementation=ops.dense)
  if chosen == 'reference':
    return logits(PLAIN, h, unembed)
  return grouped_matmul.product(h, unembed, chosen)


def per_head(ops: Operations, x: Array, w: Array) -> Array:
  """y[r, h] = x[r, h] @ w[h]; x [R, H, K], w [H, K, N] -> [R, H, N]."""
  if ops.dense == XLA:
    return jnp.einsum('rhk,hkn->rhn', x, w)
  r, h, k = x.shape
  out = grouped_matmul.grouped_matmul(
    jnp.swapaxes(x, 0, 1).reshape(h * r, k),
    w,
    jnp.full((h,), r, jnp.int32),
    implementation=ops.dense,
  )
  return jnp.swapaxes(out.reshape(h, r, -1), 0, 1)


def experts(
  ops: Operations, x: Array, gate_up: Array, down: Array, sizes: Array
) -> Array:
  """The gated feed-forward of each row's expert; rows sorted by expert.

  x [M, D], gate_up [E, D, 2, F], down [E, F, D], sizes int32 [E] -> [M, D].
  """
  e, d, _, f = gate_up.shape
  if ops.sparse == XLA:
    both = jax.lax.ragged_dot(x, gate_up.reshape(e, d, 2 * f), sizes)
    hidden = jax.nn.silu(both[:, :f]) * both[:, f:]
    return jax.lax.ragged_dot(hidden, down, sizes)
  hidden = grouped_matmul.grouped_matmul(
    x, gate_up, sizes, gated=True, implementation=ops.sparse
  )
  return grouped_matmul.grouped_matmul(
    hidden, down, sizes, implementation=ops.sparse
  )


def attention(
  ops: Operations,
  q: Array,
  k: Array,
  v: Array | None,
  segment_ids: Array,
  *,
  divisor: float,
  block: int,
  width: int = 0,
) -> Array:
  """`model.attention.dense` by the kernel: [B, T, H, K] -> [B, T, H, W]."""
  return attention_lib.attention(
    q,
    k,
    v,
    segment_ids,
    scale=1.0 / divisor,
    block=block,
    width=width,
    implementation=ops.sparse,
  )


def paged_attention(
  ops: Operations,
  q: Array,
  positions: Array,
  table: Array,
  k_pages: Array,
  v_pages: Array | None,
  *,
  divisor: float,
  width: int = 0,
) -> Array:
  """`model.attention.paged` by the kernel: [R, H, K] -> [R, H, W]."""
  heads = paged_attention_lib.paged_attention(
    q[:, None],
    k_pages,
    v_pages,
    table,
    positions[:, None],
    scale=1.0 / divisor,
    width=width,
    implementation=ops.sparse,
  )
  return heads[:, 0]
