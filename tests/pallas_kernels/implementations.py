"""The implementations of an operation that run on a CPU."""

import pytest

# With a jax that can: `tests/conftest.py` skips them elsewhere.
needs_interpreter = pytest.mark.interpreted
NAMES = [
  'reference',
  'tpu_interpret',
  pytest.param('gpu_interpret', marks=needs_interpreter),
]
