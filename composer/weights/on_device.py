"""What changed, found where the weights are: on the trainer's devices.

Of two versions that lie on a GPU or TPU only positions and words of what
differs cross to the host, where the version before is held already; `delta`
makes the same bytes of them as of whole arrays. The version before stays on
the device as well, which a trainer keeps there anyway for its audits.

    held (host) --+
                  +--> delta.patch --> new (host) --> delta.encode --> blob
    before, now (device) --> changes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import functools
from typing import Any

import jax
import numpy as np

from pallas_kernels import delta as kernels

# Tensors of which more than one word in so many changed are copied whole.
ROOM = 8
LEAST_ROOM = 1024  # words
IN_FLIGHT_BYTES = 256 << 20  # of results that wait on a device


def has(array: Any) -> bool:
  """Whether an array lies where a copy to the host is worth avoiding."""
  if not isinstance(array, jax.Array):
    return False
  return any(device.platform != 'cpu' for device in array.devices())


def find(
  before: Mapping[str, jax.Array], now: Mapping[str, jax.Array]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """`delta.Changed` between two versions, each array on one device.

  Returns:
    positions, ascending, and words by name; tensors of which too much changed,
    and those whose words have no kernel, are not in it.
  """
  found = {}
  for name, room, (count, positions, words) in _ahead(before, now):
    n = int(count)
    if n <= room:
      # Sizes in powers of two: or there were a program for every count.
      size = min(room, 1 << max(n - 1, 1).bit_length())
      found[name] = (
        np.asarray(positions[:size])[:n],
        np.asarray(words[:size])[:n],
      )
  return found


def _ahead(before, now) -> Iterator[tuple[str, int, Any]]:
  """(name, room, result) of `compact`, begun before it is needed."""
  waiting: list[tuple[str, int, Any]] = []
  held = 0
  for name in sorted(now):
    array = now[name]
    if not array.size or array.itemsize not in kernels.WORDS:
      continue
    if array.size >= 1 << 31:
      continue
    room = min(array.size, max(LEAST_ROOM, array.size // ROOM))
    waiting.append((name, room, _compact(before[name], array, room)))
    held += room * (4 + array.itemsize)
    while held > IN_FLIGHT_BYTES and len(waiting) > 1:
      held -= waiting[0][1] * (4 + now[waiting[0][0]].itemsize)
      yield waiting.pop(0)
  yield from waiting


@functools.partial(jax.jit, static_argnums=2)
def _compact(base: jax.Array, new: jax.Array, room: int) -> Any:
  return kernels.compact(base, new, room)
