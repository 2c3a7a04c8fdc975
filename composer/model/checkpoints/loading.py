"""Reads a model of any kind into arrays, whole or by the shards of a mesh."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer.model import transformer
from composer.model.checkpoints import names
from composer.model.checkpoints import sources

Path = pathlib.Path
ModelConfig = config_lib.ModelConfig


def load(
  where: str | Path, shardings: Any = None, dtype: Any = None
) -> tuple[ModelConfig, Any]:
  """A model's configuration and parameters.

  Args:
    where: see `sources.open_source`.
    shardings: nested as the parameters, or flat by name; every device gets its
      own part and no more of a parameter than that is read for it. None: each
      parameter whole, on the default device.
    dtype: of all parameters; None keeps those of the source.

  Returns:
    (configuration, parameters nested as `transformer.spec`).

  Raises:
    ValueError: see `sources.open_source`.
  """
  source = sources.open_source(where)
  return source.config, read_params(source, shardings, dtype)


def read_params(
  source: sources.Source, shardings: Any = None, dtype: Any = None
) -> Any:
  """The parameters of an opened model; arguments as those of `load`."""
  spec = params_lib.named(transformer.spec(source.config))
  by_name: Mapping[str, Any] = {}
  if shardings is not None:
    by_name = params_lib.named(shardings)
  out = {}
  for name, s in spec.items():
    kind = np.dtype(source.dtypes[name] if dtype is None else dtype)
    if name in by_name:
      out[name] = jax.make_array_from_callback(
        s.shape,
        by_name[name],
        functools.partial(_part, source, name, s.shape, kind),
      )
    else:
      value = source.read(name, names.full(s.shape), kind)
      out[name] = jnp.asarray(value)
  return params_lib.unnamed(out)


def _part(source, name, shape, dtype, index) -> np.ndarray:
  spans = (slice_.indices(n) for slice_, n in zip(index, shape, strict=True))
  return source.read(name, tuple((a, b) for a, b, _ in spans), dtype)


def read_config(where: str | Path) -> ModelConfig:
  """The configuration alone: what an experiment that starts there is of."""
  return sources.open_source(where).config


# Fields that a model of a kind does not read, whatever they say.
_OF_GROUPED = ('kv_heads', 'head_dim', 'qk_norm')
_OF_LATENT = ('q_lora', 'nope_dim', 'rope_dim', 'value_dim')
_OF_EXPERTS = (
  'experts',
  'experts_per_token',
  'expert_hidden',
  'shared_experts',
  'router',
  'router_groups',
  'router_top_groups',
  'router_scale',
  'normalise_gates',
)


def differences(a: ModelConfig, b: ModelConfig) -> list[str]:
  """Fields in which two models differ, of those that either reads."""
  ignored: set[str] = set()
  for latent, unread in ((True, _OF_GROUPED), (False, _OF_LATENT)):
    if all(bool(x.kv_lora) == latent for x in (a, b)):
      ignored |= set(unread)
  if all(x.dense_layers == x.layers for x in (a, b)):
    ignored |= set(_OF_EXPERTS)
  if not a.dense_layers and not b.dense_layers:
    ignored.add('dense_hidden')
  if a.yarn.factor == b.yarn.factor == 1.0:
    ignored.add('yarn')
  if a.yarn.factor > 1.0 and b.yarn.factor > 1.0:
    ignored.add('rope_float32')
  return [
    f'{field.name}: {getattr(a, field.name)!r} there,'
    f' {getattr(b, field.name)!r} here'
    for field in dataclasses.fields(ModelConfig)
    if field.name not in ignored
    and getattr(a, field.name) != getattr(b, field.name)
  ]
