"""TPU kernels compile ahead of time, where libtpu is installed."""

import dataclasses
import importlib.util

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import tpu as attention
from pallas_kernels.delta import tpu as delta
from pallas_kernels.grouped_matmul import shapes
from pallas_kernels.grouped_matmul import tpu as grouped
from pallas_kernels.grouped_matmul import tpu_packed
from pallas_kernels.norm import tpu as norm
from pallas_kernels.paged_attention import tpu as paged_attention
from pallas_kernels.quantize import tpu as quantize
from pallas_kernels.route import shapes as route_shapes
from pallas_kernels.route import tpu as route
from pallas_kernels.token_logprob import tpu as token_logprob

pytestmark = pytest.mark.skipif(
  importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed'
)


@pytest.fixture(scope='module', params=['v5p:2x2x1', 'v6e:2x2'])
def draw(request):
  """Shapes on one chip of the topology."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
    topology = topologies.get_topology_desc(
      platform='tpu', topology_name=request.param
    )
  chip = jax.sharding.SingleDeviceSharding(topology.devices[0])

  def shaped(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=chip)

  return shaped


def compile_(function, *arguments):
  assert jax.jit(function).lower(*arguments).compile() is not None


@pytest.mark.parametrize('shape', [shapes.TRAINING[0], shapes.TRAINING[3]])
def test_grouped_matmul(draw, shape):
  m, k, n, e = shape.rows, shape.k, shape.n, shape.groups
  x, dy, w = draw(m, k), draw(m, n), draw(e, k, n)
  sizes = draw(e, dtype=jnp.int32)
  compile_(grouped.grouped_matmul, x, w, sizes)
  compile_(
    lambda dy, w, sizes: grouped.grouped_matmul(dy, w, sizes, transpose=True),
    dy,
    w,
    sizes,
  )
  compile_(grouped.weight_gradient, x, dy, sizes)


@pytest.mark.parametrize('kept', [False, True])
def test_token_logprob(draw, kept):
  t, d, v = 1000, 7168, 163840
  compile_(
    token_logprob.statistics,
    draw(t, d),
    draw(d, v),
    draw(t, dtype=jnp.int32),
    draw(t, dtype=jnp.float32),
    draw(t, -(-v // 32), dtype=jnp.uint32) if kept else None,
  )


@pytest.mark.parametrize('depth', [7168, 576])
def test_norm(draw, depth):
  compile_(
    lambda x, scale: norm.rms_norm(x, scale, 1e-6),
    draw(1000, depth),
    draw(depth),
  )


@pytest.mark.parametrize(
  ('h', 'g', 'key', 'width'),
  [(9, 3, 64, 64), (4, 4, 192, 128), (64, 1, 576, 512)],
)
def test_attention(draw, h, g, key, width):
  t = 1024
  q, k, dout = draw(t, h, key), draw(t, g, key), draw(t, h, width)
  v = None if width == 512 else draw(t, g, width)
  bound, row = draw(t, dtype=jnp.int32), draw(t, h, dtype=jnp.float32)
  sizes = dict(block=64, width=width, scale=0.1)
  compile_(lambda *a: attention.forward(*a, **sizes), *(q, k, v, bound, bound))
  compile_(
    lambda *a: attention.backward(*a, **sizes),
    *(q, k, v, bound, bound, row, row, dout),
  )


@pytest.mark.parametrize(
  ('queries', 'h', 'g', 'key', 'width'),
  [(1, 64, 1, 576, 512), (256, 32, 4, 128, 128)],
)
def test_paged_attention(draw, queries, h, g, key, width):
  v = None if width == 512 else draw(64, 64, g, width)
  compile_(
    lambda *a: paged_attention.forward(*a, width=width, scale=0.1),
    draw(8, queries, h, key),
    draw(64, 64, g, key),
    v,
    draw(8, 16, dtype=jnp.int32),
    draw(8, queries, dtype=jnp.int32),
  )


@pytest.mark.parametrize('dtype', [jnp.uint8, jnp.uint16, jnp.uint32])
def test_delta(draw, dtype):
  words = draw(2**20, dtype=dtype)
  compile_(lambda a, b: delta.compact(a, b, 10000), words, words)


@pytest.mark.parametrize('shape', route_shapes.TRAINING)
def test_route(draw, shape):
  router = dataclasses.replace(shape.router, plausibility=0.5)
  compile_(
    lambda z, b, r: route.route(z, b, r, router),
    draw(1000, shape.experts, dtype=jnp.float32),
    draw(shape.experts, dtype=jnp.float32),
    draw(1000, shape.k, dtype=jnp.int16),
  )
  compile_(
    lambda experts: route.order(experts, shape.experts),
    draw(1000, shape.k, dtype=jnp.int32),
  )


def test_quantize(draw):
  x = draw(1000, 7168)
  for form in (
    lambda x: quantize.nvfp4(x, True),
    quantize.mxfp8,
    quantize.fp8,
  ):
    compile_(form, x)


def test_packed_weights(draw):
  e, k, n = 48, 7168, 2048
  e4m3 = jnp.float8_e4m3fn
  for codes, scale in (
    (draw(e, k // 2, n, dtype=jnp.uint8), draw(e, k // 16, n, dtype=e4m3)),
    (
      draw(e, k, n, dtype=e4m3),
      draw(e, k // 128, n // 128, dtype=jnp.float32),
    ),
  ):
    compile_(
      tpu_packed.grouped_matmul,
      draw(64, k),
      codes,
      scale,
      draw(e, dtype=jnp.int32),
    )
