"""Files of tensors: safetensors, one or sharded, read by rows and streamed out.

A safetensors file is the length of a header (8 bytes), the header (JSON: name,
dtype, shape, start and end), and the bytes. Everything that a header promises
is compared with the file before a number is read. Rows are read where they lie,
not mapped: mapped pages would count as memory for as long as the file is open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import re
import struct
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

Path = pathlib.Path

DTYPES: dict[str, np.dtype] = {
  'F64': np.dtype('<f8'),
  'F32': np.dtype('<f4'),
  'F16': np.dtype('<f2'),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
  'F8_E5M2': np.dtype(ml_dtypes.float8_e5m2),
  'I64': np.dtype('<i8'),
  'I32': np.dtype('<i4'),
  'I16': np.dtype('<i2'),
  'I8': np.dtype('i1'),
  'U8': np.dtype('u1'),
  'BOOL': np.dtype('u1'),
}
TAGS = {dtype: tag for tag, dtype in DTYPES.items() if tag != 'BOOL'}
HEADER_BYTES = 100_000_000  # what the format allows
INDEX = 'model.safetensors.index.json'
SINGLE = 'model.safetensors'
_SHARD = re.compile(r'.+-(\d+)-of-(\d+)\.safetensors')


class Tensor(NamedTuple):
  """Where a tensor lies: `offset` bytes into the file at `path`."""

  path: Path
  dtype: np.dtype
  shape: tuple[int, ...]
  offset: int

  def rows(self, first: int, last: int) -> np.ndarray:
    """Rows [first, last), of all dimensions but the last; [rows, columns].

    A vector has as many rows as numbers.
    """
    columns = self.shape[-1] if len(self.shape) > 1 else 1
    start = self.offset + first * columns * self.dtype.itemsize
    count = (last - first) * columns
    return _read(self.path, self.dtype, start, count).reshape(-1, columns)

  def all(self) -> np.ndarray:
    count = math.prod(self.shape)
    return _read(self.path, self.dtype, self.offset, count).reshape(self.shape)


def _read(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
  size = count * dtype.itemsize
  data = np.fromfile(path, np.uint8, size, offset=offset)
  if data.size != size:
    raise ValueError(
      f'{path} ends {size - data.size} bytes early; it was cut or is being'
      ' written, get the file again'
    )
  return data.view(dtype)


# --- reading -----------------------------------------------------------------


def read_header(path: Path) -> dict[str, Tensor]:
  """Every tensor of a safetensors file.

  Raises:
    ValueError: no safetensors, a truncated one, an unknown dtype, or sizes that
      do not agree with shapes.
  """
  try:
    size = path.stat().st_size
    with path.open('rb') as file:
      length = int.from_bytes(file.read(8), 'little')
      if size < 8 or length > min(HEADER_BYTES, size - 8):
        raise ValueError(
          f'{path} is truncated, or no safetensors file: {size} bytes do not'
          f' hold a header of {length}; get the file again'
        )
      header = json.loads(file.read(length))
  except json.JSONDecodeError as error:
    raise ValueError(
      f'{path} is no safetensors file: its header is not JSON ({error}); get'
      ' the file again'
    ) from error
  except UnicodeDecodeError as error:
    raise ValueError(f'{path} is no safetensors file ({error})') from error
  if not isinstance(header, dict):
    raise ValueError(f'{path} is no safetensors file: its header is no object')
  header.pop('__metadata__', None)
  found = {n: _tensor(path, n, x, 8 + length) for n, x in header.items()}
  end = 8 + length
  for name, tensor in found.items():
    end = max(end, tensor.offset + _bytes(tensor))
    if tensor.offset + _bytes(tensor) > size:
      raise ValueError(
        f'{path} is truncated: {name} ends at byte'
        f' {tensor.offset + _bytes(tensor)} and the file has {size}; get the'
        ' file again'
      )
  if end != size:
    raise ValueError(
      f'{path} has {size - end} bytes that its header does not know; get the'
      ' file again'
    )
  return found


def _bytes(tensor: Tensor) -> int:
  return math.prod(tensor.shape) * tensor.dtype.itemsize


def _tensor(path: Path, name: str, about: Any, start: int) -> Tensor:
  try:
    tag, shape = about['dtype'], tuple(int(n) for n in about['shape'])
    first, last = (int(x) for x in about['data_offsets'])
  except (TypeError, KeyError, ValueError) as error:
    raise ValueError(
      f'{path}: the header does not describe {name} ({error}); get the file'
      ' again'
    ) from error
  if tag not in DTYPES:
    raise ValueError(
      f'{path}: {name} has dtype {tag!r}; known: {", ".join(DTYPES)}'
    )
  dtype = DTYPES[tag]
  if first < 0 or min(shape, default=0) < 0:
    raise ValueError(f'{path}: {name} has a negative offset or size')
  if last - first != math.prod(shape) * dtype.itemsize:
    raise ValueError(
      f'{path}: {name} has {last - first} bytes, and {tag} of shape'
      f' {list(shape)} takes {math.prod(shape) * dtype.itemsize}'
    )
  return Tensor(path, dtype, shape, start + first)


def read_directory(directory: Path) -> dict[str, Tensor]:
  """Every tensor of a directory, whether of one file or of an index and shards.

  Raises:
    ValueError: no safetensors there, an index that names absent shards or
      tensors, shards missing, or a fault of one file (`read_header`).
  """
  index = directory / INDEX
  if index.is_file():
    return _read_indexed(directory, index)
  files = sorted(directory.glob('*.safetensors'))
  if (directory / SINGLE).is_file():
    files = [directory / SINGLE]
  if not files:
    pickled = sorted(p.name for p in directory.glob('*.bin'))
    hint = (
      f'; {pickled[0]} is a pickle, which is never read: save the model again'
      ' with safe_serialization=True'
      if pickled
      else ''
    )
    raise ValueError(f'{directory} has no safetensors files{hint}')
  _require_all_shards(directory, files)
  found: dict[str, Tensor] = {}
  for path in files:
    for name, tensor in read_header(path).items():
      if name in found:
        raise ValueError(
          f'{name} is in {found[name].path.name} and in {path.name}; remove the'
          ' file that is of another model'
        )
      found[name] = tensor
  return found


def _read_indexed(directory: Path, index: Path) -> dict[str, Tensor]:
  try:
    where = json.loads(index.read_text('utf-8'))['weight_map']
    shards = sorted(set(where.values()))
    bad = [x for x in shards if pathlib.PurePath(x).name != x]
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f'{index} is no index of safetensors ({error!r}); get it again'
    ) from error
  if bad:
    raise ValueError(f'{index} names {bad[0]!r}, which is not in its directory')
  absent = [x for x in shards if not (directory / x).is_file()]
  if absent:
    raise ValueError(
      f'{index} names {len(absent)} of {len(shards)} files that are not there:'
      f' {listed(absent)}; get them too'
    )
  found = {}
  for shard in shards:
    there = read_header(directory / shard)
    wanted = [name for name, file in where.items() if file == shard]
    lost = [name for name in wanted if name not in there]
    if lost:
      raise ValueError(
        f'{index} places tensors in {shard} that are not in it:'
        f' {listed(lost)}; get both again'
      )
    found |= {name: there[name] for name in wanted}
  return found


def _require_all_shards(directory: Path, files: Sequence[Path]) -> None:
  """Without an index, the numbers in the names still say how many there are."""
  numbers = [_SHARD.fullmatch(path.name) for path in files]
  if any(numbers):
    of = max(int(match[2]) for match in numbers if match)
    have = {int(match[1]) for match in numbers if match}
    lost = [str(i) for i in range(1, of + 1) if i not in have]
    if lost:
      raise ValueError(
        f'{directory} lacks shards {listed(lost)} of {of}; get them too'
      )


def listed(names: Iterable[str], most: int = 8) -> str:
  """The first few names, and how many more there are."""
  names = list(names)
  more = f' and {len(names) - most} more' if len(names) > most else ''
  return ', '.join(names[:most]) + more


# --- writing -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Outgoing:
  """A tensor to write: its parts come in order, each as whole rows."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]
  parts: Callable[[], Iterator[np.ndarray]]

  @property
  def bytes(self) -> int:
    return math.prod(self.shape) * self.dtype.itemsize


