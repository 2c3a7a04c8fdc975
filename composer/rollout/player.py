"""Sessions that are played from a script: no model, all else as in a run.

`Player` is a sampler that says given turns; `play` runs a real session with it
(`run_session`: template, tools, machine, grading, monitors). It shows what a task
is like, and that its checks are passed by who does the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import json
import pathlib
import textwrap
from typing import Any

import numpy as np

from composer import chat
from composer import templates
from composer.chat import Call
from composer.config import EngineConfig
from composer.config import Experiment
from composer.config import MachineConfig
from composer.config import ModelConfig
from composer.config import RewardConfig
from composer.config import SessionConfig
from composer.environments.machines import Pool
from composer.environments.tasks import sets
from composer.model.vocabularies import bpe
from composer.records import UNKNOWN_EXPERT
from composer.records import Completion
from composer.records import SampleRequest
from composer.records import Task
from composer.records import Trajectory
from composer.rollout import session as session_lib
from composer.templates.protocol import Message

TEMPLATE = 'qwen3'
WIDTH = 78  # of what is shown
CONTEXT = 1 << 20  # tokens: bytes, as no vocabulary is needed
# Effort is counted in a model's tokens; here they are bytes.
REWARD = RewardConfig(effort_weight=0.0)
MACHINE = MachineConfig(
  exec_timeout_s=60.0, memory_mb=1024, processes=64, disk_mb=64, warm=0,
  concurrent=2,
)  # fmt: skip


def vocabulary() -> bpe.Vocabulary:
  """All bytes, and the control tokens of the template."""
  return bpe.Vocabulary(document(), 'bytes', '')


def document(
  template: str = TEMPLATE, merges: Sequence[tuple[str, str]] = ()
) -> dict[str, Any]:
  """A `tokenizer.json`: bytes, what their merges make, then the controls.

  Args:
    template: whose control tokens it has.
    merges: of a byte-level BPE, the first the strongest.
  """
  controls = templates.TEMPLATES[template].needs
  words = [*bpe.byte_chars(), *(left + right for left, right in merges)]
  flags = dict.fromkeys(
    ('single_word', 'lstrip', 'rstrip', 'normalized'), False
  )
  added = [
    {'id': len(words) + i, 'content': x, 'special': True, **flags}
    for i, x in enumerate(controls)
  ]
  split = {
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': True,
    'use_regex': True,
  }
  model = {
    'type': 'BPE',
    'dropout': None,
    'unk_token': None,
    'fuse_unk': False,
    'continuing_subword_prefix': None,
    'end_of_word_suffix': None,
    'byte_fallback': False,
    'ignore_merges': False,
    'merges': [f'{left} {right}' for left, right in merges],
    'vocab': {x: i for i, x in enumerate(words)},
  }
  unused = ('normalizer', 'post_processor', 'decoder', 'truncation', 'padding')
  return {
    'version': '1.0',
    **dict.fromkeys(unused),
    'added_tokens': added,
    'pre_tokenizer': split,
    'model': model,
  }


@dataclasses.dataclass
class Player:
  """A sampler that says the given turns, whatever it is asked.

  Every token has logprob 0, version 0 and no routes.
  """

  tokenizer: bpe.Vocabulary
  experiment: Experiment
  turns: Iterator[Message]

  async def sample(self, request: SampleRequest) -> Completion:
    message = next(self.turns, Message('assistant', 'I have nothing to add.'))
    said = spoken(self.tokenizer, self.experiment.template, message)
    tokens = np.asarray(said[: request.max_tokens], np.int32)
    total = len(request.tokens) + len(tokens)
    model = self.experiment.model
    shape = (total, model.layers - model.dense_layers, model.experts_per_token)
    computed = np.zeros(total, np.int32)
    computed[-1] = -1
    return Completion(
      tokens=tokens,
      logprobs=np.zeros(len(tokens), np.float32),
      versions=np.zeros(len(tokens), np.int32),
      experts=np.full(shape, UNKNOWN_EXPERT, np.int16),
      computed_versions=computed,
      stop_reason='stop' if len(tokens) == len(said) else 'length',
    )


def spoken(
  tokenizer: bpe.Vocabulary, template: str, message: Message
) -> list[int]:
  """The ids that a model would sample to say the message, the end included."""
  chosen = templates.choose(template, tokenizer)
  if chosen is templates.compact.COMPACT:  # acts, of one call or a text
    (act,) = message.calls or [chat.Text(message.content)]
    return chat.render_act(tokenizer, act)
  asked = [Message('user', '?')]
  before = chosen.render(tokenizer, asked, ())
  before = [*before, *chosen.open_turn(tokenizer)]
  whole = chosen.render(tokenizer, [*asked, message], ())
  shared = 0
  for one, other in zip(before, whole, strict=False):
    if one != other:
      break
    shared += 1
  said = whole[shared:]
  end = min(said.index(x) for x in chosen.stops(tokenizer) if x in said)
  return said[: end + 1]


def solution(task: Task) -> list[Message]:
  """Turns of somebody who knows the true solution of the task.

  Raises:
    ValueError: the task does not tell of one.
  """
  known = task.metadata.get('solution')
  if not known:
    raise ValueError(
      f'task {task.id} holds no solution; give the turns by --script'
    )
  write = [Call('write', {'path': x, 'text': y}) for x, y in known.items()]
  return [
    Message('assistant', 'I run the tests first.', calls=(_call('run_tests'),)),
    Message('assistant', 'I write what was there.', calls=tuple(write)),
    Message('assistant', 'Again.', calls=(_call('run_tests'),)),
    Message('assistant', calls=(_call('finish'),)),
  ]


def read_script(path: pathlib.Path) -> list[Message]:
  """Turns of calls from JSON: [[[tool, {argument: value}], ...], ...]."""
  try:
    turns = json.loads(path.read_text(encoding='utf-8'))
    return [
      Message('assistant', calls=tuple(Call(str(x), dict(y)) for x, y in calls))
      for calls in turns
    ]
  except (OSError, ValueError, TypeError) as error:
    raise ValueError(
      f'{path} is no script of turns, [[[tool, {{argument: value}}], ...],'
      f' ...]: {error}'
    ) from error


def _call(name: str) -> Call:
  return Call(name, {})


async def play(
  task: Task,
  turns: Sequence[Message],
  reward: RewardConfig = REWARD,
  machine: MachineConfig = MACHINE,
) -> Trajectory:
  """A session of the task in which the turns are said; errors as a session's."""
  tokenizer = vocabulary()
  experiment = Experiment(
    name='played',
    template=TEMPLATE,
    model=ModelConfig(vocab_size=tokenizer.vocab_size, layers=1),
    session=SessionConfig(
      max_turns=len(turns) + 1,
      max_act_tokens=CONTEXT // 4,
      context_tokens=CONTEXT,
      summary_tokens=64,
      observation_tokens=4_000,
      max_seconds=300.0,
    ),
    engine=EngineConfig(max_context=2 * CONTEXT),
    machine=machine,
    reward=reward,
  )
  pool = Pool(machine, sets.harness())
  try:
    return await session_lib.run_session(
      Player(tokenizer, experiment, iter(turns)),
      pool,
      task,
      tokenizer,
      experiment,
      group_id='played',
      index=0,
      seed=0,
      provenance={},
    )
  finally:
    await pool.close()


def told(trajectory: Trajectory, most: int = 12) -> Iterator[str]:
  """The session for people: turns in at most `most` lines each, then reward."""
  for turn in trajectory.turns:
    lines = turn.text.strip().split('\n')
    if turn.kind == 'prompt':
      lines = [y for x in lines for y in textwrap.wrap(x, WIDTH)]
    if len(lines) > most:
      gone = len(lines) - most
      half = most // 2
      lines = [*lines[:half], f'... {gone} lines ...', *lines[-half:]]
    yield f'[{turn.kind}]'
    yield from (f'  {line[:WIDTH]}' for line in lines if line.strip())
  parts = ', '.join(f'{x} {y:.3f}' for x, y in trajectory.reward_parts.items())
  yield f'reward {trajectory.reward:.3f} ({parts}), {trajectory.stop_reason}'
  for signal in trajectory.provenance.get('signals', ()):
    yield f'signal {signal["name"]}: {signal["evidence"]}'
