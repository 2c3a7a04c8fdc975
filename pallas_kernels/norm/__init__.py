"""RMSNorm; by the kernels a row's bits do not depend on the number of rows.

  y = x / sqrt(mean(x^2) + epsilon) * scale

Mean and product are in float32, and there is one rounding at the end. Where x is
the sum of two (of a residual and what a layer adds to it), one kernel adds, and
norms what it has added: `add_rms_norm`. Queries and keys that one product gives
side by side, each kind with a scale of its own, one kernel norms where they are:
`rms_norm_heads`. The reference adds as XLA likes: on a CPU the same row differs by
some units in the last place among 41 rows and among 260.
"""

from __future__ import annotations

from collections.abc import Sequence
import functools

import jax

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels.norm import reference

NAME = 'norm'


def rms_norm(
  x: jax.Array,
  scale: jax.Array,
  *,
  epsilon: float = 1e-6,
  implementation: str | None = None,
) -> jax.Array:
  """Rows of x divided by their root mean square, times scale.

  Args:
    x: [..., D].
    scale: [D], of x's dtype or another: products are in float32.
    epsilon: added to the mean square.
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    [..., D] in x's dtype. Differentiable in x and scale.

  Raises:
    ValueError: shapes that do not fit, or an epsilon below 0.
  """
  _check(x, scale, epsilon)
  rows = x.reshape(-1, x.shape[-1])
  chosen = _choose(rows, implementation)
  return _rms_norm(rows, scale, float(epsilon), chosen).reshape(x.shape)


def add_rms_norm(
  x: jax.Array,
  more: jax.Array,
  scale: jax.Array,
  *,
  epsilon: float = 1e-6,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """(x + more, `rms_norm` of it).

  The sum is in float32 and rounded to x's dtype, and its norm has the bits of
  `rms_norm` of the rounded one.

  Args:
    x, more: [..., D], of one dtype.
    scale, epsilon, implementation: see `rms_norm`.

  Returns:
    two [..., D] in x's dtype. Differentiable in x, more and scale.

  Raises:
    ValueError: as `rms_norm`, or x and more that differ.
  """
  if (x.shape, x.dtype) != (more.shape, more.dtype):
    raise ValueError(
      f'x {x.dtype} {x.shape} and more {more.dtype} {more.shape} differ; they'
      ' are added number by number'
    )
  _check(x, scale, epsilon)
  rows, others = (a.reshape(-1, x.shape[-1]) for a in (x, more))
  chosen = _choose(rows, implementation)
  both = _add_rms_norm(rows, others, scale, float(epsilon), chosen)
  return tuple(a.reshape(x.shape) for a in both)


def rms_norm_heads(
  x: jax.Array,
  scales: Sequence[jax.Array],
  counts: Sequence[int],
  *,
  epsilon: float = 1e-6,
  implementation: str | None = None,
) -> jax.Array:
  """`rms_norm` of the first counts[0] heads by scales[0], the next, and so on.

  What no count covers comes out as it is: of queries, keys and values side by
  side, the values.

  Args:
    x: [N, H, K].
    scales: each [K], of one dtype.
    counts: as many, each at least 1; heads that have the scale.
    epsilon, implementation: see `rms_norm`.

  Returns:
    [N, H, K] in x's dtype, of the bits of `rms_norm` of each part. Differentiable
    in x and scales.

  Raises:
    ValueError: as `rms_norm`, or scales of different dtypes, or counts that are
      not as many, or of more heads than there are.
  """
  if x.ndim != 3 or not scales or len(scales) != len(counts):
    raise ValueError(
      f'x {x.shape} must be [N, H, K], and {len(scales)} scales and'
      f' {len(counts)} counts as many, at least one'
    )
  if min(counts) < 1 or sum(counts) > x.shape[1]:
    raise ValueError(
      f'counts {tuple(counts)} must be 1 or more each, and of no more heads than'
      f' the {x.shape[1]} of x {x.shape}'
    )
  if len({scale.dtype for scale in scales}) > 1:
    raise ValueError(
      f'scales of {", ".join(str(scale.dtype) for scale in scales)}; give them'
      ' one dtype'
    )
  for scale in scales:
    _check(x, scale, epsilon)
  chosen = _choose(x.reshape(-1, x.shape[-1]), implementation)
  counts = tuple(map(int, counts))
  return _rms_norm_heads(x, tuple(scales), counts, float(epsilon), chosen)


def _check(x, scale, epsilon) -> None:
  if scale.ndim != 1 or x.shape[-1:] != scale.shape:
    raise ValueError(
      f'x {x.shape} must end in the one axis of scale {scale.shape}'
    )
  checks.floats(x=x, scale=scale)
  if not epsilon >= 0:
    raise ValueError(f'epsilon={epsilon} must not be negative')


def _choose(x, implementation) -> str:
  faults = dict(gpu=None, tpu=None)
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.norm import gpu
    from pallas_kernels.norm import tpu

    faults = dict(gpu=gpu.unsupported(x), tpu=tpu.unsupported(x))
  return dispatch.choose(NAME, implementation, **faults)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x, scale, epsilon, chosen):
  if chosen == 'reference':
    return reference.rms_norm(x, scale, epsilon)
  interpret = chosen.endswith('interpret')
  if chosen.startswith('tpu'):
    from pallas_kernels.norm import tpu as kernels
  else:
    from pallas_kernels.norm import gpu as kernels
  return kernels.rms_norm(x, scale, epsilon, interpret=interpret)


def _forward(x, scale, epsilon, chosen):
  return _rms_norm(x, scale, epsilon, chosen), (x, scale)


def _backward(epsilon, chosen, saved, dy):
  return reference.gradients(*saved, epsilon, dy)


_rms_norm.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _add_rms_norm(x, more, scale, epsilon, chosen):
  if chosen.startswith('gpu'):
    from pallas_kernels.norm import gpu

    interpret = chosen.endswith('interpret')
    return tuple(gpu.add_rms_norm(x, more, scale, epsilon, interpret=interpret))
  total = reference.add(x, more)
  return total, _rms_norm(total, scale, epsilon, chosen)


def _add_forward(x, more, scale, epsilon, chosen):
  total, y = _add_rms_norm(x, more, scale, epsilon, chosen)
  return (total, y), (total, scale)


def _add_backward(epsilon, chosen, saved, cotangents):
  dx, dscale = reference.gradients(*saved, epsilon, cotangents[1])
  dx = cotangents[0] + dx
  return dx, dx, dscale


_add_rms_norm.defvjp(_add_forward, _add_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _rms_norm_heads(x, scales, counts, epsilon, chosen):
  if chosen.startswith('gpu'):
    from pallas_kernels.norm import gpu

    if gpu.norms_heads(x):
      interpret = chosen.endswith('interpret')
      some = x, scales, counts, epsilon
      return gpu.rms_norm_heads(*some, interpret=interpret)
  return _apart(x, scales, counts, epsilon, chosen)


def _apart(x, scales, counts, epsilon, chosen):
  one = functools.partial(rms_norm, epsilon=epsilon, implementation=chosen)
  return reference.by_heads(x, scales, counts, one)


def _heads_forward(x, scales, counts, epsilon, chosen):
  return _rms_norm_heads(x, scales, counts, epsilon, chosen), (x, scales)


def _heads_backward(counts, epsilon, chosen, saved, dy):
  del chosen  # gradients are the reference's, as those of `rms_norm`

  def apart(x, scales):
    return _apart(x, scales, counts, epsilon, 'reference')

  return jax.vjp(apart, *saved)[1](dy)


_rms_norm_heads.defvjp(_heads_forward, _heads_backward)
