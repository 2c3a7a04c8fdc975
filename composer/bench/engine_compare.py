"""What `bitwise` costs the engine: modes in turns, so that all else meets both.

Decode steps by themselves, of random weights and short contexts, and then the whole
engine: requests that are sent at once, their prompts, scheduling and recording
included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
import functools
from typing import Any

import numpy as np

from composer.bench import engine as engine_bench
from composer.bench import engine_shapes
from composer.bench import engine_steps
from composer.inference import engine as engine_lib

Shape = engine_shapes.Shape
MODES = ('fast', 'bitwise')
TURNS = 7  # of the whole engine
Weights = Mapping[str, tuple[Any, Any]]  # by mode: numerics, parameters


def measure(
  shape: Shape,
  weights: Weights,
  say: Callable[[str], None],
  keep: Callable[..., None],
) -> None:
  """Both, of each batch of the shape, as soon as they are measured.

  Args:
    shape: model and batches.
    weights: of each of `MODES`.
    say: gets lines.
    keep: gets `modes`, by batch and mode the seconds of a decode step, and
      `engines`, the tokens/s of the whole engine.
  """
  modes, engines = {}, {}
  for batch in shape.batches:
    modes[batch] = measure_steps(shape, weights, batch)
    rates = {mode: 1 / s for mode, s in modes[batch].items()}
    took = f'{modes[batch]["bitwise"] * 1e6:,.0f} us'
    say(line(f'decode step, batch {batch}', took, rates))
    keep(modes=modes)
    with contextlib.ExitStack() as stack:
      warm = {}
      for mode in MODES:
        what = f'batch {batch}, {mode}'
        warm[mode] = engine_bench.warm_batch(shape, *weights[mode], batch, what)
        stack.callback(warm[mode].close)
      engines[batch] = measure_engines(shape, batch, warm)
    took = f'{engines[batch]["bitwise"]:,.0f} tokens/s'
    say(line(f'engine, batch {batch}', took, engines[batch]))
    keep(engines=engines)


def measure_steps(
  shape: Shape, weights: Weights, batch: int
) -> dict[str, float]:
  """Seconds of a decode step by mode, medians."""
  calls = {
    mode: engine_steps.timed(shape, *weights[mode], batch) for mode in MODES
  }
  return _medians(engine_steps.in_turns(calls, engine_steps.TURNS))


def measure_engines(
  shape: Shape, batch: int, warm: Mapping[str, engine_bench.Warm]
) -> dict[str, float]:
  """Sampled tokens/s of whole engines by mode, medians."""
  rng = np.random.default_rng(0)

  def rate(engine: engine_lib.Engine) -> float:
    seconds = engine_bench.serve(shape, engine, rng, batch, shape.new)
    return batch * shape.new / seconds

  calls = {
    mode: functools.partial(rate, one.engine) for mode, one in warm.items()
  }
  return _medians(engine_steps.in_turns(calls, TURNS))


def _medians(took: Mapping[str, np.ndarray]) -> dict[str, float]:
  return {mode: float(np.median(values)) for mode, values in took.items()}


def line(what: str, took: str, rates: Mapping[str, float]) -> str:
  """What `bitwise` takes or gives, and its rate over that of `fast`."""
  ratio = rates['bitwise'] / rates['fast']
  return f'{what:24s}{took:>20}  {ratio:.2f} of fast'
