"""Nothing between kernels has other bits in another fusion.

Compilers may leave out a rounding to 16 bits and back, and contract a product and
a sum. Whether they do is not seen on a CPU, and differs between devices; so the
programs are read as they are traced for a GPU: where 16 bits are made of 32, a
`reduce_precision` has rounded before; arithmetic is in 32 bits; and a product that
is added to something is exact.
"""

import dataclasses

import jax
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer.inference import engine
from composer.model import operations
from composer.model import transformer
from pallas_kernels import dispatch
from pallas_kernels import mosaic

ROWS = 64
GROUPED = config_lib.ModelConfig(
  vocab_size=256,
  width=128,
  layers=3,
  dense_layers=1,
  heads=4,
  kv_heads=2,
  head_dim=64,
  qk_norm=True,
  dense_hidden=128,
  experts=4,
  experts_per_token=3,
  expert_hidden=64,
  shared_experts=1,
)
LATENT = dataclasses.replace(
  GROUPED,
  layers=2,
  tie_embeddings=True,
  heads=2,
  qk_norm=False,
  q_lora=64,
  kv_lora=512,
  nope_dim=128,
  rope_dim=64,
  value_dim=128,
)
NUMERICS = config_lib.NumericsConfig(
  mode='bitwise', kv_block=64, row_block=64, moe='sorted', compute='bfloat16'
)
CALLS = ('pjit', 'jit', 'closed_call', 'custom_jvp_call', 'custom_vjp_call')
MOVES = (
  *('broadcast_in_dim', 'concatenate', 'copy', 'dynamic_slice', 'gather'),
  *('optimization_barrier', 'pad', 'reshape', 'scatter', 'select_n', 'slice'),
  *('split', 'squeeze', 'transpose'),
)
ARITHMETIC = (
  *('add', 'sub', 'mul', 'div', 'neg', 'max', 'min', 'exp', 'log', 'tanh'),
  *('logistic', 'rsqrt', 'sqrt', 'integer_pow', 'square', 'dot_general'),
  *('reduce_sum', 'reduce_max', 'cumsum', 'add_any'),
)


def flatten(jaxpr, names, out):
  """(primitive, parameters, what it reads, what it makes) of all equations.

  Calls are opened, so that a value has one name in and around them; what a loop
  carries is given to its body. Kernels stay closed.
  """

  def known(v):
    return v if isinstance(v, core.Literal) else names.get(v, v)

  for eqn in jaxpr.eqns:
    name, reads = eqn.primitive.name, [known(v) for v in eqn.invars]
    inner = eqn.params.get('jaxpr') or eqn.params.get('call_jaxpr')
    inner = getattr(inner, 'jaxpr', inner)
    if name in CALLS:
      own = dict(zip(inner.invars, reads, strict=True))
      flatten(inner, own, out)
      for made, v in zip(eqn.outvars, inner.outvars, strict=True):
        names[made] = v if isinstance(v, core.Literal) else own.get(v, v)
      continue
    out.append((name, eqn.params, reads, eqn.outvars))
    if name == 'scan':  # what it does not carry is as it was outside
      count = whole(reads, inner.invars) - whole(eqn.outvars, inner.outvars)
      flatten(inner, dict(zip(inner.invars[:count], reads, strict=False)), out)
    elif name == 'while':
      flatten(eqn.params['body_jaxpr'].jaxpr, {}, out)
  return out


def whole(outside, inside):
  """How many of a loop's values are not cut: no axis less inside of it."""
  pairs = zip(outside, inside, strict=True)
  return sum(a.aval.shape == b.aval.shape for a, b in pairs)


def is_float(v, size):
  return jnp.issubdtype(v.aval.dtype, jnp.floating) and (
    v.aval.dtype.itemsize == size
  )


def origins(made, v):
  """What made the numbers of v, behind what only moves them; None is given."""
  todo, found = [v], []
  while todo:
    v = todo.pop()
    if isinstance(v, core.Literal) or v not in made:
      found.append((None, {}, [], []))
    elif made[v][0] in MOVES:
      todo += [read for read in made[v][2] if is_float(read, 4)]
    else:
      found.append(made[v])
  return found


def bits(made, v):
  """The most significant bits of a factor in float32."""
  most = 0
  for name, params, reads, _ in origins(made, v):
    if name == 'reduce_precision':
      most = max(most, params['mantissa_bits'] + 1)
    elif name == 'convert_element_type' and is_float(reads[0], 2):
      most = max(most, 8)
    else:
      return 24
  return most


