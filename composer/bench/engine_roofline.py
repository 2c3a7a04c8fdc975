"""What a device could do at best, measured, and what decoding needs of it.

A decode step reads every parameter that its rows meet and the keys and values
of their contexts, and multiplies each parameter that a row meets once with it.
The time is the larger of bytes over the measured copy rate and FLOPs over the
measured rate of a large product in the dtype of products.
"""

from __future__ import annotations

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer.model import attention
from composer.model import layers
from composer.model import mla
from composer.model import presets
from composer.model import transformer
from pallas_kernels import dispatch


@dataclasses.dataclass(frozen=True)
class Ceilings:
  """Of this device, as it is loaded now."""

  bytes_per_s: float  # of a copy, read and written bytes both counted
  flops_per_s: float  # of a square product, two a multiplication and addition


def measure(numerics: config_lib.NumericsConfig) -> Ceilings:
  """Copies and multiplies large arrays, some in a row; best of several."""
  on_cpu = dispatch.platform() == 'cpu'
  size = 2**25 if on_cpu else 2**29
  x = jnp.ones(size, jnp.float32)
  seconds = _best(jax.jit(lambda x: x + 1), x)
  width = 1024 if on_cpu else 8192
  a = jnp.asarray(np.random.default_rng(0).normal(size=(width, width)))
  a = a.astype(layers.dtype(numerics))
  product = _best(jax.jit(lambda a: a @ a), a)
  return Ceilings(2 * 4 * size / seconds, 2 * width**3 / product)


def _best(fn, x: jax.Array, repeats: int = 5) -> float:
  """Seconds of one call; the host's part is hidden behind the call before."""
  calls = 1 if dispatch.platform() == 'cpu' else 8
  jax.block_until_ready(fn(x))
  seconds = []
  for _ in range(repeats):
    started = time.perf_counter()
    for _ in range(calls):
      out = fn(x)
    jax.block_until_ready(out)
    seconds.append((time.perf_counter() - started) / calls)
  return min(seconds)


def decode_seconds(
  model: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  batch: int,
  context: float,
  ceilings: Ceilings,
) -> float:
  """The least that a decode step of `batch` rows can take.

  Args:
    model, numerics: what runs.
    batch: rows, one a sequence.
    context: tokens of each, on average.
    ceilings: of the device.
  """
  size = 2 if numerics.compute == 'bfloat16' else 4
  needed = size * parameters_met(model, batch)
  needed += batch * context * context_bytes(model, numerics)
  flops = 2 * batch * presets.active_count(model)
  return max(needed / ceilings.bytes_per_s, flops / ceilings.flops_per_s)


def prompt_flops(
  model: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  tokens: int,
) -> float:
  """FLOPs of a prompt: products of every token, and of every pair it attends.

  Embedding and unembedding are left out: one is looked up, and the other met by
  the last token alone.
  """
  ends = model.vocab_size * model.width * (1 if model.tie_embeddings else 2)
  form = mla.form(numerics, training=False)
  key, width = (
    (model.head_dim, model.head_dim)
    if not model.kv_lora
    else (model.kv_lora + model.rope_dim, model.kv_lora)
    if form == 'absorbed'
    else (model.nope_dim + model.rope_dim, model.value_dim)
  )
  pairs = tokens * (tokens + 1) / 2
  attended = 2 * model.layers * model.heads * (key + width) * pairs
  return 2 * tokens * (presets.active_count(model) - ends) + attended


def parameters_met(model: config_lib.ModelConfig, batch: int) -> float:
  """Parameters that `batch` tokens of even routing read between them.

  An embedding that is not tied is looked up, not multiplied.
  """
  named = params_lib.named(transformer.spec(model))
  total = 0.0
  for name, spec in named.items():
    count = float(math.prod(spec.shape))
    if 'expert' in spec.axes:
      share = model.experts_per_token / model.experts
      count *= 1 - (1 - share) ** batch
    if name == 'embed' and not model.tie_embeddings:
      count = batch * model.width
    total += count
  return total


def context_bytes(
  model: config_lib.ModelConfig, numerics: config_lib.NumericsConfig
) -> int:
  """Bytes of keys and values of one token, all layers."""
  form = mla.form(numerics, training=False)
  size = 2 if numerics.compute == 'bfloat16' else 4
  shapes = [s for s in attention.cache_shapes(model, form) if s is not None]
  return model.layers * size * sum(heads * width for heads, width in shapes)
