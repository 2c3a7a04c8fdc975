"""Our own layout of a model: `model.json` and a tree of arrays in `params/`.

    DIR/model.json          format, configuration, dtype of every parameter,
                            where it came from, what was skipped
    DIR/params/_METADATA    names of the arrays, as Orbax writes them
    DIR/params/<a.b.c>/     one zarr3 array for each parameter, in chunks
    DIR/tokenizer.json ...  files that go with the model, if there are any

`params/` is what `orbax.checkpoint.PyTreeCheckpointHandler` saves with
`use_ocdbt=False, use_zarr3=True`, and Orbax restores it; what Orbax saved there,
in that layout or in its others, is read as well. Arrays are written chunk by
chunk, so that a stack of experts larger than memory is never held. A chunk has
one layer, and of that whole experts or whole outputs, and so many of them that
it stays under `CHUNK` numbers.

The parameters inside a run's checkpoint (`composer.checkpoint`) are arrays of
the same kind and are read in place.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import functools
import itertools
import json
import math
import os
import pathlib
import re
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

from composer import config as config_lib
from composer import params as params_lib
from composer.model import transformer
from composer.model.checkpoints import names

Path = pathlib.Path
MODEL = 'model.json'
PARAMS = 'params'
FORMAT = 1
CHUNK = 1 << 24  # numbers of a chunk
SMALL = 1 << 16  # stacks of layers smaller than this stay in one chunk
FLOATS = frozenset(
  np.dtype(x) for x in (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)
)


@dataclasses.dataclass(frozen=True)
class Tree:
  """A stored model, opened: `read` gives a box of a parameter."""

  path: Path
  config: config_lib.ModelConfig
  dtypes: dict[str, np.dtype]
  arrays: Mapping[str, ts.TensorStore]
  skipped: tuple[str, ...] = ()
  carried: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def read(self, name: str, box: names.Box, dtype: np.dtype) -> np.ndarray:
    at = tuple(slice(*span) for span in box)
    try:
      value = np.asarray(self.arrays[name][at].read().result())
    except ValueError as error:
      raise ValueError(
        f'{self.path}: {name} cannot be read ({error}); write the model again'
        ' from its source'
      ) from error
    return value.astype(dtype, copy=False)


# --- writing -----------------------------------------------------------------


def chunk_shape(entry: names.Entry) -> tuple[int, ...]:
  """Shape of the chunks of a parameter; see the top of this file."""
  shape, stacked = entry.shape, entry.stacked
  rest = shape[stacked:]
  unit = math.prod(rest)
  if unit > CHUNK:
    piece = entry.pieces[0]
    axis = stacked
    if piece.transposed:
      axis += len(piece.inner) + (piece.pair is not None)
    most = max(CHUNK // (unit // shape[axis]), 1)
    # Chunks of one size, as a mesh would cut the axis.
    n = -(-shape[axis] // -(-shape[axis] // most))
    chunk = (*[1] * stacked, *rest)
    return (*chunk[:axis], n, *chunk[axis + 1 :])
  if not stacked:
    return shape
  if math.prod(shape) <= SMALL:
    return shape
  group = max(min(CHUNK // unit, shape[stacked - 1]), 1)
  if stacked == 1:
    group = max(min(SMALL // unit, shape[0]), 1)
  return (*[1] * (stacked - 1), group, *rest)


def boxes(shape: tuple[int, ...], chunk: tuple[int, ...]):
  """The box of every chunk, in order."""
  steps = [range(0, n, c) for n, c in zip(shape, chunk, strict=True)]
  for start in itertools.product(*steps):
    yield tuple(
      (a, min(a + c, n)) for a, c, n in zip(start, chunk, shape, strict=True)
    )


def create_array(
  directory: Path, name: str, shape: tuple[int, ...], chunk, dtype: np.dtype
) -> ts.TensorStore:
  """A new zarr3 array, as Orbax lays it out; zstd, with a checksum a chunk."""
  path = directory / name.replace('/', '.')
  return ts.open(
    {
      'driver': 'zarr3',
      'kvstore': {'driver': 'file', 'path': f'{path}/'},
      'metadata': {
        'shape': list(shape),
        'chunk_grid': {
          'name': 'regular',
          'configuration': {'chunk_shape': list(chunk)},
        },
        'chunk_key_encoding': {'name': 'default'},
        'data_type': dtype.name,
        'codecs': [
          {'name': 'bytes', 'configuration': {'endian': 'little'}},
          {'name': 'zstd', 'configuration': {'level': 1}},
          {'name': 'crc32c'},
        ],
      },
      # A chunk of zeros is written like any other: absence means loss.
      'store_data_equal_to_fill_value': True,
    },
    create=True,
    context=_context(),
  ).result()


@functools.lru_cache(maxsize=1)
def _context() -> ts.Context:
  """Few copies at once; files are synchronised by `finish`, all together."""
  return ts.Context(
    {
      'data_copy_concurrency': {'limit': 2},
      'file_io_concurrency': {'limit': 4},
      'file_io_sync': False,
      'cache_pool': {'total_bytes_limit': 0},
    }
  )


@functools.lru_cache(maxsize=1)
def _reading() -> ts.Context:
  """A chunk that several tensors are cut from is decoded once."""
  return ts.Context({'cache_pool': {'total_bytes_limit': 1 << 28}})


def write_metadata(directory: Path, shapes: Mapping[str, tuple[int, ...]]):
  """`_METADATA` of a directory of arrays, from which Orbax knows the tree."""
  tree = {}
  for name, shape in shapes.items():
    parts = name.split('/')
    tree[str(tuple(parts))] = {
      'key_metadata': [{'key': part, 'key_type': 2} for part in parts],
      'value_metadata': {
        # Restored without a target they are numpy arrays, which need no device.
        'value_type': 'np.ndarray',
        'skip_deserialize': False,
        'write_shape': list(shape),
      },
    }
  document = {
    'tree_metadata': tree,
    'use_ocdbt': False,
    'use_zarr3': True,
    'store_array_data_equal_to_fill_value': True,
    'custom_metadata': None,
  }
  (directory / '_METADATA').write_text(json.dumps(document), 'utf-8')


def write_model(
  directory: Path,
  config: config_lib.ModelConfig,
  dtypes: Mapping[str, np.dtype],
  *,
  source: str,
  skipped: tuple[str, ...] = (),
  carried: Mapping[str, Any] | None = None,
) -> None:
  """`model.json`, which says what the arrays beside it are."""
  document = {
    'format': FORMAT,
    'source': source,
    'model': dataclasses.asdict(config),
    'dtypes': {name: dtype.name for name, dtype in dtypes.items()},
    'skipped': list(skipped),
    'carried': dict(carried or {}),
  }
  text = json.dumps(document, indent=1) + '\n'
  (directory / MODEL).write_text(text, 'utf-8')


def synchronise(directory: Path) -> None:
  """Has the disk hold everything under a directory before it gets its name."""
  for root, _, files in os.walk(directory):
    for name in [*files, '.']:
      synchronise_entry(Path(root, name))


def synchronise_entry(path: Path) -> None:
  """Has the disk hold one file, or the names in one directory."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


