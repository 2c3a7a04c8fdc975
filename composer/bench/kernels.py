"""Kernels: ours against XLA's and others', each checked before it is timed."""

from __future__ import annotations

import pathlib

from pallas_kernels import bench


def run(
  json_path: pathlib.Path | None,
  only: str | None = None,
  resume: bool = False,
  tune: pathlib.Path | None = None,
) -> int:
  """Operations at their real shapes; 1 where ours is wrong.

  Args:
    json_path: file to write to.
    only: names of operations, with commas; None: all.
    resume: leave out what the file has.
    tune: instead time candidates for the tunings, and write the best there.
  """
  names = None if only is None else [name.strip() for name in only.split(',')]
  if tune is not None:
    return bench.tune(tune, names, json_path, resume=resume)
  return bench.run(names, json_path, resume=resume)
