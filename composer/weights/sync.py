"""Publisher and subscriber: weights from one trainer to any number of readers.

A publisher claims the next incarnation (the fence) when it starts, so that all
keys it writes are its own and an older one can no longer move HEAD. Its first
version is a full base at HEAD's version + 1; deltas follow, and bases recur.
The order of writes makes a version appear at once or not at all: content, then
manifest, then HEAD.

A subscriber holds the weights of one version and moves to the newest one that
it can reconstruct bit for bit: forward over deltas, else from the newest base.
It moves only after every digest has been checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import time
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from composer.weights import delta
from composer.weights import store
from composer.weights import versions
from composer.weights.store import BrokenWeights
from composer.weights.store import Ref
from composer.weights.versions import Blob
from composer.weights.versions import Manifest

Flat = dict[str, np.ndarray]

BLOB_BYTES = 256 << 20  # of weights that one delta blob covers
# A chain whose deltas have grown to this many times the base ends in a new one.
CHAIN_RATIO = 8.0


def flatten(tree: Mapping[str, Any]) -> dict[str, Any]:
  """{'a': {'b': x}} as {'a/b': x}."""
  flat: dict[str, Any] = {}
  for name, value in tree.items():
    if not isinstance(name, str) or not name or '/' in name:
      raise ValueError(
        f'parameter name {name!r} must be a non-empty string without a slash'
      )
    if isinstance(value, Mapping):
      flat |= {f'{name}/{rest}': leaf for rest, leaf in flatten(value).items()}
    else:
      flat[name] = value
  return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
  """{'a/b': x} as {'a': {'b': x}}."""
  tree: dict[str, Any] = {}
  for name, value in flat.items():
    *folders, last = name.split('/')
    node = tree
    for folder in folders:
      node = node.setdefault(folder, {})
      if not isinstance(node, dict):
        raise ValueError(f'{name!r} lies below {folder!r}, which is an array')
    if last in node:
      raise ValueError(f'{name!r} is both an array and a folder of arrays')
    node[last] = value
  return tree


def owned(sizes: Mapping[str, int], host: int, hosts: int) -> tuple[str, ...]:
  """Names that `host` uploads when all hosts hold everything.

  The largest first, each to the host with the fewest bytes so far: the same
  answer on every host.
  """
  loads = [0] * hosts
  mine = []
  for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
    target = loads.index(min(loads))
    loads[target] += sizes[name]
    if target == host:
      mine.append(name)
  return tuple(sorted(mine))


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
    next_version: the number that the next publication must have; HEAD's + 1
      when the publisher starts, None where nothing was ever published (then
      any number from 0 is right).
  """

  def __init__(
    self,
    kv: ts.KvStore,
    form: str,
    base_every: int,
    *,
    host: int = 0,
    hosts: int = 1,
    incarnation: str = '',
    wait_s: float = store.WAIT_S,
  ):
    """Claims the form (host 0) or waits for host 0 to have done so.

    Args:
      base_every: a version in so many is a full base, at least 1.
      host, hosts: which of how many uploading processes this is.
      incarnation: a name that all hosts of this start share and no other start
        ever had; needed when there are several.
      wait_s: limit on every wait for other hosts.
    """
    if base_every < 1:
      raise ValueError(f'base_every={base_every} must be at least 1')
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
    self._host, self._hosts, self._wait_s = host, hosts, wait_s
    self._incarnation = incarnation
    self._held: Flat | None = None  # a private copy of what was published last
    self._previous: Ref | None = None
    self._since_base = 0
    self._chain_bytes = 0
    self._base_bytes = 0
    self._failed = False
    self.fence = 0
    self.next_version: int | None = None
    self._start()

  def publish(
    self, flat: Mapping[str, np.ndarray], version: int
  ) -> PublishStats:
    """Uploads `flat` (this host's part of it) as `version`.

    After an error nothing was published, unless the error was a lost answer;
    a single host may then call again: it takes a new incarnation first.

    Raises:
      PublisherFenced: a newer publisher has taken over.
      ValueError: wrong version, another tree than before, a dtype or a name
        that cannot be published; nothing was written.
      OSError, TimeoutError: the store failed, or another host did not appear.
    """
    started = time.monotonic()
    if self._failed:
      self._restart()
    tree = self._check(flat, version)
    new: Flat = {name: np.array(array) for name, array in flat.items()}
    self._failed = True  # until it has succeeded
    kind = self._kind()
    prefix = versions.prefix_of(self._form, version, self.fence)
    part = self._upload(prefix, kind, tree, new)
    if self._host == 0:
      parts = [part, *self._other_parts(prefix)]
      manifest = self._manifest(version, kind, parts)
      ref = versions.write_manifest(self._kv, manifest)
      store.move_head(self._kv, self._form, ref)
      size, full = manifest.bytes, manifest.full_bytes
      changed, words = manifest.changed, manifest.words
      self._previous = ref
    else:
      size, full = part['bytes'], part['full_bytes']
      changed, words = part['changed'], part['words']
    self._advance(version, kind, size, new)
    return PublishStats(
      version=version,
      kind=kind,
      bytes=size,
      full_bytes=full,
      ratio=size / full if full else 1.0,
      changed_share=changed / words if changed >= 0 and words else 1.0,
      seconds=time.monotonic() - started,
    )

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

  def _restart(self) -> None:
    """After a failure: a new incarnation, unless another one has taken over."""
    if self._hosts > 1:
      raise RuntimeError(
        f'an earlier publication of {self._form} failed; with several hosts'
        ' restart all of them under a new incarnation'
      )
    head = store.read_head(self._kv, self._form)
    store.check_fence(head, self._form, self.fence)
    self._held = None
    self._start()
    self._failed = False

  def _check(
    self, flat: Mapping[str, np.ndarray], version: int
  ) -> list[list[Any]]:
    """Everything that can be refused before the first write."""
    head = store.read_head(self._kv, self._form)
    store.check_fence(head, self._form, self.fence)
    if version < 0 or self.next_version not in (None, version):
      raise ValueError(
        f'version={version} of {self._form} cannot be published; the next one'
        f' is {self.next_version if self.next_version is not None else 0}'
        ' (versions are never used twice and never skipped)'
      )
    tree = delta.describe(flat)
    for name in flat:
      versions.check_name(name)
    unflatten(flat)
    if self._held is not None:
      delta.check_same_tree(delta.describe(self._held), tree)
    elif self._hosts == 1:
      self._check_model(tree)
    return tree

  def _check_model(self, tree: list[list[Any]]) -> None:
    """A first publication must be of the model that the exchange holds."""
    if self._previous is None:
      return
    try:
      held = versions.read_manifest(self._kv, self._form, self._previous)
    except BrokenWeights:
      return  # our base is what heals it
    if held.tree_digest != delta.tree_digest(tree):
      raise ValueError(
        f'the exchange holds {self._form} weights of another model (its'
        ' names, dtypes or shapes differ); use another exchange'
      )

  def _kind(self) -> str:
    if self._held is None or self._since_base + 1 >= self._base_every:
      return 'base'
    # Known to one host only, so several decide by count alone.
    long = self._chain_bytes > CHAIN_RATIO * self._base_bytes
    return 'base' if self._hosts == 1 and long else 'delta'

  def _upload(
    self, prefix: str, kind: str, tree: list[list[Any]], new: Flat
  ) -> dict[str, Any]:
    """Writes this host's content; what the manifest needs to know of it."""
    tensors = delta.tensor_digests(new)
    part: dict[str, Any] = {
      'tree': tree,
      'tensors': tensors,
      'blobs': [],
      'full_bytes': sum(array.nbytes for array in new.values()),
      'words': sum(array.size for array in new.values()),
      'changed': -1,
    }
    if kind == 'base':
      if self._held is not None:
        part['changed'] = delta.count_changed(self._held, new)
      part['bytes'] = versions.write_base(self._kv, f'{prefix}base/', new)
    else:
      assert self._held is not None
      part['changed'] = 0
      for index, names in enumerate(_blob_names(new)):
        blob, changed = self._upload_delta(prefix, index, names, new)
        part['blobs'].append(dataclasses.asdict(blob))
        part['changed'] += changed
      part['bytes'] = sum(blob['bytes'] for blob in part['blobs'])
    if self._hosts > 1:
      done = store.to_json({'format': store.FORMAT, 'kind': kind, **part})
      store.create(self._kv, {f'{prefix}{self._host}/done': done})
    return part

  def _upload_delta(
    self, prefix: str, index: int, names: Sequence[str], new: Flat
  ) -> tuple[Blob, int]:
    assert self._held is not None
    data = delta.encode(
      {name: self._held[name] for name in names},
      {name: new[name] for name in names},
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
    for host, part in enumerate(parts):
      if part.get('kind', kind) != kind:
        raise ValueError(
          f'host {host} uploaded a {part["kind"]} where host 0 did a {kind};'
          ' give all hosts the same base_every'
        )
    tree = sorted(entry for part in parts for entry in part['tree'])
    names = [entry[0] for entry in tree]
    if len(set(names)) != len(names):
      raise ValueError('two hosts uploaded the same tensor; see `owned`')
    tensors = {n: d for part in parts for n, d in part['tensors'].items()}
    changed = [part['changed'] for part in parts]
    size = sum(part['bytes'] for part in parts)
    if kind == 'base':
      prefix = versions.prefix_of(self._form, version, self.fence)
      size += versions.write_groups(self._kv, f'{prefix}base/', names)
    return Manifest(
      form=self._form,
      version=version,
      fence=self.fence,
      kind=kind,
      previous=self._previous,
      tree=tuple((n, d, tuple(s)) for n, d, s in tree)
      if kind == 'base'
      else (),
      tensors=tensors if kind == 'base' else {},
      tree_digest=delta.tree_digest(tree),
      digest=delta.combine_digests(tree, tensors),
      blobs=tuple(Blob(**blob) for part in parts for blob in part['blobs']),
      bytes=size,
      full_bytes=sum(part['full_bytes'] for part in parts),
      changed=-1 if min(changed) < 0 else sum(changed),
      words=sum(part['words'] for part in parts),
      time=time.time(),
    )

  def _advance(self, version: int, kind: str, size: int, new: Flat) -> None:
    if kind == 'base':
      self._since_base, self._chain_bytes, self._base_bytes = 0, 0, size
    else:
      self._since_base += 1
      self._chain_bytes += size
    self._held = new
    self.next_version = version + 1
    self._failed = False


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
    problems: what was found broken by the last `poll`, for the log; empty when
      all went well.
  """

  def __init__(self, kv: ts.KvStore, form: str):
    self._kv, self._form = kv, form
    self._held: Flat | None = None
    self._ref: Ref | None = None
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
    self.problems = ()
    ref = store.read_head(self._kv, self._form).ref
    if ref is None or ref == self._ref:
      return None
    if self._ref is not None and ref.version <= self._ref.version:
      if ref.version == self._ref.version:
        raise BrokenWeights(
          f'HEAD names version {ref.version} of {self._form} again, with'
          ' another manifest; versions must never be used twice'
        )
      return None  # a stale read of HEAD
    problems: list[str] = []
    found = self._newest(ref, problems)
    self.problems = tuple(problems)
    if found is None:
      raise BrokenWeights(
        f'HEAD names version {ref.version} of {self._form}, and nothing newer'
        f' than version {self.version} can be reconstructed: '
        + '; '.join(problems)
      )
    self._ref, self._held = found
    return self._ref.version, dict(self._held)

  def fetch(self, version: int) -> Flat:
    """A pinned version, whatever is held (ValueError where it is gone)."""
    if version == self.version and self._held is not None:
      return dict(self._held)
    return versions.fetch(self._kv, self._form, version)[1]

  def _newest(self, head: Ref, problems: list[str]) -> tuple[Ref, Flat] | None:
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
  ) -> tuple[Ref, Flat] | None:
    """Applies `steps` (newest first), oldest first, as far as intact."""
    found = None
    for ref, manifest in reversed(steps):
      try:
        start = versions.load(self._kv, manifest, start)
      except BrokenWeights as error:
        problems.append(f'version {ref.version}: {error}')
        break
      found = ref, start
    return found

  def _newer(self, ref: Ref) -> bool:
    return self._ref is None or ref.version > self._ref.version
