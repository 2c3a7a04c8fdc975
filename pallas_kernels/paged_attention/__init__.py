"""Attention of a few queries a sequence over a paged cache of keys and values.

A page holds one block of a sequence: page `table[n, j]` has tokens j S to
(j + 1) S - 1 of sequence n. Query i of sequence n sits at `positions[n, i]` and
sees the tokens 0 to there, itself included: what the queries' own tokens give is
in the pages before this is called. One query a sequence is decoding, several are
a chunk of a prefill, or guesses that are checked at once.

Blocks are merged by the very code of `attention` with `block` = S, so a row's
bits are those that training computes for it, and depend neither on the pages
used, nor on how a prefill is cut, nor on the other sequences.

`decode` is a step of decoding: it writes the newest key and value of each sequence
first, into the pages that it gives back. `decode_turning` takes queries and keys
that are not turned by their positions yet.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention
from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels.paged_attention import reference

NAME = 'paged_attention'


def paged_attention(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  table: jax.Array,
  positions: jax.Array,
  *,
  scale: float,
  width: int = 0,
  split: int | None = 0,
  implementation: str | None = None,
) -> jax.Array:
  """Attention of each query over its sequence so far.

  Args:
    q: [N, Q, H, K].
    k_pages: [P, S, G, K], of the same dtype; S tokens a page. For latent
      attention in the absorbed form G = 1. Numbers that no query sees must be
      finite: they are multiplied by 0.
    v_pages: [P, S, G, W], or None: the first `width` numbers of the keys.
    table: int32 [N, M], pages of each sequence. Entries past a sequence's last
      token are not read.
    positions: int32 [N, Q], or [N]: of the first query, the others following.
      Negative: no query, and 0 comes out.
    scale: of the scores, above 0.
    width: see `v_pages`.
    split: tokens of a split of keys, a multiple of S, or 0 for none. With splits
      the multiprocessors of a GPU share long sequences where there are few. The
      bits are those of `attention` with the same split, and of no other. None:
      `gpu.SPLIT` where there are few, and then bits depend on their number too.
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    [N, Q, H, W] in q's dtype. Not differentiable: training has `attention`.

  Raises:
    ValueError: shapes, dtypes or positions that do not fit each other, or an
      implementation that cannot run.
  """
  _check(q, k_pages, v_pages, table, positions, scale, width)
  if positions.ndim == 1:
    more = jnp.arange(q.shape[1], dtype=positions.dtype)[None, :]
    first = positions[:, None]
    positions = jnp.where(first < 0, -1, first + more)
  attention.check_split(split or 0, k_pages.shape[1])
  width = width if v_pages is None else v_pages.shape[-1]
  chosen = _choose(q, k_pages, v_pages, width, implementation)
  if not q.size:
    return jnp.zeros((*q.shape[:3], width), q.dtype)
  arguments = q, k_pages, v_pages, table, positions
  if chosen == 'reference':
    return reference.forward(*arguments, width=width, scale=float(scale))
  from pallas_kernels.paged_attention import gpu
  from pallas_kernels.paged_attention import tpu

  sizes = dict(width=width, scale=float(scale))
  sizes['interpret'] = chosen.endswith('interpret')
  if chosen.startswith('tpu'):
    return tpu.forward(*arguments, **sizes)
  return gpu.forward(*arguments, **sizes, split=split)


def in_place(
  q: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  table: jax.Array,
  positions: jax.Array,
  *,
  first: int,
  scale: float,
  width: int = 0,
  implementation: str | None = None,
) -> jax.Array | None:
  """`paged_attention` of rows as they lie behind others; the bits are the same.

  Neither queries nor results are laid out anew: 135 MB of each for 8,192 rows of
  32 heads of 128 numbers, read and written.

  Args:
    q: [R, H, K]; the rows from `first` on are of N sequences, as many of each.
    k_pages, v_pages, scale, width, implementation: see `paged_attention`.
    table: int32 [N, M].
    positions: int32 [R - first]; negative: no query, and 0 comes out.
    first: rows before them.

  Returns:
    [R, H, W] with nothing known in the first rows; or None, where tunings do not
    say that this is faster, or no kernel can do it: not on other devices, nor for
    less than 8 heads of queries to one of keys, nor for few sequences.

  Raises:
    ValueError: as `paged_attention`.
  """
  n = len(table)
  if not dispatch.tuning(NAME).get('chunk', {}).get('in_place', False):
    return None
  if not n or first >= len(q) or (len(q) - first) % n:
    return None
  some = q[first:].reshape(n, -1, *q.shape[1:])
  places = positions.reshape(n, -1)
  _check(some, k_pages, v_pages, table, places, scale, width)
  width = width if v_pages is None else v_pages.shape[-1]
  chosen = _choose(some, k_pages, v_pages, width, implementation)
  if not chosen.startswith('gpu'):
    return None
  from pallas_kernels.paged_attention import gpu

  if gpu.leave_idle(n * k_pages.shape[2]):
    return None
  return gpu.in_place(
    *(q, k_pages, v_pages, table, positions),
    first=first,
    width=width,
    scale=float(scale),
    interpret=chosen.endswith('interpret'),
  )


def decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array | None,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  table: jax.Array,
  positions: jax.Array,
  *,
  scale: float,
  width: int = 0,
  split: int | None = 0,
  fused: bool | None = None,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Writes the newest token of each sequence, and attends with its queries.

  Args:
    q: [N, H, K], of a sequence each: no other row of it is in this step.
    k: [N, G, K]; v: [N, G, W], or None where values are part of the keys.
    k_pages, v_pages, table: see `paged_attention`. No two sequences have the page
      in common that is written to.
    positions: int32 [N], of the newest token; negative: there is none. Nothing
      is written then, and 0 comes out.
    scale, width, split, implementation: see `paged_attention`.
    fused: whether one kernel writes and attends, where there is one that can; it
      changes no bit. None: where the tunings of the device say that it is faster.

  Returns:
    (out [N, H, W], k_pages, v_pages), the pages with what was written.

  Raises:
    ValueError: as `paged_attention`.
  """
  _check_newest(q, k, v, k_pages, v_pages, table, positions, scale, width)
  width = width if v_pages is None else v_pages.shape[-1]
  if fused is None:
    fused = dispatch.tuning(NAME).get('decode', {}).get('fused', False)
  if fused and q.size:
    chosen = _choose(q[:, None], k_pages, v_pages, width, implementation)
    if chosen.startswith('gpu'):
      from pallas_kernels.paged_attention import gpu_decode

      if gpu_decode.takes(q, k_pages, v_pages, table, split):
        return gpu_decode.forward(
          *(q, k, v, k_pages, v_pages, table, positions),
          scale=float(scale),
          interpret=chosen.endswith('interpret'),
        )
  block = k_pages.shape[1]
  at = jnp.maximum(positions, 0)
  page = jnp.take_along_axis(table, at[:, None] // block, axis=1)[:, 0]
  # Beyond the last page: dropped. On a GPU hundreds of rows at one address wait
  # for each other, longer than all else in the step takes.
  page = jnp.where(positions < 0, len(k_pages), page)
  k_pages = k_pages.at[page, at % block].set(k, unique_indices=True)
  if v is not None:
    v_pages = v_pages.at[page, at % block].set(v, unique_indices=True)
  out = paged_attention(
    *(q[:, None], k_pages, v_pages, table, positions[:, None]),
    scale=scale,
    width=width if v is None else 0,
    split=split,
    implementation=implementation,
  )
  return out[:, 0], k_pages, v_pages


def turns_itself(
  heads: int,
  k_pages: jax.Array,
  v_pages: jax.Array | None,
  table: jax.Array,
  *,
  split: int | None = 0,
  implementation: str | None = None,
) -> bool:
  """Whether `decode_turning` can, and is faster by the tunings of the device.

  `heads` are those of queries; the others see `decode`.
  """
  tuned = dispatch.tuning(NAME).get('decode', {})
  if v_pages is None or not tuned.get('turning', False):
    return False
  q = jax.ShapeDtypeStruct(
    (len(table), heads, k_pages.shape[-1]), k_pages.dtype
  )
  whole = jax.ShapeDtypeStruct((len(table), 1, *q.shape[1:]), q.dtype)
  chosen = _choose(whole, k_pages, v_pages, v_pages.shape[-1], implementation)
  if not chosen.startswith('gpu'):
    return False
  from pallas_kernels.paged_attention import gpu_decode

  return gpu_decode.takes(q, k_pages, v_pages, table, split)


def decode_turning(
  qkv: jax.Array,
  turns: jax.Array,
  k_pages: jax.Array,
  v_pages: jax.Array,
  table: jax.Array,
  positions: jax.Array,
  *,
  scale: float,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`decode` of queries and keys that are still to be turned; see `turns_itself`.

  The halves (a, b) of a query or key become (a cos - b sin, b cos + a sin), in
  float32, and are rounded once.

  Args:
    qkv: [N, H + 2 G, K]: queries, keys and values as one product gives them.
    turns: float32 [N, K]: cos and then sin of the K / 2 pairs. Where they have
      16 significant bits the sums are of exact products of bfloat16, and the
      bits are those of any other way to turn.
    (others): see `decode`.

  Raises:
    ValueError: as `decode`, or turns of another shape, or what `turns_itself`
      says no kernel can.
  """
  if qkv.ndim != 3 or k_pages.ndim != 4 or v_pages is None:
    raise ValueError(
      f'qkv {qkv.shape} must be [N, H + 2 G, K], k_pages {k_pages.shape} and'
      ' v_pages [P, S, G, K] (and not None: there values are part of the keys)'
    )
  n, g = len(qkv), k_pages.shape[2]
  if turns.shape != (n, qkv.shape[-1]):
    raise ValueError(f'turns {turns.shape} must be [N, K] of qkv {qkv.shape}')
  if qkv.shape[1] <= 2 * g:
    raise ValueError(
      f'qkv {qkv.shape} must be [N, H + 2 G, K]; {g} heads of keys and as many of'
      ' values leave no queries'
    )
  checks.dtype(jnp.float32, turns=turns)
  q = qkv[:, None, : -2 * g]
  checks.shape('[N]', (n,), positions=positions)
  _check(q, k_pages, v_pages, table, positions, scale, 0)
  _check_written(table, positions, k_pages.shape[1])
  chosen = _choose(q, k_pages, v_pages, v_pages.shape[-1], implementation)
  if not chosen.startswith('gpu'):
    raise ValueError(
      f'implementation={implementation!r}: only the GPU kernel turns; turn'
      ' queries and keys before, and call decode'
    )
  from pallas_kernels.paged_attention import gpu_decode

  if not gpu_decode.takes(q[:, 0], k_pages, v_pages, table, 0):
    raise ValueError(
      f'qkv {qkv.shape}, k_pages {k_pages.shape}, v_pages {v_pages.shape}: the'
      ' kernel that turns takes K = W to 128'
      f' and up to {gpu_decode.ROWS - 2} heads of queries to one of keys, with jax'
      ' 0.11; turn queries and keys before, and call decode'
    )
  if not q.size:
    return qkv[:, : -2 * g], k_pages, v_pages
  return gpu_decode.forward_turning(
    *(qkv, turns, k_pages, v_pages, table, positions),
    scale=float(scale),
    interpret=chosen.endswith('interpret'),
  )


def _check(q, k_pages, v_pages, table, positions, scale, width) -> None:
  if q.ndim != 4 or k_pages.ndim != 4:
    raise ValueError(
      f'q {q.shape} must be [N, Q, H, K] and k_pages {k_pages.shape}'
      ' [P, S, G, K]'
    )
  attention.check_heads(q, k_pages, v_pages, scale, k_pages.shape[1], width)
  if table.ndim != 2 or table.shape[0] != q.shape[0]:
    raise ValueError(
      f'table {table.shape} must be [N, M] with N = {q.shape[0]}'
    )
  if positions.shape not in (q.shape[:2], q.shape[:1]):
    raise ValueError(
      f'positions {positions.shape} must be [N, Q] = {q.shape[:2]}, or [N]'
    )
  checks.integers(table=table, positions=positions)
  known = checks.known(positions)
  if known is not None and known.size and q.size:
    if known.ndim == 1:  # of the first query, which others follow
      known = np.where(known < 0, -1, known + (q.shape[1] - 1))[:, None]
    _check_pages(checks.known(table), known.max(axis=1), table, k_pages)


def _check_pages(known, last, table, k_pages) -> None:
  """ValueError for last positions [N] past the table, or pages that are none.

  Of the table only what is read has to be a page: entries up to the last one.
  """
  count, block = k_pages.shape[:2]
  if last.max() >= table.shape[1] * block:
    raise ValueError(
      f'position {last.max()} lies past the {table.shape[1]} pages of {block}'
      ' tokens of a sequence; give a wider table'
    )
  if known is None:
    return
  first = np.arange(table.shape[1])[None, :] * block
  wrong = (first <= last[:, None]) & ((known < 0) | (known >= count))
  if wrong.any():
    n, j = np.argwhere(wrong)[0].tolist()
    raise ValueError(
      f'table[{n}, {j}] is page {known[n, j]}, and there are {count}; each up to'
      f' position {last[n]} of sequence {n} must be 0 to {count - 1}'
    )


def _check_newest(
  q, k, v, k_pages, v_pages, table, positions, scale, width
) -> None:
  """ValueError for queries, keys and values of `decode` that do not fit."""
  if q.ndim != 3:
    raise ValueError(f'q {q.shape} must be [N, H, K]')
  checks.shape('[N]', q.shape[:1], positions=positions)
  _check(q[:, None], k_pages, v_pages, table, positions, scale, width)
  if (v is None) != (v_pages is None):
    raise ValueError(
      f'v is {v if v is None else v.shape} and v_pages'
      f' {v_pages if v_pages is None else v_pages.shape}; give both, or neither'
      ' where values are part of the keys'
    )
  for name, one, pages in (('k', k, k_pages), ('v', v, v_pages)):
    if one is not None:
      size = (q.shape[0], *pages.shape[2:])
      checks.shape(f'[N, G, numbers] of {name}_pages', size, **{name: one})
      checks.dtype(pages.dtype, **{name: one})
  _check_written(table, positions, k_pages.shape[1])


def _check_written(table, positions, block: int) -> None:
  """ValueError for a page that two sequences would write to."""
  table, positions = checks.known(table), checks.known(positions)
  if table is None or positions is None:
    return
  own = np.flatnonzero(positions >= 0)
  pages, counts = np.unique(
    table[own, positions[own] // block], return_counts=True
  )
  if (counts > 1).any():
    raise ValueError(
      f'page {pages[np.argmax(counts)]} is written to by {counts.max()}'
      ' sequences; give each a page of its own for its newest token'
    )


def _choose(q, k_pages, v_pages, width, implementation) -> str:
  gpu_fault = tpu_fault = None
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.paged_attention import gpu
    from pallas_kernels.paged_attention import tpu

    gpu_fault = gpu.unsupported(q, k_pages, v_pages, width)
    tpu_fault = tpu.unsupported(q, k_pages, v_pages, width)
  return dispatch.choose(NAME, implementation, gpu_fault, tpu_fault)
