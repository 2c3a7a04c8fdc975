"""Repair tasks: what they mean, how they are split, what an edit does."""

import collections
import dataclasses
import json
import math
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
import pytest

from composer.config import TasksConfig
from composer.environments.tasks import functions
from composer.environments.tasks import repair

CONFIG = TasksConfig()
TASKS = repair.build_tasks(CONFIG)
ALL = TASKS.train + TASKS.held_out_bugs + TASKS.held_out_functions
BY_FUNCTION = {task.metadata['function_id']: task for task in ALL}

# What the words mean, written a second time and without any code of ours.
MEANING = {
  'squares': lambda x: x**2,
  'doubles': lambda x: 2 * x,
  'triples': lambda x: x + x + x,
  'residues': lambda x: x - 3 * math.floor(x / 3),
  'thirds': lambda x: math.floor(x / 3),
  'halves': lambda x: math.floor(x / 2),
  'parities': lambda x: abs(x) & 1,
  'successors': lambda x: x - -1,
  'predecessors': lambda x: -1 + x,
  'negatives': lambda x: -x,
  'complements': lambda x: -x + 9,
  'items': lambda x: x,
}
KEPT = {
  'above': lambda x, k: k < x,
  'below': lambda x, k: k > x,
  'reaching': lambda x, k: not x < k,
  'within': lambda x, k: not x > k,
  'except': lambda x, k: x - k,
  'equalling': lambda x, k: not x - k,
  'even': lambda x, k: not x & 1,
  'odd': lambda x, k: x & 1,
  'positive': lambda x, k: x > 0,
  'negative': lambda x, k: -x > 0,
}
FOLD = {
  'sum': lambda start, values: start + sum(values),
  'deficit': lambda start, values: start - sum(values),
  'product': lambda start, values: math.prod([start, *values]),
  'count': lambda start, values: start + len(values),
  'largest': lambda start, values: max([start, *values]),
  'smallest': lambda start, values: min([start, *values]),
}


def meant(description, items, bound=None):
  """The value that the description asks for."""
  head, *phrases = description.split(' of ')
  aggregate, *start = head.split(' from ')
  start = int(start[0]) if start else {'product': 1}.get(aggregate, 0)
  words = phrases[-1].split()
  (keep,) = (word for word in words if word in KEPT)
  (noun,) = (word for word in words if word in MEANING)
  pairs = [(MEANING[noun](x), x) for x in items]
  values = [value for value, _ in pairs if KEPT[keep](value, bound)]
  if len(phrases) == 2:
    values = [MEANING[phrases[0]](value) for value in values]
  return FOLD[aggregate](start, values)


@pytest.mark.parametrize('task', BY_FUNCTION.values(), ids=lambda t: t.id)
def test_cases_say_what_the_description_says(task):
  suites = (task.files['tests.json'], task.hidden_files['cases.json'])
  visible, hidden = map(repair.read_cases, suites)
  assert len(visible) == 6 and len(hidden) == 16
  inputs = [json.dumps(args) for args, _ in visible + hidden]
  assert len(set(inputs)) == len(inputs)
  for args, expected in visible + hidden:
    assert meant(task.metadata['description'], *args) == expected


def test_the_set_is_large_and_every_task_is_a_task():
  assert 40 <= len(BY_FUNCTION) <= 60
  assert len({task.id for task in ALL}) == len(ALL) > 800
  bugs = collections.Counter(task.metadata['function_id'] for task in ALL)
  assert 10 <= min(bugs.values()) and max(bugs.values()) <= 18
  for task in ALL:
    repair.validate_task(task)


def test_a_bug_is_one_word_of_the_listing():
  for task in ALL:
    bug = task.metadata['bug']
    original = task.files['solution.py']
    fixed = repair.apply_edit(original, original, bug['line'], bug['right'])
    words = repair.listing(task).split()
    task_fixed = dataclasses.replace(task, files={'solution.py': fixed.text})
    right = repair.listing(task_fixed).split()
    changed = [x for x in zip(words, right, strict=True) if x[0] != x[1]]
    assert changed == [(bug['wrong'], bug['right'])]


