"""RMSNorm whose rows have the same bits whatever the number of rows.

  y = x / sqrt(mean(x^2) + epsilon) * scale

Mean and product are in float32, and there is one rounding at the end.
"""

from __future__ import annotations

import functools

import jax

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
    scale: [D].
    epsilon: added to the mean square.
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    [..., D] in x's dtype. Differentiable in x and scale.

  Raises:
    ValueError: shapes that do not fit, or an epsilon below 0.
  """
  if scale.ndim != 1 or x.shape[-1:] != scale.shape:
    raise ValueError(
      f'x {x.shape} must end in the one axis of scale {scale.shape}'
    )
  if not epsilon >= 0:
    raise ValueError(f'epsilon={epsilon} must not be negative')
  rows = x.reshape(-1, x.shape[-1])
  chosen = _choose(rows, implementation)
  return _rms_norm(rows, scale, float(epsilon), chosen).reshape(x.shape)


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
