"""Meshes, and the tables that map logical axes to mesh axes.

One table per side; an axis that does not divide its dimension stays whole. The
train state is fully sharded over `data` (FSDP): the train step gathers the
parameters, each device takes its rows of the batch, gradients are summed and
scattered back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from composer import params as params_lib

Rules = Mapping[str, str | None]

TRAIN_RULES: Rules = {
  'layers': None,
  'vocab': None,
  'embed': 'data',
  'heads': None,
  'head_dim': None,
  'mlp': None,
  'pair': None,
  'expert': None,
  'router': None,
}
ROLLOUT_RULES: Rules = {name: None for name in TRAIN_RULES}


def make_mesh(devices: Any = None) -> Mesh:
  """A mesh of all devices (of every process) on the one axis `data`."""
  devices = jax.devices() if devices is None else devices
  return Mesh(np.asarray(devices), ('data',))


def partition(
  spec: params_lib.ParamSpec, rules: Rules, mesh: Mesh
) -> PartitionSpec:
  """Mesh axes of one parameter; a mesh axis is used once.

  Raises:
    ValueError: a logical axis has no rule.
  """
  used, axes = set(), []
  for size, name in zip(spec.shape, spec.axes, strict=True):
    if name not in rules:
      raise ValueError(
        f'logical axis {name!r} has no rule; known: {sorted(rules)}'
      )
    axis = rules[name]
    if axis is None or axis in used or size % mesh.shape[axis]:
      axes.append(None)
    else:
      used.add(axis)
      axes.append(axis)
  return PartitionSpec(*axes)


def shardings(spec: Any, rules: Rules, mesh: Mesh) -> Any:
  """NamedShardings of a declaration's parameters."""
  return jax.tree.map(
    lambda s: NamedSharding(mesh, partition(s, rules, mesh)),
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
