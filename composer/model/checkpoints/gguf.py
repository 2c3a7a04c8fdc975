"""GGUF files of the llama family: metadata, tensors, and our configuration.

A file is a magic number, a version, counts, key-value metadata, a table of
tensors, and the data, aligned. Sizes are written innermost first: a matrix
[outputs, inputs] has dimensions (inputs, outputs). Rows of quantised tensors
are blocks of 32 values (`rows.q4_1`, `rows.q8_0`).

llama.cpp keeps the rotating numbers of a pair of q and k side by side, where
Hugging Face keeps them half a head apart; `names.table(interleaved=True)` puts
them back.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

from composer import checks
from composer import config as config_lib
from composer.model.checkpoints import names
from composer.model.checkpoints import rows
from composer.model.checkpoints import tensors as tensors_lib

Path = pathlib.Path
FLOAT32 = np.dtype(np.float32)
MOST = 1 << 24  # elements of a list, or bytes of a string, in the metadata


@dataclasses.dataclass(frozen=True)
class Format:
  """A tensor type: bytes of a block of `values`, and what they stand for."""

  name: str
  bytes: int
  values: int
  decode: Callable[[np.ndarray], np.ndarray]


FORMATS: dict[int, Format] = {
  0: Format('F32', 4, 1, lambda x: x.view('<f4')),
  1: Format('F16', 2, 1, lambda x: x.view('<f2')),
  3: Format('Q4_1', 20, 32, rows.q4_1),
  8: Format('Q8_0', 34, 32, rows.q8_0),
}
# Of types that are not read, for messages.
OTHERS = {
  2: 'Q4_0',
  6: 'Q5_0',
  7: 'Q5_1',
  10: 'Q2_K',
  11: 'Q3_K',
  12: 'Q4_K',
  13: 'Q5_K',
  14: 'Q6_K',
  15: 'Q8_K',
  30: 'BF16',
}
SCALARS = {
  0: '<B',
  1: '<b',
  2: '<H',
  3: '<h',
  4: '<I',
  5: '<i',
  6: '<f',
  7: '<?',
  10: '<Q',
  11: '<q',
  12: '<d',
}
STRING, ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class Lying:
  """A tensor: its type, its shape [outputs, inputs], and where it lies."""

  format: Format
  shape: tuple[int, ...]
  offset: int


@dataclasses.dataclass(frozen=True)
class File:
  """What a GGUF file says of itself."""

  path: Path
  metadata: dict[str, Any]
  tensors: dict[str, Lying]


class _Cursor:
  """A place in the header; every read is checked against the file's end."""

  def __init__(self, data: mmap.mmap, path: Path):
    self._data, self._path, self.at = data, path, 0

  def take(self, size: int) -> bytes:
    if size > len(self._data) - self.at:
      raise ValueError(
        f'{self._path} is truncated: its header ends beyond its'
        f' {len(self._data)} bytes; get the file again'
      )
    self.at += size
    return self._data[self.at - size : self.at]

  def number(self, code: str) -> Any:
    return struct.unpack(code, self.take(struct.calcsize(code)))[0]

  def text(self) -> str:
    size = self.number('<Q')
    if size > MOST:
      raise ValueError(f'{self._path}: a text of {size} bytes in the header')
    return self.take(size).decode('utf-8', 'surrogateescape')

  def value(self, kind: int) -> Any:
    if kind == STRING:
      return self.text()
    if kind == ARRAY:
      of, count = self.number('<I'), self.number('<Q')
      if count > MOST:
        raise ValueError(f'{self._path}: a list of {count} in the header')
      if of in SCALARS:
        code = SCALARS[of]
        data = self.take(count * struct.calcsize(code))
        return [x for (x,) in struct.iter_unpack(code, data)]
      return [self.value(of) for _ in range(count)]
    if kind not in SCALARS:
      raise ValueError(f'{self._path}: metadata of unknown type {kind}')
    return self.number(SCALARS[kind])


# --- reading -----------------------------------------------------------------


