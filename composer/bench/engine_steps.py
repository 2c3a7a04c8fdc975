"""Decode steps by themselves, as programs; and what recording costs of them.

Dispatches are queued, as the engine's are: the device has the next one before the
host has read anything of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
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
PAIRS = 20  # of steps with and without recording, or turns of modes
STEPS = 8  # of decoding in one dispatch
QUEUED = 4  # dispatches, after which the host waits

# By whether it records, the program; and pages of its cache.
Recording = tuple[dict[bool, Callable[..., Any]], int]


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


def seconds(
  program: Callable[..., Any], params: Any, cache: Any
) -> tuple[float, Any]:
  """(of a decode step of a compiled `decoding`, its cache, which it takes)."""
  kept = []
  started = time.perf_counter()
  for _ in range(QUEUED):
    out, cache, _ = program(params, cache)
    kept.append(out)
  jax.block_until_ready((kept, cache))
  return (time.perf_counter() - started) / (QUEUED * STEPS), cache


def compiled(
  shape: Shape, numerics, params, batch: int, record: bool = True
) -> tuple[Callable[..., Any], int]:
  """`decoding` as a program of parameters and cache, and pages of that."""
  run, pages = decoding(shape, numerics, batch)
  cache = jax.eval_shape(
    lambda: transformer.init_cache(shape.model, numerics, pages)
  )
  run = jax.jit(run, static_argnums=2, donate_argnums=1)
  return run.lower(params, cache, record).compile(), pages


def compile_recording(shape: Shape, numerics, params, batch: int) -> Recording:
  """What `measure_recording` runs."""
  both = {
    record: compiled(shape, numerics, params, batch, record)
    for record in (False, True)
  }
  return {record: one for record, (one, _) in both.items()}, both[True][1]


def measure_recording(
  shape: Shape, numerics, params, recording: Recording
) -> float:
  """Time of decode steps with logprobs and routes, over that without.

  The median of pairs that run one right after the other, now this one first and
  now that one, so that what else the machine does meets both. What of recording
  the host does runs beside the device.
  """
  steps, pages = recording
  cache = transformer.init_cache(shape.model, numerics, pages)
  ratios = []
  for turn in range(PAIRS + 1):
    took = {}
    for record in (False, True) if turn % 2 else (True, False):
      took[record], cache = seconds(steps[record], params, cache)
    ratios.append(took[True] / took[False])
  return float(np.median(ratios[1:]))  # the first finds nothing in any cache
