"""Scripted agents: what they read, do and score; rendered as really played."""

import asyncio
import dataclasses
import random
import re

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from composer import chat
from composer.config import Experiment
from composer.config import MachineConfig
from composer.config import MidtrainConfig
from composer.config import ModelConfig
from composer.config import SessionConfig
from composer.config import TasksConfig
from composer.environments import tools
from composer.environments.machines import Pool
from composer.environments.tasks import functions
from composer.environments.tasks import repair
from composer.model import tokenizer as tokenizer_lib
from composer.records import SampleRequest
from composer.rollout import scripted
from composer.rollout import session as session_lib

TOKENIZER = tokenizer_lib.load()
END, ACT, OBS, SUMMARIZE = map(
  TOKENIZER.token_id, ('<end>', '<act>', '<obs>', '<summarize>')
)
TASKS = repair.build_tasks(TasksConfig())
EXPERIMENT = Experiment(
  name='test',
  model=ModelConfig(layers=3, dense_layers=1, experts_per_token=2),
  midtrain=MidtrainConfig(
    demo_right_edit=0.15, demo_test=0.5, demo_give_up=0.2
  ),
  session=SessionConfig(context_tokens=144),  # never summarised
)
# So tight that most sessions are summarised, some twice.
TIGHT = dataclasses.replace(
  EXPERIMENT,
  session=SessionConfig(
    max_turns=10, context_tokens=94, max_summaries=2, observation_tokens=5
  ),
)
ANSWERS = scripted.answers(TASKS.train + TASKS.held_out_functions)


def demonstrator(experiment=EXPERIMENT):
  return scripted.Demonstrator(TOKENIZER, experiment, ANSWERS)


def guesser(experiment=EXPERIMENT):
  return scripted.BlindGuesser(TOKENIZER, experiment)


AGENTS = pytest.mark.parametrize('make', [demonstrator, guesser])