def write_directory(
  directory: Path,
  tensors: Sequence[Outgoing],
  shard_bytes: int,
  report: Callable[[int], None] = lambda size: None,
) -> list[str]:
  """Streams tensors into one file, or into shards and an index.

  Args:
    directory: that exists.
    tensors: in the order in which they are written.
    shard_bytes: most of a file, but for a tensor that is larger alone.
    report: told of every part, in bytes.

  Returns:
    names of the files of tensors.
  """
  shards: list[list[Outgoing]] = [[]]
  filled = 0
  for tensor in tensors:
    if shards[-1] and filled + tensor.bytes > shard_bytes:
      shards.append([])
      filled = 0
    shards[-1].append(tensor)
    filled += tensor.bytes
  n = len(shards)
  names = [SINGLE]
  if n > 1:
    names = [f'model-{i + 1:05d}-of-{n:05d}.safetensors' for i in range(n)]
  for name, shard in zip(names, shards, strict=True):
    write_file(directory / name, shard, report)
  if n > 1:
    where = {
      tensor.name: name
      for name, shard in zip(names, shards, strict=True)
      for tensor in shard
    }
    total = sum(tensor.bytes for tensor in tensors)
    index = {'metadata': {'total_size': total}, 'weight_map': where}
    (directory / INDEX).write_text(json.dumps(index, indent=1), 'utf-8')
  return names


def write_file(
  path: Path,
  tensors: Sequence[Outgoing],
  report: Callable[[int], None] = lambda size: None,
  metadata: Mapping[str, str] | None = None,
) -> None:
  """Streams tensors into one safetensors file."""
  header: dict[str, Any] = {
    '__metadata__': {'format': 'pt', **(metadata or {})}
  }
  offset = 0
  for tensor in tensors:
    header[tensor.name] = {
      'dtype': TAGS[tensor.dtype],
      'shape': list(tensor.shape),
      'data_offsets': [offset, offset + tensor.bytes],
    }
    offset += tensor.bytes
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)
  with path.open('wb') as file:
    file.write(struct.pack('<Q', len(text)) + text)
    for tensor in tensors:
      written = 0
      for part in tensor.parts():
        assert part.dtype == tensor.dtype, (tensor.name, part.dtype)
        data = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
        file.write(data)
        written += data.size
        report(data.size)
      assert written == tensor.bytes, (tensor.name, written, tensor.bytes)
