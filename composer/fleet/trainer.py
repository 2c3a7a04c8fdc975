"""The trainer role: queue -> select -> pack -> step -> publish -> checkpoint.

One turn, in six moves:

1. wait until a step's worth of groups is queued on the exchange;
2. judge them (stale, equal, lineage, ...), each consumed group frees a slot;
3. now and then audit them: score at the version that sampled, and compare;
4. gradient over micro-batches, one optimizer step;
5. publish the new version, move the cursor;
6. every so many steps a checkpoint, after which the groups that it contains are
   deleted from the exchange.

With several processes (`jax.distributed`), process 0 reads the queue and
decides; the others are told which groups to read, and all run the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from composer import checkpoint
from composer import config as config_lib
from composer import groups
from composer import metrics
from composer import params as params_lib
from composer import records
from composer.fleet import workdir as workdir_lib
from composer.model import transformer
from composer.rl import audit as audit_lib
from composer.rl import buffer
from composer.rl import loss as loss_lib
from composer.rl import pack as pack_lib
from composer.rl import trainer as trainer_lib
from composer.weights import sync
from composer.weights import upkeep

POLL_S = 0.02
QUIET_S = 900.0  # without a group for so long, a trainer says so and ends

Report = Callable[[int, Mapping[str, float]], None]


@dataclasses.dataclass
class Trainer:
  """A trainer's state between two steps; owned by its loop.

  `done` counts steps of the stage, skipped ones too; `published` keeps the
  last versions' parameters, for audits.
  """

  experiment: config_lib.Experiment
  kv: ts.KvStore
  directory: str
  identity: Mapping[str, Any]
  step: trainer_lib.Step
  state: records.TrainState
  ledger: buffer.Ledger
  done: int
  publisher: sync.Publisher | None
  lanes: metrics.Lanes
  workdir: pathlib.Path
  published: dict[int, Any] = dataclasses.field(default_factory=dict)
  parsed: dict[str, records.Group] = dataclasses.field(default_factory=dict)
  cache: groups.Cache = dataclasses.field(default_factory=groups.Cache)
  saving: Any = None
  deletable: frozenset[str] = frozenset()

  @property
  def version(self) -> int:
    return int(trainer_lib.on_host(self.state.version))


@dataclasses.dataclass(frozen=True)
class Done:
  """What a step did: its scalars, and audited sessions if it was audited."""

  scalars: Mapping[str, float]
  trajectories: tuple[records.Trajectory, ...] = ()
  extra: tuple[Mapping[str, Any], ...] | None = None


def begin(
  experiment: config_lib.Experiment,
  kv: ts.KvStore,
  workdir: pathlib.Path,
  params: Any,
  midtrain_step: int,
  identity: Mapping[str, Any],
  lanes: metrics.Lanes,
  mesh: Any = None,
) -> Trainer:
  """A trainer at the stage's newest checkpoint, or at its start.

  What it starts from is published at once, as a full base: after a resume that
  is HEAD's version + 1, and versions of the abandoned lineage are noted.
  """
  step = trainer_lib.make_step(
    experiment.model, experiment.numerics, experiment.rl, mesh
  )
  state = trainer_lib.init_state(
    params, experiment.rl, midtrain_step, jax.random.key(experiment.seed)
  )
  state = jax.device_put(state, step.state_shardings(state))
  directory = str(workdir / 'checkpoints' / 'rl')
  ledger, done = buffer.Ledger(), 0
  resumed = checkpoint.latest(directory) is not None
  if resumed:
    state, extras = checkpoint.restore(
      directory, checkpoint.abstract(state), identity=identity
    )
    ledger, done = buffer.from_json(extras['ledger']), extras['done']
  publisher = None
  if jax.process_index() == 0:
    publisher = sync.Publisher(
      kv, experiment.weights.form, experiment.weights.base_every
    )
  trainer = Trainer(
    experiment=experiment,
    kv=kv,
    directory=directory,
    identity=identity,
    step=step,
    state=state,
    ledger=ledger,
    done=done,
    publisher=publisher,
    lanes=lanes,
    workdir=workdir,
  )
  head = _share(None if publisher is None else publisher.next_version)
  first = 0 if head is None else head
  if first:
    # Even a run that was killed before its first checkpoint has a lineage.
    restored = trainer.version if resumed else -1
    trainer.ledger = buffer.abandon(ledger, restored, first - 1)
  publish(trainer, first)
  if jax.process_index() == 0:
    stale = buffer.consumed(trainer.ledger)
    groups.delete_groups(
      kv, [c.group_id for c in groups.committed(kv) if c.group_id in stale]
    )
    write_cursor(trainer)
  return trainer


def publish(trainer: Trainer, version: int) -> dict[str, float]:
  """Publishes the state's parameters as `version`, and keeps them for audits."""
  started = time.monotonic()
  published = trainer.step.publishable(trainer.state.params)
  trainer.published[version] = published
  kept = trainer.experiment.rl.staleness + 2
  for old in sorted(trainer.published)[:-kept]:
    del trainer.published[old]
  trainer.state = trainer.state.replace(
    version=jax.device_put(
      jnp.asarray(version, jnp.int32), trainer.state.version.sharding
    )
  )
  if trainer.publisher is None:
    return {}
  flat = {
    name: np.asarray(value.addressable_data(0))
    for name, value in params_lib.named(published).items()
  }
  with trainer.lanes.span('publish', f'version {version}'):
    stats = trainer.publisher.publish(flat, version)
  metrics.record_version(
    trainer.workdir,
    version,
    kind=stats.kind,
    bytes=stats.bytes,
    full_bytes=stats.full_bytes,
    ratio=stats.ratio,
    seconds=stats.seconds,
  )
  if stats.kind == 'base':
    upkeep.collect(trainer.kv, trainer.experiment.weights.form, keep=kept)
  return {
    'weights/ratio': stats.ratio,
    'weights/changed_share': stats.changed_share,
    'weights/bytes': float(stats.bytes),
    'weights/publish_s': time.monotonic() - started,
  }


