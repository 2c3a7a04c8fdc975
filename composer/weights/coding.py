"""Buckets of words to bytes and back: rates, contexts, and the compiled loops.

`composer.weights.delta` specifies the bytes. What is decided here, and is no
part of the format, is the rates that an encoder chooses for the classes.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses

import ml_dtypes
import numpy as np
import zstandard

from composer.weights import compiled

SAME, SPARSE, RAW, ZSTD = range(4)  # codings of a bucket
RATES = 70  # below: a rate; this one: word by word
# Beyond this share a bucket is also tried without a base.
_TRY_DENSE_FROM = 0.5
_SAMPLE = 32  # one block of 64 words in so many is looked at for the rates
_SAMPLE_FROM = 1 << 18  # words
_ZSTD_LEVEL = 1


@dataclasses.dataclass(frozen=True)
class Kind:
  """How the words of one dtype are seen.

  Attributes:
    width: bytes of a word.
    shift: class = word >> shift mod classes; for floats the exponent.
    classes: how many there are.
    how: coding of a value: `compiled.STEP` or `compiled.NIBBLES`.
  """

  width: int
  shift: int
  classes: int
  how: int = compiled.STEP


def _float_kind(dtype: np.dtype) -> Kind:
  info = ml_dtypes.finfo(dtype)
  # float64 has 11 bits of exponent: its classes span eight binades.
  spare = max(0, info.nexp - 8)
  return Kind(
    dtype.itemsize, info.nmant + spare, 1 << (info.nexp - spare), compiled.STEP
  )


def kind_of(dtype: np.dtype) -> Kind:
  """How arrays of a dtype are coded; bytes of packed nibbles are uint8."""
  if dtype == np.uint8:
    return Kind(1, 0, 256, compiled.NIBBLES)
  if dtype == np.int8 or dtype == ml_dtypes.float8_e8m0fnu:
    return Kind(1, 0, 256)
  if dtype.kind in 'iu':
    return Kind(dtype.itemsize, 8 * dtype.itemsize - 1, 1)
  return _float_kind(dtype)


@dataclasses.dataclass(frozen=True)
class _Contexts:
  """Where the models of a bucket lie, and which class a word has."""

  how: int
  classes: int  # of rates and of contexts
  span: int  # models of the values of one class
  flags: int  # first model of the hot words' flags, one a class
  count: int  # models in all


def _contexts(kind: Kind, overwrite: bool) -> _Contexts:
  how = compiled.OVERWRITE if overwrite else kind.how
  classes = 1 if overwrite else kind.classes
  if how == compiled.STEP:
    span = compiled.step_models(kind.width)
    flags = classes * span
  else:
    span = 0
    flags = 768 if how == compiled.NIBBLES else 512
  # The last model says of a piece whether anything in it changed.
  return _Contexts(how, classes, span, flags, flags + classes + 1)


def _models(contexts: _Contexts, width: int) -> np.ndarray:
  """uint32 [count], as they are before the first word."""
  half = (compiled.ONE // 2) << 8
  models = np.full(contexts.count, half | 1, np.uint32)
  if contexts.how == compiled.STEP:
    bits = 8 * width
    values = models[: contexts.flags].reshape(-1, contexts.span)
    values[:, 0] = half | 8
    values[:, 1:bits] = ((compiled.ONE // 8) << 8) | 1
  return models


def _state() -> tuple[np.ndarray, np.ndarray]:
  """(state, gauge) before the first word."""
  state = np.array([0, (1 << 64) - 1, 0], np.uint64)
  gauge = np.array([0, 0, 1 << compiled.GAIN_BITS], np.uint64)
  return state, gauge


def _hazards() -> np.ndarray:
  """int64 [RATES + 1]: the weight of a word by the rate of its class."""
  rate = np.arange(RATES)
  cold = (4 + (rate & 3)) << (rate >> 2)
  return np.append(cold, compiled.HOT)


_HAZARDS = _hazards()


def _weights(table: np.ndarray, kind: Kind) -> np.ndarray:
  """int32: the weight of a word by its bits from `shift` up."""
  size = 1 << (8 * kind.width - kind.shift)
  return np.resize(_HAZARDS[table], size).astype(np.int32)


def choose_rates(changed: np.ndarray, words: np.ndarray) -> np.ndarray:
  """int64 [C]: a rate for each class, such that rates and words cost little.

  A class keeps the rate of the one before it, or goes on by the same step,
  where its own best rate would gain less than it costs to say.

  Args:
    changed, words: int64 [C], how many words of each class there are.
  """
  words = np.maximum(words, changed)[:, None].astype(np.float64)
  changed = changed[:, None].astype(np.float64)
  hazard = _HAZARDS[None, :RATES] / compiled.UNIT
  p = -np.expm1(-hazard)
  cost = -(changed * np.log2(p) - (words - changed) * hazard / np.log(2))
  share = np.clip(changed / np.maximum(words, 1), 1e-9, 1 - 1e-9)
  own = -changed * np.log2(share) - (words - changed) * np.log2(1 - share)
  # A hot class: adapts to its share, for half the logarithm of its words.
  hot = np.where(share < 0.3, np.inf, own + 4 + 0.5 * np.log2(1 + words))
  cost = np.concatenate([cost, hot], 1)  # [C, RATES + 1]
  table = np.zeros(len(changed), np.int64)
  last = step = 0
  for k, best in enumerate(cost.argmin(1)):
    choices = [(1.5, last), (8.0, int(best))]
    if 0 <= last + step <= RATES:
      choices.append((2.5, last + step))
    rate = min(choices, key=lambda choice: choice[0] + cost[k, choice[1]])[1]
    if words[k, 0] == 0:
      rate = last
    step, last = rate - last, rate
    table[k] = rate
  return table


@dataclasses.dataclass(frozen=True)
class Changes:
  """Words of a piece that change: int32 [n], ascending, and what they become.

  The words come along although the new piece has them: where few change, each
  would be a miss of the cache.
  """

  positions: np.ndarray
  words: np.ndarray


@dataclasses.dataclass(frozen=True)
class Coded:
  """One bucket: its coding, how many of its words changed, its bytes."""

  coding: int
  changed: int
  payload: bytes


def encode(
  kind: Kind,
  pieces: Sequence[tuple[np.ndarray, np.ndarray]],
  changes: Sequence[Changes],
  overwrite: bool,
) -> Coded:
  """Codes one bucket.

  Args:
    kind: of all of its words.
    pieces: (base, new), unsigned words, contiguous.
    changes: which words of each differ.
    overwrite: code values, and positions, without looking at the base.
  """
  count = sum(len(found.positions) for found in changes)
  if count == 0:
    return Coded(SAME, 0, b'')
  words = sum(len(base) for base, _ in pieces)
  payload = _encode_sparse(kind, pieces, changes, overwrite)
  coding = SPARSE
  if payload is None or count > _TRY_DENSE_FROM * words:
    dense, packed = _encode_dense([new for _, new in pieces])
    if payload is None or len(packed) < len(payload):
      coding, payload = dense, packed
  return Coded(coding, count, payload)


def _encode_sparse(kind, pieces, changes, overwrite) -> bytes | None:
  contexts = _contexts(kind, overwrite)
  table = choose_rates(*_count(kind, contexts, pieces, changes))
  models = _models(contexts, kind.width)
  state, gauge = _state()
  words = [len(base) for base, _ in pieces]
  # What would be larger than the words themselves is not kept anyway.
  out = np.empty(sum(words) * kind.width // 4 + 1024, np.uint32)
  hot = np.empty(max(words) + 1, np.int32)
  compiled.put_table(table, _table_models(), out, state)
  weights = _weights(table, kind)
  for (base, _), found in zip(pieces, changes, strict=True):
    touched = len(found.positions) > 0
    compiled.put_flag(models, contexts.count - 1, touched, out, state)
    if touched and not compiled.encode_piece(
      base,
      found.positions,
      found.words,
      weights,
      kind.shift,
      contexts.classes - 1,
      contexts.span,
      contexts.how,
      contexts.flags,
      models,
      hot,
      out,
      state,
      gauge,
    ):
      return None
  return _finish(out, state)


def _count(kind, contexts, pieces, changes) -> tuple[np.ndarray, np.ndarray]:
  """(changed [C], words [C]) by class; the words are estimated where many."""
  size = 1 << (8 * kind.width - kind.shift)
  changed, words = np.zeros(size, np.int64), np.zeros(size, np.int64)
  total = sum(len(base) for base, _ in pieces)
  stride = _SAMPLE if total > _SAMPLE_FROM else 1
  for (base, _), found in zip(pieces, changes, strict=True):
    compiled.count_classes(
      base, found.positions, kind.shift, changed, words, stride
    )
  fold = (-1, contexts.classes)
  return changed.reshape(fold).sum(0), words.reshape(fold).sum(0)


def _table_models() -> np.ndarray:
  return np.full(256, (compiled.ONE // 2) << 8, np.uint32)


def _finish(out: np.ndarray, state: np.ndarray) -> bytes:
  """The stream: the shortest number inside of the coder's last interval."""
  low, size = int(state[compiled.LOW]), int(state[compiled.RANGE])
  at = int(state[compiled.AT])
  bits = 64
  while (value := -(-low >> bits) << bits) >= low + size:
    bits -= 1
  head = int.from_bytes(out[:at].astype('>u4').tobytes(), 'big')
  total = (head << 64) + value if value >> 64 else None
  if total is not None:  # the last carry
    return total.to_bytes(4 * at + 8, 'big').rstrip(b'\0')
  tail = value.to_bytes(8, 'big')
  return (out[:at].astype('>u4').tobytes() + tail).rstrip(b'\0')


