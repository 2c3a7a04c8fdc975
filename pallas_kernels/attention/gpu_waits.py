"""Named barriers of the hardware, between warpgroups of a block of threads.

A barrier in shared memory counts arrivals one by one, 128 of a warpgroup; a
named one counts warps. There are 16 of them and they have no phases: who
arrives must not come again before those who wait have left. Mosaic GPU uses
the first ones itself: 0 for the block, then one for each warpgroup.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

FIRST = 4  # above those of a block with three warpgroups
STAGES = (16 - FIRST - 2) // 2
WARPGROUP = 128  # threads


def turn(consumer: Any) -> Any:
  """The barrier at which this consumer waits for its turn."""
  return FIRST + consumer


def used(stage: Any, stages: int, values: bool) -> Any:
  """That of consumers who have used the keys of a stage, or its values."""
  return FIRST + 2 + stage + (stages if values else 0)


def arrive(name: jax.Array, warpgroups: int) -> None:
  """Arrives at a barrier of so many, the waiting one included."""
  _barrier('arrive', name, warpgroups)


def wait(name: jax.Array, warpgroups: int) -> None:
  """Arrives, and waits until all have."""
  _barrier('sync', name, warpgroups)


def _barrier(what: str, name: jax.Array, warpgroups: int) -> None:
  def inline(ctx, name):
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    del ctx
    llvm.inline_asm(
      ir.Type.parse('!llvm.void'),
      [name.registers[()]],
      f'bar.{what} $0, {warpgroups * WARPGROUP};',
      'r,~{memory}',
      has_side_effects=True,
    )

  plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT,))(inline)(name)
