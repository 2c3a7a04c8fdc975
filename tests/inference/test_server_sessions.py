"""The table of sessions: whose call it is, and what is let go of when."""

import asyncio
import json

import numpy as np
import pytest

from composer import wire
from composer.inference import server_sessions
from composer.rollout.recorder import BadCompletion
from composer.templates.protocol import Message


class Clock:
  now = 0.0

  def __call__(self):
    return self.now


def call(table, complete, context, tokens, name='', retry=False):
  """One answered call; the session's id."""
  context = np.array(context, np.int32)
  found = table.locate(name, context, retry)
  table.record(
    found, context, [complete(context, tokens)], 1.0, named=bool(name)
  )
  return found


def test_unnamed_sessions_go_on_by_prefix(complete):
  table = server_sessions.Table((1, 2))
  a = call(table, complete, [1, 2], [3, 4])
  b = call(table, complete, [1, 2], [3, 5])
  assert a != b
  assert call(table, complete, [1, 2, 3, 4, 9], [6]) == a
  assert call(table, complete, [1, 2, 3, 5, 9], [6]) == b
  # A retry of the last call, and only where it is said to be one.
  assert call(table, complete, [1, 2, 3, 5, 9], [7], retry=True) == b
  c = call(table, complete, [1, 2, 3, 5, 9], [7])
  assert c not in (a, b)
  # Something else behind a known context is no continuation.
  assert call(table, complete, [1, 2, 3, 4, 9, 8], [7]) not in (a, b, c)
  (segment,) = table.segments(table.get(b))
  assert segment.tokens.tolist() == [1, 2, 3, 5, 9, 7]
  assert segment.sampled.tolist() == [0, 0, 1, 1, 0, 1]


def test_named_sessions_and_helpers(complete):
  """A helper's calls are segments of their own; the first one goes on."""
  table = server_sessions.Table((1, 2))
  call(table, complete, [1, 2], [3], 'x')
  call(table, complete, [9], [8], 'x')
  call(table, complete, [1, 2, 3, 4], [5], 'x')
  call(table, complete, [9, 8, 7], [6], 'x')
  found = table.segments(table.get('x'))
  assert [x.tokens.tolist() for x in found] == [[1, 2, 3, 4, 5], [9, 8, 7, 6]]
  assert [int(x.sampled.sum()) for x in found] == [2, 2]
  assert [x.stop_reason for x in found] == ['rewritten', 'finished']


def test_retracted(complete):
  table = server_sessions.Table((1, 2))
  session = table.get(call(table, complete, [1], [2, 3], 'x'))
  call(table, complete, [1, 2, 3, 4], [5], 'x')
  table.retract(session, session.choices[0])
  (segment,) = table.segments(session)
  assert segment.tokens.tolist() == [1, 2, 3, 4]
  assert segment.sampled.tolist() == [0, 1, 1, 0]
  call(table, complete, [1, 2, 3, 4], [6], 'x')
  (segment,) = table.segments(session)
  assert segment.tokens.tolist() == [1, 2, 3, 4, 6]
  call(table, complete, [7], [8], 'x')
  table.retract(session, session.choices[0])
  assert len(table.segments(session)) == 1
  only = table.get(call(table, complete, [1], [2], 'y'))
  table.retract(only, only.choices[0])
  assert table.get('y') is None and len(table) == 1


def test_retracted_too_late(complete):
  """Another call was answered since, or the session has left the table."""
  limits = server_sessions.Limits(sessions=1)
  table = server_sessions.Table((1, 2), limits)
  session = table.get(call(table, complete, [1], [2], 'x'))
  first = session.choices[0]
  call(table, complete, [9], [8], 'x')
  table.retract(session, first)
  found = table.segments(session)
  assert [x.tokens.tolist() for x in found] == [[1, 2], [9, 8]]
  assert session.calls == 2
  gone = table.get(call(table, complete, [3], [4]))
  call(table, complete, [5], [6])
  table.retract(gone, gone.choices[0])
  assert gone.id not in str(table._prefixes) and table.tokens == 2
  call(table, complete, [3, 4, 7], [6])  # begins as it did


def test_bounds(complete):
  """By time, by number, by tokens; the index and the counts go along."""
  clock = Clock()
  limits = server_sessions.Limits(seconds=10, sessions=3, tokens=20)
  table = server_sessions.Table((1, 2), limits, clock=clock)
  for i in range(5):
    clock.now = i
    call(table, complete, [i], [7, 8])
  assert len(table) == 3 and table.tokens == 9 and table.expired == 2
  call(table, complete, [9] * 15, [7])
  assert len(table) == 2 and table.tokens == 19
  clock.now = 30
  table.expire()
  assert len(table) == 0 and table.tokens == 0 and table._prefixes == {}
  assert table.expired == 6


