"""Compiled loops of the delta codec: finding, coding and applying changes.

`composer.weights.delta` specifies the stream, and the names here are its names.
All arithmetic of a stream is on integers, so every machine makes the same
bytes. The loops hold no lock of the interpreter, allocate nothing, and stay in
bounds whatever the stream holds: what a damaged one decodes to is wrong, and
found out by its digest.

`state` is uint64 [3]: low (of an encoder) or code (of a decoder), range, words
of the stream written or read. `gauge` is uint64 [3]: changes seen, changes
expected, and the gain made of them. A model is a uint32: the probability of a
one, 22 bits, above the count of its updates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

LOW, RANGE, AT = range(3)  # of a state
SEEN, EXPECTED, GAIN = range(3)  # of a gauge
STEP, NIBBLES, OVERWRITE = range(3)  # how a value is coded

# Models.
BITS = 22
ONE = 1 << BITS
FLOOR = 32
MOST_UPDATES = 255
RATES = np.array([(1 << 17) // (2 * n + 3) for n in range(256)], np.int64)

# Hazards and gaps.
UNIT = 1 << 20
HORIZON = 4 * UNIT
SEGMENT_BITS = 17
SEGMENTS = HORIZON >> SEGMENT_BITS
SCALE_BITS = 28
GAIN_BITS = 8
GAIN_LEAST, GAIN_MOST = 64, 1024
PRIOR = 8 * UNIT
WINDOW = 128 * UNIT
HOT = 1 << 26  # in a table: not a hazard, but a class coded word by word


def _reached() -> np.ndarray:
  """2^28 (1 - e^-x) at x = 0, 1/8 ... 4, in integers."""
  alive = [1 << 40]
  for _ in range(SEGMENTS):
    last = alive[-1]
    alive.append(last - last // 8 + last // 128 - last // 3072)
  return np.array([((1 << 40) - x) >> (40 - SCALE_BITS) for x in alive])


REACHED = _reached().astype(np.uint64)

U = np.uint64
_WORD = U(1 << 32)
GROUP = U(16)  # words whose hazards are summed at a time


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
  """`numba.njit`, the machine code kept on disk where that is possible.

  `_nrt=False` leaves out the counting of references to arrays, which nothing
  here needs, and which took two thirds of the time. The loops take the small
  functions (`_name`) into themselves: a call with its arrays costs as much as
  coding a bit.
  """
  name = function.__name__
  options = {
    'nogil': True,
    '_nrt': False,
    'error_model': 'numpy',  # no divisor here is ever 0
    'forceinline': name.startswith('_') and name != '_carry',
  }
  try:
    return numba.njit(function, cache=True, **options)
  except RuntimeError:  # nowhere to write
    return numba.njit(function, **options)


# --- The coder ---------------------------------------------------------------


@compiled
def _carry(out, at):
  at -= 1
  while at >= 0:
    out[at] += np.uint32(1)
    if out[at] != 0:
      break
    at -= 1


@compiled
def _put_bit(models, m, bit, out, low, rng, at):
  model = np.int64(models[m])
  p = model >> 8
  n = model & 255
  bound = (rng >> U(BITS)) * U(p)
  # Without a branch: which way it goes is what nobody can predict.
  one = U(-np.int64(bit))
  before = low
  low += bound & ~one
  rng = (bound & one) | ((rng - bound) & ~one)
  if low < before:
    _carry(out, at)
  p += (((-np.int64(bit)) & ONE) - p) * RATES[n] >> 16
  p = min(max(p, FLOOR), ONE - FLOOR)
  models[m] = np.uint32((p << 8) | min(n + 1, MOST_UPDATES))
  if rng < _WORD:
    out[at] = np.uint32(low >> U(32))
    at += 1
    low <<= U(32)
    rng <<= U(32)
  return low, rng, at


@compiled
def _put_part(start, end, out, low, rng, at):
  """Codes [start, end) of 2^28."""
  rng >>= U(SCALE_BITS)
  before = low
  low += rng * U(start)
  if low < before:
    _carry(out, at)
  rng *= U(end - start)
  if rng < _WORD:
    out[at] = np.uint32(low >> U(32))
    at += 1
    low <<= U(32)
    rng <<= U(32)
  return low, rng, at


@compiled
def _put_raw(value, bits, out, low, rng, at):
  while bits > 0:
    some = min(bits, 16)
    bits -= some
    rng >>= U(some)
    before = low
    low += rng * ((U(value) >> U(bits)) & U((1 << some) - 1))
    if low < before:
      _carry(out, at)
    if rng < _WORD:
      out[at] = np.uint32(low >> U(32))
      at += 1
      low <<= U(32)
      rng <<= U(32)
  return low, rng, at


@compiled
def _put_tree(models, m, value, bits, out, low, rng, at):
  node = 1
  for k in range(bits - 1, -1, -1):
    bit = (value >> k) & 1
    low, rng, at = _put_bit(models, m + node, bit, out, low, rng, at)
    node = 2 * node + bit
  return low, rng, at


@compiled
def _next(data, at):
  return U(data[at]) if at < len(data) else U(0)


@compiled
def _get_bit(models, m, data, code, rng, at):
  model = np.int64(models[m])
  p = model >> 8
  n = model & 255
  bound = (rng >> U(BITS)) * U(p)
  bit = np.int64(code < bound)
  one = U(-bit)
  code -= bound & ~one
  rng = (bound & one) | ((rng - bound) & ~one)
  p += (((-bit) & ONE) - p) * RATES[n] >> 16
  p = min(max(p, FLOOR), ONE - FLOOR)
  models[m] = np.uint32((p << 8) | min(n + 1, MOST_UPDATES))
  if rng < _WORD:
    rng <<= U(32)
    code = (code << U(32)) | _next(data, at)
    at += 1
  return bit, code, rng, at


@compiled
def _get_raw(bits, data, code, rng, at):
  value = U(0)
  while bits > 0:
    some = min(bits, 16)
    bits -= some
    rng >>= U(some)
    part = min(code // rng, U((1 << some) - 1))
    code -= rng * part
    value = (value << U(some)) | part
    if rng < _WORD:
      rng <<= U(32)
      code = (code << U(32)) | _next(data, at)
      at += 1
  return value, code, rng, at


@compiled
def _get_tree(models, m, bits, data, code, rng, at):
  node = 1
  for _ in range(bits):
    bit, code, rng, at = _get_bit(models, m + node, data, code, rng, at)
    node = 2 * node + bit
  return node - (1 << bits), code, rng, at


# --- Values ------------------------------------------------------------------


@compiled
def _top_nodes(width):
  """Models of the bits of a step below its highest: of four bits, of a byte all.

  From 0 to -0, say, is a step of 128.
  """
  return 128 if width == 1 else 16


def step_models(width: int) -> int:
  """Models of the steps of one class of words of so many bytes."""
  return 8 * width * (1 + _top_nodes.py_func(width))


@compiled
def _put_step(models, m, width, old, new, out, low, rng, at):
  bits = 8 * width
  kept = ~U(0) >> U(64 - bits)
  step = (U(new) - U(old)) & kept
  down = step >> U(bits - 1)
  size = ((step ^ (U(0) - down)) + down) & kept
  low, rng, at = _put_bit(models, m, down, out, low, rng, at)
  n = 1
  rest = size >> U(1)
  while n < bits:
    more = rest != 0
    low, rng, at = _put_bit(models, m + n, more, out, low, rng, at)
    if not more:
      break
    rest >>= U(1)
    n += 1
  nodes = _top_nodes(width)
  top = m + bits + nodes * (n - 1)
  node = 1
  k = n - 2
  while k >= 0 and node < nodes:
    bit = np.int64((size >> U(k)) & U(1))
    low, rng, at = _put_bit(models, top + node, bit, out, low, rng, at)
    node = 2 * node + bit
    k -= 1
  return _put_raw(size, k + 1, out, low, rng, at)


@compiled
def _get_step(models, m, width, data, code, rng, at):
  bits = 8 * width
  down, code, rng, at = _get_bit(models, m, data, code, rng, at)
  n = 1
  while n < bits:
    more, code, rng, at = _get_bit(models, m + n, data, code, rng, at)
    if more == 0:
      break
    n += 1
  nodes = _top_nodes(width)
  top = m + bits + nodes * (n - 1)
  node = 1
  k = n - 1
  while k > 0 and node < nodes:
    bit, code, rng, at = _get_bit(models, top + node, data, code, rng, at)
    node = 2 * node + bit
    k -= 1
  raw, code, rng, at = _get_raw(k, data, code, rng, at)
  size = (U(node) << U(k)) | raw
  if down:
    size = U(0) - size
  return size, code, rng, at


@compiled
def _put_value(models, m, how, width, old, new, out, low, rng, at):
  """Codes `new`; `m` is where the models of its context begin."""
  if how == STEP:
    return _put_step(models, m, width, old, new, out, low, rng, at)
  if how == NIBBLES:
    a, b = np.int64(old), np.int64(new)
    low, rng, at = _put_tree(
      models, m + (a & 0xF0), b >> 4, 4, out, low, rng, at
    )
    moved = np.int64((a ^ b) >> 4 != 0)
    return _put_tree(
      models,
      m + 256 + 256 * moved + ((a & 15) << 4),
      b & 15,
      4,
      out,
      low,
      rng,
      at,
    )
  bits = 8 * width
  value = U(new)
  top = np.int64(value >> U(bits - 8))
  low, rng, at = _put_tree(models, m, top, 8, out, low, rng, at)
  if bits > 8:
    second = np.int64((value >> U(bits - 16)) & U(255))
    low, rng, at = _put_tree(models, m + 256, second, 8, out, low, rng, at)
    low, rng, at = _put_raw(value, bits - 16, out, low, rng, at)
  return low, rng, at


@compiled
def _get_value(models, m, how, width, old, data, code, rng, at):
  """(new word, code, range, at)."""
  if how == STEP:
    step, code, rng, at = _get_step(models, m, width, data, code, rng, at)
    return U(old) + step, code, rng, at
  if how == NIBBLES:
    a = np.int64(old)
    high, code, rng, at = _get_tree(
      models, m + (a & 0xF0), 4, data, code, rng, at
    )
    moved = np.int64(high != a >> 4)
    lower, code, rng, at = _get_tree(
      models, m + 256 + 256 * moved + ((a & 15) << 4), 4, data, code, rng, at
    )
    return U((high << 4) | lower), code, rng, at
  bits = 8 * width
  top, code, rng, at = _get_tree(models, m, 8, data, code, rng, at)
  value = U(top)
  if bits > 8:
    second, code, rng, at = _get_tree(models, m + 256, 8, data, code, rng, at)
    raw, code, rng, at = _get_raw(bits - 16, data, code, rng, at)
    value = (((value << U(8)) | U(second)) << U(bits - 16)) | raw
  return value, code, rng, at


# --- Tables ------------------------------------------------------------------


@compiled
def put_table(table, models, out, state):
  """Codes the rates of the classes, each as its difference to the one before."""
  low, rng, at = state[LOW], state[RANGE], np.int64(state[AT])
  last = 0
  for k in range(len(table)):
    low, rng, at = _put_tree(
      models, 0, (table[k] - last) & 255, 8, out, low, rng, at
    )
    last = table[k]
  state[LOW], state[RANGE], state[AT] = low, rng, U(at)


@compiled
def get_table(table, models, data, state):
  code, rng, at = state[LOW], state[RANGE], np.int64(state[AT])
  last = 0
  for k in range(len(table)):
    step, code, rng, at = _get_tree(models, 0, 8, data, code, rng, at)
    last = (last + step) & 255
    table[k] = last
  state[LOW], state[RANGE], state[AT] = code, rng, U(at)


@compiled
def put_flag(models, m, bit, out, state):
  low, rng, at = _put_bit(
    models, m, bit, out, state[LOW], state[RANGE], np.int64(state[AT])
  )
  state[LOW], state[RANGE], state[AT] = low, rng, U(at)


@compiled
def get_flag(models, m, data, state):
  bit, code, rng, at = _get_bit(
    models, m, data, state[LOW], state[RANGE], np.int64(state[AT])
  )
  state[LOW], state[RANGE], state[AT] = code, rng, U(at)
  return bit


# --- Positions ---------------------------------------------------------------


@compiled
def _share(weight, gain):
  """F of a hazard under the gain, of 2^28."""
  weight = min(weight * gain >> U(GAIN_BITS), U(HORIZON - 1))
  s = weight >> U(SEGMENT_BITS)
  rest = weight & U((1 << SEGMENT_BITS) - 1)
  step = REACHED[s + U(1)] - REACHED[s]
  return REACHED[s] + (step * rest >> U(SEGMENT_BITS))


@compiled
def _within(v, gain):
  """The least total hazard whose `_share` is above v; HORIZON's if none is."""
  hazard = U(HORIZON - 1)
  if v < REACHED[U(SEGMENTS)]:
    s = U(0)
    for k in range(1, SEGMENTS):
      s += U(v >= REACHED[U(k)])
    step = REACHED[s + U(1)] - REACHED[s]
    rest = ((((v - REACHED[s] + U(1)) << U(SEGMENT_BITS)) - U(1)) // step) + U(
      1
    )
    hazard = min((s << U(SEGMENT_BITS)) + rest, U(HORIZON - 1))
  return ((hazard << U(GAIN_BITS)) + gain - U(1)) // gain


