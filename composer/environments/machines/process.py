"""The `process` driver: the same interface without any isolation.

For trusted code, where namespaces are forbidden or do not exist: a program can
read the host's files, use its network and outlive its machine by leaving its
session (on Linux it is found and killed). Limits hold for each process where the
system has them. It is never chosen by default, and says so when it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
import warnings

from composer.config import MachineConfig
from composer.environments.machines import zygote as zygote_lib
from composer.environments.machines.machine import MachineError

_warned: list[bool] = []  # once a process


class NoIsolation(UserWarning):
  """Programs of the model run with the rights of this user."""


def launch(
  config: MachineConfig, harness: Mapping[str, str]
) -> zygote_lib.Zygote:
  """A zygote that is a plain process; arguments as for namespaces."""
  if not _warned:
    _warned.append(True)
    warnings.warn(
      'machine.driver=process: programs written by the model run as this user,'
      ' with its files and its network. For trusted code only.',
      NoIsolation,
      stacklevel=2,
    )
  settings = {
    'driver': 'process',
    'harness': dict(harness),
    'scratch': zygote_lib.scratch(),
    'memory_mb': config.memory_mb,
    'processes': config.processes,
    'disk_mb': config.disk_mb,
    'output_bytes': config.output_bytes,
    'cpu_s': config.exec_cpu_s,
    'image': '',
  }
  try:
    return zygote_lib.launch(settings, config.start_timeout_s)
  except zygote_lib.Missing as error:
    raise MachineError(str(error)) from error


def provenance(
  config: MachineConfig, facts: Mapping[str, Any]
) -> dict[str, Any]:
  """What a trajectory records."""
  return {
    'driver': 'process',
    'isolation': 'none',
    'python': facts['python'],
    'limits': {
      'memory_mb': config.memory_mb,
      'memory': 'each process by rlimit, where the system has it',
      'file_mb': config.disk_mb,
      'output_bytes': config.output_bytes,
      'exec_timeout_s': config.exec_timeout_s,
      'exec_cpu_s': config.exec_cpu_s,
    },
  }
