"""Which cut of a kernel's work is the fastest here: candidates for the tunings.

  python -m pallas_kernels.bench --tune tunings.json --only attention

An entry of `tunings/<device>.json` says how the work of a kernel is cut for some
sizes, and changes no bit of the result. For each key there are candidates; they
are compiled as a model would get them, compared with the kernel's own choice bit
for bit, and timed in turns on data that are not in the cache. What is written is
what the device has now, with the entries that were beaten by more than noise.

What a turn of all candidates costs is compiling: a key takes some seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import copy
import dataclasses
import functools
import itertools
import json
import math
import statistics
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import attention
from pallas_kernels import bench_rows
from pallas_kernels import bench_time
from pallas_kernels import dispatch
from pallas_kernels import grouped_matmul
from pallas_kernels import matmul
from pallas_kernels import paged_attention
from pallas_kernels import token_logprob
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.bench_rows import Row
from pallas_kernels.bench_rows import Rows
from pallas_kernels.grouped_matmul import shapes as grouped_shapes
from pallas_kernels.token_logprob import shapes as logprob_shapes

CACHE = 2**27  # bytes that the arguments have together: more than the L2 cache
COPIES = 256  # of the arguments, at most: enough of 512 kB
GAIN = 0.98  # of the time without it: what an entry has to reach
KEPT = 0.99  # of the time of what is there now: what replaces it
DEFAULT = 'default'  # no entry: what the kernel chooses by itself
PREFIX = 'tune '  # of operations of these rows


@dataclasses.dataclass(frozen=True)
class Case:
  """A key of the tunings, measured at one size.

  Attributes:
    operation: of the tunings.
    key: in them.
    name: of the size; those of a key go from small to large.
    draw: arguments from a seed.
    run: the operation, as a model calls it.
    candidates: entries to try.
    most: rows, where entries say up to how many rows they hold.
  """

  operation: str
  key: str
  name: str
  draw: Callable[[Any], tuple[Any, ...]]
  run: Callable[..., Any]
  candidates: tuple[dict[str, Any], ...]
  most: int = 0

  def labelled(self) -> dict[str, dict[str, Any] | None]:
    """Candidates by what a row calls them; the default, and what is there now."""
    found: dict[str, dict[str, Any] | None] = {DEFAULT: None}
    now = dispatch.tuning(self.operation).get(self.key)
    for one in (*self.candidates, *([] if now is None else [now])):
      entry = {name: value for name, value in one.items() if name != 'most'}
      found[words(entry)] = entry
    return found

  def entry(self, candidate: dict[str, Any]) -> dict[str, Any]:
    """As the operation reads it here, at this size."""
    return candidate | (dict(most=self.most) if self.most else {})


def words(entry: dict[str, Any]) -> str:
  return ', '.join(f'{k}={v}' for k, v in sorted(entry.items())) or 'as it is'


def rows(case: Case) -> Rows:
  """A row for each candidate, the default first."""
  labelled = case.labelled()
  arguments = jax.eval_shape(case.draw, bench_rows.SEED)
  out = jax.eval_shape(case.run, *arguments)
  programs = {
    'draw': (case.draw, bench_rows.SEED),
    'same': (bench_rows.differing, out, out),
  }
  for label, candidate in labelled.items():
    programs[f'{label}.'] = _with(case, candidate), *arguments
  ready = bench_rows.ahead(programs, {'draw', 'same'})
  yield None
  row = Row(PREFIX + case.operation, f'{case.key} | {case.name}', '')
  arguments = bench_rows.draw(ready['draw'])
  want = ready[f'{DEFAULT}.'](*arguments)
  usable = {}
  for label in labelled:
    one = dataclasses.replace(row, who=label)
    try:
      other = ready[f'{label}.'](*arguments)
      usable[label] = int(ready['same'](want, other))
      del other
    except Exception as error:  # it does not fit, or does not take these sizes
      yield dataclasses.replace(one, note=bench_rows.reason(error))
  del want
  took = _seconds([ready[f'{label}.'] for label in usable], arguments)
  for (label, differing), seconds in zip(usable.items(), took, strict=True):
    note = f'{seconds / took[0]:.3f} of the default'
    one = dataclasses.replace(row, who=label, seconds=seconds, note=note)
    yield dataclasses.replace(one, differing=differing)


def _with(case: Case, candidate: dict[str, Any] | None) -> Callable[..., Any]:
  """The operation under an entry; what it asks for it asks while it is traced."""

  def run(*arguments):
    entry = None if candidate is None else case.entry(candidate)
    with dispatch.tuned(case.operation, case.key, entry):
      return case.run(*arguments)

  return run


def _seconds(programs: Sequence[Callable[..., Any]], arguments) -> list[float]:
  """Medians of each, all of them in every turn, on data not used just before."""
  size = sum(one.nbytes for one in jax.tree.leaves(arguments))
  count = min(max(math.ceil(CACHE / size), 1), COPIES)
  sets = [arguments]
  sets += [jax.tree.map(jnp.copy, arguments) for _ in range(count - 1)]
  jax.block_until_ready(sets)
  cycle = itertools.cycle(sets)
  calls = [lambda one=one: one(*next(cycle)) for one in programs]
  turns = bench_time.in_turns(calls, jax.block_until_ready)
  return [statistics.median(column) for column in zip(*turns, strict=True)]


# --- What to write ------------------------------------------------------------


def tunings(found: Sequence[Row], cases: Sequence[Case]) -> dict[str, Any]:
  """The device's tunings with what these rows say.

  Args:
    found: rows of `cases`; keys of which rows are missing stay as they are.
    cases: all that may be among them.

  Returns:
    Operations to keys to entries.
  """
  out = copy.deepcopy(dispatch.tunings())
  for (operation, key), own in _by_key(cases).items():
    ratios = _ratios(found, own)
    if ratios is None:
      continue
    table = out.setdefault(operation, {})
    now = None if key not in table else dict(table[key])
    entry = choose(own, ratios, now)
    table.pop(key, None)
    if entry is not None:
      table[key] = entry
  return {name: table for name, table in out.items() if table}


def text(found: dict[str, Any]) -> str:
  """Tunings as their files have them: a line for each key."""
  operations = []
  for operation, table in found.items():
    lines = [
      f'  {json.dumps(key)}: {json.dumps(entry)}'
      for key, entry in table.items()
    ]
    body = ',\n'.join(lines)
    operations.append(f' {json.dumps(operation)}: {{\n{body}\n }}')
  body = ',\n'.join(operations)
  return f'{{\n{body}\n}}\n'


def _by_key(cases: Sequence[Case]) -> dict[tuple[str, str], list[Case]]:
  found: dict[tuple[str, str], list[Case]] = {}
  for case in cases:
    found.setdefault((case.operation, case.key), []).append(case)
  return found


def _ratios(found, cases) -> list[dict[str, float]] | None:
  """Of each size, by candidate, its time over the default's; None: not all."""
  out = []
  for case in cases:
    name = PREFIX + case.operation, f'{case.key} | {case.name}'
    own = {
      row.who: row.seconds
      for row in found
      if (row.operation, row.shape) == name
      and row.seconds
      and not row.differing
    }
    if DEFAULT not in own:
      return None
    out.append({label: s / own[DEFAULT] for label, s in own.items()})
  return out


