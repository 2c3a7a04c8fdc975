"""Where each part of our parameters lies in other people's checkpoints.

Ours are stacked over layers and experts and multiply from the right (x @ W,
inputs first); a checkpoint holds one matrix [outputs, inputs] for each layer,
expert and projection. A `Piece` is one such matrix: the name of its tensor and
the place of its numbers in our parameter. Reading, writing, checking shapes and
listing what is missing are all loops over the same pieces, so that they cannot
disagree.

Rotary halves. Here the first half of a head's rotating numbers is turned
against the second half. DeepSeek's checkpoints, and the q and k of a GGUF of
the llama family, hold the two numbers of a pair side by side instead; rows with
`rope` > 0 are put in our order when read, and back when written. Scores q . k
are the same in either order, as both sides are permuted alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer.model import transformer

ModelConfig = config_lib.ModelConfig
Box = tuple[tuple[int, int], ...]  # start and stop along each dimension


class Stored(NamedTuple):
  """A matrix as it lies in a checkpoint, whatever its storage format.

  Attributes:
    shape: as the checkpoint states it; a vector [n] is n rows of one number.
    dtype: of what `read` returns.
    kept: dtype that it has in ours unless another is asked for.
    read: (first row, last row + 1) -> array [rows, columns].
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  kept: np.dtype
  read: Callable[[int, int], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Piece:
  """One matrix [outer, inner] of a checkpoint, and its place in ours.

  In our parameter, after the stacked dimensions, lie the `inner` dimensions
  (contracted in x @ W), then the pair of gate and up where there is one, then
  the `outer` ones; with `transposed` false they lie as in the checkpoint.

  Attributes:
    tensor: name, with {layer} and {expert} to fill in.
    outer, inner: shapes of the outputs and the inputs.
    pair: 0 for the gate, 1 for up, None where ours has no such dimension.
    offset: of the piece along outer[0] in ours (q, k and v are side by side).
    rope: how many of the last entries of outer[-1] rotate and are interleaved
      in the checkpoint.
    transposed: false for embeddings.
  """

  tensor: str
  outer: tuple[int, ...]
  inner: tuple[int, ...] = ()
  pair: int | None = None
  offset: int = 0
  rope: int = 0
  transposed: bool = True

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the tensor in the checkpoint."""
    rows = math.prod(self.outer)
    return (rows, math.prod(self.inner)) if self.inner else (rows,)

  @property
  def unit(self) -> int:
    """Rows of the tensor to one step along outer[0]."""
    return math.prod(self.outer[1:])

  @property
  def divisible(self) -> bool:
    """Whether outer[0] may be read in parts."""
    return not (self.rope and len(self.outer) == 1)


@dataclasses.dataclass(frozen=True)
class Entry:
  """One of our parameters and the pieces that it is made of.

  Attributes:
    name: ours, e.g. 'layers/moe/gate_up'.
    shape: ours, stacked.
    stacked: how many leading dimensions are layers and experts.
    first_layer: number in the checkpoint of our layer 0 of this stack.
    pieces: of each place of the stacked dimensions.
    narrow: whether the published form is narrower than float32.
  """

  name: str
  shape: tuple[int, ...]
  stacked: int
  first_layer: int
  pieces: tuple[Piece, ...]
  narrow: bool

  def places(self) -> itertools.product:
    """Every index of the stacked dimensions."""
    return itertools.product(*map(range, self.shape[: self.stacked]))

  def tensor(self, piece: Piece, place: tuple[int, ...]) -> str:
    """Name of the tensor of `piece` at a place of the stacked dimensions."""
    layer = self.first_layer + place[0] if place else 0
    return piece.tensor.format(
      layer=layer, expert=place[1] if len(place) > 1 else 0
    )


# --- the table ---------------------------------------------------------------

Parts = dict[str, tuple[Piece, ...]]


def _grouped_attention(config: ModelConfig, p: str, rope: int) -> Parts:
  d, h, g, k = config.width, config.heads, config.kv_heads, config.head_dim
  out = {
    'norm': (Piece(f'{p}input_layernorm.weight', (d,)),),
    'qkv': (
      Piece(f'{p}self_attn.q_proj.weight', (h, k), (d,), rope=rope),
      Piece(f'{p}self_attn.k_proj.weight', (g, k), (d,), offset=h, rope=rope),
      Piece(f'{p}self_attn.v_proj.weight', (g, k), (d,), offset=h + g),
    ),
    'out': (Piece(f'{p}self_attn.o_proj.weight', (d,), (h, k)),),
  }
  if config.qk_norm:
    out['q_norm'] = (Piece(f'{p}self_attn.q_norm.weight', (k,)),)
    out['k_norm'] = (Piece(f'{p}self_attn.k_norm.weight', (k,)),)
  return out


def _latent_attention(config: ModelConfig, p: str, interleaved: bool) -> Parts:
  d, h, c, q = config.width, config.heads, config.kv_lora, config.q_lora
  nope, rope, value = config.nope_dim, config.rope_dim, config.value_dim
  turn = rope if interleaved else 0
  a = f'{p}self_attn.'
  out = {'norm': (Piece(f'{p}input_layernorm.weight', (d,)),)}
  if q:
    out['q_down'] = (Piece(f'{a}q_a_proj.weight', (q,), (d,)),)
    out['q_down_norm'] = (Piece(f'{a}q_a_layernorm.weight', (q,)),)
    out['q_up'] = (
      Piece(f'{a}q_b_proj.weight', (h, nope + rope), (q,), rope=turn),
    )
  else:
    out['q'] = (Piece(f'{a}q_proj.weight', (h, nope + rope), (d,), rope=turn),)
  return out | {
    'kv_down': (
      Piece(f'{a}kv_a_proj_with_mqa.weight', (c + rope,), (d,), rope=turn),
    ),
    'kv_norm': (Piece(f'{a}kv_a_layernorm.weight', (c,)),),
    'kv_up': (Piece(f'{a}kv_b_proj.weight', (h, nope + value), (c,)),),
    'out': (Piece(f'{a}o_proj.weight', (d,), (h, value)),),
  }


def _gated(prefix: str, d: int, f: int, into: str, down: str) -> Parts:
  return {
    into: (
      Piece(f'{prefix}gate_proj.weight', (f,), (d,), pair=0),
      Piece(f'{prefix}up_proj.weight', (f,), (d,), pair=1),
    ),
    down: (Piece(f'{prefix}down_proj.weight', (d,), (f,)),),
  }


def _experts(config: ModelConfig, p: str) -> Parts:
  d, e, f = config.width, config.experts, config.expert_hidden
  out = {
    'norm': (Piece(f'{p}post_attention_layernorm.weight', (d,)),),
    'router': (Piece(f'{p}mlp.gate.weight', (e,), (d,)),),
  }
  if config.router == 'sigmoid':
    name = f'{p}mlp.gate.e_score_correction_bias'
    out['router_bias'] = (Piece(name, (e,)),)
  out |= _gated(f'{p}mlp.experts.{{expert}}.', d, f, 'gate_up', 'down')
  if config.shared_experts:
    s = config.shared_experts * f
    shared = f'{p}mlp.shared_experts.'
    out |= _gated(shared, d, s, 'shared_gate_up', 'shared_down')
  return out


def table(config: ModelConfig, interleaved: bool = True) -> tuple[Entry, ...]:
  """The pieces of every parameter, under the names of `transformers`.

  Args:
    config: of the model.
    interleaved: whether the pairs of rotating numbers lie side by side in the
      checkpoint (DeepSeek's do). Of grouped-query attention, only a GGUF's do.
  """
  p = 'model.layers.{layer}.'
  if config.kv_lora:
    attention = _latent_attention(config, p, interleaved)
  else:
    turn = config.head_dim if interleaved else 0
    attention = _grouped_attention(config, p, turn)
  d, v = config.width, config.vocab_size
  embed = Piece('model.embed_tokens.weight', (v,), (d,), transposed=False)
  parts: Parts = {
    'embed': (embed,),
    'final_norm': (Piece('model.norm.weight', (d,)),),
    'unembed': (Piece('lm_head.weight', (v,), (d,)),),
  }
  dense = {'norm': (Piece(f'{p}post_attention_layernorm.weight', (d,)),)}
  dense |= _gated(f'{p}mlp.', d, config.dense_hidden, 'gate_up', 'down')
  sparse = _experts(config, p)
  for stack, kind, feed in (('dense', 'mlp', dense), ('layers', 'moe', sparse)):
    parts |= {f'{stack}/attention/{n}': x for n, x in attention.items()}
    parts |= {f'{stack}/{kind}/{n}': x for n, x in feed.items()}
    parts |= {f'mtp/{kind}/{n}': x for n, x in feed.items()}
  parts |= {f'mtp/attention/{n}': x for n, x in attention.items()}
  parts |= {
    'mtp/embed_norm': (Piece(f'{p}enorm.weight', (d,)),),
    'mtp/hidden_norm': (Piece(f'{p}hnorm.weight', (d,)),),
    'mtp/join': (Piece(f'{p}eh_proj.weight', (d,), (2, d)),),
    'mtp/norm': (Piece(f'{p}shared_head.norm.weight', (d,)),),
  }
  return tuple(
    _entry(config, name, spec, parts[name])
    for name, spec in params_lib.named(transformer.spec(config)).items()
  )


def _entry(
  config: ModelConfig,
  name: str,
  spec: params_lib.ParamSpec,
  pieces: tuple[Piece, ...],
) -> Entry:
  stacked = sum(axis in ('layers', 'expert') for axis in spec.axes)
  first = {'layers': config.dense_layers, 'mtp': config.layers}
  narrow = np.dtype(spec.published).itemsize < 4
  at = first.get(name.split('/')[0], 0)
  return Entry(name, spec.shape, stacked, at, pieces, narrow)


# --- numbers in and out ------------------------------------------------------


def full(shape: tuple[int, ...]) -> Box:
  return tuple((0, n) for n in shape)


def assemble(
  entry: Entry, tensors: Mapping[str, Stored], box: Box, dtype: np.dtype
) -> np.ndarray:
  """A part of our parameter, from the tensors that it lies in.

  Reads no more rows than the box touches. Values are rounded to `dtype`.
  """
  out = np.empty([stop - start for start, stop in box], dtype)
  stacked, rest = box[: entry.stacked], box[entry.stacked :]
  for place in itertools.product(*(range(*span) for span in stacked)):
    at = tuple(i - span[0] for i, span in zip(place, stacked, strict=True))
    for piece in entry.pieces:
      stored = tensors[entry.tensor(piece, place)]
      # What overflows float16 becomes an infinity, which whoever writes it
      # reports by name.
      with np.errstate(over='ignore'):
        _fill(out[at], piece, stored, rest)
  return out


def _fill(out: np.ndarray, piece: Piece, stored: Stored, box: Box) -> None:
  """Writes what `piece` has of `box` into `out`, the array of that box."""
  inner, pair, outer = _split(piece, box)
  if pair is not None and not pair[0] <= piece.pair < pair[1]:
    return
  start = max(outer[0][0], piece.offset)
  stop = min(outer[0][1], piece.offset + piece.outer[0])
  if start >= stop:
    return
  first, last = start - piece.offset, stop - piece.offset
  low, high = (first, last) if piece.divisible else (0, piece.outer[0])
  rows = stored.read(low * piece.unit, high * piece.unit)
  part = to_ours(piece, rows)  # inner..., outer..., or as it lies
  keep = [slice(first - low, last - low)]
  keep += [slice(*span) for span in outer[1:]]
  within = [slice(*span) for span in inner]
  here = [slice(start - outer[0][0], stop - outer[0][0])]
  everything = [slice(None)] * len(inner)
  if not piece.transposed:
    out[tuple(here)] = part[tuple(keep + within)]
    return
  middle = [] if pair is None else [piece.pair - pair[0]]
  out[tuple(everything + middle + here)] = part[tuple(within + keep)]


def _split(piece: Piece, box: Box):
  """The spans of inner dimensions, of the pair (or None) and of outer ones."""
  n = len(piece.inner)
  if not piece.transposed:
    m = len(piece.outer)
    return box[m:], None, box[:m]
  if piece.pair is None:
    return box[:n], None, box[n:]
  return box[:n], box[n], box[n + 1 :]


def to_ours(piece: Piece, rows: np.ndarray) -> np.ndarray:
  """Rows [n unit, inner] of a tensor, in our order: [inner, n, outer[1:]]."""
  x = rows.reshape(-1, *piece.outer[1:], *piece.inner)
  axes = len(piece.outer)
  if piece.rope:
    order = np.arange(piece.outer[-1])
    turning = order[-piece.rope :]
    order[-piece.rope :] = np.concatenate([turning[0::2], turning[1::2]])
    x = np.take(x, order, axis=axes - 1)
  if piece.transposed:
    x = np.moveaxis(x, range(axes), range(-axes, 0))
  return x


def to_theirs(piece: Piece, part: np.ndarray) -> np.ndarray:
  """Inverse of `to_ours`: rows [n unit, inner], contiguous."""
  axes = len(piece.outer)
  if piece.transposed:
    part = np.moveaxis(part, range(-axes, 0), range(axes))
  if piece.rope:
    order = np.arange(piece.outer[-1])
    turning = order[-piece.rope :].copy()
    order[-piece.rope :: 2] = turning[: piece.rope // 2]
    order[order.size - piece.rope + 1 :: 2] = turning[piece.rope // 2 :]
    part = np.take(part, order, axis=axes - 1)
  columns = math.prod(piece.inner)
  return np.ascontiguousarray(part).reshape(-1, columns)


def box_of(
  entry: Entry, piece: Piece, place: tuple[int, ...], first: int, last: int
) -> Box:
  """The box in ours of entries [first, last) along outer[0] of a piece."""
  lead = tuple((i, i + 1) for i in place)
  here = (piece.offset + first, piece.offset + last)
  outer = (here, *full(piece.outer[1:]))
  if not piece.transposed:
    return (*lead, *outer, *full(piece.inner))
  pair = () if piece.pair is None else ((piece.pair, piece.pair + 1),)
  return (*lead, *full(piece.inner), *pair, *outer)
