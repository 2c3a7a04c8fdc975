"""Plain JAX: rows of each group times that group's matrix. The path on CPU."""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp


def grouped_matmul(
  x: jax.Array,
  w: jax.Array,
  group_sizes: jax.Array,
  *,
  transpose: bool = False,
  gated: bool = False,
  out_dtype: Any = None,
) -> jax.Array:
  """y[m] = x[m] @ w[group of m], summed in float32; see the package."""
  if gated:
    gate, up = (
      grouped_matmul(x, w[:, :, i], group_sizes, out_dtype=jnp.float32)
      for i in (0, 1)
    )
    return (jax.nn.silu(gate) * up).astype(out_dtype or x.dtype)
  if transpose:
    w = jnp.swapaxes(w, 1, 2)
  y = lax.ragged_dot(
    x,
    w,
    group_sizes.astype(jnp.int32),
    preferred_element_type=jnp.float32,
  )
  return y.astype(out_dtype or x.dtype)


def weight_gradient(
  x: jax.Array, dy: jax.Array, group_sizes: jax.Array, *, out_dtype: Any = None
) -> jax.Array:
  """dw[e] = x[rows of e]^T @ dy[rows of e], summed in float32."""
  dimensions = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
  )
  dw = lax.ragged_dot_general(
    x,
    dy,
    group_sizes.astype(jnp.int32),
    dimensions,
    preferred_element_type=jnp.float32,
  )
  return dw.astype(out_dtype or x.dtype)
