"""What a version consists of: a manifest, and a base or deltas.

A base is a zarr3 group with one array a parameter (zstd, crc32c), readable by
any zarr reader (types that zarr lacks, such as bfloat16, as unsigned words with
the attribute `dtype`); a delta is blobs of `delta`, each for some of the
tensors. The manifest names everything with its digest, and the manifest before
it with its digest, so that all that can be read hangs on HEAD.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import dataclasses
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from composer.weights import delta
from composer.weights import store
from composer.weights.store import BrokenWeights
from composer.weights.store import Ref

_CHUNK_BYTES = 64 << 20
_IN_FLIGHT_BYTES = 256 << 20
_CODECS = (
  {'name': 'bytes', 'configuration': {'endian': 'little'}},
  {'name': 'zstd', 'configuration': {'level': 1}},
  {'name': 'crc32c'},
)


class MissingManifest(BrokenWeights):
  """A manifest is not there: collected, or lost."""


@dataclasses.dataclass(frozen=True)
class Blob:
  """A delta of the tensors `names` (None: of all) at `key` of the version."""

  key: str
  bytes: int
  digest: str
  names: tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Manifest:
  """What a version consists of.

  Attributes:
    form, version, fence: which one it is.
    kind: 'base' (full) or 'delta' (against `previous`).
    previous: the version that HEAD named before, or None.
    tree: [[name, dtype, shape], ...] of a base; empty for a delta.
    tensors: digest of every tensor of a base; empty for a delta.
    tree_digest, digest: of the whole weights (`delta.tree_digest`,
      `delta.digest`).
    blobs: the deltas; empty for a base.
    bytes: written for this version, without the manifest.
    full_bytes: of the uncompressed weights.
    changed: words that differ from the previous version; -1 if unknown.
    words: elements of the weights.
    time: seconds since the epoch, for people.
  """

  form: str
  version: int
  fence: int
  kind: str
  previous: Ref | None
  tree: tuple[tuple[str, str, tuple[int, ...]], ...]
  tensors: Mapping[str, str]
  tree_digest: str
  digest: str
  blobs: tuple[Blob, ...]
  bytes: int
  full_bytes: int
  changed: int
  words: int
  time: float


def prefix_of(form: str, version: int, fence: int) -> str:
  """Where a version lives."""
  return f'weights/{form}/{version}-{fence}/'


def write_manifest(kv: ts.KvStore, manifest: Manifest) -> Ref:
  """Creates the manifest and names it."""
  text = store.to_json({'format': store.FORMAT, **dataclasses.asdict(manifest)})
  prefix = prefix_of(manifest.form, manifest.version, manifest.fence)
  store.create(kv, {prefix + 'manifest': text})
  return Ref(manifest.version, manifest.fence, xxhash.xxh3_128_hexdigest(text))


def read_manifest(kv: ts.KvStore, form: str, ref: Ref) -> Manifest:
  """Reads and verifies one manifest (BrokenWeights)."""
  key = prefix_of(form, ref.version, ref.fence) + 'manifest'
  text = store.read(kv, key)[0]
  if text is None:
    raise MissingManifest(f'{key} is missing; was it collected as too old?')
  if xxhash.xxh3_128_hexdigest(text) != ref.manifest:
    raise BrokenWeights(f'{key} is damaged: its digest is not {ref.manifest}')
  fields = store.parse_json(text, key)
  del fields['format']
  previous = fields.pop('previous')
  return Manifest(
    **fields
    | {
      'previous': None if previous is None else Ref(**previous),
      'tree': tuple((n, d, tuple(s)) for n, d, s in fields['tree']),
      'blobs': tuple(
        Blob(**b | {'names': b['names'] and tuple(b['names'])})
        for b in fields['blobs']
      ),
    }
  )


def lineage(
  kv: ts.KvStore, form: str, ref: Ref | None
) -> Iterator[tuple[Ref, Manifest]]:
  """`ref` and the versions before it, newest first, as far as they are kept.

  Ends where a base's predecessor was collected; raises BrokenWeights where a
  delta's is missing, or a manifest is damaged.
  """
  younger = None
  while ref is not None:
    try:
      manifest = read_manifest(kv, form, ref)
    except MissingManifest:
      if younger is not None and younger.kind == 'base':
        return
      raise
    yield ref, manifest
    younger, ref = manifest, manifest.previous


def write_base(
  kv: ts.KvStore, prefix: str, flat: Mapping[str, np.ndarray]
) -> int:
  """Writes a zarr3 array for every tensor below `prefix`; the bytes written.

  The arrays are encoded in memory and then created key by key: like everything
  under weights/ their keys are create-only, which a zarr driver cannot promise.
  """
  total = 0
  batch: dict[str, bytes] = {}
  held = 0
  for name, array in flat.items():
    for key, value in _zarr_objects(array).items():
      batch[f'{prefix}{name}/{key}'] = value
      held += len(value)
    if held > _IN_FLIGHT_BYTES:
      store.create(kv, batch)
      total, held, batch = total + held, 0, {}
  store.create(kv, batch)
  return total + held


def write_groups(kv: ts.KvStore, prefix: str, names: Iterable[str]) -> int:
  """Makes every folder of names below `prefix` a zarr3 group; the bytes."""
  folders = {''}
  for name in names:
    parts = name.split('/')
    folders |= {'/'.join(parts[:n]) + '/' for n in range(1, len(parts))}
  text = store.to_json(
    {'zarr_format': 3, 'node_type': 'group', 'attributes': {}}
  )
  store.create(kv, {f'{prefix}{folder}zarr.json': text for folder in folders})
  return len(text) * len(folders)


def _zarr_objects(array: np.ndarray) -> dict[str, bytes]:
  """Keys and bytes of one zarr3 array."""
  memory = ts.KvStore.open('memory://').result()
  target = ts.open(_zarr_spec(array), kvstore=memory, create=True).result()
  target.write(array.view(_stored_as(array.dtype))).result()
  found = sorted(key.decode() for key in memory.list().result())
  return {key: memory.read(key).result().value for key in found}


def _zarr_spec(array: np.ndarray) -> dict[str, Any]:
  """One chunk up to `_CHUNK_BYTES`, else chunks along the first axis."""
  chunk = [max(1, size) for size in array.shape]
  if array.nbytes > _CHUNK_BYTES and array.ndim:
    row = max(1, array.nbytes // array.shape[0])
    chunk[0] = max(1, _CHUNK_BYTES // row)
  return {
    'driver': 'zarr3',
    # Else a chunk of zeros is not written, and a lost one reads as zeros.
    'store_data_equal_to_fill_value': True,
    'metadata': {
      'shape': list(array.shape),
      'data_type': _stored_as(array.dtype).name,
      'attributes': {'dtype': array.dtype.name},
      'chunk_grid': {
        'name': 'regular',
        'configuration': {'chunk_shape': chunk},
      },
      'codecs': list(_CODECS),
    },
  }


def _stored_as(dtype: np.dtype) -> np.dtype:
  """Types outside zarr's core travel as words, their name as an attribute.

  zarr-python reads no bfloat16 (3.1); so `array[:].view('bfloat16')` it is.
  """
  return dtype if dtype.isbuiltin == 1 else np.dtype(f'u{dtype.itemsize}')


def check_name(name: str) -> None:
  parts = name.split('/')
  if any(part in ('', '.', '..', 'zarr.json') for part in parts):
    raise ValueError(
      f'parameter name {name!r} cannot be a path of the exchange; use names'
      " joined by single slashes, as in 'layers/attention/q'"
    )


def read_base(kv: ts.KvStore, manifest: Manifest) -> dict[str, np.ndarray]:
  """Reads a base and verifies every tensor (BrokenWeights)."""
  prefix = prefix_of(manifest.form, manifest.version, manifest.fence)
  opened = [
    ts.open(
      {'driver': 'zarr3'}, kvstore=kv / f'{prefix}base/{name}/', open=True
    )
    for name, _, _ in manifest.tree
  ]
  flat = {}
  try:
    reads = [
      store.await_result(future, prefix + 'base', 'opening').read()
      for future in opened
    ]
    for (name, kind, _), future in zip(manifest.tree, reads, strict=True):
      words = store.await_result(future, f'{prefix}base/{name}', 'reading')
      flat[name] = words.view(delta.DTYPES[kind])
      flat[name].flags.writeable = False
  except ValueError as error:
    raise BrokenWeights(f'the base {prefix} cannot be read: {error}') from error
  for name, got in delta.tensor_digests(flat).items():
    if got != manifest.tensors[name]:
      raise BrokenWeights(f'{prefix}base/{name} is damaged: wrong digest')
  if delta.digest(flat) != manifest.digest:
    raise BrokenWeights(f'the base {prefix} is not what its manifest describes')
  return flat


def load(
  kv: ts.KvStore, manifest: Manifest, held: Mapping[str, np.ndarray] | None
) -> dict[str, np.ndarray]:
  """The version's weights; a delta is applied to `held`, its predecessor's.

  Raises BrokenWeights, and returns nothing, unless the result is bit-equal to
  what was published.
  """
  if manifest.kind == 'base':
    return read_base(kv, manifest)
  assert held is not None, 'a delta needs the weights before it'
  prefix = prefix_of(manifest.form, manifest.version, manifest.fence)
  reads = [(blob, kv.read(prefix + blob.key)) for blob in manifest.blobs]
  flat: dict[str, np.ndarray] = {}
  for blob, future in reads:
    result = store.await_result(future, prefix + blob.key, 'reading')
    if result.state != 'value':
      raise BrokenWeights(f'{prefix}{blob.key} is missing')
    data = result.value
    if xxhash.xxh3_128_hexdigest(data) != blob.digest:
      raise BrokenWeights(f'{prefix}{blob.key} is damaged: wrong digest')
    part = held
    if blob.names is not None:
      part = {name: held[name] for name in blob.names if name in held}
    try:
      flat |= delta.apply(part, data)
    except ValueError as error:
      raise BrokenWeights(f'{prefix}{blob.key}: {error}') from error
  if delta.digest(flat) != manifest.digest:
    raise BrokenWeights(f'the deltas of {prefix} do not give its digest')
  return flat


def fetch(
  kv: ts.KvStore, form: str, version: int | None = None
) -> tuple[int, dict[str, np.ndarray]]:
  """Reconstructs a version (None: HEAD's) from its base and the deltas since.

  Raises:
    ValueError: no such version, it was collected, or (BrokenWeights) damaged.
  """
  head = store.read_head(kv, form)
  if head.ref is None:
    raise ValueError(f'the exchange holds no published version of {form!r}')
  version = head.ref.version if version is None else version
  chain: list[Manifest] = []
  oldest = newest = head.ref.version
  if version <= newest:
    for ref, manifest in lineage(kv, form, head.ref):
      oldest = ref.version
      if not chain and ref.version != version:
        continue
      chain.append(manifest)
      if manifest.kind == 'base':
        break
  if not chain:
    raise ValueError(
      f'version {version} of {form!r} is not in the exchange: its newest is'
      f' {newest}' + (f', its oldest {oldest}' if version < newest else '')
    )
  flat = None
  for manifest in reversed(chain):
    flat = load(kv, manifest, flat)
  assert flat is not None
  return version, flat
