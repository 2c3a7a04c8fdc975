"""Writes a model: ours or Hugging Face's, streamed, all or nothing.

The result is written beside its place (`DST.part`) and gets its name when it is
whole and on the disk; whatever ends the work before takes the part away.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import shutil
from typing import Any
import warnings

import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer.model import transformer
from composer.model.checkpoints import describing
from composer.model.checkpoints import names
from composer.model.checkpoints import rows
from composer.model.checkpoints import sources
from composer.model.checkpoints import store
from composer.model.checkpoints import tensors as tensors_lib
from composer.model.checkpoints import whole

Path = pathlib.Path
Report = Callable[[int, int], None]
FLOAT32 = np.dtype(np.float32)
DTYPES = {
  'float32': FLOAT32,
  'bfloat16': tensors_lib.DTYPES['BF16'],
  'float16': np.dtype(np.float16),
}
SHARD_BYTES = 5_000_000_000
WRITES = 2  # chunks on their way to the disk


def convert(
  where: str | Path | sources.Source,
  destination: str | Path,
  to: str | None = None,
  *,
  dtype: str | None = None,
  shard_bytes: int = SHARD_BYTES,
  report: Report = lambda done, total: None,
) -> sources.Source:
  """Reads a model of any kind and writes it as ours or as Hugging Face's.

  Memory does not grow with the model: at most a few chunks are held
  (`store.CHUNK` numbers each).

  Args:
    where: see `sources.open_source`; or what that gave.
    destination: directory that does not exist yet.
    to: 'ours' or 'hf'; None is hf of a model in our layout, else ours.
    dtype: of the parameters whose published form is narrower than float32;
      the router and its selection bias keep their precision. None keeps every
      dtype.
    shard_bytes: most of one file of Hugging Face's.
    report: gets (bytes written, bytes in all).

  Returns:
    the source, with what was skipped.

  Raises:
    ValueError: nothing was written; see `sources.open_source`.
    OSError: no room; nothing is left.
  """
  if to not in (None, *WRITERS):
    raise ValueError(f'unknown layout {to!r}; known: {", ".join(WRITERS)}')
  if dtype is not None and dtype not in DTYPES:
    raise ValueError(f'unknown dtype {dtype!r}; known: {", ".join(DTYPES)}')
  source = where
  if not isinstance(source, sources.Source):
    source = sources.open_source(where)
  if to is None:
    to = 'hf' if source.kind in ('ours', 'run') else 'ours'
  source = dataclasses.replace(source, dtypes=_wanted(source, dtype))
  check_vocabulary(source)
  if to == 'hf':  # refuses what has no place there
    describing.write(source.config, 'float32', source.carried)
  write(source, Path(destination), to, shard_bytes, report)
  return source


def write(
  source: sources.Source,
  destination: Path,
  to: str = 'ours',
  shard_bytes: int = SHARD_BYTES,
  report: Report = lambda done, total: None,
) -> None:
  """Writes an opened model under a name that does not exist yet."""
  total = sum(
    math.prod(spec.shape) * source.dtypes[name].itemsize
    for name, spec in params_lib.named(transformer.spec(source.config)).items()
  )
  counted = _Counted(total, report)
  with whole.directory(destination, total) as part:
    for name, file in source.files.items():
      if isinstance(file, bytes):
        (part / name).write_bytes(file)
      else:
        shutil.copyfile(file, part / name)
    WRITERS[to](source, part, shard_bytes, counted)
    store.synchronise(part)
  _warn_of_faults(source, counted)


def _wanted(source: sources.Source, dtype: str | None) -> dict[str, np.dtype]:
  if dtype is None:
    return dict(source.dtypes)
  spec = params_lib.named(transformer.spec(source.config))
  return {
    name: DTYPES[dtype]
    if np.dtype(spec[name].published).itemsize < 4 or dtype == 'float32'
    else kept
    for name, kept in source.dtypes.items()
  }


class _Counted:
  """Bytes written so far, and where values are no numbers."""

  def __init__(self, total: int, report: Report):
    self.total, self.done, self._report = total, 0, report
    self.suspects: set[tuple[str, tuple[int, ...]]] = set()

  def add(self, entry: names.Entry, box: names.Box, value: np.ndarray) -> None:
    if any(rows.non_finite(value)):
      for place in itertools.product(
        *(range(*span) for span in box[: entry.stacked])
      ):
        at = tuple(i - span[0] for i, span in zip(place, box, strict=False))
        if any(rows.non_finite(np.ascontiguousarray(value[at]))):
          self.suspects.add((entry.name, place))
    self.done += value.nbytes
    self._report(self.done, self.total)


def _warn_of_faults(source: sources.Source, counted: _Counted) -> None:
  """Names the tensors with NaN or infinite values, in their own names."""
  by_name = {entry.name: entry for entry in names.table(source.config)}
  found = []
  for name, place in sorted(counted.suspects):
    entry = by_name[name]
    for piece in entry.pieces:
      box = names.box_of(entry, piece, place, 0, piece.outer[0])
      nan, infinite = rows.non_finite(
        source.read(name, box, source.dtypes[name])
      )
      words = [w for w, is_so in (('NaN', nan), ('inf', infinite)) if is_so]
      if words:
        found.append(f'{entry.tensor(piece, place)} ({" and ".join(words)})')
  if found:
    warnings.warn(
      f'{source.where}: {len(found)} tensors have values that are no numbers:'
      f' {tensors_lib.listed(found)}',
      stacklevel=3,
    )


# --- ours --------------------------------------------------------------------


def _write_ours(source, part: Path, shard_bytes: int, counted: _Counted):
  entries = names.table(source.config)
  params = part / store.PARAMS
  params.mkdir()
  dtypes = {entry.name: source.dtypes[entry.name] for entry in entries}
  for entry in entries:
    dtype, chunk = dtypes[entry.name], store.chunk_shape(entry)
    array = store.create_array(params, entry.name, entry.shape, chunk, dtype)
    pending = collections.deque()
    for box in store.boxes(entry.shape, chunk):
      value = source.read(entry.name, box, dtype)
      counted.add(entry, box, value)
      if len(pending) >= WRITES:
        pending.popleft().result()
      at = tuple(slice(*span) for span in box)
      pending.append(
        array[at].write(value, can_reference_source_data_indefinitely=True)
      )
    while pending:
      pending.popleft().result()
  store.write_metadata(params, {entry.name: entry.shape for entry in entries})
  store.write_model(
    part,
    source.config,
    dtypes,
    source=source.where,
    skipped=source.skipped,
    carried=source.carried,
  )


# --- Hugging Face's ----------------------------------------------------------


def _write_huggingface(source, part: Path, shard_bytes: int, counted: _Counted):
  entries = names.table(source.config, interleaved=bool(source.config.kv_lora))
  outgoing = []
  for order, entry in enumerate(entries):
    for place in entry.places():
      for piece in entry.pieces:
        name = entry.tensor(piece, place)
        tensor = tensors_lib.Outgoing(
          name=name,
          dtype=source.dtypes[entry.name],
          shape=piece.shape,
          parts=_parts(source, entry, piece, place, counted),
        )
        outgoing.append((_layer(entry, place), order, place, tensor))
  # Layer by layer, as readers want them; the sort keeps gate before up.
  outgoing.sort(key=lambda x: x[:3])
  tensors_lib.write_directory(part, [x[-1] for x in outgoing], shard_bytes)
  common = collections.Counter(source.dtypes.values()).most_common(1)[0][0]
  document = describing.write(source.config, common.name, source.carried)
  text = json.dumps(document, indent=2) + '\n'
  (part / 'config.json').write_text(text, 'utf-8')


def _layer(entry: names.Entry, place: tuple[int, ...]) -> float:
  """The layer of a tensor; the embedding before all, the head after them."""
  if place:
    return entry.first_layer + place[0]
  return -1 if entry.name == 'embed' else math.inf


def _parts(source, entry, piece, place, counted):
  """The rows of one tensor, so many at a time that a chunk's numbers suffice."""
  n = piece.outer[0]
  step = n
  if piece.divisible:
    step = max(store.CHUNK // max(math.prod(piece.shape) // n, 1), 1)
  dtype = source.dtypes[entry.name]

  def parts() -> Iterator[np.ndarray]:
    for first in range(0, n, step):
      last = min(first + step, n)
      box = names.box_of(entry, piece, place, first, last)
      value = source.read(entry.name, box, dtype)
      lead = value.reshape(value.shape[entry.stacked :])
      if piece.pair is not None:
        lead = lead.take(0, axis=len(piece.inner))
      counted.add(entry, box, value)
      yield names.to_theirs(piece, lead)

  return parts


WRITERS = {'ours': _write_ours, 'hf': _write_huggingface}


# --- from memory -------------------------------------------------------------


def save(
  destination: str | Path,
  config: config_lib.ModelConfig,
  params: Any,
  *,
  to: str = 'ours',
  files: Mapping[str, Path | bytes] | None = None,
  carried: Mapping[str, Any] | None = None,
  source: str = '',
) -> None:
  """Writes a model that is in memory.

  Args:
    destination: directory that does not exist yet.
    config: of the model.
    params: arrays, nested as `transformer.spec` or flat by name
      ('layers/moe/gate_up'), of any float dtype; they keep it.
    to: 'ours' or 'hf'.
    files: name -> file or contents (tokenizer.json) to put beside.
    carried: fields of a `config.json`; see `architectures.CARRIED`.
    source: what `model.json` says of where it came from.

  Raises:
    ValueError: parameters are missing, surplus or of another shape, or
      Hugging Face's layout has no place for the model.
  """
  flat = params_lib.named(params)
  faults = store.shape_faults(flat, config)
  if faults:
    raise ValueError(
      'the parameters are not those of the configuration:'
      f' {tensors_lib.listed(faults)}'
    )

  @functools.lru_cache(maxsize=1)
  def host(name: str) -> np.ndarray:
    return np.asarray(flat[name])

  def read(name: str, box: names.Box, dtype: np.dtype) -> np.ndarray:
    at = tuple(slice(*span) for span in box)
    return host(name)[at].astype(dtype, copy=False)

  model = sources.Source(
    config=config,
    dtypes={name: np.dtype(value.dtype) for name, value in flat.items()},
    read=read,
    kind='memory',
    where=source or 'memory',
    files=dict(files or {}),
    carried=dict(carried or {}),
  )
  if to == 'hf':
    describing.write(config, 'float32', carried)
  write(model, Path(destination), to)


# --- checks ------------------------------------------------------------------


def check_vocabulary(source: sources.Source) -> None:
  """Refuses a tokenizer with ids beyond the embedding.

  Fewer are common: embeddings are padded.
  """
  file = source.files.get('tokenizer.json')
  if file is None:
    return
  try:
    data = file if isinstance(file, bytes) else file.read_bytes()
    document = json.loads(data)
    ids = list((document['model'].get('vocab') or {}).values())
    ids += [token['id'] for token in document.get('added_tokens') or ()]
    most = max(ids)
  except (ValueError, KeyError, TypeError, AttributeError):
    return  # no such format: the tokenizer says so where it is loaded
  if most >= source.config.vocab_size:
    raise ValueError(
      f'{source.where}: tokenizer.json has ids up to {most} and the embedding'
      f' {source.config.vocab_size} rows; the two are not of one model'
    )
