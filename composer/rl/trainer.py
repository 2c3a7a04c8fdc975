"""One training step of RL, as pure functions of arrays.

A global step is cut into micro-batches of one shape, so nothing is compiled
twice. Their gradients add up, since every token carries its weight 1/N:

  1. `gradient`  loss gradient of one micro-batch, at the published form;
  2. `add`       over the micro-batches;
  3. `update`    one Adam step on the float32 masters.

`score` gives the trainer's logprobs at any parameters, with routes replayed or
native; audits and the reference of the KL term use it. With more than one
device the rows of a micro-batch lie on different devices and gradients are
summed over them; the result depends on neither. In `bitwise` every device first
gathers the whole model; in `fast` it does so layer by layer, experts stay on
their devices, and a row may be spread over several (`composer.mesh`).
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import chex
from flax import struct
import jax
from jax.experimental import multihost_utils
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import numpy as np

from composer import config as config_lib
from composer import mesh as mesh_lib
from composer import optim
from composer import params as params_lib
from composer import records
from composer.model import parallel
from composer.model import transformer
from composer.rl import loss as loss_lib
from composer.weights import forms

Array = jax.Array
Batch = records.Batch


@struct.dataclass
class Scored:
  """What `score` says of a micro-batch, aligned with its tokens."""

  logprobs: Array  # float32 [B, T]
  entropy: Array  # float32 [B, T]
  experts: Array  # int16 [B, T, L, K], in use
  native: Array  # int16 [B, T, L, K]


@dataclasses.dataclass(frozen=True)
class Step:
  """The jitted functions of one experiment on one mesh."""

  mesh: Mesh
  layout: mesh_lib.Layout | None
  gradient: Callable[[Any, Batch], tuple[Any, dict[str, Array]]]
  add: Callable[[Any, Any], Any]
  update: Callable[[Any, Any], tuple[Any, dict[str, Array]]]
  publishable: Callable[[Any], Any]
  score: Callable[..., Scored]
  state_shardings: Callable[[Any], Any]


def make_optimizer(config: config_lib.RLConfig):
  """Adam with warm-up and a constant rate, as Composer 2 used Adam."""
  schedule = optim.schedule(
    'constant', config.learning_rate, config.warmup_steps, config.steps
  )
  return optim.adam(
    schedule,
    max_grad_norm=config.max_grad_norm,
    weight_decay=config.weight_decay,
  )


def init_state(
  params: Any, config: config_lib.RLConfig, step: Any, key: Array
) -> records.TrainState:
  """The state that RL starts from: `params` of mid-training, fresh moments."""
  return records.TrainState(
    step=jnp.asarray(step, jnp.int32),
    version=jnp.full((), -1, jnp.int32),
    params=params,
    opt_state=make_optimizer(config).init(params),
    rng=key,
  )


def loss_fn(
  params: Any,
  batch: Batch,
  model: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  config: config_lib.RLConfig,
  layout: mesh_lib.Layout | None = None,
  form: str = 'bf16',
) -> tuple[Array, dict[str, Array]]:
  """Loss of one micro-batch and the sums of its metrics.

  Args:
    params: float32 masters; the forward rounds them to the published form.
    batch: packed, [B, T].
    model, numerics, config, form: static.
    layout: static; `params` and `batch` then are one device's, and so is the
      loss, which its devices of `context` have in common.

  Returns:
    (loss [], sums); both add up over micro-batches. `sums` holds too:
    'replayed' and 'not_replayed', token-layers whose known routes were used
    and were not (implausible ones).
  """
  chex.assert_equal_shape([batch.tokens, batch.loss_mask, batch.advantages])
  spec = transformer.spec(model)
  computed = params if layout else forms.as_computed(form, spec, params)
  replay = batch.experts if config.router_replay else None
  output = transformer.forward(
    computed,
    model,
    numerics,
    batch.tokens,
    batch.segment_ids,
    batch.positions,
    replay,
    config.plausibility,
    layout,
    audit=False,
  )
  logprobs, entropy = transformer.token_logprob(
    computed,
    model,
    numerics,
    output.hidden,
    batch.tokens,
    batch.temperatures,
    layout,
    batch.kept,
  )
  loss, sums = loss_lib.policy_loss(config.loss)(
    logprobs,
    batch.behaviour_logprobs,
    batch.advantages,
    batch.loss_mask,
    batch.weights,
    clip_low=config.clip_low,
    clip_high=config.clip_high,
    extra=loss_lib.Extra(
      segment_ids=batch.segment_ids,
      proximal_logprobs=jax.lax.stop_gradient(logprobs),
      entropy=jax.lax.stop_gradient(entropy),
    ),
  )
  sums |= _replayed(batch, output.experts, layout)
  sums['loss'] = loss
  return loss, sums


def _replayed(batch: Batch, used: Array, layout) -> dict[str, Array]:
  """How many known routes were used and were not; over `context` too."""
  wanted, segment_ids = batch.experts, batch.segment_ids
  if layout:
    wanted, segment_ids = (
      parallel.own(layout, a) for a in (wanted, segment_ids)
    )
  known = jnp.all(wanted >= 0, axis=-1)  # [B, T, L]
  same = jnp.all(wanted == used, axis=-1)
  real = known & (segment_ids > 0)[..., None]
  counts = {'replayed': real & same, 'not_replayed': real & ~same}
  counts = {n: jnp.sum(c, dtype=jnp.float32) for n, c in counts.items()}
  return jax.lax.psum(counts, 'context') if layout else counts


def _psum(sums: dict[str, Array]) -> dict[str, Array]:
  """Adds metrics over devices of other rows; `max_*` take the maximum."""
  return {
    name: (jax.lax.pmax if name.startswith('max_') else jax.lax.psum)(
      value, mesh_lib.ROWS
    )
    for name, value in sums.items()
  }


def make_step(
  model: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  config: config_lib.RLConfig,
  mesh: Mesh | None = None,
  parallel_config: config_lib.ParallelConfig | None = None,
  form: str = 'bf16',
) -> Step:
  """Compiles the step's functions for a mesh (one device where None).

  `form` is what the forward computes from, a name of `weights.forms`.
  """
  mesh = mesh_lib.make_mesh(jax.devices()[:1]) if mesh is None else mesh
  parallel_config = parallel_config or config_lib.ParallelConfig()
  layout = mesh_lib.train_layout(numerics, mesh, parallel_config)
  rules = mesh_lib.RULES[parallel_config.rules]
  if layout and form != 'bf16':
    raise ValueError(
      f'weights.form={form!r} is computed with whole matrices, and numerics.mode='
      f'{numerics.mode!r} over {mesh.size} devices shards them; use bf16, or'
      ' numerics.mode=bitwise'
    )
  spec = transformer.spec(model)
  by_name = mesh_lib.shardings(spec, rules, mesh)
  whole = NamedSharding(mesh, PartitionSpec())
  rows = PartitionSpec(mesh_lib.ROWS)
  held = mesh_lib.partitions(spec, layout) if layout else PartitionSpec()
  optimizer = make_optimizer(config)

  def local_gradient(params, batch):
    (_, sums), grads = jax.value_and_grad(loss_fn, has_aux=True)(
      params, batch, model, numerics, config, layout, form
    )
    # With a layout, gradients are summed and scattered where they are made.
    grads = grads if layout else jax.lax.psum(grads, mesh_lib.ROWS)
    return grads, _psum(sums)

  local_score = functools.partial(_local_score, model, numerics, layout)
  over_rows = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
  sharded_gradient = over_rows(
    local_gradient, in_specs=(held, rows), out_specs=(held, PartitionSpec())
  )
  sharded_score = over_rows(
    local_score, in_specs=(held, rows, PartitionSpec()), out_specs=rows
  )

  def update(state, grads):
    params, opt_state, stats = optim.apply(
      optimizer, state.params, state.opt_state, grads
    )
    moved = (stats['skipped'] == 0).astype(jnp.int32)
    state = state.replace(
      step=state.step + moved, params=params, opt_state=opt_state
    )
    return state, stats

  return Step(
    mesh=mesh,
    layout=layout,
    gradient=jax.jit(sharded_gradient, out_shardings=(by_name, whole)),
    add=jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b), donate_argnums=0),
    update=jax.jit(update, donate_argnums=0),
    # Where the masters lie: every process publishes what its devices hold.
    publishable=jax.jit(
      functools.partial(params_lib.to_published, spec), out_shardings=by_name
    ),
    score=jax.jit(
      lambda params, batch, replay: sharded_score(
        forms.computed(form, params), batch, replay
      ),
      out_shardings=NamedSharding(mesh, rows),
    ),
    state_shardings=lambda state: mesh_lib.like_params(
      state, spec, by_name, mesh
    ),
  )


def _local_score(model, numerics, layout, params, batch, replay) -> Scored:
  """What one device scores: its rows, whole."""
  output = transformer.forward(
    params,
    model,
    numerics,
    batch.tokens,
    batch.segment_ids,
    batch.positions,
    jnp.where(replay, batch.experts, -1),
    layout=layout,
  )
  logprobs, entropy = transformer.token_logprob(
    params,
    model,
    numerics,
    output.hidden,
    batch.tokens,
    batch.temperatures,
    layout,
    batch.kept,
  )
  routes = (output.experts, output.native)
  if layout:
    routes = tuple(parallel.whole(layout, a) for a in routes)
  return Scored(logprobs, entropy, *routes)


def place(step: Step, batch: Batch) -> Batch:
  """Host arrays [B, T, ...], equal in every process, onto the mesh by rows."""
  mesh_lib.check_batch(step.mesh, 'rl.micro_batch', *batch.tokens.shape)
  sharding = NamedSharding(step.mesh, PartitionSpec(mesh_lib.ROWS))

  def put(x):
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

  return jax.tree.map(put, batch)


def on_host(value: Any) -> Any:
  """numpy values of arrays that may be spread over processes."""
  if jax.process_count() > 1:
    return multihost_utils.process_allgather(value, tiled=True)
  return jax.tree.map(np.asarray, jax.device_get(value))


def accumulate(
  step: Step, params: Any, batches: list[Batch]
) -> tuple[Any, dict[str, float]]:
  """Gradient and metric sums of a global step, over its micro-batches."""
  grads, sums = None, None
  for batch in batches:
    g, s = step.gradient(params, place(step, batch))
    grads = g if grads is None else step.add(grads, g)
    sums = s if sums is None else loss_lib.add_sums(sums, s)
  if sums is None:
    raise ValueError('a step without micro-batches; skip it instead')
  return grads, {k: float(v) for k, v in on_host(sums).items()}
