"""From what a step shall do, by sequence, to the arrays that its program takes.

Every array is new: a program may still read it while the next step is built.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from typing import NamedTuple

import jax
import numpy as np

from composer import config as config_lib
from composer.inference import drafts
from composer.inference import programs
from composer.inference import sampling
from composer.inference import sequence as sequence_lib
from composer.inference import speculate
from composer.model import layers

Sequence = sequence_lib.Sequence


class Part(NamedTuple):
  """What a step does for one sequence.

  `count` tokens from `start` on are computed, and the last `draws` rows draw.
  In a run ahead `count` tokens are computed and drawn one after the other. The
  last tokens of `proposed` are a draft's, not yet known to be the sequence's.
  `row` is that of the first token in a mixed step; the others follow it.
  """

  sequence: Sequence
  start: int
  count: int
  draws: int
  proposed: np.ndarray | None = None
  row: int = 0


class Maker:
  """Builds batches; owns the pages of every slot, as programs read them."""

  def __init__(
    self,
    model: config_lib.ModelConfig,
    numerics: config_lib.NumericsConfig,
    config: config_lib.EngineConfig,
  ):
    self._model, self._numerics, self._config = model, numerics, config
    self._step_sizes = programs.step_sizes(numerics, config)
    self._ahead_sizes = programs.ahead_sizes(numerics, config)
    self._column_sizes = programs.column_sizes(numerics, config)
    self.nobody = config.sequences
    self.tables = np.zeros(
      (config.sequences + 1, self._column_sizes[-1]), np.int32
    )
    self._turns = None  # on a CPU they are constants: contexts are short
    if programs.tiled(numerics):
      length = self._column_sizes[-1] * numerics.kv_block
      self._turns = jax.device_put(layers.rope_table(model, length))
    self._all: dict[int, np.ndarray] = {}  # of so many rows, never written

  def mixed(self, parts: List[Part]) -> tuple:
    """(rows, sampling rows, into, draws, cuts) of `programs.mixed`.

    And the chains of `speculate.mixed`, where that is what runs.
    """
    most = max(part.row + part.count for part in parts)
    size = programs.at_least(self._step_sizes, most)
    slots, positions, tokens = self._nobodies(size)
    tiles, tile = self._tiles(size), programs.TILE
    alone = size - tile * tiles  # rows before the tiles
    drawing: list[tuple[int, Sequence]] = []
    for part in parts:
      sequence, start, row = part.sequence, part.start, part.row
      at = row + part.count
      if part.count == 1:
        positions[row], tokens[row] = start, _token(sequence, start)
      else:
        positions[row:at] = np.arange(start, start + part.count)
        tokens[row:at] = _tokens(part)
      first, end = row, at
      if row >= alone:
        first = alone + (row - alone) // tile
        end = alone - (alone - at) // tile
      slots[first:end] = sequence.slot
      drawing += [(r, sequence) for r in range(at - part.draws, at)]
    count = programs.sampled_rows(self._numerics, self._config, size)
    assert len(drawing) <= count, f'{len(drawing)} draws of {count}'
    which = np.zeros(count, np.int32)
    into = np.full(count, self.nobody, np.int32)
    which[: len(drawing)] = [r for r, _ in drawing]
    into[: len(drawing)] = [s.slot for _, s in drawing]
    sequences = [s for _, s in drawing]
    rows = self._rows(slots, positions, tokens, self._tables(parts))
    batch = rows, which, into, *self._draws(sequences, count, which)
    return (*batch, *self._chains(parts, size, count))

  def ahead(self, parts: List[Part]) -> tuple:
    """(rows, ends, draws, cuts) of `programs.ahead`."""
    size = programs.at_least(self._ahead_sizes, len(parts))
    slots = np.full(size, self.nobody, np.int32)
    positions, tokens, ends = np.zeros((3, size), np.int32)
    sequences, count = [p.sequence for p in parts], len(parts)
    slots[:count] = [s.slot for s in sequences]
    positions[:count] = [p.start for p in parts]
    tokens[:count] = [_token(p.sequence, p.start) for p in parts]
    ends[:count] = [p.start + p.count for p in parts]
    rows = self._rows(slots, positions, tokens, self._tables(parts))
    return rows, ends, *self._draws(sequences, size, positions)

  def blank(self, size: int, columns: int, ahead: bool, cuts: bool) -> tuple:
    """The same for nobody: what it computes goes to scratch."""
    slots, positions, zeros = self._nobodies(size, ahead)
    tables = self.tables[:, :columns].copy()
    rows = self._rows(slots, positions, zeros, tables)
    count = size
    if not ahead:
      count = programs.sampled_rows(self._numerics, self._config, size)
    which = np.zeros(count, np.int32)
    draws, some = self._draws([], count, which)
    if cuts:
      some = self._cuts([], count)
    if ahead:
      return rows, zeros, draws, some
    into = np.full(count, self.nobody, np.int32)
    return rows, which, into, draws, some, *self._chains([], size, count)

  def _chains(
    self, parts: List[Part], size: int, draws: int
  ) -> tuple[speculate.Chains, ...]:
    """Where the device's own drafts begin, if it makes some."""
    if self._config.draft != drafts.ON_DEVICE:
      return ()
    after = np.zeros(size, np.int32)
    count = programs.drafted_sequences(self._config, draws)
    first, counts = np.zeros((2, count), np.int32)
    slots = np.full(count, self.nobody, np.int32)
    at = n = 0
    for part in parts:
      end = part.row + part.count
      known = part.sequence.tokens[part.start + 1 : part.sequence.length]
      after[part.row : end] = -1
      if part.proposed is None:
        known = known[: part.count]
        after[part.row : part.row + len(known)] = known
      if part.draws:
        first[n], counts[n], slots[n] = at, part.draws, part.sequence.slot
        at, n = at + part.draws, n + 1
    return (speculate.Chains(after, first, counts, slots),)

  def _rows(self, *arrays: np.ndarray) -> programs.Rows:
    return programs.Rows(*arrays, self._turns)

  def _nobodies(self, size: int, ahead: bool = False) -> tuple:
    """(slots, positions, tokens) of a step of rows that are nobody's."""
    tiles = 0 if ahead else self._tiles(size)
    alone = size - programs.TILE * tiles
    positions, tokens = np.zeros((2, size), np.int32)
    positions[alone:] = -1
    return np.full(alone + tiles, self.nobody, np.int32), positions, tokens

  def _tiles(self, size: int) -> int:
    return programs.tiles_of(self._numerics, self._config, size)

  def _tables(self, parts: List[Part]) -> np.ndarray:
    reach = max(p.start + p.count for p in parts)
    if self._config.draft == drafts.ON_DEVICE:  # it reads what it drafts
      reach = min(reach + self._config.draft_tokens, self._config.max_context)
    blocks = -(-reach // self._numerics.kv_block)
    columns = programs.at_least(self._column_sizes, blocks)
    return self.tables[:, :columns].copy()

  def _draws(
    self, sequences: List[Sequence], count: int, positions: np.ndarray
  ) -> tuple[sampling.Draws, sampling.Cuts | None]:
    temperature = np.ones(count, np.float32)
    seeds = np.zeros(count, np.uint32)
    requests = [s.request for s in sequences]
    temperature[: len(requests)] = [r.temperature for r in requests]
    seeds[: len(requests)] = [r.seed & 0xFFFFFFFF for r in requests]
    draws = sampling.Draws(temperature, seeds, positions)
    if not any(s.cuts or s.request.top_logprobs for s in sequences):
      return draws, None
    return draws, self._cuts(sequences, count)

  def _cuts(self, sequences: List[Sequence], count: int) -> sampling.Cuts:
    some = np.zeros(count, bool)
    top_k = np.zeros(count, np.int32)
    top_p, min_p = np.ones(count, np.float32), np.zeros(count, np.float32)
    # One shape, with masks and without: another would be compiled anew.
    if count not in self._all:
      width = -(-self._model.vocab_size // 8)
      self._all[count] = np.full((count, width), 255, np.uint8)
    allowed = everything = self._all[count]
    for n, sequence in enumerate(sequences):
      request = sequence.request
      some[n] = sequence.cuts
      top_k[n] = min(request.top_k, self._model.vocab_size)
      top_p[n], min_p[n] = request.top_p, request.min_p
      if sequence.allowed is not None:
        if allowed is everything:
          allowed = everything.copy()
        allowed[n] = sequence.allowed
    return sampling.Cuts(some, top_k, top_p, min_p, allowed)


def _token(sequence: Sequence, at: int) -> int:
  """A token; -1 for the one that only the device knows."""
  return int(sequence.tokens[at]) if at < sequence.length else -1


def _tokens(part: Part) -> np.ndarray:
  """Tokens of a prompt's rows, or of a last token and a draft."""
  known = part.sequence.tokens[part.start : part.sequence.length]
  if part.proposed is not None:
    return np.concatenate([known, part.proposed])
  return known[: part.count]
