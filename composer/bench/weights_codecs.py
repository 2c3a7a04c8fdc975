"""Sizes and rates of delta codecs on one pair of weights, and the entropies.

Every codec gives back the new weights, which is checked, or it has no row.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import importlib.util
import time
from typing import Any
import warnings

import numpy as np
import zstandard

from composer.bench.weights_inputs import Flat
from composer.weights import coding
from composer.weights import delta

ARC = ('arc_v2', 'arc_v3')


@dataclasses.dataclass(frozen=True)
class Measured:
  """One codec on one input. Rates are GB of model bytes a second; 0: not timed.

  `per_core` counts the time that the one thread computed, so that it does not
  depend on who else uses the machine; `in_all` is wall time on all cores.
  """

  bytes: int
  encode_per_core: float = 0.0
  apply_per_core: float = 0.0
  encode_in_all: float = 0.0
  apply_in_all: float = 0.0


@dataclasses.dataclass(frozen=True)
class Entropies:
  """Bytes. `alike` treats all weights of a dtype alike: the entropy of the mask
  and of the values (differences of words). `by_exponent` has both given the
  exponent (the class) of the base word."""

  changed: float  # share of words
  alike: float
  by_exponent: float


def entropies(base: Flat, new: Flat) -> Entropies:
  """Empirical ones, of float32 arrays too."""
  alike = by_class = 0.0
  changed = words = 0
  kinds = sorted({array.dtype.name for array in base.values()})
  for kind in kinds:
    names = [name for name in base if base[name].dtype.name == kind]
    total, moved, steps = _counts(kind, [(base[n], new[n]) for n in names])
    alike += _mask_bits(total.sum(), moved.sum()) + _value_bits(steps[:, 1])
    by_class += sum(map(_mask_bits, total, moved))
    for one in np.unique(steps[:, 0]):
      by_class += _value_bits(steps[steps[:, 0] == one, 1])
    changed, words = changed + int(moved.sum()), words + int(total.sum())
  return Entropies(changed / max(1, words), alike / 8, by_class / 8)


def _counts(kind: str, pairs) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """(words [C], changed [C], (class, step) of every changed word [n, 2])."""
  how = coding.kind_of(delta.DTYPES[kind])
  total = np.zeros(how.classes, np.int64)
  moved = np.zeros(how.classes, np.int64)
  steps = []
  for old, now in pairs:
    a = old.reshape(-1).view(f'u{how.width}')
    b = now.reshape(-1).view(f'u{how.width}')
    kinds = (a >> a.dtype.type(how.shift)) & a.dtype.type(how.classes - 1)
    total += np.bincount(kinds.astype(np.int32), minlength=how.classes)
    where = np.flatnonzero(a != b)
    kinds = kinds[where].astype(np.int64)
    moved += np.bincount(kinds, minlength=how.classes)
    step = (b[where] - a[where]).astype(np.int64)
    steps.append(np.stack([kinds, step], 1))
  return total, moved, np.concatenate(steps)


def _mask_bits(words: int, changed: int) -> float:
  if changed in (0, words):
    return 0.0
  p = changed / words
  return float(-words * (p * np.log2(p) + (1 - p) * np.log2(1 - p)))


def _value_bits(steps: np.ndarray) -> float:
  if len(steps) == 0:
    return 0.0
  _, counts = np.unique(steps, return_counts=True)
  return float(-(counts * np.log2(counts / counts.sum())).sum())


# --- Codecs ------------------------------------------------------------------


def size_of(flat: Flat) -> int:
  """Bytes of the arrays."""
  return sum(array.nbytes for array in flat.values())


def ours(base: Flat, new: Flat, repeats: int) -> Measured:
  """`composer.weights.delta`, digests and all."""
  size = size_of(base)
  blob = delta.encode(base, new)  # compiles what is not compiled yet
  out = {name: np.empty_like(array) for name, array in base.items()}
  got = delta.apply(base, blob, out=out)
  assert _same(got, new), 'a delta did not give the new weights'
  if not repeats:
    return Measured(len(blob))

  def rate(clock: Callable[[], float], act: Callable[[], Any]) -> float:
    return size / min(_time(clock, act) for _ in range(repeats)) / 1e9

  alone, wall = time.thread_time, time.perf_counter
  return Measured(
    len(blob),
    rate(alone, lambda: delta.encode(base, new, threads=1)),
    rate(alone, lambda: delta.apply(base, blob, out=out, threads=1)),
    rate(wall, lambda: delta.encode(base, new)),
    rate(wall, lambda: delta.apply(base, blob, out=out)),
  )


def zstd_xor(base: Flat, new: Flat, repeats: int) -> Measured:
  """zstd, level 1, on the exclusive or of the bytes; no digests."""
  packer = zstandard.ZstdCompressor(level=1)
  reader = zstandard.ZstdDecompressor()

  def encode(name: str) -> bytes:
    return packer.compress(_bytes(base[name]) ^ _bytes(new[name]))

  def apply(name: str, blob: bytes) -> np.ndarray:
    return _bytes(base[name]) ^ np.frombuffer(reader.decompress(blob), np.uint8)

  return _by_tensor(base, new, repeats, encode, apply, len)


def has_arc() -> bool:
  """Whether fireworks-delta-compression and its PyTorch are installed."""
  return all(
    importlib.util.find_spec(name) is not None
    for name in ('fireworks_delta_compression', 'torch')
  )


def arc(version: str, base: Flat, new: Flat, repeats: int) -> Measured:
  """A format of fireworks-delta-compression, tensor by tensor as it is used."""
  import fireworks_delta_compression
  import torch

  torch.set_num_threads(1)
  # It reads what it has just decompressed, and never writes there.
  warnings.filterwarnings('ignore', 'The given buffer is not writable')
  kinds = {'bfloat16': torch.bfloat16, 'float8_e4m3fn': torch.float8_e4m3fn}

  def tensor(array: np.ndarray) -> Any:
    kind = kinds.get(array.dtype.name)
    words = np.ascontiguousarray(array)
    if array.dtype.name == 'float8_e8m0fnu':  # scales: to it, bytes
      words = words.view(np.uint8)
    if kind is None:
      return torch.from_numpy(words.copy())
    signed = words.view(f'i{array.itemsize}').copy()
    return torch.from_numpy(signed).view(kind)

  old = {name: tensor(array) for name, array in base.items() if array.size}
  now = {name: tensor(array) for name, array in new.items() if array.size}

  def encode(name: str) -> Any:
    return fireworks_delta_compression.delta_compress(
      src=old[name], dst=now[name], compression_format=version
    )

  def apply(name: str, blob: Any) -> np.ndarray:
    got = fireworks_delta_compression.delta_decompress(
      src=old[name].clone(),
      compressed_diff=blob[0],
      checksum=blob[1],
      compression_format=version,
    )
    return got.contiguous().view(torch.uint8).reshape(-1).numpy()

  def size(blob: Any) -> int:
    return blob[0].numel() * blob[0].element_size()

  some = {name: base[name] for name in old}
  return _by_tensor(some, new, repeats, encode, apply, size)


def _by_tensor(base, new, repeats, encode, apply, size) -> Measured:
  blobs = {name: encode(name) for name in base}
  for name, blob in blobs.items():
    if not np.array_equal(apply(name, blob), _bytes(new[name])):
      raise ValueError(f'{name} did not come back')
  total = sum(map(size, blobs.values()))
  if not repeats:
    return Measured(total)
  clock = time.process_time  # its threads count too
  spent = min(
    _time(clock, lambda: [encode(name) for name in base])
    for _ in range(repeats)
  )
  back = min(
    _time(clock, lambda: [apply(name, blobs[name]) for name in base])
    for _ in range(repeats)
  )
  return Measured(
    total, size_of(base) / spent / 1e9, size_of(base) / back / 1e9
  )


def _bytes(array: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _same(a: Flat, b: Flat) -> bool:
  return all(np.array_equal(_bytes(a[name]), _bytes(b[name])) for name in b)


def _time(clock: Callable[[], float], act: Callable[[], Any]) -> float:
  started = clock()
  act()
  return clock() - started
