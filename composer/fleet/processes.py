"""The trainer as several processes (`jax.distributed`).

Process 0 decides, publishes and writes the run's directory; the others compute
with it and learn its decisions from `share`. Everything here is a collective:
every process calls it, in the same order. With one process it costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
import json
import os
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib

COORDINATOR = 'COMPOSER_COORDINATOR'  # host:port of process 0
PROCESS = 'COMPOSER_PROCESS'  # 0, 1, ..., fleet.trainer_processes - 1
JOIN_S = 120  # for all processes to start
SILENCE_S = 30  # after which a process is taken for dead, and all end


def join(experiment: config_lib.Experiment, role: str) -> None:
  """Joins the trainer's processes, if it is to have several.

  Call it before anything else of jax.

  Raises:
    ValueError: another role, or nothing says which process this is.
  """
  count = experiment.fleet.trainer_processes
  if count == 1 or role not in ('all', 'trainer'):
    return
  if role == 'all':
    raise ValueError(
      f'fleet.trainer_processes={count} needs --role trainer in {count}'
      ' processes, and --role rollout in others; --role all is one process'
    )
  coordinator, process = os.environ.get(COORDINATOR), os.environ.get(PROCESS)
  if not coordinator or process not in map(str, range(count)):
    raise ValueError(
      f'fleet.trainer_processes={count}, but {COORDINATOR}={coordinator!r} and'
      f' {PROCESS}={process!r}; set them to HOST:PORT of process 0 and to the'
      f' number of this process, 0 to {count - 1}'
    )
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(
    coordinator,
    count,
    int(process),
    initialization_timeout=JOIN_S,
    heartbeat_timeout_seconds=SILENCE_S,
  )


def leads() -> bool:
  """Whether this is process 0."""
  return jax.process_index() == 0


def share(value: Any) -> Any:
  """Process 0's `value` (JSON-able), in every process."""
  if jax.process_count() == 1:
    return value
  blob = json.dumps(value).encode() if leads() else b''
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(blob))))
  data = np.zeros(size, np.uint8)
  if leads():
    data[:] = np.frombuffer(blob, np.uint8)
  return json.loads(bytes(multihost_utils.broadcast_one_to_all(data)))


def any_of(flag: bool) -> bool:
  """Whether the flag is set in any process."""
  if jax.process_count() == 1:
    return flag
  return bool(multihost_utils.process_allgather(np.bool_(flag)).any())


def place(tree: Any, shardings: Any) -> Any:
  """Arrays, equal in every process, laid out over the devices of all of them."""
  if jax.process_count() == 1:
    return jax.device_put(tree, shardings)

  def put(leaf, sharding):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
      data = put(jax.random.key_data(leaf), sharding)
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if not leaf.is_fully_addressable:
      return jax.device_put(leaf, sharding)
    value = np.asarray(leaf)
    return jax.make_array_from_callback(
      value.shape, sharding, lambda at: value[at]
    )

  return jax.tree.map(put, tree, shardings)


def lead_first(act: Callable[[], None]) -> None:
  """Process 0 acts; what it refuses is refused in every process."""
  failure: ValueError | OSError | None = None
  if leads():
    try:
      act()
    except (ValueError, OSError) as error:
      failure = error
  text = share(None if failure is None else str(failure))
  if failure is not None:
    raise failure
  if text is not None:
    raise ValueError(text)
