"""What changed between two sets of weights, as bytes. Pure, lossless, checked.

    encode(base, new) -> bytes        apply(base, blob) -> new

Both sides are flat dicts, name -> numpy array of one of `DTYPES` (packed FP4
and INT4 travel as uint8). The result is bit-equal to `new` always: arrays are
treated as words, never as numbers, so negative zeros and every NaN pattern
survive. Nothing is returned before the result's digest has been checked.

Format, version 1 (all integers little-endian, H and the sizes in bytes)

    0         8   magic: b'CMPDELT' and the format's version as one byte
    8         4   H, length of the header
    12        H   header, JSON in UTF-8 (below)
    12+H      .   the streams, back to back, in the order that the header lists
    end-16   16   xxh3_128 (canonical, big-endian) of all bytes before it

Tensors are sorted by name (code points) and grouped by the width of an element
in bytes (1, 2, 4 or 8). The tensors of one width, flattened in C order and
concatenated, form one array of unsigned words; a bucket is a contiguous range
of it (at most `BUCKET_WORDS`), and buckets are coded independently.

Header fields: `tree` (hex xxh3_128 of the compact JSON [[name, dtype, shape],
...] sorted by name), `base` and `result` (`digest` of the weights before and
after), `values` ('step' or 'overwrite') and `buckets`, each an object of

    width, start, words    the range [start, start + words) of that width
    changed                n, how many words differ
    coding                 'same', 'gaps', 'mask' or 'dense'
    streams                [[raw, stored], ...]: size decoded and size here.
                           stored = raw: the bytes themselves; stored = 0: raw
                           zero bytes; else one zstd frame of raw bytes.

Positions of the n changed words, ascending p_0 < p_1 < ...:
    gaps   stream 0 holds g_k = p_k - p_(k-1) - 1 (with p_(-1) = -1) as
           g_k // 255 bytes of 255 and one byte g_k % 255. Hence p_k = k + the
           sum of all bytes up to the k-th one that is not 255.
    mask   stream 0 holds one bit a word, first word in the lowest bit.
    dense  no stream: every word of the bucket is coded.
    same   no streams at all: nothing changed.

Values follow as `width` streams, one for each byte of a code, lowest first:
    step       d = new - base mod 2^w, as a signed w-bit number; its code is
               zigzag(d) = 2d if d >= 0 else -2d - 1: small steps, small codes.
    overwrite  the new word. Larger, but idempotent: it may be applied to any
               mixture of base and new (an apply that was interrupted) and gives
               new. The base's digest is then not required to match; the
               result's is.

`digest` of weights is xxh3_128 over, for each tensor by name, the tensor's own
xxh3_128 and its [name, dtype, shape] as compact JSON; so hosts that hold
different tensors can each report theirs. The digests find accidents; they are
no protection against a forger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import concurrent.futures
import dataclasses
import json
import os
from typing import Any

import ml_dtypes
import numpy as np
import xxhash
import zstandard

Flat = Mapping[str, np.ndarray]

MAGIC = b'CMPDELT'
FORMAT = 1
BUCKET_WORDS = 1 << 22
# Nearly all gain is zstd's Huffman coding of literals: higher levels cost 5x the
# time for < 5 %, and short matches make small alphabets larger.
_ZSTD = zstandard.ZstdCompressionParameters.from_level(1, min_match=7)

_PREFIX = len(MAGIC) + 1 + 4
_DIGEST_BYTES = 16
_VALUES = ('step', 'overwrite')
# Changed shares between which both codings of positions are tried; below,
# gaps win and above, the mask (measured on bf16 steps).
_TRY_MASK_FROM = 0.04
_TRY_GAPS_UP_TO = 0.3
_TRY_DENSE_FROM = 0.5

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
  """One contiguous range of the words of one width; see the module."""

  width: int
  start: int
  words: int
  changed: int
  coding: str
  streams: tuple[tuple[int, int], ...]  # (raw, stored) bytes


@dataclasses.dataclass(frozen=True)
class Header:
  """What a blob says of itself."""

  tree: str
  base: str
  result: str
  values: str
  buckets: tuple[Bucket, ...]

  @property
  def changed(self) -> int:
    """Words that differ."""
    return sum(bucket.changed for bucket in self.buckets)

  @property
  def words(self) -> int:
    return sum(bucket.words for bucket in self.buckets)


def encode(base: Flat, new: Flat, *, values: str = 'step') -> bytes:
  """Codes `new` given `base`.

  Args:
    base: what the reader holds.
    new: what the reader is to hold; same names, dtypes and shapes.
    values: 'step' (smallest) or 'overwrite' (idempotent).

  Raises:
    ValueError: the trees differ (the first difference is named), an array has a
      dtype outside `DTYPES`, or `values` is unknown.
  """
  if values not in _VALUES:
    raise ValueError(f'values={values!r} is unknown; use one of {_VALUES}')
  tree = describe(base)
  check_same_tree(tree, describe(new))
  base_words, new_words = _words(base), _words(new)

  def code(span: _Span) -> tuple[Bucket, list[bytes]]:
    return _encode_bucket(
      span, _gather(base_words, span), _gather(new_words, span), values
    )

  spans = _spans(tree)
  coded = _map(code, spans, sum(span.words for span in spans))
  header = Header(
    tree=tree_digest(tree),
    base=digest(base),
    result=digest(new),
    values=values,
    buckets=tuple(bucket for bucket, _ in coded),
  )
  text = json.dumps(dataclasses.asdict(header), separators=(',', ':')).encode()
  parts = [MAGIC, bytes([FORMAT]), len(text).to_bytes(4, 'little'), text]
  for _, streams in coded:
    parts.extend(streams)
  body = b''.join(parts)
  return body + xxhash.xxh3_128_digest(body)


def apply(base: Flat, blob: bytes) -> dict[str, np.ndarray]:
  """Returns the weights that `blob` was made for, bit for bit.

  `base` is not touched. The arrays returned are read-only views of one fused
  buffer a width. Applying a blob to its own result returns that result.

  Raises:
    ValueError: the blob is damaged, truncated or of a newer format, `base` has
      another tree or other bits than the blob was made for, or the result is
      not what it should be. Nothing is returned then.
  """
  header, payload = _open(blob)
  tree = describe(base)
  if tree_digest(tree) != header.tree:
    raise ValueError(
      f'the delta was made for a tree with digest {header.tree}, the base has'
      f' {tree_digest(tree)}: its names, dtypes or shapes differ; start from a'
      ' full base of the same model'
    )
  held = digest(base)
  if held == header.result:
    return dict(base)
  if held != header.base and header.values != 'overwrite':
    raise ValueError(
      f'wrong base: the delta was made for digest {header.base}, the base has'
      f' {held}; apply the versions between them or start from a full base'
    )
  result = _scatter(base, tree, header, payload)
  if (got := digest(result)) != header.result:
    raise ValueError(
      f'the delta gave digest {got} instead of {header.result}; the blob does'
      ' not belong to this base'
    )
  return result


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


def tree_digest(tree: list[list[Any]]) -> str:
  """Hex digest of what `describe` returned."""
  text = json.dumps(tree, separators=(',', ':'))
  return xxhash.xxh3_128_hexdigest(text.encode())


def tensor_digests(flat: Flat) -> dict[str, str]:
  """Hex digest of every tensor's bytes."""
  return {
    name: xxhash.xxh3_128_hexdigest(words)
    for name, words in _words(flat).items()
  }


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


