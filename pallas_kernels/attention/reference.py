"""The plain implementation: rows in groups of one size, blocks in their order.

A row of queries is merged with one block of keys after another:

  s = (q . k) scale log2(e), or -inf where the row does not see the key
  m' = max(m, max s),  p = 2^(s - m'),  a = 2^(m - m')
  l' = l a + sum p,    o' = o a + p v        (p rounded to v's dtype for o)

which is online softmax (Milakov and Gimelshein, 2018), and out = o / l. A block
of which a row sees nothing gives p = 0 and a = 1 and changes no bit.

On CPU a matmul rounds by its number of rows, so rows are worked off in groups
of `ROWS`, each with blocks of its own, also where all could share them. At least
two groups: a loop of one trip is unrolled, and fused with what is around it.
"""

from __future__ import annotations

from collections.abc import Callable
import math

import jax
from jax import lax
import jax.numpy as jnp

ROWS = 32
LOWEST = -1e30  # where the maximum starts; finite, so that no inf - inf arises
LOG2E = math.log2(math.e)

Blocks = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def product(letters: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """An einsum that adds in float32, whatever it multiplies."""
  return jnp.einsum(letters, a, b, preferred_element_type=jnp.float32)


def attend(
  q: jax.Array,
  low: jax.Array,
  high: jax.Array,
  blocks: Blocks,
  *,
  groups: int,
  block: int,
  width: int,
  scale: float,
) -> tuple[jax.Array, jax.Array]:
  """Every row over its blocks.

  Args:
    q: [R, H, K].
    low, high: int32 [R]; row r sees keys low[r] to high[r], both included, and
      nothing where high < low.
    blocks: `blocks(rows, j)` gives the j-th block of the rows `rows` int32
      [ROWS]: keys [ROWS, S, G, K] and values [ROWS, S, G, W].
    groups: G, heads of keys and values.
    block: S.
    width: W.
    scale: of the scores.

  Returns:
    [R, H, W] in q's dtype, and the natural logarithm of the sum of exponentials
    float32 [R, H], LOWEST where the row sees nothing.
  """
  r, h, d = q.shape
  trips = max(-(-r // ROWS), 2)
  pad = trips * ROWS - r
  q = jnp.pad(q, ((0, pad), (0, 0), (0, 0)))
  low = jnp.pad(low, (0, pad))
  high = jnp.pad(high, (0, pad), constant_values=-1)
  factor = jnp.float32(scale * LOG2E)

  def some(trip):
    rows = trip * ROWS + jnp.arange(ROWS)
    take = lambda x: lax.dynamic_slice_in_dim(x, trip * ROWS, ROWS)  # noqa: E731
    query = take(q).reshape(ROWS, groups, h // groups, d)
    first, last = take(low), take(high)

    def merge(j, carry):
      top, total, value = carry
      keys, values = blocks(jnp.minimum(rows, r - 1), j)
      place = j * block + jnp.arange(block)[None, :]
      seen = (place >= first[:, None]) & (place <= last[:, None])
      s = product('rgnd,rsgd->rgns', query, keys) * factor
      s = jnp.where(seen[:, None, None, :], s, -jnp.inf)
      new = jnp.maximum(top, jnp.max(s, axis=-1))
      p = jnp.exp2(s - new[..., None])
      decay = jnp.exp2(top - new)
      total = total * decay + jnp.sum(p, axis=-1)
      more = product('rgns,rsgd->rgnd', p.astype(values.dtype), values)
      return new, total, value * decay[..., None] + more

    shape = (ROWS, groups, h // groups)
    start = (
      jnp.full(shape, LOWEST),
      jnp.zeros(shape),
      jnp.zeros((*shape, width)),
    )
    sees = last >= first
    begin = jnp.min(jnp.where(sees, first // block, 2**30))
    end = jnp.max(jnp.where(sees, last // block + 1, 0))
    top, total, value = lax.fori_loop(begin, end, merge, start)
    any_ = total > 0
    total = jnp.where(any_, total, 1.0)
    out = (value / total[..., None]).astype(q.dtype)
    log = jnp.where(any_, (top + jnp.log2(total)) / LOG2E, LOWEST)
    return out, log

  out, log = lax.map(some, jnp.arange(trips))
  return (
    out.reshape(trips * ROWS, h, width)[:r],
    log.reshape(trips * ROWS, h)[:r],
  )


def forward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  starts: jax.Array,
  ends: jax.Array,
  *,
  block: int,
  width: int,
  scale: float,
) -> tuple[jax.Array, jax.Array]:
  """Packed attention of [T, H, K] over [T, G, K]; T a multiple of `block`.

  Args:
    q, k, v: rows of all segments; v None: the first `width` numbers of k.
    starts: int32 [T], the first row that each row sees.
    ends: int32 [T], the last one: itself, or -1 for padding.
    block, width, scale: as `attend` says.

  Returns:
    out [T, H, W], log-sum-exp float32 [T, H].
  """
  t, g, d = k.shape
  pages = k.reshape(t // block, block, g, d)
  value_pages = None if v is None else v.reshape(t // block, block, g, width)

  def blocks(rows, j):
    at = jnp.broadcast_to(j, rows.shape)
    keys = pages[at]
    return keys, keys[..., :width] if v is None else value_pages[at]

  return attend(
    q,
    starts,
    ends,
    blocks,
    groups=g,
    block=block,
    width=width,
    scale=scale,
  )


def backward(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  starts: jax.Array,
  ends: jax.Array,
  log: jax.Array,
  dots: jax.Array,
  dout: jax.Array,
  *,
  block: int,
  width: int,
  scale: float,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Gradients to q, k and v, from what `forward` gave.

  With p = exp(s - log) and D = sum_w out dout (`dots` [T, H]):
    dv = p^T dout,  ds = p (dout v^T - D) scale,  dq = ds k,  dk = ds^T q.
  Blocks of queries in their order, and of keys within; sums in float32.
  """
  t, h, d = q.shape
  g = k.shape[1]
  values = k[..., :width] if v is None else v
  shape = (block, g, h // g)

  def step(carry, i):
    at = i * block
    take = lambda x: lax.dynamic_slice_in_dim(x, at, block)  # noqa: E731
    query = take(q).reshape(*shape, d)
    grad = take(dout).reshape(*shape, width)
    own_log, own_dots = take(log).reshape(shape), take(dots).reshape(shape)
    first, last = take(starts), take(ends)

    def pair(j, carry):
      dq, dk, dv = carry
      part = lambda x: lax.dynamic_slice_in_dim(x, j * block, block)  # noqa: E731
      keys, value = part(k), part(values)
      place = j * block + jnp.arange(block)[None, :]
      seen = (place >= first[:, None]) & (place <= last[:, None])
      s = product('qgnd,sgd->qgns', query, keys) * jnp.float32(scale)
      p = jnp.exp(jnp.minimum(s - own_log[..., None], 0.0))
      p = jnp.where(seen[:, None, None, :], p, 0.0)
      dp = product('qgnd,sgd->qgns', grad, value)
      ds = (p * (dp - own_dots[..., None]) * jnp.float32(scale)).astype(k.dtype)
      dq = dq + product('qgns,sgd->qgnd', ds, keys)
      more_k = product('qgns,qgnd->sgd', ds, query)
      more_v = product('qgns,qgnd->sgd', p.astype(values.dtype), grad)
      dk = lax.dynamic_update_slice_in_dim(
        dk, part(dk) + more_k, j * block, axis=0
      )
      dv = lax.dynamic_update_slice_in_dim(
        dv, part(dv) + more_v, j * block, axis=0
      )
      return dq, dk, dv

    sees = last >= first
    begin = jnp.min(jnp.where(sees, first // block, 2**30))
    dk, dv = carry
    dq, dk, dv = lax.fori_loop(
      begin,
      jnp.max(jnp.where(sees, last // block + 1, 0)),
      pair,
      (jnp.zeros((*shape, d)), dk, dv),
    )
    return (dk, dv), dq.reshape(block, h, d).astype(q.dtype)

  start = jnp.zeros(k.shape, jnp.float32), jnp.zeros(values.shape, jnp.float32)
  (dk, dv), dq = lax.scan(step, start, jnp.arange(t // block))
  if v is None:
    dk, dv = dk.at[..., :width].add(dv), None
  else:
    dv = dv.astype(v.dtype)
  return dq.reshape(q.shape), dk.astype(k.dtype), dv
