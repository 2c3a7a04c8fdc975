"""Kernels for the lanes of a warp: what Mosaic GPU has no operations for.

Mosaic GPU computes with whole arrays; it cannot rank, gather or scatter. Such a
kernel is written here as a function of one lane, `kernel(w, *refs)`, where `w`
is one of two writers with the same methods:

  Ptx        writes the function down as PTX, which is put into a Mosaic GPU
             kernel, for the device.
  numpy      `warp_interpret.Lanes` runs it, all lanes of all warps in step, on
             a CPU. It refuses reads and writes out of bounds, and collectives
             that not all lanes of a warp take part in.

A `Value` is what a lane holds: 'b32' (unsigned integers), 'f32' or 'pred'.
Warps do not see each other, but for those of a block that share memory and wait
for each other (`sync_block`). Products and sums of f32 are rounded one by one;
nothing is contracted to a fused multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import dataclasses
import math
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mosaic

LANES = 32
ALL = 0xFFFFFFFF
LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Value:
  """What each lane holds; operators write the operation down with its writer."""

  w: Any
  kind: str  # 'b32', 'f32' or 'pred'
  raw: Any

  def __add__(self, other):
    return self.w.binary('add', self, other)

  def __sub__(self, other):
    return self.w.binary('sub', self, other)

  def __mul__(self, other):
    return self.w.binary('mul', self, other)

  def __truediv__(self, other):
    return self.w.binary('div', self, other)

  def __floordiv__(self, other):
    return self.w.binary('div', self, other)

  def __mod__(self, other):
    return self.w.binary('rem', self, other)

  def __and__(self, other):
    return self.w.binary('and', self, other)

  def __or__(self, other):
    return self.w.binary('or', self, other)

  def __xor__(self, other):
    return self.w.binary('xor', self, other)

  def __lshift__(self, other):
    return self.w.binary('shl', self, other)

  def __rshift__(self, other):
    return self.w.binary('shr', self, other)

  def __lt__(self, other):
    return self.w.compare('lt', self, other)

  def __le__(self, other):
    return self.w.compare('le', self, other)

  def __ge__(self, other):
    return self.w.compare('ge', self, other)

  def __gt__(self, other):
    return self.w.compare('gt', self, other)

  def equals(self, other):
    return self.w.compare('eq', self, other)

  def differs(self, other):
    return self.w.compare('ne', self, other)

  def maximum(self, other):
    return self.w.binary('max', self, other)

  def minimum(self, other):
    return self.w.binary('min', self, other)


@dataclasses.dataclass(frozen=True)
class Ref:
  """An array in memory, flat; `raw` is the writer's own."""

  raw: Any
  dtype: Any
  size: int
  shared: bool = False
  start: Any = 0  # used by the interpreter
  of_block: bool = False  # shared by all warps of a block; the same

  @property
  def kind(self) -> str:
    return 'f32' if self.dtype == np.float32 else 'b32'

  @property
  def bytes(self) -> int:
    return np.dtype(self.dtype).itemsize


# --- PTX ---------------------------------------------------------------------

_BINARY = {
  'b32': dict(
    add='add.u32',
    sub='sub.u32',
    mul='mul.lo.u32',
    div='div.u32',
    rem='rem.u32',
    shl='shl.b32',
    shr='shr.u32',
    max='max.u32',
    min='min.u32',
    **{name: f'{name}.b32' for name in ('and', 'or', 'xor')},
  ),
  'f32': dict(
    **{name: f'{name}.rn.f32' for name in ('add', 'sub', 'mul', 'div')},
    max='max.f32',
    min='min.f32',
  ),
  'pred': {name: f'{name}.pred' for name in ('and', 'or', 'xor')},
}
_PREFIX = {'b32': 'kr', 'f32': 'kf', 'pred': 'kp', 'b64': 'kd', 'b16': 'kh'}
_SUFFIX = {'b32': 'b32', 'f32': 'f32', 'pred': 'pred'}


