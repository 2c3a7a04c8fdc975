"""The trainer role: queue -> select -> pack -> step -> publish -> checkpoint.

One turn, in six moves:

1. wait until a step's worth of groups is queued on the exchange;
2. judge them (stale, equal, lineage, ...), each consumed group frees a slot;
3. now and then audit them: score at the version that sampled, and compare;
4. gradient over micro-batches, one optimizer step;
5. hand the new version over to be published, move the cursor;
6. every so many steps a checkpoint, after which the groups that it contains are
   deleted from the exchange.

With several processes (`jax.distributed`), process 0 reads the queue and
decides; the others are told which groups to read, and all run the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import logging
import pathlib
import threading
import time
from typing import Any
import uuid

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np
import tensorstore as ts

from composer import checkpoint
from composer import config as config_lib
from composer import groups
from composer import metrics
from composer import params as params_lib
from composer import records
from composer.fleet import processes
from composer.fleet import workdir as workdir_lib
from composer.model import transformer
from composer.rl import audit as audit_lib
from composer.rl import buffer
from composer.rl import loss as loss_lib
from composer.rl import pack as pack_lib
from composer.rl import trainer as trainer_lib
from composer.weights import delta
from composer.weights import forms
from composer.weights import pieces
from composer.weights import pipeline as pipeline_lib
from composer.weights import sync
from composer.weights import upkeep

POLL_S = 0.02
LOG = logging.getLogger('composer.train')
QUIET_S = 900.0  # without a new group for so long, a trainer says so and ends
BOOKS_S = 10.0  # for rollouts that commit while the books are checked


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
  lanes: metrics.Lanes
  workdir: pathlib.Path
  pipeline: pipeline_lib.Pipeline | None = None
  watch: upkeep.Watch = dataclasses.field(default_factory=upkeep.Watch)
  published: dict[int, Any] = dataclasses.field(default_factory=dict)
  parsed: dict[str, records.Group] = dataclasses.field(default_factory=dict)
  cache: groups.Cache = dataclasses.field(default_factory=groups.Cache)
  saving: Any = None
  deletable: frozenset[str] = frozenset()

  @property
  def version(self) -> int:
    return int(self.state.version.addressable_data(0))  # the same everywhere

  @property
  def at(self) -> int:
    """Steps of all stages, skipped ones too: the step of the metrics file."""
    return self.experiment.midtrain.steps + self.done

  @property
  def finished(self) -> bool:
    return self.done >= self.experiment.rl.steps


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
  is HEAD's version + 1, and versions of the abandoned lineage are noted. Where
  the stage was finished before, nothing is published.
  """
  step = trainer_lib.make_step(
    experiment.model,
    experiment.numerics,
    experiment.rl,
    mesh,
    experiment.parallel,
    experiment.weights.form,
  )
  state = trainer_lib.init_state(
    params, experiment.rl, midtrain_step, jax.random.key(experiment.seed)
  )
  state = processes.place(state, step.state_shardings(state))
  directory = workdir_lib.checkpoints(workdir, 'rl')
  ledger, done = buffer.Ledger(), 0
  resumed = checkpoint.latest(directory) is not None
  if resumed:
    state, extras = checkpoint.restore(
      directory, checkpoint.abstract(state), identity=identity
    )
    ledger, done = buffer.from_json(extras['ledger']), extras['done']
  trainer = Trainer(
    experiment=experiment,
    kv=kv,
    directory=directory,
    identity=identity,
    step=step,
    state=state,
    ledger=ledger,
    done=done,
    lanes=lanes,
    workdir=workdir,
  )
  if resumed and trainer.finished:
    trainer.published[trainer.version] = step.publishable(state.params)
  else:
    _take_over(trainer, resumed)
  if processes.leads():
    stale = buffer.consumed(trainer.ledger)
    groups.delete_groups(
      kv, [c.group_id for c in groups.committed(kv) if c.group_id in stale]
    )
    write_cursor(trainer, finished=resumed and trainer.finished)
  return trainer


def _take_over(trainer: Trainer, resumed: bool) -> None:
  """Becomes the publisher, and publishes under a version never used before."""
  restored = trainer.version
  publishers = _publishers(trainer)
  nexts = [p.next_version for p in publishers.values()]
  known = [version for version in nexts if version is not None]
  first = processes.share(max(known, default=None))
  if first is None and resumed:
    raise ValueError(
      f'the checkpoint is at version {restored}, but the exchange holds no'
      ' weights; resume with the exchange of the run'
    )
  if first is not None:
    # Even a run that was killed before its first checkpoint has a lineage.
    trainer.ledger = buffer.abandon(trainer.ledger, restored, first - 1)
  trainer.pipeline = pipeline_lib.Pipeline(
    publishers,
    together=jax.process_count() > 1,
    after=lambda form, stats: _published(trainer, form, stats),
  )
  publish(trainer, first or 0)
  # While the base is written and the first groups are rolled out: the next
  # version is a delta.
  kinds = {x.dtype.name for x in jax.tree.leaves(trainer.published[first or 0])}
  threading.Thread(
    target=lambda: [delta.compile_for(kind) for kind in sorted(kinds)],
    name='compile',
  ).start()
  trainer.pipeline.flush()
  record_published(trainer)
  if resumed:
    # The same weights, which groups in the queue were sampled from.
    trainer.published[restored] = trainer.published[trainer.version]