@dataclasses.dataclass(frozen=True)
class _Span:
  """A bucket before coding: `pieces` are (name, first word, end word)."""

  width: int
  start: int
  words: int
  pieces: tuple[tuple[str, int, int], ...]


def _spans(tree: list[list[Any]]) -> list[_Span]:
  """Cuts the concatenation of each width into ranges of `BUCKET_WORDS`."""
  spans = []
  for width in (1, 2, 4, 8):
    start, held, pieces = 0, 0, []
    for name, dtype, shape in tree:
      if DTYPES[dtype].itemsize != width:
        continue
      size = int(np.prod(shape, dtype=np.int64))
      low = 0
      while low < size:
        high = min(size, low + BUCKET_WORDS - held)
        pieces.append((name, low, high))
        held += high - low
        low = high
        if held == BUCKET_WORDS:
          spans.append(_Span(width, start, held, tuple(pieces)))
          start, held, pieces = start + held, 0, []
    if held:
      spans.append(_Span(width, start, held, tuple(pieces)))
  return spans


def _words(flat: Flat) -> dict[str, np.ndarray]:
  """Every tensor as a flat array of unsigned words."""
  return {
    name: np.ascontiguousarray(array).reshape(-1).view(f'u{array.itemsize}')
    for name, array in flat.items()
  }