class Ptx:
  """Writes a kernel of lanes down as the text of one block of PTX."""

  def __init__(self, warps_per_block: int, blocks: int):
    self.lines: list[str] = []
    self.used = dict.fromkeys(_PREFIX, 0)
    self.labels = 0
    self.warps = warps_per_block * blocks
    self.warps_per_block = warps_per_block
    thread, self.block = self._special('%tid.x'), self._special('%ctaid.x')
    self.lane = thread & (LANES - 1)
    self.own = thread >> 5
    self.warp = self.block * warps_per_block + self.own

  def text(self) -> str:
    """The block, with its registers declared."""
    declared = [
      f'.reg .{kind} {_PREFIX[kind]}<{self.used[kind]}>;'
      for kind in _PREFIX
      if self.used[kind]
    ]
    return '\n'.join(['{', *declared, *self.lines, '}'])

  # Registers and constants.

  def register(self, kind: str) -> Value:
    name = f'{_PREFIX[kind]}{self.used[kind]}'
    self.used[kind] += 1
    return Value(self, kind, name)

  def emit(self, operation: str, kind: str, *operands: str) -> Value:
    out = self.register(kind)
    self.lines.append(f'{operation} {", ".join([out.raw, *operands])};')
    return out

  def emit_address(self, generic: str) -> str:
    out = self.register('b64').raw
    self.lines.append(f'cvta.to.global.u64 {out}, {generic};')
    return out

  def _special(self, name: str) -> Value:
    return self.emit('mov.u32', 'b32', name)

  def _operand(self, value: Any, kind: str) -> str:
    if isinstance(value, Value):
      assert value.kind == kind, (value, kind)
      return value.raw
    if kind == 'f32':
      return f'0f{np.float32(value).view(np.uint32):08X}'
    return str(int(value) & ALL)

  def value(self, value: Any, kind: str = 'b32') -> Value:
    if isinstance(value, Value):
      return value
    if kind == 'pred':
      return self.compare('eq', self.value(int(value)), 1)
    return self.emit(f'mov.{kind}', kind, self._operand(value, kind))

  # Arithmetic.

  def binary(self, name: str, a: Value, b: Any) -> Value:
    operation = _BINARY[a.kind][name]
    return self.emit(operation, a.kind, a.raw, self._operand(b, a.kind))

  def compare(self, name: str, a: Value, b: Any) -> Value:
    kind = 'u32' if a.kind == 'b32' else 'f32'
    return self.emit(
      f'setp.{name}.{kind}', 'pred', a.raw, self._operand(b, a.kind)
    )

  def where(self, condition: Value, a: Any, b: Any) -> Value:
    kind = a.kind if isinstance(a, Value) else b.kind
    return self.emit(
      f'selp.{_SUFFIX[kind]}',
      kind,
      self._operand(a, kind),
      self._operand(b, kind),
      condition.raw,
    )

  def negate(self, a: Value) -> Value:
    return self.emit('not.pred', 'pred', a.raw)

  def bits(self, a: Value) -> Value:
    return self.emit('mov.b32', 'b32', a.raw)

  def float(self, a: Value) -> Value:
    return self.emit('mov.b32', 'f32', a.raw)

  def count_bits(self, a: Value) -> Value:
    return self.emit('popc.b32', 'b32', a.raw)

  def lowest_bit(self, a: Value) -> Value:
    """Place of the lowest bit that is set; there must be one."""
    return self.emit('clz.b32', 'b32', self.emit('brev.b32', 'b32', a.raw).raw)

  def permute(self, a: Value, b: Value, places: int) -> Value:
    """Four of the eight bytes of a and b; a digit of `places` names each."""
    return self.emit('prmt.b32', 'b32', a.raw, b.raw, f'{places:#x}')

  def choose(self, a: Value, b: Value, digits: Value) -> Value:
    """As `permute`, by the lowest four digits of what a lane holds, 0 to 7."""
    return self.emit('prmt.b32', 'b32', a.raw, b.raw, digits.raw)

  def multiply_pairs(self, a: Value, b: Value) -> Value:
    """Products of two bfloat16 in each b32, rounded to bfloat16."""
    return self.emit('mul.rn.bf16x2', 'b32', a.raw, b.raw)

  def pack(self, low: Value, high: Value) -> Value:
    """Two f32, rounded to bfloat16, in a b32."""
    return self.emit('cvt.rn.bf16x2.f32', 'b32', high.raw, low.raw)

  def e4m3(self, low: Value, high: Value) -> Value:
    """Two f32, rounded to float8_e4m3fn and at most 448, in the low 16 bits."""
    half = self.register('b16').raw
    self.lines.append(
      f'cvt.rn.satfinite.e4m3x2.f32 {half}, {high.raw}, {low.raw};'
    )
    return self.emit('cvt.u32.u16', 'b32', half)

  def multiply_add(
    self, a: Sequence[Value], b: Sequence[Value], c: Sequence[Value]
  ) -> list[Value]:
    """a @ b + c over the warp: [16, 16] by [16, 8] bfloat16, c and result f32.

    With g = lane / 4 and i = 2 (lane % 4), a lane holds of a rows g, g + 8 at
    columns i, i + 1, then both at i + 8, i + 9 (four b32); of b rows i, i + 1,
    then i + 8, i + 9 of column g; of c columns i, i + 1 of row g, then of g + 8.
    """
    out = [self.register('f32') for _ in range(4)]
    groups = [
      '{' + ', '.join(one.raw for one in group) + '}'
      for group in (out, a, b, c)
    ]
    self.lines.append(
      'mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32'
      f' {", ".join(groups)};'
    )
    return out

  def exp(self, a: Value) -> Value:
    return self.emit('ex2.approx.ftz.f32', 'f32', (a * LOG2_E).raw)

  def log(self, a: Value) -> Value:
    """Natural; between 0.5 and 2 within 2e-7, elsewhere to some 2e-7 of it."""
    return self.emit('lg2.approx.ftz.f32', 'f32', a.raw) * (1 / LOG2_E)

  def root(self, a: Value) -> Value:
    """Square root, rounded as IEEE 754 has it."""
    return self.emit('sqrt.rn.f32', 'f32', a.raw)

  # What the lanes of a warp do together; all of them have to.

  def ballot(self, a: Value) -> Value:
    return self.emit('vote.sync.ballot.b32', 'b32', a.raw, str(ALL))

  def shuffle(self, a: Value, lane: Any) -> Value:
    return self._shuffle('idx', a, self._operand(lane, 'b32'), 31)

  def shuffle_up(self, a: Value, by: int) -> Value:
    """From `by` lanes below; the lowest keep their own."""
    return self._shuffle('up', a, str(by), 0)

  def shuffle_xor(self, a: Value, by: int) -> Value:
    return self._shuffle('bfly', a, str(by), 31)

  def _shuffle(self, mode, a, by, clamp) -> Value:
    return self.emit(
      f'shfl.sync.{mode}.b32', a.kind, a.raw, by, str(clamp), str(ALL)
    )

  def reduce(self, name: str, a: Value) -> Value:
    """'max', 'min' or 'add' of integers over the warp, for every lane."""
    return self.emit(f'redux.sync.{name}.u32', 'b32', a.raw, str(ALL))

  def match(self, a: Value) -> Value:
    """Which lanes hold the same, as bits."""
    return self.emit('match.any.sync.b32', 'b32', a.raw, str(ALL))

  def sync(self) -> None:
    """What lanes of the warp wrote to memory is seen by the others."""
    self.lines.append(f'bar.warp.sync {ALL};')

  def sync_block(self) -> None:
    """The same of all warps of the block; all of them have to come."""
    self.lines.append('bar.sync 0;')

  # Memory.

  def _address(self, ref: Ref, index: Any) -> str:
    if ref.shared:
      place = self.value(index) * ref.bytes + Value(self, 'b32', ref.raw)
      return place.raw
    out = self.register('b64').raw
    place = self._operand(index, 'b32')
    if not isinstance(index, Value):
      place = self.value(index).raw
    self.lines.append(f'mad.wide.u32 {out}, {place}, {ref.bytes}, {ref.raw};')
    return out

  def _type(self, ref: Ref) -> str:
    if ref.kind == 'f32':
      return 'f32'
    return f'u{8 * ref.bytes}'

  def _space(self, ref: Ref) -> str:
    return 'shared' if ref.shared else 'global'

  def load(self, ref: Ref, index: Any) -> Value:
    """An element, its bits extended with zeros where it is an integer."""
    address = self._address(ref, index)
    operation = f'ld.{self._space(ref)}.{self._type(ref)}'
    return self.emit(operation, ref.kind, f'[{address}]')

  def load_words(
    self,
    ref: Ref,
    index: Any,
    count: int,
    offset: int = 0,
    once: bool = False,
  ) -> list[Value]:
    """1, 2 or 4 b32 from element index + offset, at a multiple of their bytes.

    `once`: they are not read again, and need no place in the first cache.
    """
    address = f'{self._address(ref, index)}+{offset * ref.bytes}'
    out = [self.register('b32') for _ in range(count)]
    names = ', '.join(one.raw for one in out)
    hint = '.L1::no_allocate' if once else ''
    vector = f'.v{count}' if count > 1 else ''
    names = f'{{{names}}}' if count > 1 else names
    self.lines.append(f'ld.global{hint}{vector}.u32 {names}, [{address}];')
    return out

  def prefetch(self, ref: Ref, index: Any, count: int) -> None:
    """Asks for `count` elements to come to the L2 cache; multiples of 16 bytes.

    One lane asks, and what it asks for must be there.
    """
    address = self._address(ref, index)
    first = self.compare('eq', self.lane, 0)
    self.lines.append(
      f'@{first.raw} cp.async.bulk.prefetch.L2.global [{address}],'
      f' {count * ref.bytes};'
    )

  def store_words(self, ref: Ref, index: Any, words: Sequence[Value]) -> None:
    """1, 2 or 4 b32 or f32 to an element at a multiple of their bytes."""
    address = self._address(ref, index)
    names = ', '.join(one.raw for one in words)
    vector = f'.v{len(words)}' if len(words) > 1 else ''
    names = f'{{{names}}}' if len(words) > 1 else names
    self.lines.append(f'st.global{vector}.b32 [{address}], {names};')

  def part(self, ref: Ref, number: Any, size: int) -> Ref:
    """Elements from number * size on, which may be past 2^32."""
    out = self.register('b64').raw
    place = self.value(number).raw
    size_bytes = size * ref.bytes
    self.lines.append(f'mad.wide.u32 {out}, {place}, {size_bytes}, {ref.raw};')
    return dataclasses.replace(ref, raw=out, size=size)

  def store(self, ref: Ref, index: Any, value: Any) -> None:
    value = self.value(value, ref.kind)
    address = self._address(ref, index)
    self.lines.append(
      f'st.{self._space(ref)}.{self._type(ref)} [{address}], {value.raw};'
    )

  # Control.

  def _label(self) -> str:
    self.labels += 1
    return f'kl{self.labels}'

  def _copies(self, carry: Sequence[Any]) -> list[Value]:
    out = []
    for one in carry:
      kind = one.kind if isinstance(one, Value) else 'b32'
      copy = self.register(kind)
      self._move(copy, one)
      out.append(copy)
    return out

  def _move(self, to: Value, value: Any) -> None:
    kind = _SUFFIX[to.kind]
    self.lines.append(f'mov.{kind} {to.raw}, {self._operand(value, to.kind)};')

  def _update(self, to: Sequence[Value], new: Sequence[Any]) -> None:
    staged = [
      self._copies([one])[0] if isinstance(one, Value) else one for one in new
    ]
    for register, one in zip(to, staged, strict=True):
      self._move(register, one)

  def repeat(
    self,
    condition: Callable[..., Value],
    body: Callable[..., Sequence[Any]],
    carry: Sequence[Any] = (),
  ) -> list[Value]:
    """while condition(*carry): carry = body(*carry)."""
    carry = self._copies(carry)
    begin, end = self._label(), self._label()
    self.lines.append(f'{begin}:')
    self.lines.append(f'@!{condition(*carry).raw} bra {end};')
    self._update(carry, body(*carry) or ())
    self.lines += [f'bra {begin};', f'{end}:']
    return carry

  def loop(
    self,
    start: Any,
    stop: Any,
    step: Any,
    body: Callable[..., Sequence[Any]],
    carry: Sequence[Any] = (),
  ) -> list[Value]:
    """for i in range(start, stop, step): carry = body(i, *carry)."""
    return self.repeat(
      lambda i, *_: i < stop,
      lambda i, *carry: [i + step, *(body(i, *carry) or ())],
      [self.value(start), *carry],
    )[1:]

  def when(
    self,
    condition: Value,
    then: Callable[..., Sequence[Any]],
    carry: Sequence[Any] = (),
  ) -> list[Value]:
    """if condition: carry = then(*carry)."""
    carry = self._copies(carry)
    end = self._label()
    self.lines.append(f'@!{condition.raw} bra {end};')
    self._update(carry, then(*carry) or ())
    self.lines.append(f'{end}:')
    return carry


