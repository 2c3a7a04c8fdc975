"""Evaluation with made-up sessions: who runs, under which names, statistics."""

import asyncio
import math
import statistics

import numpy as np
import pytest

from composer import config as config_lib
from composer import evaluate
from composer import records
from composer.rollout import session as session_lib

EXPERIMENT = config_lib.Experiment(
  name='evaluation', eval=config_lib.EvalConfig(temperature=0.3)
)


def make_task(number):
  return records.Task(
    id=f'task{number}',
    kind='repair',
    instruction='',
    files={},
    tools=(),
    test_command=(),
    allowed=(),
    hidden_files={},
    hidden_command=(),
    metadata={},
  )


def make_trajectory(tests, kinds=('prompt', 'call', 'observation', 'summary')):
  return records.Trajectory(
    task_id='',
    group_id='',
    index=0,
    segments=(),
    turns=tuple(records.Turn(kind, '', 0, 0, 0, 0.0) for kind in kinds),
    reward=tests - 0.1,
    reward_parts={'tests': tests, 'effort': 0.1},
    stop_reason='finished',
    provenance={},
    timings={},
  )


class Sessions:
  """Stands in for `run_session`; the outcome depends on the seed alone."""

  def __init__(self, fail=lambda seed: False):
    self.fail = fail
    self.calls = []
    self.live = self.most = 0

  async def __call__(
    self,
    sampler,
    pool,
    task,
    tokenizer,
    experiment,
    *,
    group_id,
    index,
    seed,
    provenance,
  ):
    self.live += 1
    self.most = max(self.most, self.live)
    await asyncio.sleep(0.001 * (seed % 5))
    self.live -= 1
    self.calls.append((task.id, index, group_id, seed, experiment))
    if self.fail(seed):
      raise session_lib.SessionFailed('machine', 'the pool was lost')
    return make_trajectory(float(seed % 2))


@pytest.fixture
def redrawn(monkeypatch):
  draws = []

  def redraw(task, draw):
    draws.append((task.id, draw))
    return task

  monkeypatch.setitem(evaluate.schedule.REDRAW, 'repair', redraw)
  return draws


def run(monkeypatch, sessions, count=48, tasks=7, **kwargs):
  monkeypatch.setattr(evaluate.session_lib, 'run_session', sessions)
  return asyncio.run(
    evaluate.evaluate(
      'held_out_bugs',
      None,
      None,
      [make_task(i) for i in range(tasks)],
      None,
      EXPERIMENT,
      count,
      **kwargs,
    )
  )


@pytest.mark.parametrize(
  'tasks, sessions, used', ((70, 512, 70), (70, 128, 32), (7, 48, 7), (5, 3, 1))
)
def test_plan(tasks, sessions, used):
  """Tasks are spread evenly, each at least `BEST_OF` times where it can be."""
  every = [make_task(i) for i in range(tasks)]
  planned = evaluate.plan(every, sessions, seed=0)
  assert len(planned) == sessions
  counts = {}
  for task, draw in planned:
    assert draw == counts.get(task.id, 0)
    counts[task.id] = draw + 1
  assert len(counts) == used
  assert max(counts.values()) - min(counts.values()) <= 1
  assert min(counts.values()) >= min(evaluate.BEST_OF, sessions)
  assert planned == evaluate.plan(every, sessions, seed=0)
  if used < tasks:
    other = {task.id for task, _ in evaluate.plan(every, sessions, seed=1)}
    assert other != set(counts)


