"""Tasks of the kind `repair`: a small function in which one token is wrong.

`build_tasks` draws functions from the family of `functions.py`, finds inputs
that tell every broken variant from the right one, and splits the bugs:

  train               most bugs of most functions
  held_out_bugs       other bugs of the same functions
  held_out_functions  every bug of functions that are in neither of the above

All of it is a pure function of the config. Variables get new names with every
draw of a task (`redraw`), so names say nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import dataclasses
import functools
import importlib.resources
import json
import random
import re
from typing import Any

from composer.config import TasksConfig
from composer.environments.tasks import functions
from composer.environments.tasks.functions import Function
from composer.records import Task

FUNCTIONS = 48
VISIBLE_CASES = 6
HIDDEN_CASES = 16
MIN_BUGS = 10  # of a function; one with fewer is not drawn
MIN_USES = 3  # training functions in which every word must occur
POOL = 72  # inputs tried for a function
TOOLS = ('edit', 'test', 'submit')

# Every string that must be a single token, with its one leading space.
PIECES = tuple(
  ' ' + word
  for word in dict.fromkeys(
    [
      *(f'L{n}' for n in range(1, 10)),
      *(token for tokens in functions.CLASSES.values() for token in tokens),
      *(str(n) for n in range(17)),
      *functions.NAMES,
      *functions.AGGREGATES,
      *functions.MAPS,
      *functions.FILTERS,
      *('def', 'for', 'in', 'if', 'return', '=', 'from', 'of', 'items'),
      *TOOLS,
      *('LINE', 'TOKEN', ';', 'ok', 'error', 'line', 'token', 'all', 'pass'),
      *('turn', 'turns', 'left', 'summary', 'summaries', 'none', 'broken'),
      *('call', 'unknown', 'tool', 'text', 'time', 'out', ',', '.', ':'),
    ]
  )
)

Case = tuple[tuple[Any, ...], Any]  # arguments, expected result


@dataclasses.dataclass(frozen=True)
class TaskSet:
  train: tuple[Task, ...]
  held_out_bugs: tuple[Task, ...]
  held_out_functions: tuple[Task, ...]


@dataclasses.dataclass(frozen=True)
class Edit:
  """What an edit did: the file's text after it, and why not, if it failed."""

  text: str
  error: str


# --- what a session shows ----------------------------------------------------


def listing(task: Task) -> str:
  """The code as the prompt shows it: ' L1 def f a k L2 t = 0 ...'."""
  lines = functions.listing_lines(task.files['solution.py'])
  return ''.join(f' L{n} {line}' for n, line in enumerate(lines, 1))


def observe_edit(error: str) -> str:
  """How an edit's outcome is shown; `error` is that of an `Edit`."""
  return f' error {error}' if error else ' ok'


def observe_tests(stdout: str, exit_code: int) -> str:
  """How a test run is shown: ' all pass', ' 2 of 6', or ' error'.

  `stdout` is the runner's; its last 'passed X of Y' counts. A run that printed
  none (killed, timed out, no function to call) is an error.
  """
  counts = re.findall(r'^passed (\d+) of (\d+)$', stdout, re.MULTILINE)
  if not counts:
    return ' error'
  passed, total = (int(x) for x in counts[-1])
  if exit_code == 0 and passed == total:
    return ' all pass'
  return f' {passed} of {total}'


def apply_edit(
  current: str, original: str, line: str | int, token: str
) -> Edit:
  """Replaces the one editable token of a line of `original`.

  An edit is a patch of the original: it undoes the edits before it. One that
  cannot be applied leaves `current` as it is.

  Args:
    current: text of the file now.
    original: text of the file at the start of the session.
    line: 'L4' or 4, counted from 1.
    token: the new token, of the same class as the one that it replaces.
  """
  number = re.fullmatch(r'L?([1-9][0-9]{0,3})', str(line).strip(), re.ASCII)
  lines = original.splitlines(keepends=True)
  if not number or int(number[1]) > len(lines):
    return Edit(current, 'line')
  at = int(number[1]) - 1
  site = functions.find_site(lines[at].rstrip('\n'))
  if site is None:
    return Edit(current, 'line')
  kind, start, end = site
  if token.strip() not in functions.CLASSES[kind]:
    return Edit(current, 'token')
  lines[at] = lines[at][:start] + token.strip() + lines[at][end:]
  return Edit(''.join(lines), '')


