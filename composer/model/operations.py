"""Which implementation of an operation the model runs, by its numerics.

On a CPU, and in `fast` wherever XLA is good at it, an operation is the plain
expression, and XLA picks the algorithm. On an accelerator `aligned` and
`bitwise` take the kernels of `pallas_kernels`, which add in one order whatever
the number of rows: trainer and engine call the same ones, so a row has the same
bits on both sides. `aligned` falls back to XLA, with one warning, where a kernel
cannot take a shape; `bitwise` names the kernel, so that it raises instead.

`fast` on an accelerator takes kernels only where XLA is slow: routes, the
experts' matmul, attention, and the logprob of a token without its logits.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import params as params_lib
from pallas_kernels import attention as attention_lib
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import matmul as matmul_lib
from pallas_kernels import paged_attention as paged_attention_lib
from pallas_kernels import route as route_lib
from pallas_kernels.grouped_matmul import groups

Array = jax.Array
XLA = 'xla'  # the plain expression, not the kernel's reference
LINE = 64  # of whose multiples the kernels take columns
MANY = 1024  # rows from which three products of 16 bits cost less than one
EXACT = 15  # bits behind the point of a factor; see `factor`


@dataclasses.dataclass(frozen=True)
class Operations:
  """Names for `dispatch.choose`, or `XLA`; None is the best there is."""

  dense: str | None = XLA  # matrix products of all rows, norms
  sparse: str | None = XLA  # routes, experts, attention, logprobs

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


# --- between the kernels ------------------------------------------------------
#
# What stands there is XLA's to fuse, and that changes bits in two ways. It may
# leave a rounding out (float32 to bfloat16 and back is nothing to it), and it
# may contract a product and a sum to one operation, or not. Which it does
# depends on what it fuses: on the number of rows, on whether layers are looped
# over. Where kernels multiply, both are made impossible: roundings are those of
# `reduce_precision`, which are kept, and products that are added are exact.


def splits(ops: Operations, dtype: jnp.dtype) -> bool:
  """Whether kernels multiply such a dtype of 16 bits: see above, and `parts`."""
  return ops.dense != XLA and dtype != jnp.float32


def narrow(ops: Operations, x: Array, kind: jnp.dtype) -> Array:
  """x float32, rounded to a dtype."""
  return (params_lib.round_to(x, kind) if splits(ops, kind) else x).astype(kind)


def add(ops: Operations, x: Array, y: Array) -> Array:
  """x + y of one dtype, in that dtype."""
  if not splits(ops, x.dtype):
    return x + y
  total = x.astype(jnp.float32) + y.astype(jnp.float32)
  # The sum is written and read: layers that are not looped over would else add
  # up all that went before them again, each.
  return jax.lax.optimization_barrier(narrow(ops, total, x.dtype))


def factor(ops: Operations, x: Array, kind: jnp.dtype) -> Array:
  """x float32 as one factor of products with numbers of such a dtype.

  It keeps 16 significant bits. With 8 of bfloat16 the product has 24 and is
  exact in float32: a sum of two is the same, contracted or not. (But below
  2^-126, where float32 has fewer.)
  """
  if not splits(ops, kind):
    return x
  return jax.lax.reduce_precision(x, 8, EXACT)


def matmul(ops: Operations, x: Array, w: Array) -> Array:
  """x [R, K] @ w [K, N] in x's dtype."""
  if ops.dense == XLA:
    return x @ w
  return _matmul(ops, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(ops, x, w):
  return matmul_lib.matmul(x, w, implementation=ops.dense)


def _matmul_forward(ops, x, w):
  return _matmul(ops, x, w), (x, w)


def _matmul_backward(ops, saved, dy):
  # By XLA, as in `fast`: gradients need no order of addition of their own, and
  # of a narrow matrix it divides the sum over rows among all of a device.
  return jax.vjp(jnp.matmul, *saved)[1](dy)


_matmul.defvjp(_matmul_forward, _matmul_backward)


def gated(ops: Operations, x: Array, gate_up: Array) -> Array:
  """silu(x W_gate) * (x W_up); x [R, D], gate_up [D, 2, F] -> [R, F]."""
  return (
    _plain_gated(x, gate_up) if ops.dense == XLA else _gated(ops, x, gate_up)
  )


def _plain_gated(x, gate_up):
  width, _, hidden = gate_up.shape
  both = x @ gate_up.reshape(width, 2 * hidden)  # [R, 2 F]
  return jax.nn.silu(both[:, :hidden]) * both[:, hidden:]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(ops, x, gate_up):
  return grouped_matmul.grouped_matmul(
    x,
    gate_up[None],
    jnp.full((1,), x.shape[0], jnp.int32),
    gated=True,
    implementation=ops.dense,
  )


def _gated_forward(ops, x, gate_up):
  return _gated(ops, x, gate_up), (x, gate_up)


def _gated_backward(ops, saved, dy):
  return jax.vjp(_plain_gated, *saved)[1](dy)


_gated.defvjp(_gated_forward, _gated_backward)


def wide_matmul(
  ops: Operations, x: Array, w: Array, split: Array | None = None
) -> Array:
  """x [R, K] @ w float32 [K, N] in float32, as the router needs it.

  Kernels multiply 16-bit numbers. x in bfloat16 is one already; w is the sum of
  three of them to within 2^-24 of itself, and their products are exact in
  float32. The sums of the three are added smallest first. XLA multiplies many
  rows on a GPU so too: it has no tensor cores for float32.

  Args:
    ops, x, w: see above.
    split: `parts` of w where they are at hand; not differentiated then.
  """
  many = ops.sparse != XLA and x.dtype == jnp.bfloat16 and len(x) >= MANY
  if not splits(ops, x.dtype) and not many:
    wide = x.astype(jnp.float32)
    return jnp.matmul(wide, w, precision=jax.lax.Precision.HIGHEST)
  return _wide_matmul(ops, x, w, split)


def parts(w: Array, dtype: jnp.dtype) -> Array:
  """w float32 [..., K, N] as three arrays of 16 bits, side by side, and zeros.

  [..., K, 3 N and as many zeros as fill the last `LINE`].
  """
  found, rest = [], w
  for _ in range(3):
    part = params_lib.round_to(rest, dtype)
    found.append(part.astype(dtype))
    rest = rest - part
  stacked = jnp.concatenate(found, axis=-1)
  fill = [(0, 0)] * (w.ndim - 1) + [(0, -stacked.shape[-1] % LINE)]
  return jnp.pad(stacked, fill)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _wide_matmul(ops, x, w, stacked):
  stacked = parts(w, x.dtype) if stacked is None else stacked
  sums = _product(ops, x, stacked)
  if sums is None:
    return wide_matmul(PLAIN, x, w)
  return route_lib.added(sums, w.shape[1])


def _wide_matmul_forward(ops, x, w, stacked):
  return _wide_matmul(ops, x, w, stacked), (x, w, stacked)


def _wide_matmul_backward(ops, saved, dy):
  x, w, stacked = saved
  pull = jax.vjp(functools.partial(wide_matmul, PLAIN), x, w)[1]
  return *pull(dy), None if stacked is None else jnp.zeros_like(stacked)


_wide_matmul.defvjp(_wide_matmul_forward, _wide_matmul_backward)


def logits(ops: Operations, h: Array, unembed: Array) -> Array:
  """h [R, D] @ unembed [D, V] in float32. Not differentiable by a kernel."""
  found = _product(ops, h, unembed)
  return _product(PLAIN, h, unembed) if found is None else found


def _product(ops: Operations, x: Array, w: Array) -> Array | None:
  """x [R, K] @ w [K, N] in float32; None where a kernel should, and none can."""
  if ops.dense == XLA:
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)
  chosen = matmul_lib.choose(x, w, implementation=ops.dense)
  if chosen == 'reference':
    return None
  return grouped_matmul.product(x, w, chosen)


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


