"""What a version consists of: a manifest, and a base or deltas.

A base is a zarr3 group with one array a parameter (zstd, crc32c), readable by
any zarr reader (types that zarr lacks, such as bfloat16, as unsigned words with
the attribute `dtype`); a delta is blobs of `delta`, each for some of the
tensors. The manifest names everything with its digest, and the manifest before
it with its digest, so that all that can be read hangs on HEAD. Tensors that lie
over several hosts are `pieces`; below, a tensor may be such a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from composer.weights import delta
from composer.weights import pieces
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
    model: fields of the model's configuration, of a base; None if unknown.
    shapes: of the tensors that are in pieces.
    whole_digest: `delta.tree_digest` of the tensors with their pieces together:
      the same however they are sharded.
    groups: of a base, names that deltas will have in one blob: who reads one of
      them reads all.
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
  model: Mapping[str, Any] | None = None
  shapes: Mapping[str, tuple[int, ...]] = dataclasses.field(
    default_factory=dict
  )
  whole_digest: str = ''
  groups: tuple[tuple[str, ...], ...] = ()


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
  shapes = fields.pop('shapes', {})
  groups = fields.pop('groups', ())
  return Manifest(
    **fields
    | {
      'shapes': {name: tuple(shape) for name, shape in shapes.items()},
      'groups': tuple(tuple(group) for group in groups),
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
  kv: ts.KvStore,
  prefix: str,
  flat: Mapping[str, np.ndarray],
  shapes: Mapping[str, pieces.Shape] | None = None,
) -> int:
  """Writes a zarr3 array for every tensor below `prefix`; the bytes written.

  The arrays are encoded in memory and then created key by key: like everything
  under weights/ their keys are create-only, which a zarr driver cannot promise.
  Every host writes the chunks of its pieces, and the same description.
  """
  total = 0
  batch: dict[str, bytes] = {}
  held = 0
  for piece, array in flat.items():
    name, box = pieces.parse(piece)
    shape = array.shape if box is None else (shapes or {})[name]
    for key, value in _zarr_objects(array, shape, box).items():
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


def _zarr_objects(
  array: np.ndarray, shape: pieces.Shape, box: pieces.Box | None
) -> dict[str, bytes]:
  """Keys and bytes of one zarr3 array, or of what a piece is of it."""
  memory = ts.KvStore.open('memory://').result()
  spec = _zarr_spec(array, shape)
  target = ts.open(spec, kvstore=memory, create=True).result()
  if box is not None:
    target = target[tuple(slice(a, b) for a, b in box)]
  target.write(array.view(_stored_as(array.dtype))).result()
  found = sorted(key.decode() for key in memory.list().result())
  return {key: memory.read(key).result().value for key in found}


def _zarr_spec(array: np.ndarray, shape: pieces.Shape) -> dict[str, Any]:
  """One chunk up to `_CHUNK_BYTES`, else chunks along the first axis.

  Those of a tensor in pieces divide each piece.
  """
  chunk = [max(1, size) for size in array.shape]
  if array.nbytes > _CHUNK_BYTES and array.ndim:
    row = max(1, array.nbytes // array.shape[0])
    chunk[0] = max(1, _CHUNK_BYTES // row)
    if array.shape != tuple(shape):
      chunk[0] = next(n for n in range(chunk[0], 0, -1) if len(array) % n == 0)
  return {
    'driver': 'zarr3',
    # Else a chunk of zeros is not written, and a lost one reads as zeros.
    'store_data_equal_to_fill_value': True,
    'metadata': {
      'shape': list(shape),
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


def names_for(
  manifest: Manifest, wanted: Callable[[str], bool]
) -> frozenset[str]:
  """What must be read of a base to follow the wanted names through deltas."""
  groups = manifest.groups or (tuple(name for name, _, _ in manifest.tree),)
  found = frozenset(
    name for group in groups if any(map(wanted, group)) for name in group
  )
  if manifest.tree and not found:
    raise ValueError(
      f'none of the {len(manifest.tree)} pieces of {manifest.form} is wanted;'
      f' the first is {manifest.tree[0][0]!r}'
    )
  return found


def read_base(
  kv: ts.KvStore, manifest: Manifest, names: frozenset[str] | None = None
) -> dict[str, np.ndarray]:
  """Reads a base, or some of it, and verifies every tensor (BrokenWeights)."""
  prefix = prefix_of(manifest.form, manifest.version, manifest.fence)
  tree = [e for e in manifest.tree if names is None or e[0] in names]
  parsed = [pieces.parse(entry[0]) for entry in tree]
  opened = {
    name: ts.open(
      {'driver': 'zarr3'}, kvstore=kv / f'{prefix}base/{name}/', open=True
    )
    for name in dict.fromkeys(name for name, _ in parsed)
  }
  flat = {}
  try:
    arrays = {
      name: store.await_result(future, f'{prefix}base/{name}', 'opening')
      for name, future in opened.items()
    }
    reads = [_read_box(arrays[name], box) for name, box in parsed]
    for (piece, kind, _), future in zip(tree, reads, strict=True):
      words = store.await_result(future, f'{prefix}base/{piece}', 'reading')
      flat[piece] = words.view(delta.DTYPES[kind])
      flat[piece].flags.writeable = False
  except ValueError as error:
    raise BrokenWeights(f'the base {prefix} cannot be read: {error}') from error
  digests = delta.tensor_digests(flat)
  for name, got in digests.items():
    if got != manifest.tensors[name]:
      raise BrokenWeights(f'{prefix}base/{name} is damaged: wrong digest')
  if names is not None:
    return flat
  whole = delta.combine_digests(delta.describe(flat), digests)
  if whole != manifest.digest:
    raise BrokenWeights(f'the base {prefix} is not what its manifest describes')
  return flat


def _read_box(array: ts.TensorStore, box: pieces.Box | None) -> ts.Future:
  """Words of a box; an array of another shape than the manifest's is refused."""
  if box is not None:
    array = array[tuple(slice(a, b) for a, b in box)]
  return array.read()