def choose(
  cases: Sequence[Case],
  ratios: Sequence[dict[str, float]],
  now: dict[str, Any] | None,
) -> dict[str, Any] | None:
  """The entry of a key; None: the kernel's own choice is as good.

  Where entries hold up to a number of rows, one is taken up to a size where it
  still gains, so that the sum of logarithms of its ratios is the least.

  Args:
    cases: of the key, from small to large.
    ratios: of each case, by candidate.
    now: the entry that there is.
  """
  best, least = None, 0.0
  scores = {}
  for label, candidate in cases[0].labelled().items():
    if candidate is None:
      continue
    sizes = [one.get(label, math.inf) for one in ratios]
    counts = range(1, len(sizes) + 1) if cases[0].most else [len(sizes)]
    for count in counts:
      gains = max(sizes[:count]) <= GAIN
      score = sum(map(math.log, sizes[:count])) if gains else 0.0
      entry = cases[count - 1].entry(candidate)
      scores[words(entry)] = score
      if score < least:
        best, least = entry, score
  if now is not None and best is not None:
    own = scores.get(words(now), 0.0)
    if least > own + len(cases) * math.log(KEPT):
      return now
  return best


# --- Candidates -----------------------------------------------------------------


FEW = (
  dict(columns=32, depth=64, stages=12),
  dict(columns=32, depth=128, stages=12),
  dict(columns=32, depth=192, stages=6),
  dict(columns=64, depth=128, stages=6),
  dict(columns=64, depth=128, stages=12),
  dict(columns=64, depth=256, stages=4),
)
FEW_OF_GROUPS = tuple(
  one | dict(rows=rows) for one in (*FEW[1:2], *FEW[3:]) for rows in (8, 16)
)
# Rows, K, N, groups, groups that have rows; experts as decoding meets them.
FEW_GROUPS = (
  (8, 7168, 512, 384, 8),
  (64, 7168, 512, 384, 61),
  (8, 7168, 2048, 48, 8),
  (64, 7168, 2048, 48, 38),
  (128, 2048, 768, 128, 81),
  (512, 2048, 768, 128, 126),
  (128, 768, 2048, 128, 81),
  (512, 768, 2048, 128, 126),
  (32, 576, 1536, 8, 8),
  (128, 576, 1536, 8, 8),
  (512, 576, 1536, 8, 8),
  (32, 1536, 576, 8, 8),
  (128, 1536, 576, 8, 8),
  (512, 1536, 576, 8, 8),
)
GATED = {(7168, 2048), (2048, 768), (576, 1536)}  # first matmuls of experts
MANY = (
  dict(stages=3, slots=4),
  dict(stages=3, slots=1, panel=4),
  dict(panel=16),
  dict(columns=192),
  dict(rows=128, columns=128, stages=3, slots=1),
)
# Queries and keys, small models: K and N of dense products.
FEW_DENSE = (
  (576, 960),
  (576, 576),
  (1536, 576),
  (2048, 5120),
  (4096, 2048),
)
FEW_ROWS = (16, 64, 256)
ATTENTION = (
  dict(turns=False),
  dict(turns=True),
  dict(overlap=False),
  dict(overlap=False, turns=False),
  dict(slots=1),
)
SCORED = (
  dict(consumers=1, stages=4, slots=3, direct=False),
  dict(consumers=1, stages=5, slots=1, direct=False),
  dict(consumers=1, stages=4, slots=1, direct=True),
  dict(consumers=1, stages=5, slots=1, direct=True),
  dict(consumers=2, stages=4, slots=1, direct=True),
  dict(consumers=2, stages=3, slots=2, direct=False),
)
PANELS = tuple(dict(panel=panel) for panel in (2, 4, 8, 16))


