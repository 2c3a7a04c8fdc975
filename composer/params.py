"""One declaration per parameter; everything else is a tree map over it.

A model's `spec` is a nested dict of `ParamSpec`. Initialisation, counting,
abstract values, shardings, the checkpoint's schema and the published form are
all maps over that dict, so none of them can drift from it.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class ParamSpec:
  """Shape, logical axis names, initialiser and published dtype of a parameter.

  Attributes:
    shape: of the float32 master value.
    axes: a logical name per dimension (see `composer/mesh.py`).
    init: 'normal' (standard deviation 1/sqrt(fan in)), 'embedding' (0.02),
      'ones' or 'zeros'.
    fan_in: size of the contracted dimension; needed by 'normal'.
    published: dtype in which the value reaches inference; the router's
      selection bias stays float32 from end to end.
    trained: false where no optimizer may move it.
  """

  shape: tuple[int, ...]
  axes: tuple[str, ...]
  init: str = 'normal'
  fan_in: int = 1
  published: Any = jnp.bfloat16
  trained: bool = True

  def __post_init__(self):
    if len(self.shape) != len(self.axes):
      raise ValueError(
        f'ParamSpec: shape {self.shape} and axes {self.axes} differ in length'
      )


INITIALISERS = {
  'normal': lambda key, s: (
    jax.random.normal(key, s.shape) / math.sqrt(s.fan_in)
  ),
  'embedding': lambda key, s: 0.02 * jax.random.normal(key, s.shape),
  'ones': lambda key, s: jnp.ones(s.shape),
  'zeros': lambda key, s: jnp.zeros(s.shape),
}


def is_spec(value: Any) -> bool:
  return isinstance(value, ParamSpec)


def named(tree: Any) -> dict[str, Any]:
  """Flattens a nested dict to {'layers/attention/q': leaf}."""
  flat = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_spec):
    flat['/'.join(str(p.key) for p in path)] = leaf
  return flat


def unnamed(flat: Mapping[str, Any]) -> dict[str, Any]:
  """Inverse of `named`."""
  tree: dict[str, Any] = {}
  for name, leaf in flat.items():
    *parents, last = name.split('/')
    node = tree
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = leaf
  return tree


def init(spec: Any, key: jax.Array) -> Any:
  """Draws float32 master parameters; a leaf's key is folded by its name."""
  return _init(tuple(named(spec).items()), key)


@functools.partial(jax.jit, static_argnums=0)
def _init(specs: tuple[tuple[str, ParamSpec], ...], key: jax.Array) -> Any:
  return unnamed(
    {
      name: INITIALISERS[s.init](
        jax.random.fold_in(key, zlib.crc32(name.encode())), s
      ).astype(jnp.float32)
      for name, s in specs
    }
  )


def abstract(spec: Any) -> Any:
  """ShapeDtypeStructs of the master parameters."""
  return jax.tree.map(
    lambda s: jax.ShapeDtypeStruct(s.shape, jnp.float32), spec, is_leaf=is_spec
  )


def count(spec: Any) -> int:
  """Number of parameters."""
  return sum(math.prod(s.shape) for s in named(spec).values())


def trained_mask(spec: Any) -> Any:
  """True at every leaf that an optimizer may move."""
  return jax.tree.map(lambda s: s.trained, spec, is_leaf=is_spec)


def to_published(spec: Any, params: Any) -> Any:
  """Casts master parameters to the form that is published ."""
  return jax.tree.map(
    lambda s, p: p.astype(s.published), spec, params, is_leaf=is_spec
  )


def as_computed(spec: Any, params: Any) -> Any:
  """float32 values that equal the published form exactly.

  Both sides compute from these: the engine widens what it fetched, the trainer
  rounds its masters through the published dtype first. The gradient passes
  straight through the rounding.
  """

  def round_through(s: ParamSpec, p: jax.Array) -> jax.Array:
    return straight_through(p, round_to(p, s.published))

  return jax.tree.map(round_through, spec, params, is_leaf=is_spec)


def published(spec: ParamSpec, value: jax.Array) -> jax.Array:
  """One parameter in its published form; see `as_computed` for the rounding."""
  return round_to(value, spec.published).astype(spec.published)


def round_to(p: jax.Array, dtype: Any) -> jax.Array:
  """p float32 with the values of a narrower dtype, or of float32.

  Not a cast there and back: XLA may leave both out, and nothing remains.
  """
  if jnp.dtype(dtype) == jnp.float32:
    return p
  info = jnp.finfo(dtype)
  return jax.lax.reduce_precision(p, info.nexp, info.nmant)


@jax.custom_vjp
def straight_through(p: jax.Array, rounded: jax.Array) -> jax.Array:
  """`rounded`, with the gradient of `p`."""
  return rounded


straight_through.defvjp(
  lambda p, rounded: (rounded, None), lambda _, g: (g, jnp.zeros_like(g))
)


def without_drafts(params: Any) -> Any:
  """A tree by names, without the layer that drafts (`model/mtp.py`)."""
  if not isinstance(params, dict) or 'mtp' not in params:
    return params
  return {name: part for name, part in params.items() if name != 'mtp'}


def widen(params: Any) -> Any:
  """float32 values of published parameters, as the engine computes with."""
  return jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)


def to_host(params: Any) -> dict[str, np.ndarray]:
  """Named host arrays, as the weight store takes them."""
  return {n: np.asarray(v) for n, v in named(jax.device_get(params)).items()}
