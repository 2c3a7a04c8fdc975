"""Mid-training: next-token prediction, and the loop around it.

One step, in four moves:

1. the transformer gives the logprob of every token given those before it;
2. the loss is their mean over the tokens of the loss mask, in float32;
3. Adam moves the masters;
4. the router's selection bias moves a fixed step towards equal load, outside
   of the gradient (Wang et al., 2024, "Auxiliary-loss-free load balancing").

With `model.mtp_layers` a layer that drafts learns beside the model, from step
`midtrain.mtp_start` on (`model/mtp.py`). Unless `midtrain.mtp_joint`, the model
moves as it would without it, bit for bit.

The supervised stage is the same with a mask (`data.midtraining(sampled_only)`).
There is no rollout to agree with, so the numerics are `fast`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import time
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
import numpy as np
import optax

from composer import checkpoint
from composer import config as config_lib
from composer import mesh as mesh_lib
from composer import optim
from composer import params as params_lib
from composer import records
from composer.model import mtp
from composer.model import parallel
from composer.model import transformer

Array = jax.Array
Scalars = dict[str, float]
Step = Callable[
  [records.TrainState, Mapping[str, Array]],
  tuple[records.TrainState, dict[str, Array]],
]


_MOST_SKIPPED = 10


def next_token_loss(
  logprobs: Array, loss_mask: Array, layout: mesh_lib.Layout | None = None
) -> Array:
  """-(1/N) sum_t logprob_t over the mask; N is its number of tokens.

  N is that of the global batch, so neither the loss nor its gradient depends
  on how the batch is sharded. What stands outside of the mask is never read.

  Args:
    logprobs: [B, T], of each token given those before it.
    loss_mask: bool [B, T].
    layout: static; these are one device's rows, and the result its summand.

  Returns:
    float32 []; 0 for an empty mask.
  """
  chex.assert_equal_shape([logprobs, loss_mask])
  count = jnp.sum(loss_mask, dtype=jnp.float32)
  if layout:
    count = parallel.sum_rows(count)
  count = jnp.maximum(count, 1.0)
  kept = jnp.where(loss_mask, logprobs.astype(jnp.float32), 0.0)
  return -jnp.sum(kept) / count


def loss_fn(
  params: records.Params,
  batch: Mapping[str, Array],
  config: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  layout: mesh_lib.Layout | None = None,
) -> tuple[Array, Array]:
  """(loss [], load [L, E]) of a batch from `composer.data`.

  The forward computes with what would be published: the float32 masters
  rounded to that form, the gradient passing straight through. With a layout,
  parameters, batch and loss are one device's.
  """
  if layout is None:
    params = params_lib.as_computed(transformer.spec(config), params)
  loss, output = _next_tokens(params, batch, config, numerics, layout)
  return loss, output.load


def _next_tokens(params, batch, config, numerics, layout=None):
  """(loss, `Output`) of parameters in the form that is computed with."""
  tokens = batch['tokens']  # [B, T]
  output = transformer.forward(
    params,
    config,
    numerics,
    tokens,
    batch['segment_ids'],
    batch['positions'],
    layout=layout,
    audit=False,
  )
  logprobs, _ = transformer.token_logprob(
    params,
    config,
    numerics,
    output.hidden,
    tokens,
    jnp.ones(tokens.shape, jnp.float32),
    layout,
  )
  return next_token_loss(logprobs, batch['loss_mask'], layout), output


def loss_with_drafts(
  params: records.Params,
  batch: Mapping[str, Array],
  step: Array,
  config: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  stage: config_lib.MidtrainConfig,
) -> tuple[Array, tuple[Array, Array, mtp.Distilled]]:
  """The loss of `loss_fn`, and the weighted one of the layer that drafts.

  Before `stage.mtp_start` drafts are not computed, and all of theirs is 0.

  Args:
    params, batch, config, numerics: see `loss_fn`.
    step: int32 [], how many were done before this one.
    stage: static.

  Returns:
    (the sum of both [], (that of `loss_fn` [], load [L, E], of the drafts)).
  """
  params = params_lib.as_computed(transformer.spec(config), params)
  loss, output = _next_tokens(params, batch, config, numerics)

  def distil(params, hidden):
    return mtp.distil(
      params,
      config,
      numerics,
      hidden,
      batch,
      stage.mtp_depth,
      detach=not stage.mtp_joint,
    )

  def nothing(*arguments):
    shapes = jax.eval_shape(distil, *arguments)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

  drafts = jax.lax.cond(
    step >= stage.mtp_start, distil, nothing, params, output.hidden
  )
  total = loss + stage.mtp_weight * drafts.loss
  return total, (loss, output.load, drafts)


def _spread_gradient(config, numerics, layout, params, batch):
  """((loss, load), gradients) of a batch that lies over the layout's mesh."""
  held = mesh_lib.partitions(transformer.spec(config), layout)
  whole, rows = PartitionSpec(), PartitionSpec(mesh_lib.ROWS)

  def local(params, batch):
    (loss, load), grads = jax.value_and_grad(loss_fn, has_aux=True)(
      params, batch, config, numerics, layout
    )
    return (parallel.sum_rows(loss), load), grads

  return jax.shard_map(
    local,
    mesh=layout.mesh,
    in_specs=(held, rows),
    out_specs=((whole, whole), held),
    check_vma=False,
  )(params, batch)