# --- running trusted code ----------------------------------------------------


def run_cases(text: str, cases: list[Case]) -> tuple[int, int]:
  """(passed, total) of our own generated code, run in this very process."""
  function = _load(text)
  passed = sum(_call(function, args) == want for args, want in cases)
  return passed, len(cases)


def read_cases(text: str) -> list[Case]:
  """Reads a case file: JSON [[arguments, expected], ...]."""
  return [(tuple(args), want) for args, want in json.loads(text)]


def validate_task(task: Task) -> None:
  """Raises ValueError unless the bug fails every check and the fix passes.

  Runs the task's code in this process: for generated tasks only.
  """
  original = task.files['solution.py']
  bug = task.metadata['bug']
  fix = apply_edit(original, original, bug['line'], bug['right'])
  if fix.error:
    raise ValueError(
      f'task {task.id}: its fix {bug} does not apply ({fix.error}); line and'
      ' token must name an editable token of solution.py'
    )
  suites = {
    'visible tests (tests.json)': task.files['tests.json'],
    'hidden tests (cases.json)': task.hidden_files['cases.json'],
  }
  for name, text in suites.items():
    cases = read_cases(text)
    passed, total = run_cases(original, cases)
    if passed == total:
      raise ValueError(
        f'task {task.id}: all {total} {name} pass before the fix; add a case'
        ' that the bug fails, or drop the task'
      )
    passed, total = run_cases(fix.text, cases)
    if passed != total:
      raise ValueError(
        f'task {task.id}: {passed} of {total} {name} pass after the fix {bug};'
        ' the cases or the fix are wrong'
      )


def _load(text: str) -> Callable[..., Any]:
  scope: dict[str, Any] = {}
  exec(compile(text, 'solution.py', 'exec'), scope)
  return [x for x in scope.values() if callable(x)][-1]


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
  """The result, or the exception's type: a wrong token may divide by 0."""
  try:
    return function(*args)
  except Exception as error:
    return type(error)


# --- cases -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checks:
  """Case files of a function, as JSON, and the bugs that both of them see."""

  visible: str
  hidden: str
  bugs: tuple[tuple[int, str], ...]  # (line, wrong token)


def _inputs(function: Function, rng: random.Random) -> list[tuple[Any, ...]]:
  """Distinct inputs of short lists around the bound, or around zero."""
  bounded = functions.uses_bound(function)
  found: dict[str, tuple[Any, ...]] = {}
  while len(found) < POOL:
    bound = rng.randint(-1, 6) if bounded else 0
    size = rng.choice((0, 1, 1, 2, 2, 3, 3, 4, 5))
    near = (bound - 1, bound, bound + 1)
    items = [
      rng.choice(near) if rng.random() < 0.4 else rng.randint(-5, 9)
      for _ in range(size)
    ]
    args = (items, bound) if bounded else (items,)
    found[repr(args)] = args
  return list(found.values())


def _choose(kills: list[int], count: int, taken: list[int]) -> list[int]:
  """Indices of `count` inputs, greedily: those that see the least seen mutants.

  kills[i] is a bit set of the mutants that input i tells from the right
  function; inputs already `taken` are left out.
  """
  seen = [0] * max(kills).bit_length()
  picked: list[int] = []
  for _ in range(count):
    rest = [i for i in range(len(kills)) if i not in picked + taken]
    weights = [1 / (1 + 9 * times) ** 2 for times in seen]
    best = max(rest, key=functools.partial(_gain, kills, weights))
    picked.append(best)
    seen = [n + (kills[best] >> m & 1) for m, n in enumerate(seen)]
  return picked


