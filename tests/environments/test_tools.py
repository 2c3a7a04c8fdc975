"""Tools, in real machines: those of the kind repair, and a coding agent's."""

import asyncio
import dataclasses

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from composer import chat
from composer.config import MachineConfig
from composer.config import TasksConfig
from composer.environments import machines
from composer.environments import tools
from composer.environments import tools_code
from composer.environments.machines import MachineError
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import process
from composer.environments.tasks import repair
from composer.environments.tools import TOOLS
from composer.records import Task

CONFIG = MachineConfig(warm=0, concurrent=2, exec_timeout_s=2.0)
CODE = Task(
  id='code/1', kind='code', instruction='', files={}, test_command=(),
  tools=tuple(t.spec.name for t in tools_code.CODE_TOOLS), allowed=(),
  hidden_files={}, hidden_command=(), metadata={},
)  # fmt: skip


@pytest.fixture(scope='module')
def driver():
  try:
    machines.probe(CONFIG)
  except MissingFacility:
    return 'process'  # tools are the same; isolation has its own tests
  return 'namespace'


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
  monkeypatch.setattr(process, '_warned', [True])


@pytest.fixture(scope='module')
def task():
  return repair.build_tasks(TasksConfig()).train[0]


def session(driver, task, act):
  async def run():
    pool = Pool(dataclasses.replace(CONFIG, driver=driver))
    try:
      machine = await pool.acquire(task.files)
      return await act(machine)
    finally:
      await pool.close()

  return asyncio.run(run())


def call(machine, task, name, **arguments):
  return tools.choose(task)[name].run(machine, task, arguments)


def play(driver, files, *calls):
  """Results of calls of a coding agent: (name, {arguments})."""
  task = dataclasses.replace(CODE, files=files)

  async def act(machine):
    return [await call(machine, task, name, **args) for name, args in calls]

  return session(driver, task, act)


# --- which tools there are ---------------------------------------------------


def test_names_and_specs_fit():
  for name, tool in TOOLS.items():
    assert tool.spec.name == name.rpartition('/')[2]
    assert chat.json_schema(tool.spec)['function']['name'] == tool.spec.name


def test_a_kind_may_have_a_tool_of_its_own(task):
  edit = tools.choose(task)['edit'].spec
  assert edit.parameters == (('line', 'line'), ('token', 'token'))
  edit = tools.choose(CODE)['edit'].spec
  assert [name for name, _ in edit.parameters] == ['path', 'old', 'new']
  assert list(tools.choose(CODE)) == list(CODE.tools)


def test_unknown_and_repeated_tools_are_refused():
  odd = dataclasses.replace(CODE, tools=('read', 'fly'))
  with pytest.raises(ValueError, match="offers the tool 'fly'.*tools are read"):
    tools.choose(odd)
  with pytest.raises(ValueError, match="'read' twice"):
    tools.choose(dataclasses.replace(CODE, tools=('read', 'read')))


def test_schemas_say_what_is_optional():
  schema = chat.json_schema(TOOLS['read'].spec)['function']['parameters']
  assert schema['required'] == ['path']
  assert set(schema['properties']) == {'path', 'start', 'end'}
  assert schema['additionalProperties'] is False
  shown = chat.tool_list([TOOLS['read'].spec, TOOLS['finish'].spec])
  assert shown == 'read PATH [START] [END] ; finish [MESSAGE]'


# --- repair ------------------------------------------------------------------


def test_the_fix_makes_the_tests_pass(driver, task):
  bug = task.metadata['bug']
  line = f'L{bug["line"]}'

  async def act(machine):
    return [
      await call(machine, task, 'test'),
      await call(machine, task, 'edit', line=line, token=bug['right']),
      await call(machine, task, 'test'),
      await call(machine, task, 'edit', line=line, token=bug['wrong']),
      await call(machine, task, 'edit', line='L99', token='+'),
      await call(machine, task, 'test'),
      await call(machine, task, 'submit'),
    ]

  before, edit, after, undo, bad, again, submit = session(driver, task, act)
  assert before.text.endswith('of 6') and before.ok and not before.ends
  assert edit.text == ' ok' and edit.ok
  assert after.text == ' all pass'
  assert undo.ok
  assert not bad.ok and bad.text == repair.observe_edit('line')
  assert again.text == before.text  # the last good edit counts
  assert submit.ends and submit.text == ''
  assert all(r.seconds > 0 for r in (before, edit, submit))


