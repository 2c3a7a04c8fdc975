"""What `bitwise` costs the engine: modes in turns, so that all else meets both.

Decode steps by themselves, of random weights and short contexts, and then the whole
engine: requests that are sent at once, their prompts, scheduling and recording
included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import contextlib
from typing import Any

import numpy as np

from composer.bench import engine as engine_bench
from composer.bench import engine_shapes
from composer.bench import engine_steps
from composer.model import transformer

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
    steps = {
      mode: engine_steps.compiled(shape, *weights[mode], batch)
      for mode in MODES
    }
    modes[batch] = measure_steps(shape, weights, steps)
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
  shape: Shape, weights: Weights, steps: Mapping[str, tuple[Any, int]]
) -> dict[str, float]:
  """Seconds of a decode step by mode, medians; of `engine_steps.compiled`."""
  caches = {
    mode: transformer.init_cache(shape.model, weights[mode][0], pages)
    for mode, (_, pages) in steps.items()
  }
  took: dict[str, list[float]] = {mode: [] for mode in steps}
  for turn in range(engine_steps.PAIRS + 1):
    for mode in sorted(steps, reverse=bool(turn % 2)):
      seconds, caches[mode] = engine_steps.seconds(
        steps[mode][0], weights[mode][1], caches[mode]
      )
      took[mode].append(seconds)
  # The first turn finds nothing in any cache.
  return {mode: float(np.median(t[1:])) for mode, t in took.items()}


def measure_engines(
  shape: Shape, batch: int, warm: Mapping[str, engine_bench.Warm]
) -> dict[str, float]:
  """Sampled tokens/s of whole engines by mode, medians."""
  rng = np.random.default_rng(0)
  took: dict[str, list[float]] = {mode: [] for mode in warm}
  for turn in range(TURNS + 1):
    for mode in sorted(warm, reverse=bool(turn % 2)):
      engine = warm[mode].engine
      seconds = engine_bench.serve(shape, engine, rng, batch, shape.new)
      took[mode].append(batch * shape.new / seconds)
  return {mode: float(np.median(t[1:])) for mode, t in took.items()}


def line(what: str, took: str, rates: Mapping[str, float]) -> str:
  """What `bitwise` takes or gives, and its rate over that of `fast`."""
  ratio = rates['bitwise'] / rates['fast']
  return f'{what:24s}{took:>20}  {ratio:.2f} of fast'
