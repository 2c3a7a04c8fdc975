"""Do rollout and trainer agree? Per numerics mode, with replay and without.

The same sessions are sampled by an engine in each mode and scored by the
trainer's forward in that mode, once with the recorded routes and once with its
own. `composer bench mismatch` runs it on an upcycled model
(`composer.bench.mismatch_inputs`) or on a checkpoint; a run does it at its end
with its own weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
import contextlib
import dataclasses
import functools
import itertools
import json
import pathlib
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.bench import ahead as ahead_lib
from composer.bench import mismatch_compile as compile_lib
from composer.bench import mismatch_inputs as inputs
from composer.inference import engine as engine_lib
from composer.model import checkpoints
from composer.model import transformer
from composer.rl import audit
from composer.rl import pack as pack_lib
from composer.rl import trainer
from composer.rollout import recorder as recorder_lib
from pallas_kernels import dispatch

MODES = ('bitwise', 'fast')  # at the end of a run
ALL_MODES = ('bitwise', 'aligned', 'fast')
REPEATS = 5
TOKENS = 12_000  # sampled by `composer bench mismatch`
STEPS = 250  # of the optimizer, before
LONGEST = 384  # tokens of a session
WAIT_S = 3600.0  # for all sessions of a mode


@dataclasses.dataclass(frozen=True)
class Measured:
  """One mode: differences by replay, and tokens/s of both sides.

  `replay` and `no_replay` have the differences of `audit.differences`, and
  `route_flip_rate`: the share of token-layers that the trainer would have routed
  differently, and that it did route differently. `engine` are counts of its work.
  `seconds` says what the measurement took, by part; those of compiling lie within
  the others.
  """

  replay: dict[str, float]
  no_replay: dict[str, float]
  engine_tokens_per_s: float
  trainer_tokens_per_s: float
  trainer_replay_tokens_per_s: float
  engine: dict[str, float]
  seconds: dict[str, float]


def measure(
  experiment: config_lib.Experiment,
  params: Any,
  contexts: Sequence[np.ndarray],
  new_tokens: int = 24,
  modes: Sequence[str] = MODES,
) -> dict[str, Measured]:
  """Modes on the same prompts and weights.

  Args:
    experiment: model, engine, shapes.
    params: published parameters.
    contexts: int32 [P] each; all are continued at once, by `new_tokens` tokens.
    new_tokens: sampled a context.
    modes: of the numerics.
  """
  if not contexts:
    raise ValueError('no contexts to continue; give at least one')
  nothing = np.zeros(0, np.int32)
  plans = [
    inputs.Plan(context, ((new_tokens, nothing),), 1.0, seed)
    for seed, context in enumerate(contexts)
  ]
  return measure_plans(experiment, params, plans, [slice(0, len(plans))], modes)


def measure_plans(
  experiment: config_lib.Experiment,
  params: Any,
  plans: Sequence[inputs.Plan],
  waves: Sequence[slice],
  modes: Sequence[str] = ALL_MODES,
  timed: tuple[config_lib.EngineConfig, Sequence[inputs.Plan]] | None = None,
  report: Callable[[dict[str, Measured]], None] = lambda found: None,
  sides: dict[str, Side] | None = None,
  wait: Callable[[str], Any] = lambda name: None,
) -> dict[str, Measured]:
  """`measure` of whole sessions, those of a wave at once.

  The engine's rate is that of the sessions, or the median of `REPEATS` batches of
  others and perhaps of another engine (`timed`), where the first is short of pages
  on purpose. `report` gets what is found after every mode. `sides` are made already;
  `wait` gives what is: a warm engine, and the trainer's functions compiled.
  """
  found: dict[str, Measured] = {}
  sides = sides or _sides(experiment, modes)
  for mode in modes:
    ready = {
      what: wait(f'{mode} {what}') for what in ('score', 'gradient', 'engine')
    }
    found[mode] = _measured(sides[mode], params, plans, waves, timed, ready)
    report(found)
  return found


def _measured(side, params, plans, waves, timed, ready) -> Measured:
  """One mode."""
  experiment, step = side
  engine = ready.pop('engine')
  compiled = {name: value for name, value in ready.items() if value is not None}
  step = dataclasses.replace(step, **compiled)
  spent: dict[str, float] = {}
  with compile_lib.compilations() as compiling:
    segments, stats, rate = _engine_side(
      experiment, params, plans, waves, timed, engine, spent
    )
    with _clock(spent, 'scores'):
      replay, no_replay = _compare(experiment, step, params, segments)
    with _clock(spent, 'gradients'):
      rates = _trainer_rates(experiment, step, params)
  spent['compiling'] = sum(compiling)
  rows = experiment.engine.rows
  return Measured(
    replay=replay,
    no_replay=no_replay,
    engine_tokens_per_s=rate,
    trainer_tokens_per_s=rates[False],
    trainer_replay_tokens_per_s=rates[True],
    engine={
      'sampled': stats.sampled,
      'steps': stats.steps,
      'rows a step': stats.rows / max(stats.steps, 1),
      'prompts beyond a step': sum(len(plan.prompt) > rows for plan in plans),
      'prompt tokens reused': stats.reused,
      'preempted': stats.preempted,
      'tokens computed again': stats.recomputed,
    },
    seconds=spent,
  )


@contextlib.contextmanager
def _clock(spent: dict[str, float], name: str) -> Iterator[None]:
  started = time.perf_counter()
  yield
  spent[name] = time.perf_counter() - started


class Side(NamedTuple):
  """A mode's numerics, in the experiment, and the trainer's functions."""

  experiment: config_lib.Experiment
  step: trainer.Step


def _sides(experiment, modes: Sequence[str]) -> dict[str, Side]:
  found = {}
  for mode in modes:
    numerics = dataclasses.replace(experiment.numerics, mode=mode)
    if experiment.model.kv_lora and mode == 'fast':
      numerics = dataclasses.replace(numerics, mla='split')
    changed = dataclasses.replace(experiment, numerics=numerics)
    step = trainer.make_step(changed.model, numerics, changed.rl)
    found[mode] = Side(changed, step)
  return found


# --- the engine's side ---------------------------------------------------------


def _engine_side(experiment, params, plans, waves, timed, ready, spent):
  """(segments, the engine's work on them, tokens/s); `ready` may be None."""
  wide = engine_lib.widen(params)
  with contextlib.ExitStack() as stack:
    with _clock(spent, 'start'):
      engine = stack.enter_context(_serving(experiment, wide, ready))
    with _clock(spent, 'sessions'):
      segments, stats, seconds = _serve(experiment, engine, plans, waves)
    rates = [stats.sampled / seconds]
    if timed is not None:
      config, batch = timed
      with _clock(spent, 'batches'):
        if config != experiment.engine:
          stack.close()
          roomy = dataclasses.replace(experiment, engine=config)
          engine = stack.enter_context(_serving(roomy, wide))
        rates = []  # a batch is over within a fraction of a second
        for repeat in range(REPEATS):
          _activate(engine, 2 + repeat, wide)  # forgets what pages hold
          whole = [slice(0, len(batch))]
          _, work, seconds = _serve(experiment, engine, batch, whole)
          rates.append(work.sampled / seconds)
  return segments, stats, float(np.median(rates))


@contextlib.contextmanager
def _serving(experiment, params, ready=None) -> Iterator[engine_lib.Engine]:
  """A warm engine at these parameters, `ready` or a new one; closed at the end."""
  engine = ready or engine_lib.Engine(
    experiment.model, experiment.numerics, experiment.engine
  )
  try:
    _activate(engine, 1, params)
    if ready is None:
      engine.warm_up()
    yield engine
  finally:
    engine.close()


def _activate(engine: engine_lib.Engine, version: int, params: Any) -> None:
  engine.activate(version, params)
  engine.wait_active(version)


def _serve(experiment, engine, plans, waves):
  """(segments, what of the engine's totals came to, seconds)."""
  segments: list[records.Segment] = []
  before = dataclasses.asdict(engine.stats)

  async def go() -> None:
    async with asyncio.timeout(WAIT_S):
      for wave in waves:
        segments.extend(
          await asyncio.gather(
            *(_session(experiment, engine, plan) for plan in plans[wave])
          )
        )

  started = time.perf_counter()
  asyncio.run(go())
  seconds = time.perf_counter() - started
  after = dataclasses.asdict(engine.stats)
  work = {name: value - before[name] for name, value in after.items()}
  return segments, engine_lib.Stats(**work), seconds


async def _session(experiment, engine, plan: inputs.Plan) -> records.Segment:
  model = experiment.model
  recorder = recorder_lib.Recorder(
    transformer.moe_layers(model), model.experts_per_token
  )
  context = plan.prompt
  for turn, (count, answer) in enumerate(plan.turns):
    request = records.SampleRequest(
      context, count, (), plan.temperature, plan.seed * 64 + turn
    )
    completion = await engine.sample(request)
    recorder.record(context, completion, plan.temperature)
    context = np.concatenate([context, completion.tokens, answer])
  (segment,) = recorder.finish('finished')
  return segment


# --- the trainer's side --------------------------------------------------------


def _compare(experiment, step, params, segments):
  """(differences with the recorded routes, differences with its own)."""
  model, rl = experiment.model, experiment.rl
  batches, placements = pack_lib.pack(
    [pack_lib.Item(segment, 0.0) for segment in segments],
    rl.micro_batch,
    rl.sequence_length,
    experiment.numerics.kv_block,
    transformer.moe_layers(model),
    model.experts_per_token,
    rl.loss_tokens,
    model.experts,
  )
  out = []
  for replay in (True, False):
    logprobs, flips, known = [], 0, 0
    for batch in batches:
      scored = trainer.on_host(
        step.score(params, trainer.place(step, batch), np.bool_(replay))
      )
      logprobs.append(scored.logprobs)
      own = scored.native if replay else scored.experts
      recorded = (batch.experts >= 0).all(-1)  # [B, T, L]
      same = np.sort(own, -1) == np.sort(batch.experts, -1)
      flips += int((recorded & ~same.all(-1)).sum())
      known += int(recorded.sum())
    columns = pack_lib.unpack(logprobs, placements)
    behaviour, scored = (
      np.concatenate(
        [x[s.auditable] for x, s in zip(values, segments, strict=True)]
      ).astype(np.float64)
      for values in ([s.logprobs for s in segments], columns)
    )
    out.append(
      {
        **audit.differences(behaviour, scored),
        'route_flip_rate': flips / known if known else 0.0,
        'audited_tokens': float(behaviour.size),
      }
    )
  return out


def _trainer_rates(experiment, step, params) -> dict[bool, float]:
  """Trained tokens/s of full micro-batches, forward and backward, by replay.

  The two are timed in turn, and their medians taken.
  """
  batch = compile_lib.blank(experiment)
  masters = params_lib.widen(params)
  native = batch.replace(experts=np.full_like(batch.experts, -1))
  placed = {
    replay: trainer.place(step, x)
    for replay, x in ((True, batch), (False, native))
  }
  seconds: dict[bool, list[float]] = {True: [], False: []}
  for repeat in range(REPEATS + 1):  # the first compiles
    for replay, one in placed.items():
      started = time.perf_counter()
      jax.block_until_ready(step.gradient(masters, one))
      if repeat:
        seconds[replay].append(time.perf_counter() - started)
  size = batch.tokens.size
  return {r: size / float(np.median(x)) for r, x in seconds.items()}


# --- what is shown -------------------------------------------------------------

HEADER = (
  'mode     replay  differing  KL (k1)    KL (k3)    max |dlogprob|'
  '  flips      engine tok/s  trainer tok/s'
)


def table(found: dict[str, Measured]) -> str:
  """The measurement as text; 'flips' of a replayed row would have been some."""
  return '\n'.join(
    [HEADER, *(line for m in found.items() for line in rows(*m))]
  )


def rows(mode: str, m: Measured) -> list[str]:
  """Two lines under `HEADER`."""
  return [
    f'{mode:8s} {name:6s}  {row["differing"]:9.4%}  {row["kl"]:9.2e}'
    f'  {row["k3"]:9.2e}  {row["max_abs_logprob"]:14.2e}'
    f'  {row["route_flip_rate"]:9.2e}  {m.engine_tokens_per_s:12,.0f}'
    f'  {rate:13,.0f}'
    for name, row, rate in (
      ('yes', m.replay, m.trainer_replay_tokens_per_s),
      ('no', m.no_replay, m.trainer_tokens_per_s),
    )
  ]


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


def run(
  json_path: pathlib.Path | None = None,
  *,
  tokens: int = TOKENS,
  train_steps: int = STEPS,
  checkpoint: str = '',
  compute: str = 'bfloat16',
  attention: str = 'grouped',
  mode: str = '',
) -> int:
  """`composer bench mismatch`; every mode is shown when it is measured.

  Args:
    json_path: where to write it too.
    tokens: sampled in each mode, about.
    train_steps: of the upcycled model.
    checkpoint: a model to take instead.
    compute: of activations and products, 'bfloat16' or 'float32'.
    attention: of the model on an accelerator, 'grouped' or 'latent'.
    mode: the only one to measure; '' for all.

  Raises:
    ValueError: too few tokens or steps, or no such model or mode.
  """
  _check(tokens, compute, attention, mode)
  numerics, rl, extra = _setting(compute, attention)
  modes, started = (mode,) if mode else ALL_MODES, time.perf_counter()

  def say(line: str) -> None:
    _say(f'{time.perf_counter() - started:4.0f} s  {line}')

  if checkpoint:
    model, params = checkpoints.load(checkpoint, dtype=jnp.bfloat16)
  else:
    stages = inputs.stages(train_steps, numerics, **extra)
    model, params = stages[-1].model, None
  longest = rl.sequence_length
  experiment = config_lib.Experiment(
    name='mismatch',
    model=model,
    numerics=numerics,
    engine=inputs.engine_config(longest, numerics),
    rl=rl,
  )
  sides = _sides(experiment, modes)
  plans, waves = inputs.load(
    tokens, model.vocab_size, experiment.engine, numerics.kv_block
  )
  ahead = ahead_lib.ahead(say)
  try:
    # On a CPU it would take the time from what runs.
    start = _start if dispatch.platform() != 'cpu' else lambda *_: None
    if params is None:
      batches = inputs.batches(numerics.kv_block, stages[0].config)
      first = next(batches)
      start(ahead, sides, stages, first)
      batches = itertools.chain([first], batches)
      params = inputs.trained(stages, batches, say, ahead.wait)
    else:
      start(ahead, sides)
    ahead.wait_all()
    device = jax.devices()[0].device_kind
    say(f'{len(plans):,} sessions, {compute}, {device}')
    found = measure_plans(
      experiment,
      params,
      plans,
      waves,
      modes,
      timed=_timed(experiment),
      report=functools.partial(_report, say, json_path),
      sides=sides,
      wait=ahead.wait,
    )
  finally:
    ahead.close()
  _say(table(found))
  return 0


def _check(tokens: int, compute: str, attention: str, mode: str) -> None:
  if tokens < 1:
    raise ValueError(f'--tokens={tokens}; sample at least 1')
  if compute not in ('bfloat16', 'float32'):
    raise ValueError(f'--compute={compute}; use bfloat16 or float32')
  if attention not in inputs.WIDE_MODELS:
    raise ValueError(
      f'--attention={attention} is not known; choose one of'
      f' {", ".join(inputs.WIDE_MODELS)}'
    )
  if mode and mode not in ALL_MODES:
    raise ValueError(
      f'--mode={mode} is not known; choose one of {", ".join(ALL_MODES)}'
    )


def _report(
  say: Callable[[str], None],
  json_path: pathlib.Path | None,
  found: dict[str, Measured],
) -> None:
  """Shows the newest mode, and writes all."""
  mode, m = list(found.items())[-1]
  work = ', '.join(
    f'{v:,.1f} {k}' if isinstance(v, float) else f'{v:,} {k}'
    for k, v in m.engine.items()
  )
  took = ', '.join(f'{k} {v:,.1f}' for k, v in m.seconds.items())
  say(f'{mode}: {work}')
  say(f'{mode}: seconds: {took}')
  _say('\n'.join([HEADER, *rows(mode, m)]))
  if json_path is not None:
    values = {m: dataclasses.asdict(v) for m, v in found.items()}
    json_path.write_text(json.dumps(values, indent=2))


def _start(
  ahead: ahead_lib.Ahead,
  sides: dict[str, Side],
  stages: Sequence[inputs.Stage] = (),
  batch: Any = None,
) -> None:
  """Compiles all of it at once, in the order of use."""
  for stage in stages:
    ahead.start(stage.name, functools.partial(compile_lib.stage, stage, batch))
  for mode, (experiment, step) in sides.items():
    engine = functools.partial(compile_lib.engine, experiment)
    score = functools.partial(compile_lib.score, experiment, step)
    gradient = functools.partial(compile_lib.gradient, experiment, step)
    ahead.start(f'{mode} engine', engine)
    ahead.start(f'{mode} score', score)
    ahead.start(f'{mode} gradient', gradient)


def _setting(
  compute: str, attention: str
) -> tuple[config_lib.NumericsConfig, config_lib.RLConfig, dict[str, Any]]:
  """(numerics, the trainer's shapes, what `inputs.trained` takes besides)."""
  if dispatch.platform() == 'cpu':
    numerics = config_lib.NumericsConfig(compute=compute)
    rl = config_lib.RLConfig(micro_batch=8, sequence_length=LONGEST)
    return numerics, rl, {}
  numerics = config_lib.NumericsConfig(
    compute=compute, kv_block=64, moe='sorted', row_block=64
  )
  rl = config_lib.RLConfig(micro_batch=32, sequence_length=2 * LONGEST)
  extra = {
    'dense': inputs.WIDE_MODELS[attention],
    'midtraining': inputs.WIDE_MIDTRAIN,
  }
  return numerics, rl, extra


def _timed(experiment) -> tuple[config_lib.EngineConfig, list[inputs.Plan]]:
  """An engine and sessions that it has the pages for, all at once."""
  engine, block = experiment.engine, experiment.numerics.kv_block
  longest, vocabulary = engine.max_context, experiment.model.vocab_size
  if dispatch.platform() == 'cpu':
    pages = engine.sequences * (longest // block) + 1
    engine = dataclasses.replace(engine, pages=pages)
    return engine, inputs.batch(engine.sequences, vocabulary, longest)
  # The same shapes: another engine would have all its programs compiled anew.
  a_session = -(-(longest // 8 + longest // 4) // block)
  count = min(engine.sequences, (engine.pages - 1) // a_session)
  return engine, inputs.batch(count, vocabulary, longest)


def _say(line: str) -> None:
  print(line, flush=True)