def balance(bias: Array, load: Array, rate: float) -> Array:
  """b_e + rate * sign(mean(load) - load_e), a step of the selection bias.

  Args:
    bias: float32 [L, E].
    load: [L, E], tokens (or their share) that each expert got.
    rate: size of the step.
  """
  chex.assert_equal_shape([bias, load])
  load = load.astype(jnp.float32)
  gap = jnp.mean(load, axis=-1, keepdims=True) - load
  return bias + rate * jnp.sign(gap)


def balance_params(
  params: Any, load: Array, rate: Array | float, drafts: Array | None = None
) -> Any:
  """`params` with every selection bias moved; the rest as it is.

  `load` is that of the model's layers, `drafts` [1, E] that of `mtp`, whose
  bias stays where it is None.
  """

  def move(path, leaf):
    own = drafts if optim.drafts(path) else load
    if optim.group(path) != 'frozen' or own is None:
      return leaf
    return balance(leaf, own, rate)

  return jax.tree_util.tree_map_with_path(move, params)


def make_optimizer(
  config: config_lib.MidtrainConfig, mtp: bool = False
) -> optax.GradientTransformation:
  """`mtp`: whether there is a layer that drafts, and it learns."""
  return optim.adam(
    learning_rate(config),
    max_grad_norm=config.max_grad_norm,
    weight_decay=config.weight_decay,
    mtp=mtp,
  )


def learning_rate(config: config_lib.MidtrainConfig) -> optax.Schedule:
  return optim.schedule(
    config.schedule, config.learning_rate, config.warmup_steps, config.steps
  )


def init_state(
  params: records.Params, config: config_lib.MidtrainConfig, key: Array
) -> records.TrainState:
  """The state that the stage starts from: step 0, version 0."""
  optimizer = make_optimizer(config, 'mtp' in params and config.mtp_weight > 0)
  return records.TrainState(
    step=jnp.zeros((), jnp.int32),
    version=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    rng=key,
  )


def check_layout(
  model: config_lib.ModelConfig,
  config: config_lib.MidtrainConfig,
  layout: mesh_lib.Layout | None,
) -> None:
  """Raises ValueError where a layer that drafts is to learn over a layout."""
  learns = model.mtp_layers and config.mtp_weight > 0 and config.steps
  if learns and layout is not None:
    raise ValueError(
      f'model.mtp_layers={model.mtp_layers} is trained where a device computes a'
      f' step whole, and there are {layout.mesh.size}; set midtrain.mtp_weight=0'
      ' to leave it as it is, or train on one'
    )