def read_file(path: Path) -> File:
  """Metadata and the table of tensors; no weights are read.

  Raises:
    ValueError: no GGUF, a version or a tensor type that is not read, or a
      truncated file.
  """
  if path.stat().st_size < 24:
    raise ValueError(f'{path} is no GGUF file: it has under 24 bytes')
  with (
    path.open('rb') as file,
    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
  ):
    cursor = _Cursor(data, path)
    magic, version = cursor.take(4), cursor.number('<I')
    if magic != b'GGUF' or version not in (2, 3):
      raise ValueError(
        f'{path} is no GGUF file of version 2 or 3 (little-endian): it begins'
        f' with {magic!r}, version {version}'
      )
    count, keys = cursor.number('<Q'), cursor.number('<Q')
    metadata = {}
    for _ in range(keys):
      name = cursor.text()
      metadata[name] = cursor.value(cursor.number('<I'))
    table = [_entry(cursor, path) for _ in range(count)]
    aligned = metadata.get('general.alignment', 32)
    start = -(-cursor.at // aligned) * aligned
    size = len(data)
  found = {}
  for name, form, shape, offset in table:
    found[name] = Lying(form, shape, start + offset)
    end = start + offset + math.prod(shape) // form.values * form.bytes
    if end > size:
      raise ValueError(
        f'{path} is truncated: {name} ends at byte {end} and the file has'
        f' {size}; get the file again'
      )
  return File(path, metadata, found)


def _entry(cursor: _Cursor, path: Path):
  name = cursor.text()
  dimensions = cursor.number('<I')
  if dimensions > 4:
    raise ValueError(f'{path}: {name} has {dimensions} dimensions')
  shape = tuple(cursor.number('<Q') for _ in range(dimensions))[::-1]
  kind, offset = cursor.number('<I'), cursor.number('<Q')
  if kind not in FORMATS:
    known = ', '.join(x.name for x in FORMATS.values())
    raise ValueError(
      f'{path}: {name} is of type {OTHERS.get(kind, kind)}; known: {known}.'
      ' Get the file in one of them'
    )
  form = FORMATS[kind]
  if (
    not shape
    or shape[-1] % form.values
    or (len(shape) == 1 and form.values > 1)
  ):
    raise ValueError(
      f'{path}: {name} of shape {list(shape)} cannot be of type {form.name}'
    )
  return name, form, shape, offset


PLACES = {
  'token_embd.weight': 'model.embed_tokens.weight',
  'output_norm.weight': 'model.norm.weight',
  'output.weight': 'lm_head.weight',
  'attn_norm': 'input_layernorm',
  'attn_q': 'self_attn.q_proj',
  'attn_k': 'self_attn.k_proj',
  'attn_v': 'self_attn.v_proj',
  'attn_output': 'self_attn.o_proj',
  'ffn_norm': 'post_attention_layernorm',
  'ffn_gate': 'mlp.gate_proj',
  'ffn_up': 'mlp.up_proj',
  'ffn_down': 'mlp.down_proj',
}


def stored(file: File) -> dict[str, names.Stored]:
  """Tensors under the names of `transformers`; unknown ones keep theirs."""
  return {
    _translated(name): names.Stored(
      lying.shape, FLOAT32, FLOAT32, _row_reader(file.path, lying)
    )
    for name, lying in file.tensors.items()
  }


def _translated(name: str) -> str:
  if name in PLACES:
    return PLACES[name]
  block, _, rest = name.partition('.')
  layer, _, rest = rest.partition('.')
  place = PLACES.get(rest.removesuffix('.weight'))
  if block != 'blk' or place is None or not rest.endswith('.weight'):
    return name
  return f'model.layers.{layer}.{place}.weight'


def _row_reader(path: Path, lying: Lying):
  form = lying.format
  columns = lying.shape[-1] if len(lying.shape) > 1 else 1
  size = columns // form.values * form.bytes

  def read(first: int, last: int) -> np.ndarray:
    tensor = tensors_lib.Tensor(
      path, np.dtype(np.uint8), (lying.shape[0], size), lying.offset
    )
    blocks = tensor.rows(first, last).reshape(last - first, -1, form.bytes)
    values = form.decode(blocks).astype(np.float32, copy=False)
    return values.reshape(last - first, columns)

  return read


# --- the model ---------------------------------------------------------------


def model_config(file: File) -> config_lib.ModelConfig:
  """Our configuration of the model in a file.

  Raises:
    ValueError: an architecture other than llama, a feature that is not
      implemented, or missing metadata.
  """
  architecture = file.metadata.get('general.architecture')
  if architecture != 'llama':
    raise ValueError(
      f'{file.path}: architecture {architecture!r} is not known; known: llama'
    )
  _refuse(file)
  heads = _get(file, 'attention.head_count')
  width = _get(file, 'embedding_length')
  head_dim = _get(file, 'attention.key_length', width // heads)
  embed = file.tensors.get('token_embd.weight')
  vocabulary = file.metadata.get('tokenizer.ggml.tokens')
  if embed is None:
    raise ValueError(f'{file.path} has no tensor token_embd.weight')
  vocab_size = _get(file, 'vocab_size', embed.shape[0])
  if vocabulary is not None and len(vocabulary) != embed.shape[0]:
    raise ValueError(
      f'{file.path}: a vocabulary of {len(vocabulary)} does not match the'
      f' embedding, token_embd.weight {list(embed.shape)}'
    )
  for name, value in (
    ('rope.dimension_count', head_dim),
    ('attention.value_length', head_dim),
  ):
    if _get(file, name, value) != value:
      raise ValueError(
        f'{file.path}: llama.{name} is {_get(file, name)} and the head'
        f' {head_dim} wide; one size is implemented'
      )
  config = config_lib.ModelConfig(
    vocab_size=vocab_size,
    layers=_get(file, 'block_count'),
    dense_layers=_get(file, 'block_count'),
    width=width,
    heads=heads,
    kv_heads=_get(file, 'attention.head_count_kv', heads),
    head_dim=head_dim,
    dense_hidden=_get(file, 'feed_forward_length'),
    rope_theta=_shortest(_get(file, 'rope.freq_base', 10_000.0)),
    rope_float32=True,
    norm_eps=_shortest(_get(file, 'attention.layer_norm_rms_epsilon')),
    tie_embeddings='output.weight' not in file.tensors,
  )
  checks.check_model(config)
  return config


def _refuse(file: File) -> None:
  scaling = _get(file, 'rope.scaling.type', 'none')
  for name, found in (
    ('llama.rope.scaling.type', scaling not in ('none', '')),
    ('llama.expert_count', bool(_get(file, 'expert_count', 0))),
    ('rope_freqs.weight', 'rope_freqs.weight' in file.tensors),
    (
      'llama.attention.sliding_window',
      _get(file, 'attention.sliding_window', 0),
    ),
  ):
    if found:
      raise ValueError(
        f'{file.path}: {name} asks for what is not implemented for GGUF files;'
        ' read the model from safetensors'
      )


def _get(file: File, name: str, default: Any = None) -> Any:
  value = file.metadata.get(f'llama.{name}', default)
  if value is None:
    raise ValueError(f'{file.path}: the metadata lacks llama.{name}')
  return value


def _shortest(value: float) -> float:
  """The shortest decimal that is this float32: 1e-05, not 9.999999747e-06."""
  return float(str(np.float32(value)))


def carried(file: File) -> dict[str, Any]:
  """Fields of a `config.json` that the metadata gives."""
  found = {
    'max_position_embeddings': file.metadata.get('llama.context_length'),
    'bos_token_id': file.metadata.get('tokenizer.ggml.bos_token_id'),
    'eos_token_id': file.metadata.get('tokenizer.ggml.eos_token_id'),
    'pad_token_id': file.metadata.get('tokenizer.ggml.padding_token_id'),
  }
  return {name: value for name, value in found.items() if value is not None}
