"""One declaration a parameter: maps over it, and the published form."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import params as params_lib

Spec = params_lib.ParamSpec
SPEC = {
  'embed': Spec((50, 8), ('vocab', 'embed'), 'embedding'),
  'layers': {
    'norm': Spec((2, 8), ('layers', 'embed'), 'ones'),
    'w': Spec((2, 8, 400), ('layers', 'embed', 'mlp'), fan_in=8),
    'bias': Spec(
      (2, 4),
      ('layers', 'router'),
      'zeros',
      published=jnp.float32,
      trained=False,
    ),
  },
}


def rounded_to_bf16(x):
  """Round to nearest, ties to even, on the bits: the definition of the form."""
  bits = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
  lower = bits & 0xFFFF
  up = (lower > 0x8000) | ((lower == 0x8000) & ((bits >> 16) & 1 == 1))
  return (((bits >> 16) + up) << 16).astype(np.uint32).view(np.float32)


def awkward_values():
  """Halfway cases, carries into the exponent, tiny and huge, both signs."""
  rng = np.random.default_rng(0)
  bits = rng.integers(0, 2**32, 4000, np.uint32)
  bits[:1000] = (bits[:1000] & 0xFFFF0000) | 0x8000  # exactly between two
  bits[1000:1100] |= 0x007FFFFF  # rounds up to the next power of two
  values = bits.view(np.float32)
  magnitude = np.abs(values)
  # Subnormals are flushed to zero on some devices; no parameter is one.
  values = values[(magnitude > 1.2e-38) & (magnitude < 3.3e38)]
  return np.concatenate([values, [0.0, -0.0]]).astype(np.float32)


def test_a_shape_has_an_axis_name_per_dimension():
  with pytest.raises(ValueError, match=r'\(2, 3\).*differ in length'):
    Spec((2, 3), ('embed',))


def test_count_and_abstract():
  assert params_lib.count(SPEC) == 400 + 16 + 6400 + 8
  flat = params_lib.named(params_lib.abstract(SPEC))
  assert {n: s.shape for n, s in flat.items()} == {
    'embed': (50, 8),
    'layers/norm': (2, 8),
    'layers/w': (2, 8, 400),
    'layers/bias': (2, 4),
  }
  assert {s.dtype for s in flat.values()} == {jnp.dtype('float32')}


def test_names_and_back():
  params = params_lib.init(SPEC, jax.random.key(0))
  again = params_lib.unnamed(params_lib.named(params))
  assert jax.tree.structure(again) == jax.tree.structure(params)
  host = params_lib.to_host(params)
  assert list(host) == list(params_lib.named(params))
  assert all(isinstance(v, np.ndarray) for v in host.values())


def test_init():
  params = params_lib.init(SPEC, jax.random.key(0))
  assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(params))
  assert np.all(params['layers']['norm'] == 1)
  assert np.all(params['layers']['bias'] == 0)
  w = np.asarray(params['layers']['w'])
  assert abs(w.std() * math.sqrt(8) - 1) < 0.05
  assert abs(w.mean()) < 0.02
  assert abs(np.asarray(params['embed']).std() / 0.02 - 1) < 0.1
  assert np.any(w[0] != w[1])


def test_a_draw_depends_on_key_and_name_alone():
  """Another layer declared beside it moves nothing."""
  params = params_lib.init(SPEC, jax.random.key(0))
  more = {'a': SPEC['embed'], **SPEC}
  again = params_lib.init(more, jax.random.key(0))
  np.testing.assert_array_equal(again['layers']['w'], params['layers']['w'])
  assert np.any(again['a'] != again['embed'])
  other = params_lib.init(SPEC, jax.random.key(1))
  assert np.any(other['embed'] != params['embed'])


def test_trained_mask():
  mask = params_lib.named(params_lib.trained_mask(SPEC))
  assert [n for n, trained in mask.items() if not trained] == ['layers/bias']


@pytest.mark.parametrize('jit', (False, True))
def test_both_sides_compute_with_the_same_bits(jit):
  """as_computed (trainer) == widen(to_published) (engine), compiled or not."""
  values = awkward_values()
  spec = {
    'w': Spec(values.shape, ('embed',)),
    'bias': Spec(values.shape, ('router',), published=jnp.float32),
  }
  params = {'w': jnp.asarray(values), 'bias': jnp.asarray(values)}

  def trainer(p):
    return params_lib.as_computed(spec, p)

  def published(p):
    return params_lib.to_published(spec, p)

  if jit:
    trainer, published = jax.jit(trainer), jax.jit(published)
  sent = published(params)
  assert sent['w'].dtype == jnp.bfloat16 and sent['bias'].dtype == jnp.float32
  engine, computed = params_lib.widen(sent), trainer(params)

  def bits(x):
    return np.asarray(x).view(np.uint32)

  for name in params:
    assert engine[name].dtype == computed[name].dtype == jnp.float32
    np.testing.assert_array_equal(bits(engine[name]), bits(computed[name]))
  np.testing.assert_array_equal(
    bits(engine['w']), bits(rounded_to_bf16(values))
  )
  np.testing.assert_array_equal(bits(engine['bias']), bits(values))
  assert np.mean(bits(engine['w']) != bits(values)) > 0.9


def test_the_gradient_passes_straight_through_the_rounding():
  params = params_lib.init(SPEC, jax.random.key(0))
  weights = params_lib.init(SPEC, jax.random.key(1))

  def total(p):
    computed = params_lib.as_computed(SPEC, p)
    return sum(
      jnp.sum(w * jnp.square(x))
      for w, x in zip(
        jax.tree.leaves(weights), jax.tree.leaves(computed), strict=True
      )
    )

  got = jax.jit(jax.grad(total))(params)
  computed = params_lib.as_computed(SPEC, params)
  jax.tree.map(
    lambda g, w, x: np.testing.assert_allclose(g, 2 * w * x, rtol=1e-6),
    got,
    weights,
    computed,
  )
