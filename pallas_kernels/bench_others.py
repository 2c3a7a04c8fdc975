"""Libraries that the benchmark measures beside ours where they are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import functools
import importlib
import importlib.util
from typing import Any

import jax

from pallas_kernels import bench_rows
from pallas_kernels import dispatch

UNTUNED = 'as it comes, not tuned here'


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


def grouped() -> dict[str, Callable[..., Any]]:
  """Its grouped product and gradients, by '', 'dx' and 'dw'; {} without it.

  Of x [M, K], w [E, K, N], dy [M, N] and the sizes of groups.
  """
  library = tokamax()
  if library is None:
    return {}
  product = functools.partial(library.ragged_dot, implementation='mosaic')

  def rows(x, w, dy, sizes):
    return jax.vjp(lambda x: product(x, w, sizes), x)[1](dy)[0]

  def weights(x, w, dy, sizes):
    return jax.vjp(lambda w: product(x, w, sizes), w)[1](dy)[0]

  forward = lambda x, w, dy, sizes: product(x, w, sizes)  # noqa: E731
  return {'': forward, 'dx': rows, 'dw': weights}


def attention(
  row: bench_rows.Row, q, k, v, scale: float
) -> Iterator[bench_rows.Row]:
  """Its causal attention, [B, T, H, K]."""
  run = attention_of(scale)
  if run is not None and v is not None:
    row = dataclasses.replace(row, note=UNTUNED)
    yield bench_rows.timed(row, run, q, k, v)


def attention_of(scale: float) -> Callable[..., Any] | None:
  """Of q, k and v, causal; None where the library is not there."""
  library = tokamax()
  if library is None:
    return None
  return functools.partial(
    library.dot_product_attention,
    scale=scale,
    is_causal=True,
    implementation='mosaic',
  )
