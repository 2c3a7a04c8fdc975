"""The plain implementation: that of attention, with each row's own pages."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference


def forward(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  table: jax.Array,
  positions: jax.Array,
  *,
  width: int,
  scale: float,
) -> jax.Array:
  """[N, Q, H, W]; the arguments are those of the package."""
  n, queries = q.shape[:2]
  high = positions.reshape(-1)

  def blocks(rows, j):
    at = table[rows // queries, j]
    keys = k_pages[at]
    return keys, keys[..., :width] if v_pages is None else v_pages[at]

  out, _ = reference.attend(
    q.reshape(n * queries, *q.shape[2:]),
    jnp.zeros_like(high),
    high,
    blocks,
    groups=k_pages.shape[2],
    block=k_pages.shape[1],
    width=width,
    scale=scale,
  )
  return out.reshape(n, queries, *out.shape[1:])
