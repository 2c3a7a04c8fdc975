"""The implementations of an operation that run on a CPU."""

from jax.experimental.pallas import mosaic_gpu as plgpu
import pytest

INTERPRETED = hasattr(plgpu, 'InterpretGPUParams')
needs_interpreter = pytest.mark.skipif(
  not INTERPRETED, reason='this jax cannot interpret Mosaic GPU kernels'
)
NAMES = [
  'reference',
  'tpu_interpret',
  pytest.param('gpu_interpret', marks=needs_interpreter),
]
