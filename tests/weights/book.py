"""A second decoder of deltas, from the specification alone.

Plain Python, word by word, and nothing of the codec is imported: what it says
is checked against the text of `composer/weights/delta.py`, not its code.
"""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import xxhash
import zstandard

PIECE_BYTES = 1 << 23
UNIT = 1 << 20
H = 4 * UNIT - 1


def decode(base, blob):
  """The new weights, a dict like `base`."""
  assert blob[:7] == b'CMPDELT' and blob[7] == 3
  assert xxhash.xxh3_64(blob[:-8]).digest() == blob[-8:]
  overwrite = blob[8] == 1
  tree = [[n, base[n].dtype.name, list(base[n].shape)] for n in sorted(base)]
  text = json.dumps(tree, separators=(',', ':'))
  assert xxhash.xxh3_128(text.encode()).digest()[:4] == blob[9:13]
  if not overwrite:
    assert digest(base, tree) == blob[13:29]
  count, at = varint(blob, 45)
  heads = []
  for _ in range(count):
    coding, changed, size, at = blob[at], 0, 0, at + 1
    if coding:
      changed, at = varint(blob, at)
      size, at = varint(blob, at)
    heads.append((coding, changed, size))
  words = {name: to_words(base[name]) for name in base}
  for names, (coding, changed, size) in zip(buckets(tree), heads, strict=True):
    pieces = [words[name][low:high] for name, low, high in names]
    dtype = base[names[0][0]].dtype
    found = bucket(coding, blob[at : at + size], pieces, dtype, overwrite)
    at += size
    if not overwrite:
      assert changed == sum(
        a != b
        for x, y in zip(pieces, found, strict=True)
        for a, b in zip(x, y, strict=False)
      )
    for (name, low, high), piece in zip(names, found, strict=True):
      words[name][low:high] = piece
  assert at == len(blob) - 8
  result = {name: from_words(words[name], base[name]) for name in base}
  assert digest(result, tree) == blob[29:45]
  return result


def varint(blob, at):
  value = shift = 0
  while True:
    value |= (blob[at] & 127) << shift
    shift += 7
    at += 1
    if blob[at - 1] < 128:
      return value, at


def to_words(array):
  data, width = array.tobytes(), array.itemsize
  return [
    int.from_bytes(data[k : k + width], 'little')
    for k in range(0, len(data), width)
  ]


def from_words(words, like):
  data = b''.join(word.to_bytes(like.itemsize, 'little') for word in words)
  return np.frombuffer(data, like.dtype).reshape(like.shape)


def digest(flat, tree):
  whole = b''
  for entry in tree:
    data = flat[entry[0]].tobytes()
    parts = b''.join(
      xxhash.xxh3_128(data[k : k + PIECE_BYTES]).digest()
      for k in range(0, len(data), PIECE_BYTES)
    )
    whole += xxhash.xxh3_128(parts).digest()
    whole += json.dumps(entry, separators=(',', ':')).encode()
  return xxhash.xxh3_128(whole).digest()


