"""A run's files: whole lines, resuming, lanes, versions, saved sessions."""

import json
import math
import threading
import time

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from composer import metrics
from composer.records import Segment
from composer.records import Task
from composer.records import Trajectory
from composer.records import Turn


def steps(workdir):
  return [line['step'] for line in metrics.read(workdir)]


# --- scalars -----------------------------------------------------------------


def test_lines_are_floats_or_null_with_step_and_time(tmp_path):
  before = time.time()
  with metrics.Writer(tmp_path / 'new' / 'run') as writer:
    writer.write(3, {'reward/mean': np.float32(0.5), 'mismatch/kl': math.nan})
    writer.write(3, {'groups/queued': 4, 'staleness/max': -math.inf})
  first, second = metrics.read(tmp_path / 'new' / 'run')
  assert first['reward/mean'] == 0.5 and first['mismatch/kl'] is None
  assert second['groups/queued'] == 4 and second['staleness/max'] is None
  assert first['step'] == second['step'] == 3
  assert before - 1 <= first['time'] <= second['time'] <= time.time() + 1
  text = (tmp_path / 'new' / 'run' / 'metrics.jsonl').read_text()
  assert 'NaN' not in text and 'Infinity' not in text


@pytest.mark.parametrize(
  'name', ['step', 'time', 'a b', '/a', 'a//b', '', 'a/']
)
def test_a_name_that_tools_cannot_rely_on_is_refused(tmp_path, name):
  with metrics.Writer(tmp_path) as writer:
    with pytest.raises(ValueError, match='scalar name'):
      writer.write(1, {name: 0.0})
  assert metrics.read(tmp_path) == []


