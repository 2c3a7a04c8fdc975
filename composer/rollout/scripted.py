"""Scripted agents: they read a session's tokens and speak in tokens.

  Demonstrator  is sloppy on purpose: it knows the right edit, makes it seldom,
                tests now and then and gives up early. Its sessions teach the
                form of acts in mid-training, and leave much to learn.
  BlindGuesser  knows what an edit may be, and nothing of the task: it tests
                after every edit, never repeats one, and uses the whole budget.
                What needs no learning must be beaten.

Both are samplers, as an engine is: all that they do follows from the tokens and
the seed of a request. Their summaries list the edits tried, and end in 'test'
if the last one was never tested, or in 'pass' if its tests passed.

`play` is a session of such an agent without machines: it runs our own
generated code in this process, and gives the very tokens that
`composer.rollout.session` would for the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
import random

import numpy as np

from composer import chat
from composer.config import Experiment
from composer.config import SessionConfig
from composer.environments import tools
from composer.environments.tasks import functions
from composer.environments.tasks import repair
from composer.records import UNKNOWN_EXPERT
from composer.records import UNSAMPLED_VERSION
from composer.records import Completion
from composer.records import SampleRequest
from composer.records import Task
from composer.rollout.session import sample_seed

Pairs = tuple[tuple[int, str], ...]  # (line, token) of edits
Agent = Callable[['View', random.Random], str]  # -> the text of an act

NEAR_MISS = 0.7  # of wrong edits are at least on the line with the bug
LONGEST_ACT = 4  # tokens: ' edit' ' L4' ' >' <end>


@dataclasses.dataclass(frozen=True)
class View:
  """What a context says, for an agent of `repair` tasks.

  Attributes:
    description: of the function, its bound written K.
    lines: of the listing, without labels.
    tried: edits so far, the summary's included.
    last: '' (nothing yet), 'edit' (untested), 'failed' or 'passed'.
    summarise: whether a summary is asked for.
  """

  description: str
  lines: tuple[str, ...]
  tried: Pairs = ()
  last: str = ''
  summarise: bool = False


# --- reading -----------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def _view(instruction: str, listing: str) -> View:
  """The view of a prompt. The bound is the second parameter, if any."""
  lines: list[list[str]] = []
  for word in listing.split():
    if word == f'L{len(lines) + 1}':
      lines.append([])
    elif lines:
      lines[-1].append(word)
  bound = lines[0][3] if lines and len(lines[0]) > 3 else None
  words = ('K' if word == bound else word for word in instruction.split())
  return View(' '.join(words), tuple(' '.join(line) for line in lines))


def _pairs(words: Sequence[str]) -> Pairs:
  """Edits written 'L4 < L6 -='; whatever is not one is passed over."""
  return tuple(
    (int(word[1:]), token)
    for word, token in zip(words, words[1:], strict=False)
    if word[:1] == 'L' and word[1:].isdecimal()
  )


def _after_act(view: View, act: str, observation: str) -> View:
  """The view after a turn; what was no edit and no test changes nothing."""
  words = act.split()
  if words[:1] == ['edit'] and observation.split() == ['ok']:
    tried = view.tried + _pairs(words)
    return dataclasses.replace(view, tried=tried, last='edit')
  if words == ['test']:
    last = 'passed' if observation.split() == ['all', 'pass'] else 'failed'
    return dataclasses.replace(view, last=last)
  return view


def _after_summary(view: View, summary: str) -> View:
  """The view at the start of the segment that begins with `summary`."""
  words = summary.split()
  tried = _pairs(words)
  last = 'failed' if tried else ''
  # What the harness adds, '3 turns left , ...', holds neither word.
  if 'test' in words:
    last = 'edit'
  elif 'pass' in words:
    last = 'passed'
  return dataclasses.replace(view, tried=tried, last=last)


def read_context(
  tokenizer: chat.Tokenizer, tokens: Sequence[int] | np.ndarray
) -> View:
  """Reads a whole context, from <bos> to the <act> or <summarize> at its end.

  Raises:
    ValueError: it holds no task and no listing, or ends elsewhere.
  """
  marks = {tokenizer.token_id(piece): piece for piece in chat.SPECIALS}
  parts: list[tuple[str, list[int]]] = []
  for token in np.asarray(tokens).tolist():
    if token in marks:
      parts.append((marks[token], []))
    elif parts:
      parts[-1][1].append(token)
  texts = [(mark, tokenizer.decode(ids)) for mark, ids in parts]
  named = dict(reversed(texts))
  if not {chat.TASK, chat.FILE} <= set(named) or (
    texts[-1] not in ((chat.ACT, ''), (chat.SUMMARIZE, ''))
  ):
    raise ValueError(
      'a scripted agent needs a context with <task> and <file> that ends in'
      f' <act> or <summarize>; got {[mark for mark, _ in texts]}'
    )
  view = _view(named[chat.TASK], named[chat.FILE])
  act = ''
  for mark, text in texts[:-1]:
    if mark == chat.SUMMARY:
      view = _after_summary(view, text)
    elif mark == chat.ACT:
      act = text
    elif mark == chat.OBS:
      view = _after_act(view, act, text)
  return dataclasses.replace(view, summarise=texts[-1][0] == chat.SUMMARIZE)


# --- acting ------------------------------------------------------------------


def summary_text(view: View, limit: int) -> str:
  """The last edits tried, in at most `limit` tokens with <end>."""
  status = {'edit': ' test', 'passed': ' pass'}.get(view.last, '')
  room = (limit - 1 - bool(status)) // 2
  kept = view.tried[-room:] if room > 0 else ()
  return ''.join(f' L{line} {token}' for line, token in kept) + status


def _edit(pair: tuple[int, str]) -> str:
  return f' edit L{pair[0]} {pair[1]}'


def answers(tasks: Sequence[Task]) -> dict[str, dict[int, str]]:
  """Right token of every editable line, by the description of the function."""
  table = {}
  for task in tasks:
    description = task.metadata['description']
    if description not in table:
      function = functions.Function(**task.metadata['function'])
      table[description] = {x.line: x.right for x in functions.sites(function)}
  return table


@dataclasses.dataclass(frozen=True)
class Demonstrator:
  """Edits right at `midtrain.demo_right_edit`, else wrong within the class.

  A wrong edit is mostly a near miss, on the line with the bug: where to look is
  taught more often than what to write.

  `answers` are those of the tasks that it may meet.
  """

  tokenizer: chat.Tokenizer
  experiment: Experiment
  answers: Mapping[str, Mapping[int, str]]

  async def sample(self, request: SampleRequest) -> Completion:
    return _answer(self.tokenizer, self.act, self.experiment, request)

  def act(self, view: View, rng: random.Random) -> str:
    config = self.experiment.midtrain
    if view.summarise:
      return summary_text(view, self.experiment.session.summary_tokens)
    if view.last == 'passed':
      return ' submit'
    if view.last == 'edit' and rng.random() < config.demo_test:
      return ' test'
    if view.tried and rng.random() < config.demo_give_up:
      return ' submit'
    right = self.answers[view.description]
    edits = functions.candidate_edits(view.lines)
    fixes = [x for x in edits if right[x[0]] == x[1]]
    if rng.random() < config.demo_right_edit:
      return _edit(rng.choice(fixes))
    wrong = [x for x in edits if x not in fixes and x not in view.tried]
    near = [x for x in wrong if x[0] == fixes[0][0]]
    if near and rng.random() < NEAR_MISS:
      return _edit(rng.choice(near))
    return _edit(rng.choice(wrong or edits))


@dataclasses.dataclass(frozen=True)
class BlindGuesser:
  """Tries every edit once, in random order, and tests each."""

  tokenizer: chat.Tokenizer
  experiment: Experiment

  async def sample(self, request: SampleRequest) -> Completion:
    return _answer(self.tokenizer, self.act, self.experiment, request)

  def act(self, view: View, rng: random.Random) -> str:
    if view.summarise:
      return summary_text(view, self.experiment.session.summary_tokens)
    if view.last == 'edit':
      return ' test'
    edits = functions.candidate_edits(view.lines)
    fresh = [x for x in edits if x not in view.tried]
    if view.last == 'passed' or not fresh:
      return ' submit'
    return _edit(rng.choice(fresh))


def _answer(
  tokenizer: chat.Tokenizer,
  agent: Agent,
  experiment: Experiment,
  request: SampleRequest,
) -> Completion:
  """An engine's answer that says what the agent does: no routes, version 0."""
  view = read_context(tokenizer, request.tokens)
  text = agent(view, random.Random(request.seed))
  whole = [*tokenizer.encode(text), tokenizer.token_id(chat.END)]
  tokens = np.asarray(whole[: request.max_tokens], np.int32)
  model = experiment.model
  length = len(request.tokens) + len(tokens)
  layers = model.layers - model.dense_layers
  shape = (length, layers, model.experts_per_token)
  return Completion(
    tokens=tokens,
    logprobs=np.zeros(len(tokens), np.float32),
    versions=np.zeros(len(tokens), np.int32),
    experts=np.full(shape, UNKNOWN_EXPERT, np.int16),
    computed_versions=np.full(length, UNSAMPLED_VERSION, np.int32),
    stop_reason='stop' if len(tokens) == len(whole) else 'length',
  )