def route(
  ops: Operations,
  logits: Array,
  bias: Array | None,
  config: config_lib.ModelConfig,
  replay: Array | None,
  plausibility: float,
  audit: bool,
) -> route_lib.Routed:
  """`model.moe.route` by the kernel; without `audit` native may be None."""
  return route_lib.route(
    logits,
    _selecting(bias),
    _router(config, plausibility),
    replay,
    audit=replay is not None and (audit or plausibility > 0),
    implementation=ops.sparse,
  )


def send(
  ops: Operations,
  x: Array,
  router: Array,
  split: Array | None,
  bias: Array | None,
  config: config_lib.ModelConfig,
  replay: Array | None,
) -> route_lib.Sent | None:
  """`wide_matmul` by the router, `route`, `order`, and x [R, D] in that order.

  Native experts are not found beside those that are replayed.

  Args:
    router: float32 [D, E].
    split: `parts` of it where they are at hand. Their sums are added as they are
      routed, and nothing is differentiable.
    (others): as `route` takes them.

  Returns:
    None but for few rows on a GPU.
  """
  own, some = _router(config, 0.0), {'implementation': ops.sparse}
  whole = jax.ShapeDtypeStruct((len(x), config.experts), jnp.float32)
  if ops.sparse == XLA or not route_lib.sends(x, whole, own, **some):
    return None
  sums = None
  if split is not None and splits(ops, x.dtype):
    sums = _product(ops, x, split)
  if sums is None:
    sums = wide_matmul(ops, x, router, split)
  else:
    some['experts'] = config.experts
  return route_lib.send(x, sums, _selecting(bias), own, replay, **some)