def _grouped() -> Iterator[Case]:
  for rows_, k, n, groups, active in FEW_GROUPS:
    shape = grouped_shapes.Shape('', rows_, k, n, groups, active)
    kinds = (False, True) if (k, n) in GATED else (False,)
    for gated in kinds:
      size = (k, 2, n) if gated else (k, n)

      def draw(seed, shape=shape, size=size):
        w = bench_rows.normal_at(seed, 2, shape.groups, *size) * jnp.bfloat16(
          0.02
        )
        x = bench_rows.normal_at(seed, 1, shape.rows, shape.k)
        return x, w, jnp.asarray(shape.sizes())

      yield Case(
        grouped_matmul.NAME,
        f'few {"gated " if gated else ""}{k} {n}',
        f'{rows_} rows, {active} of {groups} groups',
        draw,
        functools.partial(grouped_matmul.grouped_matmul, gated=gated),
        FEW_OF_GROUPS,
        most=rows_,
      )
  for shape in grouped_shapes.TRAINING:

    def draw_many(seed, shape=shape):
      w = bench_rows.normal_at(
        seed, 2, shape.groups, shape.k, shape.n
      ) * jnp.bfloat16(0.02)
      x = bench_rows.normal_at(seed, 1, shape.rows, shape.k)
      return x, w, jnp.asarray(shape.sizes())

    yield Case(
      grouped_matmul.NAME,
      f'rows many {shape.k} {shape.n}',
      shape.name,
      draw_many,
      grouped_matmul.grouped_matmul,
      MANY,
    )


