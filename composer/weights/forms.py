"""The forms in which weights are published, and what is computed from each.

    publish(form, named) -> flat     what goes over the exchange
    widen(form, flat) -> named       float32, what engine and trainer compute with
    computed(form, named) -> named   widen(publish(...)), without the way between
    as_computed(form, spec, params)  the same of float32 masters, for the trainer

`named` are parameters by name in the form that both sides start from: bfloat16,
float32 where a parameter says so (`ParamSpec.published`). Every form is a pure
function of those, so that one publisher serves several at once and a version
can be audited in any of them.

bf16    the arrays as they are.

nvfp4   the matrices of routed experts (`gate_up` and `down` below `moe`) in four
        bits; all else as bf16, as published recipes leave attention, shared
        experts, embeddings and dense layers. For each of them

            name:codes   uint8, two numbers a byte along the contracted axis, the
                         even one in the low bits; [..., K/2, ...]
            name:scale   float8_e4m3fn, one a block of 16 along it; [..., K/16, ...]
            name:outer   float32, one a matrix of an expert

        With a_m the largest magnitude of the matrix and a_b that of a block,

            t = a_m * (1 / 2688)       s = e4m3(a_b / (6 * t))
            code = e2m1(x / (s * t))   value = grid[code] * (s * t)

        all in float32, each step rounded to nearest even; 2688 is 6 * 448.
        Divisions are IEEE (an approximate one diverges, as Cursor's report says of
        NVFP4), which XLA's are not on NVIDIA; those of `quantize/reference.py` are.
        Where s is 0 the block is 0. gate and up share t. `value` is exactly what
        both sides compute with. The grid of E2M1 is 0, 0.5, 1, 1.5, 2, 3, 4, 6;
        448 is the largest E4M3. Numbers per block, the two levels of scales and
        the packing are those of NVFP4 (arXiv 2509.25149). Of weights the
        granularity of the outer scale is not published by Cursor; a matrix is our
        choice.

A matrix whose contracted axis is no multiple of 16 stays bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp

from composer import params as params_lib
from pallas_kernels.quantize import reference as rounding

FORMS = ('bf16', 'nvfp4')
BLOCK = 16
GRID = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX, E4M3_MAX = 6.0, 448.0
SUFFIXES = (':codes', ':scale', ':outer')
# Axis that is contracted, counted from the last: gate_up [L, E, D, 2, F] and
# down [L, E, F, D]. A matrix of an expert is what is left of it.
_CONTRACTED = {'gate_up': -3, 'down': -2}

Array = jax.Array


def check(form: str) -> None:
  """Raises ValueError for a form that there is not."""
  if form not in FORMS:
    raise ValueError(f'unknown form {form!r}; known: {", ".join(FORMS)}')


def axis_of(name: str, shape: tuple[int, ...]) -> int | None:
  """The contracted axis of a tensor that nvfp4 quantises; None of others."""
  *folders, last = name.split('/')
  axis = _CONTRACTED.get(last)
  if 'moe' not in folders or axis is None or len(shape) < -axis:
    return None
  return axis if shape[axis] % BLOCK == 0 and shape[axis] else None


def publish(form: str, named: Mapping[str, Any]) -> dict[str, Any]:
  """Arrays of the exchange, by name."""
  check(form)
  if form == 'bf16':
    return dict(named)
  flat: dict[str, Any] = {}
  for name, value in named.items():
    axis = axis_of(name, value.shape)
    if axis is None:
      flat[name] = value
      continue
    for suffix, part in zip(SUFFIXES, quantise(value, axis), strict=True):
      flat[name + suffix] = part
  return flat


def widen(form: str, flat: Mapping[str, Any]) -> dict[str, Array]:
  """float32 values by name, of what `publish` gave."""
  check(form)
  named = {}
  for name, value in flat.items():
    whole, separator, kind = name.partition(':')
    if not separator:
      named[name] = jnp.asarray(value, jnp.float32)
    elif kind == 'codes':
      axis = _CONTRACTED[whole.split('/')[-1]]
      parts = [flat[whole + suffix] for suffix in SUFFIXES]
      named[whole] = dequantise(*map(jnp.asarray, parts), axis)
  return named


def computed(form: str, params: Any) -> Any:
  """float32 values, nested, that `form` makes of bfloat16 parameters.

  What is float32 already came through `widen`, and stays as it is.
  """
  check(form)
  named = {}
  for name, value in params_lib.named(params).items():
    axis = None if form == 'bf16' else axis_of(name, value.shape)
    if axis is not None and value.dtype == jnp.bfloat16:
      named[name] = _through(value, axis)
    else:
      named[name] = jnp.asarray(value, jnp.float32)
  return params_lib.unnamed(named)


def as_computed(form: str, spec: Any, params: Any) -> Any:
  """`params.as_computed` in a form: the gradient passes through the rounding."""
  check(form)
  values = params_lib.as_computed(spec, params)
  if form == 'bf16':
    return values
  named = params_lib.named(values)
  for name, value in named.items():
    axis = axis_of(name, value.shape)
    if axis is not None:
      through = _through(jax.lax.stop_gradient(value), axis)
      named[name] = params_lib.straight_through(value, through)
  return params_lib.unnamed(named)


def _through(value: Any, axis: int) -> Array:
  return dequantise(*quantise(value, axis), axis)


@functools.partial(jax.jit, static_argnums=1)
def quantise(x: Any, axis: int) -> tuple[Array, Array, Array]:
  """(codes, scale, outer) of matrices [..., K, ...]; see the top of this file.

  `axis` is negative, and all axes from it on belong to the matrix.
  """
  x = _last(jnp.asarray(x, jnp.float32), axis)  # [..., N, K]
  blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
  most = jnp.max(jnp.abs(blocks), axis=-1)  # [..., N, K / 16]
  largest = jnp.max(most, axis=tuple(range(axis, 0)))
  outer = rounding.outer_of(largest)
  wide = outer.reshape(*outer.shape, *[1] * -axis)
  scale = rounding.divide(most, E2M1_MAX * wide)
  scale = jnp.minimum(scale, E4M3_MAX).astype(jnp.float8_e4m3fn)
  # Read from its bits: XLA may drop a cast to float8 and back, and on GPUs does.
  step = (rounding.from_e4m3(scale) * wide)[..., None]
  codes = _e2m1(rounding.divide(blocks, step))
  codes = codes.reshape(*x.shape[:-1], -1, 2)
  packed = codes[..., 0] | (codes[..., 1] << 4)
  return _back(packed, axis), _back(scale, axis), outer


@functools.partial(jax.jit, static_argnums=3)
def dequantise(codes: Array, scale: Array, outer: Array, axis: int) -> Array:
  """float32 [..., K, ...]: grid[code] * (scale * outer)."""
  codes, scale = _last(codes, axis), _last(scale, axis)
  wide = outer.reshape(*outer.shape, *[1] * -axis)
  step = rounding.from_e4m3(scale) * wide
  both = jnp.stack([codes & 15, codes >> 4], axis=-1)  # [..., K / 2, 2]
  both = both.reshape(*codes.shape[:-1], -1, BLOCK)
  values = jnp.asarray(GRID, jnp.float32)[both & 7]
  values = jnp.where(both & 8, -values, values) * step[..., None]
  return _back(values.reshape(*codes.shape[:-1], -1), axis)


def _e2m1(x: Array) -> Array:
  """uint8 codes of the nearest numbers of E2M1, ties to the even code.

  By comparison with the seven middles: the same bits on every device.
  """
  size = jnp.abs(x)
  above = [size > m for m in (0.25, 1.25, 2.5, 5.0)]
  from_on = [size >= m for m in (0.75, 1.75, 3.5)]
  code = sum(hit.astype(jnp.uint8) for hit in above + from_on)
  sign = jnp.signbit(x).astype(jnp.uint8)
  return code | (sign << 3)


def _last(x: Array, axis: int) -> Array:
  return jnp.moveaxis(x, axis, -1)


def _back(x: Array, axis: int) -> Array:
  return jnp.moveaxis(x, -1, axis)
