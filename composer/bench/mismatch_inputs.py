"""What the mismatch is measured on: an upcycled model, and many sessions.

The model is dense at first and learns to predict Python source; it is upcycled,
and learns on, until its experts have parted. A router of experts that are still
alike chooses by chance and changes nothing by what it chooses.

The sessions are what makes engines disagree: the rollouts of a group share their
prompt, later turns find the pages of earlier ones, prompts are longer than a
step, and sessions start in waves of different sizes. The engine that serves them
has too few pages for all, so that some are put back and computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from composer import config as config_lib
from composer import data
from composer import midtrain
from composer import params as params_lib
from composer import records
from composer.inference import programs
from composer.model import tokenizer as tokenizer_lib
from composer.model import transformer
from composer.model import upcycle

SOURCE_BYTES = 400_000
GROUP = 4  # rollouts that share a prompt
WAVES = (1, 48, 6, 96, 17, 2)  # sessions at once, over and over
CROWD_EVERY = 12_000  # sampled tokens
DENSE_SHARE = 0.4  # of the optimizer steps, before the model is upcycled
INTO = upcycle.Upcycling(experts=8, experts_per_token=2, noise=0.02)

# Of the quick start's size, dense.
DENSE = config_lib.ModelConfig(
  dense_layers=3, dense_hidden=128, experts=1, experts_per_token=1
)
MIDTRAIN = config_lib.MidtrainConfig(
  batch_size=8, sequence_length=128, learning_rate=3e-3, warmup_steps=10
)
# The same where kernels run, in the numbers that they take; by its attention.
WIDE = config_lib.ModelConfig(
  layers=4,
  dense_layers=4,
  width=1024,
  heads=16,
  kv_heads=4,
  head_dim=64,
  dense_hidden=1408,
  experts=1,
  experts_per_token=1,
)
WIDE_MODELS = {
  'grouped': WIDE,
  'latent': dataclasses.replace(
    WIDE, q_lora=512, kv_lora=512, nope_dim=128, rope_dim=64, value_dim=128
  ),
}
WIDE_MIDTRAIN = dataclasses.replace(
  MIDTRAIN, batch_size=32, sequence_length=512, learning_rate=5e-4
)


@dataclasses.dataclass(frozen=True)
class Plan:
  """One session: a prompt, then turns of (tokens to sample, tokens that the
  world answers with)."""

  prompt: np.ndarray  # int32 [P]
  turns: tuple[tuple[int, np.ndarray], ...]
  temperature: float
  seed: int

  @property
  def sampled(self) -> int:
    return sum(count for count, _ in self.turns)


def plans(
  tokens: int, vocab_size: int, longest: int, seed: int = 0
) -> list[Plan]:
  """Sessions that sample about `tokens` tokens, each at most `longest` long."""
  rng = np.random.default_rng(seed)
  out: list[Plan] = []
  total = 0
  while total < tokens:
    prompt = rng.integers(16, vocab_size, rng.integers(8, longest // 2))
    for _ in range(GROUP):
      plan = _plan(rng, prompt.astype(np.int32), vocab_size, longest, len(out))
      out.append(plan)
      total += plan.sampled
  return out


def _plan(rng, prompt, vocab_size, longest, seed) -> Plan:
  """Turns while there is room."""
  turns, length = [], len(prompt)
  for _ in range(int(rng.integers(1, 5))):
    count = int(rng.integers(longest // 48, longest // 4 + 1))
    answer = int(rng.integers(1, 12))
    if length + count + answer > longest:
      break
    words = rng.integers(16, vocab_size, answer).astype(np.int32)
    turns.append((count, words))
    length += count + answer
  turns = turns or [(min(4, longest - length), np.zeros(0, np.int32))]
  return Plan(prompt, tuple(turns), float(rng.choice([1.0, 1.0, 0.7])), seed)


def waves(count: int) -> list[slice]:
  """Which sessions start together."""
  out, start, turn = [], 0, 0
  while start < count:
    size = WAVES[turn % len(WAVES)]
    out.append(slice(start, min(start + size, count)))
    start, turn = start + size, turn + 1
  return out


def load(
  tokens: int,
  vocab_size: int,
  engine: config_lib.EngineConfig,
  block: int,
  seed: int = 0,
) -> tuple[list[Plan], list[slice]]:
  """Sessions that sample about `tokens` tokens, and which of them start together.

  Waves of `plans`, then crowds: one for every `CROWD_EVERY` tokens, and one at
  least.
  """
  longest = engine.max_context
  one = crowd(vocab_size, engine, block, 0)
  crowds = max(tokens // CROWD_EVERY, 1)
  rest = tokens - crowds * sum(plan.sampled for plan in one)
  found = plans(max(rest, 1), vocab_size, longest, seed)
  starts = waves(len(found))
  for _ in range(crowds):
    more = crowd(vocab_size, engine, block, len(found))
    starts.append(slice(len(found), len(found) + len(more)))
    found += more
  return found, starts


def crowd(
  vocab_size: int, engine: config_lib.EngineConfig, block: int, seed: int
) -> list[Plan]:
  """Sessions that start together and outgrow the pages: some give theirs back.

  Each has a prompt of its own, of p whole pages. An engine of P pages starts
  N = (P + 1) / (p + 1) of them, since it leaves a page free for each that runs.
  They would grow to 1.2 P pages together. Two more wait.
  """
  longest, pages = engine.max_context, engine.pages - 1
  prompt = max(longest // 2 // block, 1)
  at_once = max(min((pages + 1) // (prompt + 1), engine.sequences), 1)
  grown = min(int(1.2 * pages * block / at_once), longest)
  rng = np.random.default_rng(seed)
  nothing = np.zeros(0, np.int32)
  size = at_once + 2
  turns = ((max(grown - prompt * block, 1), nothing),)
  prompts = rng.integers(16, vocab_size, (size, prompt * block))
  return [
    Plan(words.astype(np.int32), turns, 1.0, seed + number)
    for number, words in enumerate(prompts)
  ]


def batch(count: int, vocab_size: int, longest: int) -> list[Plan]:
  """Sessions of one turn that all fit at once: what throughput is measured on."""
  rng = np.random.default_rng(1)
  prompts = rng.integers(16, vocab_size, (count, longest // 8)).astype(np.int32)
  nothing = np.zeros(0, np.int32)
  return [
    Plan(prompt, ((longest // 4, nothing),), 1.0, seed)
    for seed, prompt in enumerate(prompts)
  ]


def engine_config(
  longest: int, numerics: config_lib.NumericsConfig
) -> config_lib.EngineConfig:
  """Steps shorter than prompts, and pages for few sequences of full length.

  Where kernels run there are more, since steps of few rows take them as long.
  """
  tiled = programs.tiled(numerics)
  sequences, whole = (64, 16) if tiled else (48, 2)
  rows = sequences + longest // 3 if tiled else 2 * numerics.row_block
  return config_lib.EngineConfig(
    rows=rows,
    sequences=sequences,
    pages=whole * (longest // numerics.kv_block) + 2,
    max_context=longest,
  )


@dataclasses.dataclass(frozen=True)
class Stage:
  """Training of one model: with what, and the jitted step."""

  name: str
  model: config_lib.ModelConfig
  config: config_lib.MidtrainConfig
  step: Callable[..., Any]


def stages(
  steps: int,
  numerics: config_lib.NumericsConfig,
  dense: config_lib.ModelConfig = DENSE,
  midtraining: config_lib.MidtrainConfig = MIDTRAIN,
) -> tuple[Stage, Stage]:
  """The dense model's training, and the upcycled one's.

  Args:
    steps: of the optimizer, before and after upcycling together.
    numerics: KV block; the rest is `fast`.
    dense: the model before it is upcycled.
    midtraining: batches and learning rate.

  Raises:
    ValueError: fewer than 10 steps.
  """
  if steps < 10:
    raise ValueError(
      f'{steps} optimizer steps part no experts; give 10 or more'
    )
  fast = dataclasses.replace(numerics, mode='fast', mla='expanded')
  first = round(DENSE_SHARE * steps)
  sparse = upcycle.sparse_config(dense, INTO)
  found = []
  for name, model, count in (
    ('dense', dense, first),
    ('upcycled', sparse, steps - first),
  ):
    config = dataclasses.replace(midtraining, steps=count)
    step = midtrain.make_train_step(model, fast, config)
    found.append(Stage(name, model, config, step))
  return found[0], found[1]


def trained(
  stages: tuple[Stage, Stage],
  batches: Iterator[Any],
  report: Callable[[str], None] = lambda line: None,
  wait: Callable[[str], Any] = lambda name: None,
) -> Any:
  """Published parameters of the upcycled, trained model.

  Args:
    stages: see there.
    batches: see `batches`.
    report: gets a line on each stage.
    wait: gets the name of a stage before it begins, and may give its step.
  """
  dense, sparse = stages
  params = params_lib.init(transformer.spec(dense.model), jax.random.key(0))
  dense = compiled(dense, wait(dense.name))
  params, losses = _train(dense, batches, params)
  report(_learned(dense, losses))
  host = jax.tree.map(np.asarray, params)
  _, params = upcycle.upcycle(dense.model, host, INTO)
  params = jax.tree.map(jnp.asarray, params)
  before = apart(params)
  sparse = compiled(sparse, wait(sparse.name))
  params, losses = _train(sparse, batches, params)
  report(
    f'{_learned(sparse, losses)}; experts differ by {before:.1%} and then'
    f' {apart(params):.1%}'
  )
  spec = transformer.spec(sparse.model)
  return jax.jit(lambda p: params_lib.to_published(spec, p))(params)


def compiled(stage: Stage, step: Callable[..., Any] | None) -> Stage:
  """The stage with this step, where there is one."""
  return stage if step is None else dataclasses.replace(stage, step=step)


def _learned(stage: Stage, losses: list[float]) -> str:
  return (
    f'{stage.name}: loss {losses[0]:.2f} to {losses[-1]:.2f},'
    f' {stage.config.steps} steps'
  )


def apart(params: Any) -> float:
  """Mean of |w_e - mean_e w| / |w_e| over experts and their matrices."""
  shares = []
  for name, value in params_lib.named(params).items():
    if (
      'moe' in name
      and name.endswith(('gate_up', 'down'))
      and ('shared' not in name)
    ):
      w = np.asarray(value, np.float32)  # [L, E, ...]
      flat = w.reshape(*w.shape[:2], -1)
      off = flat - flat.mean(1, keepdims=True)
      norms = np.linalg.norm(off, axis=-1) / np.linalg.norm(flat, axis=-1)
      shares.append(float(norms.mean()))
  return float(np.mean(shares))


def batches(
  align: int, midtraining: config_lib.MidtrainConfig = MIDTRAIN
) -> Iterator[Any]:
  """Packed Python source, without end; segments start at multiples of `align`."""
  tokenizer = tokenizer_lib.load()
  dataset = data.midtraining(
    [],
    data.python_source(SOURCE_BYTES),
    tokenizer.encode,
    batch_size=midtraining.batch_size,
    sequence_length=midtraining.sequence_length,
    python_share=1.0,
    align=align,
    seed=0,
  )
  return iter(dataset)


def init_state(stage: Stage, params: Any) -> records.TrainState:
  return midtrain.init_state(params, stage.config, jax.random.key(0))


def _train(stage: Stage, batches: Iterator[Any], params: Any):
  """(parameters, losses) after the stage's steps of next-token prediction."""
  state, losses = init_state(stage, params), []
  for _ in range(stage.config.steps):
    state, metrics = stage.step(state, next(batches))
    losses.append(metrics['loss'])
  return state.params, [float(x) for x in losses]