def _gather(words: Mapping[str, np.ndarray], span: _Span) -> np.ndarray:
  pieces = [words[name][low:high] for name, low, high in span.pieces]
  return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def _encode_bucket(
  span: _Span, base: np.ndarray, new: np.ndarray, values: str
) -> tuple[Bucket, list[bytes]]:
  """Codes one bucket in the smallest of the codings worth trying."""
  differs = base != new  # [words]
  positions = np.flatnonzero(differs)
  changed = len(positions)
  candidates: list[tuple[str, list[tuple[int, bytes]]]] = []
  if changed == 0:
    candidates.append(('same', []))
  else:
    share = changed / span.words
    planes = _pack_planes(_codes(base[positions], new[positions], values))
    if share < _TRY_GAPS_UP_TO:
      candidates.append(('gaps', [_pack(_gaps(positions)), *planes]))
    if share >= _TRY_MASK_FROM:
      bits = np.packbits(differs, bitorder='little')
      candidates.append(('mask', [_pack(bits), *planes]))
    if share >= _TRY_DENSE_FROM:
      candidates.append(('dense', _pack_planes(_codes(base, new, values))))
  coding, streams = min(
    candidates, key=lambda item: sum(len(stored) for _, stored in item[1])
  )
  bucket = Bucket(
    width=span.width,
    start=span.start,
    words=span.words,
    changed=changed,
    coding=coding,
    streams=tuple((raw, len(stored)) for raw, stored in streams),
  )
  return bucket, [stored for _, stored in streams]


def _codes(base: np.ndarray, new: np.ndarray, values: str) -> np.ndarray:
  """Value codes of words, as words."""
  if values == 'overwrite':
    return new
  step = (new - base).view(f'i{new.itemsize}')  # wraps modulo 2^w
  return ((step << 1) ^ (step >> (8 * new.itemsize - 1))).view(new.dtype)


def _undo_codes(base: np.ndarray, codes: np.ndarray, values: str) -> np.ndarray:
  if values == 'overwrite':
    return codes
  one = codes.dtype.type(1)
  step = (codes >> one) ^ (~(codes & one) + one)  # unsigned; wraps
  return base + step