def start(
  kv: ts.KvStore, manifest: Manifest, names: frozenset[str] | None = None
) -> list[ts.Future]:
  """Begins to read a delta's blobs, for `load`; nothing of a base."""
  prefix = prefix_of(manifest.form, manifest.version, manifest.fence)
  return [kv.read(prefix + blob.key) for blob in _blobs(manifest, names)]


def _blobs(manifest: Manifest, names: frozenset[str] | None) -> list[Blob]:
  """Those that have any of the names."""
  return [
    blob
    for blob in manifest.blobs
    if names is None or blob.names is None or not names.isdisjoint(blob.names)
  ]


def load(
  kv: ts.KvStore,
  manifest: Manifest,
  held: Mapping[str, np.ndarray] | None,
  reads: Sequence[ts.Future] | None = None,
  names: frozenset[str] | None = None,
) -> dict[str, np.ndarray]:
  """The version's weights; a delta is applied to `held`, its predecessor's.

  `reads` are those that `start` began; `names` (from `names_for`) are all that
  is read, None for everything. Weights are in the pieces that were
  published; `pieces.assemble` puts them together.

  Raises BrokenWeights, and returns nothing, unless the result is bit-equal to
  what was published.
  """
  if manifest.kind == 'base':
    return read_base(kv, manifest, names)
  assert held is not None, 'a delta needs the weights before it'
  prefix = prefix_of(manifest.form, manifest.version, manifest.fence)
  reads = start(kv, manifest, names) if reads is None else reads
  flat: dict[str, np.ndarray] = {}
  for blob, future in zip(_blobs(manifest, names), reads, strict=True):
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
  # A blob is what was published, by its digest; it says what it leads to, and
  # `delta.apply` has checked that. What is left is that none was left out.
  whole = flat.keys() == names
  if names is None:
    whole = delta.tree_digest(delta.describe(flat)) == manifest.tree_digest
  if not whole:
    raise BrokenWeights(f'the deltas of {prefix} do not make it whole')
  return flat


def chain(
  kv: ts.KvStore, form: str, version: int | None = None
) -> list[Manifest]:
  """A base and the deltas after it that lead to a version (None: HEAD's).

  Raises:
    ValueError: no such version, it was collected, or (BrokenWeights) damaged.
  """
  head = store.read_head(kv, form)
  if head.ref is None:
    raise ValueError(f'the exchange holds no published version of {form!r}')
  version = head.ref.version if version is None else version
  found: list[Manifest] = []
  oldest = newest = head.ref.version
  if version <= newest:
    for ref, manifest in lineage(kv, form, head.ref):
      oldest = ref.version
      if not found and ref.version != version:
        continue
      found.append(manifest)
      if manifest.kind == 'base':
        break
  if not found:
    raise ValueError(
      f'version {version} of {form!r} is not in the exchange: its newest is'
      f' {newest}' + (f', its oldest {oldest}' if version < newest else '')
    )
  return found[::-1]


def rebuild(
  kv: ts.KvStore,
  manifests: Sequence[Manifest],
  names: frozenset[str] | None = None,
) -> dict[str, np.ndarray]:
  """Weights at the end of a `chain`, in the pieces they were published in."""
  flat = None
  ahead = [start(kv, manifest, names) for manifest in manifests[:2]]
  for index, manifest in enumerate(manifests):
    if index + 2 < len(manifests):
      ahead.append(start(kv, manifests[index + 2], names))
    flat = load(kv, manifest, flat, ahead.pop(0), names)
  assert flat is not None
  return flat


def fetch(
  kv: ts.KvStore, form: str, version: int | None = None
) -> tuple[int, dict[str, np.ndarray]]:
  """Reconstructs a version (None: HEAD's) from its base and the deltas since.

  Raises:
    ValueError: no such version, it was collected, or (BrokenWeights) damaged.
  """
  manifests = chain(kv, form, version)
  flat = rebuild(kv, manifests)
  return manifests[-1].version, pieces.assemble(flat, manifests[0].shapes)
