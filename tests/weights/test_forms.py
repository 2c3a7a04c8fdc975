"""Forms: the arithmetic of nvfp4 against ml_dtypes, and one bit pattern for
publisher, reader and trainer."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from small_model import MODEL

from composer import params as params_lib
from composer.model import transformer
from composer.weights import forms
from composer.weights import store
from composer.weights import sync

BF16 = ml_dtypes.bfloat16


def _matrix(seed, shape=(2, 3, 32, 2, 16), scale=0.05):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape) * scale * np.exp(rng.standard_normal(shape))
  return x.astype(BF16)


def _oracle(x, axis):
  """value of every element, by numpy and ml_dtypes, one block at a time."""
  x = np.moveaxis(np.asarray(x, np.float32), axis, -1)
  out = np.empty_like(x)
  matrices = x.shape[: x.ndim + axis]
  for at in np.ndindex(*matrices):
    t = np.float32(np.abs(x[at]).max() * np.float32(1 / 2688))
    for row in np.ndindex(*x[at].shape[:-1]):
      for low in range(0, x.shape[-1], 16):
        block = x[at][row][low : low + 16]
        most = np.abs(block).max()
        scale = np.float32(most / (np.float32(6) * t)) if t else np.float32(0)
        scale = np.float32(scale.astype(ml_dtypes.float8_e4m3fn))
        step = np.float32(scale * t)
        if step:
          near = (block / step).astype(ml_dtypes.float4_e2m1fn)
          value = near.astype(np.float32) * step
        else:
          value = np.zeros(16, np.float32)
        out[at][row][low : low + 16] = value
  return np.moveaxis(out, -1, axis)


@pytest.mark.parametrize('axis', [-3, -2])
def test_nvfp4_is_that_of_ml_dtypes(axis):
  x = _matrix(0) if axis == -3 else _matrix(1, (2, 3, 32, 8))
  x[0, 1] = 0  # a whole matrix
  x[1, 2, :16] = x[1, 2, :16] * BF16(1e-6)  # scales that vanish
  got = forms.dequantise(*forms.quantise(x, axis), axis)
  assert got.dtype == jnp.float32 and got.shape == x.shape
  np.testing.assert_array_equal(got, _oracle(x, axis))
  # Against the largest of its block and of its matrix, errors are bounded.
  error = np.abs(np.asarray(got) - np.asarray(x, np.float32))
  assert 0 < error.max() <= np.abs(x).astype(np.float32).max() / 6


def test_scales_at_ties_are_rounded_step_by_step():
  """Every greatest number of bfloat16: 6 * (a * c) is not always a * (6 c)."""
  rng = np.random.default_rng(0)
  size = 64, 256, 1
  x = rng.integers(128, 256, size) * 2.0 ** rng.integers(-9, -7, size)
  x[:, 0, 0] = np.arange(128, 256, 2) / 64
  x = jnp.asarray(x, jnp.bfloat16)
  got = forms.dequantise(*forms.quantise(x, -2), -2)
  np.testing.assert_array_equal(got, _oracle(x, -2))


def test_every_code_and_every_tie():
  middles = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
  values = np.array([*forms.GRID, *middles], np.float32)
  values = np.concatenate(
    [values, np.nextafter(values, 9), np.nextafter(values, -9)]
  )
  values = np.concatenate([values, -values])
  want = values.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
  np.testing.assert_array_equal(forms._e2m1(jnp.asarray(values)), want)


def test_codes_of_two_are_one_byte_even_first():
  x = np.zeros((1, 1, 16, 1), BF16)
  x[0, 0, :4, 0] = [6, -1, 0.5, 3]
  codes, scale, outer = forms.quantise(x, -2)
  assert codes.shape == (1, 1, 8, 1) and codes.dtype == jnp.uint8
  assert scale.shape == (1, 1, 1, 1) and outer.shape == (1, 1)
  assert float(scale[0, 0, 0, 0]) == 448.0
  # 6 is code 7, -1 is 2 with the sign; 0.5 is 1, 3 is 5.
  assert codes[0, 0, :3, 0].tolist() == [7 | 10 << 4, 1 | 5 << 4, 0]


def test_what_is_no_number_stays_none():
  x = _matrix(2, (1, 2, 16, 4))
  x[0, 0, 3, 2] = np.nan
  got = forms.dequantise(*forms.quantise(x, -2), -2)
  assert np.isnan(got[0, 0]).all() and not np.isnan(got[0, 1]).any()


def _published(spec, seed=0):
  rng = np.random.default_rng(seed)  # much faster than `params.init`
  masters = jax.tree.map(
    lambda s: jnp.asarray(0.1 * rng.standard_normal(s.shape), jnp.float32),
    spec,
    is_leaf=params_lib.is_spec,
  )
  return masters, params_lib.to_published(spec, masters)


@pytest.mark.parametrize('jitted', [False, True])
def test_all_sides_compute_with_the_same_bits(jitted):
  """Publisher and reader operation by operation, trainer in one compilation."""
  spec = transformer.spec(MODEL)
  masters, published = _published(spec)
  flat = {
    name: np.asarray(value)
    for name, value in forms.publish(
      'nvfp4', params_lib.named(published)
    ).items()
  }
  kv = store.open_exchange('memory://')
  sync.Publisher(kv, 'nvfp4', 4).publish(flat, 0)
  _, fetched = sync.Subscriber(kv, 'nvfp4').poll()
  engine = forms.widen('nvfp4', fetched)

  act = functools.partial(forms.as_computed, 'nvfp4', spec)
  trainer = params_lib.named((jax.jit(act) if jitted else act)(masters))
  audit = params_lib.named(forms.computed('nvfp4', published))
  assert sorted(engine) == sorted(trainer) == sorted(audit)
  moved = 0
  for name, value in engine.items():
    np.testing.assert_array_equal(value, trainer[name], err_msg=name)
    np.testing.assert_array_equal(value, audit[name], err_msg=name)
    plain = np.asarray(params_lib.named(published)[name], np.float32)
    moved += not np.array_equal(value, plain)
  assert moved == 2  # gate_up and down of the experts, and nothing else


def test_smaller_and_only_experts():
  spec = transformer.spec(MODEL)
  _, published = _published(spec)
  named = params_lib.named(published)
  flat = forms.publish('nvfp4', named)
  cut = {n.partition(':')[0] for n in flat if ':' in n}
  assert cut == {'layers/moe/gate_up', 'layers/moe/down'}
  for name in cut:
    parts = [flat[name + suffix] for suffix in forms.SUFFIXES]
    bits = 8 * sum(part.nbytes for part in parts) / named[name].size
    assert 4.5 <= bits < 4.6
  assert forms.publish('bf16', named) == named


def test_an_axis_that_blocks_do_not_divide_stays_bf16():
  x = {'layers/moe/down': _matrix(0, (1, 2, 24, 8))}
  assert list(forms.publish('nvfp4', x)) == ['layers/moe/down']


def test_the_gradient_passes_through():
  spec = transformer.spec(MODEL)
  masters, _ = _published(spec)

  def total(params):
    values = forms.as_computed('nvfp4', spec, params)
    return sum(jnp.sum(3 * value) for value in jax.tree.leaves(values))

  for grad in jax.tree.leaves(jax.jit(jax.grad(total))(masters)):
    np.testing.assert_array_equal(grad, np.full(grad.shape, 3, np.float32))


def test_an_unknown_form_names_the_known():
  with pytest.raises(ValueError, match='known: bf16, nvfp4'):
    forms.publish('int4', {})


def test_deltas_of_the_quantised_form_are_small():
  """The difference is taken after the conversion, of the quantised words."""
  spec = transformer.spec(MODEL)
  masters, _ = _published(spec)
  kv = store.open_exchange('memory://')
  publisher = sync.Publisher(kv, 'nvfp4', 9)
  reader = sync.Subscriber(kv, 'nvfp4')
  for version in range(4):
    nudged = jax.tree.map(lambda p: p * (1 + 1e-4 * version), masters)  # noqa: B023
    named = params_lib.named(params_lib.to_published(spec, nudged))
    flat = forms.publish('nvfp4', named)
    flat = {name: np.asarray(value) for name, value in flat.items()}
    stats = publisher.publish(flat, version)
    assert reader.poll()[0] == version
    if version:
      assert stats.kind == 'delta' and stats.changed_share < 0.5
