"""What changed between two arrays of the same shape, found on the device.

Arrays are compared as words of 8, 16 or 32 bits, never as numbers: two NaN with
the same bits are the same, 0.0 and -0.0 are not. Packed four-bit weights are
words of 8 bits. The result is in the order of the positions and depends on
nothing but the two arrays.
"""

from __future__ import annotations

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels.delta import reference

NAME = 'delta'
# Bytes a word -> how it is held.
WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def compact(
  base: jax.Array,
  new: jax.Array,
  capacity: int,
  *,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Positions and new words of what differs, compacted.

  Args:
    base: any shape, N elements of 8, 16 or 32 bits.
    new: the same shape and dtype.
    capacity: J, the most changes there is room for; at least 1.
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    count: int32 [], how many words differ, also where that is more than J.
    positions: int32 [J], in the flattened array, ascending; N where there are
      fewer than J. With count > J the first J.
    words: unsigned [J], new's bits there; 0 where there are fewer.

  Raises:
    ValueError: shapes or dtypes that differ, words of other sizes, too many
      elements for int32, or a capacity below 1.
  """
  _check(base, new, capacity)
  base, new = as_words(base), as_words(new)
  chosen = _choose(base, implementation)
  if chosen == 'reference':
    return reference.compact(base, new, capacity)
  interpret = chosen.endswith('interpret')
  if chosen.startswith('tpu'):
    from pallas_kernels.delta import tpu as kernels
  else:
    from pallas_kernels.delta import gpu as kernels
  return kernels.compact(base, new, capacity, interpret=interpret)


def scatter(
  base: jax.Array, positions: jax.Array, words: jax.Array
) -> jax.Array:
  """The inverse: base with the words of `compact` at their positions.

  XLA's scatter, which on a GPU is bound by the copy of base; donate base to the
  jitted caller and there is none.

  Args:
    base: any shape, N elements of 8, 16 or 32 bits.
    positions: int32 [J], ascending; those of N and more are left out.
    words: unsigned [J], bits of an element each.

  Returns:
    base's shape and dtype.

  Raises:
    ValueError: words of another size than base's, or shapes that differ.
  """
  flat = as_words(base)
  if positions.ndim != 1 or positions.shape != words.shape:
    raise ValueError(
      f'positions {positions.shape} and words {words.shape} must both be [J]'
    )
  checks.integers(positions=positions)
  if words.dtype != flat.dtype:
    raise ValueError(
      f'words are {words.dtype}, and base {base.dtype} has words of {flat.dtype}'
    )
  out = reference.scatter(flat, positions, words)
  if base.dtype != flat.dtype:
    out = lax.bitcast_convert_type(out, base.dtype)
  return out.reshape(base.shape)


def as_words(array: jax.Array) -> jax.Array:
  """The bits of an array as unsigned [N]."""
  size = jnp.dtype(array.dtype).itemsize
  if size not in WORDS or array.dtype in (jnp.int4, jnp.uint4, jnp.bool_):
    raise ValueError(
      f'{array.dtype} has no words of 8, 16 or 32 bits; view it as uint8, and'
      ' pack what is smaller'
    )
  flat = array.reshape(-1)
  if flat.dtype == WORDS[size]:
    return flat
  return lax.bitcast_convert_type(flat, WORDS[size])


def _check(base, new, capacity) -> None:
  if base.shape != new.shape or base.dtype != new.dtype:
    raise ValueError(
      f'base {base.dtype}{base.shape} and new {new.dtype}{new.shape} differ;'
      ' a delta is of the same array at two times'
    )
  checks.whole(1, capacity=capacity)
  if base.size >= 2**31:
    raise ValueError(
      f'{base.size} elements are too many for int32 positions; cut the array'
    )


def _choose(base, implementation) -> str:
  faults = dict(gpu=None, tpu=None)
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.delta import gpu
    from pallas_kernels.delta import tpu

    faults = dict(gpu=gpu.unsupported(base), tpu=tpu.unsupported(base))
  return dispatch.choose(NAME, implementation, **faults)