# --- playing without machines ------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Played:
  """A session: (tokens int32 [T], sampled bool [T]) of every segment."""

  segments: tuple[tuple[np.ndarray, np.ndarray], ...]
  solved: bool
  acts: int


class _Transcript:
  """The tokens of a running session; grows, and restarts at a summary."""

  def __init__(self, tokenizer: chat.Tokenizer, prompt: list[int]):
    self.tokenizer = tokenizer
    self.prompt = prompt
    self.tokens = list(prompt)
    self.sampled = [False] * len(prompt)
    self.closed: list[tuple[np.ndarray, np.ndarray]] = []
    self.known = 0  # tokens up to the last one that was sampled

  def add(self, tokens: Sequence[int], sampled: bool = False) -> None:
    self.tokens += tokens
    self.sampled += [sampled] * len(tokens)
    if sampled:
      self.known = len(self.tokens)

  def close(self) -> None:
    """Ends the segment; what follows the last sampled token is in none."""
    self.closed.append(
      (
        np.asarray(self.tokens[: self.known], np.int32),
        np.asarray(self.sampled[: self.known], bool),
      )
    )

  def restart(self, summary: list[int], left: int, summaries: int) -> None:
    self.close()
    self.tokens = chat.render_restart(
      self.tokenizer, self.prompt, summary, left, summaries
    )
    self.sampled = [False] * len(self.tokens)


