"""Names of tensors and of pieces of them, and who uploads which.

A tensor that lies over several hosts is published in pieces, each by the host
that has it, and readers put them together. A piece is named after its tensor
and its box: `layers/q@0:4,8:16` are rows 0 to 3 and columns 8 to 15 of
`layers/q`. To the codec, and to everything that digests, a piece is a tensor
like any other; only bases (chunks of one array) and what readers return know
that pieces belong together. All pieces of a tensor have one shape, and tile it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
import math
from typing import Any

import numpy as np

Box = tuple[tuple[int, int], ...]
Shape = tuple[int, ...]


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


def check_name(name: str) -> None:
  """Refuses a tensor's name that cannot be a path of the exchange."""
  parts = name.split('/')
  if '@' in name or any(part in ('', '.', '..', 'zarr.json') for part in parts):
    raise ValueError(
      f'parameter name {name!r} cannot be a path of the exchange; use names'
      " without @ joined by single slashes, as in 'layers/attention/q'"
    )


def piece_name(name: str, box: Box, shape: Shape) -> str:
  """The tensor's own name where the box is all of it."""
  if all(span == (0, size) for span, size in zip(box, shape, strict=True)):
    return name
  return f'{name}@{",".join(f"{a}:{b}" for a, b in box)}'


def parse(piece: str) -> tuple[str, Box | None]:
  """(tensor, box or None for all of it); ValueError for what is neither."""
  name, separator, text = piece.partition('@')
  if not separator:
    return name, None
  try:
    box = tuple(
      (int(a), int(b)) for a, b in (span.split(':') for span in text.split(','))
    )
  except ValueError as error:
    raise ValueError(f'{piece!r} is not the name of a piece') from error
  if any(not 0 <= a <= b for a, b in box):
    raise ValueError(f'{piece!r} is not the name of a piece')
  return name, box


def check_tiling(shapes: Mapping[str, Shape], names: Iterable[str]) -> None:
  """Refuses pieces that leave gaps, overlap, differ in shape, or lack a whole.

  Args:
    shapes: of every tensor that is cut.
    names: of all pieces and whole tensors, of all hosts.
  """
  cut: dict[str, list[Box]] = {}
  for piece in names:
    name, box = parse(piece)
    check_name(name)
    if box is not None:
      cut.setdefault(name, []).append(box)
    elif name in shapes:
      raise ValueError(f'{name!r} is published in pieces and as a whole')
  for name, boxes in cut.items():
    shape = shapes.get(name)
    if shape is None:
      raise ValueError(f'pieces of {name!r}, whose shape is not given')
    sizes = {tuple(b - a for a, b in box) for box in boxes}
    size = next(iter(sizes))
    regular = len(sizes) == 1 and len(size) == len(shape) and min(size) > 0
    if not regular or not all(
      a % n == 0 and b <= whole
      for box in boxes
      for (a, b), n, whole in zip(box, size, shape, strict=True)
    ):
      raise ValueError(
        f'the pieces of {name!r} {list(shape)} are not parts of one size:'
        f' {sorted(boxes)[:4]}; shard it evenly'
      )
    needed = math.prod(shape) // math.prod(size)
    if len(set(boxes)) != len(boxes) or len(boxes) != needed:
      raise ValueError(
        f'{len(boxes)} pieces of {name!r} {list(shape)} of {list(size)} do not'
        f' make it whole, {needed} do; every host must upload what it owns'
      )


def whole_tree(
  tree: Iterable[Iterable[Any]], shapes: Mapping[str, Shape]
) -> list[list[Any]]:
  """[[name, dtype, shape], ...] of tensors, from the same of pieces."""
  found = {}
  for piece, dtype, shape in tree:
    name = parse(piece)[0]
    found[name] = [name, dtype, list(shapes.get(name, shape))]
  return [found[name] for name in sorted(found)]


def assemble(
  flat: Mapping[str, np.ndarray], shapes: Mapping[str, Shape]
) -> dict[str, np.ndarray]:
  """Whole tensors, read-only; those that were whole are not copied."""
  out: dict[str, np.ndarray] = {}
  for piece, array in flat.items():
    name, box = parse(piece)
    if box is None:
      out[name] = array
      continue
    if name not in out:
      out[name] = np.empty(shapes[name], array.dtype)
    out[name][tuple(slice(a, b) for a, b in box)] = array
  for name in shapes:
    out[name].flags.writeable = False
  return out


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


def local(
  arrays: Mapping[str, Any], host: int, hosts: int
) -> tuple[dict[str, Any], dict[str, Shape]]:
  """What this host uploads of jax arrays that lie over all hosts.

  Of a sharded array the parts on this host's devices that no other device has
  a claim to (the first replica), of one that every host has whole its share
  (`owned`). Nothing is gathered or copied.

  Returns:
    ({piece: array on a device}, {tensor that is cut: its shape})
  """
  replicated = {n: a.nbytes for n, a in arrays.items() if _everywhere(a)}
  mine = set(owned(replicated, host, hosts))
  out, shapes = {}, {}
  for name, array in arrays.items():
    if name in replicated:
      if name in mine:
        out[name] = array.addressable_data(0)
      continue
    for shard in array.addressable_shards:
      box = tuple(
        at.indices(size)[:2]
        for at, size in zip(shard.index, array.shape, strict=True)
      )
      piece = piece_name(name, box, array.shape)
      if piece != name:
        shapes[name] = tuple(array.shape)
      if shard.replica_id == 0:
        out[piece] = shard.data
  return out, shapes


def _everywhere(array: Any) -> bool:
  return array.sharding.is_fully_replicated
