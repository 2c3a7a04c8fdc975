"""How fast the engine serves.

    composer bench engine [--shape NAME] [--checkpoint DIR] [--load FILE]
                          [--mode MODE] [--json FILE] [--compare]

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

With --compare instead of these: a decode step in `fast` and in `bitwise`, in turns.

On an accelerator everything compiles side by side before anything is measured.
Every line is printed, and the file written, as soon as it is measured.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent import futures
import dataclasses
import functools
import importlib.util
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import records
from composer.bench import ahead as ahead_lib
from composer.bench import engine_load
from composer.bench import engine_roofline
from composer.bench import engine_shapes
from composer.inference import batches
from composer.inference import engine as engine_lib
from composer.inference import programs
from composer.model import transformer
from pallas_kernels import dispatch

Shape = engine_shapes.Shape
REPEATS = 3
MOVED = 1.2  # from which ceilings that are measured again are others
PAIRS = 20  # of decode steps with and without recording, or turns of modes
STEPS = 8  # of decoding in one program
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
  name: str, checkpoint: pathlib.Path | None, mode: str = ''
) -> tuple[Shape, config_lib.NumericsConfig, Any]:
  """(shape, numerics, parameters as steps read them)."""
  shape = engine_shapes.shape(name)
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


def engine_config(batch: int, context: int, block: int, rows: int):
  """An engine of just that size."""
  context = -(-context // block) * block
  return config_lib.EngineConfig(
    rows=max(rows, 2 * batch),
    sequences=batch,
    pages=batch * context // block + 1,
    max_context=context,
  )


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
) -> Warm:
  """Of prepared parameters, as version 0; close it."""
  engine = engine_lib.Engine(model, numerics, config)
  try:
    engine.activate(0, params)
    started = time.perf_counter()
    programs = engine.warm_up(seconds=ahead_lib.LIMIT_S)
    return Warm(engine, programs, time.perf_counter() - started)
  except BaseException:
    engine.close()
    raise


def warm_batch(shape: Shape, numerics, params, batch: int) -> Warm:
  """What `measure_batch` measures."""
  rows = _rows(shape, numerics, batch)
  context = shape.prompt + shape.new
  config = engine_config(batch, context, numerics.kv_block, rows)
  return warm(shape.model, numerics, config, params)


def measure_batch(
  shape: Shape, numerics, ceilings, batch: int, ready: Warm
) -> Batch:
  """`batch` requests at once through the whole engine; medians; closes it."""
  engine = ready.engine
  rng = np.random.default_rng(0)

  def seconds(new: int) -> float:
    """Of prompts that were never seen, so that no page is found."""
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


Recording = tuple[dict[bool, Callable[..., Any]], int]


def compile_recording(shape: Shape, numerics, params, batch: int) -> Recording:
  """(decode steps by whether they record, pages): what is measured next."""
  run, pages = decoding(shape, numerics, batch)
  cache = jax.eval_shape(
    lambda: transformer.init_cache(shape.model, numerics, pages)
  )
  run = jax.jit(run, static_argnums=2, donate_argnums=1)
  return {
    record: run.lower(params, cache, record).compile()
    for record in (False, True)
  }, pages


def measure_recording(
  shape: Shape, numerics, params, programs: Recording
) -> float:
  """Time of decode steps with logprobs and routes, over that without.

  The median of pairs that run one right after the other, now this one first and
  now that one, so that what else the machine does meets both. What of recording
  the host does runs beside the device.
  """
  steps, pages = programs
  cache = transformer.init_cache(shape.model, numerics, pages)
  ratios = []
  for turn in range(PAIRS + 1):
    took = {}
    for record in (False, True) if turn % 2 else (True, False):
      started = time.perf_counter()
      out, cache, _ = steps[record](params, cache)
      jax.block_until_ready((out, cache))
      took[record] = time.perf_counter() - started
    ratios.append(took[True] / took[False])
  return float(np.median(ratios[1:]))  # the first finds nothing in any cache


def decoding(
  shape: Shape, numerics, batch: int
) -> tuple[Callable[..., Any], int]:
  """(`STEPS` decode steps of `batch` rows as a function, pages of its cache).

  Of parameters, cache, and whether logprobs and routes are recorded; the first of
  what it gives is what was sampled, the second the cache.
  """
  model, block = shape.model, numerics.kv_block
  config = engine_config(batch, shape.prompt + shape.new, block, 2 * batch)
  size = programs.at_least(programs.ahead_sizes(numerics, config), batch)
  columns = programs.column_sizes(numerics, config)[-1]
  rows, _, draws, _ = batches.Maker(model, numerics, config).blank(
    size, columns, True, False
  )
  ends = np.full(size, shape.prompt + STEPS, np.int32)
  rows, ends, draws = jax.tree.map(jnp.asarray, (rows, ends, draws))

  def run(params, cache, record):
    last = jnp.zeros(config.sequences + 1, jnp.int32)
    sampled, cache, last = programs.ahead.__wrapped__(
      model, numerics, STEPS, params, cache, last, rows, ends, draws, None
    )
    if not record:
      sampled = sampled.answer.tokens
    return sampled, cache, last

  return run, config.pages


def measure_modes(
  shape: Shape,
  weights: dict[str, tuple[Any, Any]],
  say: Callable[[str], None] = lambda line: None,
) -> dict[int, dict[str, float]]:
  """Seconds of a decode step by batch and mode, medians of turns.

  All programs compile at once. Of a batch every mode comes once in each turn, so
  that what else the machine does meets all.

  Args:
    shape: model and batches.
    weights: by mode, (numerics, prepared parameters).
    say: gets a line for each batch.
  """
  compiled = _compiled(shape, weights)
  found: dict[int, dict[str, float]] = {}
  for batch in shape.batches:
    caches = {
      mode: transformer.init_cache(shape.model, n, compiled[batch, mode][1])
      for mode, (n, _) in weights.items()
    }
    took: dict[str, list[float]] = {mode: [] for mode in weights}
    for turn in range(PAIRS + 1):
      for mode in sorted(weights, reverse=bool(turn % 2)):
        program, params = compiled[batch, mode][0], weights[mode][1]
        started = time.perf_counter()
        out, caches[mode], _ = program(params, caches[mode])
        jax.block_until_ready((out, caches[mode]))
        took[mode].append((time.perf_counter() - started) / STEPS)
    # The first turn finds nothing in any cache.
    found[batch] = {mode: float(np.median(t[1:])) for mode, t in took.items()}
    say(modes_line(batch, found[batch]))
  return found


def _compiled(shape: Shape, weights) -> dict[tuple[int, str], tuple[Any, int]]:
  """By batch and mode `decoding`, compiled, and the pages of its cache."""
  made = {}
  with futures.ThreadPoolExecutor() as pool:
    for batch in shape.batches:
      for mode, (numerics, params) in weights.items():
        run, pages = decoding(shape, numerics, batch)
        cache = jax.eval_shape(
          lambda n=numerics, p=pages: transformer.init_cache(shape.model, n, p)
        )
        run = jax.jit(lambda p, c, run=run: run(p, c, True), donate_argnums=1)
        program = pool.submit(run.lower(params, cache).compile)
        made[batch, mode] = program, pages
  return {
    which: (program.result(), pages) for which, (program, pages) in made.items()
  }


def modes_line(batch: int, seconds: dict[str, float]) -> str:
  """Microseconds of each mode, and its rate over that of `fast`."""
  each = (
    f'{mode} {s * 1e6:,.0f} us, {seconds["fast"] / s:.2f}'
    for mode, s in seconds.items()
  )
  return f'{batch:5d}  {"; ".join(each)}'


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
  mode: str | None = None,
  compare: bool = False,
) -> int:
  """`composer bench engine`.

  Args:
    json_path: file to write to as well.
    checkpoint: folder of a model; None: random weights.
    load: file of a trace of sessions.
    shape: name of `engine_shapes`.
    mode: of the numerics.
    compare: measure decode steps of modes instead.

  Raises:
    ValueError: no such shape, mode, checkpoint or trace.
  """
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
    if mode:
      raise ValueError(
        f'--mode={mode} and --compare: it measures modes in turns'
      )
    weights = {m: setup(name, where, m) for m in ('fast', 'bitwise')}
    served = weights['fast'][0]
    _say(
      f'{served.what}, on {device}: a decode step, and its rate over that of fast'
    )
    found = measure_modes(served, {m: w[1:] for m, w in weights.items()}, _say)
    keep(device=device, model=served.what, jax=jax.__version__, modes=found)
    return 0
  served, numerics, params = setup(name, where, mode or '')
  _say(f'{served.what}; {numerics.mode}, {numerics.compute}, on {device}')
  keep(device=device, model=served.what, jax=jax.__version__)
  keep(numerics=dataclasses.asdict(numerics))
  ahead = ahead_lib.ahead(_say)
  try:
    works = _works(served, numerics, params, trace)
    if compiles_ahead():
      for what, work in works.items():
        ahead.start(what, work)
      ahead.wait_all()
    ready = {
      what: lambda what=what, work=work: ahead.wait(what) or work()
      for what, work in works.items()
    }
    _measure(served, numerics, params, trace, ready, keep)
  finally:
    ahead.close()
  return 0


def compiles_ahead() -> bool:
  """Whether there are cores to do it side by side."""
  return dispatch.platform() != 'cpu'


def _works(
  shape: Shape, numerics, params, trace
) -> dict[str, Callable[[], Any]]:
  """By name, what makes ready what is measured, in the order of that."""
  works: dict[str, Callable[[], Any]] = {}
  for batch in shape.batches:
    works[f'batch {batch}'] = functools.partial(
      warm_batch, shape, numerics, params, batch
    )
  works['recording'] = functools.partial(
    compile_recording, shape, numerics, params, shape.batches[-1]
  )
  if shape.whole:
    rows = 128 if dispatch.platform() == 'cpu' else 512
    config = engine_load.engine_config(trace, numerics, rows)
    works['sessions'] = functools.partial(
      warm, shape.model, numerics, config, params
    )
  return works


def _measure(
  shape: Shape,
  numerics,
  params,
  trace: engine_load.Trace,
  ready: dict[str, Callable[[], Any]],
  keep: Callable[..., None],
) -> None:
  """All three parts, of what `ready` gives by name."""
  ceilings = engine_roofline.measure(numerics)
  _say(
    f'ceilings: {ceilings.bytes_per_s / 1e9:,.0f} GB/s,'
    f' {ceilings.flops_per_s / 1e12:,.2f} TFLOP/s'
  )
  keep(ceilings=dataclasses.asdict(ceilings))
  _say(f'{shape.prompt} tokens of a prompt, {shape.new} sampled\n{HEADER}')
  measured: list[Batch] = []
  for batch in shape.batches:
    one = ready[f'batch {batch}']()
    measured.append(measure_batch(shape, numerics, ceilings, batch, one))
    _say(batch_line(measured[-1]))
    keep(batches=[dataclasses.asdict(b) for b in measured])
  recording = measure_recording(shape, numerics, params, ready['recording']())
  _say(
    f'recording at batch {shape.batches[-1]}: {recording - 1:+.1%} of a step'
  )
  keep(recording=recording)
  if shape.whole:
    engine = ready['sessions']().engine
    sessions = engine_load.measure(
      shape.model, numerics, trace, ceilings, engine
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
