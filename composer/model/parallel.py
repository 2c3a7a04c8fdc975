"""What a device does of a layer, and what it asks of the others.

Everything here runs inside of `shard_map` over the three axes of `mesh.AXES`,
on the device's own arrays:

- `gather` makes a parameter whole for the layer that needs it; its backward
  pass sums the gradient over all devices and leaves each its own part (FSDP);
- `own` and `whole` go between a row of the batch, which all devices of
  `context` hold, and the two chunks of it that one of them computes;
- `spread` collects over `context` what attention needs of the other chunks.

The sequence is cut into 2 x context chunks, and device i of `context` takes
chunks i and 2 context - 1 - i: a causal row costs as much as its position, and
so every device has as much to do (Brandon et al., 2023, "Striped attention",
gives the problem; the pairing is that of Llama 3's training).

Sums over devices are made in float32, whatever the layer computes in.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer import params as params_lib
from composer.model import layers

Array = jax.Array
Layout = mesh_lib.Layout
ParamSpec = params_lib.ParamSpec


# --- parameters ---------------------------------------------------------------


def gather(
  layout: Layout,
  spec: Any,
  numerics: config_lib.NumericsConfig,
  shards: Any,
) -> Any:
  """The whole parameters of which every device holds a part.

  What travels is the published form (bfloat16, but for routers), to which the
  masters are rounded first; the layer computes with that very form.

  Args:
    layout: static.
    spec: declarations, nested like `shards`; without the layers' axis where
      the shards are one layer's.
    numerics: `compute` is read.
    shards: the device's parts, float32 or published.

  Returns:
    norms and routers in float32, all else in `numerics.compute`.
  """

  def one(path, s: ParamSpec, shard: Array) -> Array:
    name = str(path[-1].key)
    wide = name.endswith('norm') or name.startswith('router')
    kind = jnp.float32 if wide else layers.dtype(numerics)
    return _gather(layout, s, kind, shard)

  return jax.tree_util.tree_map_with_path(
    one, spec, shards, is_leaf=params_lib.is_spec
  )


def one_layer(spec: Any) -> Any:
  """The declarations of one of the layers that `spec` stacks."""
  return jax.tree.map(
    lambda s: ParamSpec(
      s.shape[1:], s.axes[1:], s.init, s.fan_in, s.published, s.trained
    ),
    spec,
    is_leaf=params_lib.is_spec,
  )


def gather_one(
  layout: Layout, spec: ParamSpec, kind: Any, shard: Array
) -> Array:
  """One parameter, whole and in `kind`, or as much of it as `shard` has.

  That may be less than the device holds along a dimension; the result then is
  what all of them have of it, side by side.
  """
  return _gather(layout, spec, kind, shard)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gather(layout: Layout, spec: ParamSpec, kind: Any, shard: Array) -> Array:
  # What a gradient is rounded to is `kind`, and not the form that travels.
  whole = params_lib.published(spec, shard)
  for dim, axes in _sharded_dims(layout, spec):
    if layout.size(*axes) > 1:
      whole = jax.lax.all_gather(whole, axes, axis=dim, tiled=True)
  # Experts stay where they are: `_sharded_dims` leaves their axes out.
  return whole.astype(kind)


def _sharded_dims(
  layout: Layout, spec: ParamSpec
) -> list[tuple[int, tuple[str, ...]]]:
  """(dimension, mesh axes) over which a parameter is gathered."""
  parts = mesh_lib.partition(spec, mesh_lib.RULES[layout.rules], layout.mesh)
  found = []
  for dim, axes in enumerate(parts):
    if axes is not None and spec.axes[dim] != 'expert':
      found.append((dim, (axes,) if isinstance(axes, str) else tuple(axes)))
  return found


def _gather_forward(layout, spec, kind, shard):
  return _gather(layout, spec, kind, shard), jnp.zeros((0,), shard.dtype)


def _gather_backward(layout, spec, kind, like, gradient):
  del kind
  if not spec.trained:
    # No gradient is wanted; the router's bias has none, it only selects.
    shape = list(spec.shape)
    for dim, axes in _sharded_dims(layout, spec):
      shape[dim] //= layout.size(*axes)
    return (jnp.zeros(shape, like.dtype),)
  gradient = gradient.astype(jnp.float32)
  left = [axis for axis in mesh_lib.AXES if layout.size(axis) > 1]
  if 'expert' in spec.axes:
    left = [axis for axis in left if axis not in layout.expert_axes]
  for dim, axes in reversed(_sharded_dims(layout, spec)):
    if layout.size(*axes) > 1:
      gradient = jax.lax.psum_scatter(
        gradient, axes, scatter_dimension=dim, tiled=True
      )
    left = [axis for axis in left if axis not in axes]
  if left:
    gradient = jax.lax.psum(gradient, tuple(left))
  return (gradient.astype(like.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)


def embed(
  layout: Layout, spec: ParamSpec, shard: Array, tokens: Array
) -> Array:
  """Rows of the embedding, published and widened: tokens [...] -> [..., D]."""
  return _embed(layout, spec, shard, tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _embed(layout, spec, shard, tokens):
  rows = _gather(layout, spec, spec.published, shard)[tokens]
  return rows.astype(jnp.float32)


def _embed_forward(layout, spec, shard, tokens):
  return _embed(layout, spec, shard, tokens), (
    tokens,
    jnp.zeros((0,), shard.dtype),
  )


def _embed_backward(layout, spec, residuals, gradient):
  # A token may stand in a batch thousands of times: added up in float32.
  tokens, like = residuals
  flat = gradient.reshape(-1, gradient.shape[-1]).astype(jnp.float32)
  whole = jnp.zeros(spec.shape, jnp.float32).at[tokens.reshape(-1)].add(flat)
  return *_gather_backward(layout, spec, None, like, whole), None


_embed.defvjp(_embed_forward, _embed_backward)


# --- the sequence -------------------------------------------------------------


def chunks(layout: Layout) -> tuple[Array, Array]:
  """The two chunks of this device; the sequence has 2 x context of them."""
  count = 2 * layout.size('context')
  index = jax.lax.axis_index('context')
  return index, count - 1 - index


def own(layout: Layout, x: Array) -> Array:
  """This device's two chunks of x [B, T, ...]: [B, T / context, ...]."""
  if layout.size('context') == 1:
    return x
  b, t = x.shape[:2]
  count = 2 * layout.size('context')
  cut = x.reshape(b, count, t // count, *x.shape[2:])
  mine = jnp.take(cut, jnp.stack(chunks(layout)), axis=1)
  return mine.reshape(b, 2 * t // count, *x.shape[2:])


def _collect(layout: Layout, x: Array) -> Array:
  """[B, T / context, ...] of every device of `context`, in order: [B, T, ...]."""
  b, t = x.shape[:2]
  halves = x.reshape(b, 2, t // 2, *x.shape[2:])
  parts = jax.lax.all_gather(halves, 'context')  # [CP, B, 2, S, ...]
  order = jnp.concatenate([parts[:, :, 0], parts[::-1, :, 1]])  # [2 CP, B, S]
  return jnp.moveaxis(order, 0, 1).reshape(
    b, layout.size('context') * t, *x.shape[2:]
  )


def whole(layout: Layout, x: Array) -> Array:
  """Inverse of `own`: every device of `context` gets the row, and the same.

  What is computed from it is the same on all of them and counts once: the
  backward pass takes the device's own part.
  """
  return x if layout.size('context') == 1 else _whole(layout, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(layout, x):
  return _collect(layout, x)


_whole.defvjp(
  lambda layout, x: (_collect(layout, x), None),
  lambda layout, _, gradient: (own(layout, gradient),),
)


def spread(layout: Layout, x: Array) -> Array:
  """Like `whole`, for what every device then uses in its own way.

  The backward pass sums what all devices of `context` did with the part.
  """
  return x if layout.size('context') == 1 else _spread(layout, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _spread(layout, x):
  return _collect(layout, x)


def _spread_backward(layout, _, gradient):
  b, t = gradient.shape[:2]
  context = layout.size('context')
  size = t // (2 * context)
  cut = gradient.astype(jnp.float32)
  cut = cut.reshape(b, 2 * context, size, *gradient.shape[2:])
  cut = jnp.moveaxis(cut, 1, 0)  # [2 CP, B, S, ...]
  halves = jnp.stack([cut[:context], cut[: context - 1 : -1]], axis=2)
  part = jax.lax.psum_scatter(halves, 'context')  # [B, 2, S, ...]
  part = part.reshape(b, 2 * size, *gradient.shape[2:])
  return (part.astype(gradient.dtype),)


_spread.defvjp(lambda layout, x: (_collect(layout, x), None), _spread_backward)


def sum_rows(x: Array) -> Array:
  """Sum over the devices that hold different rows."""
  return jax.lax.psum(x, mesh_lib.ROWS)


def sum_tokens(x: Array) -> Array:
  """Sum over all devices, of which each holds different tokens."""
  return jax.lax.psum(x, mesh_lib.AXES)
