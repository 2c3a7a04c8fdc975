"""Tensors of Hugging Face checkpoints as plain matrices under plain names."""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import re

import numpy as np

from composer.model.checkpoints import architectures
from composer.model.checkpoints import features
from composer.model.checkpoints import names
from composer.model.checkpoints import rows
from composer.model.checkpoints import tensors as tensors_lib

Stored = names.Stored
Tensor = tensors_lib.Tensor
BFLOAT16 = tensors_lib.DTYPES['BF16']
FLOAT32 = tensors_lib.DTYPES['F32']


# A layer behind the last that drafts (`model/mtp.py`): what it has beside a layer,
# and copies of the embedding and of the head that it has in common with the model.
_DRAFTS = ('enorm', 'hnorm', 'eh_proj', 'shared_head.norm')
_COPIES = ('embed_tokens.', 'shared_head.head.')


def with_drafts(
  found: Mapping[str, Tensor], described: architectures.Described
) -> architectures.Described:
  """The model with the layer that drafts, where its tensors are there.

  A `config.json` may name one that was never saved. Others behind it are not
  read.
  """
  at = f'model.layers.{described.config.layers}.'
  names_of = tuple(f'{at}{name}.weight' for name in _DRAFTS)
  there = {end for end in names_of for name in found if name.endswith(end)}
  if not described.extra_layers or len(there) < len(names_of):
    return described
  config = dataclasses.replace(described.config, mtp_layers=1)
  return dataclasses.replace(described, config=config)


def canonical(
  found: Mapping[str, Tensor], described: architectures.Described
) -> tuple[dict[str, Tensor], tuple[str, ...], str]:
  """Tensors of the text model under plain names; what was skipped; the prefix.

  In a model of several kinds of input the text model's names have a prefix
  ('language_model.model.layers...') and the other parts are skipped.
  """
  prefix = ''
  if described.nested:
    ends = [n for n in found if n.endswith('model.embed_tokens.weight')]
    if len(ends) != 1:
      raise ValueError(
        f'the text model has {len(ends)} tensors that end in'
        ' model.embed_tokens.weight; one is needed to tell its prefix'
      )
    prefix = ends[0].removesuffix('model.embed_tokens.weight')
  last = described.config.layers
  extra = range(last, last + described.extra_layers)
  drafts = f'model.layers.{last}.' if described.config.mtp_layers else None
  kept, skipped = {}, {}
  for name, tensor in found.items():
    group = None
    plain = name.removeprefix(prefix)
    layer = re.match(r'model\.layers\.(\d+)\.', plain)
    if prefix and plain == name:
      group = name.split('.')[0] + '.*'
    elif drafts and plain.startswith(drafts):
      if plain.removeprefix(drafts).startswith(_COPIES):
        group = f'{prefix}copies for {drafts}*'
    elif layer and int(layer[1]) in extra:
      group = f'{prefix}model.layers.{layer[1]}.*'
    elif plain.endswith('.rotary_emb.inv_freq'):
      group = '*.rotary_emb.inv_freq'
    elif 0 in tensor.shape:
      group = '(empty tensors)'
    if group is None:
      kept[plain] = tensor
    else:
      skipped[group] = skipped.get(group, 0) + 1
  words = (
    f'{group} ({n} tensor{"s" if n > 1 else ""})'
    for group, n in sorted(skipped.items())
  )
  return kept, tuple(words), prefix


def dequantised(
  found: Mapping[str, Tensor], quantised: features.Quantised | None
) -> dict[str, Stored]:
  """Every matrix as plain rows, whatever its storage format."""
  out, used = {}, set()
  for name, tensor in found.items():
    if name.endswith('.weight_packed'):
      base = name.removesuffix('_packed')
      out[base] = _int4(found, base, quantised)
      used |= {base + suffix for suffix in ('_packed', '_scale', '_shape')}
    elif name + '_scale_inv' in found:
      out[name] = _fp8(tensor, found[name + '_scale_inv'], name, quantised)
      used |= {name, name + '_scale_inv'}
  for name, tensor in found.items():
    if name not in used:
      out[name] = Stored(tensor.shape, tensor.dtype, tensor.dtype, tensor.rows)
  return out


def _fp8(codes, scales, name, quantised) -> Stored:
  block = quantised.block if quantised else (128, 128)
  grid = tuple(-(-n // b) for n, b in zip(codes.shape, block, strict=False))
  if codes.dtype != tensors_lib.DTYPES['F8_E4M3'] or scales.shape != grid:
    raise ValueError(
      f'{name} ({codes.dtype}, {list(codes.shape)}) has scales of shape'
      f' {list(scales.shape)}; E4M3 in blocks of {list(block)} has {list(grid)}'
    )

  def read(first: int, last: int) -> np.ndarray:
    blocks = scales.rows(first // block[0], -(-last // block[0]))
    plain = codes.rows(first, last).view(np.uint8)
    return rows.fp8_blocks(plain, blocks, first, block)

  return Stored(codes.shape, FLOAT32, BFLOAT16, read)


def _int4(found, name, quantised) -> Stored:
  lost = [name + x for x in ('_scale', '_shape') if name + x not in found]
  if lost:
    raise ValueError(f'{name}_packed is there without {", ".join(lost)}')
  packed, scales = found[name + '_packed'], found[name + '_scale']
  shape = tuple(int(n) for n in found[name + '_shape'].all().reshape(-1))
  group = quantised.group if quantised else 32
  if len(shape) != 2 or min(shape) < 1:
    raise ValueError(f'{name}_shape says {list(shape)}; a matrix has two sizes')
  expected = (shape[0], -(-shape[1] // 8)), (shape[0], -(-shape[1] // group))
  if (packed.shape, scales.shape) != expected:
    raise ValueError(
      f'{name} of shape {list(shape)} is packed as {list(packed.shape)} with'
      f' scales {list(scales.shape)}; INT4 in groups of {group} has'
      f' {list(expected[0])} and {list(expected[1])}'
    )

  def read(first: int, last: int) -> np.ndarray:
    return rows.int4_groups(
      packed.rows(first, last), scales.rows(first, last), shape[1], group
    )

  return Stored(shape, FLOAT32, BFLOAT16, read)


_EXPERT = re.compile(r'(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight')


def unfused(
  entries: tuple[names.Entry, ...], stored: dict[str, Stored]
) -> dict[str, Stored]:
  """Experts of one fused tensor a layer, as rows of it.

  transformers 5 holds `experts.gate_up_proj` [E, 2 F, D] and
  `experts.down_proj` [E, D, F] in memory, and may have been told to save them
  so.
  """
  if not any(name.endswith('.mlp.experts.down_proj') for name in stored):
    return stored
  out = dict(stored)
  for entry in entries:
    for place in entry.places() if entry.stacked == 2 else ():
      for piece in entry.pieces:
        name = entry.tensor(piece, place)
        match = _EXPERT.fullmatch(name)
        fused = 'down_proj' if match[3] == 'down' else 'gate_up_proj'
        whole = stored.get(match[1] + fused)
        if whole is None or len(whole.shape) != 3:
          continue
        out.pop(match[1] + fused, None)
        up = int(match[3] == 'up')
        out[name] = _part(whole, place[1], up, piece.shape[0])
  return out


def _part(whole: Stored, expert: int, second: int, count: int) -> Stored:
  start = expert * whole.shape[1] + second * count

  def read(first: int, last: int) -> np.ndarray:
    return whole.read(start + first, start + last)

  shape = (count, whole.shape[2])
  return Stored(shape, whole.dtype, whole.kept, read)
