"""Before jax is imported: CPU, eight fake devices, strict promotion.

COMPOSER_TEST_PLATFORM=cuda runs on a GPU instead, for `pytest -m gpu`: in a process
a core, since what takes long there is compiling. A CPU is there beside it, for
callbacks, in which kernels are interpreted.

jax reads these from the environment when it is first imported, and so do the
processes that tests start.
"""

import os
import shutil
import sys
import tempfile

import pytest

assert 'jax' not in sys.modules, 'a pytest plugin imported jax too early'

_PLATFORM = os.environ.get('COMPOSER_TEST_PLATFORM', 'cpu')
os.environ['JAX_PLATFORMS'] = (
  _PLATFORM if 'cpu' in _PLATFORM.split(',') else f'{_PLATFORM},cpu'
)
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
# What one process of a run has compiled, the others read: most of what tests do on
# a CPU is compiling, and workers, and the commands that tests start, compile the same.
_CACHE = None
if _PLATFORM == 'cpu' and 'JAX_COMPILATION_CACHE_DIR' not in os.environ:
  _CACHE = tempfile.mkdtemp(prefix='composer-tests-')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.2'
  os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '0'
# Processes share a GPU.
os.environ.setdefault('XLA_PYTHON_CLIENT_PREALLOCATE', 'false')
_DEVICES = '--xla_force_host_platform_device_count'
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = (
    f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}=8'
  ).strip()


def pytest_xdist_auto_num_workers(config) -> int:
  """Two processes for whole folders, one for files; on a GPU up to twelve."""
  if os.environ['JAX_PLATFORMS'] != 'cpu':
    return min(12, os.cpu_count() or 1)
  return 2 if all('.py' not in argument for argument in config.args) else 0


def pytest_unconfigure() -> None:
  if _CACHE is not None:  # of the process that made it, the last to go
    shutil.rmtree(_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(items) -> None:
  """Skips what interprets kernels of GPUs where this jax cannot."""
  marked = [item for item in items if item.get_closest_marker('interpreted')]
  if not marked:
    return
  from jax.experimental.pallas import mosaic_gpu

  if not hasattr(mosaic_gpu, 'InterpretGPUParams'):
    why = 'this jax cannot interpret Mosaic GPU kernels'
    for item in marked:
      item.add_marker(pytest.mark.skip(reason=why))