def test_splits_are_what_they_say():
  for split in dataclasses.fields(TASKS):
    tasks = getattr(TASKS, split.name)
    assert {task.metadata['split'] for task in tasks} == {split.name}
  trained, bugs, unseen = (
    {task.metadata['function_id'] for task in tasks}
    for tasks in (TASKS.train, TASKS.held_out_bugs, TASKS.held_out_functions)
  )
  assert bugs <= trained and not trained & unseen
  assert len(unseen) == round(0.2 * len(BY_FUNCTION))
  seen = len(TASKS.train) + len(TASKS.held_out_bugs)
  assert len(TASKS.held_out_bugs) == round(0.25 * seen)


def test_sites_of_held_out_bugs_remain_in_training():
  def count(tasks):
    return collections.Counter(
      (task.metadata['function_id'], task.metadata['bug']['line'])
      for task in tasks
    )

  train, held = count(TASKS.train), count(TASKS.held_out_bugs)
  assert all(train[site] >= held[site] for site in held)


def test_every_word_recurs_in_training_functions():
  trained = {task.metadata['function_id']: task for task in TASKS.train}
  words = collections.Counter(
    word
    for task in trained.values()
    for word in task.metadata['description'].split()
  )
  every = [*functions.AGGREGATES, *functions.MAPS, *functions.FILTERS]
  assert all(words[word] >= 3 for word in every)


def test_an_edit_is_one_of_many():
  for task in ALL:
    lines = functions.listing_lines(task.files['solution.py'])
    edits = functions.candidate_edits(lines)
    assert len(set(edits)) == len(edits) >= 14
    bug = task.metadata['bug']
    assert (bug['line'], bug['right']) in edits


def test_visible_tests_speak_for_hidden_ones():
  """Over every edit of some tasks: what passes the tests is solved."""
  differ = total = 0
  for task in ALL[::4]:
    original = task.files['solution.py']
    suites = (task.files['tests.json'], task.hidden_files['cases.json'])
    visible, hidden = map(repair.read_cases, suites)
    for edit in functions.candidate_edits(functions.listing_lines(original)):
      text = repair.apply_edit(original, original, *edit).text
      seen = repair.run_cases(text, visible) == (6, 6)
      differ += seen != (repair.run_cases(text, hidden) == (16, 16))
      total += 1
  assert total > 3000 and differ / total < 0.005


def test_the_seed_decides_everything():
  repair.build_tasks.cache_clear()
  assert repair.build_tasks(CONFIG) == TASKS
  other = repair.build_tasks(dataclasses.replace(CONFIG, seed=1))
  ids = {task.id for task in ALL}
  assert len(ids & {task.id for task in other.train}) < len(other.train) / 4


def test_a_redraw_changes_names_and_nothing_else():
  task = next(t for t in ALL if ' above ' in t.instruction)
  draws = [repair.redraw(task, draw) for draw in range(20)]
  assert repair.redraw(task, 7) == draws[7]
  assert len({draw.files['solution.py'] for draw in draws}) == 20
  for draw in draws:
    repair.validate_task(draw)
    assert (draw.id, draw.hidden_files) == (task.id, task.hidden_files)
    assert draw.files['tests.json'] == task.files['tests.json']
    words = repair.listing(draw).split()
    assert words[1:3] == ['def', draw.metadata['entry']]
    assert draw.instruction.endswith(f' above {words[4]}')


def test_validate_refuses_what_is_no_task():
  task = ALL[0]
  original, bug = task.files['solution.py'], task.metadata['bug']
  fixed = repair.apply_edit(original, original, bug['line'], bug['right']).text

  def changed(files=None, hidden=None, bug=bug):
    return dataclasses.replace(
      task,
      files={**task.files, **(files or {})},
      hidden_files={**task.hidden_files, **(hidden or {})},
      metadata={**task.metadata, 'bug': bug},
    )

  with pytest.raises(ValueError, match='visible .* pass before the fix'):
    repair.validate_task(changed({'solution.py': fixed}))
  with pytest.raises(ValueError, match='hidden .* pass before the fix'):
    repair.validate_task(changed(hidden={'cases.json': '[]'}))
  wrong = json.dumps([[[[], 0], 77], [[[1], 0], 78]])
  with pytest.raises(ValueError, match='0 of 2 .* pass after the fix'):
    repair.validate_task(changed({'tests.json': wrong}))
  with pytest.raises(ValueError, match='does not apply'):
    repair.validate_task(changed(bug={**bug, 'line': 3}))