def make_train_step(
  model: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  config: config_lib.MidtrainConfig,
  layout: mesh_lib.Layout | None = None,
) -> Step:
  """Jitted `(state, batch) -> (state, metrics)`; the state is donated.

  With a layout, state and batch lie over its mesh, and a layer is gathered when
  it computes; without one, wherever they lie, XLA decides.

  Raises:
    ValueError: see `check_layout`.
  """
  check_layout(model, config, layout)
  drafting = bool(model.mtp_layers) and config.mtp_weight > 0
  optimizer, rate = make_optimizer(config, drafting), learning_rate(config)
  gradient = functools.partial(
    jax.value_and_grad(loss_fn, has_aux=True), config=model, numerics=numerics
  )
  if layout is not None:
    gradient = functools.partial(_spread_gradient, model, numerics, layout)

  def losses(state, batch):
    if not drafting:
      (loss, load), grads = gradient(state.params, batch)
      return loss, load, None, grads
    both = jax.value_and_grad(loss_with_drafts, has_aux=True)
    (_, (loss, load, drafts)), grads = both(
      state.params, batch, state.step, model, numerics, config
    )
    return loss, load, drafts, _finite_drafts(grads)

  def train_step(state, batch):
    loss, load, drafts, grads = losses(state, batch)
    params, opt_state, stats = optim.apply(
      optimizer,
      state.params,
      state.opt_state,
      grads,
      skip=~jnp.isfinite(loss),
    )
    moved = stats['skipped'] == 0.0
    bias_rate = jnp.where(moved, config.router_bias_rate, 0.0)
    metrics = {
      'loss': loss,
      'loss_tokens': jnp.sum(batch['loss_mask'], dtype=jnp.float32),
      'load_max': _load_max(load),
      'learning_rate': jnp.asarray(rate(state.step), jnp.float32),
      **stats,
      **(_of_drafts(drafts) if drafting else {}),
    }
    state = state.replace(
      step=state.step + moved.astype(jnp.int32),
      params=balance_params(
        params, load, bias_rate, drafts.load if drafting else None
      ),
      opt_state=opt_state,
    )
    return state, metrics

  return jax.jit(train_step, donate_argnums=0)


def _finite_drafts(grads: Any) -> Any:
  """The gradient, that of `mtp` 0 where it is not finite: it skips no step."""
  finite = jnp.isfinite(optax.tree.norm(grads['mtp']))
  kept = jax.tree.map(lambda g: jnp.where(finite, g, 0.0), grads['mtp'])
  return {**grads, 'mtp': kept}


def _of_drafts(drafts: mtp.Distilled) -> dict[str, Array]:
  """Metrics by how many tokens further a draft lies."""
  found = {}
  for n in range(len(drafts.kl)):
    ending = '' if not n else f'_{n + 1}'
    found[f'mtp_kl{ending}'] = drafts.kl[n]
    found[f'mtp_accept{ending}'] = drafts.accept[n]
  return found


def _load_max(load: Array) -> Array:
  """Load of the busiest expert over the mean one; 1 is balance, E the worst."""
  load = load.astype(jnp.float32)
  if not load.size:  # a dense model
    return jnp.zeros((), jnp.float32)
  mean = jnp.maximum(jnp.mean(load, axis=-1), 1e-9)
  return jnp.max(jnp.max(load, axis=-1) / mean)


