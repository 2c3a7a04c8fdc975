"""Auditing: does the trainer, at the version that sampled, agree with it?

A token is auditable when its whole prefix was computed at the version that
sampled it. Audited segments are scored by the trainer's own forward pass at
that version, with the recorded routes and with its own, and compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from composer import config as config_lib
from composer.records import Segment
from composer.rl import pack as pack_lib
from composer.rl import trainer


@dataclasses.dataclass(frozen=True)
class Audited:
  """What the trainer says of one segment; NaN and -1 where not audited.

  `audited` tells such a NaN from one that the trainer computed.
  """

  audited: np.ndarray  # bool [T]
  logprobs: np.ndarray  # float32 [T], routes replayed
  native_logprobs: np.ndarray  # float32 [T], the trainer's own routes
  flips: np.ndarray  # int32 [T], layers that would have routed differently
  known: np.ndarray  # int32 [T], layers whose recorded routes are known


def audit(
  step: trainer.Step,
  segments: Sequence[Segment],
  versions: Mapping[int, Any],
  config: config_lib.RLConfig,
  model: config_lib.ModelConfig,
  kv_block: int,
) -> list[Audited]:
  """Scores every segment at the version of its auditable tokens.

  A segment has auditable tokens of one version only: the second version's
  tokens have a prefix of the first.

  Args:
    step: of the experiment.
    segments: any.
    versions: version -> published parameters; others are not audited.
    config: shape of the micro-batches.
    model: L and K of the routes.
    kv_block: alignment of segments.

  Returns:
    one `Audited` a segment, in order.
  """
  out = [_nothing(segment) for segment in segments]
  by_version: dict[int, list[int]] = {}
  for index, segment in enumerate(segments):
    found = np.unique(segment.versions[segment.auditable])
    if found.size > 1:
      raise ValueError(
        f'segment {index} has auditable tokens of versions {found.tolist()};'
        ' a token whose prefix holds another version is not auditable'
      )
    if found.size and int(found[0]) in versions:
      by_version.setdefault(int(found[0]), []).append(index)
  for version, indices in by_version.items():
    chosen = [segments[i] for i in indices]
    scored = score_segments(
      step, versions[version], chosen, config, model, kv_block
    )
    for i, audited in zip(indices, scored, strict=True):
      out[i] = audited
  return out


def score_segments(step, params, segments, config, model, kv_block):
  """Both scores of segments at one version's published parameters."""
  shape = segments[0].experts.shape
  batches, placements = pack_lib.pack(
    [pack_lib.Item(s, 0.0) for s in segments],
    config.micro_batch,
    config.sequence_length,
    kv_block,
    shape[1],
    shape[2],
    config.loss_tokens,
    model.experts,
    config.max_kept,
  )
  replayed, native, flips, layers = [], [], [], []
  for batch in batches:
    placed = trainer.place(step, batch)
    a = trainer.on_host(step.score(params, placed, np.True_))
    b = trainer.on_host(step.score(params, placed, np.False_))
    replayed.append(a.logprobs)
    native.append(b.logprobs)
    known = np.all(batch.experts >= 0, axis=-1)  # [B, T, L]
    differ = ~_same_experts(a.native, batch.experts)
    flips.append(np.sum(known & differ, axis=-1, dtype=np.int32))
    layers.append(np.sum(known, axis=-1, dtype=np.int32))
  columns = [
    pack_lib.unpack(v, placements) for v in (replayed, native, flips, layers)
  ]
  return [
    _masked(s, *values) for s, *values in zip(segments, *columns, strict=True)
  ]


def _same_experts(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Whether two choices [..., K] name the same set."""
  return np.all(np.sort(a, axis=-1) == np.sort(b, axis=-1), axis=-1)


def _nothing(segment: Segment) -> Audited:
  length = len(segment.tokens)
  nan = np.full(length, np.nan, np.float32)
  none = np.full(length, -1, np.int32)
  return Audited(np.zeros(length, bool), nan, nan, none, none)


def _masked(segment, logprobs, native, flips, known) -> Audited:
  """Keeps auditable tokens; routes count up to the last of them."""
  keep = segment.auditable
  last = int(np.flatnonzero(keep)[-1])
  before = np.arange(len(keep)) < last
  return Audited(
    keep,
    np.where(keep, logprobs, np.nan).astype(np.float32),
    np.where(keep, native, np.nan).astype(np.float32),
    np.where(before, flips, -1).astype(np.int32),
    np.where(before, known, -1).astype(np.int32),
  )


def summary(
  segments: Sequence[Segment], audited: Sequence[Audited]
) -> dict[str, float]:
  """Scalars over the audited tokens, under the names of the metrics file.

  'kl' is k1, the mean of behaviour - trainer; 'k3' the mean of r - 1 - log r
  with r = trainer / behaviour. `no_replay/*` are of the trainer's own routes.
  'route_flip_rate' is over the token-layers with known routes. A logprob of the
  trainer that is not finite is audited all the same and shows.
  """
  behaviour, replayed, native = [], [], []
  flips = known = 0
  for segment, a in zip(segments, audited, strict=True):
    keep = a.audited
    behaviour.append(segment.logprobs[keep])
    replayed.append(a.logprobs[keep])
    native.append(a.native_logprobs[keep])
    flips += int(a.flips[a.flips >= 0].sum())
    known += int(a.known[a.known >= 0].sum())
  b = np.concatenate([np.zeros(0), *behaviour]).astype(np.float64)
  out = {'audited_tokens': float(b.size)}
  for prefix, values in (('', replayed), ('no_replay/', native)):
    other = np.concatenate([np.zeros(0), *values]).astype(np.float64)
    out.update({prefix + k: v for k, v in differences(b, other).items()})
  out['route_flip_rate'] = flips / known if known else 0.0
  return {f'mismatch/{name}': value for name, value in out.items()}


def differences(
  behaviour: np.ndarray, trainer_logprobs: np.ndarray
) -> dict[str, float]:
  """k1, k3, maximum, 99th percentile and share differing; empty if no token."""
  if not behaviour.size:
    return {}
  log_ratio = trainer_logprobs - behaviour
  absolute = np.abs(log_ratio)
  with np.errstate(invalid='ignore'):  # a broken trainer shows as inf or nan
    return {
      'kl': float(np.mean(-log_ratio)) + 0.0,
      'k3': float(np.mean(np.expm1(log_ratio) - log_ratio)),
      'max_abs_logprob': float(absolute.max()),
      'p99_abs_logprob': float(np.quantile(absolute, 0.99)),
      'differing': float(np.mean(absolute != 0)),
    }
