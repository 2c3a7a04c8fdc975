"""What `composer bench mismatch` compiles while its model is still being trained."""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.bench import ahead
from composer.bench import mismatch_inputs as inputs
from composer.inference import engine as engine_lib
from composer.model import transformer
from composer.rl import trainer


@contextlib.contextmanager
def compilations() -> Iterator[list[float]]:
  """Seconds of every program that the process compiles meanwhile, as they end."""
  seconds: list[float] = []

  def listen(event: str, took: float, **_: Any) -> None:
    if event.endswith('backend_compile_duration'):
      seconds.append(took)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield seconds
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


def stage(stage: inputs.Stage, batch: Any) -> Any:
  """The training step of a stage; `batch` is one of those to come."""
  params = params_lib.abstract(transformer.spec(stage.model))
  state = jax.eval_shape(lambda p: inputs.init_state(stage, p), params)
  return stage.step.lower(state, batch).compile()


def engine(experiment: config_lib.Experiment) -> engine_lib.Engine:
  """A warm engine, whose version 0 has zeros for weights; close it."""
  model = experiment.model
  one = engine_lib.Engine(model, experiment.numerics, experiment.engine)
  try:
    shapes = _published(model)
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    one.activate(0, engine_lib.widen(empty))
    one.wait_active(0)
    one.warm_up(seconds=ahead.LIMIT_S)
  except BaseException:
    one.close()
    raise
  return one


def score(experiment: config_lib.Experiment, step: trainer.Step) -> Any:
  """The trainer's forward."""
  shapes = _published(experiment.model)
  batch = trainer.place(step, blank(experiment))
  return step.score.lower(shapes, batch, np.bool_(True)).compile()


def gradient(experiment: config_lib.Experiment, step: trainer.Step) -> Any:
  """The trainer's forward and backward pass."""
  shapes = params_lib.abstract(transformer.spec(experiment.model))
  batch = trainer.place(step, blank(experiment))
  return step.gradient.lower(shapes, batch).compile()


def _published(model: config_lib.ModelConfig) -> Any:
  spec = transformer.spec(model)
  shapes = params_lib.abstract(spec)
  return jax.eval_shape(lambda p: params_lib.to_published(spec, p), shapes)


def blank(experiment: config_lib.Experiment, seed: int = 0) -> records.Batch:
  """A full micro-batch of drawn tokens and routes, all of them sampled."""
  rl, model = experiment.rl, experiment.model
  shape = (rl.micro_batch, rl.sequence_length)
  rng = np.random.default_rng(seed)
  zeros = np.zeros(shape, np.float32)
  layers, k = transformer.moe_layers(model), model.experts_per_token
  routes = rng.permuted(
    np.broadcast_to(
      np.arange(model.experts, dtype=np.int16),
      (*shape, layers, model.experts),
    ),
    axis=-1,
  )[..., :k]
  return records.Batch(
    tokens=rng.integers(0, model.vocab_size, shape).astype(np.int32),
    segment_ids=np.ones(shape, np.int32),
    positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
    loss_mask=np.ones(shape, bool),
    behaviour_logprobs=zeros - 5.0,
    reference_logprobs=zeros,
    temperatures=zeros + 1.0,
    advantages=zeros + 1.0,
    experts=np.ascontiguousarray(routes),
    versions=np.zeros(shape, np.int32),
    weights=zeros + 1.0 / zeros.size,
    auditable=np.zeros(shape, bool),
  )
