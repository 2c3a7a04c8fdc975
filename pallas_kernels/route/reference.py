"""Plain JAX: routing, and the order of dispatch. The path on CPU."""

from __future__ import annotations

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

LEAST = 1e-20  # keeps the normalisation finite where all scores are 0


@dataclasses.dataclass(frozen=True)
class Router:
  """What is fixed of a router.

  Attributes:
    k: experts of a row.
    kind: 'sigmoid' or 'softmax', from logits to scores.
    groups: runs of equal size that the experts lie in.
    top_groups: groups that a row may choose from.
    normalise: whether the gates of a row are divided by their sum.
    scale: factor of every gate.
    plausibility: c; see `route`.
  """

  k: int
  kind: str = 'sigmoid'
  groups: int = 1
  top_groups: int = 1
  normalise: bool = True
  scale: float = 1.0
  plausibility: float = 0.0


def added(logits: jax.Array, e: int) -> jax.Array:
  """Logits [R, E]: as they are, or a + (b + c) of three that lie side by side.

  Of [R, 3 E and more] the first E are a, the next b; what follows c is not read.
  """
  if logits.shape[1] == e:
    return logits
  a, b, c = (logits[:, i * e : (i + 1) * e] for i in range(3))
  return a + (b + c)


def scores_of(logits: jax.Array, router: Router) -> jax.Array:
  logits = logits.astype(jnp.float32)
  if router.kind == 'softmax':
    return jax.nn.softmax(logits, axis=-1)
  return jax.nn.sigmoid(logits)


def native(scores: jax.Array, bias: jax.Array | None, router: Router):
  """What the top k are chosen by, [R, E], and the top k, int32 [R, K]."""
  selection = scores if bias is None else scores + bias[None, :]
  if router.groups > 1:
    rows, e = selection.shape
    size = e // router.groups
    by_group = selection.reshape(rows, router.groups, size)
    two = lax.top_k(by_group, 2)[0]
    best = lax.top_k(two[..., 0] + two[..., 1], router.top_groups)[1]
    own = jnp.arange(router.groups)[None, None, :] == best[:, :, None]
    kept = jnp.repeat(jnp.any(own, axis=1), size, axis=1)
    selection = jnp.where(kept, selection, -jnp.inf)
  return selection, lax.top_k(selection, router.k)[1].astype(jnp.int32)


def gates_of(
  logits: jax.Array, experts: jax.Array, router: Router
) -> jax.Array:
  """Gates of given experts [R, K], from the scores of all."""
  chosen = jnp.take_along_axis(scores_of(logits, router), experts, axis=-1)
  if router.normalise:
    total = chosen[:, 0]
    for slot in range(1, router.k):  # one order of addition
      total = total + chosen[:, slot]
    chosen = chosen / (total + LEAST)[:, None]
  return chosen * router.scale


def plausible(
  scores: jax.Array,
  selection: jax.Array,
  own: jax.Array,
  experts: jax.Array,
  c: float,
) -> jax.Array:
  """Experts, those below c times the least native score replaced, in order."""
  least = jnp.min(jnp.take_along_axis(scores, own, axis=-1), axis=-1)
  number = jnp.arange(scores.shape[-1])[None, None, :]
  for slot in range(experts.shape[-1]):
    current = experts[:, slot]
    score = jnp.take_along_axis(scores, current[:, None], axis=-1)[:, 0]
    used = jnp.any(experts[:, :, None] == number, axis=1)
    other = jnp.argmax(jnp.where(used, -jnp.inf, selection), axis=-1)
    kept = score >= c * least
    new = jnp.where(kept, current, other.astype(jnp.int32))
    experts = experts.at[:, slot].set(new)
  return experts


def route(
  logits: jax.Array,
  bias: jax.Array | None,
  replay: jax.Array | None,
  router: Router,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Experts int32 [R, K], gates float32 [R, K], native int32 [R, K]."""
  scores = scores_of(lax.stop_gradient(logits), router)
  selection, own = native(scores, bias, router)
  experts = own
  if replay is not None:
    replay = replay.astype(jnp.int32)
    known = (replay >= 0) & (replay < logits.shape[1])
    known = jnp.all(known, axis=-1, keepdims=True)
    experts = jnp.where(known, replay, own)
    if router.plausibility > 0:
      experts = plausible(scores, selection, own, experts, router.plausibility)
  return experts, gates_of(logits, experts, router), own


def order(
  experts: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Slots by expert, the inverse, and sizes; see the package."""
  flat = experts.reshape(-1).astype(jnp.int32)
  slots = jnp.argsort(flat, stable=True).astype(jnp.int32)
  number = jnp.arange(flat.shape[0], dtype=jnp.int32)
  places = jnp.zeros_like(slots).at[slots].set(number)
  return slots, places, jnp.bincount(flat, length=count).astype(jnp.int32)
