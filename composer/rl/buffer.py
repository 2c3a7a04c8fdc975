"""The trainer's side of the books: which groups it trained, dropped, and why.

Pure functions over a frozen `Ledger` that lives in the checkpoint. The flow of
one step, each stage callable by hand:

  pending -> select (judge each) -> advantages_for -> to_items -> pack -> step
          -> record -> checkpoint

Every consumed group returns one slot of admission, whatever its verdict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from composer.config import RewardConfig
from composer.records import Group
from composer.records import Segment
from composer.records import Trajectory
from composer.rewards.combine import ALL_PARTS
from composer.rewards.combine import combine
from composer.rewards.combine import earned
from composer.rl.advantage import group_advantages
from composer.rl.advantage import is_equal
from composer.rl.advantage import k1_kl
from composer.rl.pack import Fit
from composer.rl.pack import Item
from composer.rl.pack import check

TRAIN = 'train'
DUPLICATE = 'duplicate'
REASONS = ('equal', 'stale', 'infrastructure', 'lineage', 'unfit')
VERIFIABLE_PART = 'tests'
JUDGED_PART = 'judge'  # there where the config has a rubric
# A trajectory that ended so was not the model's doing and takes no part.
LOST = 'infrastructure'

# Reference logprobs of a group: [trajectory that remains][segment] -> [T].
References = Sequence[Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Ledger:
  """What became of every group that the trainer consumed.

  Attributes:
    trained: ids of groups that entered a gradient.
    dropped: reason -> ids; every reason of `REASONS` is a key.
    skipped_steps: draws of a step that held no group to train on.
    abandoned: (first, last) version of each lineage that a resume cut off:
      those published after the checkpoint that was restored.
  """

  trained: frozenset[str] = frozenset()
  dropped: Mapping[str, frozenset[str]] = dataclasses.field(
    default_factory=lambda: {reason: frozenset() for reason in REASONS}
  )
  skipped_steps: int = 0
  abandoned: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Selection:
  """The groups that one step consumes.

  Attributes:
    verdicts: group id -> 'train' or the reason, in draw order; as many slots of
      admission come free as there are entries.
    train: the groups to train on, in draw order; none means that the step is
      skipped.
    duplicates: ids offered again or twice; not consumed and not counted.
    unfit: group id -> why it cannot be packed, of those with that verdict.
  """

  verdicts: Mapping[str, str]
  train: tuple[Group, ...]
  duplicates: tuple[str, ...]
  unfit: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def skipped(self) -> bool:
    return not self.train


def to_json(ledger: Ledger) -> dict[str, Any]:
  """The ledger as JSON-able values, ids sorted: equal ledgers, equal text."""
  return {
    'trained': sorted(ledger.trained),
    'dropped': {name: sorted(ids) for name, ids in ledger.dropped.items()},
    'skipped_steps': ledger.skipped_steps,
    'abandoned': [list(span) for span in ledger.abandoned],
  }


def from_json(values: Mapping[str, Any]) -> Ledger:
  """Reads what `to_json` wrote; raises ValueError for anything else."""
  expected = {field.name for field in dataclasses.fields(Ledger)}
  if set(values) != expected:
    raise ValueError(
      f'a ledger has the fields {sorted(expected)}, this one {sorted(values)};'
      ' the checkpoint is from another version or damaged'
    )
  unknown = set(values['dropped']) - set(REASONS)
  if unknown:
    raise ValueError(
      f'ledger.dropped has the reasons {sorted(values["dropped"])}, known are'
      f' {sorted(REASONS)}'
    )
  ledger = Ledger(
    trained=frozenset(values['trained']),
    # A reason that is younger than the checkpoint has no groups yet.
    dropped={
      name: frozenset(values['dropped'].get(name, ())) for name in REASONS
    },
    skipped_steps=int(values['skipped_steps']),
    abandoned=tuple((int(a), int(b)) for a, b in values['abandoned']),
  )
  total = len(values['trained']) + sum(map(len, values['dropped'].values()))
  if len(consumed(ledger)) != total:
    raise ValueError(
      f'the ledger names {total} groups, {len(consumed(ledger))} of them'
      ' different; a group is counted once'
    )
  return ledger


def consumed(ledger: Ledger) -> frozenset[str]:
  """Ids of all groups with a verdict."""
  return ledger.trained.union(*ledger.dropped.values())


def pending(listing: Iterable[str], ledger: Ledger) -> list[str]:
  """What of a listing of the exchange is queued: without verdict yet.

  Objects of a consumed group stay on the exchange until a checkpoint contains
  its verdict, so a listing alone is not the queue. Keeps order, drops repeats.
  """
  done = consumed(ledger)
  return [gid for gid in dict.fromkeys(listing) if gid not in done]


def record(ledger: Ledger, selection: Selection) -> Ledger:
  """The ledger after a step has consumed `selection`."""
  done = consumed(ledger)
  again = [gid for gid in selection.verdicts if gid in done]
  assert not again, f'groups {again} already have a verdict'
  by_verdict: dict[str, set[str]] = {}
  for gid, verdict in selection.verdicts.items():
    by_verdict.setdefault(verdict, set()).add(gid)
  return dataclasses.replace(
    ledger,
    trained=ledger.trained | by_verdict.pop(TRAIN, set()),
    dropped={
      reason: ledger.dropped[reason] | by_verdict.get(reason, set())
      for reason in REASONS
    },
    skipped_steps=ledger.skipped_steps + selection.skipped,
  )


def abandon(ledger: Ledger, restored: int, head: int) -> Ledger:
  """The ledger after a resume from version `restored`, HEAD being at `head`.

  Versions restored + 1 to head were published by a lineage whose training steps
  are lost; the resumed publisher goes on at head + 1.
  """
  if head < restored:
    raise ValueError(
      f'the checkpoint is at version {restored} and HEAD at {head}; the'
      ' exchange belongs to another run or lost its HEAD'
    )
  if head == restored:
    return ledger
  spans = (*ledger.abandoned, (restored + 1, head))
  return dataclasses.replace(ledger, abandoned=spans)


def scalars(ledger: Ledger) -> dict[str, float]:
  """Cumulative counters under the names of the metrics file."""
  dropped = {
    f'groups/dropped/{reason}': float(len(ids))
    for reason, ids in ledger.dropped.items()
  }
  return {
    'groups/trained': float(len(ledger.trained)),
    **dropped,
    'steps/skipped': float(ledger.skipped_steps),
  }


def check_conservation(
  produced: int, ledger: Ledger, queued: Collection[str]
) -> str | None:
  """Checks produced = trained + dropped by reason + queued.

  Args:
    produced: sum over rollout processes of the groups that each counted itself
      as committed.
    ledger: the trainer's own account.
    queued: ids of a listing of the exchange, `pending` applied; never a
      subtraction.

  Returns:
    None if the books agree, else a message with every figure.
  """
  both = consumed(ledger).intersection(queued)
  if both:
    return f'groups {sorted(both)[:4]} are queued and have a verdict'
  queue = len(set(queued))
  accounted = len(consumed(ledger)) + queue
  if accounted == produced:
    return None
  terms = [f'{len(ledger.trained)} trained']
  terms += [f'{len(ids)} {name}' for name, ids in ledger.dropped.items()]
  terms += [f'{queue} queued']
  what = 'lost' if accounted < produced else 'counted but never produced'
  return (
    f'{abs(produced - accounted)} groups {what}: produced {produced}, accounted'
    f' {accounted} = {" + ".join(terms)}'
  )


def remaining(group: Group) -> tuple[Trajectory, ...]:
  """The trajectories that count: without those lost to infrastructure."""
  return tuple(t for t in group.trajectories if t.stop_reason != LOST)


def sampled_versions(group: Group) -> np.ndarray:
  """Versions of all sampled tokens of a group, int32 [tokens]; never the -1.

  Raises:
    ValueError: if a sampled token carries no version.
  """
  versions = [
    s.versions[s.sampled] for t in remaining(group) for s in t.segments
  ]
  versions = np.concatenate([np.zeros(0, np.int32), *versions])
  if versions.size and versions.min() < 0:
    raise ValueError(
      f'group {group.group_id}: {np.count_nonzero(versions < 0)} sampled tokens'
      ' have version -1; the engine must stamp every token that it samples'
    )
  return versions


def staleness(group: Group, trainer_version: int) -> tuple[int, float]:
  """Maximum and mean over sampled tokens of trainer version - token version.

  The maximum is the group's staleness. (0, 0.0) for a group without any token.
  """
  versions = sampled_versions(group)
  if versions.size == 0:
    return 0, 0.0
  ages = trainer_version - versions
  return int(ages.max()), float(ages.mean())


def why_unfit(group: Group, fit: Fit) -> str:
  """Why a group cannot be packed, or ''; lost trajectories are audited too."""
  for trajectory in group.trajectories:
    for index, segment in enumerate(trajectory.segments):
      where = (
        f'group {group.group_id}: segment {index} of trajectory'
        f' {trajectory.index}'
      )
      try:
        check(segment, fit, where)
      except ValueError as error:
        return str(error)
  return ''


def judge(
  group: Group,
  ledger: Ledger,
  *,
  trainer_version: int,
  staleness_bound: int,
  lineage: str = 'drop',
  fit: Fit | None = None,
) -> str:
  """What becomes of a group, measured when it is packed.

  In this order:
    'duplicate': it has a verdict already.
    'infrastructure': fewer than two of its trajectories remain.
    'lineage': a sampled token is of an abandoned lineage and the policy is
      'drop', or of a version that this trainer has not published at all.
    'stale': its oldest sampled token is older than the bound.
    'unfit': one of its segments cannot be packed (`why_unfit`).
    'equal': the verifiable parts of its trajectories agree, and the verdicts
      of a judge where there is one.
    'train': anything else.

  Args:
    group: with the trajectories that its producer committed.
    ledger: knows what was consumed and which versions are abandoned.
    trainer_version: the version that the step will update.
    staleness_bound: S, in versions.
    lineage: 'drop' or 'keep'.
    fit: of the run; None: everything can be packed.
  """
  if lineage not in ('drop', 'keep'):
    raise ValueError(f"rl.lineage={lineage!r} is unknown; use 'drop' or 'keep'")
  if _has_verdict(ledger, group.group_id):
    return DUPLICATE
  trajectories = remaining(group)
  if len(trajectories) < 2:
    return 'infrastructure'
  versions = sampled_versions(group)
  if np.any(versions > trainer_version):
    return 'lineage'
  if lineage == 'drop' and any(
    np.any((versions >= first) & (versions <= last))
    for first, last in ledger.abandoned
  ):
    return 'lineage'
  if staleness(group, trainer_version)[0] > staleness_bound:
    return 'stale'
  if fit is not None and why_unfit(group, fit):
    return 'unfit'
  judged = [t.reward_parts.get(JUDGED_PART, 0.0) for t in trajectories]
  if is_equal([_verifiable(t) for t in trajectories]) and is_equal(judged):
    return 'equal'
  return TRAIN


def select(
  groups: Iterable[Group],
  ledger: Ledger,
  *,
  groups_per_step: int,
  trainer_version: int,
  staleness_bound: int,
  lineage: str = 'drop',
  fit: Fit | None = None,
) -> Selection | None:
  """Consumes exactly `groups_per_step` groups of the queue, in draw order.

  What is beyond them stays queued. A group that is dropped is consumed like one
  that is trained, so that a bound of 0 cannot deadlock.

  Returns:
    None while fewer are queued; then nothing is consumed.
  """
  queue: dict[str, Group] = {}
  duplicates = []
  for group in sorted(groups, key=lambda g: (g.draw, g.group_id)):
    gid = group.group_id
    if gid in queue or _has_verdict(ledger, gid):
      duplicates.append(gid)
    else:
      queue[gid] = group
  if len(queue) < groups_per_step:
    return None
  taken = list(queue.values())[:groups_per_step]
  verdicts = {
    group.group_id: judge(
      group,
      ledger,
      trainer_version=trainer_version,
      staleness_bound=staleness_bound,
      lineage=lineage,
      fit=fit,
    )
    for group in taken
  }
  train = tuple(g for g in taken if verdicts[g.group_id] == TRAIN)
  unfit = {
    g.group_id: why_unfit(g, fit)
    for g in taken
    if fit is not None and verdicts[g.group_id] == 'unfit'
  }
  return Selection(verdicts, train, tuple(duplicates), unfit)


def advantages_for(
  group: Group, config: RewardConfig, references: References | None = None
) -> np.ndarray:
  """One advantage for each trajectory of `remaining(group)`, float32 [G].

  A trajectory counts once, however many segments it was summarised into. With
  a KL weight its reward is combined anew, with the k1 estimate summed over all
  its sampled tokens.

  Raises:
    ValueError: if `config.kl_weight` is set and there are no references.
  """
  trajectories = remaining(group)
  if not config.kl_weight:
    return group_advantages([t.reward for t in trajectories])
  if references is None:
    raise ValueError(
      f'reward.kl_weight={config.kl_weight} needs the reference logprobs of'
      f' group {group.group_id}; score it first, or set reward.kl_weight=0'
    )
  rewards = []
  for trajectory, scored in zip(trajectories, references, strict=True):
    pairs = zip(trajectory.segments, scored, strict=True)
    kl = sum(k1_kl(s.logprobs, ref, s.sampled) for s, ref in pairs)
    parts = {**trajectory.reward_parts, 'kl': kl}
    rewards.append(combine(config, parts, ALL_PARTS))
  return group_advantages(rewards)


def to_items(
  groups: Sequence[Group],
  config: RewardConfig,
  references: Sequence[References] | None = None,
) -> list[Item]:
  """What `pack` takes: every segment with its trajectory's advantage.

  Segments without a sampled token have no part in the loss and are left out.
  `origin` holds positions in `remaining(group)` and in its segments.

  Args:
    groups: those to train on.
    config: for the KL weight.
    references: [group][trajectory that remains][segment] -> float32 [T].
  """
  items = []
  for g, group in enumerate(groups):
    scored = None if references is None else references[g]
    advantages = advantages_for(group, config, scored)
    for i, trajectory in enumerate(remaining(group)):
      for s, segment in enumerate(trajectory.segments):
        if _trains(segment):
          reference = None if scored is None else scored[i][s]
          origin = (group.group_id, i, s)
          items.append(Item(segment, float(advantages[i]), reference, origin))
  return items


def _trains(segment: Segment) -> bool:
  return bool(np.any(segment.sampled))


def _has_verdict(ledger: Ledger, gid: str) -> bool:
  return gid in ledger.trained or any(
    gid in ids for ids in ledger.dropped.values()
  )


def _verifiable(trajectory: Trajectory) -> float:
  if VERIFIABLE_PART not in trajectory.reward_parts:
    raise ValueError(
      f'trajectory {trajectory.index} of group {trajectory.group_id} has no'
      f' reward part {VERIFIABLE_PART!r} (there:'
      f' {sorted(trajectory.reward_parts)}); an ungraded rollout is lost to'
      ' infrastructure, not equal to another'
    )
  return earned(trajectory.reward_parts)
