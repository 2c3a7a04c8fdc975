"""What a conversion says while it works, and at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import pathlib
import sys
import time
from typing import TextIO

from composer import params as params_lib
from composer.model import transformer
from composer.model.checkpoints import sources
from composer.model.checkpoints import store

EVERY_S = 5.0  # between lines in a file
REDRAW_S = 0.2  # on a terminal


@contextlib.contextmanager
def progress(
  file: TextIO | None = None,
) -> Iterator[Callable[[int, int], None]]:
  """A `report` for `convert`: share, speed and time left, on stderr.

  On a terminal one line is kept up to date; elsewhere a line comes every few
  seconds, and none where the work takes less.
  """
  out = file or sys.stderr
  live = out.isatty()
  started = latest = time.monotonic()

  def report(done: int, total: int) -> None:
    nonlocal latest
    now = time.monotonic()
    if now - latest < (REDRAW_S if live else EVERY_S):
      return
    latest = now
    speed = done / max(now - started, 1e-9)
    left = round((total - done) / max(speed, 1.0))
    line = (
      f'{100 * done / max(total, 1):.0f} % of {total / 1e9:.2f} GB,'
      f' {speed / 1e6:.0f} MB/s, {left // 60}:{left % 60:02d} left'
    )
    out.write(f'\r\x1b[K{line}' if live else f'{line}\n')
    out.flush()

  try:
    yield report
  finally:
    if live:
      out.write('\r\x1b[K')
      out.flush()


def describe(source: sources.Source, destination: pathlib.Path) -> str:
  """One line about a conversion that is done."""
  count = params_lib.count(transformer.spec(source.config))
  size = sum(p.stat().st_size for p in destination.rglob('*') if p.is_file())
  ours = (destination / store.MODEL).is_file()
  layout = 'our layout' if ours else "Hugging Face's layout"
  files = ', '.join(sorted(source.files))
  return (
    f'{destination}: {count:,} parameters in {layout},'
    f' {size / 1e6:.1f} MB' + (f'; with {files}' if files else '')
  )
