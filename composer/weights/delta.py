"""What changed between two sets of weights, as bytes. Pure, lossless, checked.

    encode(base, new) -> bytes        apply(base, blob) -> new
    encode_changes(base, changes) -> bytes

Both sides are flat dicts, name -> numpy array of one of `DTYPES` (packed FP4
and INT4 travel as uint8). The result is bit-equal to `new` always: arrays are
treated as words, never as numbers, so negative zeros and every NaN pattern
survive. Nothing is returned before the result's digest has been checked.

Whether an update moves a weight depends on the weight's own magnitude: an
update of some size moves a small weight and rounds away on a large one. Both
sides hold the base, so a change is coded under a rate for the exponent of its
base weight. This is smaller than what the entropy of mask and values allows to
a codec that treats all weights alike.

Format, version 3
=================

Integers are little-endian; varints are LEB128 (seven bits a byte, lowest first,
the highest bit set on all bytes but the last). `x >> y`, `//` round down.

    7   magic: b'CMPDELT'
    1   version of the format: 3
    1   values: 0 step, 1 overwrite
    4   the first bytes of the tree's digest
   16   digest of the base            16   digest of the result
    .   varint, number of buckets; for each one byte, its coding, and, where
        that is not 0, two varints: how many of its words changed, and the
        size of its payload
    .   the payloads, back to back
    8   xxh3_64 of all bytes before it

Digests are canonical (big-endian). JSON is compact and in ASCII; other
characters of a name are escaped, as four hex digits in lower case for each
unit of UTF-16. The tree is [[name, dtype, shape], ...], sorted by the code
points of the names; its digest is the xxh3_128 of its JSON. A tensor is cut,
flattened in C order, into pieces of 2^23 bytes (`PIECE_BYTES`), the last one
shorter; one without elements has none. Its digest is the xxh3_128 of the
xxh3_128 of its pieces. The digest of weights is the xxh3_128 over, for each
tensor by name, its digest and the JSON of its [name, dtype, shape]. The digests
find accidents; they are no protection against a forger.

Buckets hold whole pieces of one dtype: tensors in order of (dtype, name), a new
bucket where the dtype changes or the bucket would hold more than PIECE_BYTES.
Codings: 0 nothing changed, no payload; 1 sparse, below; 2 dense: the new words,
as planes of bytes (first byte of every word, then the second ...); 3 dense, in
one zstd frame. Dense payloads do not depend on the base.

The coder
---------
A sparse payload is one number, coded as an interval, written as bytes with the
highest first and without trailing zero bytes; a reader goes on with zeros. It
reads `code`, 64 bits, and starts with range = 2^64 - 1. Whenever range < 2^32
after an operation: range <<= 32, and code takes in four more bytes.

    part    of 2^28: r = range >> 28, v = code // r. Of the interval
            [start, end) that v lies in: code -= r start, range = r (end - start).
    bit     under a model with probability p of a one, in units of 2^-22:
            bound = (range >> 22) p; the bit is code < bound. One: range = bound.
            Zero: code -= bound, range -= bound. Then the model learns, with
            q = 2^22 for a one and 0 for a zero: p += ((q - p) rate) >> 16 with
            rate = 2^17 // (2 n + 3), kept within [32, 2^22 - 32], and then
            n += 1, up to 255.
    raw     of k bits, 16 at a time, then the rest, highest first: range >>= k,
            value = code // range, code -= range value.
    tree    of k bits, highest first: node = 1, and for each bit, under the
            model of the node, node = 2 node + bit.

Models start with p = 2^21 and n = 1 unless said otherwise.

The payload: a rate for each class of words, then the pieces in turn. All models
and the gain live through the bucket.

Classes are those of the base's words, w bits wide:

    dtype                     class                              of
    floats, e exponent and    exponent: word >> m, mod 2^e      2^e
      m mantissa bits         (float64: word >> 55, mod 2^8)
    uint8, int8, float8_e8m0fnu   the word                       256
    other integers            0                                  1
    any, values 1             0                                  1

    rates   for each class in order a tree of 8 bits, all with the same 256
            models (p = 2^21, n = 0): the rate minus that of the class before (0
            before the first), mod 256. A rate r < 70 is cold, with the hazard
            (4 + r mod 4) << (r // 4) a word, in units of 2^-20; 70 is hot.
    piece   a bit (one model in a bucket): whether anything in it changed. Where
            it did: its cold changes, then its hot words.

Cold changes. Were time to pass by the hazard of each cold word, changes would
be a Poisson process: 1 - e^-x of the gaps to the next change are shorter than
x. In integers, F(x) of 2^28 at hazard x in units of 2^-20: at multiples of 1/8,
x = s 2^17, s = 0 ... 32, T[s] = (2^40 - a[s]) >> 12 with a[0] = 2^40 and
a[s+1] = a - a // 8 + a // 128 - a // 3072 for a = a[s]; between, T[s] +
((T[s+1] - T[s]) (x mod 2^17) >> 17). Hazards are first scaled by the gain:
x = min(hazard gain >> 8, H) with H = 2^22 - 1.

From word i (at first 0) decode the v of a part. With P(j) = F(scaled sum of the
hazards of the cold words in [i, j)), and hot words passed over:

    a change    v < T[32]: the first cold word j with v < P(j + 1), if its
                scaled sum with j is below H. The part is [P(j), P(j + 1)). Its
                value follows. Go on at i = j + 1.
    a horizon   v >= T[32]: the first cold word j whose scaled sum with j is at
                least H. The part is [T[32], 2^28). Go on at i = j.
    the end     if there is no such j: the part is [P(end), 2^28).

After a change or a horizon: seen += 2^20 for a change; expected += the sum of
the hazards in [i, j), for a change with that of j; if seen + expected > 2^27
both are halved (>> 1); gain = ((seen + 2^23) << 8) // (expected + 2^23), kept
within [64, 1024]. After the end of a piece only expected += the sum. At the
start of a bucket seen = expected = 0 and gain = 256.

Hot words of the piece, in order: a bit, under the model of the class; where it
is one, a value.

Values, of a changed word with base word b:

    step        d = new - b mod 2^w; the models are those of b's class: first
                a bit, d >= 2^(w-1) (p = 2^21, n = 8), and then the size of d
                as a signed number, of k bits: for n = 1, 2 ... below w a bit,
                whether k > n (model n, p = 2^19, n = 1). Then the k - 1 bits
                below the highest: up to 4 (where w is 8, all) as a tree, its
                models those of k, the rest raw.
    uint8       a tree of 4 bits, the new high nibble, under 16 models for each
                high nibble of b; a tree of 4 bits, the new low nibble, under 16
                models for each of (whether the high one changed, low of b).
    values 1    the new word: a tree of 8 bits for its highest byte, one for the
                next if there is one, the rest raw.

With values 1 nothing depends on the base. The blob may be applied to any mixture
of base and new (an apply that was interrupted), and gives new.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import concurrent.futures
import dataclasses
import functools
import json
import os
from typing import Any

import ml_dtypes
import numpy as np
import xxhash

from composer.weights import coding
from composer.weights import compiled

Flat = Mapping[str, np.ndarray]
# Of some tensors: ascending positions in C order, and the words there now.
Changed = Mapping[str, tuple[np.ndarray, np.ndarray]]

MAGIC = b'CMPDELT'
FORMAT = 3
PIECE_BYTES = 1 << 23
_BLOCK_BYTES = 1 << 17  # compared and hashed while in the cache

_FIXED = len(MAGIC) + 2 + 4 + 16 + 16
_SUM_BYTES = 8
_VALUES = ('step', 'overwrite')

DTYPES: Mapping[str, np.dtype] = {
  np.dtype(kind).name: np.dtype(kind)
  for kind in (
    ml_dtypes.bfloat16,
    np.float16,
    np.float32,
    np.float64,
    np.int8,
    np.uint8,
    np.int16,
    np.uint16,
    np.int32,
    np.uint32,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float8_e4m3fnuz,
    ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz,
    ml_dtypes.float8_e8m0fnu,
  )
}


@dataclasses.dataclass(frozen=True)
class Bucket:
  """One bucket of a blob; see the module."""

  coding: int
  changed: int
  stored: int  # bytes


@dataclasses.dataclass(frozen=True)
class Header:
  """What a blob says of itself; digests in hex."""

  values: str
  tree: str  # of the digest, the first 8 digits
  base: str
  result: str
  buckets: tuple[Bucket, ...]

  @property
  def changed(self) -> int:
    """Words that differ."""
    return sum(bucket.changed for bucket in self.buckets)


def encode(
  base: Flat,
  new: Flat,
  *,
  changes: Changed | None = None,
  values: str = 'step',
  threads: int | None = None,
) -> bytes:
  """Codes `new` given `base`.

  Args:
    base: what the reader holds.
    new: what the reader is to hold; same names, dtypes and shapes.
    changes: of tensors of which it is known where they differ, because a device
      has found it; those are not compared. The bytes are the same.
    values: 'step' (smallest) or 'overwrite' (idempotent).
    threads: at most; None: one a core. The bytes do not depend on it.

  Raises:
    ValueError: the trees differ (the first difference is named), an array has a
      dtype outside `DTYPES`, `values` is unknown, or changes are malformed.
  """
  if values not in _VALUES:
    raise ValueError(f'values={values!r} is unknown; use one of {_VALUES}')
  tree = describe(base)
  check_same_tree(tree, describe(new))
  known = check_changes(base, changes or {})
  base_words, new_words = _words(base), _words(new)

  def code(span: _Span) -> tuple[coding.Coded, list[tuple[bytes, bytes]]]:
    pieces, found, digests = [], [], []
    for piece in span.pieces:
      old, now = piece.of(base_words), piece.of(new_words)
      if piece.name in known:
        where, both = _known(piece, known[piece.name], old, now), None
      else:
        where, *both = _compare(old, now)
      pieces.append((old, now))
      found.append(where)
      digests.append(tuple(both or map(xxhash.xxh3_128_digest, (old, now))))
    coded = coding.encode(span.kind, pieces, found, values == 'overwrite')
    return coded, digests

  spans = _spans(tree)
  done = _map(code, spans, threads)
  old, now = (
    _combine(tree, spans, [[pair[side] for pair in pairs] for _, pairs in done])
    for side in (0, 1)
  )
  return _seal(values, tree, old, now, [coded for coded, _ in done])


def encode_changes(
  base: Flat,
  changes: Changed,
  *,
  out: Flat | None = None,
  values: str = 'step',
  threads: int | None = None,
) -> bytes:
  """The bytes of `encode(base, new)`, from what changed alone.

  Args:
    base: what the reader holds.
    changes: of the tensors that change at all: integers [n], ascending, which
      of the flattened elements; and unsigned words [n], their new bits.
      Elements that keep their bits may be among them.
    out: writable arrays of the same tree, which become the new weights.
    values, threads: of `encode`.

  Raises:
    ValueError: as `encode`; `out` is not touched then.
  """
  new = patch(base, changes, out=out, threads=threads)
  return encode(base, new, changes=changes, values=values, threads=threads)


def patch(
  base: Flat,
  changes: Changed,
  *,
  out: Flat | None = None,
  threads: int | None = None,
) -> dict[str, np.ndarray]:
  """`base` with `changes`, in `out` or in new arrays (read-only)."""
  tree = describe(base)
  known = check_changes(base, changes)
  if out is None:
    result, target = _fresh(tree)
  else:
    result, target = dict(out), _writable(tree, base, out, False)
  words = _words(base)

  def fill(span: _Span) -> None:
    for piece in span.pieces:
      into = piece.of(target)
      np.copyto(into, piece.of(words))
      if piece.name in known:
        low, high, (positions, now) = _within(piece, known[piece.name])
        into[positions[low:high] - piece.low] = now[low:high]

  _map(fill, _spans(tree), threads)
  return result


def apply(
  base: Flat,
  blob: bytes,
  *,
  out: Flat | None = None,
  threads: int | None = None,
) -> dict[str, np.ndarray]:
  """Returns the weights that `blob` was made for, bit for bit.

  Applying a blob to its own result returns that result.

  Args:
    base: what `encode` was given, or the result; with values 'overwrite' any
      mixture of both. Not touched (but see `out`).
    blob: from `encode`.
    out: writable arrays of the same tree to write into, such as those of an
      older version: fresh memory costs more than the rest. With 'overwrite'
      they may be those of `base`; an apply in place that was interrupted is
      repeated. If this raises, they hold neither version. None: new arrays,
      read-only views of one buffer a dtype.
    threads: at most; None: one a core.

  Raises:
    ValueError: the blob is damaged, truncated or of another format, `base` has
      another tree or other bits than the blob was made for, or the result is
      not what it should be. Nothing is returned then.
  """
  header, payload = _open(blob)
  tree = describe(base)
  if tree_digest(tree)[:8] != header.tree:
    raise ValueError(
      f'the delta was made for a tree with digest {header.tree}..., the base has'
      f' {tree_digest(tree)}: its names, dtypes or shapes differ; start from a'
      ' full base of the same model'
    )
  overwrite = header.values == 'overwrite'
  if out is None:
    result, target = _fresh(tree)
  else:
    result, target = dict(out), _writable(tree, base, out, overwrite)
  problem = ''
  try:
    digests = _scatter(tree, header, payload, _words(base), target, threads)
    if digests == header.result:
      return result
  except ValueError as error:
    problem = str(error)
  # The base is only looked at now: of a good result, nobody needs to know it.
  held = digest(base)
  if held == header.result and out is None:
    return dict(base)
  if held != header.base and not overwrite:
    raise ValueError(
      f'wrong base: the delta was made for digest {header.base}, the base has'
      f' {held}; apply the versions between them or start from a full base'
    )
  raise ValueError(
    f'the delta does not give digest {header.result}: {problem or "wrong bits"};'
    ' it does not belong to this base'
  )


@functools.cache
def compile_for(dtype: str) -> None:
  """Compiles the loops for a dtype, or reads them from the disk's cache.

  Else the first delta of a process does it: some seconds of one core where it
  has never been done on this machine.
  """
  base = np.zeros(64, f'u{DTYPES[dtype].itemsize}')
  new = base.copy()
  new[1] = 1
  pair = [{'w': words.view(DTYPES[dtype])} for words in (base, new)]
  apply(pair[0], encode(*pair, threads=1), threads=1)


def count_changed(base: Flat, new: Flat) -> int:
  """Elements that differ in any bit (of equal trees)."""
  old = _words(base)
  return sum(
    int(np.count_nonzero(old[name] != words))
    for name, words in _words(new).items()
  )


def inspect(blob: bytes) -> Header:
  """Reads the header of an intact blob (ValueError otherwise)."""
  return _open(blob)[0]


# --- Trees and digests -------------------------------------------------------


def describe(flat: Flat) -> list[list[Any]]:
  """[[name, dtype, shape], ...] by name; refuses what cannot be coded."""
  tree = []
  for name in sorted(flat):
    array = flat[name]
    if not isinstance(array, np.ndarray):
      raise ValueError(
        f'{name!r} is a {type(array).__name__}, not a numpy array; convert it'
        ' with numpy.asarray first'
      )
    if DTYPES.get(array.dtype.name) != array.dtype:
      raise ValueError(
        f'{name!r} has dtype {array.dtype}; weights may be'
        f' {", ".join(DTYPES)} (pack 4-bit types into uint8)'
      )
    tree.append([name, array.dtype.name, list(array.shape)])
  return tree


def check_same_tree(base: list[list[Any]], new: list[list[Any]]) -> None:
  """ValueError that names the first difference of two descriptions."""
  if base == new:
    return
  old_by_name = {name: (dtype, shape) for name, dtype, shape in base}
  new_by_name = {name: (dtype, shape) for name, dtype, shape in new}
  missing = sorted(old_by_name.keys() - new_by_name.keys())[:3]
  added = sorted(new_by_name.keys() - old_by_name.keys())[:3]
  if missing or added:
    raise ValueError(
      f'base and new have different names: only the base has {missing}, only'
      f' new has {added}; publish a full base instead'
    )
  name = next(n for n in old_by_name if old_by_name[n] != new_by_name[n])
  raise ValueError(
    f'{name!r} is {old_by_name[name]} in the base and {new_by_name[name]} in'
    ' new (dtype, shape); publish a full base instead'
  )


def check_changes(
  base: Flat, changes: Changed
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Positions as int64 and their words; ValueError for what cannot be."""
  known = {}
  for name, (positions, words) in changes.items():
    if name not in base:
      raise ValueError(f'changes of {name!r}, which the base does not have')
    kind = np.dtype(f'u{base[name].itemsize}')
    if (
      positions.dtype.kind not in 'iu'
      or words.dtype != kind
      or positions.ndim != 1
      or positions.shape != words.shape
    ):
      raise ValueError(
        f'changes of {name!r} are {positions.dtype} {list(positions.shape)} and'
        f' {words.dtype} {list(words.shape)}; they must be integers [n] and'
        f' {kind} [n]'
      )
    at = positions.astype(np.int64)
    if at.size and (
      at[0] < 0 or at[-1] >= base[name].size or (np.diff(at) <= 0).any()
    ):
      raise ValueError(
        f'positions of changes of {name!r} must ascend within its'
        f' {base[name].size} elements'
      )
    known[name] = at, np.ascontiguousarray(words)
  return known