@compiled
def _learn(gauge, passed, hit):
  """Takes in the hazards that passed, and whether a change ended them."""
  seen = gauge[SEEN] + U(UNIT) * hit
  expected = gauge[EXPECTED] + passed
  if seen + expected > U(WINDOW):
    seen >>= U(1)
    expected >>= U(1)
  gain = ((seen + U(PRIOR)) << U(GAIN_BITS)) // (expected + U(PRIOR))
  gauge[SEEN] = seen
  gauge[EXPECTED] = expected
  gauge[GAIN] = min(max(gain, U(GAIN_LEAST)), U(GAIN_MOST))


@compiled
def _scan(words, weights, shift, i, end, least, hot, hots):
  """Walks the cold words of [i, end) while their hazards stay below `least`.

  Indices are unsigned (here and below): a signed one may be negative, and the
  check for it takes more than half of the time.

  Returns:
    (j, passed, hots): the first word with which they would not (or `end`), the
    hazards before it, and how many hot words have been listed so far.
  """
  passed = U(0)
  while i < end:
    while i + GROUP <= end:
      together = np.uint32(0)
      for k in range(16):
        together += np.uint32(weights[words[i + U(k)] >> shift])
      if passed + U(together) >= least:
        break
      passed += U(together)
      i += GROUP
    if i + GROUP <= end and together < np.uint32(HOT):
      # Without a branch: where a change lies is what nobody can predict.
      room = least - passed
      before = total = ahead = U(0)
      for k in range(15):
        total += U(weights[words[i + U(k)] >> shift])
        below = total < room
        ahead += U(below)
        before = total if below else before
      return i + ahead, passed + before, hots
    stop = min(i + GROUP, end)
    while i < stop:
      here = U(weights[words[i] >> shift])
      if passed + here < least:
        passed += here
      elif here < U(HOT):
        return i, passed, hots
      else:
        hot[hots] = i
        hots += U(1)
      i += U(1)
  return i, passed, hots