def play_some(make, experiment=EXPERIMENT, tasks=TASKS.train, count=60):
  agent = make(experiment)
  every = max(1, len(tasks) // count)
  return [
    (seed, scripted.play(task, agent.act, TOKENIZER, experiment, seed))
    for seed, task in enumerate(tasks[::every])
  ]


def acts(tokens, sampled):
  """Sampled texts of a segment, with the token that asked for each."""
  spans = np.flatnonzero(np.diff(np.r_[False, sampled, False]))
  return [
    (tokens[start - 1], TOKENIZER.decode(tokens[start:end]), start)
    for start, end in spans.reshape(-1, 2)
  ]


# --- the tokens --------------------------------------------------------------


@AGENTS
@pytest.mark.parametrize('experiment', [EXPERIMENT, TIGHT])
def test_a_sampler_says_what_was_played_from_tokens_alone(make, experiment):
  """Every sampled span again, from nothing but its context and its seed."""
  sampler, summaries = make(experiment), 0
  for seed, played in play_some(make, experiment, count=25):
    sample = 0
    for tokens, sampled in played.segments:
      for opener, text, start in acts(tokens, sampled):
        summaries += opener == SUMMARIZE
        request = SampleRequest(
          tokens=tokens[:start],
          max_tokens=16,
          stop_tokens=(END,),
          temperature=1.0,
          seed=session_lib.sample_seed(seed, sample),
        )
        answer = asyncio.run(sampler.sample(request))
        assert TOKENIZER.decode(answer.tokens) == text
        assert answer.stop_reason == 'stop'
        sample += 1
  assert (summaries > 10) == (experiment is TIGHT)


@AGENTS
def test_an_answer_is_cut_and_shaped_as_an_engine_would(make):
  ((_, played),) = play_some(make, count=1)[:1]
  tokens = played.segments[0][0]
  prompt = tokens[: list(tokens).index(ACT) + 1]
  request = SampleRequest(prompt, 2, (END,), 1.0, seed=3)
  answer = asyncio.run(make().sample(request))
  length = len(prompt) + 2
  assert answer.tokens.dtype == np.int32 and len(answer.tokens) == 2
  assert answer.stop_reason == 'length'
  assert answer.experts.shape == (length, 2, 2)
  assert answer.experts.dtype == np.int16 and (answer.experts == -1).all()
  assert (answer.logprobs == 0).all() and len(answer.versions) == 2
  assert answer.computed_versions.shape == (length,)


@AGENTS
def test_segments_sample_acts_and_summaries_and_nothing_else(make):
  for _, played in play_some(make, TIGHT):
    for tokens, sampled in played.segments:
      assert tokens.dtype == np.int32 and sampled.dtype == bool
      assert sampled[-1] and tokens[0] == TOKENIZER.token_id('<bos>')
      found = acts(tokens, sampled)
      assert all(opener in (ACT, SUMMARIZE) for opener, _, _ in found)
      assert all(text.count('<end>') == 1 for _, text, _ in found)
      opened = np.isin(tokens, (ACT, SUMMARIZE)).sum()
      assert len(found) == opened
      limit = TIGHT.session.context_tokens
      assert len(tokens) <= limit + TIGHT.session.summary_tokens + 1


def test_prompts_are_short():
  specs = [tool.spec for tool in tools.choose(TASKS.train[0]).values()]
  for tasks in (TASKS.train, TASKS.held_out_bugs, TASKS.held_out_functions):
    for task in tasks:
      prompt = chat.render_prompt(
        TOKENIZER, specs, task.instruction, repair.listing(task)
      )
      assert len(prompt) <= 64


def test_an_edit_is_three_tokens_and_observations_are_few():
  assert len(TOKENIZER.encode(' edit L4 >=')) == 3
  texts = [' ok', ' all pass', ' 4 of 6', ' error line', ' error token']
  assert [len(TOKENIZER.encode(x)) for x in texts] == [1, 2, 3, 2, 2]


# --- reading -----------------------------------------------------------------


def prompt_text(task):
  return f'<bos><tools> edit ; test<task>{task.instruction}<file>' + (
    repair.listing(task)
  )


def context(text):
  """Tokens of a text in which '<...>' are the special tokens."""
  ids = []
  for part in re.split('(<[a-z]+>)', text):
    special = part in chat.SPECIALS
    ids += [TOKENIZER.token_id(part)] if special else TOKENIZER.encode(part)
  return np.asarray(ids, np.int32)


@pytest.mark.parametrize(
  'turns, tried, last',
  [
    ('<act>', [], ''),
    ('<act> edit L2 3<end><obs> ok<end><act>', [(2, '3')], 'edit'),
    ('<act> edit L1 3<end><obs> error line<end><act>', [], ''),
    ('<act> test<end><obs> 3 of 6<end><act>', [], 'failed'),
    ('<act> test<end><obs> error<end><act>', [], 'failed'),
    ('<act> test<end><obs> all pass<end><act>', [], 'passed'),
    ('<summary> L2 3 L4 <= 3 turns left , 1 summaries<end><act>',
     [(2, '3'), (4, '<=')], 'failed'),
    ('<summary> L2 3 test 3 turns left , 1 summaries<end><act>',
     [(2, '3')], 'edit'),
    ('<summary> pass 3 turns left , 1 summaries<end><act> edit L5 +<end>'
     '<obs> ok<end><act> test<end><obs> 0 of 6<end><summarize>',
     [(5, '+')], 'failed'),
  ],
)  # fmt: skip
def test_a_context_is_read_as_it_was_meant(turns, tried, last):
  task = next(t for t in TASKS.train if ' above ' in t.instruction)
  tokens = context(prompt_text(task) + turns)
  view = scripted.read_context(TOKENIZER, tokens)
  assert view.description == task.metadata['description']
  assert view.lines == functions.listing_lines(task.files['solution.py'])
  assert (list(view.tried), view.last) == (tried, last)
  assert view.summarise == turns.endswith('<summarize>')


@pytest.mark.parametrize(
  'text', ['<bos>', '<bos><task> a<file> L1 b<act> test']
)
def test_a_context_that_cannot_be_continued_is_refused(text):
  with pytest.raises(ValueError, match='ends in <act> or <summarize>'):
    scripted.read_context(TOKENIZER, context(text))


@given(
  st.lists(st.tuples(st.integers(1, 7), st.sampled_from(['<', '//', '3']))),
  st.sampled_from(['', 'edit', 'failed', 'passed']),
  st.integers(1, 20),
)
def test_a_summary_fits_and_says_the_latest(tried, last, limit):
  view = scripted.View('', (), tuple(tried), last)
  text = scripted.summary_text(view, limit)
  assert len(TOKENIZER.encode(text)) + 1 <= max(limit, 2)
  after = scripted._after_summary(scripted.View('', ()), text)
  assert after.tried == tuple(tried)[len(tried) - len(after.tried) :]
  room = (limit - 2) // 2
  assert len(after.tried) >= min(room, len(tried))
  if last in ('edit', 'passed'):
    assert after.last == last


# --- what they do and score --------------------------------------------------


def test_the_guesser_never_repeats_and_tests_after_every_edit():
  session = dataclasses.replace(TIGHT.session, max_summaries=9)
  tight = dataclasses.replace(TIGHT, session=session)
  for _, played in play_some(guesser, tight):
    said = [
      text.removesuffix('<end>')
      for tokens, sampled in played.segments
      for opener, text, _ in acts(tokens, sampled)
      if opener == ACT
    ]
    edits = [text for text in said if text.startswith(' edit')]
    assert len(set(edits)) == len(edits) > 0
    for before, after in zip(said, said[1:], strict=False):
      assert (after == ' test') == before.startswith(' edit')
    passed = said[-1] == ' submit'
    assert passed or len(said) == session.max_turns
    assert played.solved or not passed


@pytest.mark.parametrize(
  'make, split, low, high',
  [
    (guesser, 'held_out_bugs', 0.18, 0.35),
    (guesser, 'held_out_functions', 0.18, 0.35),
    (demonstrator, 'train', 0.23, 0.37),
  ],
)
def test_solve_rates_leave_something_to_learn(make, split, low, high):
  agent, tasks = make(), getattr(TASKS, split)
  repeated = tasks * (1000 // len(tasks) + 1)
  solved = [
    scripted.play(task, agent.act, TOKENIZER, EXPERIMENT, seed).solved
    for seed, task in enumerate(repeated)
  ]
  assert low < np.mean(solved) < high


def test_a_perfect_demonstrator_solves_everything_in_three_acts():
  midtrain = dataclasses.replace(
    EXPERIMENT.midtrain, demo_right_edit=1.0, demo_test=1.0
  )
  perfect = dataclasses.replace(EXPERIMENT, midtrain=midtrain)
  for tasks in (TASKS.train, TASKS.held_out_functions):
    for _, played in play_some(demonstrator, perfect, tasks):
      assert played.solved and played.acts == 3


def test_playing_agrees_with_the_files():
  """The outcome of a session, recomputed by patching and running the text."""
  solved = 0
  for task in TASKS.train[::12]:
    agent = demonstrator()
    played = scripted.play(task, agent.act, TOKENIZER, EXPERIMENT, 5)
    original = text = task.files['solution.py']
    ((tokens, sampled),) = played.segments
    for _, act, _ in acts(tokens, sampled):
      if act.startswith(' edit'):
        _, line, token = act.removesuffix('<end>').split()
        text = repair.apply_edit(text, original, line, token).text
    cases = repair.read_cases(task.hidden_files['cases.json'])
    assert played.solved == (repair.run_cases(text, cases) == (16, 16))
    solved += played.solved
  assert solved > 5


# --- demonstrations ----------------------------------------------------------


def demonstrations(seed, count=40, experiment=TIGHT):
  rng = np.random.default_rng(seed)
  return scripted.render_demonstrations(
    TASKS.train, TOKENIZER, experiment, rng, count
  )


def test_demonstrations_follow_the_seed():
  one, same, other = demonstrations(1), demonstrations(1), demonstrations(2)
  assert len(one) > 40  # some are summarised
  for (tokens, sampled), (again, mask) in zip(one, same, strict=True):
    assert (tokens == again).all() and (sampled == mask).all()
  assert {x.tobytes() for x, _ in one}.isdisjoint(x.tobytes() for x, _ in other)


def test_budgets_that_cut_acts_are_refused():
  session = dataclasses.replace(EXPERIMENT.session, max_act_tokens=3)
  short = dataclasses.replace(EXPERIMENT, session=session)
  with pytest.raises(ValueError, match='session.max_act_tokens is 3'):
    demonstrations(0, experiment=short)


# --- against the real session ------------------------------------------------


@pytest.mark.filterwarnings('ignore:machine.driver=process')
@AGENTS
@pytest.mark.parametrize('experiment', [EXPERIMENT, TIGHT])
def test_a_real_session_gives_the_same_tokens(make, experiment):
  """Tools, machines and grading are the real ones; all sessions at once."""
  agent = make(experiment)
  drawn = random.Random(4).sample(TASKS.train, 16)
  tasks = [repair.redraw(task, draw) for draw, task in enumerate(drawn)]

  async def run():
    pool = Pool(MachineConfig(driver='process', exec_timeout_s=20.0))
    try:
      return await asyncio.gather(*(
        session_lib.run_session(
          agent, pool, task, TOKENIZER, experiment,
          group_id='g', index=0, seed=seed, provenance={},
        )
        for seed, task in enumerate(tasks)
      ))  # fmt: skip
    finally:
      await pool.close()

  for seed, real in enumerate(asyncio.run(run())):
    played = scripted.play(tasks[seed], agent.act, TOKENIZER, experiment, seed)
    assert len(real.segments) == len(played.segments)
    for segment, (tokens, sampled) in zip(
      real.segments, played.segments, strict=True
    ):
      assert segment.tokens.tolist() == tokens.tolist()
      assert segment.sampled.tolist() == sampled.tolist()
    assert real.reward_parts['tests'] == float(played.solved)
