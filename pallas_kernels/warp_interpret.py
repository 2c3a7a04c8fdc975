"""Runs the kernels of `warp` on a CPU: every lane of every warp, in step.

A value is an array [W, 32]; lanes that a branch leaves out keep what they had.
What the device would not forgive is an AssertionError here: an index out of
bounds, a collective that only some lanes of a warp come to, and memory of a block
that two warps touch, one of them to write, without a wait between. Outputs start
as bytes of 0xAB, so that what a kernel does not write shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import warp
from pallas_kernels.warp import Ref
from pallas_kernels.warp import Value

_TYPES = {'b32': np.uint32, 'f32': np.float32, 'pred': np.bool_}
_BINARY = dict(
  add=np.add,
  sub=np.subtract,
  mul=np.multiply,
  rem=np.remainder,
  shl=np.left_shift,
  shr=np.right_shift,
  max=np.maximum,
  min=np.minimum,
  **{'and': np.bitwise_and, 'or': np.bitwise_or, 'xor': np.bitwise_xor},
)
_COMPARE = dict(
  lt=np.less,
  le=np.less_equal,
  gt=np.greater,
  ge=np.greater_equal,
  eq=np.equal,
  ne=np.not_equal,
)


# XLA's threads take denormals for zero, and those that they start do too: this
# one starts now.
_POOL = concurrent.futures.ThreadPoolExecutor(1)
_POOL.submit(int).result()


class Lanes:
  """The writer that computes at once; the methods are those of `warp.Ptx`."""

  def __init__(self, warps_per_block: int, blocks: int):
    self.warps, self.warps_per_block = warps_per_block * blocks, warps_per_block
    self.shape = self.warps, warp.LANES
    self.active = np.ones(self.shape, bool)
    lane = np.arange(warp.LANES, dtype=np.uint32)
    self.lane = self._value('b32', np.broadcast_to(lane, self.shape))
    number = np.arange(self.warps, dtype=np.uint32)[:, None]
    self.warp = self._value('b32', np.broadcast_to(number, self.shape))
    self.block = self.warp // warps_per_block
    self.own = self.warp % warps_per_block
    # Of words that a block shares, since its last wait: who wrote, and who read.
    self.written, self.read = {}, {}

  def _value(self, kind: str, raw: Any) -> Value:
    return Value(self, kind, np.asarray(raw, _TYPES[kind]))

  def _raw(self, value: Any, kind: str) -> np.ndarray:
    if isinstance(value, Value):
      assert value.kind == kind, (value.kind, kind)
      return value.raw
    if kind == 'b32':
      value = int(value) & warp.ALL
    return np.broadcast_to(_TYPES[kind](value), self.shape)

  def value(self, value: Any, kind: str = 'b32') -> Value:
    if isinstance(value, Value):
      return value
    return self._value(kind, self._raw(value, kind))

  # Arithmetic.

  def binary(self, name: str, a: Value, b: Any) -> Value:
    b = self._raw(b, a.kind)
    with np.errstate(all='ignore'):
      if name == 'div':
        out = a.raw // np.maximum(b, 1) if a.kind == 'b32' else a.raw / b
      else:
        out = _BINARY[name](a.raw, b)
    return self._value(a.kind, out)

  def compare(self, name: str, a: Value, b: Any) -> Value:
    return self._value('pred', _COMPARE[name](a.raw, self._raw(b, a.kind)))

  def where(self, condition: Value, a: Any, b: Any) -> Value:
    kind = a.kind if isinstance(a, Value) else b.kind
    out = np.where(condition.raw, self._raw(a, kind), self._raw(b, kind))
    return self._value(kind, out)

  def negate(self, a: Value) -> Value:
    return self._value('pred', ~a.raw)

  def bits(self, a: Value) -> Value:
    return self._value('b32', a.raw.view(np.uint32))

  def float(self, a: Value) -> Value:
    return self._value('f32', a.raw.view(np.float32))

  def count_bits(self, a: Value) -> Value:
    return self._value('b32', np.bitwise_count(a.raw))

  def lowest_bit(self, a: Value) -> Value:
    lowest = a.raw & (~a.raw + np.uint32(1))
    return self._value('b32', np.bitwise_count(lowest - np.uint32(1)))

  def permute(self, a: Value, b: Value, places: int) -> Value:
    return self.choose(a, b, self.value(places))

  def choose(self, a: Value, b: Value, digits: Value) -> Value:
    both = np.stack([a.raw, b.raw], -1).view(np.uint8)  # [W, 32, 8]
    four = (digits.raw[..., None] >> np.arange(0, 16, 4, dtype=np.uint32)) & 15
    assert (four < 8).all(), 'a digit above 7 means something else'
    chosen = np.take_along_axis(both, four.astype(np.int64), axis=-1)
    return self._value('b32', chosen.view(np.uint32)[..., 0])

  def multiply_pairs(self, a: Value, b: Value) -> Value:
    low, high = (
      _wide(a.raw, i).astype(np.float64) * _wide(b.raw, i) for i in (0, 1)
    )
    return self._value('b32', _packed(low, high))

  def pack(self, low: Value, high: Value) -> Value:
    return self._value('b32', _packed(low.raw, high.raw))

  def e4m3(self, low: Value, high: Value) -> Value:
    low, high = (
      np.clip(one.raw, -448, 448).astype(jnp.float8_e4m3fn).view(np.uint8)
      for one in (low, high)
    )
    return self._value('b32', low | high.astype(np.uint32) << np.uint32(8))

  def multiply_add(
    self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]
  ) -> list[Value]:
    self._together()
    left = np.zeros((self.warps, 16, 16))
    right = np.zeros((self.warps, 16, 8))
    lane = np.arange(warp.LANES)
    row, column = lane // 4, 2 * (lane % 4)
    for i, one in enumerate(a):
      for half in (0, 1):
        at = row + 8 * (i % 2), column + 8 * (i // 2) + half
        left[:, at[0], at[1]] = _wide(one.raw, half)
    for i, one in enumerate(b):
      for half in (0, 1):
        right[:, column + 8 * i + half, row] = _wide(one.raw, half)
    product = left @ right
    out = []
    for i, one in enumerate(c):
      own = product[:, row + 8 * (i // 2), column + i % 2]
      out.append(self._value('f32', own + one.raw))
    return out

  def exp(self, a: Value) -> Value:
    with np.errstate(all='ignore'):
      return self._value('f32', np.exp2(a.raw * np.float32(warp.LOG2_E)))

  def log(self, a: Value) -> Value:
    with np.errstate(all='ignore'):
      return self._value('f32', np.log2(a.raw)) * (1 / warp.LOG2_E)

  def root(self, a: Value) -> Value:
    with np.errstate(all='ignore'):
      return self._value('f32', np.sqrt(a.raw))

  # What the lanes of a warp do together.

  def _together(self) -> None:
    some, every = self.active.any(axis=1), self.active.all(axis=1)
    assert (some == every).all(), 'a collective without all lanes of a warp'

  def ballot(self, a: Value) -> Value:
    self._together()
    bits = (a.raw.astype(np.uint32) << self.lane.raw).sum(1, dtype=np.uint32)
    return self._value('b32', np.broadcast_to(bits[:, None], self.shape))

  def shuffle(self, a: Value, lane: Any) -> Value:
    self._together()
    place = (self._raw(lane, 'b32') & 31).astype(np.int64)
    return self._value(a.kind, np.take_along_axis(a.raw, place, axis=1))

  def shuffle_up(self, a: Value, by: int) -> Value:
    place = self.lane.raw.astype(np.int64) - by
    place = np.where(place < 0, self.lane.raw, place)
    return self.shuffle(a, self._value('b32', place))

  def shuffle_xor(self, a: Value, by: int) -> Value:
    return self.shuffle(a, self.lane ^ by)

  def reduce(self, name: str, a: Value) -> Value:
    self._together()
    out = _BINARY[name].reduce(a.raw, axis=1, dtype=np.uint32)
    return self._value('b32', np.broadcast_to(out[:, None], self.shape))

  def match(self, a: Value) -> Value:
    self._together()
    same = a.raw[:, :, None] == a.raw[:, None, :]
    bits = same.astype(np.uint32) << self.lane.raw[:, None, :]
    return self._value('b32', bits.sum(2, dtype=np.uint32))

  def sync(self) -> None:
    self._together()

  def sync_block(self) -> None:
    blocks = self.active.reshape(-1, self.warps_per_block * warp.LANES)
    some, every = blocks.any(axis=1), blocks.all(axis=1)
    assert (some == every).all(), 'not all warps of a block wait'
    self.written, self.read = {}, {}

  def _touch(self, ref: Ref, place: np.ndarray, write: bool) -> None:
    """Nobody but this warp may have written since the last wait, or read."""
    if not ref.of_block:
      return
    warps = np.broadcast_to(self.warp.raw, self.shape)[self.active]
    words = place[self.active].tolist()
    for word, own in sorted({*zip(words, warps.tolist(), strict=True)}):
      others = {self.written.get(word, own)} - {own}
      others |= self.read.get(word, {own}) - {own} if write else set()
      assert not others, f'word {word} is of warps {own} and {others} at once'
      if write:
        self.written[word] = own
      else:
        self.read.setdefault(word, set()).add(own)

  # Memory.

  def _place(self, ref: Ref, index: Any, width: int = 1) -> np.ndarray:
    place = self._raw(index, 'b32').astype(np.int64)
    here = place[self.active]
    assert (here >= 0).all() and (here + width <= ref.size).all(), (
      f'index {here.max()} of {ref.size}'
    )
    place = np.where(self.active, place, 0)
    if ref.shared:
      owner = self.block if ref.of_block else self.warp
      return place + ref.size * owner.raw.astype(np.int64)
    return place + np.where(self.active, ref.start, 0)

  def load(self, ref: Ref, index: Any) -> Value:
    place = self._place(ref, index)
    self._touch(ref, place, write=False)
    return self._value(ref.kind, ref.raw[place])

  def load_words(
    self,
    ref: Ref,
    index: Any,
    count: int,
    offset: int = 0,
    once: bool = False,
  ) -> list[Value]:
    del once
    each = 4 * count // ref.bytes
    place = self._place(ref, self.value(index) + offset, each)
    assert not (place[self.active] % each).any()
    parts = ref.raw[place[:, :, None] + np.arange(each)]
    words = parts.view(np.uint32)
    return [self._value('b32', words[:, :, i]) for i in range(count)]

  def prefetch(self, ref: Ref, index: Any, count: int) -> None:
    """Only that the elements are there."""
    first = self._place(ref, index, count)[:, 0]
    assert not (first * ref.bytes % 16).any() and not count * ref.bytes % 16

  def store_words(self, ref: Ref, index: Any, words: Sequence[Value]) -> None:
    each = 4 * len(words) // ref.bytes
    place = self._place(ref, index, each)[self.active]
    assert not (place % each).any()
    value = np.stack(
      [one.raw[self.active].view(np.uint32) for one in words], -1
    )
    value = np.ascontiguousarray(value).view(ref.raw.dtype)
    ref.raw[place[:, None] + np.arange(each)] = value

  def part(self, ref: Ref, number: Any, size: int) -> Ref:
    """Here a reference that adds to its indices."""
    start = self.value(number).raw.astype(np.int64) * size
    return dataclasses.replace(ref, raw=ref.raw, start=start, size=size)

  def store(self, ref: Ref, index: Any, value: Any) -> None:
    place = self._place(ref, index)
    self._touch(ref, place, write=True)
    value = self._raw(value, ref.kind)
    ref.raw[place[self.active]] = value[self.active].astype(ref.raw.dtype)

  # Control.

  def _merge(self, old: Sequence[Any], new: Sequence[Any]) -> list[Value]:
    keep = self._value('pred', self.active)
    return [self.where(keep, a, b) for a, b in zip(new, old, strict=True)]

  def repeat(
    self,
    condition: Callable[..., Value],
    body: Callable[..., Sequence[Any]],
    carry: Sequence[Any] = (),
  ) -> list[Value]:
    outer, carry = self.active, [self.value(one) for one in carry]
    while True:
      self.active = self.active & condition(*carry).raw
      if not self.active.any():
        break
      carry = self._merge(carry, body(*carry) or ())
    self.active = outer
    return carry

  loop = warp.Ptx.loop

  def when(
    self,
    condition: Value,
    then: Callable[..., Sequence[Any]],
    carry: Sequence[Any] = (),
  ) -> list[Value]:
    outer, carry = self.active, [self.value(one) for one in carry]
    self.active = outer & condition.raw
    if self.active.any():
      carry = self._merge(carry, then(*carry) or ())
    self.active = outer
    return carry


def _wide(pairs: np.ndarray, half: int) -> np.ndarray:
  """float32 of the low (0) or high (1) bfloat16 of each b32."""
  bits = pairs & np.uint32(0xFFFF0000) if half else pairs << np.uint32(16)
  return bits.view(np.float32)


def _packed(low: np.ndarray, high: np.ndarray) -> np.ndarray:
  """b32 of two, rounded to bfloat16."""
  halves = [
    np.asarray(one, np.float32).astype(jnp.bfloat16).view(np.uint16)
    for one in (low, high)
  ]
  return halves[0] | halves[1].astype(np.uint32) << np.uint32(16)


def run(
  kernel: Callable[..., None],
  inputs: Sequence[jax.Array],
  out: Sequence[jax.ShapeDtypeStruct],
  *,
  warps: int,
  blocks: int,
  scratch: int = 0,
  block_scratch: int = 0,
) -> list[jax.Array]:
  """As `warp.run`, on the CPU; may be called under jit."""

  def compute(*arrays):
    w = Lanes(warps, blocks)
    outputs = [
      np.frombuffer(
        bytearray(b'\xab' * (one.size * one.dtype.itemsize)), one.dtype
      )
      for one in out
    ]
    refs = [_ref(np.asarray(array).reshape(-1)) for array in arrays]
    refs += [_ref(array) for array in outputs]
    words = scratch or block_scratch
    if words:
      count = blocks * (warps if scratch else 1)
      own = np.full(count * words, 0xABABABAB, np.uint32)
      whole = bool(block_scratch)
      refs.append(Ref(own, np.uint32, words, shared=True, of_block=whole))
    kernel(w, *refs)
    return [
      array.reshape(one.shape) for array, one in zip(outputs, out, strict=True)
    ]

  def apart(*arrays):
    return _POOL.submit(compute, *arrays).result()

  inputs = [jnp.asarray(array) for array in inputs]
  return list(jax.pure_callback(apart, list(out), *inputs))


def _ref(array: np.ndarray) -> Ref:
  if array.dtype == np.float32:
    return Ref(array, np.float32, array.size)
  seen = np.dtype(f'uint{8 * array.dtype.itemsize}')
  return Ref(array.view(seen), seen.type, array.size)
