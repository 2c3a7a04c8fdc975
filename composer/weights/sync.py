"""Publisher and subscriber: weights from one trainer to any number of readers.

A publisher claims the next incarnation (the fence) when it starts, so that all
keys it writes are its own and an older one can no longer move HEAD. Its first
version is a full base at HEAD's version + 1; deltas follow, and bases recur.
The order of writes makes a version appear at once or not at all: content, then
manifest, then HEAD. `pipeline` runs publishers beside the trainer's steps.

A subscriber holds the weights of one version and moves to the newest one that
it can reconstruct bit for bit: forward over deltas, else from the newest base.
It moves only after every digest has been checked. Before it reads it announces
what it needs, so that the publisher's side keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import pathlib
import time
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from composer.weights import delta
from composer.weights import local
from composer.weights import pieces
from composer.weights import store
from composer.weights import upkeep
from composer.weights import versions
from composer.weights.store import BrokenWeights
from composer.weights.store import Ref
from composer.weights.versions import Blob
from composer.weights.versions import Manifest

Flat = dict[str, np.ndarray]

BLOB_BYTES = 256 << 20  # of weights that one delta blob covers
# A chain whose deltas have grown to this many times the base ends in a new one.
CHAIN_RATIO = 8.0
AHEAD_BYTES = 1 << 30  # of deltas that a subscriber reads before it needs them
ATTEMPTS = 3  # of one poll, while HEAD moves under it


@dataclasses.dataclass(frozen=True)
class PublishStats:
  """What one publication cost. `ratio` is bytes / full_bytes; less is better.

  `changed_share` is of all elements, since the version before; 1 for a
  publisher's first. A host other than 0 reports its own part.
  """

  version: int
  kind: str  # 'base' or 'delta'
  bytes: int
  full_bytes: int
  ratio: float
  changed_share: float
  seconds: float


class Publisher:
  """The only writer of one form. Not thread-safe: one call at a time.

  Attributes:
    fence: this incarnation.
    next_version: the least number that the next publication may have; HEAD's
      + 1 when the publisher starts, None where nothing was ever published
      (then any number from 0 is right).
  """

  def __init__(
    self,
    kv: ts.KvStore,
    form: str,
    base_every: int,
    *,
    chain_ratio: float = CHAIN_RATIO,
    model: Mapping[str, Any] | None = None,
    host: int = 0,
    hosts: int = 1,
    incarnation: str = '',
    wait_s: float = store.WAIT_S,
    on_device: bool | None = None,
  ):
    """Claims the form (host 0) or waits for host 0 to have done so.

    Args:
      base_every: a version in so many is a full base, at least 1.
      chain_ratio: and so is one when the deltas since the last have grown to
        so many times its bytes.
      model: fields of the model's configuration, for those who fetch it.
      host, hosts: which of how many uploading processes this is.
      incarnation: a name that all hosts of this start share and no other start
        ever had; needed when there are several.
      wait_s: limit on every wait for other hosts.
      on_device: find what changed on the devices that the arrays are on
        (`weights.on_device`); None: on any but a CPU.
    """
    if base_every < 1:
      raise ValueError(f'base_every={base_every} must be at least 1')
    if not chain_ratio > 0:
      raise ValueError(f'chain_ratio={chain_ratio} must be more than 0')
    if not 0 <= host < hosts:
      raise ValueError(f'host={host} must lie in 0..{hosts - 1}')
    if hosts > 1 and not incarnation:
      raise ValueError(
        f'hosts={hosts} needs an incarnation: a name that all hosts of this'
        ' start share, and no other start'
      )
    if not form or '/' in form:
      raise ValueError(f'form={form!r} must be a name without a slash')
    self._kv, self._form, self._base_every = kv, form, base_every
    self._chain_ratio, self._model = chain_ratio, model
    self._host, self._hosts, self._wait_s = host, hosts, wait_s
    self._incarnation = incarnation
    self._on_device = on_device
    self._held: Flat | None = None  # what was published last
    # The same on devices, of arrays that came from there.
    self._placed: Mapping[str, Any] = {}
    self._previous: Ref | None = None
    self._since_base = 0
    self._chain_bytes = 0
    self._base_bytes = 0
    self._failed = False
    self._unanswered: _Attempt | None = None
    self.fence = 0
    self.next_version: int | None = None
    self._start()

  def publish(
    self,
    flat: Mapping[str, Any],
    version: int,
    *,
    shapes: Mapping[str, pieces.Shape] | None = None,
    copy: bool = True,
  ) -> PublishStats:
    """Uploads `flat` (this host's part of it) as `version`.

    After an error nothing was published, unless the error was a lost answer,
    which the next call finds out: the same version again is then no error. A
    single host may call again, under a new incarnation that it takes.

    Args:
      flat: tensors, or pieces of them (`pieces.local`); of numpy, or of jax on
        one device each.
      version: newer than all before.
      shapes: whole shapes of the tensors that come in pieces.
      copy: false where the caller never writes to the arrays again.

    Raises:
      PublisherFenced: a newer publisher has taken over.
      ValueError: wrong version, another tree than before, a dtype or a name
        that cannot be published; nothing was written.
      OSError, TimeoutError: the store failed, or another host did not appear.
    """
    started = time.monotonic()
    if self._failed:
      landed = self._restart()
      if landed is not None and landed.version == version:
        return landed
    shapes = dict(shapes or {})
    tree = self._check(flat, version, shapes)
    self._failed = True  # until it has succeeded
    prefix = versions.prefix_of(self._form, version, self.fence)
    kind = self._kind(prefix)
    placed = self._on_devices(flat)
    # A base is always taken whole: whatever a device's kernel might have
    # missed ends there.
    changes = self._changes(placed) if kind == 'delta' else {}
    new = self._fetched(flat, changes, copy)
    part = self._upload(prefix, kind, tree, new, shapes, changes)
    if self._host == 0:
      parts = [part, *self._other_parts(prefix)]
      manifest = self._manifest(version, kind, parts)
      ref = versions.write_manifest(self._kv, manifest)
      stats = _stats(dataclasses.asdict(manifest), version, kind, started)
      self._unanswered = _Attempt(ref, stats, new, placed)
      store.move_head(self._kv, self._form, ref)
      self._previous = ref
    else:
      stats = _stats(part, version, kind, started)
    self._advance(stats, new, placed)
    return stats

  def _on_devices(self, flat: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arrays whose changes are to be found on their devices."""
    there = {n: a for n, a in flat.items() if not isinstance(a, np.ndarray)}
    if not there or self._on_device is False:
      return {}
    from composer.weights import on_device

    return {
      name: array
      for name, array in there.items()
      if self._on_device or on_device.has(array)
    }

  def _changes(self, placed: Mapping[str, Any]) -> delta.Changed:
    now = {name: a for name, a in placed.items() if name in self._placed}
    if not now:
      return {}
    from composer.weights import on_device

    return on_device.find(self._placed, now)

  def _fetched(
    self, flat: Mapping[str, Any], changes: delta.Changed, copy: bool
  ) -> Flat:
    """All of the new weights on the host."""
    new: Flat = {}
    if changes:
      assert self._held is not None
      held = {name: self._held[name] for name in changes}
      new = delta.patch(held, changes)
    for name in flat.keys() - changes.keys():
      array = flat[name]
      own = copy and isinstance(array, np.ndarray)
      new[name] = np.array(array) if own else np.asarray(array)
    return new

  def _start(self) -> None:
    key = f'weights/{self._form}/incarnations/{self._incarnation}'
    if self._host == 0:
      self.fence = store.claim_fence(self._kv, self._form)
      if self._hosts > 1:
        # Create-only: a second start under the same name is refused here.
        store.create(self._kv, {key: store.to_json({'fence': self.fence})})
    else:
      text = store.wait_for(
        self._kv,
        key,
        wait_s=self._wait_s,
        why=f'host {self._host} waits for host 0 to claim {self._form}',
      )
      self.fence = store.parse_json(text, key)['fence']
    self._previous = store.read_head(self._kv, self._form).ref
    if self._previous is not None:
      self.next_version = self._previous.version + 1

  def _restart(self) -> PublishStats | None:
    """After a failure: a new incarnation, unless another one has taken over.

    What HEAD names is still what this publisher holds, so that no base is
    needed. Returns what the failed publication did, if it landed after all.
    """
    if self._hosts > 1:
      raise RuntimeError(
        f'an earlier publication of {self._form} failed; with several hosts'
        ' restart all of them under a new incarnation'
      )
    head = store.read_head(self._kv, self._form)
    store.check_fence(head, self._form, self.fence)
    tried = self._unanswered
    if tried is not None and head.ref == tried.ref:
      self._previous = tried.ref
      self._advance(tried.stats, tried.new, tried.placed)
      return tried.stats
    before = self._previous
    self._start()
    if self._previous != before:
      self._held, self._placed = None, {}
    self._failed = False
    return None

  def _check(
    self,
    flat: Mapping[str, Any],
    version: int,
    shapes: Mapping[str, pieces.Shape],
  ) -> list[list[Any]]:
    """Everything that can be refused before the first write."""
    head = store.read_head(self._kv, self._form)
    store.check_fence(head, self._form, self.fence)
    if version < (self.next_version or 0):
      raise ValueError(
        f'version={version} of {self._form} cannot be published; the next one'
        f' is {self.next_version or 0} or more (versions are never used twice)'
      )
    tree = delta.describe({n: _outline(array) for n, array in flat.items()})
    parsed = [pieces.parse(name) for name in flat]
    if self._hosts == 1:
      pieces.check_tiling(shapes, flat)
    for name, _ in parsed:
      pieces.check_name(name)
    pieces.unflatten(dict.fromkeys(name for name, _ in parsed))
    if self._held is not None:
      delta.check_same_tree(delta.describe(self._held), tree)
    elif self._hosts == 1:
      self._check_model(pieces.whole_tree(tree, shapes))
    return tree

  def _check_model(self, whole: list[list[Any]]) -> None:
    """A first publication must be of the model that the exchange holds."""
    if self._previous is None:
      return
    try:
      held = versions.read_manifest(self._kv, self._form, self._previous)
    except BrokenWeights:
      return  # our base is what heals it
    if held.whole_digest != delta.tree_digest(whole):
      raise ValueError(
        f'the exchange holds {self._form} weights of another model (its'
        ' names, dtypes or shapes differ); use another exchange'
      )

  def _kind(self, prefix: str) -> str:
    """'base' or 'delta': by count and bytes; host 0 says it to the others."""
    if self._host > 0:
      key = f'{prefix}kind'
      text = store.wait_for(
        self._kv,
        key,
        wait_s=self._wait_s,
        why=f'host {self._host} waits for host 0 to begin',
      )
      return str(store.parse_json(text, key)['kind'])
    count = self._since_base + 1 >= self._base_every
    long = self._chain_bytes > self._chain_ratio * self._base_bytes
    kind = 'base' if self._held is None or count or long else 'delta'
    if self._hosts > 1:
      store.create(self._kv, {f'{prefix}kind': store.to_json({'kind': kind})})
    return kind

  def _upload(
    self,
    prefix: str,
    kind: str,
    tree: list[list[Any]],
    new: Flat,
    shapes: Mapping[str, pieces.Shape],
    changes: delta.Changed,
  ) -> dict[str, Any]:
    """Writes this host's content; what the manifest needs to know of it."""
    part: dict[str, Any] = {
      'tree': tree,
      'shapes': dict(shapes),
      'tensors': delta.tensor_digests(new),
      'blobs': [],
      'groups': _blob_names(new) if kind == 'base' else [],
      'full_bytes': sum(array.nbytes for array in new.values()),
      'words': sum(array.size for array in new.values()),
      'changed': -1,
    }
    if kind == 'base':
      if self._held is not None:
        part['changed'] = delta.count_changed(self._held, new)
      part['bytes'] = versions.write_base(
        self._kv, f'{prefix}base/', new, shapes
      )
    else:
      assert self._held is not None, 'host 0 has a base, so this host does'
      part['changed'] = 0
      for index, names in enumerate(_blob_names(new)):
        blob, changed = self._upload_delta(prefix, index, names, new, changes)
        part['blobs'].append(dataclasses.asdict(blob))
        part['changed'] += changed
      part['bytes'] = sum(blob['bytes'] for blob in part['blobs'])
    if self._hosts > 1:
      done = store.to_json({'format': store.FORMAT, **part})
      store.create(self._kv, {f'{prefix}{self._host}/done': done})
    return part

  def _upload_delta(
    self,
    prefix: str,
    index: int,
    names: Sequence[str],
    new: Flat,
    changes: delta.Changed,
  ) -> tuple[Blob, int]:
    assert self._held is not None
    data = delta.encode(
      {name: self._held[name] for name in names},
      {name: new[name] for name in names},
      changes={name: changes[name] for name in names if name in changes},
    )
    key = f'{self._host}/{index}'
    store.create(self._kv, {prefix + key: data})
    everything = self._hosts == 1 and len(names) == len(new)
    blob = Blob(
      key=key,
      bytes=len(data),
      digest=xxhash.xxh3_128_hexdigest(data),
      names=None if everything else tuple(names),
    )
    return blob, delta.inspect(data).changed

  def _other_parts(self, prefix: str) -> list[dict[str, Any]]:
    parts = []
    for host in range(1, self._hosts):
      key = f'{prefix}{host}/done'
      text = store.wait_for(
        self._kv,
        key,
        wait_s=self._wait_s,
        why=f'host 0 waits for the upload of host {host}',
      )
      parts.append(store.parse_json(text, key))
    return parts

  def _manifest(
    self, version: int, kind: str, parts: Sequence[Mapping[str, Any]]
  ) -> Manifest:
    tree = sorted(entry for part in parts for entry in part['tree'])
    names = [entry[0] for entry in tree]
    if len(set(names)) != len(names):
      raise ValueError('two hosts uploaded the same tensor; see `pieces.owned`')
    shapes = {n: tuple(s) for part in parts for n, s in part['shapes'].items()}
    whole = pieces.whole_tree(tree, shapes)
    if self._hosts > 1:
      pieces.check_tiling(shapes, names)
      if self._held is None:
        self._check_model(whole)
    tensors = {n: d for part in parts for n, d in part['tensors'].items()}
    changed = [part['changed'] for part in parts]
    size = sum(part['bytes'] for part in parts)
    base = kind == 'base'
    if base:
      prefix = versions.prefix_of(self._form, version, self.fence)
      folders = [name for name, _, _ in whole]
      size += versions.write_groups(self._kv, f'{prefix}base/', folders)
    return Manifest(
      form=self._form,
      version=version,
      fence=self.fence,
      kind=kind,
      previous=self._previous,
      tree=tuple((n, d, tuple(s)) for n, d, s in tree) if base else (),
      tensors=tensors if base else {},
      tree_digest=delta.tree_digest(tree),
      digest=delta.combine_digests(tree, tensors),
      blobs=tuple(Blob(**blob) for part in parts for blob in part['blobs']),
      bytes=size,
      full_bytes=sum(part['full_bytes'] for part in parts),
      changed=-1 if min(changed) < 0 else sum(changed),
      words=sum(part['words'] for part in parts),
      time=time.time(),
      model=self._model if base else None,
      shapes=shapes,
      whole_digest=delta.tree_digest(whole),
      groups=tuple(tuple(g) for part in parts for g in part['groups']),
    )

  def _advance(
    self, stats: PublishStats, new: Flat, placed: Mapping[str, Any]
  ) -> None:
    if stats.kind == 'base':
      self._since_base, self._chain_bytes = 0, 0
      self._base_bytes = stats.bytes
    else:
      self._since_base += 1
      self._chain_bytes += stats.bytes
    self._held, self._placed = new, placed
    self.next_version = stats.version + 1
    self._unanswered = None
    self._failed = False


@dataclasses.dataclass(frozen=True)
class _Attempt:
  """A publication that is complete but for HEAD's answer."""

  ref: Ref
  stats: PublishStats
  new: Flat
  placed: Mapping[str, Any]


def _outline(array: Any) -> Any:
  """An array on a device as one of numpy without contents, to look at."""
  if not hasattr(array, 'devices'):
    return array
  return np.broadcast_to(np.zeros((), array.dtype), array.shape)


def _stats(
  part: Mapping[str, Any], version: int, kind: str, started: float
) -> PublishStats:
  size, full, words = part['bytes'], part['full_bytes'], part['words']
  known = part['changed'] >= 0 and words
  return PublishStats(
    version=version,
    kind=kind,
    bytes=size,
    full_bytes=full,
    ratio=size / full if full else 1.0,
    changed_share=part['changed'] / words if known else 1.0,
    seconds=time.monotonic() - started,
  )


def _blob_names(flat: Flat) -> list[list[str]]:
  """Names in order, cut into runs of about `BLOB_BYTES`."""
  if not flat:
    return []
  runs: list[list[str]] = [[]]
  held = 0
  for name in sorted(flat):
    if runs[-1] and held + flat[name].nbytes > BLOB_BYTES:
      runs.append([])
      held = 0
    runs[-1].append(name)
    held += flat[name].nbytes
  return runs


class Subscriber:
  """Follows one form. Not thread-safe: one call at a time.

  Attributes:
    version: of the weights that the last successful `poll` returned, or None.
    model: fields of their model's configuration, where the publisher gave it.
    problems: what was found broken by the last `poll`, for the log; empty when
      all went well.
  """

  def __init__(
    self,
    kv: ts.KvStore,
    form: str,
    *,
    reader: tuple[str, str] | None = None,
    directory: str | os.PathLike[str] | None = None,
    wanted: Callable[[str], bool] | None = None,
  ):
    """Args:
    reader: (cluster, process); then it announces what it holds and needs.
    wanted: whether this process runs a piece (`pieces.parse` says which part
      of which tensor it is). Then only blobs with such pieces are read, and
      `poll` gives the pieces, as they were published. Not with a directory.
    directory: on this machine, where `save` keeps weights, so that after a
      restart only what changed since is fetched; of this form and process only.
    """
    if wanted is not None and directory is not None:
      raise ValueError(
        'a part of the weights (wanted) cannot be kept in a directory: it would'
        ' not show of what it is a part'
      )
    self._kv, self._form, self._wanted = kv, form, wanted
    self._held: Flat | None = None  # in the publisher's pieces
    self._shapes: Mapping[str, pieces.Shape] = {}
    self._ref: Ref | None = None
    self._given: Ref | None = None  # by the last poll that gave any
    self._saved: Ref | None = None
    self._directory = None if directory is None else pathlib.Path(directory)
    self._announcer = None
    if reader is not None:
      self._announcer = upkeep.Announcer(kv, *reader, form)
    self.model: Mapping[str, Any] | None = None
    self.problems: tuple[str, ...] = ()

  @property
  def version(self) -> int | None:
    return None if self._ref is None else self._ref.version

  def head(self) -> int | None:
    """The newest version that HEAD names; None before the first."""
    ref = store.read_head(self._kv, self._form).ref
    return None if ref is None else ref.version

  def poll(self) -> tuple[int, Flat] | None:
    """The newest weights, if they are newer than those held; else None.

    The arrays are read-only. Where the newest version is broken, the newest
    intact one after the held one is returned and `problems` says why.

    Raises:
      BrokenWeights: HEAD moved and nothing newer can be reconstructed; the
        version held does not move, and a later poll tries again.
      OSError, TimeoutError: the store failed; likewise.
    """
    problems: list[str] = []
    self.problems = ()
    ref = self._ahead()
    if ref is not None and self._ref is None and self._directory is not None:
      self._resume(ref, problems)
      ref = None if ref == self._ref else ref
    self._announce([] if ref is None else [ref.version], problems)
    self.problems = tuple(problems)
    if ref is None:
      return None if self._given == self._ref else self._give()
    broken: list[str] = []
    found = None
    for _ in range(ATTEMPTS):
      tried, broken = ref, []
      found = self._newest(ref, broken)
      # What HEAD led to may have been collected meanwhile, being too old.
      if found is not None or (ref := self._ahead() or tried) == tried:
        break
    self.problems = tuple(problems + broken)
    if found is None and self._given != self._ref:
      return self._give()  # what an earlier life kept is intact
    if found is None:
      raise BrokenWeights(
        f'HEAD names version {tried.version} of {self._form}, and nothing newer'
        f' than version {self.version} can be reconstructed: '
        + '; '.join(broken)
      )
    self._take(*found)
    self._announce([], problems)
    self.problems = tuple(problems + broken)
    return self._give()

  def save(self) -> bool:
    """Keeps the weights held in `directory`; false where that failed.

    A full disk costs the way back only: `problems` says so.
    """
    if self._directory is None or self._ref is None:
      return False
    if self._ref != self._saved:
      assert self._held is not None
      kept = local.Kept(self._form, self._ref, self._held, self._shapes)
      try:
        local.save(self._directory, kept)
      except OSError as error:
        self.problems = (
          *self.problems,
          f'version {self.version} could not be kept in {self._directory}'
          f' ({error}); a restart will fetch a full base',
        )
        return False
      self._saved = self._ref
    return True

  def fetch(self, version: int) -> Flat:
    """A pinned version, whatever is held (ValueError where it is gone)."""
    if version == self.version and self._held is not None:
      return self._seen(self._held, self._shapes)
    manifests = versions.chain(self._kv, self._form, version)
    names = self._names(manifests[0])
    flat = versions.rebuild(self._kv, manifests, names)
    return self._seen(flat, manifests[0].shapes)

  def close(self) -> None:
    """Withdraws what was announced."""
    if self._announcer is not None:
      self._announcer.withdraw()

  def _give(self) -> tuple[int, Flat]:
    assert self._ref is not None and self._held is not None
    self._given = self._ref
    return self._ref.version, self._seen(self._held, self._shapes)

  def _seen(self, held: Flat, shapes: Mapping[str, pieces.Shape]) -> Flat:
    """What the caller gets of the pieces held."""
    if self._wanted is None:
      return pieces.assemble(held, shapes)
    return {name: a for name, a in held.items() if self._wanted(name)}

  def _names(self, base: Manifest) -> frozenset[str] | None:
    return self._wanted and versions.names_for(base, self._wanted)

  def _take(self, ref: Ref, flat: Flat, steps: Sequence[Manifest]) -> None:
    self._ref, self._held = ref, flat
    for manifest in steps:
      self._shapes = manifest.shapes
      if manifest.model is not None:
        self.model = manifest.model

  def _announce(self, needed: Sequence[int], problems: list[str]) -> None:
    if self._announcer is None:
      return
    try:
      self._announcer.announce(self.version, needed)
    except OSError as error:
      problems.append(f'this reader could not announce itself: {error}')

  def _ahead(self) -> Ref | None:
    """What HEAD names, if that is news; None also for a stale read of it."""
    ref = store.read_head(self._kv, self._form).ref
    if ref is None or ref == self._ref:
      return None
    if self._ref is not None and ref.version <= self._ref.version:
      if ref.version == self._ref.version:
        raise BrokenWeights(
          f'HEAD names version {ref.version} of {self._form} again, with'
          ' another manifest; versions must never be used twice'
        )
      return None
    return ref

  def _resume(self, head: Ref, problems: list[str]) -> None:
    """Takes what an earlier life kept, if HEAD still leads to it.

    A base is read where the way from what was kept is longer than from there.
    """
    assert self._directory is not None
    try:
      kept = local.load(self._directory, self._form)
    except (BrokenWeights, OSError) as error:
      problems.append(str(error))
      return
    if kept is None:
      return
    try:
      for ref, manifest in versions.lineage(self._kv, self._form, head):
        if ref == kept.ref:
          self._ref, self._held, self._shapes = ref, kept.flat, kept.shapes
          self._saved = ref
          return
        if manifest.kind == 'base' or ref.version <= kept.ref.version:
          return
    except BrokenWeights:
      return  # the poll says it

  def _newest(
    self, head: Ref, problems: list[str]
  ) -> tuple[Ref, Flat, Sequence[Manifest]] | None:
    """The newest version after the held one that can be reconstructed.

    Walks back from HEAD. Deltas collect in `steps` until a place to start from
    appears: the weights held, or else a base.
    """
    steps: list[tuple[Ref, Manifest]] = []  # newest first
    try:
      for ref, manifest in versions.lineage(self._kv, self._form, head):
        if ref == self._ref:
          found = self._forward(self._held, steps, problems)
          if found is not None:
            return found
        steps.append((ref, manifest))
        if manifest.kind == 'base':
          found = self._forward(None, steps, problems)
          if found is not None and self._newer(found[0]):
            return found
          steps = []
          if not self._newer(ref):
            break
    except BrokenWeights as error:
      problems.append(str(error))
    return None

  def _forward(
    self,
    start: Flat | None,
    steps: Sequence[tuple[Ref, Manifest]],
    problems: list[str],
  ) -> tuple[Ref, Flat, Sequence[Manifest]] | None:
    """Applies `steps` (newest first), oldest first, as far as intact."""
    found, names = None, None
    ordered = list(reversed(steps))
    if self._wanted is not None and ordered:
      names = frozenset(start) if start else self._names(ordered[0][1])
    reads: list[Any] = []
    for index, (ref, manifest) in enumerate(ordered):
      self._read_ahead(ordered, index, reads, names)
      try:
        start = versions.load(self._kv, manifest, start, reads[index], names)
      except BrokenWeights as error:
        problems.append(f'version {ref.version}: {error}')
        break
      reads[index] = None  # or all blobs would stay in memory
      found = ref, start, [manifest for _, manifest in ordered[: index + 1]]
    return found

  def _read_ahead(
    self,
    ordered: Sequence[tuple[Ref, Manifest]],
    index: int,
    reads: list[Any],
    names: frozenset[str] | None,
  ) -> None:
    """Begins to read the blobs of the next versions while one is decoded."""
    ahead = sum(manifest.bytes for _, manifest in ordered[index : len(reads)])
    while len(reads) < len(ordered):
      manifest = ordered[len(reads)][1]
      ahead += manifest.bytes
      if len(reads) > index and ahead > AHEAD_BYTES:
        break
      reads.append(versions.start(self._kv, manifest, names))

  def _newer(self, ref: Ref) -> bool:
    return self._ref is None or ref.version > self._ref.version
