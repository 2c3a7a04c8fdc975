"""The two compiled programs of the engine, and the shapes they come in.

`mixed` runs prompt tokens and decoding sequences side by side, one step.
`ahead` runs k decode steps of the sequences that only decode, with the host out
of the loop: what a step draws is what the next one reads.

The newest token of every running sequence stays on the device, in `last`, by
slot. So the host may send the next step before it knows what the step before
has drawn; all else that a step reads (positions, pages, seeds) follows from
counting. Every shape comes from a short list, so that nothing is compiled once
each has run.

Where kernels attend (`tiled`), a mixed step is of R1 rows that are a sequence's
only one, or a draft's, and of T tiles of rows of one prompt each: a kernel reads
the pages of a tile's sequence once, not once a row. Tiles lie at absolute
multiples of their rows; what a prompt does not fill of one is nobody's.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer.inference import sampling
from composer.model import operations
from composer.model import transformer
from pallas_kernels import dispatch

Array = jax.Array
ModelConfig = config_lib.ModelConfig
NumericsConfig = config_lib.NumericsConfig
AHEAD = 16  # decode steps a dispatch on an accelerator, if not configured
COLUMNS = 8  # the fewest KV blocks that a program reads, where it reads all
PREFILL_SHARE = 8  # of so many rows, one is kept for prompts that wait
TILE = transformer.TILE
TILES = 256 // TILE  # the fewest of prompts that a program is compiled for
FEWEST = 8  # rows of decode steps, the fewest that a program is compiled for
FEW = 32  # rows of a mixed step without prompts, the same


class Rows(NamedTuple):
  """The N rows of a step: R1 of a slot each, then T tiles of a slot each.

  In `ahead`, and where rows are not tiled, T is 0 and R1 is N.
  """

  slots: Array  # int32 [R1 + T]; the last slot is nobody's: scratch pages
  positions: Array  # int32 [N]; in a tile -1 where the row is nobody's
  tokens: Array  # int32 [N]; -1 reads what the slot has drawn last
  tables: Array  # int32 [slots, M]: pages of every slot
  turns: tuple[Array, Array] | None = None  # see `trunk.rope`


class Sampled(NamedTuple):
  """What a program gives for the host to record; k = 1 of `mixed`."""

  answer: sampling.Answer  # [k, S]
  experts: Array  # int16 [k, N, L, K]
  proposed: Array | None = None  # int32 [1, Q, most], see `speculate`


def run_mixed(
  config: ModelConfig,
  numerics: NumericsConfig,
  params: Any,
  cache: transformer.Cache,
  last: Array,
  rows: Rows,
  sampling_rows: Array,
  into: Array,
  draws: sampling.Draws,
  cuts: sampling.Cuts | None,
  layout: mesh_lib.Layout | None = None,
) -> tuple[Sampled, transformer.Cache, Array, Array]:
  """One step over N rows, of which S draw: prompts, and what decodes.

  Args:
    config, numerics: static.
    params: as `transformer.step` takes them.
    cache: donated.
    last: int32 [slots], donated.
    rows: see `Rows`.
    sampling_rows: int32 [S]; those that draw, then any.
    into: int32 [S]; slots that keep what was drawn. Of a verified draft several
      rows draw for one slot, which is not read before the host has said what
      stands.
    draws: of the S rows; positions are looked up.
    cuts: of the S rows.
    layout: static; see `transformer.step`. All but `params` is then a device's
      own.

  Returns:
    (what was sampled, cache, last, hidden [N, D]).
  """
  of = transformer.sequences_of(len(rows.tokens), len(rows.slots))
  slots = rows.slots if of is None else rows.slots[of]
  tokens = jnp.where(rows.tokens < 0, last[slots], rows.tokens)
  nobody = len(rows.tables) - 1
  hidden, experts, cache = transformer.step(
    params,
    config,
    numerics,
    cache,
    tokens,
    rows.positions,
    rows.tables[rows.slots],
    layout,
    rows.turns,
    used=_used(rows.slots != nobody) if of is None and layout is None else None,
  )
  draws = draws._replace(positions=rows.positions[sampling_rows])
  answer = sampling.answer(
    config,
    numerics,
    params,
    hidden[sampling_rows],
    draws,
    cuts,
    None if layout is not None else _used(into != nobody),
  )
  last = last.at[into].set(answer.tokens)
  sampled = Sampled(*jax.tree.map(lambda x: x[None], (answer, experts)))
  return sampled, cache, last, hidden


def _used(real: Array) -> Array:
  """int32: the first so many rows hold all that are somebody's, bool [N]."""
  return jnp.max(jnp.where(real, 1 + jnp.arange(len(real)), 0))


