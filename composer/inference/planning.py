"""What the next step of the engine does: which rows of which sequences.

Decoding sequences go first, one row each and those of a draft; prompt tokens
fill the rows that are left, in the order of their starts. Where more sequences
decode than there are rows they take turns, and prompts keep a small share, so
that neither starves the other. Where rows of prompts lie in tiles they have
rows of their own (`programs`). Where all sequences decode, several steps are
planned at once.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
import dataclasses

import numpy as np

from composer import config as config_lib
from composer.inference import batches
from composer.inference import drafts
from composer.inference import programs
from composer.inference import sequence as sequence_lib

Sequence = sequence_lib.Sequence
Part = batches.Part


@dataclasses.dataclass(frozen=True)
class Rules:
  """What a plan depends on, beside the sequences."""

  rows: int  # of a mixed step; with tiles, those that decode
  tiles: tuple[int, ...]  # numbers of tiles that it may have; none: flat rows
  block: int  # tokens of a page
  run_ahead: int  # decode steps of one dispatch
  draft: str  # a name of `drafts.DRAFTS`; '': none
  draft_tokens: int

  @property
  def reach(self) -> int:
    """Tokens that the next dispatch may compute of a decoding sequence."""
    # A layer that drafts needs pages for what it drafts behind the verified.
    times = {'': 0, drafts.ON_DEVICE: 2}.get(self.draft, 1)
    return max(self.run_ahead, 1 + self.draft_tokens * times)


def rules(
  numerics: config_lib.NumericsConfig, config: config_lib.EngineConfig
) -> Rules:
  tiles = tuple(programs.tile_counts(numerics, config))
  return Rules(
    rows=programs.alone(numerics, config) if tiles else config.rows,
    tiles=tiles,
    block=numerics.kv_block,
    run_ahead=programs.run_ahead(config),
    draft=config.draft,
    draft_tokens=config.draft_tokens,
  )


def check(
  model: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  config: config_lib.EngineConfig,
) -> None:
  """Refuses an engine that cannot work, before anything is allocated."""
  columns = -(-config.max_context // numerics.kv_block)
  if config.pages < columns + 1:  # one is scratch
    raise ValueError(
      f'engine.pages={config.pages} cannot hold one sequence of'
      f' engine.max_context={config.max_context} tokens; use'
      f' {columns + 1} or more'
    )
  if config.draft and config.draft not in drafts.DRAFTS:
    raise ValueError(
      f'engine.draft={config.draft!r} is unknown; there are'
      f' {", ".join(drafts.DRAFTS)}, and none'
    )
  if config.draft == drafts.ON_DEVICE and not model.mtp_layers:
    raise ValueError(
      f'engine.draft={config.draft!r} with model.mtp_layers=0: the model has no'
      ' layer that drafts; train one (model.mtp_layers=1), or draft by ngram'
    )
  if config.on_new_weights not in ('continue', 'restart'):
    raise ValueError(
      f'engine.on_new_weights={config.on_new_weights!r} is unknown; choose'
      ' continue or restart'
    )


def plan(
  rules: Rules,
  running: List[Sequence],
  turn: int,
  ask: Callable[[Sequence], bool],
) -> tuple[list[Part], int]:
  """The next step.

  Args:
    rules: see there.
    running: in the order of their starts.
    turn: counts the steps.
    ask: asks the mask of a sequence what it may draw next; false where the
      sequence ended of it.

  Returns:
    (parts, decode steps of a run ahead or 0).
  """
  decoding, prefilling = [], []
  for sequence in running:
    if sequence.due - sequence.sent > 1:
      prefilling.append(sequence)
    elif sequence.due < sequence.size and not _waits(rules, sequence):
      decoding.append(sequence)
  masked = any(s.request.mask is not None for s in running)
  if decoding and not prefilling and not masked and rules.run_ahead > 1:
    parts = [_ahead(rules, s) for s in decoding]
    return [part for part in parts if part.count > 0], rules.run_ahead
  budget = left = rules.rows
  if prefilling and not rules.tiles:
    budget -= max(left // programs.PREFILL_SHARE, 1)
  if len(decoding) > budget:
    at = turn * budget % len(decoding)
    decoding = decoding[at:] + decoding[:at]
  parts = []
  for n, sequence in enumerate(decoding):
    others = min(len(decoding) - n - 1, budget - 1)
    part = _decode(rules, sequence, rules.rows - left, budget - others, ask)
    if part is None:
      continue
    parts.append(part)
    budget, left = budget - part.count, left - part.count
    if budget <= 0:
      break
  return parts + _prefill(rules, prefilling, left, ask), 0


def _waits(rules: Rules, sequence: Sequence) -> bool:
  """Whether the next row needs what the device has not told yet."""
  some = sequence.request.mask is not None or bool(rules.draft)
  return some and sequence.due > sequence.length


def _ahead(rules: Rules, sequence: Sequence) -> Part:
  start = sequence.due - 1
  count = min(
    rules.run_ahead,
    sequence.size - sequence.due,
    len(sequence.pages) * rules.block - start,
  )
  return Part(sequence, start, count, count)


def _decode(
  rules: Rules, sequence: Sequence, row: int, most: int, ask: Callable
) -> Part | None:
  """A row of a decoding sequence, and those of its draft; `most` from `row`."""
  start = sequence.due - 1
  room = len(sequence.pages) * rules.block - sequence.due
  if room < 0:  # its pages come with the next turn
    return None
  masked = sequence.request.mask is not None
  if masked and not ask(sequence):
    return None
  if not rules.draft or masked:
    return Part(sequence, start, 1, 1, row=row)
  most = min(
    rules.draft_tokens, most - 1, room, sequence.size - sequence.due - 1
  )
  proposed = np.zeros(0, np.int32)
  if most > 0:
    draft = drafts.DRAFTS[rules.draft]
    if draft is None:
      proposed = sequence.drafted[:most]
    else:
      proposed = draft(sequence.tokens[: sequence.length], most)[:most]
  count = 1 + len(proposed)
  return Part(sequence, start, count, count, proposed.astype(np.int32), row)


def _prefill(
  rules: Rules, prefilling: List[Sequence], left: int, ask: Callable
) -> list[Part]:
  """Chunks of prompts; the last row of a whole prompt draws.

  In flat rows they fill the `left` ones. A tile is of one sequence, at an
  absolute multiple of its rows, so that only the first and the last one of a
  prompt are not full.
  """
  tile, row, end = 1, rules.rows - left, rules.rows
  if rules.tiles:
    tile, row = programs.TILE, rules.rows
    wanted = [-(-(s.sent % tile + s.due - s.sent) // tile) for s in prefilling]
    end = row + tile * tiles_for(rules.tiles, sum(wanted))
  parts = []
  for sequence in prefilling:
    first = row + sequence.sent % tile
    if first >= end:
      break
    whole = sequence.due - sequence.sent
    count = min(end - first, whole)
    draws = int(count == whole)
    if draws and sequence.request.mask is not None and not ask(sequence):
      continue
    parts.append(Part(sequence, sequence.sent, count, draws, row=first))
    row += -(-(first + count - row) // tile) * tile
  return parts


def tiles_for(counts: tuple[int, ...], wanted: int) -> int:
  """How many tiles a step should have, of `counts`, for so many of prompts.

  The fewest that take them all, unless half of those were nobody's: then the
  next fewer are filled, and the rest waits for the step after.
  """
  fewer = 0
  for count in counts:
    if wanted <= count:
      return fewer if fewer and 2 * wanted <= count else count
    fewer = count
  return fewer