def run(
  experiment: config_lib.Experiment,
  directory: str,
  state: records.TrainState,
  batches: Iterator[Mapping[str, np.ndarray]],
  *,
  identity: Mapping[str, Any],
  report: Callable[[int, Scalars], None] = lambda step, scalars: None,
  place: Callable[[Mapping[str, np.ndarray]], Mapping[str, Array]] = dict,
  should_stop: Callable[[], bool] = lambda: False,
  resume: bool = False,
  layout: mesh_lib.Layout | None = None,
) -> records.TrainState:
  """Runs the stage to its end, or on from its newest checkpoint.

  Args:
    experiment: `midtrain`, `model`, `numerics` and `checkpoint` are read.
    directory: of the stage's checkpoints; the stage ends with one.
    state: from `init_state`; donated.
    batches: a grain iterator (`get_state`, `set_state`) of `composer.data`.
    identity: from `checkpoint.identity`.
    report: gets (steps done, scalars), one step late: the device never waits.
    place: puts a batch on the devices.
    should_stop: asked after each step; true saves and ends the stage early.
    resume: continue from `directory` where it holds a checkpoint.
    layout: see `make_train_step`.

  Returns:
    the state at the end.

  Raises:
    ValueError: `directory` holds checkpoints and `resume` is false, or they
      are of another model.
    OSError: a checkpoint could not be written.
    FloatingPointError: ten steps in a row were skipped.
  """
  config, every = experiment.midtrain, experiment.checkpoint.every
  state, done = _begin(directory, state, batches, identity, resume)
  train_step = make_train_step(
    experiment.model,
    dataclasses.replace(experiment.numerics, mode='fast'),
    config,
    layout,
  )
  pending, saving, skipped, since = None, None, 0, time.monotonic()
  stopped = False
  try:
    while not stopped and done < config.steps:
      state, metrics = train_step(state, place(next(batches)))
      done += 1
      if pending is not None:
        skipped = _report(report, *pending, since, skipped)
        since = time.monotonic()
      pending = (done, metrics)
      stopped = should_stop()
      if stopped or done == config.steps or (every and done % every == 0):
        if saving is not None:
          saving.wait()
        saving = checkpoint.save(
          directory,
          done,
          state,
          {'batches': done, 'data': batches.get_state()},
          identity=identity,
          keep=experiment.checkpoint.keep,
        )
    if pending is not None:
      _report(report, *pending, since, skipped)
  finally:
    # Whatever ended the loop, nobody may write here behind its back: the next
    # run could start in this very process.
    if saving is not None:
      saving.wait()
  return state


def _begin(
  directory: str,
  state: records.TrainState,
  batches: Iterator[Mapping[str, np.ndarray]],
  identity: Mapping[str, Any],
  resume: bool,
) -> tuple[records.TrainState, int]:
  """The state to start from, and the batches it has seen."""
  newest = checkpoint.latest(directory)
  if newest is None:
    return state, 0
  if not resume:
    raise ValueError(
      f'{directory} holds a checkpoint of step {newest} already; continue with'
      ' --resume, or choose another --workdir'
    )
  state, extras = checkpoint.restore(
    directory, checkpoint.abstract(state), identity=identity
  )
  batches.set_state(extras['data'])
  return state, extras['batches']


def _report(
  report: Callable[[int, Scalars], None],
  step: int,
  metrics: Mapping[str, Array],
  since: float,
  skipped: int,
) -> int:
  """Reports a finished step; returns how many in a row were skipped.

  Nothing is computed here: on CPU a new operation would queue behind the step
  that is running, and the wait would no longer be one step late.
  """
  scalars = {k: float(v) for k, v in jax.device_get(dict(metrics)).items()}
  skipped = skipped + 1 if scalars['skipped'] else 0
  if skipped >= _MOST_SKIPPED:
    raise FloatingPointError(
      f'{skipped} mid-training steps in a row were skipped, the last one step'
      f' {step} with loss {scalars["loss"]}; lower midtrain.learning_rate, or'
      ' look for batches without loss tokens'
    )
  tokens = scalars.pop('loss_tokens')
  scalars['tokens_per_s'] = tokens / max(time.monotonic() - since, 1e-9)
  report(step, {f'midtrain/{name}': v for name, v in scalars.items()})
  return skipped
