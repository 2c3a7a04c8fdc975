"""Which experts a row goes to, with which gates, and the order of dispatch.

  s = sigmoid(logits) or softmax(logits)
  native[r] = the top k of s[r] + bias, of the best groups where there are groups
  gate[r, i] = scale s[r, e_i] / sum_j s[r, e_j]

The bias only selects. With replay the experts are given, and the gates are
still those of this router's own scores, so that its gradient reaches them.
Ties go to the lower expert.

`send` does all of it for few rows, and gathers them, in one launch of a GPU.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import checks
from pallas_kernels import dispatch
from pallas_kernels.grouped_matmul import groups
from pallas_kernels.route import reference

NAME = 'route'
KINDS = ('sigmoid', 'softmax')
Router = reference.Router
added = reference.added


class Routed(NamedTuple):
  """Experts int32 [R, K], gates float32 [R, K], native int32 [R, K] or None."""

  experts: jax.Array
  gates: jax.Array
  native: jax.Array | None


class Order(NamedTuple):
  """Slots, of rows times K, sorted by expert; a slot is row * K + i.

  Attributes:
    slots: int32 [R K]; the slot at each sorted place, stable.
    places: int32 [R K]; the sorted place of each slot, the inverse.
    sizes: int32 [E]; slots of each expert.
  """

  slots: jax.Array
  places: jax.Array
  sizes: jax.Array


def route(
  logits: jax.Array,
  bias: jax.Array | None,
  router: Router,
  replay: jax.Array | None = None,
  *,
  audit: bool = False,
  implementation: str | None = None,
) -> Routed:
  """Chooses experts, or takes those given, and computes their gates.

  Args:
    logits: float32 [R, E].
    bias: float32 [E], for the selection only; None: no bias.
    router: what is fixed.
    replay: int16 or int32 [R, K], experts to use; a row with any below 0
      (unknown) is routed natively.
    audit: with replay, whether `native` is wanted too, for the share of rows
      that would go elsewhere. It costs what native routing costs. Needed with
      `router.plausibility` c > 0: a replayed expert whose score is below c
      times the least of the native ones gives way to the best one not in use.
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    `Routed`; native is None with replay and without audit. The gates are
    differentiable in logits.

  Raises:
    ValueError: shapes and settings that do not fit, and where the values are
      known while tracing, replayed experts out of range or twice in a row.
  """
  _check(logits, bias, router, replay, audit)
  chosen = _choose(logits, router, implementation)
  whole = replay is None or audit
  experts, gates, native = _route(logits, bias, replay, router, whole, chosen)
  return Routed(experts, gates, native if whole else None)


def order(
  experts: jax.Array, count: int, *, implementation: str | None = None
) -> Order:
  """The order in which rows go to their experts.

  Args:
    experts: int [R, K], each 0 to count - 1.
    count: E.
    implementation: a name of `dispatch.NAMES`; None: the best there is.

  Returns:
    `Order`: x[slots // K] are the rows sorted for `grouped_matmul`, and
    y[places].reshape(R, K, ...) brings its results back.

  Raises:
    ValueError: experts that are not [R, K], or out of range where known.
  """
  if experts.ndim != 2:
    raise ValueError(f'experts {experts.shape} must be [R, K]')
  checks.integers(experts=experts)
  checks.whole(1, count=count)
  known = checks.known(experts)
  if known is not None and known.size:
    low, high = int(known.min()), int(known.max())
    if low < 0 or high >= count:
      raise ValueError(
        f'experts from {low} to {high} must be in 0..{count - 1}'
      )
  chosen = _choose_order(experts, count, implementation)
  if chosen == 'reference':
    return Order(*reference.order(experts, count))
  interpret = chosen.endswith('interpret')
  if chosen.startswith('tpu'):
    from pallas_kernels.route import tpu as kernels
  else:
    from pallas_kernels.route import gpu as kernels
  return Order(*kernels.order(experts, count, interpret=interpret))


class Sent(NamedTuple):
  """Rows routed and sorted by expert; see `Routed` and `Order`.

  Attributes:
    experts: int32 [R, K].
    gates: float32 [R, K].
    rows: [R K, D]; x of the slot at each sorted place.
    places: int32 [R K]; the sorted place of each slot.
    groups: sizes [E] for `grouped_matmul`, with their tiles.
  """

  experts: jax.Array
  gates: jax.Array
  rows: jax.Array
  places: jax.Array
  groups: groups.Planned


def send(
  x: jax.Array,
  logits: jax.Array,
  bias: jax.Array | None,
  router: Router,
  replay: jax.Array | None = None,
  *,
  experts: int | None = None,
  implementation: str | None = None,
) -> Sent | None:
  """`route`, `order`, and x in that order, of few rows in one launch.

  Args:
    x: [R, D].
    (others): see `route`; nothing is audited.
    experts: E where logits are float32 [R, 3 E or more]: three that lie side by
      side, of which a + (b + c) is routed. Up to `gpu_few.MOST_ADDED` of them the
      kernel adds, above it a launch before.

  Returns:
    `Sent`, whose numbers are those of `route` and `order`, and differentiable
    alike; None where these are not few rows, or not for the GPU's kernel.
  """
  whole = logits
  if experts is not None:
    checks.whole(1, experts=experts)
    if logits.ndim != 2 or logits.shape[1] < 3 * experts:
      raise ValueError(
        f'logits {logits.shape} must be [R, 3 E or more] with experts={experts}'
      )
    whole = jax.ShapeDtypeStruct((len(logits), experts), logits.dtype)
  _check(whole, bias, router, replay, False)
  if x.ndim != 2 or x.shape[0] != logits.shape[0]:
    raise ValueError(f'x {x.shape} must be [R, D] with R = {logits.shape[0]}')
  checks.floats(x=x)
  if not sends(x, whole, router, implementation=implementation):
    return None
  from pallas_kernels.route import gpu_few

  e = whole.shape[1]
  if len(logits) * e > gpu_few.MOST_ADDED:
    logits = reference.added(logits, e)
  chosen = _choose(whole, router, implementation)
  used, gates, rows, places, sizes, *plans = _send(
    x, logits, bias, replay, router, e, chosen
  )
  tables = zip(plans[::2], plans[1::2], strict=True)
  planned = groups.Planned(sizes, dict(zip(gpu_few.TILES, tables, strict=True)))
  return Sent(used, gates, rows, places, planned)


def sends(
  x: jax.Array,
  logits: jax.Array | jax.ShapeDtypeStruct,
  router: Router,
  *,
  implementation: str | None = None,
) -> bool:
  """Whether `send` gives something for such x [R, D] and logits [R, E]."""
  if not _choose(logits, router, implementation).startswith('gpu'):
    return False
  from pallas_kernels.route import gpu_few

  return gpu_few.unsupported(x, logits, router) is None


# --- Checks and choice -------------------------------------------------------


def _check(logits, bias, router: Router, replay, audit) -> None:
  if logits.ndim != 2 or logits.dtype != jnp.float32:
    raise ValueError(
      f'logits {logits.dtype}{logits.shape} must be float32 [R, E]'
    )
  rows, e = logits.shape
  if router.kind not in KINDS:
    raise ValueError(f'kind={router.kind!r}; known: {", ".join(KINDS)}')
  if not 1 <= router.k <= e:
    raise ValueError(f'k={router.k} of {e} experts; give 1 to {e}')
  size = e // max(router.groups, 1)
  if router.groups < 1 or e % router.groups:
    raise ValueError(f'groups={router.groups} do not divide {e} experts')
  if router.groups > 1 and (
    not 1 <= router.top_groups <= router.groups
    or size < 2
    or router.top_groups * size < router.k
  ):
    raise ValueError(
      f'top_groups={router.top_groups} of {router.groups} groups of {size}'
      f' experts leave no k={router.k}; a group needs two, and the best ones'
      ' together k'
    )
  checks.shape('[E]', (e,), bias=bias)
  checks.dtype(jnp.float32, bias=bias)
  if not router.plausibility >= 0:
    raise ValueError(f'plausibility={router.plausibility} is below 0')
  if replay is None:
    return
  if replay.shape != (rows, router.k) or replay.dtype not in (
    jnp.int16,
    jnp.int32,
  ):
    raise ValueError(
      f'replay {replay.dtype}{replay.shape} must be int16 or int32 [R, K] ='
      f' ({rows}, {router.k})'
    )
  if router.plausibility > 0 and not audit:
    raise ValueError(
      f'plausibility={router.plausibility} compares with native experts; give'
      ' audit=True'
    )
  _check_replay(checks.known(replay), e)


def _check_replay(known, e: int) -> None:
  if known is None or not known.size:
    return
  if known.max() >= e:
    raise ValueError(
      f'replay has expert {known.max()}, and there are {e}; -1 is unknown'
    )
  ordered = np.sort(known[(known >= 0).all(axis=1)], axis=1)
  twice = np.nonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1))[0]
  if len(twice):
    raise ValueError(
      f'replay has an expert twice in a row: {ordered[twice[0]].tolist()}; each'
      ' may be there once'
    )


def _choose(logits, router, implementation) -> str:
  faults = dict(gpu=None, tpu=None)
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.route import gpu
    from pallas_kernels.route import tpu

    faults = dict(
      gpu=gpu.unsupported(logits, router), tpu=tpu.unsupported(logits, router)
    )
  return dispatch.choose(NAME, implementation, **faults)


def _choose_order(experts, count, implementation) -> str:
  faults = dict(gpu=None, tpu=None)
  if implementation != 'reference' and (
    implementation is not None or dispatch.platform() != 'cpu'
  ):
    from pallas_kernels.route import gpu
    from pallas_kernels.route import tpu

    faults = dict(
      gpu=gpu.unsupported_order(experts, count),
      tpu=tpu.unsupported_order(experts, count),
    )
  return dispatch.choose('route.order', implementation, **faults)


# --- Values and gradients ----------------------------------------------------


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _route(logits, bias, replay, router, whole, chosen):
  return _forward(logits, bias, replay, router, whole, chosen)[0]


def _forward(logits, bias, replay, router, whole, chosen):
  if chosen == 'reference':
    found = reference.route(logits, bias, replay, router)
  elif chosen.startswith('tpu'):
    from pallas_kernels.route import tpu

    found = tpu.route(
      logits, bias, replay, router, interpret=chosen.endswith('interpret')
    )
  else:
    from pallas_kernels.route import gpu

    interpret = chosen.endswith('interpret')
    found = gpu.route(logits, bias, replay, router, whole, interpret=interpret)
  return found, (logits, bias, replay, found[0])


def _backward(router, whole, chosen, saved, cotangents):
  del whole, chosen
  return _pulled(*saved, router, saved[0].shape[1], cotangents[1])


def _pulled(logits, bias, replay, experts, router, e: int, dgates):
  """Cotangents of logits, bias and replay, of those of the gates."""

  def gates(logits):
    return reference.gates_of(reference.added(logits, e), experts, router)

  (dlogits,) = jax.vjp(gates, logits)[1](dgates)
  dbias = None if bias is None else jnp.zeros_like(bias)
  zero = None if replay is None else np.zeros(replay.shape, jax.dtypes.float0)
  return dlogits, dbias, zero


_route.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _send(x, logits, bias, replay, router, e, chosen):
  return _send_forward(x, logits, bias, replay, router, e, chosen)[0]


def _send_forward(x, logits, bias, replay, router, e, chosen):
  from pallas_kernels.route import gpu_few

  interpret = chosen.endswith('interpret')
  found = gpu_few.send(x, logits, bias, replay, router, e, interpret=interpret)
  experts, places = found[0], found[3]
  return found, (logits, bias, replay, experts, places)


def _send_backward(router, e, chosen, saved, cotangents):
  del chosen
  *routed, places = saved
  _, dgates, dsorted, *_ = cotangents
  back = _pulled(*routed, router, e, dgates)
  rows, k = routed[3].shape
  dslots = dsorted[places].reshape(rows, k, -1)
  dx = jnp.sum(dslots, axis=1, dtype=jnp.float32).astype(dslots.dtype)
  return dx, *back


_send.defvjp(_send_forward, _send_backward)