def _publishers(trainer: Trainer) -> dict[str, sync.Publisher]:
  """One for each form; every process uploads its part of each."""
  weights = trainer.experiment.weights
  start = processes.share(uuid.uuid4().hex)
  return {
    form: sync.Publisher(
      trainer.kv,
      form,
      weights.base_every,
      chain_ratio=weights.chain_ratio,
      model=dataclasses.asdict(trainer.experiment.model),
      host=jax.process_index(),
      hosts=jax.process_count(),
      incarnation=start,
    )
    for form in dict.fromkeys((weights.form, weights.also or weights.form))
  }


def publish(trainer: Trainer, version: int) -> None:
  """Hands the state's parameters over as `version`, and keeps them for audits.

  They are uploaded while the next step computes (`weights.pipeline`).
  """
  published = trainer.step.publishable(trainer.state.params)
  trainer.published[version] = published
  for old in sorted(trainer.published)[: -_kept(trainer)]:
    del trainer.published[old]
  trainer.state = trainer.state.replace(
    version=processes.place(
      jnp.asarray(version, jnp.int32), trainer.state.version.sharding
    )
  )
  assert trainer.pipeline is not None
  whole = published
  if set(trainer.pipeline.forms) != {'bf16'} and jax.process_count() > 1:
    # Other forms are made of whole matrices. Gathered here and not in `_in_form`:
    # all processes take part in it, in the same order as in the steps.
    everywhere = NamedSharding(trainer.step.mesh, PartitionSpec())
    whole = jax.jit(lambda x: x, out_shardings=everywhere)(published)
  trainer.pipeline.submit(
    version,
    lambda form: _in_form(
      trainer, version, published if form == 'bf16' else whole, form
    ),
  )


def _kept(trainer: Trainer) -> int:
  """Versions that may still be audited or sampled from."""
  return trainer.experiment.rl.staleness + 2


def _in_form(
  trainer: Trainer, version: int, published: Any, form: str
) -> pipeline_lib.Form:
  """What this process uploads; called beside the next step."""
  with trainer.lanes.span('publish', f'version {version}'):
    named = params_lib.named(published)
    if form != 'bf16' and jax.process_count() == 1:
      named = jax.device_put(named, jax.local_devices()[0])
    mine, shapes = pieces.local(named, jax.process_index(), jax.process_count())
    return pipeline_lib.Form(forms.publish(form, mine), shapes)


def _published(trainer: Trainer, form: str, stats: sync.PublishStats) -> None:
  """After each publication, still beside the next step."""
  trainer.lanes.finished(
    'publish', stats.seconds, f'version {stats.version} {form}'
  )
  if stats.kind == 'base' and processes.leads():
    upkeep.collect(trainer.kv, form, trainer.watch, keep=_kept(trainer))


def record_published(trainer: Trainer) -> dict[str, float]:
  """Notes what was published since the last call; scalars of the newest.

  Raises:
    PublisherFenced, OSError, TimeoutError: a version could not be published.
  """
  if trainer.pipeline is None:
    return {}
  scalars: dict[str, float] = {}
  for form, stats, waited in (
    (item.form, item.stats, item.waited_s)
    for item in trainer.pipeline.finished()
  ):
    if form != trainer.experiment.weights.form or not processes.leads():
      continue
    metrics.record_version(
      trainer.workdir,
      stats.version,
      kind=stats.kind,
      bytes=stats.bytes,
      full_bytes=stats.full_bytes,
      ratio=stats.ratio,
      seconds=stats.seconds,
    )
    scalars = {
      'weights/ratio': stats.ratio,
      'weights/changed_share': stats.changed_share,
      'weights/bytes': float(stats.bytes),
      'weights/publish_s': waited + stats.seconds,
    }
  return scalars


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
  """The next step's groups, read and judged; None if asked to stop.

  Raises:
    TimeoutError: no group arrived for `QUIET_S`.
  """
  quiet, known = time.monotonic(), 0
  while not processes.any_of(stop()):
    if trainer.pipeline is not None:
      trainer.pipeline.check()
    chosen = _select(trainer) if processes.leads() else None
    told = processes.share(chosen and _told(trainer, chosen))
    if told is not None:
      return chosen or _selection(trainer, told)
    if len(trainer.parsed) != known:
      quiet, known = time.monotonic(), len(trainer.parsed)
    if processes.leads() and time.monotonic() - quiet > QUIET_S:
      raise TimeoutError(_silence(trainer))
    time.sleep(POLL_S)
  return None


