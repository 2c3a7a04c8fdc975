"""Every operation refuses what does not fit, and says what that was.

A table of calls that are right, and of what is changed in one to make it wrong.
The right ones are called too: by them a check that refuses too much fails.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention
from pallas_kernels import checks
from pallas_kernels import delta
from pallas_kernels import grouped_matmul
from pallas_kernels import matmul
from pallas_kernels import norm
from pallas_kernels import paged_attention
from pallas_kernels import quantize
from pallas_kernels import route
from pallas_kernels import token_logprob
from pallas_kernels.grouped_matmul import packed
from pallas_kernels.token_logprob import shards

FLOATS = 'give float32, bfloat16 or float16'
INTEGERS = 'give integers'
E4M3 = jnp.float8_e4m3fn


def some(*size, of=jnp.bfloat16):
  return jnp.ones(size, of)


def ids(*rows):
  return jnp.asarray(rows, jnp.int32)


def nvfp4(**change):
  parts = dict(
    codes=some(2, 8, 4, of=jnp.uint8),
    scale=some(2, 1, 4, of=E4M3),
    outer=some(2, of=jnp.float32),
  )
  return packed.Nvfp4(**(parts | change))


def fp8(**change):
  parts = dict(
    codes=some(2, 16, 4, of=E4M3), scale=some(2, 1, 1, of=jnp.float32)
  )
  return packed.Fp8(**(parts | change))


# Pages of 2 tokens; the sequences hold 3 tokens and 1, so the last entry of the
# table is not read, and may be anything.
PAGED = dict(
  q=some(2, 1, 4, 8),
  k_pages=some(5, 2, 2, 8),
  v_pages=some(5, 2, 2, 8),
  table=ids([3, 1], [4, -1]),
  positions=ids(2, 0),
  scale=0.5,
)
DECODE = PAGED | dict(q=some(2, 4, 8), k=some(2, 2, 8), v=some(2, 2, 8))
LATENT = DECODE | dict(
  k=some(2, 1, 8), v=None, k_pages=some(5, 2, 1, 8), v_pages=None, width=4
)
TURNING = {k: x for k, x in PAGED.items() if k != 'q'} | dict(
  qkv=some(2, 8, 8), turns=some(2, 8, of=jnp.float32)
)
LOGPROB = dict(
  hidden=some(3, 8),
  unembed=some(8, 20),
  tokens=ids(0, 7, 19),
  temperatures=some(3, of=jnp.float32),
)
# Of uint8: token 0 is the first bit of the first byte, 19 is the last of all.
BITS = np.packbits(np.eye(20, dtype=bool)[[0, 7, 19]], axis=1)
KEPT = LOGPROB | dict(kept=ids([3, 0], [-1, -1], [19, -1]))
GROUPED = dict(
  x=some(5, 16), w=some(2, 16, 4), group_sizes=ids(2, 3), gated=False
)
ROUTE = dict(
  logits=some(3, 8, of=jnp.float32),
  bias=some(8, of=jnp.float32),
  router=route.Router(2),
  replay=ids([0, 1], [2, -1], [7, 3]),
)
ATTENTION = dict(
  q=some(1, 4, 4, 8),
  k=some(1, 4, 2, 8),
  v=some(1, 4, 2, 8),
  segment_ids=ids([1, 1, 2, 0]),
  scale=0.5,
  block=4,
)

# Operation, its right arguments, and of each fault what is changed and said.
CALLS = {
  'attention': (
    attention.attention,
    ATTENTION,
    [
      (dict(k=some(1, 4, 0, 8), v=None, width=8), r'\(1, 4, 0, 8\) .*no heads'),
      (dict.fromkeys('qkv', some(1, 4, 2, 8, of=jnp.int32)), FLOATS),
      (dict(k=some(1, 4, 2, 8, of=jnp.float32)), 'q is bfloat16 and k float32'),
      (dict(segment_ids=some(1, 4)), f'segment_ids is bfloat16; {INTEGERS}'),
      (dict(segment_ids=ids([1, 1])), r'\(1, 2\) must be \[B, T\] = \(1, 4\)'),
    ],
  ),
  'paged': (
    paged_attention.paged_attention,
    PAGED,
    [
      (dict(table=ids([3, 5], [4, 0])), r'table\[0, 1\] is page 5, .* are 5'),
      (dict(table=ids([3, 1], [-1, 0])), r'table\[1, 0\] is page -1'),
      (dict(positions=ids(2, 2)), r'table\[1, 1\] is page -1'),
      (dict(positions=ids([2], [4])), 'position 4 lies past the 2 pages of 2'),
      (dict(q=some(2, 3, 4, 8)), 'position 4 lies past'),
      (dict(table=some(2, 2)), f'table is bfloat16; {INTEGERS}'),
      (dict(positions=ids(2, 0, 1)), r'positions \(3,\) must be \[N, Q\]'),
      (dict(q=some(2, 1, 4, 8, of=jnp.int32)), FLOATS),
    ],
  ),
  'decode': (
    paged_attention.decode,
    DECODE,
    [
      (
        dict(k=some(2, 2, 8, of=jnp.float32)),
        'k is float32 and must be bfloat',
      ),
      (
        dict(v=some(2, 2, 8, of=jnp.float32)),
        'v is float32 and must be bfloat',
      ),
      (dict(k=some(1, 2, 8)), r'k \(1, 2, 8\) must be .* = \(2, 2, 8\)'),
      (dict(k=some(2, 1, 8)), r'k \(2, 1, 8\) must be .* = \(2, 2, 8\)'),
      (dict(v=some(2, 1, 8)), r'v \(2, 1, 8\) must be .* = \(2, 2, 8\)'),
      (dict(v=None), r'v is None and v_pages \(5, 2, 2, 8\); give both'),
      (dict(v_pages=None, width=8), r'v is \(2, 2, 8\) and v_pages None'),
      (dict(q=some(2, 1, 4, 8)), r'q \(2, 1, 4, 8\) must be \[N, H, K\]'),
      (dict(q=some(2, 4, 8, of=jnp.float32)), 'q is float32 and k bfloat16'),
      (dict(positions=ids([2], [0])), r'positions \(2, 1\) must be \[N\]'),
      (dict(table=ids([3, 5], [4, 0])), r'table\[0, 1\] is page 5'),
      (dict(table=ids([3, 4], [4, 0])), 'page 4 is written to by 2 sequences'),
    ],
  ),
  'decode of latents': (
    paged_attention.decode,
    LATENT,
    [
      (dict(k=some(2, 2, 8)), r'k \(2, 2, 8\) must be .* = \(2, 1, 8\)'),
      (dict(width=9), 'width=9; without v'),
    ],
  ),
  'grouped_matmul': (
    grouped_matmul.grouped_matmul,
    GROUPED,
    [
      (dict(w=some(16, 4)), r'w \(16, 4\) \[E, K, N\]'),
      (
        dict(x=some(5, 16, of=jnp.int8), w=some(2, 16, 4, of=jnp.int8)),
        f'x is int8; {FLOATS}',
      ),
      (dict(group_sizes=some(2)), f'group_sizes is bfloat16; {INTEGERS}'),
      (dict(group_sizes=ids(2, 4)), r'sum to 6 \(least 2\), and x has 5 rows'),
    ],
  ),
  'weight_gradient': (
    grouped_matmul.weight_gradient,
    dict(x=some(5, 16), dy=some(5, 4), group_sizes=ids(2, 3)),
    [
      (dict(dy=some(4, 4)), r'dy \(4, 4\) .* differ in rows'),
      (dict(dy=some(2, 5, 4)), r'dy \(2, 5, 4\) \[M, N\]'),
      (dict(dy=some(5, 4, of=jnp.float32)), 'x is bfloat16 and dy float32'),
      (dict(group_sizes=ids([2, 3])), r'group_sizes \(1, 2\) must be \[E\]'),
    ],
  ),
  'nvfp4 weights': (
    grouped_matmul.grouped_matmul,
    GROUPED | dict(w=nvfp4()),
    [
      (dict(w=nvfp4(outer=some(2))), 'outer is bfloat16 and must be float32'),
      (dict(w=nvfp4(codes=some(2, 8, 4, of=jnp.int32))), 'codes are int32'),
      (dict(x=some(5, 16, of=jnp.int32)), f'x is int32; {FLOATS}'),
      (dict(group_sizes=some(2)), f'group_sizes is bfloat16; {INTEGERS}'),
    ],
  ),
  'fp8 weights': (
    grouped_matmul.grouped_matmul,
    GROUPED | dict(w=fp8()),
    [
      (dict(w=fp8(scale=some(2, 1, 1))), 'scale bfloat16; Fp8 has .* float32'),
      (dict(x=some(5, 16, of=jnp.int32)), f'x is int32; {FLOATS}'),
      (dict(group_sizes=some(2)), f'group_sizes is bfloat16; {INTEGERS}'),
    ],
  ),
  'matmul': (
    matmul.matmul,
    dict(x=some(5, 16), w=some(16, 4)),
    [
      (dict(x=some(16)), r'x \(16,\) and w \(16, 4\) must have two axes'),
      (
        dict(x=some(5, 16, of=jnp.int32), w=some(16, 4, of=jnp.int32)),
        f'x is int32; {FLOATS}',
      ),
      (dict(w=some(16, 4, of=jnp.float32)), 'x is bfloat16 and w float32'),
    ],
  ),
  'rms_norm': (
    norm.rms_norm,
    dict(x=some(5, 16), scale=some(16, of=jnp.float32)),
    [
      (dict(x=some(5, 16, of=jnp.int32)), f'x is int32; {FLOATS}'),
      (dict(scale=some(16, of=jnp.int32)), f'scale is int32; {FLOATS}'),
      (dict(scale=some(5)), r'x \(5, 16\) must end in .* scale \(5,\)'),
    ],
  ),
  'rms_norm, wide': (
    norm.rms_norm,
    dict(x=some(5, 16, of=jnp.float32), scale=some(16)),
    [(dict(epsilon=-1e-6), 'epsilon=-1e-06 must not be negative')],
  ),
  'add_rms_norm': (
    norm.add_rms_norm,
    dict(x=some(5, 16), more=some(5, 16), scale=some(16)),
    [
      (dict.fromkeys(('x', 'more'), some(5, 16, of=jnp.int32)), FLOATS),
      (dict(more=some(5, 16, of=jnp.float32)), 'more float32 .* differ'),
    ],
  ),
  'route': (
    route.route,
    ROUTE,
    [
      (dict(bias=some(8)), 'bias is bfloat16 and must be float32'),
      (dict(bias=some(7, of=jnp.float32)), r'bias \(7,\) must be \[E\] = \(8,'),
      (dict(logits=some(3, 8)), 'logits bfloat16.* must be float32'),
      (dict(replay=ids([0, 8], [2, 1], [7, 3])), 'expert 8, and there are 8'),
    ],
  ),
  'route.order': (
    route.order,
    dict(experts=ids([0, 1], [2, 3]), count=4),
    [
      (dict(experts=some(2, 2)), f'experts is bfloat16; {INTEGERS}'),
      (dict(experts=ids([0, 4])), r'from 0 to 4 must be in 0\.\.3'),
      (dict(experts=ids([-1, 3])), r'from -1 to 3 must be in 0\.\.3'),
      (dict(experts=ids(0, 1)), r'\(2,\) must be \[R, K\]'),
      (dict(count=4.0), 'count=4.0 must be an integer'),
    ],
  ),
  'route.send': (
    route.send,
    ROUTE | dict(x=some(3, 16)),
    [
      (dict(x=some(3, 16, of=jnp.int32)), f'x is int32; {FLOATS}'),
      (dict(bias=some(8)), 'bias is bfloat16 and must be float32'),
    ],
  ),
  'token_logprob': (
    token_logprob.token_logprob,
    KEPT,
    [
      (dict(tokens=some(3, of=jnp.float32)), f'tokens is float32; {INTEGERS}'),
      (dict(tokens=ids(0, 7, 20)), r'from 0 to 20; .* in 0\.\.19'),
      (dict(tokens=ids(0, 7, 18)), 'token 18 of row 2 is not among'),
      (dict(kept=ids([0, -2], [-1, -1], [19, -1])), 'go down to -2'),
      (dict(kept=ids([0, 20], [-1, -1], [19, -1])), 'go to 20; .* below 20'),
      (dict(kept=BITS[[0, 0, 2]]), 'token 7 of row 1 is not among'),
      (
        dict(
          hidden=some(3, 8, of=jnp.int32), unembed=some(8, 20, of=jnp.int32)
        ),
        f'hidden is int32; {FLOATS}',
      ),
      (dict(temperatures=ids(1, 1, 1)), f'temperatures is int32; {FLOATS}'),
    ],
  ),
  'token_logprob of bits': (
    token_logprob.token_logprob,
    LOGPROB | dict(kept=BITS),
    [(dict(kept=BITS[:, :2]), '3 bytes a row')],
  ),
  'token_logprob in parts': (
    shards.statistics,
    LOGPROB | dict(tokens=ids(0, -3, 99)),  # of other parts
    [
      (dict(tokens=some(3)), f'tokens is bfloat16; {INTEGERS}'),
      (dict(hidden=some(3, 7)), 'differ in D'),
    ],
  ),
  'widen_nvfp4': (
    quantize.widen_nvfp4,
    dict(
      codes=some(3, 16, of=jnp.uint8),
      scale=some(3, 2, of=E4M3),
      outer=some(3, of=jnp.float32),
    ),
    [
      (
        dict(codes=some(3, 16, of=jnp.int32)),
        'codes is int32 and must be uint8',
      ),
      (dict(codes=some(16, of=jnp.uint8)), r'codes \(16,\) must have two axes'),
      (dict(codes=some(3, 12, of=jnp.uint8)), 'K=24 .* not a multiple of 16'),
      (
        dict(scale=some(3, 3, of=E4M3)),
        r'scale \(3, 3\) must be .* = \(3, 2\)',
      ),
      (dict(scale=some(3, 2)), 'scale is bfloat16 and must be float8_e4m3fn'),
      (dict(outer=some(2, of=jnp.float32)), r'outer \(2,\) must be'),
      (dict(outer=some(3)), 'outer is bfloat16 and must be float32'),
    ],
  ),
  'widen_mxfp8': (
    quantize.widen_mxfp8,
    dict(values=some(3, 64, of=E4M3), exponents=some(3, 2, of=jnp.uint8)),
    [
      (dict(exponents=some(3, 1, of=jnp.uint8)), r'exponents \(3, 1\) must be'),
      (dict(exponents=some(3, 2, of=jnp.int32)), 'exponents is int32 and must'),
      (
        dict(values=some(3, 64)),
        'values is bfloat16 and must be float8_e4m3fn',
      ),
      (dict(values=some(3, 48, of=E4M3)), 'K=48 .* not a multiple of 32'),
    ],
  ),
  'widen_fp8': (
    quantize.widen_fp8,
    dict(values=some(3, 200, of=E4M3), scale=some(1, 2, of=jnp.float32)),
    [
      (dict(scale=some(1, 1, of=jnp.float32)), r'scale \(1, 1\) .* = \(1, 2\)'),
      (dict(scale=some(1, 2)), 'scale is bfloat16 and must be float32'),
    ],
  ),
  'delta.compact': (
    delta.compact,
    dict(base=some(9), new=some(9), capacity=2),
    [
      (dict(capacity=0), 'capacity=0 must be at least 1'),
      (dict(capacity=2.5), 'capacity=2.5 must be an integer'),
      (dict(new=some(8)), r'new bfloat16\(8,\) differ'),
    ],
  ),
  'delta.scatter': (
    delta.scatter,
    dict(base=some(9), positions=ids(2, 9), words=some(2, of=jnp.uint16)),
    [
      (dict(positions=some(2)), f'positions is bfloat16; {INTEGERS}'),
      (dict(words=some(2, of=jnp.uint8)), 'words are uint8'),
    ],
  ),
}
FAULTS = [
  pytest.param(name, change, message, id=f'{name} {"-".join(change)} {i}')
  for name, (_, _, faults) in CALLS.items()
  for i, (change, message) in enumerate(faults)
]


@pytest.mark.parametrize('name', CALLS)
def test_what_is_right_runs(name):
  operation, arguments, _ = CALLS[name]
  # Closed over, all values are known; compiled, it takes a tenth of the time.
  for array in jax.tree.leaves(jax.jit(lambda: operation(**arguments))()):
    if jnp.issubdtype(array.dtype, jnp.floating):
      assert np.isfinite(np.asarray(array, np.float32)).all()


@pytest.mark.parametrize(('name', 'change', 'message'), FAULTS)
def test_what_is_wrong_is_refused(name, change, message):
  operation, arguments, _ = CALLS[name]
  with pytest.raises(ValueError, match=message):
    operation(**(arguments | change))


@pytest.mark.parametrize(
  ('name', 'change', 'message'),
  [
    ('decode', dict(k=some(1, 2, 8)), r'k \(1, 2, 8\) must be'),
    ('decode', dict(v=None), 'give both'),
    ('nvfp4 weights', dict(w=nvfp4(outer=some(2))), 'must be float32'),
    ('token_logprob', dict(tokens=some(3)), INTEGERS),
    ('route', dict(bias=some(8)), 'must be float32'),
    ('widen_mxfp8', dict(exponents=some(3, 1, of=jnp.uint8)), 'must be'),
  ],
)
def test_while_tracing(name, change, message):
  operation, arguments, _ = CALLS[name]
  arguments = arguments | change
  traced = {
    key: x
    for key, x in arguments.items()
    if any(hasattr(leaf, 'dtype') for leaf in jax.tree.leaves(x))
    and not isinstance(x, route.Router)
  }
  rest = {key: x for key, x in arguments.items() if key not in traced}
  with pytest.raises(ValueError, match=message):
    jax.eval_shape(lambda arrays: operation(**arrays, **rest), traced)


def test_values_that_are_traced_are_not_looked_at():
  def last(table):
    run = paged_attention.paged_attention
    return run(**(PAGED | dict(table=table)))

  wrong = ids([3, 5], [4, 0])
  assert jax.eval_shape(last, wrong).shape == (2, 1, 4, 8)
  with pytest.raises(ValueError, match='is page 5'):  # closed over: known
    jax.eval_shape(lambda: last(wrong))
  assert checks.known(wrong).tolist() == wrong.tolist()
  seen = []
  jax.eval_shape(lambda x: seen.append(checks.known(x)), wrong)
  assert seen == [None]


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    (dict(qkv=some(2, 4, 8)), r'qkv \(2, 4, 8\) .* leave no queries'),
    (dict(qkv=some(2, 8)), r'qkv \(2, 8\) must be'),
    (dict(v_pages=None), 'and not None'),
    (dict(turns=some(2, 8)), 'turns is bfloat16 and must be float32'),
    (dict(qkv=some(2, 8, 8, of=jnp.float32)), 'q is float32 and k bfloat16'),
    (dict(positions=ids([2], [0])), r'positions \(2, 1\) must be \[N\]'),
    (dict(table=ids([3, 4], [4, 0])), 'page 4 is written to by 2'),
    (dict(table=ids([7, 1], [4, 0])), r'table\[0, 0\] is page 7'),
    # What is right goes as far as the choice of a kernel.
    ({}, 'only the GPU kernel turns'),
  ],
)
def test_turning(change, message):
  with pytest.raises(ValueError, match=message):
    paged_attention.decode_turning(**(TURNING | change))