def test_who_runs(monkeypatch, redrawn):
  sessions, seen = Sessions(), []
  result = run(monkeypatch, sessions, concurrent=5, on_session=seen.append)
  assert sessions.most == 5
  assert len(seen) == result.sessions == len(sessions.calls) == 48
  assert len({call[:2] for call in sessions.calls}) == 48
  assert len({seed for *_, seed, _ in sessions.calls}) == 48
  # One task is drawn several times, never as a training draw.
  assert len(set(redrawn)) == 48
  assert all(draw >= 1_000_000 for _, draw in redrawn)
  for task_id, index, group_id, _, experiment in sessions.calls:
    assert group_id == records.group_id(task_id, -1, index)
    assert experiment.session.temperature == EXPERIMENT.eval.temperature
  again = Sessions()
  other = run(monkeypatch, again, concurrent=48)
  assert again.most == 48
  assert sorted(c[:4] for c in again.calls) == sorted(
    c[:4] for c in sessions.calls
  )
  assert other.scalars() == result.scalars()


def test_statistics_of_a_run(monkeypatch, redrawn):
  sessions = Sessions(fail=lambda seed: seed % 11 == 0)
  result = run(monkeypatch, sessions)
  by_task = {}
  for task_id, _, _, seed, _ in sorted(sessions.calls, key=lambda c: c[1]):
    if seed % 11:
      by_task.setdefault(task_id, []).append(seed % 2)
  means = [statistics.mean(v) for v in by_task.values()]
  lost = sum(seed % 11 == 0 for *_, seed, _ in sessions.calls)
  assert result.failed == lost > 0 and result.sessions == 48 - lost
  k = min(map(len, by_task.values()))
  assert result.k == k
  np.testing.assert_allclose(result.solve_rate, statistics.mean(means))
  np.testing.assert_allclose(
    result.solve_rate_se, statistics.stdev(means) / math.sqrt(len(means))
  )
  best = statistics.mean(max(v[:k]) for v in by_task.values())
  np.testing.assert_allclose(result.best_of_k, best)
  scalars = result.scalars()
  assert scalars['eval/held_out_bugs/solve_rate'] == result.solve_rate
  assert scalars['eval/held_out_bugs/solve_rate_se'] == result.solve_rate_se
  assert scalars['eval/held_out_bugs/best_of_k'] == result.best_of_k
  row = result.row('after')
  assert (row['who'], row['set'], row['k']) == ('after', 'held_out_bugs', k)


def test_best_of_k_counts_as_many_sessions_of_every_task():
  """A task with more sessions than others has no more chances than they."""
  done = [('a', make_trajectory(0.0)), ('a', make_trajectory(0.0))]
  done += [('b', make_trajectory(0.0)), ('b', make_trajectory(1.0))]
  done += [('a', make_trajectory(1.0))]
  result = evaluate.summarise('set', done)
  assert result.k == 2 and result.best_of_k == 0.5
  np.testing.assert_allclose(result.solve_rate, (1 / 3 + 1 / 2) / 2)


def test_partly_passed_tests_are_not_solved():
  done = [('a', make_trajectory(0.8)), ('b', make_trajectory(1.0))]
  assert evaluate.summarise('set', done).solve_rate == 0.5


def test_turns_are_acts():
  kinds = ('prompt', 'call', 'observation', 'text', 'broken', 'summary')
  done = [('a', make_trajectory(1.0, kinds)), ('b', make_trajectory(1.0))]
  assert evaluate.summarise('set', done).turns == 2.0


def test_few_or_no_sessions():
  one = evaluate.summarise('set', [('a', make_trajectory(1.0))])
  assert one.solve_rate == 1 and math.isnan(one.solve_rate_se)
  none = evaluate.summarise('set', [('a', None), ('b', None)])
  assert math.isnan(none.solve_rate) and none.failed == 2
  assert none.sessions == none.k == 0
  assert none.best_of_k == none.turns == 0


def test_an_empty_set_is_refused(monkeypatch):
  with pytest.raises(ValueError, match="'held_out_bugs' holds no tasks"):
    run(monkeypatch, Sessions(), tasks=0)


def test_an_error_of_ours_is_not_a_lost_session(monkeypatch, redrawn):
  class Broken(Sessions):
    async def __call__(self, *args, **kwargs):
      raise KeyError('ours')

  with pytest.raises(KeyError):
    run(monkeypatch, Broken())