def _gain(kills: list[int], weights: list[float], i: int) -> float:
  return sum(w for m, w in enumerate(weights) if kills[i] >> m & 1)


def _make_checks(function: Function, rng: random.Random) -> Checks | None:
  """Cases that see every bug of the function, or None if they cannot."""
  inputs = _inputs(function, rng)
  right = _load(functions.source(function))
  wanted = [_call(right, args) for args in inputs]
  mutants = functions.mutants(function)
  kills = [0] * len(inputs)
  for m, mutant in enumerate(mutants):
    broken = _load(functions.source(function, dict([mutant])))
    for i, args in enumerate(inputs):
      kills[i] |= (_call(broken, args) != wanted[i]) << m
  visible = _choose(kills, VISIBLE_CASES, [])
  hidden = _choose(kills, HIDDEN_CASES, visible)
  anywhere, in_visible, in_hidden = (
    functools.reduce(int.__or__, (kills[i] for i in where))
    for where in (range(len(inputs)), visible, hidden)
  )
  bugs = tuple(x for m, x in enumerate(mutants) if anywhere >> m & 1)
  if not anywhere == in_visible == in_hidden or len(bugs) < MIN_BUGS:
    return None
  texts = [
    json.dumps([[inputs[i], wanted[i]] for i in sorted(where)])
    for where in (visible, hidden)
  ]
  return Checks(texts[0], texts[1], bugs)


# --- the set -----------------------------------------------------------------


def _deck(words: Mapping[str, Any], rng: random.Random) -> Iterator[str]:
  """The words over and over, shuffled anew each time round."""
  while True:
    cards = list(words)
    rng.shuffle(cards)
    yield from cards


def _draw_functions(rng: random.Random) -> dict[Function, Checks]:
  """`FUNCTIONS` functions in which every word recurs about equally often."""
  aggregates = _deck(functions.AGGREGATES, rng)
  mappings = _deck(functions.MAPS, rng)
  filters = _deck(functions.FILTERS, rng)
  drawn: dict[Function, Checks] = {}
  words = set()
  while len(drawn) < FUNCTIONS:
    aggregate = next(aggregates)
    natural = functions.NATURAL_STARTS.get(aggregate)
    start = rng.randint(1 if aggregate == 'product' else 0, 5)
    if natural is not None and rng.random() < 0.5:
      start = natural
    on_value = aggregate == 'count' or rng.random() < 0.4
    function = Function(
      aggregate, start, next(mappings), next(filters), on_value
    )
    key = (aggregate, function.mapping, function.filter)
    checks = None if key in words else _make_checks(function, rng)
    if checks is not None:
      words.add(key)
      drawn[function] = checks
  return drawn


def _words(function: Function) -> tuple[str, ...]:
  start = f'from {function.start}'
  return (function.aggregate, function.mapping, function.filter, start)


def _hold_out_functions(
  drawn: list[Function], share: float, rng: random.Random
) -> set[Function]:
  """Functions whose words all remain in at least `MIN_USES` others."""
  uses: dict[str, int] = {}
  for function in drawn:
    for word in _words(function):
      uses[word] = uses.get(word, 0) + 1
  held: set[Function] = set()
  for function in rng.sample(drawn, len(drawn)):
    if len(held) >= round(share * len(drawn)):
      break
    if all(uses[word] > MIN_USES for word in _words(function)):
      held.add(function)
      for word in _words(function):
        uses[word] -= 1
  return held


def _hold_out_bugs(
  bugs: list[tuple[Function, int, str]], share: float, rng: random.Random
) -> set[tuple[Function, int, str]]:
  """Bugs that leave at least half of the others at their site in training."""
  room: dict[tuple[Function, int], float] = {}
  for function, line, _ in bugs:
    room[function, line] = room.get((function, line), 0) + 0.5
  held: set[tuple[Function, int, str]] = set()
  for bug in rng.sample(bugs, len(bugs)):
    if len(held) >= round(share * len(bugs)):
      break
    if room[bug[:2]] >= 1:
      room[bug[:2]] -= 1
      held.add(bug)
  return held


