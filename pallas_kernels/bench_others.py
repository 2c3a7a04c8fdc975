"""Libraries that the benchmark measures beside ours where they are there."""

from __future__ import annotations

from collections.abc import Iterator
import functools
import importlib
import importlib.util
from typing import Any

from pallas_kernels import bench
from pallas_kernels import dispatch


@functools.cache
def tokamax() -> Any | None:
  """The library where it can be imported, else None; once with the reason."""
  if dispatch.platform() == 'cpu':
    return None
  if importlib.util.find_spec('tokamax') is None:
    return None
  try:
    return importlib.import_module('tokamax')
  except Exception as error:  # another jax than it wants, or no `xprof`
    print(f'tokamax: not measured: {type(error).__name__}: {error}'[:200])
    return None


def grouped(row: bench.Row, x, w, group_sizes) -> Iterator[bench.Row]:
  """Its grouped product, x [M, K] and w [E, K, N]."""
  library = tokamax()
  if library is not None:
    run = functools.partial(library.ragged_dot, implementation='mosaic')
    yield bench._timed(row, run, x, w, group_sizes)


def attention(row: bench.Row, q, k, v, scale: float) -> Iterator[bench.Row]:
  """Its causal attention, [B, T, H, K]."""
  library = tokamax()
  if library is not None and v is not None:
    run = functools.partial(
      library.dot_product_attention,
      scale=scale,
      is_causal=True,
      implementation='mosaic',
    )
    yield bench._timed(row, run, q, k, v)