def faults(closed):
  """What of a program depends on how it is fused; and its roundings."""
  equations = flatten(closed.jaxpr, {}, [])
  made = {v: equation for equation in equations for v in equation[3]}
  found, rounded = [], 0
  for name, _, reads, makes in equations:
    rounded += name == 'reduce_precision'
    if name in ARITHMETIC and any(is_float(v, 2) for v in makes):
      found.append(f'{name} in 16 bits')
    if name == 'convert_element_type' and is_float(makes[0], 2):
      found += [
        f'{origin[0]} is cast unrounded'
        for origin in origins(made, reads[0])
        if origin[0] in ARITHMETIC
      ]
    if name in ('add', 'sub') and is_float(makes[0], 4):
      for v in reads:
        for origin in origins(made, v):
          if origin[0] == 'mul':
            digits = sum(bits(made, factor) for factor in origin[2])
            found += [f'{name} of a product of {digits} bits'] * (digits > 24)
  return found, rounded


def programs(model):
  """The trainer's forward and the engine's step, which does not loop over layers.

  The forward is the one that keeps what a backward pass will read.
  """
  params = jax.eval_shape(
    lambda: params_lib.init(transformer.spec(model), jax.random.key(0))
  )
  row = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
  batch = jax.ShapeDtypeStruct((1, ROWS), jnp.int32)
  ones = jnp.ones(ROWS)

  def train(params, tokens, ids, positions):
    out = transformer.forward(params, model, NUMERICS, tokens, ids, positions)
    return transformer.token_logprob(
      params, model, NUMERICS, out.hidden, tokens, ones[None]
    )[0]

  def step(params, cache, tokens, positions, table):
    hidden, _, cache = transformer.step(
      params, model, NUMERICS, cache, tokens, positions, table
    )
    unembed = transformer.unembedding(params)
    norm = params['final_norm']
    return cache, transformer.row_logprobs(
      model, NUMERICS, norm, unembed, hidden, tokens, ones
    )

  held = jax.eval_shape(lambda p: engine.prepare(NUMERICS, p), params)
  assert isinstance(held['layers'], tuple)
  cache = jax.eval_shape(lambda: transformer.init_cache(model, NUMERICS, 2))
  table = jax.ShapeDtypeStruct((ROWS, 1), jnp.int32)
  kept = lambda *args: jax.vjp(lambda p: train(p, *args[1:]), args[0])[0]  # noqa: E731
  yield jax.make_jaxpr(kept)(params, batch, batch, batch)
  yield jax.make_jaxpr(step)(held, cache, row, row, table)


@pytest.mark.parametrize('model', (GROUPED, LATENT), ids=('grouped', 'latent'))
def test_no_bit_depends_on_a_fusion(monkeypatch, model):
  monkeypatch.setattr(dispatch, 'platform', lambda: 'gpu')
  monkeypatch.setattr(mosaic, 'available', lambda: None)
  monkeypatch.setattr(mosaic, 'cores', lambda: 132)
  for program in programs(model):
    found, rounded = faults(program)
    assert not found
    assert rounded > 4, 'not the program of a GPU'


def _added(x, y):
  return x * 1.5 + y


def _turned(x, cos):
  return (x * cos - x * (1 - cos)).astype(jnp.bfloat16)


@pytest.mark.parametrize(
  ('fn', 'others', 'want'),
  (
    (_added, jnp.bfloat16, {'add in 16 bits', 'mul in 16 bits'}),
    (
      _turned,
      jnp.float32,
      {'sub is cast unrounded', 'sub of a product of 32 bits'},
    ),
  ),
)
def test_a_fault_is_found(fn, others, want):
  x, y = jnp.ones(3, jnp.bfloat16), jnp.ones(3, others)
  assert set(faults(jax.make_jaxpr(fn)(x, y))[0]) == want


def test_roundings_and_factors():
  """What compiled programs keep of them, against numpy's."""
  ops = operations.Operations('gpu', 'gpu')
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, 4096)).astype(jnp.bfloat16)
  wide = rng.normal(size=4096).astype(np.float32)

  @jax.jit
  def run(x, y, wide):
    again = operations.narrow(ops, wide, x.dtype).astype(jnp.float32)
    total = operations.add(ops, operations.add(ops, x, y), x)
    return again, total, operations.factor(ops, wide, x.dtype)

  again, total, short = jax.tree.map(np.asarray, run(x, y, wide))
  np.testing.assert_array_equal(again, wide.astype(x.dtype).astype(np.float32))
  np.testing.assert_array_equal(total, (x + y) + x)
  assert np.abs(short / wide - 1).max() <= 2**-16
  exact = short.astype(np.float64) * x.astype(np.float64)
  np.testing.assert_array_equal(exact, short * x.astype(np.float32))
  plain = operations.PLAIN
  assert operations.factor(plain, wide, x.dtype) is wide
  assert operations.factor(ops, wide, wide.dtype) is wide
