"""Meshes, and the tables that map logical axes to mesh axes.

A mesh has three axes. Rows of a batch lie over `data` and `expert`, the
sequence over `context`, experts over `expert`. The train state is sharded over
all three (FSDP): an expert's matrices over `expert` and over the other two,
everything else over the three together. A layer's parameters are gathered where
it computes, its gradient is summed and scattered back at once.

A table names, for a logical axis, the mesh axes that it may lie over. Each mesh
axis goes to the first dimension of a parameter that may take it and that it
divides; one that divides none leaves the parameter whole along it.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from composer import config as config_lib
from composer import params as params_lib

Rules = Mapping[str, str | tuple[str, ...] | None]

AXES = ('data', 'expert', 'context')
ROWS = ('data', 'expert')  # over which rows of a batch lie

TRAIN_RULES: Rules = {
  'layers': None,
  'vocab': AXES,
  'embed': AXES,
  'heads': AXES,
  'head_dim': AXES,
  'mlp': AXES,
  'pair': None,
  'q_latent': AXES,
  'kv_latent': AXES,
  'expert': ('expert',),
  'router': None,
}
# Experts over `context` too: one axis serves the long sequences of attention
# and the many experts of a layer.
FOLDED_RULES: Rules = {**TRAIN_RULES, 'expert': ('expert', 'context')}
# Each device serves sequences of its own with a copy of all but the experts.
ROLLOUT_RULES: Rules = {
  name: ('expert',) if name == 'expert' else None for name in TRAIN_RULES
}

RULES: Mapping[str, Rules] = {
  'train': TRAIN_RULES,
  'folded': FOLDED_RULES,
  'rollout': ROLLOUT_RULES,
}


@dataclasses.dataclass(frozen=True)
class Layout:
  """How arrays lie inside of `shard_map` over a mesh of all `AXES`.

  Attributes:
    mesh: of the axes `AXES`.
    rules: a name of `RULES`.
    chunk: tokens of a device whose rows are exchanged at once; 0 for all.
    slack: how many times the mean load the buffers of that exchange hold; what
      is over goes in another round, and nothing is dropped.
  """

  mesh: Any
  rules: str = 'train'
  chunk: int = 0
  slack: float = 2.0

  @property
  def expert_axes(self) -> tuple[str, ...]:
    """Mesh axes over which the experts lie."""
    axes = RULES[self.rules]['expert']
    return (axes,) if isinstance(axes, str) else tuple(axes or ())

  def size(self, *axes: str) -> int:
    """Devices along mesh axes."""
    return math.prod(self.mesh.shape[axis] for axis in axes)


def make_mesh(
  devices: Any = None,
  parallel: config_lib.ParallelConfig | None = None,
  expert: int | None = None,
) -> Mesh:
  """A mesh over devices (of every process); `data` takes what is left.

  Args:
    devices: a flat sequence; default: all there are.
    parallel: sizes of the axes; default: all devices on `data`.
    expert: instead of `parallel.expert`, with `data` and `context` free.

  Raises:
    ValueError: the sizes do not divide the devices.
  """
  devices = np.asarray(jax.devices() if devices is None else devices).ravel()
  shape = mesh_shape(
    devices.size, parallel or config_lib.ParallelConfig(), expert
  )
  return Mesh(devices.reshape(shape), AXES)


def mesh_shape(
  devices: int, parallel: config_lib.ParallelConfig, expert: int | None = None
) -> tuple[int, int, int]:
  """Sizes of `AXES` on so many devices.

  Raises:
    ValueError: they do not divide the devices.
  """
  data, context = parallel.data, parallel.context
  name, held = 'parallel.expert', parallel.expert
  if expert is not None:  # the engine's mesh
    data, context, name, held = 0, 1, 'parallel.rollout_expert', expert
  if devices % (held * context):
    raise ValueError(
      f'{name}={held} x parallel.context={context} does not divide'
      f' {devices} devices; choose sizes whose product does'
    )
  left = devices // (held * context)
  if data not in (0, left):
    raise ValueError(
      f'parallel.data={data} x {name}={held} x parallel.context={context} is'
      f' not the {devices} devices there are; set parallel.data={left}, or 0'
      ' for what is left'
    )
  return left, held, context


def layout(
  mesh: Mesh, parallel: config_lib.ParallelConfig, rules: str = ''
) -> Layout:
  """The layout that an experiment asks for on a mesh.

  Raises:
    ValueError: no rules of that name.
  """
  rules = rules or parallel.rules
  if rules not in RULES:
    raise ValueError(
      f'there are no rules {rules!r}; choose one of {", ".join(RULES)}'
    )
  return Layout(mesh, rules, parallel.chunk, parallel.slack)


def train_layout(
  numerics: config_lib.NumericsConfig,
  mesh: Mesh,
  parallel: config_lib.ParallelConfig,
) -> Layout | None:
  """How a training step is spread; None where a device computes it whole.

  That is on one device, and in `bitwise`, where other devices' rows would
  change the order of addition.
  """
  if numerics.mode == 'bitwise' or mesh.size == 1:
    return None
  return layout(mesh, parallel)


def check_experts(layout: Layout, experts: int) -> int:
  """Experts that a device holds.

  Raises:
    ValueError: they do not divide.
  """
  devices = layout.size(*layout.expert_axes)
  if experts % devices:
    sizes = [n for n in range(1, experts + 1) if experts % n == 0]
    raise ValueError(
      f'model.experts={experts} does not divide over {devices} devices of'
      f' {" x ".join(layout.expert_axes)}; expert parallelism can be one of'
      f' {", ".join(map(str, sizes))}'
    )
  return experts // devices


def check_batch(mesh: Any, what: str, rows: int, length: int) -> None:
  """Raises ValueError where a batch [rows, length] does not divide."""
  data, expert, context = (mesh.shape[axis] for axis in AXES)
  if rows % (data * expert):
    over = f'{data} x {expert} of data x expert' if expert > 1 else f'{data}'
    raise ValueError(
      f'{what}={rows} rows do not divide over {over} devices; choose a multiple'
      f' of {data * expert}'
    )
  if context > 1 and length % (2 * context):
    raise ValueError(
      f'{what} has rows of {length} tokens, which do not divide into'
      f' 2 x parallel.context = {2 * context} chunks; choose a multiple of'
      f' {2 * context}'
    )


def partition(
  spec: params_lib.ParamSpec, rules: Rules, mesh: Any
) -> PartitionSpec:
  """Mesh axes of one parameter; a mesh axis is used once.

  Raises:
    ValueError: a logical axis has no rule.
  """
  used, entries = set(), []
  for size, name in zip(spec.shape, spec.axes, strict=True):
    if name not in rules:
      raise ValueError(
        f'logical axis {name!r} has no rule; known: {sorted(rules)}'
      )
    wanted = rules[name]
    wanted = (wanted,) if isinstance(wanted, str) else wanted or ()
    taken: list[str] = []
    for axis in wanted:
      across = math.prod(mesh.shape[a] for a in taken) * mesh.shape[axis]
      if axis not in used and size % across == 0:
        taken.append(axis)
    used.update(taken)
    entries.append(tuple(taken) if len(taken) > 1 else (taken or [None])[0])
  return PartitionSpec(*entries)


def shardings(spec: Any, rules: Rules, mesh: Mesh) -> Any:
  """NamedShardings of a declaration's parameters."""
  return jax.tree.map(
    lambda s: NamedSharding(mesh, partition(s, rules, mesh)),
    spec,
    is_leaf=params_lib.is_spec,
  )


def partitions(spec: Any, layout: Layout) -> Any:
  """PartitionSpecs of a declaration's parameters, for `shard_map`."""
  return jax.tree.map(
    lambda s: partition(s, RULES[layout.rules], layout.mesh),
    spec,
    is_leaf=params_lib.is_spec,
  )


def like_params(tree: Any, spec: Any, by_name: Any, mesh: Mesh) -> Any:
  """Shardings of any state: leaves shaped like a parameter follow it.

  Optimizer moments live under paths that end in the parameter's own; all else
  (counters, keys) is replicated.
  """
  flat = params_lib.named(by_name)
  shapes = {n: s.shape for n, s in params_lib.named(spec).items()}
  whole = NamedSharding(mesh, PartitionSpec())

  def place(path, leaf):
    keys = [str(p.key) for p in path if hasattr(p, 'key')]
    for start in range(len(keys)):
      name = '/'.join(keys[start:])
      if name in flat and shapes[name] == leaf.shape:
        return flat[name]
    return whole

  return jax.tree_util.tree_map_with_path(place, tree)
