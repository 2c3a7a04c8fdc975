"""Kernels: ours against XLA's and others', each checked before it is timed."""

from __future__ import annotations

import pathlib

from pallas_kernels import bench


def run(
  json_path: pathlib.Path | None, only: str | None = None, resume: bool = False
) -> int:
  """Operations at their real shapes; 1 where ours is wrong.

  Args:
    json_path: file to write to.
    only: names of operations, with commas; None: all.
    resume: leave out what the file has.
  """
  names = None if only is None else [name.strip() for name in only.split(',')]
  return bench.run(names, json_path, resume=resume)
