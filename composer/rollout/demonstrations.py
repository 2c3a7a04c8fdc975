"""Demonstrations of tasks in machines: who knows the solution does the work.

A `repair` task is demonstrated without a machine (`scripted.py`). Every other
kind is demonstrated for real: a sampler says the turns of a script, and the
session is a run's own (`run_session`: template, tools, machine, budgets,
summaries, grading), so that every observation is what the tools answered. A
session that was to solve its task and is not paid in full by the hidden tests
and the monitors, that a budget cut short, or whose machine failed, shows nothing
worth learning: it is left out and counted.

  repository  the tests, a search for the function (both where they are offered),
              its lines, an edit that reverses the mutation or writes the body,
              the tests, the end. It is sloppy as the demonstrator of `repair` is:
              an edit is right at `midtrain.demo_right_edit`, else another
              mutation of the function, which is then answered by the right one
              or given up.
  harbor      the commands of the task's own solution/solve.sh
  migration   the schema, the whole of the answer, the check
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import difflib
import json
import pathlib
import random
from typing import Any
import zipfile

import numpy as np

from composer import templates
from composer.chat import Call
from composer.config import Experiment
from composer.config import MidtrainConfig
from composer.environments.machines import Pool
from composer.environments.tasks import mutations
from composer.environments.tasks import sets
from composer.environments.tasks.mutations import Text
from composer.records import Completion
from composer.records import SampleRequest
from composer.records import Task
from composer.records import Trajectory
from composer.rewards import combine
from composer.rollout import player
from composer.rollout import session as session_lib
from composer.templates.protocol import Message

WHOLE = 24  # lines of a body that are read at once; of a longer one, those
AROUND = 4  # before and after the fault
NOTES = 'So far:'
# Sessions where the config names no number. Those of `repair` are written down in
# a millisecond each; the others are played, in real machines.
COUNTS: Mapping[str, int] = {
  'repair': 12_000,
  'repository': 240,
  'harbor': 60,
  'migration': 60,
}
MOST_LOST = 4  # sessions in a row, each tried again: what is wrong stays wrong
Rendered = tuple[np.ndarray, np.ndarray]  # tokens int32 [T], sampled bool [T]


@dataclasses.dataclass(frozen=True)
class Script:
  """Turns that are said, and whether they end in the true solution."""

  turns: tuple[Message, ...]
  solves: bool


# --- scripts -----------------------------------------------------------------


def script(task: Task, config: MidtrainConfig, rng: random.Random) -> Script:
  """What is said in a session of the task.

  Raises:
    ValueError: of its kind no demonstration is known, the task holds no
      solution, or does not offer the tools that it takes.
  """
  if task.kind not in SCRIPTS:
    raise ValueError(
      f'task {task.id} is of kind {task.kind!r}, of which no demonstrations are'
      f' made; they are of {", ".join(SCRIPTS)} (and of repair, scripted)'
    )
  made = SCRIPTS[task.kind](task, config, rng)
  used = {call.name for turn in made.turns for call in turn.calls}
  if not used <= set(task.tools):
    raise ValueError(
      f'task {task.id} offers {", ".join(task.tools)}; its demonstration takes'
      f' {", ".join(sorted(used - set(task.tools)))} too'
    )
  return made


def _turn(name: str, **arguments: Any) -> Message:
  return Message('assistant', calls=(Call(name, arguments),))


def _repository(
  task: Task, config: MidtrainConfig, rng: random.Random
) -> Script:
  path = task.allowed[0]
  right, broken = _solution(task)[path], _text(task.files[path])
  name = str(task.metadata['function'])
  first, last = _place(name, right, broken)
  tests = [_turn('run_tests')] if 'run_tests' in task.tools else []
  turns = [*tests]
  if 'search' in task.tools:
    pattern = f'def {name.rpartition(".")[2]}'
    turns.append(_turn('search', pattern=pattern, path=path))
  look = 'view' if 'view' in task.tools else 'read'
  turns.append(_turn(look, path=path, start=first, end=last))
  change = replace if 'replace' in task.tools else edit
  current = broken
  if rng.random() >= config.demo_right_edit:
    wrong = _another(name, right, broken, rng)
    if wrong:
      turns.append(change(path, current, wrong))
      current = wrong
      if rng.random() < config.demo_test:
        turns += tests
      if rng.random() < config.demo_give_up:
        return Script((*turns, _turn('finish')), False)
  turns.append(change(path, current, right))
  turns += [*tests, _turn('finish')]
  return Script(tuple(turns), True)


def _harbor(task: Task, config: MidtrainConfig, rng: random.Random) -> Script:
  del config, rng
  script = task.metadata.get('solve')
  if not script:
    raise ValueError(
      f'task {task.id} has no solution/solve.sh that could be demonstrated'
    )
  turns = _turn('list'), _turn('shell', command=script), _turn('finish')
  return Script(turns, True)


def _migration(
  task: Task, config: MidtrainConfig, rng: random.Random
) -> Script:
  del config, rng
  writes = [
    _turn('write', path=path, text=text)
    for path, text in _solution(task).items()
  ]
  turns = _turn('read', path='schema.sql'), *writes, _turn('test')
  return Script((*turns, _turn('submit')), True)


SCRIPTS: Mapping[
  str, Callable[[Task, MidtrainConfig, random.Random], Script]
] = {'repository': _repository, 'harbor': _harbor, 'migration': _migration}


def _solution(task: Task) -> Mapping[str, str]:
  known = task.metadata.get('solution')
  if not known:
    raise ValueError(f'task {task.id} holds no solution to demonstrate')
  return known


def _text(data: str | bytes) -> str:
  return data.decode() if isinstance(data, bytes) else data


def _place(name: str, right: str, broken: str) -> tuple[int, int]:
  """Lines of the broken file to read.

  The function's body, if it is short: so they do not depend on where in it the
  fault is, which a model cannot know yet. Else what changed and what is around it.
  """
  start, end, _, _ = _changed(broken.splitlines(), right.splitlines())
  first, last = start + 1, max(end, start + 1)
  found = [x for x in mutations.functions(Text(broken)) if x.name == name]
  if not found:
    return first, last
  near, far = found[0].first, found[0].last
  if far - near >= WHOLE:
    near, far = max(near, first - AROUND), min(far, last + AROUND)
  return min(first, near), max(last, far)


def _another(name: str, right: str, broken: str, rng: random.Random) -> str:
  """The file with another fault in the same function; '' if there is none.

  One in the lines that are broken already, where there is one: a near miss.
  """
  text = Text(right)
  found = [x for x in mutations.functions(text) if x.name == name]
  made = [
    mutations.apply(right, (x.edit,))
    for function in found
    for x in mutations.mutations(text, function)
    if mutations.parses(right, x)
  ]
  made = [x for x in made if x not in (right, broken)]
  lines = broken.splitlines()
  place = _changed(lines, right.splitlines())[:2]
  near = [x for x in made if _changed(lines, x.splitlines())[:2] == place]
  return rng.choice(near or made) if made else ''


def edit(path: str, before: str, after: str) -> Message:
  """The turn that makes one text of the other by one exact replacement.

  What is replaced is as many whole lines as stand but once in the file.
  """
  old, new = before.splitlines(True), after.splitlines(True)
  first, last, first_new, last_new = _changed(old, new)
  while before.count(''.join(old[first:last])) != 1 or first == last:
    if first == 0 and last == len(old):
      break
    if first > 0:
      first, first_new = first - 1, first_new - 1
    else:
      last, last_new = last + 1, last_new + 1
  return _turn(
    'edit',
    path=path,
    old=''.join(old[first:last]),
    new=''.join(new[first_new:last_new]),
  )


def replace(path: str, before: str, after: str) -> Message:
  """The turn that makes one text of the other by replacing lines by number."""
  old, new = (
    [x.decode() for x in text.encode().splitlines(True)]
    for text in (before, after)
  )
  first, last, first_new, last_new = _changed(old, new)
  if first == last or first_new == last_new:  # it wants a line to stand on
    down = first == 0
    first, first_new = first - 1 + down, first_new - 1 + down
    last, last_new = last + down, last_new + down
  text = ''.join(new[first_new:last_new]).rstrip('\n')
  kept = _indentation(text)
  if kept == _indentation(old[first]):
    text = text[len(kept) :]
  return _turn('replace', path=path, start=first + 1, end=last, text=text)


def _indentation(text: str) -> str:
  """Of its first line."""
  line = text.partition('\n')[0]
  return line[: len(line) - len(line.lstrip())]


def _changed(old: Sequence[str], new: Sequence[str]) -> tuple[int, ...]:
  """[first, last) of the old lines and of the new ones that differ."""
  matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
  spans = [x[1:] for x in matcher.get_opcodes() if x[0] != 'equal']
  if not spans:
    return 0, 0, 0, 0
  return spans[0][0], spans[-1][1], spans[0][2], spans[-1][3]


# --- sessions ----------------------------------------------------------------


def count(experiment: Experiment) -> int:
  """How many demonstrations mid-training sees."""
  return experiment.midtrain.demonstrations or COUNTS[experiment.tasks.kind]


@dataclasses.dataclass
class Scripted:
  """Says a script, and notes of what it has said where a summary is wanted."""

  speaker: player.Player
  asked: tuple[int, ...]  # how a context ends in which a summary is wanted
  said: list[str] = dataclasses.field(default_factory=list)

  async def sample(self, request: SampleRequest) -> Completion:
    end = tuple(request.tokens[-len(self.asked) :].tolist())
    if end != self.asked:
      return await self.speaker.sample(request)
    turns = self.speaker.turns
    self.speaker.turns = iter([Message('assistant', self.notes())])
    try:
      return await self.speaker.sample(request)
    finally:
      self.speaker.turns = turns

  def notes(self) -> str:
    return ' '.join((NOTES, ', '.join(self.said) or 'nothing'))


def scripted(
  turns: Sequence[Message], tokenizer: Any, experiment: Experiment
) -> Scripted:
  """The sampler of a script, in the template of the experiment."""
  template = templates.choose(experiment.template, tokenizer)
  asked = tuple(template.open_summary(tokenizer, []))
  said: list[str] = []

  def told() -> Iterator[Message]:
    for turn in turns:
      yield turn
      said.extend(_told(call) for call in turn.calls)

  speaker = player.Player(tokenizer, experiment, told())
  return Scripted(speaker, asked, said)


def _told(call: Call) -> str:
  return ' '.join(
    (call.name, *(str(x) for x in call.arguments.values() if len(str(x)) < 60))
  )


async def play(
  task: Task,
  turns: Sequence[Message],
  pool: Pool,
  tokenizer: Any,
  experiment: Experiment,
  index: int,
) -> Trajectory:
  """One session of the script; raises as `session.run_session`."""
  return await session_lib.run_session(
    scripted(turns, tokenizer, experiment),
    pool,
    task,
    tokenizer,
    experiment,
    group_id='demonstration',
    index=index,
    seed=index,
    provenance={},
  )


@dataclasses.dataclass(frozen=True)
class Demonstrations:
  """What came of playing scripts.

  Attributes:
    segments: (tokens, sampled) of all that are kept; several of a session that
      was summarised.
    sessions: kept.
    dropped: reason -> sessions that are not.
  """

  segments: tuple[Rendered, ...]
  sessions: int
  dropped: Mapping[str, int]


def render(
  tasks: Sequence[Task],
  tokenizer: Any,
  experiment: Experiment,
  count: int,
  seed: int,
  stop: Callable[[], bool] = lambda: False,
  report: Callable[[int], None] = lambda done: None,
) -> Demonstrations | None:
  """Plays `count` sessions, tasks in turn, in machines of the experiment.

  Args:
    stop: whether to begin no more sessions; then it gives None.
    report: gets how many have been played, as each ends.

  Raises:
    ValueError: as `script` and `play`, machines go on failing, or no session is
      left: what became of them.
  """
  scripts = [
    script(
      tasks[i % len(tasks)],
      experiment.midtrain,
      random.Random(f'{seed}/demonstrations/{i}'),
    )
    for i in range(count)
  ]
  try:
    played = asyncio.run(
      _play_all(tasks, scripts, tokenizer, experiment, stop, report)
    )
  except ExceptionGroup as errors:
    raise errors.exceptions[0] from None
  if stop():
    return None
  kept = [x for _, segments in played for x in segments]
  dropped = dict(collections.Counter(why for why, _ in played if why))
  if not kept:
    raise ValueError(
      f'none of {count} demonstrations can be used ({dropped}); raise'
      ' session.context_tokens, max_turns or max_act_tokens, and'
      ' midtrain.sequence_length with them'
    )
  return Demonstrations(tuple(kept), count - sum(dropped.values()), dropped)


async def _play_all(
  tasks, scripts, tokenizer, experiment, stop, report
) -> list:
  """Of each script why it is no demonstration, or '', and its segments."""
  pool = Pool(experiment.machine, sets.harness())
  gate = asyncio.Semaphore(max(2, experiment.machine.warm))
  lost = done = 0  # of those to infrastructure, in a row

  async def one(i: int) -> tuple[str, list[Rendered]]:
    nonlocal lost, done
    async with gate:
      if stop():
        return 'stopped', []
      task, made = tasks[i % len(tasks)], scripts[i]
      try:
        played = await play(task, made.turns, pool, tokenizer, experiment, i)
      except session_lib.SessionFailed as failed:
        lost += 1
        if lost == min(MOST_LOST, len(scripts)):
          raise ValueError(
            f'{lost} demonstrations in a row were lost to infrastructure, the'
            f' last one so: {failed}'
          ) from failed
        return failed.reason, []
      finally:
        done += 1
        report(done)
    lost = 0
    why = _why_not(played, made, experiment)
    kept = [] if why else played.segments
    return why, [(x.tokens, x.sampled) for x in kept]

  try:
    async with asyncio.TaskGroup() as group:
      playing = [group.create_task(one(i)) for i in range(len(scripts))]
  finally:
    await pool.close()
  return [x.result() for x in playing]


def _why_not(
  trajectory: Trajectory, made: Script, experiment: Experiment
) -> str:
  """Why a session is no demonstration, or ''."""
  longest = max((len(x.tokens) for x in trajectory.segments), default=0)
  if trajectory.stop_reason != 'finished':
    return trajectory.stop_reason
  if any(turn.kind == 'broken' for turn in trajectory.turns):
    return 'broken'
  if longest > experiment.midtrain.sequence_length:
    return 'long'
  if made.solves and combine.earned(trajectory.reward_parts) < 1.0:
    return 'unsolved'
  return ''


# --- on disk -----------------------------------------------------------------


def write(path: pathlib.Path, made: Demonstrations) -> None:
  """Keeps them: a session that is played again would not be the same."""
  about = {'sessions': made.sessions, 'dropped': dict(made.dropped)}
  partial = path.with_suffix('.partial')
  with partial.open('wb') as file:
    np.savez_compressed(
      file,
      tokens=np.concatenate([x for x, _ in made.segments]),
      sampled=np.concatenate([x for _, x in made.segments]),
      lengths=np.array([len(x) for x, _ in made.segments]),
      about=np.array(json.dumps(about)),
    )
  partial.replace(path)


def read(path: pathlib.Path) -> Demonstrations:
  """What `write` wrote.

  Raises:
    ValueError: it cannot be read.
  """
  try:
    with np.load(path, allow_pickle=False) as file:
      cuts = np.cumsum(file['lengths'])[:-1]
      tokens = np.split(file['tokens'], cuts)
      sampled = np.split(file['sampled'], cuts)
      about = json.loads(str(file['about']))
  except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
    raise ValueError(
      f'{path} holds no demonstrations ({error}); begin in another --workdir'
    ) from error
  segments = tuple(zip(tokens, sampled, strict=True))
  return Demonstrations(segments, about['sessions'], about['dropped'])