# --- Running -----------------------------------------------------------------


def run(
  kernel: Callable[..., None],
  *inputs: jax.Array,
  out: Sequence[jax.ShapeDtypeStruct],
  warpgroups: int,
  blocks: int,
  scratch: int = 0,
  block_scratch: int = 0,
  interpret: bool = False,
) -> list[jax.Array]:
  """Runs a kernel of lanes.

  Args:
    kernel: `kernel(w, *inputs, *outputs)`, and a last `Ref` of `scratch` words
      of 32 bits, each warp's own, where there are any.
    inputs: of 8, 16 or 32 bits an element; floats of 16 bits are seen as bits.
    out: what it writes.
    warpgroups: of 4 warps, in a block.
    blocks: of the grid.
    scratch: words of each warp in shared memory.
    block_scratch: instead, words of all warps of a block together.
    interpret: run on CPU.

  Returns:
    The outputs.
  """
  if interpret:
    from pallas_kernels import warp_interpret

    return warp_interpret.run(
      kernel,
      inputs,
      out,
      warps=4 * warpgroups,
      blocks=blocks,
      scratch=scratch,
      block_scratch=block_scratch,
    )

  words = 4 * warpgroups * scratch or block_scratch

  def body(*refs):
    inside(
      *(kernel, *refs),
      warpgroups=warpgroups,
      blocks=blocks,
      scratch=scratch,
      block_scratch=block_scratch,
    )

  return plgpu.kernel(
    body,
    out_type=list(out),
    scratch_types=[mosaic.linear((words,), jnp.uint32)] if words else [],
    grid=(blocks,),
    grid_names=('sm',),
    num_threads=warpgroups,
    thread_name='wg',
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
  )(*inputs)