def _selecting(bias: Array | None) -> Array | None:
  """Without gradient, and float32: parameters may be kept narrower as a whole."""
  if bias is None:
    return None
  return jax.lax.stop_gradient(bias.astype(jnp.float32))


def _router(config: config_lib.ModelConfig, plausibility: float):
  return route_lib.Router(
    k=config.experts_per_token,
    kind=config.router,
    groups=config.router_groups,
    top_groups=config.router_top_groups,
    normalise=config.normalise_gates,
    scale=config.router_scale,
    plausibility=plausibility,
  )


def order(ops: Operations, experts: Array, count: int) -> route_lib.Order:
  """Slots of experts [R, K], below `count`, sorted by expert, and stable."""
  if ops.sparse != XLA:
    return route_lib.order(experts, count, implementation=ops.sparse)
  flat = experts.reshape(-1)  # [R K]
  slots = jnp.argsort(flat, stable=True)
  sizes = jnp.bincount(flat, length=count).astype(jnp.int32)
  return route_lib.Order(slots, jnp.argsort(slots), sizes)


def experts(
  ops: Operations,
  x: Array,
  gate_up: Array,
  down: Array,
  sizes: Array | groups.Planned,
) -> Array:
  """The gated feed-forward of each row's expert; rows sorted by expert.

  x [M, D], gate_up [E, D, 2, F], down [E, F, D], sizes int32 [E] (of kernels
  also with their tiles) -> [M, D].
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
  tile: int = 1,
) -> Array:
  """`model.attention.paged` by the kernel: [R, H, K] -> [R, H, W].

  Args:
    (others): see there.
    table: int32 [R1 + T, M]; of the R1 first rows, each by itself, then of T
      times `tile` rows that are of one sequence each. Pages are read once a
      tile; but for splits, a row's bits do not depend on where it stands.
    positions: int32 [R]; negative where a row is nobody's: 0 comes out.

  In `fast` few long sequences are cut into splits, which rounds otherwise than
  the trainer does.
  """
  tiles = (len(q) - len(table)) // (tile - 1) if tile > 1 else 0
  alone = len(table) - tiles
  heads = []
  more = dict(scale=1.0 / divisor, width=width, implementation=ops.sparse)
  whole = paged_attention_lib.in_place(
    *(q, k_pages, v_pages, table[alone:], positions[alone:]),
    first=alone,
    **more,
  )
  parts = ((slice(alone), 1), (slice(alone, None), tile))
  for part, count in parts[: 2 if whole is None else 1]:
    if not len(table[part]):
      continue
    some = paged_attention_lib.paged_attention(
      q[part].reshape(-1, count, *q.shape[1:]),
      k_pages,
      v_pages,
      table[part],
      positions[part].reshape(-1, count),
      split=0 if ops.fixed else None,
      **more,
    )
    heads.append(some.reshape(-1, *some.shape[2:]))
  if whole is not None:
    return whole.at[:alone].set(heads[0]) if heads else whole
  return jnp.concatenate(heads) if len(heads) > 1 else heads[0]


def decode(
  ops: Operations,
  q: Array,
  k: Array,
  v: Array | None,
  positions: Array,
  table: Array,
  k_pages: Array,
  v_pages: Array | None,
  *,
  divisor: float,
  width: int = 0,
) -> tuple[Array, Array, Array | None]:
  """Writes rows' keys and values and attends: ([R, H, W], pages, pages).

  Every row is its sequence's only one; else as `paged_attention`, to whose bits
  it comes.
  """
  return paged_attention_lib.decode(
    *(q, k, v, k_pages, v_pages, table, positions),
    scale=1.0 / divisor,
    width=width,
    split=0 if ops.fixed else None,
    implementation=ops.sparse,
  )


def turns_itself(
  ops: Operations,
  config: config_lib.ModelConfig,
  table: Array,
  k_pages: Array,
  v_pages: Array | None,
) -> bool:
  """Whether `decode_turning` is to be called in place of `decode`."""
  return ops.sparse != XLA and paged_attention_lib.turns_itself(
    config.heads,
    k_pages,
    v_pages,
    table,
    split=0 if ops.fixed else None,
    implementation=ops.sparse,
  )


def decode_turning(
  ops: Operations,
  qkv: Array,
  cos: Array,
  sin: Array,
  positions: Array,
  table: Array,
  k_pages: Array,
  v_pages: Array,
  *,
  divisor: float,
  width: int = 0,
) -> tuple[Array, Array, Array]:
  """`decode` of rows whose queries and keys are not turned: the same bits.

  qkv [R, H + 2 G, K]; cos, sin float32 [R, K / 2].
  """
  del width  # values are their own
  turns = factor(ops, jnp.concatenate([cos, sin], axis=1), qkv.dtype)
  return paged_attention_lib.decode_turning(
    *(qkv, turns, k_pages, v_pages, table, positions),
    scale=1.0 / divisor,
    implementation=ops.sparse,
  )