def tree_digest(tree: list[list[Any]]) -> str:
  """Hex digest of what `describe` returned."""
  text = json.dumps(tree, separators=(',', ':'))
  return xxhash.xxh3_128_hexdigest(text.encode())


def tensor_digests(flat: Flat) -> dict[str, str]:
  """Hex digest of every tensor's bytes."""
  tree, words = describe(flat), _words(flat)
  spans = _spans(tree)

  def hash_pieces(span: _Span) -> list[bytes]:
    return [xxhash.xxh3_128_digest(piece.of(words)) for piece in span.pieces]

  return _by_tensor(tree, spans, _map(hash_pieces, spans, None))


def combine_digests(tree: list[list[Any]], tensors: Mapping[str, str]) -> str:
  """`digest` of the whole from the digests of its tensors."""
  hasher = xxhash.xxh3_128()
  for entry in tree:
    hasher.update(bytes.fromhex(tensors[entry[0]]))
    hasher.update(json.dumps(entry, separators=(',', ':')).encode())
  return hasher.hexdigest()


def digest(flat: Flat) -> str:
  """Hex digest of names, dtypes, shapes and every bit."""
  return combine_digests(describe(flat), tensor_digests(flat))


def _by_tensor(tree, spans, digests) -> dict[str, str]:
  """Digests of tensors from those of the pieces of each span."""
  hashers = {name: xxhash.xxh3_128() for name, _, _ in tree}
  for span, found in zip(spans, digests, strict=True):
    for piece, part in zip(span.pieces, found, strict=True):
      hashers[piece.name].update(part)
  return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def _combine(tree, spans, digests) -> str:
  return combine_digests(tree, _by_tensor(tree, spans, digests))