def test_a_long_life_leaves_nothing(complete):
  """Random calls, retries and ends: counts are those of what is there."""
  rng, clock = np.random.default_rng(0), Clock()
  limits = server_sessions.Limits(seconds=40, sessions=12, tokens=300)
  table = server_sessions.Table((1, 2), limits, clock=clock)
  contexts = {}
  for _ in range(600):
    clock.now += 1
    name = str(rng.choice(['', 'a', 'b', 'c']))
    key = rng.choice(list(contexts)) if contexts and rng.random() < 0.7 else ''
    before = contexts.get(key, [int(rng.integers(50))])
    if name:
      before = contexts.get(name, before)
    found = call(
      table, complete, before, rng.integers(0, 9, 3), name,
      retry=bool(rng.random() < 0.3),
    )  # fmt: skip
    session = table.get(found)
    last = session.recorder.lengths()
    assert sum(last) == session.tokens
    contexts[found] = [*before, *session.choices[0].tokens.tolist(), 10]
    contexts = {k: x for k, x in contexts.items() if table.get(k)}
    alive = table._sessions.values()
    assert table.tokens == sum(x.tokens for x in alive) <= 300
    assert len(alive) <= 12
    known = {x for ids in table._prefixes.values() for x in ids.values()}
    assert known <= set(table._sessions)
  assert table.expired > 20


def test_choices_of_one_call(complete):
  """The recorder holds the answer that the next call goes on with."""
  table = server_sessions.Table((1, 2))
  context = np.array([1, 2], np.int32)
  name = table.locate('', context, False)
  answers = [complete(context, [5, i]) for i in range(4)]
  table.record(name, context, answers, 1.0, named=False)
  assert call(table, complete, [1, 2, 5, 2, 9], [3]) == name
  (segment,) = table.segments(table.get(name))
  assert segment.tokens.tolist() == [1, 2, 5, 2, 9, 3]
  assert segment.sampled.tolist() == [0, 0, 1, 1, 0, 1]


def test_what_cannot_be_recorded(complete):
  table = server_sessions.Table((2, 2))
  with pytest.raises(BadCompletion, match='experts'):
    call(table, complete, [1], [2])
  assert len(table) == 0


def test_answers_are_found_in_conversations():
  limits = server_sessions.Limits(answers=5)
  table = server_sessions.Table((1, 2), limits)
  asked = (Message('user', 'hi'),)
  said = Message('assistant', 'yes')
  _, conversation = table.with_tokens(asked, '')
  table.remember(conversation, said, [7, 8])
  found, _ = table.with_tokens((*asked, said, *asked), '')
  assert [x.tokens for x in found] == [(), (7, 8), ()]
  for other in (
    (Message('user', 'ho'), said),
    (*asked, Message('assistant', 'yes ')),
    (*asked, *asked, said),
  ):
    found, _ = table.with_tokens(other, '')
    assert not any(x.tokens for x in found)
  assert not any(x.tokens for x in table.with_tokens((*asked, said), 's')[0])
  table.remember(conversation, Message('assistant', 'no'), [1, 2, 3, 4])
  assert not any(x.tokens for x in table.with_tokens((*asked, said), '')[0])
  assert table._answer_tokens == 4


def test_written_when_it_leaves(complete, tmp_path):
  clock = Clock()
  table = server_sessions.Table(
    (1, 2), server_sessions.Limits(seconds=5), tmp_path, clock
  )
  call(table, complete, [1], [2], 'x')
  call(table, complete, [3], [4], 'x')
  wanted = table.segments(table.get('x'))
  clock.now = 6
  table.expire()
  call(table, complete, [5], [6], 'x')  # another session of the same name
  table.close()
  found = [
    (json.loads((x / 'session.json').read_text()), x)
    for x in tmp_path.iterdir()
  ]
  assert [about['id'] for about, _ in found] == ['x', 'x']
  ((about, folder),) = [x for x in found if x[0]['calls'] == 2]
  assert about['segments'] == ['segment-0', 'segment-1']
  for name, segment in zip(about['segments'], wanted, strict=True):
    got = wire.decode_segment((folder / name).read_bytes())
    assert wire.encode_segment(got) == wire.encode_segment(segment)


def written(folder):
  """Session ids on the disk -> (calls, sampled tokens of each segment)."""
  out = {}
  for path in folder.iterdir():
    about = json.loads((path / 'session.json').read_text())
    segments = [
      wire.decode_segment((path / name).read_bytes())
      for name in about['segments']
    ]
    out[about['id']] = (
      about['calls'],
      [x.tokens[x.sampled].tolist() for x in segments],
    )
  return out