def test_what_is_shown_is_what_trusted_code_gives(driver, task):
  """In the machine as in this process, for every wrong edit of a line."""
  original = task.files['solution.py']
  cases = repair.read_cases(task.files['tests.json'])
  lines = repair.functions.listing_lines(original)
  edits = repair.functions.candidate_edits(lines)[:12]

  async def act(machine):
    shown = []
    for line, token in edits:
      await call(machine, task, 'edit', line=line, token=token)
      shown.append((await call(machine, task, 'test')).text)
    return shown

  expected = []
  for line, token in edits:
    text = repair.apply_edit(original, original, line, token).text
    passed, total = repair.run_cases(text, cases)
    stdout = f'passed {passed} of {total}\n'
    expected.append(repair.observe_tests(stdout, int(passed != total)))
  assert session(driver, task, act) == expected


def test_an_edit_is_there_for_the_next_read(driver, task):
  bug = task.metadata['bug']

  async def act(machine):
    await call(machine, task, 'edit', line=bug['line'], token=bug['right'])
    return await machine.read('solution.py')

  original = task.files['solution.py']
  want = repair.apply_edit(original, original, bug['line'], bug['right']).text
  assert session(driver, task, act).decode() == want != original


# --- a coding agent ----------------------------------------------------------


def test_read_gives_ranges(driver):
  lines = [f'line {n}\n' for n in range(1, 1001)]
  whole, part, tail, beyond, wrong, empty, binary, none = play(
    driver,
    {'a.txt': ''.join(lines), 'short.txt': 'one\n', 'e': '', 'b': 'a\0b'},
    ('read', {'path': 'short.txt'}),
    ('read', {'path': 'a.txt'}),
    ('read', {'path': 'a.txt', 'start': 999, 'end': 2000}),
    ('read', {'path': 'a.txt', 'start': 1001}),
    ('read', {'path': 'a.txt', 'start': 5, 'end': 4}),
    ('read', {'path': 'e'}),
    ('read', {'path': 'b'}),
    ('read', {'path': 'no/such'}),
  )
  assert whole.text == 'one\n'
  assert part.text == ''.join(lines[:400]) + '(lines 1 to 400 of 1000)'
  assert tail.text == 'line 999\nline 1000\n(lines 999 to 1000 of 1000)'
  assert beyond.text == 'error a.txt has 1000 lines' and not beyond.ok
  assert wrong.text.startswith('error lines 5 to 4;')
  assert empty.text == '(empty)'
  assert binary.text == 'error b is binary, 3 bytes'
  assert none.text == 'error no such file: no/such'


def test_view_numbers_lines_and_replace_takes_the_numbers(driver):
  text = 'def f(x):\n  if x:\n    # \f\n    return 1\n  return é'
  results = play(
    driver,
    {'a.py': text},
    ('view', {'path': 'a.py', 'start': 2, 'end': 4}),
    ('replace', {'path': 'a.py', 'start': 4, 'end': 4, 'text': 'return 2\n'}),
    ('replace', {'path': 'a.py', 'start': 5, 'end': 5, 'text': '    pass'}),
    ('replace', {'path': 'a.py', 'start': 3, 'end': 3, 'text': ''}),
    ('view', {'path': 'a.py'}),
    ('replace', {'path': 'a.py', 'start': 5, 'end': 5, 'text': 'x'}),
    ('replace', {'path': 'a.py', 'start': 3, 'end': 2, 'text': 'x'}),
    ('view', {'path': 'a.py', 'start': 9}),
    ('replace', {'path': 'b.py', 'start': 1, 'end': 1, 'text': 'x'}),
  )
  part, *good, whole, beyond, back, none, gone = results
  assert part.text == '2   if x:\n3     # \f\n4     return 1'
  assert all(x.ok for x in good)
  assert good[0].text == 'replaced lines 4 to 4'
  assert whole.text == '1 def f(x):\n2   if x:\n3     return 2\n4     pass'
  for bad in (beyond, back, none, gone):
    assert not bad.ok and bad.text.startswith('error ')
  assert 'lines 5 to 5; a.py has 4' in beyond.text