# --- Buckets -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Piece:
  """Words [low, high) of a tensor."""

  name: str
  low: int
  high: int

  def of(self, words: Mapping[str, np.ndarray]) -> np.ndarray:
    return words[self.name][self.low : self.high]


@dataclasses.dataclass(frozen=True)
class _Span:
  """A bucket before coding."""

  kind: coding.Kind
  pieces: tuple[_Piece, ...]


def _spans(tree: list[list[Any]]) -> list[_Span]:
  """The buckets of a tree, in their order."""
  spans: list[_Span] = []
  held, before, pieces = 0, None, []
  for name, dtype, shape in sorted(
    tree, key=lambda entry: (entry[1], entry[0])
  ):
    width = DTYPES[dtype].itemsize
    size = int(np.prod(shape, dtype=np.int64))
    most = PIECE_BYTES // width
    for low in range(0, size, most):
      high = min(size, low + most)
      if pieces and (dtype != before or held + high - low > most):
        spans.append(_Span(coding.kind_of(DTYPES[before]), tuple(pieces)))
        held, pieces = 0, []
      pieces.append(_Piece(name, low, high))
      held, before = held + high - low, dtype
  if pieces:
    spans.append(_Span(coding.kind_of(DTYPES[before]), tuple(pieces)))
  return spans


