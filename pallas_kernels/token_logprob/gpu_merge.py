"""GPU: statistics of the blocks of a vocabulary, merged in the order of blocks.

With M the greatest maximum, s = sum_j s_j e^(m_j - M) and
u = sum_j e^(m_j - M) (u_j + (m_j - M) s_j): log-sum-exp is M + log s, and the
entropy log s - u / s.

The order of the two sums is that of the blocks: a chain of additions, of which a
large vocabulary has some hundred. So what is not the chain is done before, by many
lanes: a block of threads takes few rows, asks at once for all there is of them, and
the addends wait in shared memory. Who walks through the blocks, reading as it goes,
waits for memory all the time. Products and sums are rounded one by one.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import warp

ROWS = 8  # of a block of threads: a sector of 32 bytes
WARPGROUPS = 4  # of a block
LINES = WARPGROUPS * 128 // ROWS  # blocks of the vocabulary at a time
STEPS = 16  # of LINES, of which the addends wait in shared memory at once
TURN = 16  # additions between two looks at a loop's end
LOWEST = -1e30


def merged(
  parts: jax.Array, blocks: int, rows: int, *, interpret: bool = False
) -> list[jax.Array]:
  """Log-sum-exp, entropy and, of four kinds of parts, the chosen logit.

  Args:
    parts: float32 [launches, 3 or 4, blocks of a launch, T up to a multiple of
      ROWS]: m, s, u and c of each block and row.
    blocks: of all launches that mean something.
    rows: T.
    interpret: run on CPU.

  Returns:
    Two or three float32 [T].
  """
  _, kinds, some, high = parts.shape
  steps = -(-blocks // LINES)
  held = min(steps, STEPS)
  kernel = functools.partial(
    _merge, kinds=kinds, some=some, high=high, blocks=blocks, rows=rows
  )
  size = 2 * ROWS * (held * LINES + 4 * WARPGROUPS)
  return warp.run(
    kernel,
    parts,
    out=[jax.ShapeDtypeStruct((rows,), jnp.float32)] * (kinds - 1),
    warpgroups=WARPGROUPS,
    blocks=-(-rows // ROWS),
    block_scratch=size,
    interpret=interpret,
  )


def _merge(
  w, parts, *refs, kinds: int, some: int, high: int, blocks: int, rows: int
) -> None:
  *outs, scratch = refs
  own = w.lane & (ROWS - 1)  # its row, and
  line = w.own * (warp.LANES // ROWS) + w.lane // ROWS  # its block of LINES
  row = w.block * ROWS + own
  steps = -(-blocks // LINES)

  def place(step):
    """Where m of a block is, and whether there is such a block."""
    j = line + step * LINES
    inside = j < blocks
    j = j.minimum(blocks - 1)
    launch = j // some
    return (launch * (kinds * some) + (j - launch * some)) * high + row, inside

  places = [place(step) for step in range(steps)]

  def read(kind, some_steps, instead):
    found = [
      w.load(parts, places[step][0] + kind * some * high) for step in some_steps
    ]
    pairs = zip(some_steps, found, strict=True)
    return [w.where(places[step][1], one, instead) for step, one in pairs]

  def sums(some_steps):
    return read(1, some_steps, 0.0), read(2, some_steps, 0.0)

  rounds = [
    range(first, min(first + STEPS, steps)) for first in range(0, steps, STEPS)
  ]
  tops = read(0, range(steps), LOWEST)
  chosen = read(3, range(steps), 0.0) if kinds == 4 else []
  first_sums = sums(rounds[0])

  spare = 2 * ROWS * LINES * len(rounds[0])
  most = _over_lines(w, scratch, spare, 'max', tops, own)
  if chosen:  # all but one are 0, so that no order can be seen
    chosen = _over_lines(
      w, scratch, spare + 4 * WARPGROUPS * ROWS, 'add', chosen, own
    )
  total = w.value(0.0, 'f32')
  for some_steps in rounds:
    known = first_sums if some_steps is rounds[0] else sums(some_steps)
    for step, s, u in zip(some_steps, *known, strict=True):
      shift = tops[step] - most
      factor = w.exp(shift)
      at = (line + (step - some_steps[0]) * LINES) * (2 * ROWS) + own
      w.store(scratch, at, w.bits(s * factor))
      w.store(scratch, at + ROWS, w.bits(factor * (u + shift * s)))
    w.sync_block()
    total = _chain(w, scratch, len(some_steps) * LINES, total)
    if some_steps is not rounds[-1]:
      w.sync_block()

  def finish():
    u = w.shuffle_xor(total, ROWS)
    log = w.log(total)
    found = [most + log, log - u / total, *([chosen] if kinds == 4 else [])]

    def write():
      for out, one in zip(outs, found, strict=True):
        w.store(out, row, one)

    w.when((w.lane < ROWS) & (row < rows), write)

  w.when(w.own.equals(0), finish)


def _over_lines(w, scratch, spare: int, name: str, values, own):
  """Of each row, over all its lanes of the block: 'max', or 'add'."""
  found = values[0]
  for one in values[1:]:
    found = w.binary(name, found, one)
  distance = ROWS
  while distance < warp.LANES:
    found = w.binary(name, found, w.shuffle_xor(found, distance))
    distance *= 2

  def write():
    w.store(scratch, w.own * ROWS + own + spare, w.bits(found))

  w.when(w.lane < ROWS, write)
  w.sync_block()
  warps = 4 * WARPGROUPS
  rest = [
    w.float(w.load(scratch, own + (spare + i * ROWS))) for i in range(warps)
  ]
  return functools.reduce(functools.partial(w.binary, name), rest)


def _chain(w, scratch, count: int, total):
  """total + addend 0 + addend 1 ...: of s in the lower lanes, of u in others."""

  def add(total):
    def some(j, total):
      at = j * (2 * ROWS) + (w.lane & (2 * ROWS - 1))
      addends = [
        w.float(w.load(scratch, at + i * (2 * ROWS))) for i in range(TURN)
      ]
      for one in addends:
        total = total + one
      return [total]

    return w.loop(0, count, TURN, some, [total])

  return w.when(w.own.equals(0), add, [total])[0]