@compiled
def find_changes(base, new, offset, positions, values):
  """Writes offset + k, and the new word, where words k differ; how many do."""
  n = U(0)
  whole = len(base) >> 6
  for block in range(whole):
    first = U(block << 6)
    differ = base[0] ^ base[0]
    for k in range(64):
      differ |= base[first + U(k)] ^ new[first + U(k)]
    if differ != 0:
      bits = U(0)
      for k in range(64):
        bits |= U(base[first + U(k)] != new[first + U(k)]) << U(k)
      while bits:
        lowest = bits & (U(0) - bits)
        # The exponent of a power of two, as a number with a fraction.
        exponent = (np.float64(lowest).view(np.int64) >> 52) - 1023
        positions[n] = offset + np.int64(first) + exponent
        values[n] = new[first + U(exponent)]
        n += U(1)
        bits ^= lowest
  for k in range(whole << 6, len(base)):
    positions[n] = offset + k
    values[n] = new[k]
    n += U(base[k] != new[k])
  return n


@compiled
def count_classes(base, positions, shift, changed, words, stride):
  """Adds to changed[class], and to words[class] of every stride-th 64 words."""
  shift = base.dtype.type(shift)
  for k in range(len(positions)):
    changed[base[U(positions[k])] >> shift] += 1
  for first in range(0, len(base), 64 * stride):
    for k in range(first, min(first + 64, len(base))):
      words[base[U(k)] >> shift] += stride


