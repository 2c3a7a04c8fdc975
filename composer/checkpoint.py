"""Checkpoints: the train state, and everything else that resuming needs.

A directory of checkpoints belongs to one stage of one run:

    <directory>/<step>/          committed: the name appears by one rename
    <directory>/<step>.<n>/      saved again at the same step (a skipped step
                                 moves the ledger and not the state)
    <directory>/*-tmp*, *.deleting   left by a process that died; removed at
                                 the next save

Each holds two orbax items: `state` (the `TrainState`, sharded as it was) and
`extras` (JSON: iterator state, ledger, ... and the identity of the model). Both
are committed together or not at all, so a process killed at any moment leaves
the previous checkpoint as it was.

`save` takes the state to the host, returns, and writes in the background; its
`Saving` must be waited for before the next save and before the process ends. Every
process of a `jax.distributed` run calls `save` and `restore`; the first one
commits. orbax takes a third of a second to import, so it is imported where
it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import errno
import json
import os
import re
import shutil
import time
from typing import Any

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import records

FORMAT = 1
SWEEP_S = 10.0  # for writes of a save that failed to end
SWEEP_EVERY_S = 0.05
QUIET_SWEEPS = 6  # that find nothing, in turn, are taken for the end
_NAME = re.compile(r'^(\d+)(?:\.(\d+))?$')
_REMOTE = re.compile(r'^[a-z0-9]+://')


def identity(
  model: config_lib.ModelConfig, tokenizer_fingerprint: str
) -> dict[str, Any]:
  """Says which model a checkpoint belongs to; compared when it is read."""
  return {
    'model': dataclasses.asdict(model),
    'tokenizer': tokenizer_fingerprint,
  }


@dataclasses.dataclass
class Saving:
  """A save under way. `wait` returns the committed path, or raises."""

  path: str
  step: int
  keep: int
  _checkpointer: Any

  def wait(self) -> str:
    """Blocks until the checkpoint is committed, then drops the oldest ones.

    Raises:
      OSError: it could not be written (no space, no permission); what was
        written of it is removed and the checkpoints before it are intact.
      TimeoutError: the limit given to `save` has passed.
    """
    if self._checkpointer is None:
      return self.path
    checkpointer, self._checkpointer = self._checkpointer, None
    try:
      checkpointer.wait_until_finished()
    except Exception as error:
      raise _explained(error, self.path, self.step) from error
    finally:
      checkpointer.close()
    if jax.process_index() == 0:
      _prune(self.path, self.keep)
    return self.path


def save(
  directory: str,
  step: int,
  state: records.TrainState,
  extras: Mapping[str, Any],
  *,
  identity: Mapping[str, Any],
  keep: int = 2,
  timeout_s: float = 600.0,
) -> Saving:
  """Starts to write a checkpoint; it exists once the result's `wait` returns.

  Args:
    directory: where the stage's checkpoints lie; made if it is not there.
    step: optimizer steps done; names the checkpoint.
    state: arrays, typed PRNG keys included. It may be donated as soon as this
      returns (on CPU the host's copy is a view, and JAX leaves a buffer that
      is viewed alone: one copy, in the next step).
    extras: name -> JSON-able value: iterator state, ledger, counters.
    identity: from `identity()`.
    keep: committed checkpoints that stay, this one included.
    timeout_s: limit of the whole write.

  Raises:
    ValueError: `extras` is not JSON, or `keep` or `step` is out of range.
    OSError: there is no room for it; nothing has been written.
  """
  if keep < 1:
    raise ValueError(f'checkpoint.keep={keep}; keep at least 1')
  if step < 0:
    raise ValueError(f'a checkpoint at step {step}; steps count from 0')
  arrays, keys = _to_arrays(state)
  document = {
    'format': FORMAT,
    'step': step,
    'identity': dict(identity),
    'keys': keys,
    'arrays': _schema(arrays),
    'extras': dict(extras),
  }
  _require_json(document)
  path = _next_path(directory, step)
  if jax.process_index() == 0:
    _sweep(directory)
    _require_space(directory, step, arrays)
  return _start(path, step, arrays, document, keep, timeout_s)


def latest(directory: str) -> int | None:
  """Returns the step of the newest committed checkpoint, or None."""
  found = _committed(directory)
  return found[-1][0] if found else None


def restore(
  directory: str,
  abstract_state: records.TrainState,
  *,
  identity: Mapping[str, Any],
  step: int | None = None,
) -> tuple[records.TrainState, dict[str, Any]]:
  """Reads a checkpoint: (state, extras).

  Args:
    directory: as given to `save`.
    abstract_state: shapes and dtypes (`jax.eval_shape` of the init), with the
      shardings to restore to; one device where a leaf names none.
    identity: of the model that asks; refused unless equal.
    step: which; None is the newest.

  Raises:
    ValueError: there is none, it is of another model, or its arrays are not
      those of `abstract_state`.
  """
  path = _path_of(directory, step)
  document = _read_document(path)
  _require_identity(document['identity'], identity, path)
  wanted, keys = _to_arrays(abstract_state)
  _require_arrays(document, wanted, keys, path)
  arrays = _read_arrays(path, wanted, partial=False)
  state = _from_arrays(arrays, abstract_state, document['keys'])
  return state, document['extras']


def restore_params(
  directory: str,
  abstract_params: Any,
  *,
  identity: Mapping[str, Any],
  step: int | None = None,
) -> tuple[Any, int]:
  """Reads the parameters alone, and the step: what evaluation and serving need.

  Arguments and errors as those of `restore`.
  """
  path = _path_of(directory, step)
  document = _read_document(path)
  _require_identity(document['identity'], identity, path)
  wanted = _nest({'params': abstract_params})
  document['arrays'] = {
    name: shape
    for name, shape in document['arrays'].items()
    if name.startswith('params/')
  }
  _require_arrays(document, wanted, {}, path)
  arrays = _read_arrays(path, wanted, partial=True)
  restored = _from_arrays(arrays, {'params': abstract_params}, {})
  return restored['params'], document['step']


def abstract(state: Any) -> Any:
  """Shapes, dtypes and shardings of a state: what `restore` asks for."""
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=leaf.sharding
    ),
    state,
  )


# --- trees ------------------------------------------------------------------


def _part(entry: Any) -> str:
  for field in ('key', 'name', 'idx'):
    if hasattr(entry, field):
      return str(getattr(entry, field))
  raise ValueError(f'a checkpoint cannot name the tree entry {entry!r}')


def _names(tree: Any) -> list[tuple[tuple[str, ...], Any]]:
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return [(tuple(map(_part, path)), leaf) for path, leaf in leaves]


def _nest(tree: Any) -> dict[str, Any]:
  """Any pytree as nested dicts: no class of ours is needed to read it."""
  nested: dict[str, Any] = {}
  for path, leaf in _names(tree):
    node = nested
    for part in path[:-1]:
      node = node.setdefault(part, {})
    node[path[-1]] = leaf
  return nested


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _to_arrays(state: Any) -> tuple[dict[str, Any], dict[str, str]]:
  """Nested dicts in which PRNG keys are plain integers, and where keys were.

  Works on arrays and on abstract leaves; the second value is name -> dtype.
  """
  keys = {}
  leaves, treedef = jax.tree_util.tree_flatten(state)
  for i, (path, leaf) in enumerate(_names(state)):
    if not _is_key(leaf):
      continue
    keys['/'.join(path)] = str(leaf.dtype)
    if isinstance(leaf, jax.ShapeDtypeStruct):
      data = jax.eval_shape(jax.random.key_data, leaf)
      leaves[i] = jax.ShapeDtypeStruct(
        data.shape, data.dtype, sharding=leaf.sharding
      )
    else:
      leaves[i] = jax.random.key_data(leaf)
  return _nest(jax.tree_util.tree_unflatten(treedef, leaves)), keys


def _from_arrays(
  arrays: dict[str, Any], abstract: Any, keys: Mapping[str, str]
) -> Any:
  leaves = []
  for path, leaf in _names(abstract):
    node = arrays
    for part in path:
      node = node[part]
    if '/'.join(path) in keys:
      node = jax.random.wrap_key_data(node, impl=_key_impl(leaf.dtype))
    leaves.append(node)
  treedef = jax.tree_util.tree_structure(abstract)
  return jax.tree_util.tree_unflatten(treedef, leaves)


def _key_impl(dtype: Any) -> str:
  """The generator behind a key dtype, which prints as 'key<fry>'."""
  for name in ('threefry2x32', 'rbg', 'unsafe_rbg'):
    shape = jax.eval_shape(lambda name=name: jax.random.key(0, impl=name))
    if shape.dtype == dtype:
      return name
  raise ValueError(
    f'PRNG keys of dtype {dtype} cannot be restored; use threefry2x32, rbg or'
    ' unsafe_rbg'
  )


def _schema(arrays: dict[str, Any]) -> dict[str, list[Any]]:
  return {
    '/'.join(path): [list(leaf.shape), str(leaf.dtype)]
    for path, leaf in _names(arrays)
  }


# --- orbax ------------------------------------------------------------------


def _handler():
  import orbax.checkpoint as ocp

  return ocp.CompositeCheckpointHandler(
    state=ocp.PyTreeCheckpointHandler(),
    extras=ocp.JsonCheckpointHandler(),
  )


def _start(
  path: str,
  step: int,
  arrays: dict[str, Any],
  document: dict[str, Any],
  keep: int,
  timeout_s: float,
) -> Saving:
  import orbax.checkpoint as ocp

  checkpointer = ocp.AsyncCheckpointer(
    _handler(),
    async_options=ocp.options.AsyncOptions(timeout_secs=int(timeout_s)),
  )
  try:
    checkpointer.save(
      path,
      args=ocp.args.Composite(
        state=ocp.args.PyTreeSave(arrays),
        extras=ocp.args.JsonSave(document),
      ),
    )
  except Exception as error:
    checkpointer.close()
    raise _explained(error, path, step) from error
  return Saving(path, step, keep, checkpointer)


def _read_document(path: str) -> dict[str, Any]:
  import orbax.checkpoint as ocp

  with ocp.Checkpointer(_handler()) as checkpointer:
    try:
      document = checkpointer.restore(
        path, args=ocp.args.Composite(extras=ocp.args.JsonRestore())
      ).extras
    except (OSError, KeyError, ValueError) as error:
      raise ValueError(
        f'checkpoint {path} cannot be read ({error}); name another, or remove'
        ' it to fall back to the one before'
      ) from error
  if not document or document.get('format') != FORMAT:
    got = document.get('format') if document else None
    raise ValueError(
      f'checkpoint {path} has format {got}, this version reads {FORMAT}; write'
      ' it again with the version that made it'
    )
  return document


def _read_arrays(path: str, wanted: dict[str, Any], partial: bool) -> Any:
  import orbax.checkpoint as ocp

  device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
  targets = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=leaf.sharding or device
    ),
    wanted,
  )
  restore_args = ocp.checkpoint_utils.construct_restore_args(targets)
  with ocp.Checkpointer(_handler()) as checkpointer:
    return checkpointer.restore(
      path,
      args=ocp.args.Composite(
        state=ocp.args.PyTreeRestore(
          item=targets, restore_args=restore_args, partial_restore=partial
        )
      ),
    ).state


# --- refusals ---------------------------------------------------------------


def _require_json(document: dict[str, Any]) -> None:
  for name, value in document['extras'].items():
    try:
      text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
      raise ValueError(
        f'checkpoint extras[{name!r}] is not JSON ({error}); give it plain'
        ' numbers, strings, lists and dicts'
      ) from error
    if json.loads(text) != _listed(value):
      raise ValueError(
        f'checkpoint extras[{name!r}] would not come back from JSON as it is;'
        ' use strings as dict keys'
      )


def _listed(value: Any) -> Any:
  """`value` with tuples as lists, as JSON gives them back."""
  if isinstance(value, Mapping):
    return {key: _listed(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_listed(item) for item in value]
  return value


def _flat(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  flat = {}
  for key, value in tree.items():
    name = f'{prefix}.{key}' if prefix else key
    if isinstance(value, Mapping):
      flat.update(_flat(value, name))
    else:
      flat[name] = value
  return flat


def _require_identity(
  got: Mapping[str, Any], expected: Mapping[str, Any], path: str
) -> None:
  got, expected = _flat(got), _flat(expected)
  # A field that is younger than the checkpoint has the default, which is what
  # was computed (`config.model_from_values`).
  model = dataclasses.asdict(config_lib.ModelConfig())
  for name, value in _flat({'model': model}).items():
    if name in expected:
      got.setdefault(name, value)
  absent = '(absent)'
  differing = [
    f'{name}: got {got.get(name, absent)!r},'
    f' expected {expected.get(name, absent)!r}'
    for name in sorted(got.keys() | expected.keys())
    if got.get(name, absent) != expected.get(name, absent)
  ]
  if differing:
    raise ValueError(
      f'checkpoint {path} is of another model: {"; ".join(differing)}. Use the'
      ' experiment that wrote it, or start in another workdir'
    )


def _require_arrays(
  document: dict[str, Any],
  wanted: dict[str, Any],
  keys: Mapping[str, str],
  path: str,
) -> None:
  got, expected = dict(document['arrays']), _schema(wanted)
  for name, dtype in document['keys'].items():
    if name in got:
      got[name] = [got[name][0], dtype]
  for name, dtype in keys.items():
    expected[name] = [expected[name][0], dtype]
  absent = '(absent)'
  differing = [
    f'{name}: got {got.get(name, absent)}, expected'
    f' {expected.get(name, absent)}'
    for name in sorted(
      got.keys() | expected.keys(),
      key=lambda name: (not name.startswith('params/'), name),
    )
    if got.get(name) != expected.get(name)
  ]
  if differing:
    more = f' and {len(differing) - 4} more' if len(differing) > 4 else ''
    raise ValueError(
      f'checkpoint {path} holds other arrays: {"; ".join(differing[:4])}{more}.'
      ' Restore with the model and optimizer that wrote it'
    )


def _require_space(directory: str, step: int, arrays: Any) -> None:
  if _REMOTE.match(directory):
    return
  need = sum(
    shard.data.nbytes
    for leaf in jax.tree.leaves(arrays)
    if isinstance(leaf, jax.Array)
    for shard in leaf.addressable_shards
    if shard.replica_id == 0
  )
  free = shutil.disk_usage(directory).free
  if free < need:
    raise _no_space(os.path.join(directory, str(step)), step, need)


def _no_space(path: str, step: int, need: int | None = None) -> OSError:
  directory = os.path.dirname(path)
  before = latest(directory)
  kept = (
    'there is none before it'
    if before is None
    else f'that of step {before} is intact'
  )
  size = '' if need is None else f' (it takes up to {need / 1e6:.1f} MB)'
  return OSError(
    errno.ENOSPC,
    f'no space left for the checkpoint of step {step}{size}; {kept}. Free'
    ' space and continue with --resume',
    path,
  )


def _explained(error: Exception, path: str, step: int) -> Exception:
  """What went wrong with a save, in words; removes what was written of it."""
  if jax.process_index() == 0:
    _sweep_until_quiet(os.path.dirname(path))
  if isinstance(error, TimeoutError):
    return TimeoutError(
      f'the checkpoint of step {step} at {path} was not written in time'
      f' ({error}); the storage is slow or another process is gone'
    )
  text = str(error)
  full = ('No space left', 'RESOURCE_EXHAUSTED', 'quota exceeded')
  if any(sign in text for sign in full) or (
    isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
  ):
    return _no_space(path, step)
  code = error.errno if isinstance(error, OSError) else None
  return OSError(
    code or errno.EIO,
    f'the checkpoint of step {step} could not be written ({text}); those'
    ' before it are intact',
    path,
  )


# --- the directory ----------------------------------------------------------


def _epath(path: str) -> Any:
  from etils import epath

  return epath.Path(path)


def _committed(directory: str) -> list[tuple[int, int, str]]:
  """(step, n, path) of every committed checkpoint, oldest first."""
  root = _epath(directory)
  if not root.exists():
    return []
  found = []
  for path in root.iterdir():
    match = _NAME.match(path.name)
    # An object store has no rename: there the marker commits.
    if match and (
      not _REMOTE.match(directory) or (path / 'commit_success.txt').exists()
    ):
      found.append((int(match[1]), int(match[2] or 0), str(path)))
  return sorted(found)


def _path_of(directory: str, step: int | None) -> str:
  if not _REMOTE.match(directory):
    directory = os.path.abspath(directory)  # orbax reads no other
  found = _committed(directory)
  if step is not None:
    found = [entry for entry in found if entry[0] == step]
  if not found:
    have = sorted({entry[0] for entry in _committed(directory)})
    which = 'a checkpoint' if step is None else f'a checkpoint of step {step}'
    there = f'those of steps {have}' if have else 'none at all'
    raise ValueError(
      f'{directory} does not hold {which}; it has {there}. Give the directory'
      ' that a run saved to'
    )
  return found[-1][2]


def _next_path(directory: str, step: int) -> str:
  serials = [n for other, n, _ in _committed(directory) if other == step]
  name = f'{step}.{max(serials) + 1}' if serials else str(step)
  if not _REMOTE.match(directory):
    directory = os.path.abspath(directory)
  return os.path.join(directory, name)


def _sweep(directory: str) -> bool:
  """Makes the directory, and removes what dead processes left in it, if so."""
  root, found = _epath(directory), False
  root.mkdir(parents=True, exist_ok=True)
  for path in root.iterdir():
    if path.name.endswith('.deleting') or '.orbax-checkpoint-tmp' in path.name:
      path.rmtree(missing_ok=True)
      found = True
  return found


def _sweep_until_quiet(directory: str) -> None:
  """The first array that fails ends a save; writes of the others go on for a
  moment, and make their folders anew. What comes later the next save removes."""
  until, quiet = time.monotonic() + SWEEP_S, 0
  while quiet < QUIET_SWEEPS and time.monotonic() < until:
    try:
      quiet = 0 if _sweep(directory) else quiet + 1
    except OSError:  # written into while it was removed
      quiet = 0
    time.sleep(SWEEP_EVERY_S)


def _prune(path: str, keep: int) -> None:
  directory = os.path.dirname(path)
  for _, _, old in _committed(directory)[:-keep]:
    # By a rename first: half a checkpoint must not look like a whole one.
    doomed = _epath(old).rename(old + '.deleting')
    doomed.rmtree(missing_ok=True)
