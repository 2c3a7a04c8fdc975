"""How fast the engine serves.

    composer bench engine [--shape NAME] [--checkpoint DIR] [--batch B,B]
                          [--load FILE] [--mode MODE] [--json FILE] [--compare]

Three measurements, of random weights of a shape (`engine_shapes`: the quick
start's on a CPU, SmolLM2-135M's elsewhere, unless named) or of a checkpoint:

  batches   B requests all at once, and the same again for one token of each: the
            difference is decoding. Tokens/s of all, the share of the roofline (the
            time that the bytes and the arithmetic of a decode step take at this
            device's measured ceilings) that decoding reached, the share of the
            rate of a large product that prompts reached, and the tokens/s of
            `transformers` where it can be imported
            Where a share is above 1, or the ceilings are others at the end, a
            line says so: something else ran beside them
  recording the same decode steps with and without logprobs and routes
  sessions  the trace of `engine_load`: multi-turn sessions in groups that share
            their prompts, with tools that take their time; not of a shape of which
            only some layers are taken

With --compare instead of these: decode steps, and then the whole engine, in `fast`
and in `bitwise`, in turns (`engine_compare`).

What is measured compiles just before, and nothing beside it: a process compiles the
kernels of Mosaic GPU one by one, however many threads ask, so to start them all at
once would only keep the first line waiting for the last. Every line is printed, and
the file written, as soon as it is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
import dataclasses
import functools
import importlib.util
import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import records
from composer.bench import ahead
from composer.bench import engine_load
from composer.bench import engine_roofline
from composer.bench import engine_shapes
from composer.bench import engine_steps
from composer.inference import engine as engine_lib
from composer.inference import programs
from pallas_kernels import dispatch

Shape = engine_shapes.Shape
REPEATS = 3
MOVED = 1.2  # from which ceilings that are measured again are others
MODES = ('fast', 'aligned', 'bitwise')
HEADER = (
  'batch     tokens/s  decode/s  of roofline  prompt/s  of products'
  '  transformers  compiled'
)


@dataclasses.dataclass(frozen=True)
class Batch:
  """B requests at once."""

  batch: int
  tokens_per_s: float  # sampled, of all the time
  decode_per_s: float  # sampled, of the time after the first of each
  roofline: float  # share of it that decoding reached
  prompt_per_s: float  # tokens of prompts, of the time until then
  products: float  # share of the rate of a large product that they reached
  transformers: float | None  # tokens/s
  compilations: int  # before
  compile_s: float


def setup(
  name: str,
  checkpoint: pathlib.Path | None,
  mode: str = '',
  batch: str | None = None,
) -> tuple[Shape, config_lib.NumericsConfig, Any]:
  """(shape, numerics, parameters as steps read them)."""
  shape = engine_shapes.shape(name)
  if batch is not None:
    shape = engine_shapes.with_batches(shape, batch)
  if mode and mode not in MODES:
    raise ValueError(
      f'--mode={mode} is not known; choose one of {", ".join(MODES)}'
    )
  if dispatch.platform() == 'cpu':
    numerics = config_lib.NumericsConfig(row_block=16)
  else:
    numerics = config_lib.NumericsConfig(
      mode='fast', compute='bfloat16', row_block=16, kv_block=64, moe='sorted'
    )
  numerics = dataclasses.replace(numerics, mode=mode or numerics.mode)
  if checkpoint is None:
    what = f'random weights of {shape.what}'
    params = engine_shapes.draw(shape.model, numerics)
  else:
    from composer.model import checkpoints

    what = str(checkpoint)
    model, params = checkpoints.load(checkpoint, dtype=jnp.bfloat16)
    shape = dataclasses.replace(shape, model=model)
    params = engine_lib.widen(params)
  shape = dataclasses.replace(shape, what=what)
  return shape, numerics, engine_lib.prepare(numerics, params)


def _rows(shape: Shape, numerics, batch: int) -> int:
  """Of a step that takes all prompts, or as much of them as the shape has."""
  if not programs.tiled(numerics):
    return max(128, min(shape.rows, shape.prompt * batch))
  tiles = batch * -(-shape.prompt // programs.TILE)
  return max(128, batch + min(shape.rows, tiles * programs.TILE))


# --- batches ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Warm:
  """An engine that has compiled all it will run, and what that took."""

  engine: engine_lib.Engine
  programs: int
  seconds: float

  def close(self) -> None:
    self.engine.close()


def warm(
  model: config_lib.ModelConfig,
  numerics: config_lib.NumericsConfig,
  config: config_lib.EngineConfig,
  params: Any,
  what: str,
) -> Warm:
  """Of prepared parameters, as version 0; close it.

  How far it is stands on standard error, after `what` it is.
  """

  def say(line: str) -> None:
    print(f'{what}: {line}', file=sys.stderr, flush=True)

  engine = engine_lib.Engine(model, numerics, config)
  try:
    engine.activate(0, params)
    started = time.perf_counter()
    programs = engine.warm_up(seconds=ahead.LIMIT_S, say=say)
    return Warm(engine, programs, time.perf_counter() - started)
  except BaseException:
    engine.close()
    raise


def warm_batch(
  shape: Shape, numerics, params, batch: int, what: str = ''
) -> Warm:
  """What `measure_batch` measures; see `warm`."""
  rows = _rows(shape, numerics, batch)
  context = shape.prompt + shape.new
  config = engine_steps.engine_config(batch, context, numerics.kv_block, rows)
  what = what or f'batch {batch}'
  return warm(shape.model, numerics, config, params, what)


def serve(
  shape: Shape,
  engine: engine_lib.Engine,
  rng: np.random.Generator,
  batch: int,
  new: int,
) -> float:
  """Seconds for `new` tokens of each of `batch` requests that are sent at once.

  Their prompts were never seen, so that no page is found.
  """
  size = (batch, shape.prompt)
  prompts = rng.integers(0, shape.model.vocab_size, size).astype(np.int32)

  async def go() -> None:
    answers = await asyncio.gather(
      *(
        engine.sample(records.SampleRequest(prompt, new, (), 1.0, seed))
        for seed, prompt in enumerate(prompts)
      )
    )
    assert all(len(a.tokens) == new for a in answers)

  started = time.perf_counter()
  asyncio.run(go())
  return time.perf_counter() - started


def measure_batch(
  shape: Shape, numerics, ceilings, batch: int, ready: Warm
) -> Batch:
  """`batch` requests at once through the whole engine; medians; closes it."""
  rng = np.random.default_rng(0)
  seconds = functools.partial(serve, shape, ready.engine, rng, batch)
  try:
    seconds(shape.new)
    times = [(seconds(1), seconds(shape.new)) for _ in range(REPEATS)]
  finally:
    ready.close()
  first, whole = np.median(times, axis=0)
  decoding = max(whole - first, 1e-9)
  ideal = engine_roofline.decode_seconds(
    shape.model, numerics, batch, shape.prompt + shape.new / 2, ceilings
  )
  flops = batch * engine_roofline.prompt_flops(
    shape.model, numerics, shape.prompt
  )
  return Batch(
    batch=batch,
    tokens_per_s=float(batch * shape.new / whole),
    decode_per_s=float(batch * (shape.new - 1) / decoding),
    roofline=float(ideal * (shape.new - 1) / decoding),
    prompt_per_s=float(batch * shape.prompt / first),
    products=float(flops / first / ceilings.flops_per_s),
    transformers=measure_transformers(shape, batch),
    compilations=ready.programs,
    compile_s=ready.seconds,
  )


def measure_transformers(wanted: Shape, batch: int) -> float | None:
  """Tokens/s of `transformers` on the same shape and load; None: cannot."""
  model = wanted.model
  if model.kv_lora or model.layers != model.dense_layers:
    return None  # a dense model of the Llama kind is compared
  if not all(map(importlib.util.find_spec, ('torch', 'transformers'))):
    return None
  import torch
  import transformers

  if not torch.cuda.is_available():
    return None
  shape = transformers.LlamaConfig(
    vocab_size=model.vocab_size,
    hidden_size=model.width,
    intermediate_size=model.dense_hidden,
    num_hidden_layers=model.layers,
    num_attention_heads=model.heads,
    num_key_value_heads=model.kv_heads,
    tie_word_embeddings=model.tie_embeddings,
    max_position_embeddings=2048,
  )
  whole = transformers.LlamaForCausalLM(shape).to('cuda', torch.bfloat16).eval()
  prompts = torch.randint(
    0, model.vocab_size, (batch, wanted.prompt), device='cuda'
  )

  def generate(count: int) -> None:
    whole.generate(
      prompts,
      attention_mask=torch.ones_like(prompts),
      do_sample=True,
      max_new_tokens=count,
      min_new_tokens=count,
      pad_token_id=0,
    )
    torch.cuda.synchronize()

  with torch.inference_mode():
    generate(4)
    started = time.perf_counter()
    generate(wanted.new)
    return batch * wanted.new / (time.perf_counter() - started)


# --- the command --------------------------------------------------------------


def run(
  json_path: pathlib.Path | None = None,
  checkpoint: str | None = None,
  load: str | None = None,
  shape: str | None = None,
  batch: str | None = None,
  mode: str | None = None,
  compare: bool = False,
) -> int:
  """`composer bench engine`.

  Args:
    json_path: file to write to as well.
    checkpoint: folder of a model; None: random weights.
    load: file of a trace of sessions.
    shape: name of `engine_shapes`.
    batch: requests at once, with commas; None: those of the shape.
    mode: of the numerics.
    compare: measure modes in turns instead.

  Raises:
    ValueError: no such shape, batch, mode, checkpoint or trace.
  """
  if compare and mode:
    raise ValueError(f'--mode={mode} and --compare: it measures modes in turns')
  if compare and load:
    raise ValueError(f'--load={load} and --compare: it plays no sessions')
  on_cpu = dispatch.platform() == 'cpu'
  where = None if checkpoint is None else pathlib.Path(checkpoint)
  trace = engine_load.read(pathlib.Path(load)) if load else engine_load.DEFAULT
  name = shape or ('quickstart' if on_cpu else 'smollm2')
  values: dict[str, Any] = {}

  def keep(**more: Any) -> None:
    values.update(more)
    if json_path is not None:
      text = json.dumps(values, indent=2) + '\n'
      pathlib.Path(json_path).write_text(text)

  device = jax.devices()[0].device_kind
  if compare:
    from composer.bench import engine_compare

    weights = {m: setup(name, where, m, batch) for m in engine_compare.MODES}
    served = weights['fast'][0]
    _say(f'{served.what}, on {device}: bitwise, and its rate over that of fast')
    keep(device=device, model=served.what, jax=jax.__version__)
    weights = {m: w[1:] for m, w in weights.items()}
    engine_compare.measure(served, weights, _say, keep)
    return 0
  served, numerics, params = setup(name, where, mode or '', batch)
  _say(f'{served.what}; {numerics.mode}, {numerics.compute}, on {device}')
  keep(device=device, model=served.what, jax=jax.__version__)
  keep(numerics=dataclasses.asdict(numerics))
  _measure(served, numerics, params, trace, keep)
  return 0


def _measure(
  shape: Shape,
  numerics,
  params,
  trace: engine_load.Trace,
  keep: Callable[..., None],
) -> None:
  """All three parts."""
  ceilings = engine_roofline.measure(numerics)
  _say(
    f'ceilings: {ceilings.bytes_per_s / 1e9:,.0f} GB/s,'
    f' {ceilings.flops_per_s / 1e12:,.2f} TFLOP/s'
  )
  keep(ceilings=dataclasses.asdict(ceilings))
  _say(f'{shape.prompt} tokens of a prompt, {shape.new} sampled\n{HEADER}')
  measured: list[Batch] = []
  for batch in shape.batches:
    ready = warm_batch(shape, numerics, params, batch)
    measured.append(measure_batch(shape, numerics, ceilings, batch, ready))
    _say(batch_line(measured[-1]))
    keep(batches=[dataclasses.asdict(b) for b in measured])
  most = shape.batches[-1]
  recording = engine_steps.measure_recording(shape, numerics, params, most)
  _say(f'recording at batch {most}: {recording - 1:+.1%} of a step')
  keep(recording=recording)
  if shape.whole:
    rows = 128 if dispatch.platform() == 'cpu' else 512
    config = engine_load.engine_config(trace, numerics, rows)
    ready = warm(shape.model, numerics, config, params, 'sessions')
    sessions = engine_load.measure(
      shape.model, numerics, trace, ceilings, ready.engine
    )
    _say(engine_load.table(trace, sessions))
    keep(sessions=dataclasses.asdict(sessions))
  again = engine_roofline.measure(numerics)
  doubt = doubtful(measured, ceilings, again)
  if doubt:
    _say(doubt)
  keep(ceilings_again=dataclasses.asdict(again), doubt=doubt)


def doubtful(
  found: Sequence[Batch],
  before: engine_roofline.Ceilings,
  after: engine_roofline.Ceilings,
) -> str:
  """Why shares of the ceilings measured `before` are not to be believed; or ''."""
  highest = max((max(b.roofline, b.products) for b in found), default=0.0)
  ratios = [
    b / a
    for a, b in zip(
      dataclasses.astuple(before), dataclasses.astuple(after), strict=True
    )
  ]
  if highest <= 1 and max(ratios) < MOVED and min(ratios) > 1 / MOVED:
    return ''
  return (
    f'of the ceilings: not to be believed. The highest share is {highest:.0%},'
    f' and measured again they are {after.bytes_per_s / 1e9:,.0f} GB/s,'
    f' {after.flops_per_s / 1e12:,.2f} TFLOP/s: other programs ran, or the model'
    ' fits into a cache. Measure again with nothing beside'
  )


def _say(line: str) -> None:
  print(line, flush=True)


def batch_line(b: Batch) -> str:
  """A row under `HEADER`."""
  other = f'{b.transformers:12,.0f}' if b.transformers else f'{"-":>12}'
  return (
    f'{b.batch:5d} {b.tokens_per_s:12,.0f} {b.decode_per_s:9,.0f}'
    f'  {b.roofline:11.1%} {b.prompt_per_s:9,.0f}  {b.products:11.1%}'
    f'  {other}  {b.compilations} in {b.compile_s:.0f} s'
  )
