"""Self-summarization, many generations deep, and what is trained of it."""

import asyncio
import dataclasses
import re

import numpy as np
import pytest

from composer import chat
from composer import config as config_lib
from composer import params as params_lib
from composer.config import Experiment
from composer.config import MachineConfig
from composer.config import ModelConfig
from composer.config import SessionConfig
from composer.environments.machines import Pool
from composer.environments.machines import process
from composer.model import tokenizer as tokenizer_lib
from composer.records import Completion
from composer.records import Group
from composer.records import Task
from composer.rl import advantage
from composer.rl import buffer
from composer.rl import pack
from composer.rollout import session as session_lib

TOKENIZER = tokenizer_lib.load()
END = TOKENIZER.token_id('<end>')
LINES, STEP = 14_500, 70  # of the ledger; read at once
WINDOW = 2_000  # tokens

MODEL = ModelConfig(
  vocab_size=TOKENIZER.vocab_size, layers=2, dense_layers=1, width=16, heads=2,
  kv_heads=1, head_dim=8, dense_hidden=16, experts=4, expert_hidden=8,
)  # fmt: skip
CHECK = """
import sys
want = sum(int(x.split()[2]) for x in open('ledger.txt'))
try:
  passed = open('total.txt').read().strip() == str(want)
except OSError:
  passed = False
print('passed', int(passed), 'of 1')
sys.exit(not passed)
"""


def ledger_task():
  rng = np.random.default_rng(5)
  lines = [
    f'from {n % 9} {v}\n' for n, v in enumerate(rng.integers(0, 99, LINES))
  ]
  ledger = ''.join(lines)
  return Task(
    id='ledger', kind='ledger', files={'ledger.txt': ledger},
    instruction=' sum of all items in ledger.txt to total.txt',
    tools=('read', 'write', 'finish'), test_command=(), allowed=('total.txt',),
    hidden_files={'check.py': CHECK, 'ledger.txt': ledger},
    hidden_command=('python', 'check.py'), metadata={},
  )  # fmt: skip


class Clerk:
  """Adds up a ledger that is fifty times its window.

  It knows nothing but the tokens of a request: what was added before stands in
  the summary that its context starts from ('next N sum S').
  """

  def __init__(self):
    self.sampled = []  # tokens, in order
    self.longest = 0

  def act(self, tokens):
    texts = parts(tokens)
    line, total = 1, 0
    for mark, text in texts:
      found = re.search(r'next (\d+) sum (\d+)', text)
      if mark == '<summary>' and found:
        line, total = int(found[1]), int(found[2])
      elif mark == '<obs>':
        values = [int(x) for x in re.findall(r'^ ?from \d+ (\d+)$', text, re.M)]
        line, total = line + len(values), total + sum(values)
    if texts[-1][0] == '<summarize>':
      return f' next {line} sum {total}'
    if line <= LINES:
      return f' read ledger.txt {line} {line + STEP - 1}'
    wrote = any('wrote total.txt' in text for _, text in texts)
    return ' finish' if wrote else f' write total.txt {total}'

  async def sample(self, request):
    text = self.act(request.tokens.tolist())
    tokens = [*TOKENIZER.encode(text), END]
    assert len(tokens) <= request.max_tokens
    self.sampled += tokens
    total = len(request.tokens) + len(tokens)
    self.longest = max(self.longest, total)
    experts = np.tile(np.asarray([0, 1], np.int16), (total, 1, 1))
    experts[-1] = -1
    computed = np.zeros(total, np.int32)
    computed[-1] = -1
    return Completion(
      tokens=np.asarray(tokens, np.int32),
      logprobs=np.full(len(tokens), -0.5, np.float32),
      versions=np.zeros(len(tokens), np.int32),
      experts=experts,
      computed_versions=computed,
      stop_reason='stop',
    )


def parts(tokens):
  """[(mark, text behind it)] of a context."""
  marks = {TOKENIZER.token_id(piece): piece for piece in chat.SPECIALS}
  found = []
  for token in tokens:
    if token in marks:
      found.append((marks[token], []))
    else:
      found[-1][1].append(token)
  return [(mark, TOKENIZER.decode(ids)) for mark, ids in found]


def experiment(**changes):
  session = SessionConfig(
    max_turns=400, max_act_tokens=40, context_tokens=WINDOW, summary_tokens=40,
    max_summaries=300, observation_tokens=600,
  )  # fmt: skip
  return Experiment(
    name='test',
    model=MODEL,
    session=dataclasses.replace(session, **changes),
    engine=config_lib.EngineConfig(max_context=WINDOW + 64),
    machine=MachineConfig(driver='process', warm=0),
  )


def run(sampler, pool, task, config, index=0):
  return session_lib.run_session(
    sampler, pool, task, TOKENIZER, config, group_id='g', index=index, seed=index,
    provenance={},
  )  # fmt: skip


@pytest.fixture(scope='module')
def played():
  """(trajectory, clerk) of one that reads it all and one that gives up early."""
  clerks = [Clerk(), Clerk()]

  async def scenario():
    pool = Pool(MachineConfig(driver='process', warm=0))
    configs = experiment(), experiment(max_turns=30)
    try:
      return await asyncio.gather(
        *(
          run(clerk, pool, ledger_task(), config, index)
          for index, (clerk, config) in enumerate(
            zip(clerks, configs, strict=True)
          )
        )
      )
    finally:
      await pool.close()

  process._warned[:] = [True]
  return list(zip(asyncio.run(scenario()), clerks, strict=True))