def buckets(tree):
  """Lists of (name, first word, last word + 1)."""
  found, held, before = [], 0, None
  for dtype, name, shape in sorted((d, n, s) for n, d, s in tree):
    width = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    size = int(np.prod(shape))
    for low in range(0, size, PIECE_BYTES // width):
      high = min(size, low + PIECE_BYTES // width)
      if dtype != before or held + (high - low) * width > PIECE_BYTES:
        found.append([])
        held = 0
      found[-1].append((name, low, high))
      held, before = held + (high - low) * width, dtype
  return found


def bucket(coding, payload, pieces, dtype, overwrite):
  width = dtype.itemsize
  if coding == 0:
    return pieces
  if coding == 1:
    return sparse(payload, pieces, dtype, overwrite)
  if coding == 3:
    payload = zstandard.ZstdDecompressor().decompress(payload)
  total = len(payload) // width
  flat = [
    sum(payload[plane * total + k] << (8 * plane) for plane in range(width))
    for k in range(total)
  ]
  found = []
  for piece in pieces:
    found.append(flat[: len(piece)])
    flat = flat[len(piece) :]
  return found


class Coder:
  def __init__(self, payload):
    self.data = payload
    self.at = 8
    self.code = int.from_bytes(payload[:8].ljust(8, b'\0'), 'big')
    self.range = (1 << 64) - 1
    self.models = {}

  def settle(self):
    if self.range < 1 << 32:
      more = self.data[self.at : self.at + 4].ljust(4, b'\0')
      self.at += 4
      self.range <<= 32
      self.code = (self.code << 32) | int.from_bytes(more, 'big')

  def bit(self, name, p=1 << 21, n=1):
    p, n = self.models.get(name, (p, n))
    bound = (self.range >> 22) * p
    bit = int(self.code < bound)
    if bit:
      self.range = bound
    else:
      self.code -= bound
      self.range -= bound
    p += (((1 << 22) * bit - p) * ((1 << 17) // (2 * n + 3))) >> 16
    p = min(max(p, 32), (1 << 22) - 32)
    self.models[name] = p, min(n + 1, 255)
    self.settle()
    return bit

  def raw(self, bits):
    value = 0
    while bits:
      some = min(bits, 16)
      bits -= some
      self.range >>= some
      part = self.code // self.range
      self.code -= self.range * part
      value = (value << some) | part
      self.settle()
    return value

  def tree(self, name, bits, n=1):
    node = 1
    for _ in range(bits):
      node = 2 * node + self.bit((*name, node), n=n)
    return node - (1 << bits)


def table_of_f():
  a = [1 << 40]
  for _ in range(32):
    a.append(a[-1] - a[-1] // 8 + a[-1] // 128 - a[-1] // 3072)
  return [((1 << 40) - x) >> 12 for x in a]


T = table_of_f()


def share(total, gain):
  x = min(total * gain >> 8, H)
  s = x >> 17
  return T[s] + ((T[s + 1] - T[s]) * (x % (1 << 17)) >> 17)


def classes(dtype, overwrite):
  """(number of classes, class of a word)."""
  if overwrite:
    return 1, lambda word: 0
  if dtype.name in ('uint8', 'int8', 'float8_e8m0fnu'):
    return 256, lambda word: word
  if dtype.kind in 'iu':
    return 1, lambda word: 0
  if dtype.name == 'float64':
    return 256, lambda word: (word >> 55) % 256
  info = ml_dtypes.finfo(dtype)
  count = 1 << info.nexp
  return count, lambda word: (word >> info.nmant) % count


def sparse(payload, pieces, dtype, overwrite):
  coder = Coder(payload)
  count, class_of = classes(dtype, overwrite)
  rates, rate = [], 0
  for _ in range(count):
    rate = (rate + coder.tree(('rate',), 8, n=0)) % 256
    rates.append(rate)
  gain = {'seen': 0, 'expected': 0, 'gain': 256}
  found = []
  for piece in pieces:
    piece = list(piece)
    if coder.bit('touched'):
      hot = [k for k, word in enumerate(piece) if rates[class_of(word)] == 70]
      before = {k: piece[k] for k in hot}
      cold_changes(coder, piece, rates, class_of, gain, dtype, overwrite)
      for k in hot:
        kind = class_of(before[k])
        if coder.bit(('hot', kind)):
          piece[k] = value(coder, before[k], kind, dtype, overwrite)
    found.append(piece)
  return found


def cold_changes(coder, piece, rates, class_of, gain, dtype, overwrite):
  i = 0
  while True:
    r = coder.range >> 28
    v = coder.code // r
    passed, j, how = 0, i, 'the end'
    start, end = None, 1 << 28
    while j < len(piece):
      rate = rates[class_of(piece[j])]
      if rate < 70:
        hazard = (4 + rate % 4) << (rate // 4)
        with_j = passed + hazard
        below = with_j * gain['gain'] >> 8 < H
        if v < T[32] and below and v < share(with_j, gain['gain']):
          how, start = 'a change', share(passed, gain['gain'])
          end = share(with_j, gain['gain'])
          break
        if v >= T[32] and not below:
          how, start = 'a horizon', T[32]
          break
        passed = with_j
      j += 1
    if how == 'the end':
      start = share(passed, gain['gain'])
    coder.code -= r * start
    coder.range = r * (end - start)
    coder.settle()
    if how == 'the end':
      gain['expected'] += passed
      return
    i = j
    if how == 'a change':
      kind = class_of(piece[j])
      piece[j] = value(coder, piece[j], kind, dtype, overwrite)
      gain['seen'] += UNIT
      passed += hazard
      i += 1
    learn(gain, passed)


def learn(gain, passed):
  gain['expected'] += passed
  if gain['seen'] + gain['expected'] > 1 << 27:
    gain['seen'] >>= 1
    gain['expected'] >>= 1
  new = ((gain['seen'] + (1 << 23)) << 8) // (gain['expected'] + (1 << 23))
  gain['gain'] = min(max(new, 64), 1024)


def value(coder, old, kind, dtype, overwrite):
  bits = 8 * dtype.itemsize
  if overwrite:
    word = coder.tree(('byte', 0), 8)
    if bits > 8:
      word = (word << 8) | coder.tree(('byte', 1), 8)
      word = (word << (bits - 16)) | coder.raw(bits - 16)
    return word
  if dtype == np.uint8:
    high = coder.tree(('high', old >> 4), 4)
    moved = high != old >> 4
    return (high << 4) | coder.tree(('low', moved, old & 15), 4)
  down = coder.bit((kind, 'down'), n=8)
  n = 1
  while n < bits and coder.bit((kind, 'more', n), p=1 << 19):
    n += 1
  some = min(n - 1, 7 if bits == 8 else 4)
  size = (1 << some) | coder.tree((kind, n), some)
  rest = n - 1 - some
  size = (size << rest) | coder.raw(rest)
  return (old - size if down else old + size) % (1 << bits)