@compiled
def encode_piece(
  base,
  changes,
  values,
  weights,
  shift,
  mask,
  span,
  how,
  flags,
  models,
  hot,
  out,
  state,
  gauge,
):
  """Codes the words of a piece that changed. False where `out` is too small.

  Args:
    base: unsigned words [n].
    changes: ascending positions at which they change.
    values: the words that they become.
    weights: int32, hazard of a word by its highest bits, or HOT.
    shift, mask: class = word >> shift & mask.
    span: models of one class.
    how: STEP, NIBBLES or OVERWRITE.
    flags: where in `models` the flags of hot words are; values follow at 0.
    models, out, state, gauge: of the coder.
    hot: int32 [n + 1], scratch.
  """
  low, rng, at = state[LOW], state[RANGE], np.int64(state[AT])
  width = base.itemsize
  room = len(out) - 64
  shift = base.dtype.type(shift)
  mask = base.dtype.type(mask)
  i = hots = k = U(0)
  size, count = U(len(base)), U(len(changes))
  while True:
    gain = gauge[GAIN]
    while k < count and weights[base[U(changes[k])] >> shift] >= HOT:
      k += U(1)
    ahead = U(changes[k]) if k < count else size
    horizon = ((U(HORIZON - 1) << U(GAIN_BITS)) + gain - U(1)) // gain
    stop, passed, hots = _scan(
      base, weights, shift, i, ahead, horizon, hot, hots
    )
    here = U(0)
    hit = False
    if stop == ahead and ahead < size:
      here = U(weights[base[ahead] >> shift])
      hit = passed + here < horizon
    start = REACHED[U(SEGMENTS)]
    end = U(1 << SCALE_BITS)
    if hit:
      start, end = _share(passed, gain), _share(passed + here, gain)
    elif stop == size:
      start = _share(passed, gain)
    low, rng, at = _put_part(start, end, out, low, rng, at)
    if at > room:
      return False
    if stop == size:
      gauge[EXPECTED] += passed
      break
    i = stop
    if hit:
      m = span * np.int64((base[i] >> shift) & mask)
      low, rng, at = _put_value(
        models, m, how, width, base[i], values[k], out, low, rng, at
      )
      i += U(1)
      k += U(1)
    else:
      here = U(0)
    _learn(gauge, passed + here, U(hit))
  k = U(0)
  for h in range(hots):
    i = U(hot[h])
    while k < count and U(changes[k]) < i:
      k += U(1)
    hit = k < count and U(changes[k]) == i
    context = np.int64((base[i] >> shift) & mask)
    low, rng, at = _put_bit(models, flags + context, hit, out, low, rng, at)
    if hit:
      low, rng, at = _put_value(
        models,
        span * context,
        how,
        width,
        base[i],
        values[k],
        out,
        low,
        rng,
        at,
      )
    if at > room:
      return False
  state[LOW], state[RANGE], state[AT] = low, rng, U(at)
  return True


