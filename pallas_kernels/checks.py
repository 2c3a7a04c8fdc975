"""What operations ask of their arrays: ValueError with the value and the remedy.

Shapes and dtypes are known while tracing. Values are looked at where they are
known too, which in a compiled program they are not; see `known`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch


def known(array: Any) -> np.ndarray | None:
  """The values of an array where they are at hand, else None.

  They are not while it is traced, nor where other processes hold parts of it.
  """
  array = dispatch.concrete(array)
  if array is None or not getattr(array, 'is_fully_addressable', True):
    return None
  return np.asarray(array)


def floats(**arrays: jax.Array | None) -> None:
  """Each (but None) holds floating-point numbers of 16 bits or more."""
  for name, array in arrays.items():
    if array is None:
      continue
    kind = array.dtype
    if not jnp.issubdtype(kind, jnp.floating) or kind.itemsize < 2:
      raise ValueError(f'{name} is {kind}; give float32, bfloat16 or float16')


def integers(**arrays: jax.Array | None) -> None:
  """Each (but None) holds integers."""
  for name, array in arrays.items():
    if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
      raise ValueError(f'{name} is {array.dtype}; give integers, as of int32')


def dtype(kind: Any, **arrays: jax.Array | None) -> None:
  """Each (but None) is of this dtype and no other."""
  kind = jnp.dtype(kind)
  for name, array in arrays.items():
    if array is not None and array.dtype != kind:
      raise ValueError(
        f'{name} is {array.dtype} and must be {kind}; cast it, so that the'
        ' rounding is seen'
      )


def shape(axes: str, size: tuple[int, ...], **arrays: jax.Array | None) -> None:
  """Each (but None) has this shape; `axes` are the names in the message."""
  for name, array in arrays.items():
    if array is not None and array.shape != size:
      raise ValueError(f'{name} {array.shape} must be {axes} = {size}')


def whole(least: int, **numbers: Any) -> None:
  """Each is a Python (or numpy) integer of at least `least`."""
  for name, number in numbers.items():
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
      raise ValueError(
        f'{name}={number!r} must be an integer, known while tracing'
      )
    if number < least:
      raise ValueError(f'{name}={number} must be at least {least}')