@functools.partial(
  jax.jit,
  static_argnums=(0, 1),
  static_argnames=('layout',),
  donate_argnums=(3, 4),
)
def mixed(
  config: ModelConfig,
  numerics: NumericsConfig,
  params: Any,
  cache: transformer.Cache,
  last: Array,
  *batch: Any,
  layout: mesh_lib.Layout | None = None,
) -> tuple[Sampled, transformer.Cache, Array]:
  """`run_mixed`, compiled; but for the hidden states."""
  state = params, cache, last
  return run_mixed(config, numerics, *state, *batch, layout=layout)[:3]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=(4, 5))
def ahead(
  config: ModelConfig,
  numerics: NumericsConfig,
  steps: int,
  params: Any,
  cache: transformer.Cache,
  last: Array,
  rows: Rows,
  ends: Array,
  draws: sampling.Draws,
  cuts: sampling.Cuts | None,
) -> tuple[Sampled, transformer.Cache, Array]:
  """`steps` decode steps over N rows, each of a sequence of its own.

  Args:
    config, numerics, steps: static.
    params: as `transformer.step` takes them.
    cache: donated.
    last: int32 [slots], donated; where `rows.tokens` is not -1, that is read in
      the first step instead.
    rows: of the first step.
    ends: int32 [N]; a row at this position or beyond reads scratch pages, and
      what it draws is not to be recorded.
    draws, cuts: of the N rows.

  Returns:
    (what was sampled, [steps, N], cache, last).
  """
  table = rows.tables[rows.slots]
  first = jnp.where(rows.tokens < 0, last[rows.slots], rows.tokens)

  def step(carry, _):
    tokens, positions, cache = carry
    active = positions < ends
    at, used = jnp.where(active, positions, 0), _used(active)
    hidden, experts, cache = transformer.step(
      params,
      config,
      numerics,
      cache,
      tokens,
      at,
      jnp.where(active[:, None], table, 0),
      turns=rows.turns,
      alone=True,
      used=used,
    )
    answer = sampling.answer(
      config,
      numerics,
      params,
      hidden,
      draws._replace(positions=positions),
      cuts,
      used,
    )
    newest = jnp.where(active, answer.tokens, tokens)  # a row may end early
    return (newest, positions + 1, cache), Sampled(answer, experts)

  carry = (first, rows.positions, cache)
  (newest, _, cache), sampled = jax.lax.scan(step, carry, length=steps)
  return sampled, cache, last.at[rows.slots].set(newest)


def tiled(numerics: NumericsConfig) -> bool:
  """Whether rows of prompts lie in tiles: where a kernel attends."""
  return operations.of(numerics).sparse != operations.XLA


def alone(numerics: NumericsConfig, config: config_lib.EngineConfig) -> int:
  """R1 of a mixed step with tiles: every sequence's row, or those of its draft.

  Where there are fewer `engine.rows`, sequences take turns.
  """
  return min(config.sequences * _draws(config), config.rows)