def _gaps(positions: np.ndarray) -> np.ndarray:
  """uint8 codes of the gaps between ascending positions."""
  gaps = np.diff(positions, prepend=-1) - 1
  last = np.cumsum(gaps // 255 + 1) - 1  # index of each gap's last byte
  coded = np.full(last[-1] + 1, 255, np.uint8)
  coded[last] = gaps % 255
  return coded


def _undo_gaps(coded: np.ndarray) -> np.ndarray:
  ends = np.flatnonzero(coded != 255)
  return np.cumsum(coded, dtype=np.int64)[ends] + np.arange(len(ends))


def _pack_planes(codes: np.ndarray) -> list[tuple[int, bytes]]:
  width = codes.itemsize
  rows = codes.view(np.uint8).reshape(-1, width)
  return [_pack(rows[:, plane]) for plane in range(width)]


def _pack(raw: np.ndarray) -> tuple[int, bytes]:
  """(size, stored form) of a stream of bytes; see `streams` in the module."""
  if not raw.any():
    return len(raw), b''
  data = raw.tobytes()
  packed = zstandard.ZstdCompressor(compression_params=_ZSTD).compress(data)
  return len(data), packed if len(packed) < len(data) else data


def _unpack(raw: int, stored: bytes | memoryview) -> np.ndarray:
  if not stored:
    return np.zeros(raw, np.uint8)
  if len(stored) == raw:
    return np.frombuffer(stored, np.uint8)
  try:
    # Checked first: the frame's own size would decide what is allocated.
    if zstandard.frame_content_size(stored) != raw:
      raise ValueError(f'a stream does not decode to the {raw} bytes it should')
    data = zstandard.ZstdDecompressor().decompress(stored)
  except zstandard.ZstdError as error:
    raise ValueError(
      f'a stream of the delta does not decode: {error}'
    ) from error
  return np.frombuffer(data, np.uint8)


def _scatter(
  base: Flat, tree: list[list[Any]], header: Header, payload: memoryview
) -> dict[str, np.ndarray]:
  """Decodes every bucket into one new buffer a width; views of it by name."""
  spans = _spans(tree)
  if [(s.width, s.start, s.words) for s in spans] != [
    (b.width, b.start, b.words) for b in header.buckets
  ]:
    raise ValueError('the buckets of the delta do not tile the base')
  totals: dict[int, int] = {}
  jobs, offset = [], 0
  for span, bucket in zip(spans, header.buckets, strict=True):
    totals[span.width] = span.start + span.words
    jobs.append((span, bucket, offset))
    offset += sum(stored for _, stored in bucket.streams)
  if offset != len(payload):
    raise ValueError(
      f'the delta lists {offset} bytes of streams and holds {len(payload)}'
    )
  words = _words(base)
  out = {width: np.empty(total, f'u{width}') for width, total in totals.items()}

  def decode(job: tuple[_Span, Bucket, int]) -> None:
    span, bucket, at = job
    target = out[span.width][span.start : span.start + span.words]
    low = 0
    for name, start, end in span.pieces:
      target[low : low + end - start] = words[name][start:end]
      low += end - start
    _decode_bucket(bucket, header.values, payload[at:], target)

  _map(decode, jobs, header.words)
  return _views(tree, out)


def _decode_bucket(
  bucket: Bucket, values: str, payload: memoryview, target: np.ndarray
) -> None:
  """Turns `target`, which holds the base's words, into the result's."""
  streams, low = [], 0
  for raw, stored in bucket.streams:
    streams.append(_unpack(raw, payload[low : low + stored]))
    low += stored
  if bucket.coding == 'same':
    return
  count = bucket.words
  where: np.ndarray | slice = slice(None)
  if bucket.coding != 'dense':
    count = bucket.changed
    where = _positions(bucket, streams.pop(0))
  if [len(plane) for plane in streams] != [count] * bucket.width:
    raise ValueError('the values of a bucket do not fit it')
  codes = np.empty((count, bucket.width), np.uint8)
  for plane, stream in enumerate(streams):
    codes[:, plane] = stream
  words = codes.reshape(-1).view(target.dtype)
  target[where] = _undo_codes(target[where], words, values)


def _positions(bucket: Bucket, stream: np.ndarray) -> np.ndarray:
  """Positions of the changed words, int64 [changed], ascending."""
  if bucket.coding == 'gaps':
    where = _undo_gaps(stream)
  else:
    where = np.flatnonzero(np.unpackbits(stream, bitorder='little'))
  if len(where) != bucket.changed or (len(where) and where[-1] >= bucket.words):
    raise ValueError('the positions of a bucket do not fit it')
  return where


def _views(
  tree: list[list[Any]], out: Mapping[int, np.ndarray]
) -> dict[str, np.ndarray]:
  flat, offsets = {}, dict.fromkeys(out, 0)
  for buffer in out.values():
    buffer.flags.writeable = False
  for name, dtype_name, shape in tree:
    dtype = DTYPES[dtype_name]
    size = int(np.prod(shape, dtype=np.int64))
    if size == 0:
      flat[name] = np.empty(shape, dtype)
      continue
    low = offsets[dtype.itemsize]
    flat[name] = (
      out[dtype.itemsize][low : low + size].view(dtype).reshape(shape)
    )
    offsets[dtype.itemsize] = low + size
  return flat


def _open(blob: bytes) -> tuple[Header, memoryview]:
  """Checks the blob's own digest, then parses its header."""
  if len(blob) < _PREFIX + _DIGEST_BYTES or blob[: len(MAGIC)] != MAGIC:
    raise ValueError(
      f'not a weight delta, or cut short: {len(blob)} bytes that begin with'
      f' {bytes(blob[: len(MAGIC)])!r}'
    )
  view = memoryview(blob)
  body, tail = view[:-_DIGEST_BYTES], view[-_DIGEST_BYTES:]
  version = blob[len(MAGIC)]
  if version > FORMAT:
    raise ValueError(
      f'the delta has format {version}, this program reads up to {FORMAT};'
      ' update it (or the blob is damaged)'
    )
  if xxhash.xxh3_128_digest(body) != bytes(tail):
    raise ValueError(
      f'the delta of {len(blob)} bytes is damaged or cut short: its digest does'
      ' not match; fetch it again'
    )
  end = _PREFIX + int.from_bytes(blob[_PREFIX - 4 : _PREFIX], 'little')
  try:
    fields = json.loads(bytes(body[_PREFIX:end]))
    buckets = tuple(
      Bucket(**{**b, 'streams': tuple((r, s) for r, s in b['streams'])})
      for b in fields.pop('buckets')
    )
    header = Header(buckets=buckets, **fields)
  except (TypeError, KeyError, ValueError) as error:
    raise ValueError(
      f'the header of the delta is malformed: {error}'
    ) from error
  if header.values not in _VALUES:
    raise ValueError(f'values={header.values!r} is unknown to this version')
  for bucket in header.buckets:
    _check_bucket(bucket)
  return header, body[end:]


def _check_bucket(bucket: Bucket) -> None:
  """Bounds on every number, before anything is allocated by it."""
  numbers = [bucket.width, bucket.start, bucket.words, bucket.changed]
  for raw, stored in bucket.streams:
    numbers += [raw, stored]
    if not isinstance(raw, int) or raw > 2 * BUCKET_WORDS:
      raise ValueError(f'the delta lists a stream of {raw!r} bytes')
  if any(not isinstance(n, int) or n < 0 for n in numbers):
    raise ValueError(f'the delta has a malformed bucket: {bucket}')
  positions = {'same': 0, 'gaps': 1, 'mask': 1, 'dense': 0}
  if bucket.coding not in positions:
    raise ValueError(f'coding {bucket.coding!r} is unknown to this version')
  planes = 0 if bucket.coding == 'same' else bucket.width
  if len(bucket.streams) != positions[bucket.coding] + planes:
    raise ValueError(
      f'a bucket coded {bucket.coding!r} has {len(bucket.streams)} streams'
    )


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


def _map(function: Callable[[Any], Any], items: list[Any], words: int) -> list:
  """Over threads where it pays: numpy and zstd release the interpreter lock."""
  if words <= BUCKET_WORDS:
    return [function(item) for item in items]
  workers = min(len(items), os.cpu_count() or 1)
  with concurrent.futures.ThreadPoolExecutor(workers) as pool:
    return list(pool.map(function, items))