def write_cursor(trainer: Trainer, finished: bool = False) -> None:
  """Tells the rollouts what was consumed, so that they may claim more."""
  ledger = trainer.ledger
  groups.write_cursor(
    trainer.kv,
    groups.Cursor(
      consumed=len(buffer.consumed(ledger)),
      version=trainer.version,
      trained=tuple(sorted(ledger.trained)),
      dropped={k: tuple(sorted(v)) for k, v in ledger.dropped.items()},
      finished=finished,
    ),
  )


def queue(trainer: Trainer) -> list[groups.Committed]:
  """Committed groups that have no verdict, from a listing of the exchange."""
  found = {c.group_id: c for c in groups.committed(trainer.kv, trainer.cache)}
  return [found[gid] for gid in buffer.pending(found, trainer.ledger)]


def wait_for_groups(
  trainer: Trainer, stop: Callable[[], bool]
) -> buffer.Selection | None:
  """The next step's groups, read and judged; None if asked to stop."""
  if jax.process_index() > 0:
    chosen = _share(None)
    return None if chosen is None else _selection(trainer, chosen)
  chosen = _wait(trainer, stop)
  _share(
    chosen
    and {
      'verdicts': dict(chosen.verdicts),
      'train': [_path(trainer, g.group_id) for g in chosen.train],
    }
  )
  return chosen


def _wait(trainer, stop) -> buffer.Selection | None:
  rl, deadline = trainer.experiment.rl, time.monotonic() + QUIET_S
  while not stop():
    queued = queue(trainer)
    for item in queued:
      if item.group_id not in trainer.parsed:
        trainer.parsed[item.group_id] = groups.read_group(trainer.kv, item)
    selection = buffer.select(
      [trainer.parsed[item.group_id] for item in queued],
      trainer.ledger,
      groups_per_step=rl.groups_per_step,
      trainer_version=trainer.version,
      staleness_bound=rl.staleness,
      lineage=rl.lineage,
    )
    if selection is not None:
      return selection
    if time.monotonic() > deadline:
      raise TimeoutError(
        f'{len(queued)} of {rl.groups_per_step} groups arrived on the exchange'
        f' within {QUIET_S:.0f} s; is a rollout process running on it?'
      )
    time.sleep(POLL_S)
  return None