def _words(flat: Flat) -> dict[str, np.ndarray]:
  """Every tensor as a flat, read-only array of unsigned words.

  All of them read-only: the loops are compiled for one sort of array.
  """
  words = {}
  for name, array in flat.items():
    view = np.ascontiguousarray(array).reshape(-1).view(f'u{array.itemsize}')
    view.flags.writeable = False
    words[name] = view
  return words


def _compare(
  base: np.ndarray, new: np.ndarray
) -> tuple[coding.Changes, bytes, bytes]:
  """(what differs, digest of base, digest of new) of one piece."""
  positions = np.empty(len(base) + 1, np.int32)
  values = np.empty(len(base) + 1, base.dtype)
  old, now = xxhash.xxh3_128(), xxhash.xxh3_128()
  block = _BLOCK_BYTES // base.itemsize
  n = 0
  for low in range(0, len(base), block):
    a, b = base[low : low + block], new[low : low + block]
    n += compiled.find_changes(a, b, low, positions[n:], values[n:])
    old.update(a)
    now.update(b)
  found = coding.Changes(positions[:n].copy(), values[:n].copy())
  return found, old.digest(), now.digest()


def _within(piece: _Piece, known: Any) -> tuple[int, int, Any]:
  """Which of the changes of a tensor lie in a piece of it."""
  low, high = np.searchsorted(known[0], (piece.low, piece.high))
  return int(low), int(high), known