# --- reading -----------------------------------------------------------------


def open_model(directory: Path) -> Tree:
  """Opens a directory that `write_model` and its like wrote.

  Raises:
    ValueError: another format, or arrays that are not those of the model.
  """
  path = directory / MODEL
  try:
    document = json.loads(path.read_text('utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is not JSON: {error}') from error
  form = document.get('format') if isinstance(document, dict) else None
  if form != FORMAT:
    raise ValueError(
      f'{path} has format {form!r}, this version reads {FORMAT}; convert the'
      ' model again from its source'
    )
  config = config_lib.model_from_values(document.get('model'))
  arrays = open_arrays(directory / PARAMS)
  require_arrays(arrays, config, directory)
  return Tree(
    path=directory,
    config=config,
    dtypes={n: np.dtype(a.dtype.numpy_dtype) for n, a in arrays.items()},
    arrays=arrays,
    skipped=tuple(document.get('skipped') or ()),
    carried=document.get('carried') or {},
  )


def open_arrays(
  directory: Path, under: tuple[str, ...] = ()
) -> dict[str, ts.TensorStore]:
  """Opens the arrays of a tree that Orbax or this module wrote.

  Args:
    directory: with `_METADATA`.
    under: keys of the part of the tree that is wanted.
  """
  path = directory / '_METADATA'
  try:
    document = json.loads(path.read_text('utf-8'))
    trees = [
      tuple(str(key['key']) for key in value['key_metadata'])
      for value in document['tree_metadata'].values()
    ]
  except OSError as error:
    raise ValueError(
      f'{directory} is no tree of arrays: it has no _METADATA; convert the'
      ' model again'
    ) from error
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(f'{path} is broken ({error!r})') from error
  driver = 'zarr3' if document.get('use_zarr3') else 'zarr'
  # Where zeros are written too, a chunk that is not there is a loss.
  whole = bool(document.get('store_array_data_equal_to_fill_value'))
  opened = {}
  for keys in trees:
    if keys[: len(under)] == under:
      opened['/'.join(keys[len(under) :])] = ts.open(
        {
          'driver': driver,
          'kvstore': _kvstore(directory, '.'.join(keys), document),
          'fill_missing_data_reads': not whole,
        },
        open=True,
        read=True,
        context=_reading(),
      )
  return {name: _opened(name, x, directory) for name, x in opened.items()}


def _kvstore(directory: Path, name: str, document: Mapping[str, Any]):
  if not document.get('use_ocdbt'):
    return {'driver': 'file', 'path': f'{directory.resolve()}/{name}/'}
  return {
    'driver': 'ocdbt',
    'base': {'driver': 'file', 'path': f'{directory.resolve()}/'},
    'path': f'{name}/',
  }


def _opened(name: str, future: ts.Future, directory: Path) -> ts.TensorStore:
  try:
    return future.result()
  except ValueError as error:
    raise ValueError(
      f'{directory}: the array of {name} cannot be opened ({error}); convert'
      ' the model again'
    ) from error


def shape_faults(
  found: Mapping[str, Any], config: config_lib.ModelConfig
) -> list[str]:
  """What is missing, surplus or of another shape, in words."""
  spec = params_lib.named(transformer.spec(config))
  faults = [f'{name} is missing' for name in spec if name not in found]
  faults += [f'{name} is surplus' for name in found if name not in spec]
  faults += [
    f'{name} has shape {list(found[name].shape)}, expected {list(s.shape)}'
    for name, s in spec.items()
    if name in found and tuple(found[name].shape) != s.shape
  ]
  return faults


def require_arrays(
  arrays: Mapping[str, ts.TensorStore],
  config: config_lib.ModelConfig,
  where: Path,
) -> None:
  """Refuses arrays that are not those of the configuration."""
  faults = shape_faults(arrays, config)
  faults += [
    f'{name} has dtype {array.dtype.name}, expected floats'
    for name, array in arrays.items()
    if np.dtype(array.dtype.numpy_dtype) not in FLOATS
  ]
  if faults:
    more = f'; and {len(faults) - 8} more' if len(faults) > 8 else ''
    raise ValueError(
      f'{where} does not hold the arrays of its configuration:'
      f' {"; ".join(faults[:8])}{more}'
    )


# --- a run's checkpoint ------------------------------------------------------


def find_run(path: Path) -> Tree | None:
  """The newest parameters of a run: its workdir, a stage, or one checkpoint."""
  for stage in (path / 'checkpoints' / 'rl', path / 'checkpoints' / 'midtrain'):
    if newest(stage) is not None:
      path = stage
      break
  found = path if (path / 'state').is_dir() else newest(path)
  if found is None:
    return None
  extras = found / 'extras' / 'metadata'
  try:
    document = json.loads(extras.read_text('utf-8'))
    values = document['identity']['model']
  except (OSError, ValueError, KeyError, TypeError) as error:
    raise ValueError(
      f'{found} is no checkpoint of a run ({error!r}); name another'
    ) from error
  config = config_lib.model_from_values(values)
  arrays = open_arrays(found / 'state', under=('params',))
  require_arrays(arrays, config, found)
  dtypes = {n: np.dtype(a.dtype.numpy_dtype) for n, a in arrays.items()}
  return Tree(path=found, config=config, dtypes=dtypes, arrays=arrays)


def newest(directory: Path) -> Path | None:
  """The newest checkpoint in a directory of them."""
  found = []
  for path in directory.iterdir() if directory.is_dir() else ():
    match = re.fullmatch(r'(\d+)(?:\.(\d+))?', path.name)
    if match and (path / 'state').is_dir():
      found.append((int(match[1]), int(match[2] or 0), path))
  return max(found)[2] if found else None
