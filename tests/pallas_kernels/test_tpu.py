"""TPU kernels compile ahead of time, where libtpu is installed."""

import importlib.util

import jax
from jax.experimental import topologies
import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_matmul import shapes
from pallas_kernels.grouped_matmul import tpu as grouped
from pallas_kernels.norm import tpu as norm
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


def test_token_logprob(draw):
  t, d, v = 1000, 7168, 163840
  compile_(
    token_logprob.statistics,
    draw(t, d),
    draw(d, v),
    draw(t, dtype=jnp.int32),
    draw(t, dtype=jnp.float32),
  )


@pytest.mark.parametrize('depth', [7168, 576])
def test_norm(draw, depth):
  compile_(
    lambda x, scale: norm.rms_norm(x, scale, 1e-6),
    draw(1000, depth),
    draw(depth),
  )