def _known(
  piece: _Piece, known: Any, base: np.ndarray, new: np.ndarray
) -> coding.Changes:
  """Of a piece, without those that change nothing."""
  low, high, (positions, words) = _within(piece, known)
  positions = (positions[low:high] - piece.low).astype(np.int32)
  words = words[low:high]
  if not np.array_equal(new[positions], words):
    raise ValueError(f'new differs from the changes given of {piece.name!r}')
  differ = base[positions] != words
  return coding.Changes(positions[differ], words[differ])


def _scatter(tree, header, payload, words, target, threads) -> str:
  """Decodes every bucket into `target`; the digest of what came out."""
  spans = _spans(tree)
  if len(spans) != len(header.buckets):
    raise ValueError(
      f'it has {len(header.buckets)} buckets, and the base {len(spans)}'
    )
  jobs, low = [], 0
  for span, bucket in zip(spans, header.buckets, strict=True):
    part = payload[low : low + bucket.stored]
    jobs.append((span, coding.Coded(bucket.coding, bucket.changed, part)))
    low += bucket.stored

  def decode(job: tuple[_Span, coding.Coded]) -> list[bytes]:
    span, coded = job
    pieces = [piece.of(target) for piece in span.pieces]
    for piece, into in zip(span.pieces, pieces, strict=True):
      source = piece.of(words)
      if source.ctypes.data != into.ctypes.data:
        np.copyto(into, source)
    coding.apply(span.kind, coded, pieces, header.values == 'overwrite')
    return [xxhash.xxh3_128_digest(piece) for piece in pieces]

  return _combine(tree, spans, _map(decode, jobs, threads))