def inside(
  kernel: Callable[..., None],
  *refs: Any,
  warpgroups: int,
  blocks: int,
  scratch: int = 0,
  block_scratch: int = 0,
) -> None:
  """Lanes within a kernel of Mosaic GPU, of all warps of its blocks.

  Args:
    kernel: `kernel(w, *refs)`.
    refs: references in that kernel; the last one is in shared memory, of 32 bits,
      where there is `scratch` or `block_scratch`.
    (others): see `run`.
  """
  arrays = [(jnp.dtype(ref.dtype), math.prod(ref.shape)) for ref in refs]
  text = ptx(kernel, arrays, warpgroups, blocks, scratch, block_scratch)

  def inline(ctx, *memory):
    del ctx
    _inline(text, memory, bool(scratch or block_scratch))

  plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))(inline)(*refs)


def ptx(
  kernel: Callable[..., None],
  arrays: Sequence[tuple[Any, int]],
  warpgroups: int,
  blocks: int,
  scratch: int = 0,
  block_scratch: int = 0,
) -> str:
  """The kernel as PTX, where $i is the address of arrays[i] (dtype, size)."""
  w = Ptx(4 * warpgroups, blocks)
  places = []
  for i, (dtype, size) in enumerate(arrays):
    if scratch and i == len(arrays) - 1:
      base = Value(w, 'b32', f'${i}') + w.own * (4 * scratch)
      places.append(Ref(base.raw, np.uint32, scratch, shared=True))
    elif block_scratch and i == len(arrays) - 1:
      places.append(Ref(f'${i}', np.uint32, block_scratch, shared=True))
    else:
      base = w.emit_address(f'${i}')
      places.append(Ref(base, _seen(dtype), size))
  kernel(w, *places)
  return w.text()


def _seen(dtype: Any) -> Any:
  """How lanes see elements: float32, or unsigned of the same size."""
  if dtype == np.float32:
    return np.float32
  return np.dtype(f'uint{8 * dtype.itemsize}').type


def _inline(text: str, memory: Sequence[Any], shared: bool) -> None:
  """Puts PTX into the kernel that is being lowered; $i are addresses."""
  from jax.experimental.mosaic.gpu import utils
  from jaxlib.mlir import ir
  from jaxlib.mlir.dialects import llvm

  sizes = [64] * (len(memory) - shared) + [32] * shared
  operands = [
    llvm.ptrtoint(ir.IntegerType.get_signless(bits), utils.memref_ptr(ref))
    for bits, ref in zip(sizes, memory, strict=True)
  ]
  llvm.inline_asm(
    ir.Type.parse('!llvm.void'),
    operands,
    text,
    ','.join(['l' if bits == 64 else 'r' for bits in sizes] + ['~{memory}']),
    has_side_effects=True,
  )