@functools.lru_cache(maxsize=4)
def build_tasks(config: TasksConfig) -> TaskSet:
  """Draws the functions, their cases and the split from `config.seed`.

  Raises:
    ValueError: `config.kind` is not 'repair', or a share is not in [0, 0.5].
  """
  if config.kind != 'repair':
    raise ValueError(f"tasks.kind is {config.kind!r}; known kinds: 'repair'")
  for name in ('held_out_bug_share', 'held_out_function_share'):
    share = getattr(config, name)
    if not 0 <= share <= 0.5:
      raise ValueError(
        f'tasks.{name} is {share}; choose a share from 0 to 0.5, so that the'
        ' training set keeps the larger part'
      )
  drawn = _draw_functions(random.Random(f'{config.seed}/functions'))
  rng = random.Random(f'{config.seed}/split')
  unseen = _hold_out_functions(list(drawn), config.held_out_function_share, rng)
  bugs = [(f, *bug) for f in drawn for bug in drawn[f].bugs]
  seen = [bug for bug in bugs if bug[0] not in unseen]
  held = _hold_out_bugs(seen, config.held_out_bug_share, rng)
  sets: dict[str, list[Task]] = {
    'train': [],
    'held_out_bugs': [],
    'held_out_functions': [],
  }
  for function, line, wrong in bugs:
    split = 'train'
    if function in unseen:
      split = 'held_out_functions'
    elif (function, line, wrong) in held:
      split = 'held_out_bugs'
    task = _make_task(function, line, wrong, drawn[function], split)
    sets[split].append(task)
  return TaskSet(**{name: tuple(tasks) for name, tasks in sets.items()})


# --- a task ------------------------------------------------------------------

_SPELT = {
  '<': 'lt', '<=': 'le', '>': 'gt', '>=': 'ge', '==': 'eq', '!=': 'ne',
  '+': 'add', '-': 'sub', '*': 'mul', '//': 'div', '%': 'mod',
  '+=': 'iadd', '-=': 'isub', '*=': 'imul', '//=': 'idiv', '%=': 'imod',
}  # fmt: skip


@functools.lru_cache(maxsize=1)
def runner() -> str:
  folder = importlib.resources.files('composer.environments.tasks')
  return folder.joinpath('runner.py').read_text(encoding='utf-8')


def _make_task(
  function: Function, line: int, wrong: str, checks: Checks, split: str
) -> Task:
  right = {x.line: x.right for x in functions.sites(function)}[line]
  task = Task(
    id=f'repair-{function.id}-L{line}-{_SPELT.get(wrong, wrong)}',
    kind='repair',
    instruction='',
    files={'tests.json': checks.visible},
    tools=TOOLS,
    test_command=('python', 'runner.py', 'solution.py', 'tests.json'),
    allowed=('solution.py',),
    hidden_files={'cases.json': checks.hidden, 'runner.py': runner()},
    hidden_command=('python', 'runner.py', 'solution.py', 'cases.json'),
    metadata={
      'function': dataclasses.asdict(function),
      'function_id': function.id,
      'description': functions.description(function),
      'bug': {'line': line, 'right': right, 'wrong': wrong},
      'split': split,
    },
  )
  return redraw(task, 0)


def redraw(task: Task, draw: int) -> Task:
  """The same task with the names of draw `draw`; its id stays."""
  rng = random.Random(f'{task.id}/{draw}')
  names = dict(
    zip(
      functions.ROLES,
      rng.sample(functions.NAMES, len(functions.ROLES)),
      strict=True,
    )
  )
  function = Function(**task.metadata['function'])
  bug = task.metadata['bug']
  return dataclasses.replace(
    task,
    instruction=' ' + functions.rename(task.metadata['description'], names),
    files={
      'solution.py': functions.source(
        function, {bug['line']: bug['wrong']}, names
      ),
      'tests.json': task.files['tests.json'],
      'runner.py': runner(),
    },
    metadata={**task.metadata, 'entry': names['F'], 'draw': draw},
  )