def _fresh(tree) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
  """(arrays, read-only; their words, writable), in one buffer a dtype."""
  totals: dict[str, int] = {}
  for _, dtype, shape in tree:
    size = int(np.prod(shape, dtype=np.int64))
    totals[dtype] = totals.get(dtype, 0) + size
  buffers = {
    dtype: np.empty(total, f'u{DTYPES[dtype].itemsize}')
    for dtype, total in totals.items()
  }
  arrays, words, offsets = {}, {}, dict.fromkeys(totals, 0)
  for name, dtype, shape in tree:
    low = offsets[dtype]
    offsets[dtype] = high = low + int(np.prod(shape, dtype=np.int64))
    words[name] = buffers[dtype][low:high]
    arrays[name] = words[name].view(DTYPES[dtype]).reshape(shape)
    arrays[name].flags.writeable = False
  return arrays, words


def _writable(tree, base, out, overwrite) -> dict[str, np.ndarray]:
  """The words of `out`; ValueError where it cannot take the result."""
  check_same_tree(tree, describe(out))
  words = {}
  for name, array in out.items():
    if not (array.flags.writeable and array.flags.c_contiguous):
      raise ValueError(f'out[{name!r}] is read-only or not contiguous')
    if not overwrite and np.shares_memory(array, base[name]):
      raise ValueError(
        f'out[{name!r}] is the base itself: only a delta encoded with'
        " values='overwrite' can be applied in place"
      )
    words[name] = array.reshape(-1).view(f'u{array.itemsize}')
  return words


