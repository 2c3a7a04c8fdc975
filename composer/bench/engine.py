"""How fast the engine serves.

    composer bench engine [--checkpoint DIR] [--load FILE] [--json FILE]

Three measurements, of random weights of the quick start's shape on a CPU and of
SmolLM2-135M's elsewhere, or of a checkpoint:

  batches   B prompts of 8 tokens, each continued by 128, all at once: tokens/s,
            the share of the roofline (the time that the bytes and the arithmetic
            of a decode step take at this device's measured ceilings), and the
            same through `transformers` where it can be imported
  recording the same decode steps with and without logprobs and routes
  sessions  the trace of `engine_load`: multi-turn sessions in groups that share
            their prompts, with tools that take their time
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
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
from composer.bench import engine_load
from composer.bench import engine_roofline
from composer.inference import batches
from composer.inference import engine as engine_lib
from composer.inference import programs
from composer.model import presets
from composer.model import transformer
from pallas_kernels import dispatch

PROMPT, NEW = 8, 128  # tokens of a request in `batches`
BATCHES = {'cpu': (1, 16, 64), 'gpu': (1, 16, 64, 256), 'tpu': (1, 16, 64, 256)}
REPEATS = 3


@dataclasses.dataclass(frozen=True)
class Batch:
  """B requests at once."""

  batch: int
  tokens_per_s: float
  roofline: float  # share of it that decoding reached
  transformers: float | None  # tokens/s


def setup(
  checkpoint: pathlib.Path | None,
) -> tuple[config_lib.ModelConfig, config_lib.NumericsConfig, Any, str]:
  """(model, numerics, float32 parameters, what it is)."""
  on_cpu = dispatch.platform() == 'cpu'
  if on_cpu:
    numerics = config_lib.NumericsConfig(row_block=16)
  else:
    numerics = config_lib.NumericsConfig(
      mode='fast', compute='bfloat16', row_block=16, kv_block=64, moe='sorted'
    )
  if checkpoint is not None:
    from composer.model import checkpoints

    model = checkpoints.read_config(checkpoint)
    params = checkpoints.load(checkpoint, model)
    return model, numerics, engine_lib.widen(params), str(checkpoint)
  model = config_lib.ModelConfig() if on_cpu else presets.SMOLLM2_135M
  name = "the quick start's shape" if on_cpu else "SmolLM2-135M's shape"
  params = params_lib.init(transformer.spec(model), jax.random.key(0))
  return model, numerics, params, f'random weights of {name}'


def engine_config(batch: int, context: int, block: int, rows: int):
  """An engine of just that size."""
  context = -(-context // block) * block
  return config_lib.EngineConfig(
    rows=max(rows, 2 * batch),
    sequences=batch,
    pages=batch * context // block + 1,
    max_context=context,
  )


# --- batches ------------------------------------------------------------------


def measure_batch(model, numerics, params, batch: int) -> float:
  """Tokens/s of `batch` requests at once, the whole engine, median."""
  rows = max(128, PROMPT * batch)
  config = engine_config(batch, PROMPT + NEW, numerics.kv_block, rows)
  engine = engine_lib.Engine(model, numerics, config)
  rng = np.random.default_rng(0)
  requests = [
    records.SampleRequest(
      rng.integers(0, model.vocab_size, PROMPT).astype(np.int32),
      NEW,
      (),
      1.0,
      seed,
    )
    for seed in range(batch)
  ]

  async def go() -> None:
    answers = await asyncio.gather(*(engine.sample(r) for r in requests))
    assert all(len(a.tokens) == NEW for a in answers)

  try:
    engine.activate(0, params)
    asyncio.run(go())  # compiles
    seconds = []
    for _ in range(REPEATS):
      started = time.perf_counter()
      asyncio.run(go())
      seconds.append(time.perf_counter() - started)
    return batch * NEW / float(np.median(seconds))
  finally:
    engine.close()


def measure_recording(model, numerics, params, batch: int) -> float:
  """Time of decode steps with logprobs and routes, over that without.

  What of it the host does runs beside the device.
  """
  steps, block = 8, numerics.kv_block
  config = engine_config(batch, PROMPT + NEW, block, 2 * batch)
  size = programs.at_least(programs.ahead_sizes(numerics, config), batch)
  columns = programs.column_sizes(numerics, config)[-1]
  rows, _, draws, _ = batches.Maker(model, numerics, config).blank(
    size, columns, True, False
  )
  ends = np.full(size, PROMPT + steps, np.int32)
  params = engine_lib.prepare(numerics, params)

  def run(cache, record):
    last = jnp.zeros(config.sequences + 1, jnp.int32)
    sampled, cache, last = programs.ahead.__wrapped__(
      model, numerics, steps, params, cache, last, rows, ends, draws, None
    )
    if not record:
      sampled = sampled.answer.tokens
    return sampled, cache, last

  cache = transformer.init_cache(model, numerics, config.pages)
  run = jax.jit(run, static_argnums=1, donate_argnums=0)
  times: dict[bool, list[float]] = {False: [], True: []}
  for turn in range(2 * REPEATS + 3):
    for record in times:
      started = time.perf_counter()
      out, cache, _ = run(cache, record)
      jax.block_until_ready((out, cache))
      if turn:
        times[record].append(time.perf_counter() - started)
  return float(np.median(times[True]) / np.median(times[False]))


def measure_transformers(model, batch: int) -> float | None:
  """Tokens/s of `transformers` on the same shape and load; None: cannot."""
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
  prompts = torch.randint(0, model.vocab_size, (batch, PROMPT), device='cuda')
  new = NEW // 2  # the first run counts for nothing

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
    generate(new)
    return batch * new / (time.perf_counter() - started)


def measure_batches(model, numerics, params, ceilings) -> list[Batch]:
  found = []
  for batch in BATCHES[dispatch.platform()]:
    rate = measure_batch(model, numerics, params, batch)
    ideal = engine_roofline.decode_seconds(
      model, numerics, batch, PROMPT + NEW / 2, ceilings
    )
    other = measure_transformers(model, batch)
    found.append(Batch(batch, rate, ideal * rate / batch, other))
  return found


# --- the command --------------------------------------------------------------


def run(
  json_path: pathlib.Path | None = None,
  checkpoint: str | None = None,
  load: str | None = None,
) -> int:
  """`composer bench engine`."""
  where = None if checkpoint is None else pathlib.Path(checkpoint)
  trace = engine_load.read(pathlib.Path(load)) if load else engine_load.DEFAULT
  model, numerics, params, name = setup(where)
  device = jax.devices()[0].device_kind
  print(f'{name}; {numerics.mode}, {numerics.compute}, on {device}')
  ceilings = engine_roofline.measure(numerics)
  print(
    f'ceilings: {ceilings.bytes_per_s / 1e9:,.0f} GB/s,'
    f' {ceilings.flops_per_s / 1e12:,.2f} TFLOP/s'
  )
  found = measure_batches(model, numerics, params, ceilings)
  print(batch_table(found))
  largest = found[-1].batch
  recording = measure_recording(model, numerics, params, largest)
  print(f'recording at batch {largest}: {recording - 1:+.1%} of a step')
  rows = 128 if dispatch.platform() == 'cpu' else 512
  served = engine_load.measure(model, numerics, params, trace, ceilings, rows)
  print(engine_load.table(trace, served))
  if json_path is not None:
    values = {
      'device': device,
      'model': name,
      'numerics': dataclasses.asdict(numerics),
      'ceilings': dataclasses.asdict(ceilings),
      'batches': [dataclasses.asdict(b) for b in found],
      'recording': recording,
      'sessions': dataclasses.asdict(served),
    }
    pathlib.Path(json_path).write_text(json.dumps(values, indent=2) + '\n')
  return 0


def batch_table(found: list[Batch]) -> str:
  """The batches as text."""
  lines = ['batch     tokens/s  of roofline  transformers']
  for b in found:
    other = f'{b.transformers:12,.0f}' if b.transformers else f'{"-":>12}'
    lines.append(
      f'{b.batch:5d} {b.tokens_per_s:12,.0f}  {b.roofline:11.1%}  {other}'
    )
  return '\n'.join(lines)
