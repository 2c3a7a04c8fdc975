"""Segments and groups as bytes, for the exchange. Pure, and nothing pickled.

A segment is one zstd frame (with a checksum) around one safetensors file: the
arrays of `records.Segment`, and its two scalars as JSON in the metadata. Routes
are the bulk of it. A group is a JSON manifest that names its segments with the
digest of each; floats travel as the shortest decimal that reads back equal.
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import json
import math
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
import xxhash
import zstandard

from composer.records import Group
from composer.records import Segment
from composer.records import Trajectory
from composer.records import Turn

FORMAT = 1
MANIFEST = 'manifest'
ZSTD_LEVEL = 3

# Every array of a segment: name -> (dtype, dimensions).
ARRAYS: dict[str, tuple[str, int]] = {
  'tokens': ('int32', 1),
  'sampled': ('bool', 1),
  'logprobs': ('float32', 1),
  'temperatures': ('float32', 1),
  'versions': ('int32', 1),
  'experts': ('int16', 3),
  'auditable': ('bool', 1),
}
# These too, where some token's distribution was cut.
KEPT = {'kept_ids': ('int32', 1), 'kept_offsets': ('int32', 1)}


def encode_segment(segment: Segment) -> bytes:
  """The segment as bytes; equal segments give equal bytes.

  Raises:
    ValueError: an array is not of the dtype or rank that `records.Segment`
      declares (nothing is cast silently).
  """
  arrays = {}
  wanted = ARRAYS if segment.kept_ids is None else ARRAYS | KEPT
  for name, (dtype, rank) in wanted.items():
    array = np.asarray(getattr(segment, name))
    if array.dtype != dtype or array.ndim != rank:
      raise ValueError(
        f'Segment.{name} is {array.dtype} of {array.ndim} dimensions; it must'
        f' be {dtype} of {rank}'
      )
    arrays[name] = np.ascontiguousarray(array)
  about = {'stop_reason': segment.stop_reason, 'parent': segment.parent}
  # One metadata entry only: safetensors writes several in a random order.
  raw = safetensors.numpy.save(arrays, {'segment': json.dumps(about)})
  compressor = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True)
  return compressor.compress(raw)


def decode_segment(blob: bytes) -> Segment:
  """Reads what `encode_segment` wrote, bit for bit.

  Raises:
    ValueError: truncated, damaged, followed by something, or no segment.
  """
  frame = zstandard.ZstdDecompressor().decompressobj()
  try:
    raw = frame.decompress(blob)
  except (zstandard.ZstdError, MemoryError) as error:
    raise ValueError(f'the segment is damaged: {error}') from error
  if not frame.eof or frame.unused_data:
    raise ValueError(
      f'the segment of {len(blob)} bytes is truncated, or something follows it'
    )
  try:
    arrays = safetensors.numpy.load(raw)
    about = json.loads(_metadata(raw)['segment'])
    stop_reason, parent = about['stop_reason'], about['parent']
  except (safetensors.SafetensorError, KeyError, ValueError) as error:
    raise ValueError(f'the segment cannot be read: {error!r}') from error
  described = {k: (v.dtype.name, v.ndim) for k, v in arrays.items()}
  if described not in (ARRAYS, ARRAYS | KEPT):
    raise ValueError(f'the segment holds {described}; expected {ARRAYS}')
  return Segment(**arrays, stop_reason=stop_reason, parent=parent)


def _metadata(raw: bytes) -> Mapping[str, str]:
  """safetensors: 8 bytes of length, then JSON with `__metadata__`."""
  length = int.from_bytes(raw[:8], 'little')
  return json.loads(raw[8 : 8 + length])['__metadata__']


def to_objects(group: Group) -> dict[str, bytes]:
  """A group as named objects: its segments, and the manifest as the last.

  Raises:
    ValueError: something in it is not JSON (provenance), or is not finite.
  """
  objects: dict[str, bytes] = {}
  trajectories = []
  for i, trajectory in enumerate(group.trajectories):
    segments = []
    for j, segment in enumerate(trajectory.segments):
      blob = encode_segment(segment)
      objects[f'{i}-{j}'] = blob
      segments.append([f'{i}-{j}', xxhash.xxh3_128_hexdigest(blob)])
    fields = _shallow(trajectory)
    for name in ('reward_parts', 'provenance', 'timings'):
      fields[name] = dict(fields[name])
    fields['turns'] = [
      list(_shallow(turn).values()) for turn in fields['turns']
    ]
    trajectories.append(fields | {'segments': segments})
  manifest = _shallow(group) | {'trajectories': trajectories, 'format': FORMAT}
  objects[MANIFEST] = _dump(manifest, group.group_id)
  return objects


def from_objects(objects: Mapping[str, bytes]) -> Group:
  """The group of `to_objects`.

  Raises:
    ValueError: an object is missing, damaged or of a newer format.
  """
  manifest = read_manifest(objects[MANIFEST])
  try:
    trajectories = tuple(
      _trajectory(fields, objects) for fields in manifest.pop('trajectories')
    )
    del manifest['format']
    return Group(**manifest, trajectories=trajectories)
  except (KeyError, TypeError) as error:
    raise ValueError(f'the group cannot be read: {error!r}') from error


def read_manifest(blob: bytes) -> dict[str, Any]:
  """The manifest's fields; ValueError where damaged or too new."""
  try:
    manifest = json.loads(blob)
    version = manifest['format']
  except (ValueError, KeyError, TypeError) as error:
    raise ValueError(f'the manifest is damaged: {error!r}') from error
  if version > FORMAT:
    raise ValueError(
      f'the group has format {version}, this program reads up to {FORMAT};'
      ' update it'
    )
  return manifest


def segment_names(manifest: Mapping[str, Any]) -> list[str]:
  """Names of the objects that the manifest's group consists of."""
  return [
    name
    for fields in manifest['trajectories']
    for name, _ in fields['segments']
  ]


def _trajectory(
  fields: Mapping[str, Any], objects: Mapping[str, bytes]
) -> Trajectory:
  segments = []
  for name, digest in fields['segments']:
    if xxhash.xxh3_128_hexdigest(objects[name]) != digest:
      raise ValueError(f'segment {name} of the group is damaged: wrong digest')
    segments.append(decode_segment(objects[name]))
  turns = tuple(Turn(*turn) for turn in fields['turns'])
  return Trajectory(**{**fields, 'segments': tuple(segments), 'turns': turns})


def _shallow(record: Any) -> dict[str, Any]:
  """Field -> value, without copying what is inside."""
  return {
    field.name: getattr(record, field.name)
    for field in dataclasses.fields(record)
  }


def _dump(manifest: Mapping[str, Any], group_id: str) -> bytes:
  for fields in manifest['trajectories']:
    if not math.isfinite(fields['reward']):
      raise ValueError(
        f'the reward of rollout {fields["index"]} of group {group_id} is'
        f' {fields["reward"]}; leave a rollout without a reward out of its'
        ' group'
      )
  try:
    return json.dumps(manifest, allow_nan=False).encode()
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'group {group_id} does not fit into JSON: {error}; provenance and'
      ' timings hold plain, finite values only'
    ) from error