CODE = 'def f(a, k):\n  t = 0\n  for x in a:\n    if x % 2 == 0:\n'
CODE += '      y = 9 - x\n      t += y\n  return t\n'


@pytest.mark.parametrize(
  'line, token, old, new',
  [
    ('L2', '3', 't = 0', 't = 3'),
    (4, '>=', '% 2 == 0', '% 2 >= 0'),
    ('4', '!=', '% 2 == 0', '% 2 != 0'),
    ('L5', '//', '9 - x', '9 // x'),
    ('L6', '*=', 't += y', 't *= y'),
    ('L6', '//=', 't += y', 't //= y'),
  ],
)
def test_an_edit_replaces_the_one_token_of_a_line(line, token, old, new):
  edit = repair.apply_edit('anything', CODE, line, token)
  assert edit == repair.Edit(CODE.replace(old, new), '')


@pytest.mark.parametrize(
  'line, token, error',
  [
    ('L1', '<', 'line'),
    ('L3', '+', 'line'),
    ('L7', '0', 'line'),
    ('L8', '0', 'line'),
    ('L0', '0', 'line'),
    (-1, '0', 'line'),
    ('L²', '0', 'line'),
    ('x', '0', 'line'),
    ('L2', '<', 'token'),
    ('L2', '6', 'token'),
    ('L4', '=', 'token'),
    ('L6', '+', 'token'),
    ('L5', '', 'token'),
  ],
)
def test_an_edit_that_cannot_be_applied_says_why(line, token, error):
  edit = repair.apply_edit('as it was', CODE, line, token)
  assert edit == repair.Edit('as it was', error)
  assert repair.observe_edit(edit.error) == f' error {error}'


@given(st.text(max_size=5) | st.integers(), st.text(max_size=4))
def test_no_edit_raises_or_breaks_the_syntax(line, token):
  edit = repair.apply_edit(CODE, CODE, line, token)
  compile(edit.text, 'solution.py', 'exec')
  assert not edit.error or edit.text == CODE


@pytest.mark.parametrize(
  'stdout, exit_code, text',
  [
    ('passed 6 of 6\n', 0, ' all pass'),
    ('passed 4 of 6\n', 1, ' 4 of 6'),
    ('printed by the code\npassed 4 of 6\n', 1, ' 4 of 6'),
    ('passed 6 of 6\npassed 0 of 6\n', 1, ' 0 of 6'),
    ('passed 6 of 6\n', 1, ' 6 of 6'),
    ('', 0, ' error'),
    ('', -9, ' error'),
    ('x passed 6 of 6', 0, ' error'),
  ],
)
def test_a_test_run_is_shown_in_few_words(stdout, exit_code, text):
  assert repair.observe_tests(stdout, exit_code) == text


def test_edit_that_works_is_ok():
  assert repair.observe_edit('') == ' ok'


@pytest.mark.parametrize('solved', [False, True])
def test_the_commands_run_as_they_stand(tmp_path, solved):
  task = next(t for t in ALL if t.metadata['bug']['wrong'] == '%')
  for path, text in {**task.files, **task.hidden_files}.items():
    (tmp_path / path).write_text(text)
  if solved:
    original, bug = task.files['solution.py'], task.metadata['bug']
    edit = repair.apply_edit(original, original, bug['line'], bug['right'])
    (tmp_path / 'solution.py').write_text(edit.text)
  for command, total in ((task.test_command, 6), (task.hidden_command, 16)):
    done = subprocess.run(
      [sys.executable, *command[1:]],
      cwd=tmp_path, capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert (done.returncode == 0) == solved
    assert (f'passed {total} of {total}' in done.stdout) == solved
    shown = repair.observe_tests(done.stdout, done.returncode)
    assert (shown == ' all pass') == solved and ' error' not in shown


@pytest.mark.parametrize(
  'change, message',
  [
    ({'kind': 'repare'}, "tasks.kind is 'repare'; known kinds: 'repair'"),
    ({'held_out_bug_share': 0.9}, 'tasks.held_out_bug_share is 0.9'),
    ({'held_out_function_share': -1}, 'tasks.held_out_function_share is -1'),
  ],
)
def test_settings_that_cannot_work_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    repair.build_tasks(dataclasses.replace(CONFIG, **change))