def _dense() -> Iterator[Case]:
  for k, n in FEW_DENSE:
    for rows_ in FEW_ROWS:

      def draw(seed, rows_=rows_, k=k, n=n):
        return bench_rows.normal_at(seed, 1, rows_, k), bench_rows.normal_at(
          seed, 2, k, n
        )

      yield Case(
        grouped_matmul.ONE,
        f'few {k} {n}',
        f'{rows_} rows',
        draw,
        matmul.matmul,
        FEW,
        most=rows_,
      )


def _attention() -> Iterator[Case]:
  from pallas_kernels.attention import gpu_tiles

  for shape in attention_shapes.TRAINING:
    if shape.shared:
      continue  # of the absorbed form nothing is chosen
    run = functools.partial(
      attention.attention, scale=shape.key**-0.5, block=shape.block
    )

    def draw(seed, shape=shape):
      sizes = (shape.heads, shape.key), (shape.groups, shape.key)
      sizes = (*sizes, (shape.groups, shape.width))
      b, t = shape.rows, shape.tokens
      arrays = [
        bench_rows.normal_at(seed, i, b, t, *size)
        for i, size in enumerate(sizes)
      ]
      return *arrays, jnp.ones((b, t), jnp.int32)

    kind = 'long' if shape.tokens >= gpu_tiles.LONG else 'short'
    key = f'forward {shape.key} {shape.width} {shape.block} {kind}'
    yield Case('attention', key, shape.name, draw, run, ATTENTION)


def _logprobs() -> Iterator[Case]:
  for shape in logprob_shapes.TRAINING:
    d, v = shape.depth, shape.vocabulary

    def draw(seed, rows_, d=d, v=v):
      unembed = bench_rows.normal_at(seed, 2, d, v) * jnp.bfloat16(2 / d**0.5)
      return bench_rows.normal_at(seed, 1, rows_, d), unembed, jnp.ones(rows_)

    for kind, rows_ in (('few', 64), ('whole', 256)):
      yield Case(
        token_logprob.NAME,
        f'scored {kind} {d}',
        f'{rows_} rows',
        functools.partial(draw, rows_=rows_),
        lambda *a: tuple(token_logprob.scored(*a) or ()),
        SCORED,
      )

    def run(hidden, unembed, temperatures):
      tokens = jnp.zeros(len(hidden), jnp.int32)
      return token_logprob.token_logprob(hidden, unembed, tokens, temperatures)

    many = functools.partial(draw, rows_=shape.tokens)
    name = f'depth {d}'
    yield Case(token_logprob.NAME, name, shape.name, many, run, PANELS)


def _paged() -> Iterator[Case]:
  # Prompts of Qwen3's heads, 16 rows of a tile; as a mixed step calls it.
  n, tile, tokens, heads, groups, size, block = 512, 16, 1024, 32, 4, 128, 64

  def draw(seed):
    pages = n * tile // tokens * (tokens // block), block, groups, size
    first = jnp.arange(n) * tile % tokens
    positions = first[:, None] + jnp.arange(tile)[None, :]
    return (
      bench_rows.normal_at(seed, 1, n * tile, heads, size),
      *(bench_rows.normal_at(seed, i, *pages) for i in (2, 3)),
      positions.astype(jnp.int32),
    )

  def run(q, k_pages, v_pages, positions):
    count = tokens // block
    table = jnp.arange(n * tile // tokens * count, dtype=jnp.int32)
    table = jnp.repeat(table.reshape(-1, count), tokens // tile, axis=0)
    more = dict(scale=size**-0.5)
    whole = paged_attention.in_place(
      q, k_pages, v_pages, table, positions.reshape(-1), first=0, **more
    )
    if whole is not None:
      return whole
    some = q.reshape(n, tile, heads, size)
    some = paged_attention.paged_attention(
      some, k_pages, v_pages, table, positions, **more
    )
    return some.reshape(n * tile, heads, size)

  candidates = (dict(in_place=True),)
  name = 'qwen3, 8 prompts of 1024'
  yield Case(paged_attention.NAME, 'chunk', name, draw, run, candidates)


@functools.cache
def cases() -> dict[str, tuple[Case, ...]]:
  """By what the benchmark calls them; a key's sizes follow each other."""
  return {
    PREFIX + operation: tuple(found())
    for operation, found in (
      ('grouped_matmul', _grouped),
      ('matmul', _dense),
      ('attention', _attention),
      ('token_logprob', _logprobs),
      ('paged_attention', _paged),
    )
  }
