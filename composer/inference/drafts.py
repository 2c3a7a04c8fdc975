"""Speculative decoding: drafts propose tokens, one step of the model verifies.

A step runs the last token and n proposed ones as n + 1 rows, and draws after
each of them. The draw at a position depends on its logits and on (seed,
position) alone, so it is the very token that would have been drawn without a
draft, as long as all proposed tokens before it were drawn too. Draws are taken
up to the first that differs from the proposal: the tokens of an answer are those
of the model alone, whatever was proposed, and so is their distribution. A
proposal is accepted with the probability that the model gives it, which is what
rejection sampling (Leviathan et al., 2023) attains for a proposal that is no
random draw.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# (tokens int32 [t], most) -> up to `most` tokens int32 [n] that may follow.
Draft = Callable[[np.ndarray, int], np.ndarray]

LONGEST, SHORTEST = 4, 2  # tokens of the ending that is looked up


def ngram(tokens: np.ndarray, most: int) -> np.ndarray:
  """What followed the newest earlier place with the same ending.

  Code edits and tool output repeat what stands in the context already
  (prompt lookup: Saxena, 2023). Longer endings go first.
  """
  size = len(tokens)
  for n in range(LONGEST, SHORTEST - 1, -1):
    if size <= n:
      continue
    windows = np.lib.stride_tricks.sliding_window_view(tokens[:-1], n)
    found = np.flatnonzero((windows == tokens[None, -n:]).all(axis=1))
    if found.size:
      start = int(found[-1]) + n
      return tokens[start : start + most].copy()
  return tokens[:0]


ON_DEVICE = 'mtp'  # proposed by the program of the step before (`speculate`)
# None: not by the host.
DRAFTS: dict[str, Draft | None] = {'ngram': ngram, ON_DEVICE: None}


def accepted(proposed: np.ndarray, drawn: np.ndarray) -> int:
  """How many proposed tokens [n] stand, given the draws [n + 1] behind them."""
  wrong = np.flatnonzero(proposed != drawn[: len(proposed)])
  return int(wrong[0]) if wrong.size else len(proposed)
