"""A directory that is there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import errno
import fcntl
import os
import pathlib
import shutil

from composer.model.checkpoints import store

Path = pathlib.Path


@contextlib.contextmanager
def directory(destination: Path, total: int) -> Iterator[Path]:
  """A directory that takes its name when the block ends well.

  Folders above it that are missing are made, and stay.
  """
  if destination.exists() or destination.is_symlink():
    raise ValueError(
      f'{destination} exists already; remove it, or choose another name'
    )
  parent = destination.absolute().parent
  try:
    parent.mkdir(parents=True, exist_ok=True)
  except FileExistsError as error:
    raise ValueError(f'{parent} is no directory') from error
  except NotADirectoryError as error:
    raise ValueError(f'{parent}: a part of it is no directory') from error
  part = parent / f'{destination.name}.part'
  handle = _claim(part)
  try:
    free = shutil.disk_usage(parent).free
    if free < total // 2:  # weights compress, but never that far
      raise OSError(errno.ENOSPC, _no_room(destination, total, free))
    with _explained(destination, total):
      yield part
    os.rename(part, destination)
    store.synchronise_entry(parent)
  except BaseException:
    shutil.rmtree(part, ignore_errors=True)
    raise
  finally:
    os.close(handle)


def _claim(part: Path) -> int:
  """Makes the directory; what a process that died left there is removed.

  Returns:
    a locked handle of the directory.
  """
  for _ in range(2):
    part.mkdir(exist_ok=True)
    handle = os.open(part, os.O_RDONLY)
    try:
      fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      os.close(handle)
      raise ValueError(
        f'another process is writing {part}; wait for it, or choose another'
        ' name'
      ) from error
    if not any(part.iterdir()):
      return handle
    os.close(handle)
    shutil.rmtree(part)
  raise ValueError(f'{part} is not empty; remove it')


def _no_room(destination: Path, total: int, free: int) -> str:
  return (
    f'{destination} takes up to {total / 1e9:.2f} GB and {free / 1e9:.2f} GB'
    ' are free; nothing is left of it'
  )


@contextlib.contextmanager
def _explained(destination: Path, total: int) -> Iterator[None]:
  """A full disk is told as such, whichever library met it."""
  try:
    yield
  except (ValueError, OSError, RuntimeError) as error:
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if full or 'No space left' in str(error):
      free = shutil.disk_usage(destination.absolute().parent).free
      raise OSError(errno.ENOSPC, _no_room(destination, total, free)) from error
    raise
