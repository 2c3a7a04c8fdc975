"""Sparse upcycling: a dense model becomes a mixture of experts.

Komatsuzaki et al., 2023: every expert begins as the dense feed-forward. Gates
that are normalised sum to 1, so the mixture computes what the dense layer did,
whatever the router says. With `granularity` m an expert is one m-th of it (He et
al., 2024): E experts are E / m copies, each in m neighbouring slices that share
one column of the router. Their scores are equal, so the slices of a copy are
chosen together, and a router scale of m undoes that each has 1/m of its gate.

Copies differ only by the tokens that reach them, and a router of equal experts
has no gradient: it learns as they part. `noise` makes them differ from the
start, w -> w (1 + noise N(0, 1)), at the price of the equality: SmolLM2's
perplexity on Python source went from 8.78 to 8.79 with noise 0.03, to 9.32 with
0.1 and to 20.7 with 0.3. In bfloat16, less than 0.004 is mostly rounded away.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
from typing import Any
import zlib

import jax
import numpy as np

from composer import checks
from composer import config as config_lib
from composer import params as params_lib
from composer.model import moe
from composer.model import transformer
from composer.model.checkpoints import names
from composer.model.checkpoints import sources

ModelConfig = config_lib.ModelConfig
Read = Callable[[str, names.Box, np.dtype], np.ndarray]
FLOAT32 = np.dtype(np.float32)
ROUTER = 'layers/moe/router'


@dataclasses.dataclass(frozen=True)
class Upcycling:
  """What to make of a dense model."""

  experts: int = 8  # E
  experts_per_token: int = 2  # K
  granularity: int = 1  # slices of the dense hidden units, an expert each
  keep_dense: int = 0  # leading layers that stay dense
  router: str = 'sigmoid'  # with a selection bias, which training balances
  noise: float = 0.0  # of every weight of an expert, relative to it
  seed: int = 0  # of the router and the noise


def sparse_config(config: ModelConfig, into: Upcycling) -> ModelConfig:
  """The configuration of the upcycled model.

  Raises:
    ValueError: the model is not dense, or the numbers do not fit together.
  """
  m, e, k = into.granularity, into.experts, into.experts_per_token
  if config.dense_layers != config.layers:
    raise ValueError(
      f'{config.layers - config.dense_layers} of {config.layers} layers are'
      ' sparse already; only a dense model can be upcycled'
    )
  if not 0 <= into.keep_dense < config.layers:
    raise ValueError(
      f'keep_dense={into.keep_dense}; 0 to {config.layers - 1} of the'
      f' {config.layers} layers can stay dense'
    )
  if m < 1 or config.dense_hidden % m:
    raise ValueError(
      f'granularity={m} does not divide the {config.dense_hidden} hidden units'
    )
  for name, value in (('experts', e), ('experts_per_token', k)):
    if value < 1 or value % m:
      raise ValueError(f'{name}={value} is no multiple of granularity={m}')
  if k > e:
    raise ValueError(f'experts_per_token={k} exceeds experts={e}')
  if into.router not in moe.SCORES:
    raise ValueError(
      f'unknown router {into.router!r}; known: {", ".join(moe.SCORES)}'
    )
  if into.noise < 0 or not math.isfinite(into.noise):
    raise ValueError(f'noise={into.noise}; use 0 or more')
  if into.seed < 0:
    raise ValueError(f'seed={into.seed}; use 0 or more')
  sparse = dataclasses.replace(
    config,
    dense_layers=into.keep_dense,
    experts=e,
    experts_per_token=k,
    expert_hidden=config.dense_hidden // m,
    shared_experts=0,
    router=into.router,
    router_groups=1,
    router_top_groups=1,
    router_scale=float(m),
    normalise_gates=True,
    mtp_layers=0,  # what drafts for the dense model does not for this one
  )
  checks.check_model(sparse)
  return sparse


def upcycle(
  config: ModelConfig, params: Any, into: Upcycling
) -> tuple[ModelConfig, Any]:
  """Upcycles parameters in memory.

  Args:
    config, params: of a dense model, nested as `transformer.spec`.
    into: see `Upcycling`.

  Returns:
    (configuration, parameters) of the mixture, in the dtypes of the dense one.
  """
  flat = {n: np.asarray(v) for n, v in params_lib.named(params).items()}

  def read(name: str, box: names.Box, dtype: np.dtype) -> np.ndarray:
    return flat[name][tuple(slice(*span) for span in box)].astype(dtype)

  dense = sources.Source(
    config=config,
    dtypes={name: value.dtype for name, value in flat.items()},
    read=read,
    kind='ours',
    where='memory',
  )
  sparse = source(dense, into)
  out = {
    name: jax.numpy.asarray(
      sparse.read(name, names.full(s.shape), sparse.dtypes[name])
    )
    for name, s in params_lib.named(transformer.spec(sparse.config)).items()
  }
  return sparse.config, params_lib.unnamed(out)


def source(dense: sources.Source, into: Upcycling) -> sources.Source:
  """The upcycled model as a source: read a box at a time, as the dense one is.

  Raises:
    ValueError: see `sparse_config`.
  """
  config = sparse_config(dense.config, into)
  spec = params_lib.named(transformer.spec(config))
  origins = {name: _origin(name) for name in spec}
  dtypes = {
    name: FLOAT32 if origin is None else dense.dtypes[origin]
    for name, origin in origins.items()
  }

  def read(name: str, box: names.Box, dtype: np.dtype) -> np.ndarray:
    if name == ROUTER:
      return _router(config, into, box).astype(dtype)
    if origins[name] is None:  # the selection bias
      return np.zeros([stop - start for start, stop in box], dtype)
    if not name.startswith(('layers/', 'dense/')):
      return dense.read(name, box, dtype)
    if name.startswith('layers/'):
      first, last = box[0]
      box = ((first + into.keep_dense, last + into.keep_dense), *box[1:])
    if name in ('layers/moe/gate_up', 'layers/moe/down'):
      return _experts(dense.read, config, into, name, box, dtype)
    return dense.read(origins[name], box, dtype)

  # What a published configuration says beside ours was said of a dense model.
  return dataclasses.replace(
    dense, config=config, dtypes=dtypes, read=read, carried={}
  )


def _origin(name: str) -> str | None:
  """The dense model's parameter that one comes from; None of the router's."""
  if name.startswith(ROUTER):
    return None
  return name.replace('layers/', 'dense/').replace('/moe/', '/mlp/')


def _router(config: ModelConfig, into: Upcycling, box: names.Box) -> np.ndarray:
  """Router columns, one drawn for each copy; box of [layers, D, E]."""
  m = into.granularity
  shape = (config.width, into.experts // m)
  layers = []
  for layer in range(*box[0]):
    rng = np.random.default_rng((into.seed, layer, zlib.crc32(b'router')))
    drawn = rng.standard_normal(shape, np.float32) / math.sqrt(config.width)
    layers.append(np.repeat(drawn, m, axis=1))
  whole = np.stack(layers)
  return whole[:, slice(*box[1]), slice(*box[2])]


def _experts(
  read: Read,
  config: ModelConfig,
  into: Upcycling,
  name: str,
  box: names.Box,
  dtype: np.dtype,
) -> np.ndarray:
  """A box of [layers, E, ...]; expert e is slice e mod m of a copy."""
  units = 2 if name.endswith('down') else 4  # the dimension of hidden units
  f = config.expert_hidden
  out = []
  for layer in range(*box[0]):
    made = {}
    for expert in range(*box[1]):
      start = expert % into.granularity * f
      inner = [(layer, layer + 1), *box[2:]]
      low, high = inner[units - 1]
      inner[units - 1] = (start + low, start + high)
      key = tuple(inner)
      if key not in made:  # copies are read once
        made[key] = read(_origin(name), key, dtype)[0]
      value = made[key]
      if into.noise:
        shape = params_lib.named(transformer.spec(config))[name].shape[2:]
        value = _noisy(value, into, name, (layer, expert), shape, box[2:])
      out.append(value)
  shape = (len(range(*box[0])), len(range(*box[1])), *out[0].shape)
  return np.stack(out).reshape(shape)


def _noisy(value, into, name, place, shape, box) -> np.ndarray:
  """w (1 + noise N(0, 1)) of a box of one expert, drawn by layer and expert."""
  seed = (into.seed, *place, zlib.crc32(name.encode()))
  drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
  factor = (
    1 + np.float32(into.noise) * drawn[tuple(slice(*span) for span in box)]
  )
  return (value.astype(np.float32) * factor).astype(value.dtype)