def test_replace_keeps_how_lines_end_and_blank_ones_are_lines(driver):
  files = {'a.py': 'if x:\n\n  \n  y\n', 'b.py': 'a\r\n  b\r\nc\r\n'}
  files |= {'long.txt': 'x\n' * 401, 'empty.py': '', 'outside': ''}
  *good, empty, out, one, two, long = play(
    driver,
    files,
    ('replace', {'path': 'a.py', 'start': 2, 'end': 2, 'text': 'z'}),
    ('replace', {'path': 'a.py', 'start': 3, 'end': 3, 'text': 'z'}),
    ('replace', {'path': 'b.py', 'start': 2, 'end': 2, 'text': 'd\n  e'}),
    ('replace', {'path': 'empty.py', 'start': 1, 'end': 1, 'text': 'x'}),
    ('replace', {'path': '../outside', 'start': 1, 'end': 1, 'text': 'x'}),
    ('read', {'path': 'a.py'}),
    ('read', {'path': 'b.py'}),
    ('view', {'path': 'long.txt'}),
  )
  assert all(x.ok for x in good)
  assert one.text == 'if x:\nz\n  z\n  y\n'
  assert two.text == 'a\r\n  d\r\n  e\r\nc\r\n'
  assert long.text.endswith('\n400 x\n(lines 1 to 400 of 401)')
  assert 'lines 1 to 1; empty.py has 0' in empty.text
  assert not empty.ok and not out.ok


def test_edit_wants_one_place(driver):
  text = 'a = 1\nb = 1\nfoo(\n  x)\naaa\n'
  good, twice, gone, spaces, overlap, same, empty, none, after = play(
    driver,
    {'a.py': text},
    ('edit', {'path': 'a.py', 'old': 'b = 1', 'new': 'b = é'}),
    ('edit', {'path': 'a.py', 'old': ' = ', 'new': '='}),
    ('edit', {'path': 'a.py', 'old': 'c = 1', 'new': ''}),
    ('edit', {'path': 'a.py', 'old': 'foo( x)', 'new': ''}),
    ('edit', {'path': 'a.py', 'old': 'aa', 'new': 'b'}),
    ('edit', {'path': 'a.py', 'old': 'x', 'new': 'x'}),
    ('edit', {'path': 'a.py', 'old': '', 'new': 'x'}),
    ('edit', {'path': 'b.py', 'old': 'x', 'new': 'y'}),
    ('read', {'path': 'a.py'}),
  )
  assert good.text == 'edited a.py at line 2' and good.ok
  assert 'stands twice in a.py' in twice.text and not twice.ok
  assert gone.text == 'error old is not in a.py; read it again'
  assert 'its spaces or line breaks differ' in spaces.text
  assert 'stands twice' in overlap.text
  assert 'nothing to do' in same.text and 'write makes' in empty.text
  assert none.text == 'error no such file: b.py'
  assert after.text == text.replace('b = 1', 'b = é')


def test_list_and_search(driver):
  files = {
    'src/a.py': 'import re\n\ndef find():\n  pass\n',
    'src/deep/er/b.py': 'x = find()\n' + 'y' * 500 + ' find\n',
    '.git/config': 'find',
    'c.txt': 'nothing\nfind me\n',
    'bin': '\0find',
    're.py': 'raise SystemExit("shadowed")\n',
  }
  top, deep, gone, found, globbed, bad, none, inside = play(
    driver,
    files,
    ('list', {}),
    ('list', {'path': 'src', 'depth': 9}),
    ('list', {'path': 'nowhere'}),
    ('search', {'pattern': r'\bfind\b'}),
    ('search', {'pattern': 'find', 'glob': '*.txt'}),
    ('search', {'pattern': '('}),
    ('search', {'pattern': 'zebra'}),
    ('search', {'pattern': 'x =', 'path': 'src/deep'}),
  )
  assert top.text.splitlines() == [
    '.git/', 'bin 5', 'c.txt 16', 're.py 29', 'src/', 'src/a.py 30',
    'src/deep/',
  ]  # fmt: skip
  assert 'src/deep/er/b.py 517' in deep.text
  assert 'nowhere: no such file or directory' in gone.text and not gone.ok
  assert found.text.splitlines() == [
    'c.txt:2: find me',
    'src/a.py:3: def find():',
    'src/deep/er/b.py:1: x = find()',
    'src/deep/er/b.py:2: ' + 'y' * 240 + ' ...',
  ]
  assert globbed.text == 'c.txt:2: find me'
  assert 'no regular expression' in bad.text
  assert none.text == '(no line matches)'
  assert inside.text == 'src/deep/er/b.py:1: x = find()'


