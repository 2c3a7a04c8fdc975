"""Weights kept on a reader's own disk, so that a restart need not fetch a base.

    DIR/<form>/<version>-<fence>/index.json    what they are, and their digest
    DIR/<form>/<version>-<fence>/words         the tensors, one after the other

A version is written under another name and renamed, so that it is there whole or
not at all; then the one before it is removed. Nothing is believed that does not
have its digest: a disk that flipped a bit costs a base, no more.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import errno
import os
import pathlib
import shutil

import numpy as np

from composer.weights import delta
from composer.weights import pieces
from composer.weights import store
from composer.weights.store import BrokenWeights
from composer.weights.store import Ref

INDEX = 'index.json'
WORDS = 'words'
PART = '.part'


@dataclasses.dataclass(frozen=True)
class Kept:
  """One version, in the pieces that it was published in."""

  form: str
  ref: Ref
  flat: Mapping[str, np.ndarray]
  shapes: Mapping[str, pieces.Shape]


def before_step(path: pathlib.Path) -> None:
  """Called before every change of the disk; the seam for tests of faults."""
  del path


def save(directory: pathlib.Path, kept: Kept) -> None:
  """Keeps a version in place of the one before.

  Raises:
    OSError: the disk is full, or cannot be written; what was kept before stays.
  """
  folder = directory / kept.form
  target = folder / f'{kept.ref.version}-{kept.ref.fence}'
  part = target.with_name(target.name + PART)
  tree = delta.describe(dict(kept.flat))
  total = sum(array.nbytes for array in kept.flat.values())
  folder.mkdir(parents=True, exist_ok=True)
  _clear(folder, keep=_newest(folder))
  if shutil.disk_usage(folder).free < total:
    raise OSError(errno.ENOSPC, f'{total / 1e9:.2f} GB do not fit', str(target))
  index = {
    'format': store.FORMAT,
    'ref': dataclasses.asdict(kept.ref),
    'tree': tree,
    'shapes': dict(kept.shapes),
    'digest': delta.digest(dict(kept.flat)),
  }
  try:
    _write(part, tree, kept.flat, store.to_json(index))
    before_step(target)
    os.rename(part, target)
  except OSError:
    shutil.rmtree(part, ignore_errors=True)
    raise
  before_step(folder)
  _clear(folder, keep=target)


def _write(part, tree, flat, index: bytes) -> None:
  before_step(part)
  part.mkdir()
  with (part / WORDS).open('wb') as words:
    for name, _, _ in tree:
      before_step(part / WORDS)
      array = np.ascontiguousarray(flat[name])
      words.write(memoryview(array.reshape(-1).view(np.uint8)))
  before_step(part / INDEX)
  (part / INDEX).write_bytes(index)


def load(directory: pathlib.Path, form: str) -> Kept | None:
  """What was kept last, its digest checked; None where nothing was.

  The arrays are read-only views of the mapped file.

  Raises:
    BrokenWeights: what is there is damaged; it was removed.
    OSError: it cannot be read.
  """
  folder = directory / form
  newest = _newest(folder)
  if newest is None:
    return None
  try:
    text = (newest / INDEX).read_bytes()
    index = store.parse_json(text, str(newest / INDEX))
    flat = _map(newest / WORDS, index['tree'])
    if delta.digest(flat) != index['digest']:
      raise ValueError('its digest is another')
    shapes = {name: tuple(shape) for name, shape in index['shapes'].items()}
    return Kept(form, Ref(**index['ref']), flat, shapes)
  except (ValueError, KeyError, TypeError, FileNotFoundError) as error:
    shutil.rmtree(newest, ignore_errors=True)
    raise BrokenWeights(
      f'what was kept in {newest} is damaged ({error}) and was removed; the'
      ' newest base is fetched instead'
    ) from error


def _map(path: pathlib.Path, tree) -> dict[str, np.ndarray]:
  size = path.stat().st_size
  words = np.zeros(0, np.uint8)
  if size:
    words = np.memmap(path, np.uint8, 'r')
  flat, low = {}, 0
  for name, kind, shape in tree:
    dtype = delta.DTYPES[kind]
    high = low + int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    # Not a memmap, whose every operation looks at the file again.
    flat[name] = np.asarray(words[low:high]).view(dtype).reshape(shape)
    low = high
  if low != size:
    raise ValueError(f'it holds {size} bytes instead of {low}')
  return flat


def _newest(folder: pathlib.Path) -> pathlib.Path | None:
  found = []
  for path in folder.iterdir() if folder.is_dir() else ():
    version, _, fence = path.name.partition('-')
    if version.isdigit() and fence.isdigit():
      found.append((int(version), int(fence), path))
  return max(found)[2] if found else None


def _clear(folder: pathlib.Path, keep: pathlib.Path | None) -> None:
  """Removes other versions and what was left half written."""
  for path in folder.iterdir():
    if path != keep:
      shutil.rmtree(path, ignore_errors=True)