def test_written_when_it_rests(complete, tmp_path):
  """A process that is killed takes with it what was used of late, no more."""
  clock = Clock()
  limits = server_sessions.Limits(seconds=1000, idle=5)
  table = server_sessions.Table((1, 2), limits, tmp_path, clock)

  def rest(seconds):
    clock.now += seconds
    table.write_idle()
    table._writer.submit(lambda: None).result(10)  # all before it is written
    return written(tmp_path)

  call(table, complete, [1], [2], 'a')
  assert rest(4) == {}
  call(table, complete, [1], [2], 'b')
  assert rest(2) == {'a': (1, [[2]])}
  before = list(tmp_path.rglob('segment-0'))[0].stat().st_mtime_ns
  call(table, complete, [1, 2, 3], [4], 'b')
  assert rest(4) == {'a': (1, [[2]])}  # b is used
  assert rest(2) == {'a': (1, [[2]]), 'b': (2, [[2, 4]])}
  assert len(table) == 2 and table.expired == 0
  rest(60)  # and nothing is written twice
  again = [x.stat().st_mtime_ns for x in tmp_path.rglob('segment-0')]
  assert before in again
  # The table goes on where it was, in the folder that is there.
  call(table, complete, [1, 2, 3, 4, 5], [6], 'b')
  assert rest(6)['b'] == (3, [[2, 4, 6]])
  assert len(list(tmp_path.iterdir())) == 2
  # Another process beside what is left of this one.
  other = server_sessions.Table((1, 2), limits, tmp_path, clock)
  call(other, complete, [7], [8], 'a')
  other.close()
  table.close()
  assert len(list(tmp_path.iterdir())) == 3
  assert not list(tmp_path.rglob('*.part'))


def test_what_was_written_too_early_is_taken_back(complete, tmp_path):
  """An answer whose client takes longer to leave than the session rests."""
  clock = Clock()
  limits = server_sessions.Limits(idle=5)
  table = server_sessions.Table((1, 2), limits, tmp_path, clock)
  context = np.array([1], np.int32)
  first, second = complete(context, [2]), complete([1, 2, 3], [4])

  def rest():
    clock.now += 6
    table.write_idle()
    table._writer.submit(lambda: None).result(10)
    return written(tmp_path)

  session = table.record('a', context, [first], 1.0)
  assert rest() == {'a': (1, [[2]])}
  session = table.record('a', np.array([1, 2, 3], np.int32), [second], 1.0)
  assert rest() == {'a': (2, [[2, 4]])}
  table.retract(session, second)
  assert rest() == {'a': (1, [[2]])}
  lone = table.record('b', context, [first], 1.0)
  assert set(rest()) == {'a', 'b'}
  table.retract(lone, first)
  assert set(rest()) == {'a'} and not table._changed


def test_a_full_disk_at_rest(complete, tmp_path, caplog):
  """It is told, and the session is written when it leaves."""
  clock, folder = Clock(), tmp_path / 'sessions'
  folder.write_text('')
  limits = server_sessions.Limits(seconds=100, idle=5)
  table = server_sessions.Table((1, 2), limits, folder, clock)
  call(table, complete, [1], [2], 'a')
  clock.now = 6
  table.write_idle()
  table._writer.submit(lambda: None).result(10)
  assert 'session a could not be written' in caplog.text
  folder.unlink()
  table.close()
  assert written(folder) == {'a': (1, [[2]])}


def test_feedback_that_cannot_be_written(complete, tmp_path):
  (tmp_path / 'file').write_text('')
  table = server_sessions.Table((1, 2), directory=tmp_path / 'file')
  session = table.get(call(table, complete, [1], [2], 'x'))
  with pytest.raises(OSError):
    asyncio.run(table.add_feedback(session, {'kind': 'thumbs', 'value': 1}))
  assert session.feedback == []


def test_feedback_is_bounded(complete):
  """What is used longest ago goes, feedback and all."""
  limits = server_sessions.Limits(feedback=250)
  table = server_sessions.Table((1, 2), limits)
  feedback = {'kind': 'thumbs', 'value': 1, 'detail': 'x' * 56}  # 100 bytes
  names = [call(table, complete, [i], [9], f's{i}') for i in range(4)]
  for name in names[:2]:
    asyncio.run(table.add_feedback(table.get(name), feedback))
  assert table.feedback_bytes == 200 and len(table) == 4
  asyncio.run(table.add_feedback(table.get('s3'), feedback))
  assert sorted(table._sessions) == ['s1', 's3']
  assert table.feedback_bytes == 200


def test_what_cannot_be_trained_on_is_context(complete):
  """Of whichever choice the next call goes on with."""
  table = server_sessions.Table((1, 2))
  context = np.array([1, 2], np.int32)
  choices = [complete(context, [3, 4]), complete(context, [3, 5])]
  name = table.locate('', context, False)
  table.record(
    name, context, choices, 1.0, named=False, trainable=[True, False]
  )
  (segment,) = table.segments(table.get(name))
  assert segment.sampled.tolist() == [0, 0, 1, 1]
  assert call(table, complete, [1, 2, 3, 5, 9], [6]) == name
  (segment,) = table.segments(table.get(name))
  assert segment.tokens.tolist() == [1, 2, 3, 5, 9, 6]
  assert segment.sampled.tolist() == [0, 0, 0, 0, 0, 1]
