"""Optimizers: Adam over named groups of parameters, pure and skippable.

Every parameter belongs to one group, by its name alone:

    matrix   decayed                      projections, experts, embeddings
    vector   not decayed                  norms, biases
    frozen   no gradient, no moments      the router's selection bias

What lies below `mtp` drafts for a model and is no part of it (`model/mtp.py`):
where it is trained, its gradient has a norm of its own, so that the model moves
as it would without; elsewhere it is frozen.

The selection bias is no weight: it never enters a gate. Mid-training balances
it (`midtrain.balance`), reinforcement leaves it as it is.

Masters, moments and updates are float32, whatever the forward computes in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from composer import params as params_lib

Array = jax.Array

FROZEN = ('router_bias', 'selection_bias')
VECTORS = ('norm', 'bias', 'scale')


def constant(
  learning_rate: float, warmup_steps: int, total_steps: int
) -> optax.Schedule:
  """lr min(1, (t + 1) / warmup) at step t: the first step moves too."""
  del total_steps
  return lambda count: learning_rate * _warmup(count, warmup_steps)


def cosine(
  learning_rate: float, warmup_steps: int, total_steps: int
) -> optax.Schedule:
  """Warm-up, then half a cosine from lr to 0 at `total_steps`."""

  def schedule(count: Array) -> Array:
    span = max(total_steps - warmup_steps, 1)
    done = jnp.clip((count - warmup_steps) / span, 0.0, 1.0)
    decay = 0.5 * (1.0 + jnp.cos(jnp.pi * done))
    return learning_rate * _warmup(count, warmup_steps) * decay

  return schedule


SCHEDULES: Mapping[str, Callable[[float, int, int], optax.Schedule]] = {
  'constant': constant,
  'cosine': cosine,
}


def _warmup(count: Array, warmup_steps: int) -> Array:
  return jnp.minimum(1.0, (count + 1.0) / max(warmup_steps, 1))


def schedule(
  name: str, learning_rate: float, warmup_steps: int, total_steps: int
) -> optax.Schedule:
  """A learning-rate schedule by name; counts the steps of its own stage."""
  if name not in SCHEDULES:
    raise ValueError(
      f'unknown schedule {name!r}; the known ones are {sorted(SCHEDULES)}'
    )
  if learning_rate <= 0 or warmup_steps < 0:
    raise ValueError(
      f'learning_rate={learning_rate} with warmup_steps={warmup_steps}; use a'
      ' positive rate and 0 or more steps'
    )
  return SCHEDULES[name](learning_rate, warmup_steps, total_steps)


def group(path: tuple[Any, ...]) -> str:
  """The group of the parameter at a tree path: by the last name in it."""
  name = str(getattr(path[-1], 'key', getattr(path[-1], 'name', path[-1])))
  if name in FROZEN:
    return 'frozen'
  if any(name == word or name.endswith(f'_{word}') for word in VECTORS):
    return 'vector'
  return 'matrix'


def drafts(path: tuple[Any, ...]) -> bool:
  """Whether the parameter at a tree path drafts for the model."""
  return str(getattr(path[0], 'key', '')) == 'mtp' if path else False


def groups(params: Any) -> Any:
  """Labels of all parameters, a tree like `params`."""
  return jax.tree_util.tree_map_with_path(lambda path, _: group(path), params)


def adam(
  learning_rate: optax.Schedule,
  *,
  max_grad_norm: float,
  weight_decay: float = 0.0,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  mtp: bool = False,
) -> optax.GradientTransformation:
  """AdamW (Loshchilov & Hutter, 2019) with the groups above.

  b2 is 0.95, as is usual for language models: the second moment follows the
  gradients of some twenty steps, and a stage here is short.

  Args:
    learning_rate: of step t of the stage.
    max_grad_norm: the gradient is scaled down to this global norm, frozen
      parameters left out; 0 clips nothing.
    weight_decay: of the group `matrix`, times the learning rate.
    b1: decay of the first moment.
    b2: decay of the second moment.
    eps: added to the root of the second moment.
    mtp: whether the parameters below `mtp` are trained, clipped by themselves.
  """
  if max_grad_norm < 0 or weight_decay < 0:
    raise ValueError(
      f'max_grad_norm={max_grad_norm}, weight_decay={weight_decay}; use 0 or'
      ' more'
    )
  clip = (
    optax.clip_by_global_norm(max_grad_norm)
    if max_grad_norm
    else optax.identity()
  )
  decayed = optax.add_decayed_weights(
    weight_decay,
    mask=lambda params: jax.tree.map(
      lambda label: label == 'matrix', groups(params)
    ),
  )
  trained = optax.chain(
    clip,
    optax.scale_by_adam(b1=b1, b2=b2, eps=eps, mu_dtype=jnp.float32),
    decayed if weight_decay else optax.identity(),
    optax.scale_by_learning_rate(learning_rate),
  )
  parts = {'trained': trained, 'frozen': optax.set_to_zero()}
  if mtp:
    parts['mtp'] = trained

  def label(path: tuple[Any, ...], _: Any) -> str:
    if group(path) == 'frozen':
      return 'frozen'
    if drafts(path):
      return 'mtp' if mtp else 'frozen'
    return 'trained'

  return optax.partition(
    parts, lambda params: jax.tree_util.tree_map_with_path(label, params)
  )


def apply(
  optimizer: optax.GradientTransformation,
  params: Any,
  opt_state: Any,
  grads: Any,
  skip: Array | bool = False,
) -> tuple[Any, Any, dict[str, Array]]:
  """One step: (params, opt_state, stats).

  A step is skipped if `skip` says so, if the gradient is not finite, and if it
  is zero throughout (a batch without one mixed group). A skipped step moves
  nothing: no parameter by weight decay or old momentum, no moment, no schedule.

  Returns:
    params and opt_state, new or as they were, and float32 scalars: `grad_norm`
    (before clipping, trained parameters only, none below `mtp`), `update_norm`
    and `skipped`.
  """
  grads = jax.tree_util.tree_map_with_path(
    lambda path, g: (
      jnp.zeros_like(g, jnp.float32)
      if group(path) == 'frozen'
      else g.astype(jnp.float32)
    ),
    grads,
  )
  norm = optax.tree.norm(params_lib.without_drafts(grads))
  skip = jnp.asarray(skip) | ~jnp.isfinite(norm) | (norm == 0.0)
  # The branch not taken must stay finite too.
  safe = jax.tree.map(lambda g: jnp.where(skip, jnp.zeros_like(g), g), grads)
  updates, moved_state = optimizer.update(safe, opt_state, params)
  moved = optax.apply_updates(params, updates)

  def keep(old, new):
    return jax.tree.map(lambda a, b: jnp.where(skip, a, b), old, new)

  stats = {
    'grad_norm': norm,
    'update_norm': jnp.where(
      skip, 0.0, optax.tree.norm(params_lib.without_drafts(updates))
    ),
    'skipped': skip.astype(jnp.float32),
  }
  return keep(params, moved), keep(opt_state, moved_state), stats