def _map(
  function: Callable[[Any], Any], items: list[Any], threads: int | None
) -> list[Any]:
  """In order, over threads: the loops and the digests hold no lock."""
  workers = min(len(items), threads or os.cpu_count() or 1)
  if workers <= 1:
    return [function(item) for item in items]
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    return list(pool.map(function, items))


# --- The blob ----------------------------------------------------------------


def _seal(values, tree, base, result, buckets) -> bytes:
  parts = [MAGIC, bytes([FORMAT, _VALUES.index(values)])]
  parts += [bytes.fromhex(tree_digest(tree)[:8])]
  parts += [bytes.fromhex(base), bytes.fromhex(result), _varint(len(buckets))]
  for bucket in buckets:
    parts.append(bytes([bucket.coding]))
    if bucket.coding != coding.SAME:
      parts += [_varint(bucket.changed), _varint(len(bucket.payload))]
  body = b''.join([*parts, *(bucket.payload for bucket in buckets)])
  return body + xxhash.xxh3_64_digest(body)


def _varint(value: int) -> bytes:
  data = bytearray()
  while value > 127:
    data.append(value & 127 | 128)
    value >>= 7
  data.append(value)
  return bytes(data)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
  value = 0
  for k in range(9):
    if at >= len(data):
      break
    value |= (data[at] & 127) << (7 * k)
    at += 1
    if data[at - 1] < 128:
      return value, at
  raise ValueError('the header of the delta is malformed')


def _open(blob: bytes) -> tuple[Header, memoryview]:
  """Checks the blob's own digest, then parses its header."""
  if len(blob) < _FIXED + 1 + _SUM_BYTES or blob[: len(MAGIC)] != MAGIC:
    raise ValueError(
      f'not a weight delta, or cut short: {len(blob)} bytes that begin with'
      f' {bytes(blob[: len(MAGIC)])!r}'
    )
  view = memoryview(blob)
  body, tail = view[:-_SUM_BYTES], view[-_SUM_BYTES:]
  version = blob[len(MAGIC)]
  if version != FORMAT:
    raise ValueError(
      f'the delta has format {version}, this program reads {FORMAT}; update'
      ' the older side (or the blob is damaged)'
    )
  if xxhash.xxh3_64_digest(body) != bytes(tail):
    raise ValueError(
      f'the delta of {len(blob)} bytes is damaged or cut short: its digest does'
      ' not match; fetch it again'
    )
  at = len(MAGIC) + 1
  if blob[at] >= len(_VALUES):
    raise ValueError(f'values={blob[at]} are unknown to this version')
  digests = bytes(body[at + 1 : _FIXED]).hex()
  buckets, end = _read_buckets(body, _FIXED)
  if end + sum(bucket.stored for bucket in buckets) != len(body):
    raise ValueError('the payloads of the delta do not fit its header')
  header = Header(
    values=_VALUES[blob[at]],
    tree=digests[:8],
    base=digests[8:40],
    result=digests[40:],
    buckets=buckets,
  )
  return header, body[end:]


def _read_buckets(body: memoryview, at: int) -> tuple[tuple[Bucket, ...], int]:
  count, at = _read_varint(body, at)
  buckets = []
  for _ in range(min(count, len(body))):
    if at >= len(body) or body[at] > coding.ZSTD:
      raise ValueError('the header of the delta is malformed')
    how, changed, stored, at = body[at], 0, 0, at + 1
    if how != coding.SAME:
      changed, at = _read_varint(body, at)
      stored, at = _read_varint(body, at)
    buckets.append(Bucket(how, changed, stored))
  if len(buckets) != count:
    raise ValueError('the header of the delta is malformed')
  return tuple(buckets), at
