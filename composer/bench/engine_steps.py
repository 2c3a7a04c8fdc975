"""Decode steps by themselves, as programs; and what recording costs of them.

Dispatches are queued, as the engine's are: the device has the next one before the
host has read anything of the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer.bench import engine_shapes
from composer.inference import batches
from composer.inference import programs
from composer.model import transformer

Shape = engine_shapes.Shape
TURNS = 20  # of steps with and without recording, or of modes
STEPS = 8  # of decoding in one dispatch
QUEUED = 4  # dispatches, after which the host waits


def engine_config(batch: int, context: int, block: int, rows: int):
  """An engine of just that size."""
  context = -(-context // block) * block
  return config_lib.EngineConfig(
    rows=max(rows, 2 * batch),
    sequences=batch,
    pages=batch * context // block + 1,
    max_context=context,
  )


def decoding(
  shape: Shape, numerics, batch: int
) -> tuple[Callable[..., Any], int]:
  """(`STEPS` decode steps of `batch` sequences as a function, pages of its cache).

  Of parameters, cache, and whether logprobs and routes are recorded; the first of
  what it gives is what was sampled, the second the cache.
  """
  model, block = shape.model, numerics.kv_block
  context = shape.prompt + max(shape.new, STEPS)
  config = engine_config(batch, context, block, 2 * batch)
  size = programs.at_least(programs.ahead_sizes(numerics, config), batch)
  columns = programs.column_sizes(numerics, config)[-1]
  rows, _, draws, _ = batches.Maker(model, numerics, config).blank(
    size, columns, True, False
  )
  # Each of a sequence of its own, which is as long as its prompt: rows that are
  # alike would meet the same experts.
  own, each = np.arange(batch, dtype=np.int32), config.max_context // block
  rows.slots[:batch] = own
  rows.tables[:batch, :each] = 1 + each * own[:, None] + np.arange(each)
  rows.positions[:batch] = shape.prompt
  rows.tokens[:batch] = np.random.default_rng(0).integers(
    0, model.vocab_size, batch
  )
  draws.seeds[:batch] = own
  ends = np.where(np.arange(size) < batch, shape.prompt + STEPS, 0)
  ends = ends.astype(np.int32)
  rows, ends, draws = jax.tree.map(jnp.asarray, (rows, ends, draws))

  def run(params, cache, record):
    last = jnp.zeros(config.sequences + 1, jnp.int32)
    sampled, cache, last = programs.ahead.__wrapped__(
      model, numerics, STEPS, params, cache, last, rows, ends, draws, None
    )
    if not record:
      sampled = sampled.answer.tokens
    return sampled, cache, last

  return run, config.pages


def timed(
  shape: Shape, numerics, params, batch: int, record: bool = True
) -> Callable[[], float]:
  """Seconds of a step of `decoding`, measured whenever it is called; compiled."""
  run, pages = decoding(shape, numerics, batch)
  cache = transformer.init_cache(shape.model, numerics, pages)
  run = jax.jit(run, static_argnums=2, donate_argnums=1)
  program = run.lower(params, cache, record).compile()

  def seconds() -> float:
    nonlocal cache
    kept = []
    started = time.perf_counter()
    for _ in range(QUEUED):
      out, cache, _ = program(params, cache)
      kept.append(out)
    jax.block_until_ready((kept, cache))
    return (time.perf_counter() - started) / (QUEUED * STEPS)

  return seconds


def in_turns(
  calls: Mapping[Any, Callable[[], float]], turns: int
) -> dict[Any, np.ndarray]:
  """What each gives in so many turns, in which all come once.

  Now in this order and now in the other, so that what else the machine does meets
  all; after a turn that finds nothing in any cache.
  """
  found: dict[Any, list[float]] = {name: [] for name in calls}
  for turn in range(turns + 1):
    for name in list(calls)[:: -1 if turn % 2 else 1]:
      found[name].append(calls[name]())
  return {name: np.asarray(values[1:]) for name, values in found.items()}


def measure_recording(shape: Shape, numerics, params, batch: int) -> float:
  """Time of decode steps with logprobs and routes, over that without.

  The median of pairs. What of recording the host does runs beside the device.
  """
  of = shape, numerics, params, batch
  calls = {record: timed(*of, record) for record in (False, True)}
  took = in_turns(calls, TURNS)
  return float(np.median(took[True] / took[False]))