def _encode_dense(words: Sequence[np.ndarray]) -> tuple[int, bytes]:
  """All words of a bucket, by planes of bytes."""
  joined = np.concatenate(words)
  planes = joined.view(np.uint8).reshape(-1, joined.itemsize).T
  raw = planes.tobytes()
  packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(raw)
  return (ZSTD, packed) if len(packed) < len(raw) else (RAW, raw)


def apply(
  kind: Kind,
  coded: Coded,
  pieces: Sequence[np.ndarray],
  overwrite: bool,
) -> None:
  """Turns the base's words of a bucket into the new ones, in place.

  Raises:
    ValueError: the payload cannot be that of this bucket.
  """
  if coded.coding == SPARSE:
    _apply_sparse(kind, coded.payload, pieces, overwrite)
  elif coded.coding != SAME:
    _apply_dense(kind, coded, pieces)


def _apply_sparse(kind, payload, pieces, overwrite) -> None:
  contexts = _contexts(kind, overwrite)
  models = _models(contexts, kind.width)
  data = np.frombuffer(
    bytes(payload) + bytes(-len(payload) % 4 + 8), '>u4'
  ).astype(np.uint32)
  state, gauge = _state()
  state[compiled.LOW] = (int(data[0]) << 32) | int(data[1])
  state[compiled.AT] = 2
  table = np.zeros(contexts.classes, np.int64)
  compiled.get_table(table, _table_models(), data, state)
  if table.max() > RATES:
    raise ValueError(f'rate {table.max()} is none of the {RATES + 1} rates')
  weights = _weights(table, kind)
  hot = np.empty(max(map(len, pieces)) + 1, np.int32)
  for words in pieces:
    if compiled.get_flag(models, contexts.count - 1, data, state):
      compiled.apply_piece(
        words,
        weights,
        kind.shift,
        contexts.classes - 1,
        contexts.span,
        contexts.how,
        contexts.flags,
        models,
        hot,
        data,
        state,
        gauge,
      )


def _apply_dense(kind: Kind, coded: Coded, pieces) -> None:
  size = kind.width * sum(map(len, pieces))
  data: bytes | memoryview = coded.payload
  if coded.coding == ZSTD:
    try:
      # Checked first: the frame's own size would decide what is allocated.
      if zstandard.frame_content_size(data) != size:
        raise ValueError(f'a bucket does not decode to its {size} bytes')
      data = zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
      raise ValueError(f'a bucket does not decode: {error}') from error
  if len(data) != size:
    raise ValueError(f'a bucket has {len(data)} bytes instead of {size}')
  planes = np.frombuffer(data, np.uint8).reshape(kind.width, -1)
  joined = np.ascontiguousarray(planes.T).reshape(-1)
  low = 0
  for words in pieces:
    words.view(np.uint8)[:] = joined[low : low + words.nbytes]
    low += words.nbytes
