"""The two compiled programs of the engine, and the shapes they come in.

`mixed` runs prompt tokens and decoding sequences side by side, one step.
`ahead` runs k decode steps of the sequences that only decode, with the host out
of the loop: what a step draws is what the next one reads.

The newest token of every running sequence stays on the device, in `last`, by
slot. So the host may send the next step before it knows what the step before
has drawn; all else that a step reads (positions, pages, seeds) follows from
counting. Every shape comes from a short list, so that nothing is compiled once
each has run.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer.inference import sampling
from composer.model import transformer
from pallas_kernels import dispatch

Array = jax.Array
ModelConfig = config_lib.ModelConfig
NumericsConfig = config_lib.NumericsConfig
AHEAD = 16  # decode steps a dispatch on an accelerator, if not configured
COLUMNS = 8  # the fewest KV blocks that a program reads, where it reads all


class Rows(NamedTuple):
  """The N rows of a step; row n belongs to the sequence in slot slots[n]."""

  slots: Array  # int32 [N]; the last slot is nobody's: its pages are scratch
  positions: Array  # int32 [N]
  tokens: Array  # int32 [N]; -1 reads what the slot has drawn last
  tables: Array  # int32 [slots, M]: pages of every slot


class Sampled(NamedTuple):
  """What a program gives for the host to record; k = 1 of `mixed`."""

  answer: sampling.Answer  # [k, S]
  experts: Array  # int16 [k, N, L, K]


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(3, 4))
def mixed(
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
) -> tuple[Sampled, transformer.Cache, Array]:
  """One step over N rows, of which S draw.

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

  Returns:
    (what was sampled, cache, last).
  """
  tokens = jnp.where(rows.tokens < 0, last[rows.slots], rows.tokens)
  hidden, experts, cache = transformer.step(
    params,
    config,
    numerics,
    cache,
    tokens,
    rows.positions,
    rows.tables[rows.slots],
  )
  draws = draws._replace(positions=rows.positions[sampling_rows])
  answer = sampling.answer(
    config, numerics, params, hidden[sampling_rows], draws, cuts
  )
  last = last.at[into].set(answer.tokens)
  sampled = Sampled(*jax.tree.map(lambda x: x[None], (answer, experts)))
  return sampled, cache, last


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
    at = jnp.where(active, positions, 0)
    hidden, experts, cache = transformer.step(
      params,
      config,
      numerics,
      cache,
      tokens,
      at,
      jnp.where(active[:, None], table, 0),
    )
    answer = sampling.answer(
      config,
      numerics,
      params,
      hidden,
      draws._replace(positions=positions),
      cuts,
    )
    newest = jnp.where(active, answer.tokens, tokens)  # a row may end early
    return (newest, positions + 1, cache), Sampled(answer, experts)

  carry = (first, rows.positions, cache)
  (newest, _, cache), sampled = jax.lax.scan(step, carry, length=steps)
  return sampled, cache, last.at[rows.slots].set(newest)


def step_sizes(
  numerics: NumericsConfig, config: config_lib.EngineConfig
) -> list[int]:
  """Row counts that the engine compiles for, up to `engine.rows`."""
  return _growing(2 * numerics.row_block, config.rows)


def ahead_sizes(
  numerics: NumericsConfig, config: config_lib.EngineConfig
) -> list[int]:
  """The same of decode steps: one row for each running sequence."""
  if numerics.mode == 'bitwise':
    block = numerics.row_block
    most = max(-(-config.sequences // block), 2) * block
    return _growing(2 * block, most)
  return _growing(1, config.sequences)


def column_sizes(
  numerics: NumericsConfig, config: config_lib.EngineConfig
) -> list[int]:
  """KV blocks of a sequence that a program may be asked to read.

  On a CPU the loop over blocks ends by itself at the longest context.
  """
  most = -(-config.max_context // numerics.kv_block)
  if dispatch.platform() == 'cpu':
    return [most]
  return _growing(min(COLUMNS, most), most)


def sampled_rows(
  numerics: NumericsConfig, config: config_lib.EngineConfig, rows: int
) -> int:
  """S of a mixed step of so many rows."""
  a_sequence = 1 + (config.draft_tokens if config.draft else 0)
  block = numerics.row_block
  most = max(-(-config.sequences * a_sequence // block), 2) * block
  return min(rows, most)


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


def _growing(size: int, most: int) -> list[int]:
  """Sizes up to `most`: doubling on a CPU, whose time follows the rows.

  A decode step of few rows takes an accelerator about as long as one of four
  times as many, and longer to compile.
  """
  factor = 2 if dispatch.platform() == 'cpu' else 4
  sizes = []
  while size < most:
    sizes.append(size)
    size *= factor
  return [*sizes, most]