def tile_counts(
  numerics: NumericsConfig, config: config_lib.EngineConfig
) -> list[int]:
  """The T that a mixed step with prompts may have; none where not `tiled`.

  The most fill `engine.rows`, and are a share of it where rows that decode
  would leave less.
  """
  if not tiled(numerics):
    return []
  least = -(-config.rows // (PREFILL_SHARE * TILE))
  most = max((config.rows - alone(numerics, config)) // TILE, least)
  return _growing(min(TILES, most), most, 4)


def step_sizes(
  numerics: NumericsConfig, config: config_lib.EngineConfig
) -> list[int]:
  """Row counts of mixed steps that the engine compiles for.

  Flat ones go up to `engine.rows`. Tiled ones without prompts have up to
  `alone`; of those with prompts R1 is just that, and they may have more than
  `engine.rows` by what of their tiles is nobody's.
  """
  if not tiled(numerics):
    return _growing(2 * numerics.row_block, config.rows)
  most = alone(numerics, config)
  sizes = _growing(min(FEW, most), most, 8)
  return sizes + [most + TILE * t for t in tile_counts(numerics, config)]


def tiles_of(
  numerics: NumericsConfig, config: config_lib.EngineConfig, rows: int
) -> int:
  """T of a mixed step of so many rows."""
  if not tiled(numerics):
    return 0
  return max(rows - alone(numerics, config), 0) // TILE


def ahead_sizes(
  numerics: NumericsConfig, config: config_lib.EngineConfig
) -> list[int]:
  """The same of decode steps: one row for each running sequence."""
  if numerics.mode == 'bitwise' and not operations.of(numerics).fixed:
    block = numerics.row_block
    most = max(-(-config.sequences // block), 2) * block
    return _growing(2 * block, most)
  # One row would be a product of another kind, which takes a GPU longer.
  fewest = FEWEST if tiled(numerics) else 1
  return _growing(fewest, max(config.sequences, fewest))


def column_sizes(
  numerics: NumericsConfig, config: config_lib.EngineConfig
) -> list[int]:
  """KV blocks of a sequence that a program may be asked to read.

  On a CPU the loop over blocks ends by itself at the longest context, and the
  kernel of a GPU reads a sequence's blocks up to its position. That of a TPU
  passes over the others, one by one.
  """
  most = -(-config.max_context // numerics.kv_block)
  if dispatch.platform() != 'tpu':
    return [most]
  return _growing(min(COLUMNS, most), most)


def sampled_rows(
  numerics: NumericsConfig, config: config_lib.EngineConfig, rows: int
) -> int:
  """S of a mixed step of so many rows."""
  most = config.sequences * _draws(config)
  if tiled(numerics):  # of a tile only the last row may draw
    return min(rows - (TILE - 1) * tiles_of(numerics, config, rows), most)
  block = numerics.row_block
  return min(rows, max(-(-most // block), 2) * block)


def _draws(config: config_lib.EngineConfig) -> int:
  """Rows of a decoding sequence in a mixed step, each of which draws."""
  return 1 + (config.draft_tokens if config.draft else 0)


def run_ahead(config: config_lib.EngineConfig) -> int:
  """Decode steps of one dispatch, where nothing but decoding is to be done."""
  if config.draft:
    return 1  # what a draft proposes depends on what was drawn
  return config.run_ahead or (1 if dispatch.platform() == 'cpu' else AHEAD)


def at_least(sizes: list[int], wanted: int) -> int:
  """The smallest of the sizes that takes `wanted`."""
  for size in sizes:
    if wanted <= size:
      return size
  raise AssertionError(f'{wanted} wanted, {sizes[-1]} compiled for')


_PROGRAMS = (mixed, ahead)


def compiled() -> int:
  """How many shapes of the programs this process has compiled."""
  return sum(program._cache_size() for program in _PROGRAMS)


def drafted_sequences(config: config_lib.EngineConfig, draws: int) -> int:
  """Q of a step that drafts, of so many draws."""
  return min(config.sequences, draws)


def _growing(size: int, most: int, factor: int | None = None) -> list[int]:
  """Sizes up to `most`: doubling on a CPU, whose time follows the rows.

  A decode step of few rows takes an accelerator about as long as one of eight
  times as many, and longer to compile.
  """
  factor = factor or (2 if dispatch.platform() == 'cpu' else 8)
  sizes = []
  while size < most:
    sizes.append(size)
    size *= factor
  return [*sizes, most]