def _select(trainer: Trainer) -> buffer.Selection | None:
  rl, queued = trainer.experiment.rl, queue(trainer)
  for item in queued:
    if item.group_id not in trainer.parsed:
      trainer.parsed[item.group_id] = groups.read_group(trainer.kv, item)
  chosen = buffer.select(
    [trainer.parsed[item.group_id] for item in queued],
    trainer.ledger,
    groups_per_step=rl.groups_per_step,
    trainer_version=trainer.version,
    staleness_bound=rl.staleness,
    lineage=rl.lineage,
    fit=_fit(trainer.experiment),
  )
  for why in chosen.unfit.values() if chosen else ():
    LOG.warning('dropped as unfit: %s', why)
  return chosen


def _fit(experiment: config_lib.Experiment) -> pack_lib.Fit:
  model, rl = experiment.model, experiment.rl
  return pack_lib.Fit(
    rl.sequence_length,
    transformer.moe_layers(model),
    model.experts_per_token,
    model.experts,
    rl.max_kept,
  )


def _silence(trainer: Trainer) -> str:
  times = [beat.time for beat in groups.heartbeats(trainer.kv)]
  last = (
    f'the last sign of one is {time.time() - max(times):.0f} s old'
    if times
    else 'none has shown itself'
  )
  return (
    f'{len(trainer.parsed)} of {trainer.experiment.rl.groups_per_step} groups'
    f' of a step are queued and no other arrived for {QUIET_S:.0f} s; is a'
    f' rollout process running on this exchange ({last})?'
  )


def _told(trainer: Trainer, chosen: buffer.Selection) -> dict[str, Any]:
  """What the other processes need to make the same selection."""
  return {
    'verdicts': dict(chosen.verdicts),
    'train': [_path(trainer, group.group_id) for group in chosen.train],
  }


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
  consumed = [trainer.parsed.pop(gid, None) for gid in selection.verdicts]
  scalars.update(_rewards([group for group in consumed if group]))
  if scalars.get('train/skipped') == 0:
    handed = time.monotonic()
    publish(trainer, trainer.version + 1)
    scalars['weights/blocked_s'] = time.monotonic() - handed
  scalars.update(record_published(trainer))
  trainer.done += 1
  if processes.leads():
    write_cursor(trainer)
  scalars['train/seconds'] = time.monotonic() - started
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
    config.model.experts,
    config.rl.max_kept,
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


def _rewards(consumed: Sequence[records.Group]) -> dict[str, float]:
  """Means over all that was consumed; over what was trained they would lean
  towards one half, since groups that agree are left out of it."""
  trajectories = [t for g in consumed for t in g.trajectories]
  if not trajectories:
    return {}
  # 'monitors' is there only where something was taken; a judge may be new.
  names = dict.fromkeys(name for t in trajectories for name in t.reward_parts)
  values = {
    f'reward/{name}': [t.reward_parts.get(name, 0.0) for t in trajectories]
    for name in names
  }
  values['reward/mean'] = [t.reward for t in trajectories]
  return {name: float(np.mean(each)) for name, each in values.items()}


def counters(trainer: Trainer) -> dict[str, float]:
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


def check_books(trainer: Trainer) -> str | None:
  """What does not agree in the books, or None.

  Rollouts may be committing their last groups, so a difference has to last.
  """
  deadline = time.monotonic() + BOOKS_S
  while True:
    produced = groups.produced(trainer.kv, trainer.cache)
    queued = [item.group_id for item in queue(trainer)]
    problem = buffer.check_conservation(produced, trainer.ledger, queued)
    if problem is None or time.monotonic() > deadline:
      return problem
    time.sleep(0.2)


def save(trainer: Trainer) -> None:
  """Starts a checkpoint; groups that an earlier one contains are deleted."""
  finish_saving(trainer)
  if trainer.pipeline is not None:
    # HEAD is never behind a checkpoint, from which a resumed run tells what
    # was published after it.
    trainer.pipeline.flush()
    record_published(trainer)
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
  if processes.leads():
    there = [c.group_id for c in groups.committed(trainer.kv, trainer.cache)]
    groups.delete_groups(
      trainer.kv, [gid for gid in there if gid in trainer.deletable]
    )


def run(
  trainer: Trainer,
  stop: Callable[[], bool],
  report: Callable[[Trainer, Done], None],
) -> None:
  """Steps until `rl.steps` are done or `stop` says so; ends with a checkpoint.

  Args:
    trainer: from `begin`.
    stop: asked while waiting.
    report: called after every step, in every process.
  """
  if trainer.finished and checkpoint.latest(trainer.directory) is not None:
    return  # by an earlier life of this run, its checkpoint included
  every = trainer.experiment.checkpoint.every
  while not trainer.finished:
    selection = wait_for_groups(trainer, stop)
    if selection is None:
      break
    report(trainer, train_step(trainer, selection))
    if every and trainer.done % every == 0 and not trainer.finished:
      save(trainer)
  save(trainer)
  finish_saving(trainer)
  if trainer.pipeline is not None:
    trainer.pipeline.close()
    trainer.pipeline = None
  if processes.leads():
    write_cursor(trainer, trainer.finished)
