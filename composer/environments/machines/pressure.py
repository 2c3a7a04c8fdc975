"""How hard pressed this host is, from /proc, and whether it can bear more."""

from __future__ import annotations

import re

RESERVE_MB = 256  # that the host keeps for itself, beside a new machine's own
AVERAGE = re.compile(r'some avg10=([0-9.]+)')


def available_mb() -> float:
  """Memory that new programs can have; infinite where the system does not say."""
  try:
    with open('/proc/meminfo') as file:
      for line in file:
        if line.startswith('MemAvailable:'):
          return int(line.split()[1]) / 1024
  except OSError:
    pass
  return float('inf')


def stalled(kind: str) -> float:
  """Percent of the last 10 s in which something waited for `cpu` or `memory`.

  0 where the kernel does not count it.
  """
  try:
    with open(f'/proc/pressure/{kind}') as file:
      found = AVERAGE.search(file.read())
  except OSError:
    found = None
  return float(found[1]) if found else 0.0


def bearable(memory_mb: float) -> bool:
  """Whether a machine of so much memory can be added."""
  return available_mb() >= memory_mb + RESERVE_MB