def _path(trainer: Trainer, group_id: str) -> dict[str, Any]:
  held = trainer.cache.leases[group_id]
  return {
    'group_id': group_id,
    'draw': held.draw,
    'cluster': held.cluster,
    'incarnation': held.incarnation,
    'path': held.path,
    'produced_index': held.produced_index,
  }


def _selection(trainer: Trainer, chosen: Any) -> buffer.Selection:
  read = tuple(
    groups.read_group(trainer.kv, groups.Committed(**item))
    for item in chosen['train']
  )
  return buffer.Selection(chosen['verdicts'], read, ())


def train_step(trainer: Trainer, selection: buffer.Selection) -> Done:
  """Consumes a selection: at most one optimizer step and one version."""
  rl = trainer.experiment.rl
  started = time.monotonic()
  ages = [buffer.staleness(group, trainer.version) for group in selection.train]
  scalars: dict[str, float] = {}
  audited: Done | None = None
  if selection.train:
    with trainer.lanes.span('trainer', f'step {trainer.done + 1}'):
      if rl.audit_every and trainer.done % rl.audit_every == 0:
        audited = audit(trainer, selection)
      scalars.update(_optimize(trainer, selection))
    scalars['staleness/max'] = float(max(a for a, _ in ages))
    scalars['staleness/mean'] = float(np.mean([m for _, m in ages]))
  trainer.ledger = buffer.record(trainer.ledger, selection)
  for gid in selection.verdicts:
    trainer.parsed.pop(gid, None)
  if scalars.get('train/skipped') == 0:
    scalars.update(publish(trainer, trainer.version + 1))
  trainer.done += 1
  if jax.process_index() == 0:
    write_cursor(trainer)
  scalars['train/seconds'] = time.monotonic() - started
  scalars.update(_rewards(selection))
  if audited is None:
    return Done(scalars)
  return dataclasses.replace(audited, scalars={**scalars, **audited.scalars})


def _optimize(
  trainer: Trainer, selection: buffer.Selection
) -> dict[str, float]:
  config = trainer.experiment
  items = buffer.to_items(selection.train, config.reward)
  batches, placements = pack_lib.pack(
    items,
    config.rl.micro_batch,
    config.rl.sequence_length,
    config.numerics.kv_block,
    transformer.moe_layers(config.model),
    config.model.experts_per_token,
    config.rl.loss_tokens,
  )
  started = time.monotonic()
  grads, sums = trainer_lib.accumulate(
    trainer.step, trainer.state.params, batches
  )
  trainer.state, stats = trainer.step.update(trainer.state, grads)
  stats = {k: float(v) for k, v in trainer_lib.on_host(stats).items()}
  tokens = sum(len(item.segment.tokens) for item in items)
  means = loss_lib.means(
    {k: v for k, v in sums.items() if 'replayed' not in k and k != 'loss'}
  )
  routed = sums['replayed'] + sums['not_replayed']
  exact = not config.rl.router_replay or config.rl.plausibility > 0
  assert exact or not sums['not_replayed'], (
    f'{sums["not_replayed"]} token-layers used other experts than replayed'
  )
  return {
    'loss/policy': sums['loss'],
    **{f'train/{k}': float(v) for k, v in means.items()},
    **{f'train/{k}': v for k, v in stats.items()},
    'train/replayed_share': sums['replayed'] / max(routed, 1.0),
    'train/tokens': float(tokens),
    'train/sampled_tokens': sums['count'],
    'train/fill': pack_lib.fill(
      placements, config.rl.micro_batch, config.rl.sequence_length
    ),
    'trainer/tokens_per_s': tokens / (time.monotonic() - started),
  }