@functools.lru_cache(maxsize=4096)
def _cases(text: str) -> list[repair.Case]:
  return repair.read_cases(text)


@functools.lru_cache(maxsize=65536)
def _outcome(
  function: functions.Function, edits: Pairs, visible: str, hidden: str
) -> tuple[int, int, bool]:
  """(visible passed, visible total, solved) with the tokens of `edits`."""
  text = functions.source(function, dict(edits))
  passed, total = repair.run_cases(text, _cases(visible))
  hidden_passed, hidden_total = repair.run_cases(text, _cases(hidden))
  return passed, total, hidden_passed == hidden_total


@functools.lru_cache(maxsize=256)
def _test_text(passed: int, total: int) -> str:
  return repair.observe_tests(
    f'passed {passed} of {total}\n', int(passed != total)
  )


def play(
  task: Task,
  agent: Agent,
  tokenizer: chat.Tokenizer,
  experiment: Experiment,
  seed: int,
) -> Played:
  """A session of `agent`, as `run_session` would run it with `seed`.

  Raises:
    ValueError: the budgets cut the acts of a scripted agent.
  """
  session = experiment.session
  if session.max_act_tokens < LONGEST_ACT:
    raise ValueError(
      f'session.max_act_tokens is {session.max_act_tokens}; a scripted agent'
      f' needs {LONGEST_ACT} (edit LINE TOKEN and its end)'
    )
  end = tokenizer.token_id(chat.END)
  instruction, listing = task.instruction, repair.listing(task)
  specs = tuple(tool.spec for tool in tools.choose(task).values())
  prompt = chat.render_prompt(tokenizer, specs, instruction, listing)
  transcript = _Transcript(tokenizer, prompt)
  world = _World(task)
  view = opening = _view(instruction, listing)
  acts = summaries = 0
  while acts < session.max_turns:
    rng = random.Random(sample_seed(seed, acts + summaries))
    if _must_summarise(transcript, session):
      if summaries == session.max_summaries:
        break
      summaries += 1
      text = agent(dataclasses.replace(view, summarise=True), rng)
      transcript.add(chat.open_summary(tokenizer))
      summary = tokenizer.encode(text)
      transcript.add([*summary, end], sampled=True)
      transcript.restart(summary, session.max_turns - acts, summaries)
      view = _after_summary(opening, text)
      continue
    text = agent(view, rng)
    acts += 1
    transcript.add(chat.open_turn(tokenizer))
    transcript.add([*tokenizer.encode(text), end], sampled=True)
    if text == ' submit':
      break
    observation = world.step(text)
    transcript.add(
      chat.render_observation(
        tokenizer, observation, session.observation_tokens
      )
    )
    view = _after_act(view, text, observation)
  if len(transcript.tokens) > len(prompt):
    transcript.close()
  return Played(tuple(transcript.closed), world.outcome()[2], acts)


