"""Logprobs by kernels where the unembedding lies over the devices of a mesh.

Every device scores its own tokens over the whole vocabulary. What it does not
hold of the unembedding it gathers, some columns at a time: their log-sum-exps
are merged in one order, and of the whole matrix no device ever has more than
those columns, in the backward pass neither. There they are gathered again, and
their gradient goes to the devices that hold them before the next are.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from composer import mesh as mesh_lib
from composer import params as params_lib
from composer.model import parallel
from pallas_kernels.token_logprob import shards

Array = jax.Array
ParamSpec = params_lib.ParamSpec

COLUMNS = 2**27  # numbers of the unembedding that a device gathers at once
LINE = 64  # of whose multiples the kernels take columns
MOST = 4  # times the pieces that `COLUMNS` asks for


@dataclasses.dataclass(frozen=True)
class Pieces:
  """How the columns of an unembedding are gathered; static.

  Attributes:
    layout: of the mesh.
    spec: declaration of the unembedding, or of the embedding tied to it.
    kind: dtype of products.
    count: pieces that a device's columns are cut into.
    implementation: of the kernel, as `dispatch.choose` takes it.
  """

  layout: mesh_lib.Layout
  spec: ParamSpec
  kind: Any
  count: int
  implementation: str | None

  @property
  def axis(self) -> int:
    return self.spec.axes.index('vocab')


def token_logprob(
  layout: mesh_lib.Layout,
  spec: ParamSpec,
  implementation: str | None,
  shard: Array,
  hidden: Array,
  tokens: Array,
  temperatures: Array,
) -> tuple[Array, Array]:
  """Logprob and entropy of a token a row, [R] each, inside of `shard_map`.

  Args:
    layout, spec, implementation: static, see `Pieces`.
    shard: the device's part of the unembedding [D, V], or of the tied embedding
      [V, D]; master or published.
    hidden: [R, D] of the device's own tokens, after the last norm.
    tokens: int32 [R].
    temperatures: float32 [R].
  """
  axis = spec.axes.index('vocab')
  count = _pieces(spec.shape[axis], shard.shape[axis], hidden.shape[1])
  pieces = Pieces(layout, spec, hidden.dtype, count, implementation)
  return _scored(pieces, shard, hidden, tokens, temperatures)


def _pieces(vocabulary: int, held: int, width: int) -> int:
  """Into how many equal pieces the `held` columns of a device are cut.

  As few as keep a gathered piece within `COLUMNS`, whole lines where possible.
  Where that takes more than `MOST` times as many, as few columns more than
  `COLUMNS` as there can be: a vocabulary of 128 times a prime can be cut in two,
  or into slivers.
  """
  wanted = -(-vocabulary * width // COLUMNS)
  possible = [n for n in range(1, held + 1) if held % n == 0]
  whole = [n for n in possible if (vocabulary // n) % LINE == 0] or possible
  enough = [n for n in whole if wanted <= n <= MOST * wanted]
  return enough[0] if enough else [n for n in whole if n < wanted][-1]


def _piece(pieces: Pieces, shard: Array, i: Array) -> Array:
  """The i-th part of a device's columns, as it holds them."""
  size = shard.shape[pieces.axis] // pieces.count
  return jax.lax.dynamic_slice_in_dim(shard, i * size, size, pieces.axis)


def _gathered(pieces: Pieces, piece: Array) -> Array:
  """[D, P C]: C columns of each of P devices."""
  whole = parallel.gather_one(pieces.layout, pieces.spec, pieces.kind, piece)
  return whole if pieces.axis == 1 else whole.T


def _columns(pieces: Pieces, shard: Array, tokens: Array, i: Array) -> Array:
  """Column of the i-th gathered piece that a token has, or -1."""
  held = shard.shape[pieces.axis]
  size = held // pieces.count
  device, rest = tokens // held, tokens % held
  inside = rest // size == i
  return jnp.where(inside, device * size + rest % size, -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scored(pieces, shard, hidden, tokens, temperatures):
  return _forward(pieces, shard, hidden, tokens, temperatures)[0]


def _forward(pieces, shard, hidden, tokens, temperatures):
  def one(i):
    return shards.statistics(
      hidden,
      _gathered(pieces, _piece(pieces, shard, i)),
      _columns(pieces, shard, tokens, i),
      temperatures,
      implementation=pieces.implementation,
    )

  found = shards.merge(jax.lax.map(one, jnp.arange(pieces.count)))
  saved = shard, hidden, tokens, temperatures, found
  return (found.chosen - found.log, found.entropy), saved


def _backward(pieces, saved, cotangents):
  shard, hidden, tokens, temperatures, found = saved

  def one(dhidden, i):
    piece = _piece(pieces, shard, i)
    whole, pull = jax.vjp(functools.partial(_gathered, pieces), piece)
    more, dwhole = shards.gradients(
      hidden,
      whole,
      _columns(pieces, shard, tokens, i),
      temperatures,
      found,
      cotangents,
      implementation=pieces.implementation,
    )
    return dhidden + more, pull(dwhole)[0]

  start = jnp.zeros(hidden.shape, jnp.float32)
  dhidden, parts = jax.lax.scan(one, start, jnp.arange(pieces.count))
  # [N, ...] with the piece's columns at `axis`: side by side again.
  dshard = jnp.moveaxis(parts, 0, pieces.axis).reshape(shard.shape)
  return dshard, dhidden.astype(hidden.dtype), None, None


_scored.defvjp(_forward, _backward)
