"""The models that `composer bench engine` serves: random weights of these shapes.

Of the two large ones only a few layers are taken. Every layer costs the same, so
a step's share of what the device could do says what it would be with all of them;
the embedding and what draws a token weigh more than they would.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
import zlib

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import params as params_lib
from composer.model import layers
from composer.model import presets
from composer.model import transformer
from composer.model import upcycle

ParamSpec = params_lib.ParamSpec


@dataclasses.dataclass(frozen=True)
class Shape:
  """A model, and requests that are all sent at once."""

  model: config_lib.ModelConfig
  what: str
  batches: tuple[int, ...] = (1, 16, 64, 256)  # requests at once
  prompt: int = 8  # tokens of a request
  new: int = 128  # tokens that it samples
  rows: int = 8192  # of prompts in a step, at most
  whole: bool = True  # whether all its layers are there: it serves sessions too


SMOLLM2 = presets.SMOLLM2_135M
SHAPES = {
  'quickstart': Shape(
    config_lib.ModelConfig(), "the quick start's shape", (1, 16, 64)
  ),
  'smollm2': Shape(SMOLLM2, "SmolLM2-135M's shape"),
  'upcycled': Shape(
    upcycle.sparse_config(SMOLLM2, upcycle.Upcycling()),
    "SmolLM2-135M's shape upcycled to 8 experts, 2 a token",
  ),
  'qwen3': Shape(
    dataclasses.replace(presets.QWEN3_MOE_30B_A3B, layers=6),
    '6 layers of the widths of Qwen3-30B-A3B',
    (64, 256),
    prompt=1024,
    whole=False,
  ),
  'kimi': Shape(
    dataclasses.replace(presets.KIMI_K2_5, layers=3, experts=48),
    '3 layers of the widths of Kimi K2.5, 48 of its 384 experts',
    (64, 256),
    prompt=1024,
    whole=False,
  ),
}


def shape(name: str) -> Shape:
  """The shape of that name.

  Raises:
    ValueError: there is none; lists the known ones.
  """
  if name not in SHAPES:
    raise ValueError(
      f'--shape={name} is not known; choose one of {", ".join(SHAPES)}'
    )
  return SHAPES[name]


def with_batches(shape: Shape, text: str) -> Shape:
  """The same with these batches: whole numbers with commas between them.

  Raises:
    ValueError: they are not.
  """
  words = [word.strip() for word in text.split(',')]
  if not all(word.isascii() and word.isdigit() and int(word) for word in words):
    raise ValueError(
      f'--batch={text} must be requests at once, such as 64, or 1,16: numbers'
      ' from 1 on with commas between them'
    )
  return dataclasses.replace(shape, batches=tuple(map(int, words)))


def draw(
  model: config_lib.ModelConfig, numerics: config_lib.NumericsConfig
) -> Any:
  """Random parameters in the dtypes that steps read, a layer at a time.

  The float32 masters of a large model and what is served of them would not fit
  into a device's memory together.
  """
  named = params_lib.named(transformer.spec(model))
  drawn = {}
  for name, spec in named.items():
    key = jax.random.fold_in(jax.random.key(0), zlib.crc32(name.encode()))
    drawn[name] = _leaf(name, spec, numerics, key)
  return params_lib.unnamed(drawn)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _leaf(
  name: str,
  spec: ParamSpec,
  numerics: config_lib.NumericsConfig,
  key: jax.Array,
) -> jax.Array:
  stacked = spec.axes[:1] == ('layers',)
  one = spec
  if stacked:
    one = dataclasses.replace(spec, shape=spec.shape[1:], axes=spec.axes[1:])
  keys = jax.random.split(key, spec.shape[0] if stacked else 1)

  def layer(key: jax.Array) -> jax.Array:
    leaf = params_lib.INITIALISERS[one.init](key, one).astype(jnp.float32)
    last = name.split('/')[-1]
    return layers.as_compute(numerics, {last: leaf})[last]

  drawn = jax.lax.map(layer, keys)
  return drawn if stacked else drawn[0]