def test_a_small_window_finishes_a_long_task(played):
  (got, clerk), (failed, _) = played
  observed = sum(
    len(TOKENIZER.encode(turn.text))
    for turn in got.turns
    if turn.kind == 'observation'
  )
  assert observed >= 100_000
  assert clerk.longest <= WINDOW
  assert max(len(s.tokens) for s in got.segments) <= WINDOW + 64
  assert got.stop_reason == 'finished' and got.reward_parts['tests'] == 1.0
  assert failed.stop_reason == 'turns' and failed.reward_parts['tests'] == 0.0
  assert len(got.segments) > 50


def test_every_generation_has_its_parent(played):
  got, _ = played[0]
  assert [s.parent for s in got.segments] == list(
    range(-1, len(got.segments) - 1)
  )
  reasons = [s.stop_reason for s in got.segments]
  assert reasons == ['summary'] * (len(reasons) - 1) + ['finished']
  kinds = [turn.kind for turn in got.turns]
  assert kinds.count('summary') == len(got.segments) - 1
  assert kinds.count('prompt') == len(got.segments)
  # Each segment begins with the prompt, whose keys and values are there.
  prompt = got.segments[0].tokens.tolist()
  prompt = prompt[: prompt.index(TOKENIZER.token_id('<act>'))]
  for segment in got.segments:
    assert segment.tokens[: len(prompt)].tolist() == prompt


def test_every_sampled_token_is_trained_once_with_one_advantage(played):
  """From the trajectories to the batches: nothing lost, nothing twice."""
  trajectories = tuple(trajectory for trajectory, _ in played)
  group = Group('g', 'ledger', 0, trajectories, 'here', 'i', 1)
  config = config_lib.RewardConfig()
  items = buffer.to_items([group], config)
  block = 16
  batches, placements = pack.pack(
    items, rows=4, length=2064, kv_block=block, layers=1, experts_per_token=2
  )
  want = advantage.group_advantages([t.reward for t in trajectories])
  assert want[0] > 0 > want[1]
  for index, (_, clerk) in enumerate(played):
    trained = []
    for item, place in zip(items, placements, strict=True):
      if item.origin[1] != index:
        continue
      batch = batches[place.batch]
      there = slice(place.start, place.start + len(item.segment.tokens))
      mask = batch.loss_mask[place.row, there]
      trained += batch.tokens[place.row, there][mask].tolist()
      values = batch.advantages[place.row, there][mask]
      assert (values == np.float32(want[index])).all()
    assert trained == clerk.sampled
  total = sum(int(batch.loss_mask.sum()) for batch in batches)
  assert total == sum(len(clerk.sampled) for _, clerk in played)
  weights = sum(float(batch.weights.sum()) for batch in batches)
  assert weights == pytest.approx(1.0)


# --- with a real engine ------------------------------------------------------


class Counting:
  """A sampler that notes what each request found in the cache."""

  def __init__(self, engine):
    self.engine = engine
    self.noted = []  # (tokens of the context, of them reused, summary asked)

  async def sample(self, request):
    before = self.engine.stats.reused
    completion = await self.engine.sample(request)
    asked = request.tokens[-1] == TOKENIZER.token_id('<summarize>')
    reused = self.engine.stats.reused - before
    self.noted.append((request.tokens, reused, bool(asked)))
    return completion


def test_keys_and_values_outlive_a_summary():
  """Asking for one computes a token; restarting, only what follows the prompt."""
  import jax

  from composer.inference import engine as engine_lib
  from composer.model import transformer

  block = 4
  task = dataclasses.replace(ledger_task(), files={'ledger.txt': 'from 1 2\n'})
  config = experiment(
    max_turns=14, max_act_tokens=8, context_tokens=200, summary_tokens=12,
    max_summaries=8, observation_tokens=24,
  )  # fmt: skip
  engine_config = config_lib.EngineConfig(
    rows=32, sequences=2, pages=160, max_context=256
  )
  config = dataclasses.replace(config, engine=engine_config)
  engine = engine_lib.Engine(
    MODEL, config_lib.NumericsConfig(mode='fast', kv_block=block), engine_config
  )
  engine.activate(
    0, params_lib.init(transformer.spec(MODEL), jax.random.key(0))
  )
  counting = Counting(engine)

  async def scenario():
    pool = Pool(MachineConfig(driver='process', warm=0))
    try:
      return await run(counting, pool, task, config)
    finally:
      await pool.close()

  try:
    got = asyncio.run(scenario())
  finally:
    engine.close()
  summaries = [i for i, (_, _, asked) in enumerate(counting.noted) if asked]
  assert len(got.segments) > 1 and summaries
  specs = [session_lib.TOOLS[name].spec for name in task.tools]
  prompt = chat.render_prompt(TOKENIZER, specs, task.instruction, '')
  for at, (tokens, reused, asked) in enumerate(counting.noted):
    if not at:
      assert reused == 0
      continue
    before = counting.noted[at - 1]
    if before[2]:  # the first call behind a summary
      assert reused >= len(prompt) // block * block
      continue
    # All that the call before had computed, in whole blocks; for a summary too.
    assert reused >= len(before[0]) // block * block
    if asked:
      assert len(tokens) - reused < len(tokens) // 2
  total = sum(len(tokens) for tokens, _, _ in counting.noted)
  assert sum(reused for _, reused, _ in counting.noted) > 0.7 * total
