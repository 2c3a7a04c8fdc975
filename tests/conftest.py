"""Before jax is imported: CPU, eight fake devices, strict promotion.

COMPOSER_TEST_PLATFORM=cuda runs on a GPU instead, for `pytest -m gpu`.

jax reads these from the environment when it is first imported, and so do the
processes that tests start.
"""

import os
import sys

assert 'jax' not in sys.modules, 'a pytest plugin imported jax too early'

os.environ['JAX_PLATFORMS'] = os.environ.get('COMPOSER_TEST_PLATFORM', 'cpu')
os.environ['JAX_NUMPY_RANK_PROMOTION'] = 'raise'
_DEVICES = '--xla_force_host_platform_device_count'
if _DEVICES not in os.environ.get('XLA_FLAGS', ''):
  os.environ['XLA_FLAGS'] = (
    f'{os.environ.get("XLA_FLAGS", "")} {_DEVICES}=8'
  ).strip()


def pytest_xdist_auto_num_workers(config) -> int:
  """Two processes for whole folders; one for files, and for a GPU."""
  whole = all('.py' not in argument for argument in config.args)
  return 2 if whole and os.environ['JAX_PLATFORMS'] == 'cpu' else 0
