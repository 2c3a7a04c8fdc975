"""Do rollout and trainer agree? Per numerics mode, with replay and without.

The same whole sessions are sampled by an engine in each mode and scored by the
trainer's forward in that mode. `composer bench mismatch` runs it on a model of
the quick start's shape; a run does it at its end with its own weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
import dataclasses
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.inference import engine as engine_lib
from composer.model import transformer
from composer.rl import audit
from composer.rl import trainer

MODES = ('bitwise', 'fast')
REPEATS = 5


@dataclasses.dataclass(frozen=True)
class Measured:
  """One mode: differences by replay, and tokens/s of both sides."""

  replay: dict[str, float]
  no_replay: dict[str, float]
  engine_tokens_per_s: float
  trainer_tokens_per_s: float


def measure(
  experiment: config_lib.Experiment,
  params: Any,
  contexts: Sequence[np.ndarray],
  new_tokens: int = 24,
) -> dict[str, Measured]:
  """Both modes on the same prompts and weights.

  Args:
    experiment: model, engine, shapes.
    params: published parameters.
    contexts: int32 [P] each; all are continued by `new_tokens` tokens.
    new_tokens: sampled a context.
  """
  if not contexts:
    raise ValueError('no contexts to continue; give at least one')
  found = {}
  for mode in MODES:
    numerics = dataclasses.replace(experiment.numerics, mode=mode)
    changed = dataclasses.replace(experiment, numerics=numerics)
    segments, engine_rate = _sample(changed, params, contexts, new_tokens)
    step = trainer.make_step(changed.model, numerics, changed.rl)
    audited = audit.audit(
      step,
      segments,
      {0: params},
      changed.rl,
      changed.model,
      numerics.kv_block,
    )
    scalars = audit.summary(segments, audited)
    flat = {k.removeprefix('mismatch/'): v for k, v in scalars.items()}
    plain = ('kl', 'k3', 'max_abs_logprob', 'p99_abs_logprob', 'differing')
    shared = {n: flat[n] for n in ('route_flip_rate', 'audited_tokens')}
    found[mode] = Measured(
      replay={**{n: flat[n] for n in plain}, **shared},
      no_replay={**{n: flat[f'no_replay/{n}'] for n in plain}, **shared},
      engine_tokens_per_s=engine_rate,
      trainer_tokens_per_s=_trainer_rate(changed, step, params),
    )
  return found


def _sample(experiment, params, contexts, new_tokens):
  """Continues every context; (segments, sampled tokens/s), compile excluded."""
  engine = engine_lib.Engine(
    experiment.model, experiment.numerics, experiment.engine
  )
  try:
    engine.activate(0, engine_lib.widen(params))
    requests = [
      records.SampleRequest(c, new_tokens, (), 1.0, seed)
      for seed, c in enumerate(contexts)
    ]

    async def go(part):
      return await asyncio.gather(*(engine.sample(r) for r in part))

    asyncio.run(go(requests))  # compiles every step size
    started = time.perf_counter()
    completions = asyncio.run(go(requests))
    seconds = time.perf_counter() - started
  finally:
    engine.close()
  segments = [
    _segment(r, c) for r, c in zip(requests, completions, strict=True)
  ]
  return segments, len(requests) * new_tokens / seconds


def _segment(request, completion) -> records.Segment:
  prompt, new = len(request.tokens), len(completion.tokens)
  pad = np.zeros(prompt, np.float32)
  sampled = np.arange(prompt + new) >= prompt
  return records.Segment(
    tokens=np.concatenate([request.tokens, completion.tokens]),
    sampled=sampled,
    logprobs=np.concatenate([pad, completion.logprobs]),
    temperatures=np.ones(prompt + new, np.float32),
    versions=np.where(sampled, 0, -1).astype(np.int32),
    experts=completion.experts,
    auditable=sampled,
    stop_reason='finished',
    parent=-1,
  )


def _trainer_rate(experiment, step, params) -> float:
  """Trained tokens/s of full micro-batches, forward and backward, median."""
  rl, model = experiment.rl, experiment.model
  shape = (rl.micro_batch, rl.sequence_length)
  rng = np.random.default_rng(0)
  zeros = np.zeros(shape, np.float32)
  batch = records.Batch(
    tokens=rng.integers(0, model.vocab_size, shape).astype(np.int32),
    segment_ids=np.ones(shape, np.int32),
    positions=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
    loss_mask=np.ones(shape, bool),
    behaviour_logprobs=zeros - 5.0,
    reference_logprobs=zeros,
    temperatures=zeros + 1.0,
    advantages=zeros + 1.0,
    experts=np.full(
      (*shape, transformer.moe_layers(model), model.experts_per_token),
      -1,
      np.int16,
    ),
    versions=np.zeros(shape, np.int32),
    weights=zeros + 1.0 / zeros.size,
    auditable=np.zeros(shape, bool),
  )
  masters = params_lib.widen(params)
  placed = trainer.place(step, batch)
  jax.block_until_ready(step.gradient(masters, placed))
  seconds = []
  for _ in range(REPEATS):
    started = time.perf_counter()
    jax.block_until_ready(step.gradient(masters, placed))
    seconds.append(time.perf_counter() - started)
  return zeros.size / float(np.median(seconds))


def table(found: dict[str, Measured]) -> str:
  """The measurement as text."""
  lines = [
    'mode     replay  differing  KL (k1)    KL (k3)    max |dlogprob|'
    '  flips      engine tok/s  trainer tok/s'
  ]
  for mode, m in found.items():
    for name, row in (('yes', m.replay), ('no', m.no_replay)):
      lines.append(
        f'{mode:8s} {name:6s}  {row["differing"]:9.4%}  {row["kl"]:9.2e}'
        f'  {row["k3"]:9.2e}  {row["max_abs_logprob"]:14.2e}'
        f'  {row["route_flip_rate"]:9.2e}  {m.engine_tokens_per_s:12,.0f}'
        f'  {m.trainer_tokens_per_s:13,.0f}'
      )
  return '\n'.join(lines)


def as_summary(found: dict[str, Measured]) -> dict[str, Any]:
  """Nested, as `metrics.write_summary` takes it."""
  return {
    mode: {'replay': m.replay, 'no replay': m.no_replay}
    for mode, m in found.items()
  }


def as_cost(found: dict[str, Measured]) -> dict[str, float]:
  """What `bitwise` costs: tokens/s of both sides, and the ratio to `fast`."""
  b, f = found['bitwise'], found['fast']
  return {
    'bitwise engine tokens/s': b.engine_tokens_per_s,
    'fast engine tokens/s': f.engine_tokens_per_s,
    'engine bitwise / fast': b.engine_tokens_per_s / f.engine_tokens_per_s,
    'bitwise trainer tokens/s': b.trainer_tokens_per_s,
    'fast trainer tokens/s': f.trainer_tokens_per_s,
    'trainer bitwise / fast': b.trainer_tokens_per_s / f.trainer_tokens_per_s,
  }


def run(json_path: pathlib.Path | None = None) -> int:
  """`composer bench mismatch`: random weights of the quick start's shape."""
  experiment = config_lib.Experiment(name='mismatch')
  spec = transformer.spec(experiment.model)
  drawn = params_lib.init(spec, jax.random.key(0))
  # Sharper than at initialisation, so that a changed bit can change a route.
  sharper = jax.tree.map(lambda x: x * jnp.float32(1.7), drawn)
  params = jax.jit(lambda p: params_lib.to_published(spec, p))(sharper)
  rng = np.random.default_rng(0)
  contexts = [
    rng.integers(16, experiment.model.vocab_size, size=n).astype(np.int32)
    for n in rng.integers(8, 120, size=256)
  ]
  found = measure(experiment, params, contexts)
  print(table(found))
  if json_path is not None:
    values = {m: dataclasses.asdict(v) for m, v in found.items()}
    json_path.write_text(json.dumps(values, indent=2))
  return 0
