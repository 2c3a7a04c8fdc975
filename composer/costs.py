"""What a program costs a device: FLOPs and bytes of collectives, from its jaxpr.

A compiler's own count takes the body of a loop once, and on some platforms its
text does not say how often a loop turns. A jaxpr says: the body of a `scan`
counts `length` times. Inside of `shard_map` shapes are those of one device and
every collective is written out, so the count is exact for what the program asks
for; products outside of it are divided evenly over the devices.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax
import numpy as np

# Bytes on the wire of a device, over those of the operand or the result that is
# whole, for n devices in a ring.
_WIRE = {
  'all_gather': lambda n: (n - 1) / n,
  'reduce_scatter': lambda n: (n - 1) / n,
  'all_to_all': lambda n: (n - 1) / n,
  'ragged_all_to_all': lambda n: (n - 1) / n,
  'psum': lambda n: 2 * (n - 1) / n,
  'pmax': lambda n: 2 * (n - 1) / n,
  'pmin': lambda n: 2 * (n - 1) / n,
  'ppermute': lambda n: 1.0,
}
# The same collective under the names that versions of jax and kinds of
# replication checks give it.
_ALIASES = {
  'psum_invariant': 'psum',
  'psum2': 'psum',
  'all_gather_invariant': 'all_gather',
  'psum_scatter': 'reduce_scatter',
  'reduce_scatter_p': 'reduce_scatter',
}
_BY_LOAD = 'grouped_'  # names of kernels that skip rows which nobody filled


@dataclasses.dataclass
class Costs:
  """Of one device.

  Attributes:
    flops: of matrix products, a multiplication and an addition being two.
    kernel_flops: those that kernels of the experts estimate for themselves, at
      full buffers; what other kernels estimate is among `flops`.
    wire: (collective, mesh axes) -> bytes that the device sends.
    calls: (collective, mesh axes) -> how often.
    unknown: parts that could not be counted: loops without a fixed length (one
      turn is counted), and kernels without an estimate.
  """

  flops: float = 0.0
  kernel_flops: float = 0.0
  wire: dict[tuple[str, tuple[str, ...]], float] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(float)
  )
  calls: dict[tuple[str, tuple[str, ...]], float] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(float)
  )
  unknown: set[str] = dataclasses.field(default_factory=set)

  def add(self, other: Costs, times: float) -> None:
    self.flops += times * other.flops
    self.kernel_flops += times * other.kernel_flops
    for key, value in other.wire.items():
      self.wire[key] += times * value
    for key, value in other.calls.items():
      self.calls[key] += times * value
    self.unknown |= other.unknown


def count(
  closed: Any, mesh_shape: Mapping[str, int], kernel_load: float = 1.0
) -> Costs:
  """Costs of a program on one device of a mesh.

  Args:
    closed: what `jax.make_jaxpr`, or `.trace(...).jaxpr` of a jitted function,
      gives.
    mesh_shape: mesh axis -> devices along it.
    kernel_load: share of their rows that kernels compute; the buffers of the
      exchange between experts are larger than the mean load, and a grouped
      product skips what is empty.
  """
  devices = math.prod(mesh_shape.values())
  found = _count(closed.jaxpr, dict(mesh_shape), 1.0 / devices)
  found.flops += kernel_load * found.kernel_flops
  return found


def _count(jaxpr: Any, sizes: Mapping[str, int], share: float) -> Costs:
  total = Costs()
  for eqn in jaxpr.eqns:
    name = _ALIASES.get(eqn.primitive.name, eqn.primitive.name)
    if name in ('dot_general', 'ragged_dot_general', 'ragged_dot'):
      total.flops += share * _product_flops(name, eqn)
    elif name == 'pallas_call':
      _kernel(eqn, total, share)
    elif name in _WIRE:
      _collective(name, eqn, sizes, total)
    elif name == 'scan':
      body = _count(eqn.params['jaxpr'].jaxpr, sizes, share)
      total.add(body, eqn.params['length'])
    elif name == 'while':
      total.unknown.add('while loop')
      total.add(_count(eqn.params['body_jaxpr'].jaxpr, sizes, share), 1)
    elif name == 'cond':
      branches = [_count(b.jaxpr, sizes, share) for b in eqn.params['branches']]
      total.add(max(branches, key=lambda c: c.flops + c.kernel_flops), 1)
    elif name == 'shard_map':  # here shapes become those of one device
      total.add(_count(_open(eqn.params['jaxpr']), sizes, 1.0), 1)
    else:
      for inner in _inner(eqn.params):
        total.add(_count(inner, sizes, share), 1)
  return total


def _open(jaxpr: Any) -> Any:
  return jaxpr if hasattr(jaxpr, 'eqns') else jaxpr.jaxpr


def _inner(params: Mapping[str, Any]) -> list[Any]:
  """The jaxprs that an equation calls once."""
  values = [v for v in params.values() if hasattr(_maybe(v), 'eqns')]
  return [_open(v) for v in values]


def _maybe(value: Any) -> Any:
  return getattr(value, 'jaxpr', value)


def _product_flops(name: str, eqn: Any) -> float:
  """Two for each term of each element of the result."""
  lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
  out = eqn.outvars[0].aval.shape
  numbers = eqn.params.get('dimension_numbers')
  if name == 'ragged_dot_general':
    numbers = eqn.params['ragged_dot_dimension_numbers']
  if name == 'dot_general':
    (contracted, _), _ = numbers
  elif name == 'ragged_dot':  # [M, K] x [G, K, N]
    return 2.0 * math.prod(out) * lhs[-1]
  else:
    ((contracted, _), _) = numbers.dot_dimension_numbers
    ragged = numbers.lhs_ragged_dimensions
    if set(ragged) & set(contracted):
      # A group's own part of the sum: the groups together make it whole.
      groups = out[0]
      return (
        2.0 * math.prod(out) / groups * math.prod(lhs[d] for d in contracted)
      )
  del rhs
  return 2.0 * math.prod(out) * math.prod(lhs[d] for d in contracted)


def _kernel(eqn: Any, total: Costs, share: float) -> None:
  estimate = eqn.params.get('cost_estimate')
  about = eqn.params.get('name_and_src_info') or eqn.params.get('name')
  name = str(getattr(about, 'name', about))
  if estimate is None:
    total.unknown.add(f'kernel {name}')
  elif name.startswith(_BY_LOAD):
    total.kernel_flops += share * estimate.flops
  else:
    total.flops += share * estimate.flops


def _collective(
  name: str, eqn: Any, sizes: Mapping[str, int], total: Costs
) -> None:
  params = eqn.params
  axes = params.get('axis_name', params.get('axes'))
  axes = (axes,) if isinstance(axes, str) else tuple(axes)
  axes = tuple(a for a in axes if isinstance(a, str))
  devices = math.prod(sizes[a] for a in axes)
  if devices == 1:
    return
  taken = eqn.outvars if name == 'all_gather' else eqn.invars
  if name == 'ragged_all_to_all':
    taken = eqn.invars[:1]  # the rest are the result's buffer and the offsets
  size = sum(
    math.prod(v.aval.shape) * np.dtype(v.aval.dtype).itemsize for v in taken
  )
  total.wire[name, axes] += _WIRE[name](devices) * size
  total.calls[name, axes] += 1


def of_function(fn: Any, *args: Any, mesh_shape: Mapping[str, int]) -> Costs:
  """`count` of a function, traced at (abstract) arguments."""
  return count(jax.make_jaxpr(fn)(*args), mesh_shape)