def test_a_directory_with_metrics_needs_resume(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write(1, {'a': 1})
  with pytest.raises(ValueError, match='workdir=.*--resume'):
    metrics.Writer(tmp_path)
  with metrics.Writer(tmp_path, resume=True) as writer:
    writer.write(2, {'a': 1})
  assert steps(tmp_path) == [1, 2]


def test_resuming_keeps_the_lost_lines_apart(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    for step in range(1, 8):
      writer.write(step, {'a': step})
  with metrics.Writer(tmp_path, resume=True, step=4) as writer:
    writer.write(5, {'a': -5})
  with metrics.Writer(tmp_path, resume=True, step=4) as writer:
    writer.write(5, {'a': -50})
  assert steps(tmp_path) == [1, 2, 3, 4, 5]
  assert metrics.read(tmp_path)[-1]['a'] == -50
  gone = (tmp_path / 'metrics.abandoned.jsonl').read_text().splitlines()
  assert [json.loads(line)['a'] for line in gone] == [5, 6, 7, -5]


@given(cut=st.integers(0, 120))
def test_a_crash_anywhere_in_a_line_costs_that_line_only(tmp_path_factory, cut):
  workdir = tmp_path_factory.mktemp('run')
  whole = b'{"step":1,"time":1.0,"a":1.0}\n{"step":2,"time":2.0,"a":2.0}\n'
  data = whole[: min(cut, len(whole))]
  (workdir / 'metrics.jsonl').write_bytes(data)
  # A line that lacks only its end is whole.
  alive = len(data.replace(b'}\n', b'}').split(b'}')) - 1
  assert steps(workdir) == [1, 2][:alive]
  metrics._repair(workdir / 'metrics.jsonl')
  metrics._append(workdir / 'metrics.jsonl', b'{"step":9}\n')
  assert steps(workdir) == [*[1, 2][:alive], 9]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
  (tmp_path / 'metrics.jsonl').write_text('{"step":1}\n{"st\n{"step":2}\n')
  with pytest.raises(ValueError, match='line 2 is not JSON'):
    metrics.read(tmp_path)


def test_threads_write_whole_lines(tmp_path):
  writer = metrics.Writer(tmp_path)

  def work(number):
    for step in range(50):
      writer.write(step, {f'thread/{number}': step, 'x': 1.5})

  threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=30)
  writer.close()
  assert sorted(steps(tmp_path)) == sorted([*range(50)] * 4)


def board_scalars(workdir):
  """name -> {step: value} of the event files, read by their framing."""
  found = {}
  for path in (workdir / 'tensorboard').iterdir():
    data, at = path.read_bytes(), 0
    while at < len(data):
      size = int.from_bytes(data[at : at + 8], 'little')
      event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
      for value in event.summary.value:
        found.setdefault(value.tag, {})[event.step] = value.simple_value
      at += 12 + size + 4
  return found


def test_tensorboard_gets_what_is_finite(tmp_path):
  with metrics.Writer(tmp_path) as writer:
    writer.write(1, {'reward/mean': 0.25, 'mismatch/kl': math.nan})
    writer.write(2, {'reward/mean': 0.5, 'mismatch/kl': 0.0})
  assert board_scalars(tmp_path) == {
    'reward/mean': {1: 0.25, 2: 0.5},
    'mismatch/kl': {2: 0.0},
  }


# --- lanes -------------------------------------------------------------------


def test_spans_are_on_disk_after_flush_and_busy_is_their_union(tmp_path):
  lanes = metrics.Lanes(tmp_path)
  before = time.time()
  lanes.busy()
  with lanes.span('rollout', 'a'):
    with lanes.span('rollout', 'b'):
      time.sleep(0.05)
    time.sleep(0.05)
  with lanes.span('trainer', 'step'):
    time.sleep(0.1)
  shares = lanes.busy()
  lanes.flush()
  spans = metrics.read_lanes(tmp_path)
  assert [(s['lane'], s['name']) for s in spans] == [
    ('rollout', 'b'),
    ('rollout', 'a'),
    ('trainer', 'step'),
  ]
  assert before - 1 < spans[1]['start'] <= spans[0]['start']
  assert spans[0]['end'] <= spans[1]['end'] <= time.time() + 1
  # Overlapping spans count once; a sleep may last longer, never shorter.
  long = [span['end'] - span['start'] for span in spans]
  assert shares['rollout'] / shares['trainer'] == pytest.approx(
    long[1] / long[2], rel=0.05
  )
  # Between the spans others may have had the processor.
  assert 0.3 < shares['rollout'] + shares['trainer'] <= 1.001


def test_a_span_that_is_still_open_counts_in_every_interval(tmp_path):
  lanes = metrics.Lanes(tmp_path)
  with lanes.span('rollout'):
    lanes.busy()
    time.sleep(0.02)
    assert lanes.busy()['rollout'] > 0.9
    time.sleep(0.02)
    assert lanes.busy()['rollout'] > 0.9
  lanes.busy()
  time.sleep(0.02)
  assert lanes.busy()['rollout'] == 0


def test_a_span_that_raises_is_kept_and_many_are(tmp_path):
  lanes = metrics.Lanes(tmp_path)
  with pytest.raises(KeyError):
    with lanes.span('trainer', 'broken'):
      raise KeyError
  count = 20_000
  for _ in range(count):
    with lanes.span('rollout', 'decode'):
      pass
  lanes.close()
  assert len(metrics.read_lanes(tmp_path)) == count + 1


# --- versions and summary ----------------------------------------------------


def test_what_becomes_known_later_joins_its_version(tmp_path):
  metrics.record_version(tmp_path, 1, kind='delta', bytes=9, ratio=0.5)
  metrics.record_version(tmp_path, 0, kind='base', bytes=18, ratio=1.0)
  metrics.record_version(tmp_path, 1, pause_s=0.004, kind=None)
  first, second = metrics.read_versions(tmp_path)
  assert (first['version'], first['kind']) == (0, 'base')
  assert second['version'] == 1
  assert (second['kind'], second['bytes'], second['pause_s']) == (
    'delta',
    9,
    0.004,
  )


def test_a_summary_comes_back_as_plain_data(tmp_path):
  assert metrics.read_summary(tmp_path) is None
  row = {'set': 'bugs', 'who': 'after RL', 'solve_rate': np.float32(0.5)}
  summary = {'rows': [row | {'sessions': np.int64(3), 'se': math.nan}]}
  metrics.write_summary(tmp_path, summary)
  assert metrics.read_summary(tmp_path) == {
    'rows': [
      {
        'set': 'bugs',
        'who': 'after RL',
        'solve_rate': 0.5,
        'sessions': 3,
        'se': None,
      }
    ]
  }
  with pytest.raises(ValueError, match='has no who'):
    metrics.write_summary(tmp_path, {'rows': [{'set': 'bugs'}]})


# --- trajectories ------------------------------------------------------------

WORDS = ('<pad>', '<act>', ' test', '<end>', '</script>', '\n', ' é')


def make_trajectory(rng, lengths):
  """Random segments of the given lengths, one turn each."""
  segments = []
  for number, length in enumerate(lengths):
    sampled = rng.random(length) < 0.5
    segments.append(
      Segment(
        tokens=rng.integers(0, len(WORDS), length).astype(np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(length), 0).astype(np.float32),
        temperatures=np.ones(length, np.float32),
        versions=np.where(sampled, 7, -1).astype(np.int32),
        experts=np.zeros((length, 3, 2), np.int16),
        auditable=sampled & (rng.random(length) < 0.5),
        stop_reason='summary',
        parent=number - 1,
      )
    )
  turns = tuple(
    Turn('call', '</script>', n, 0, len(s.tokens), 0.25)
    for n, s in enumerate(segments)
  )
  return Trajectory(
    task_id='t',
    group_id='g',
    index=1,
    segments=tuple(segments),
    turns=turns,
    reward=0.5,
    reward_parts={'tests': 1.0, 'effort': -0.5},
    stop_reason='submitted',
    provenance={'seed': 3},
    timings={'sampling': 0.1},
  )


TASK = Task('t', 'repair', 'sum', {}, (), (), (), {}, (), {'split': 'train'})


def save(workdir, trajectories, extra=None, name='batch', **more):
  return metrics.save_trajectories(
    workdir,
    name,
    trajectories,
    extra,
    token_text=lambda ids: [WORDS[i] for i in ids],
    tasks={'t': TASK},
    step=4,
    **more,
  )


@given(
  st.integers(0, 2**32 - 1),
  st.lists(st.integers(0, 20), min_size=1, max_size=3),
)
def test_saved_sessions_come_back_token_for_token(
  tmp_path_factory, seed, lengths
):
  rng = np.random.default_rng(seed)
  trajectory = make_trajectory(rng, lengths)
  off = [rng.choice([0, 1e-7, 0.3], n).astype(np.float32) for n in lengths]
  trainer = [
    (s.logprobs - d).astype(np.float32)
    for s, d in zip(trajectory.segments, off, strict=True)
  ]
  flips = [rng.integers(-1, 4, n) for n in lengths]
  workdir = tmp_path_factory.mktemp('run')
  save(workdir, [trajectory], [{'trainer_logprobs': trainer, 'flips': flips}])
  (batch,) = metrics.read_trajectories(workdir)
  (session,) = batch['trajectories']
  assert (session['description'], session['split']) == ('sum', 'train')
  assert (batch['step'], session['reward']) == (4, 0.5)
  for segment, saved, logprobs, flip in zip(
    trajectory.segments, session['segments'], trainer, flips, strict=True
  ):
    at = [i for i, yes in enumerate(segment.sampled) if yes]
    assert saved['ids'] == segment.tokens.tolist()
    assert [batch['vocab'][str(i)] for i in saved['ids']] == [
      WORDS[i] for i in segment.tokens
    ]
    assert saved['sampled'] == at
    assert saved['versions'] == [7] * len(at)
    assert saved['auditable'] == [int(segment.auditable[i]) for i in at]
    assert saved['flips'] == [None if f < 0 else f for f in flip.tolist()]
    for k, i in enumerate(at):
      apart = abs(float(logprobs[i]) - float(segment.logprobs[i]))
      assert saved['behaviour'][k] == pytest.approx(segment.logprobs[i])
      assert saved['trainer'][k] == pytest.approx(logprobs[i])
      assert saved['difference'][k] == pytest.approx(apart, rel=1e-3)
      # Equal to the last bit, and nothing else, is exactly 0.
      equal = logprobs[i] == segment.logprobs[i]
      assert (saved['difference'][k] == 0) == equal


def test_unknown_is_null_and_never_zero(tmp_path):
  trajectory = make_trajectory(np.random.default_rng(0), [30])
  nan = np.full(30, np.nan, np.float32)
  save(tmp_path, [trajectory], [{'trainer_logprobs': [nan], 'flips': [nan]}])
  save(tmp_path, [trajectory], None, 'other', split='held_out_bugs')
  known, without = metrics.read_trajectories(tmp_path)
  segment = known['trajectories'][0]['segments'][0]
  assert set(segment['trainer']) == set(segment['difference']) == {None}
  assert set(segment['flips']) == {None}
  other = without['trajectories'][0]
  assert other['split'] == 'held_out_bugs'
  assert not {'trainer', 'flips'} & set(other['segments'][0])


def test_what_does_not_fit_is_named(tmp_path):
  trajectory = make_trajectory(np.random.default_rng(0), [5])
  with pytest.raises(ValueError, match='extra has 0 entries for 1'):
    save(tmp_path, [trajectory], [])
  with pytest.raises(ValueError, match='flips has 4 entries .* of 5 tokens'):
    save(tmp_path, [trajectory], [{'flips': [np.zeros(4)]}])
  with pytest.raises(ValueError, match="name='../a'"):
    save(tmp_path, [trajectory], None, '../a')
  assert list(metrics.read_trajectories(tmp_path)) == []


def test_a_span_may_be_noted_when_it_has_ended(tmp_path):
  lanes = metrics.Lanes(tmp_path)
  lanes.finished('rollout', 2.5, 'group')
  lanes.flush()
  (span,) = metrics.read_lanes(tmp_path)
  assert (span['lane'], span['name']) == ('rollout', 'group')
  assert span['end'] - span['start'] == pytest.approx(2.5, abs=1e-3)