def _must_summarise(transcript: _Transcript, session: SessionConfig) -> bool:
  return chat.summary_due(len(transcript.tokens), session)


class _World:
  """The file of a `repair` task, as the edits of a session leave it."""

  def __init__(self, task: Task):
    bug = task.metadata['bug']
    self.function = functions.Function(**task.metadata['function'])
    self.original = {bug['line']: bug['wrong']}
    self.current = self.original
    self.checks = (task.files['tests.json'], task.hidden_files['cases.json'])

  def outcome(self) -> tuple[int, int, bool]:
    pairs = tuple(sorted(self.current.items()))
    return _outcome(self.function, pairs, *self.checks)

  def step(self, act: str) -> str:
    """Does what a scripted agent says, and returns the observation."""
    if act == ' test':
      return _test_text(*self.outcome()[:2])
    ((line, token),) = _pairs(act.split())
    self.current = {**self.original, line: token}
    return repair.observe_edit('')


def render_demonstrations(
  tasks: Sequence[Task],
  tokenizer: chat.Tokenizer,
  experiment: Experiment,
  rng: np.random.Generator,
  count: int,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Segments of `count` sessions of the demonstrator, over drawn tasks.

  Returns:
    (tokens int32 [T], sampled bool [T]) of every segment: a session that was
    summarised gives two.
  """
  agent = Demonstrator(tokenizer, experiment, answers(tasks)).act
  segments: list[tuple[np.ndarray, np.ndarray]] = []
  chosen = rng.integers(len(tasks), size=count)
  draws, seeds = rng.integers(1 << 31, size=(2, count)).tolist()
  for which, draw, seed in zip(chosen, draws, seeds, strict=True):
    task = repair.redraw(tasks[which], draw)
    played = play(task, agent, tokenizer, experiment, seed)
    segments += played.segments
  return segments


def render_solutions(
  tasks: Sequence[Task],
  tokenizer: chat.Tokenizer,
  rng: np.random.Generator,
  count: int,
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Functions without a bug under their descriptions, as documents.

  They teach what the words of a description mean in code, and nothing of how a
  session goes: no act is in them.

  Returns:
    `count` times (tokens int32 [T], sampled bool [T], all false).
  """
  documents = []
  chosen = rng.integers(len(tasks), size=count)
  draws = rng.integers(1 << 31, size=count).tolist()
  for which, draw in zip(chosen, draws, strict=True):
    task = repair.redraw(tasks[which], draw)
    bug, text = task.metadata['bug'], task.files['solution.py']
    fixed = repair.apply_edit(text, text, bug['line'], bug['right']).text
    task = dataclasses.replace(task, files={**task.files, 'solution.py': fixed})
    prompt = chat.render_prompt(
      tokenizer, (), task.instruction, repair.listing(task)
    )
    tokens = np.asarray(prompt, np.int32)
    documents.append((tokens, np.zeros(len(tokens), bool)))
  return documents