def test_a_pattern_that_takes_forever_is_ended(driver, monkeypatch):
  monkeypatch.setattr(tools_code, 'SEARCH_S', 0.3)
  (result,) = play(
    driver,
    {'a': 'a' * 40 + 'b\n'},
    ('search', {'pattern': '(a+)+c'}),
  )
  assert not result.ok and 'not done after' in result.text


def test_nothing_leads_out_of_the_workspace(driver):
  """`..`, absolute paths, links to files and directories, in every tool."""
  results = play(
    driver,
    {'a/x': 'x\n'},
    ('shell', {'command': 'ln -s / root; ln -s /etc/passwd pw; ln -s a inner'}),
    *(
      (name, {**rest, 'path': path})
      for path in ('../x', '/etc/passwd', 'root/etc/passwd', 'a/../../x')
      for name, rest in (
        ('read', {}),
        ('list', {}),
        ('write', {'text': 'x'}),
        ('edit', {'old': 'root', 'new': 'toor'}),
        ('search', {'pattern': 'root'}),
      )
    ),
    ('list', {'path': 'root'}),
    ('search', {'pattern': 'root', 'path': 'root'}),
    ('read', {'path': 'pw'}),
    ('write', {'path': 'pw', 'text': 'x'}),
    ('search', {'pattern': 'root'}),
    ('list', {}),
    ('read', {'path': 'inner/x'}),
  )
  *refused, searched, listed, inner = results[1:]
  for result in refused:
    assert not result.ok and result.text.startswith('error '), result
    assert ':0:0:' not in result.text
  assert searched.text == '(no line matches)'
  assert 'root -> /' in listed.text.splitlines()
  assert 'root/' not in listed.text  # named, not followed
  assert inner.text == 'x\n'


def test_shell_and_tests(driver):
  failed, slow, loud, tests = play(
    driver,
    {'a.txt': 'hello'},
    ('shell', {'command': 'cat a.txt; exit 3'}),
    ('shell', {'command': 'echo é; sleep 9'}),
    ('shell', {'command': 'yes'}),
    ('run_tests', {}),
  )
  assert failed.text == 'hello\n(exit code 3)' and not failed.ok
  assert slow.text.startswith('é\n(killed after ') and not slow.ok
  assert '(output truncated)' in loud.text and len(loud.text) < 20_000
  assert tests.text == 'error the task has no visible tests'


def test_long_outputs_are_cut_with_a_word():
  text = 'a' * 50 + 'b' * 50
  assert tools_code.cut(text, 100) == text
  cut = tools_code.cut(text, 40)
  assert cut == 'a' * 20 + '\n[60 characters left out]\n' + 'b' * 20


def test_todo_is_a_list_that_the_session_keeps(driver):
  good, bad, empty = play(
    driver,
    {},
    ('todo', {'items': '- [x] read\n\n * [ ] fix it \n[-] test'}),
    ('todo', {'items': '[x] read\nfix it'}),
    ('todo', {'items': ' \n'}),
  )
  assert good.text == '2 of 3 open'
  assert good.todo == '[x] read\n[ ] fix it\n[~] test'
  assert "'fix it' is no item" in bad.text and bad.todo is None
  assert '0 items; from 1 to 40' in empty.text


item = st.tuples(
  st.sampled_from(' ~x'),
  st.text(st.characters(codec='utf-8', exclude_categories='CZ'), min_size=1),
)


@settings(deadline=None)
@given(st.lists(item, min_size=1, max_size=40))
def test_todo_lists_read_back(items):
  text = '\n'.join(f'- [{mark}] {what}' for mark, what in items)
  again = tools_code.parse_todo(text)
  assert again == [(mark, what[:200]) for mark, what in items]


def test_a_dead_machine_is_infrastructure(driver, task):
  async def act(machine):
    await machine.stop()
    with pytest.raises(MachineError):
      await call(machine, task, 'test')
    for name, arguments in (
      ('shell', {'command': 'true'}),
      ('list', {}),
      ('read', {'path': 'a'}),
    ):
      with pytest.raises(MachineError):
        await call(machine, CODE, name, **arguments)

  session(driver, task, act)
