"""Kernels: ours against XLA's and others', each checked before it is timed."""

from __future__ import annotations

import pathlib

from pallas_kernels import bench


def run(json_path: pathlib.Path | None) -> int:
  """All operations at their real shapes; 1 where ours is wrong."""
  return bench.run(json_path=json_path)