def audit(trainer: Trainer, selection: buffer.Selection) -> Done:
  """Scores the selection's auditable tokens at the versions that sampled."""
  config = trainer.experiment
  trajectories = [t for g in selection.train for t in g.trajectories]
  segments = [s for t in trajectories for s in t.segments]
  audited = audit_lib.audit(
    trainer.step,
    segments,
    trainer.published,
    config.rl,
    config.model,
    config.numerics.kv_block,
  )
  return Done(
    audit_lib.summary(segments, audited),
    tuple(trajectories),
    extras(trajectories, audited),
  )


def extras(
  trajectories: list[records.Trajectory], audited: list[audit_lib.Audited]
) -> tuple[Mapping[str, Any], ...]:
  """Audited values by trajectory, as the report reads them."""
  out, at = [], 0
  for trajectory in trajectories:
    mine = audited[at : at + len(trajectory.segments)]
    at += len(trajectory.segments)
    out.append(
      {
        'trainer_logprobs': [a.logprobs for a in mine],
        'flips': [a.flips for a in mine],
      }
    )
  return tuple(out)


def _rewards(selection: buffer.Selection) -> dict[str, float]:
  trajectories = [t for g in selection.train for t in g.trajectories]
  if not trajectories:
    return {}
  names = trajectories[0].reward_parts
  return {
    f'reward/{name}': float(
      np.mean([t.reward_parts[name] for t in trajectories])
    )
    for name in names
  }


def counters(trainer: Trainer, selection: buffer.Selection) -> dict[str, float]:
  """Cumulative counts of every side, each from that side's own account."""
  queued = queue(trainer)
  produced = groups.produced(trainer.kv, trainer.cache)
  beats = groups.heartbeats(trainer.kv)
  return {
    **buffer.scalars(trainer.ledger),
    'groups/produced': float(produced),
    'groups/queued': float(len(queued)),
    'sessions/abandoned': float(sum(b.abandoned for b in beats)),
  }


def save(trainer: Trainer) -> None:
  """Starts a checkpoint; groups that an earlier one contains are deleted."""
  finish_saving(trainer)
  trainer.deletable = buffer.consumed(trainer.ledger)
  trainer.saving = checkpoint.save(
    trainer.directory,
    trainer.done,
    trainer.state,
    {'ledger': buffer.to_json(trainer.ledger), 'done': trainer.done},
    identity=trainer.identity,
    keep=trainer.experiment.checkpoint.keep,
  )


def finish_saving(trainer: Trainer) -> None:
  """Waits for the checkpoint under way, then deletes what it contains."""
  if trainer.saving is None:
    return
  trainer.saving.wait()
  trainer.saving = None
  if jax.process_index() == 0:
    there = [c.group_id for c in groups.committed(trainer.kv, trainer.cache)]
    groups.delete_groups(
      trainer.kv, [gid for gid in there if gid in trainer.deletable]
    )


def run(
  trainer: Trainer,
  stop: workdir_lib.Stopper,
  report: Callable[[Trainer, buffer.Selection, Done], None],
) -> None:
  """Steps until `rl.steps` are done or `stop` says so; ends with a checkpoint.

  Args:
    trainer: from `begin`.
    stop: asked while waiting.
    report: called after every step, in every process.
  """
  every = trainer.experiment.checkpoint.every
  while trainer.done < trainer.experiment.rl.steps:
    selection = wait_for_groups(trainer, stop)
    if selection is None:
      break
    report(trainer, selection, train_step(trainer, selection))
    if every and trainer.done % every == 0:
      save(trainer)
  save(trainer)
  finish_saving(trainer)
  finished = trainer.done >= trainer.experiment.rl.steps
  if jax.process_index() == 0:
    write_cursor(trainer, finished)


def _share(value: Any) -> Any:
  """A JSON-able value of process 0, in every process."""
  if jax.process_count() == 1:
    return value
  blob = json.dumps(value).encode()
  size = int(multihost_utils.broadcast_one_to_all(np.int32(len(blob))))
  data = np.zeros(size, np.uint8)
  if jax.process_index() == 0:
    data[:] = np.frombuffer(blob, np.uint8)
  return json.loads(bytes(multihost_utils.broadcast_one_to_all(data)))