@compiled
def apply_piece(
  words,
  weights,
  shift,
  mask,
  span,
  how,
  flags,
  models,
  hot,
  data,
  state,
  gauge,
):
  """Turns the base's words of a piece into the new ones, in place.

  Arguments as `encode_piece`; `data` is the stream.
  """
  code, rng, at = state[LOW], state[RANGE], np.int64(state[AT])
  width = words.itemsize
  shift = words.dtype.type(shift)
  mask = words.dtype.type(mask)
  i = hots = U(0)
  size = U(len(words))
  while True:
    gain = gauge[GAIN]
    r = rng >> U(SCALE_BITS)
    v = min(code // r, U((1 << SCALE_BITS) - 1))
    least = _within(v, gain)
    stop, passed, hots = _scan(words, weights, shift, i, size, least, hot, hots)
    hit = False
    here = U(0)
    start = REACHED[U(SEGMENTS)]
    end = U(1 << SCALE_BITS)
    if stop == size:
      start = _share(passed, gain)
    elif v < start:
      hit = True
      here = U(weights[words[stop] >> shift])
      start, end = _share(passed, gain), _share(passed + here, gain)
    code -= r * U(start)
    rng = r * max(end - start, U(1))
    if rng < _WORD:
      rng <<= U(32)
      code = (code << U(32)) | _next(data, at)
      at += 1
    if stop == size:
      gauge[EXPECTED] += passed
      break
    i = stop
    if hit:
      m = span * np.int64((words[i] >> shift) & mask)
      value, code, rng, at = _get_value(
        models, m, how, width, words[i], data, code, rng, at
      )
      words[i] = words.dtype.type(value)
      i += U(1)
    _learn(gauge, passed + here, U(hit))
  for h in range(hots):
    i = U(hot[h])
    context = np.int64((words[i] >> shift) & mask)
    hit_, code, rng, at = _get_bit(models, flags + context, data, code, rng, at)
    if hit_:
      value, code, rng, at = _get_value(
        models, span * context, how, width, words[i], data, code, rng, at
      )
      words[i] = words.dtype.type(value)
  state[LOW], state[RANGE], state[AT] = code, rng, U(at)
