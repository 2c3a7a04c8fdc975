"""The scheduler over a real exchange in memory; sessions are stand-ins."""

import asyncio
import json
import time

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from composer import config
from composer import groups
from composer import leases
from composer import records
from composer.environments.tasks import repair
from composer.rollout import schedule
from composer.rollout import session
from composer.weights import store

EXPERIMENT = config.Experiment(
  name='schedule',
  rl=config.RLConfig(groups_per_step=2, group_size=2, staleness=1),
  engine=config.EngineConfig(sequences=4),
  fleet=config.FleetConfig(lease_s=1.0, heartbeat_s=0.05),
)
TASKS = repair.build_tasks(EXPERIMENT.tasks).train[:5]


def trajectory(task, group_id, index) -> records.Trajectory:
  tokens = np.arange(3, dtype=np.int32)
  segment = records.Segment(
    tokens=tokens,
    sampled=np.array([False, True, True]),
    logprobs=np.zeros(3, np.float32),
    temperatures=np.ones(3, np.float32),
    versions=np.array([-1, 0, 0], np.int32),
    experts=np.zeros((3, 1, 1), np.int16),
    auditable=np.zeros(3, bool),
    stop_reason='finished',
    parent=-1,
  )
  return records.Trajectory(
    task_id=task.id,
    group_id=group_id,
    index=index,
    segments=(segment,),
    turns=(),
    reward=1.0,
    reward_parts={'tests': 1.0},
    stop_reason='finished',
    provenance={},
    timings={},
  )


@pytest.fixture
def sessions(monkeypatch):
  """Sets what a session does; by default it ends well at once."""

  def use(act):
    async def run(sampler, pool, task, tokenizer, config, **named):
      await act(named['index'])
      return trajectory(task, named['group_id'], named['index'])

    monkeypatch.setattr(session, 'run_session', run)

  async def nothing(index):
    del index

  use(nothing)
  return use


def scheduler(kv, incarnation='0-a', **named) -> schedule.Scheduler:
  return schedule.Scheduler(
    kv,
    *(None, None, TASKS, None, EXPERIMENT, incarnation),
    version=lambda: 0,
    **named,
  )


def states(kv) -> list[str]:
  keys = store.keys(kv, 'leases/')
  return [json.loads(store.read(kv, key)[0])['state'] for key in keys]


def run_until(made, done, seconds=60.0) -> None:
  """Runs a scheduler until `done()`, within a limit."""
  end = time.monotonic() + seconds

  def stop():
    assert time.monotonic() < end, f'not done in {seconds} s: {made.counts}'
    return done()

  asyncio.run(made.run(stop))


def settled(made, count, more_s=0.3):
  """Whether `count` groups have long been there, so that no more come."""
  since = []

  def done():
    if made.counts.produced >= count and not since:
      since.append(time.monotonic())
    return bool(since) and time.monotonic() - since[0] > more_s

  return done


@given(st.integers(0, 9), st.integers(0, 4))
def test_an_epoch_is_a_permutation_and_no_id_comes_twice(seed, epoch):
  count = len(TASKS)
  draws = range(epoch * count, (epoch + 1) * count)
  drawn = [schedule.draw_of(TASKS, seed, draw) for draw in draws]
  assert {task.id for task, _ in drawn} == {task.id for task in TASKS}
  assert {at for _, at in drawn} == {epoch}
  ids = {schedule.group_of(TASKS, seed, d) for d in range(4 * count)}
  assert len(ids) == 4 * count


def test_admission_then_more_as_the_trainer_consumes(sessions):
  del sessions
  kv = store.open_exchange('memory://')
  made = scheduler(kv)
  run_until(made, settled(made, 4))
  assert made.counts.produced == 4  # (S + 1) steps of 2
  assert [c.draw for c in groups.committed(kv)] == [0, 1, 2, 3]
  groups.write_cursor(kv, groups.Cursor(consumed=3))
  again = scheduler(kv, '1-b')
  run_until(again, settled(again, 3))
  assert [c.draw for c in groups.committed(kv)] == list(range(7))
  assert again.counts.produced == 3 and groups.produced(kv) == 7
  groups.write_cursor(kv, groups.Cursor(consumed=3, finished=True))
  run_until(scheduler(kv, '2-c'), lambda: False)


def test_a_stop_frees_what_was_under_way_and_counts_it(sessions):
  async def forever(index):
    await asyncio.sleep(3600)

  sessions(forever)
  kv = store.open_exchange('memory://')
  made = scheduler(kv)
  run_until(made, lambda: states(kv) == ['rolling'] * 3)
  assert states(kv) == []
  assert made.counts.abandoned == 3 * 2 and made.counts.produced == 0
  (beat,) = groups.heartbeats(kv)
  assert beat.abandoned == 6


def test_a_commit_under_way_is_finished_and_counted(sessions, monkeypatch):
  del sessions
  kv = store.open_exchange('memory://')
  begun, real = [], groups.commit

  def slow(kv, handle, group):
    begun.append(group.group_id)
    time.sleep(0.3)
    return real(kv, handle, group)

  monkeypatch.setattr(groups, 'commit', slow)
  made = scheduler(kv)
  run_until(made, lambda: bool(begun))
  assert [c.group_id for c in groups.committed(kv)] == begun
  assert made.counts.produced == 1 == groups.produced(kv)
  assert states(kv) == ['committed']
  # Those that waited for their turn to commit are given up.
  assert made.counts.abandoned > 0


def test_a_group_whose_lease_is_lost_is_not_produced(sessions):
  taken = []
  kv = store.open_exchange('memory://')

  async def act(index):
    if not taken and index == 0:
      for key in store.keys(kv, 'leases/'):
        lease = json.loads(store.read(kv, key)[0])
        if lease['draw'] == 0:
          lease.update(token='another', incarnation='9-z')
          store.write(kv, key, store.to_json(lease))
          taken.append(lease['group_id'])

  sessions(act)
  made = scheduler(kv)
  run_until(made, lambda: made.counts.produced == 3)
  assert taken and made.counts.abandoned == 2
  assert taken[0] not in {c.group_id for c in groups.committed(kv)}


def test_sessions_lost_to_infrastructure_are_kept_out_and_have_a_limit(
  sessions,
):
  async def some(index):
    if index == 0:
      raise session.SessionFailed('machine', 'no machine started')

  sessions(some)
  kv = store.open_exchange('memory://')
  made = scheduler(kv)
  run_until(made, lambda: made.counts.produced == 4)
  assert made.counts.failed_sessions == 4
  assert made.counts.failed_by == {'machine': 4}
  assert all(
    len(groups.read_group(kv, item).trajectories) == 1
    for item in groups.committed(kv)
  )

  async def every(index):
    raise session.SessionFailed('machine', 'no machine started')

  sessions(every)
  kv = store.open_exchange('memory://')
  made = scheduler(kv)
  with pytest.raises(RuntimeError, match='3 groups in a row.*no machine'):
    run_until(made, lambda: False)
  assert made.counts.produced == 2 and states(kv) == ['committed'] * 2


def test_a_dead_sampler_is_not_taken_for_lost_sessions(sessions):
  async def every(index):
    raise session.SessionFailed('engine', 'the engine failed')

  def check():
    raise records.EngineError('the engine failed')

  sessions(every)
  kv = store.open_exchange('memory://')
  made = scheduler(kv, check=check)
  with pytest.raises(records.EngineError):
    run_until(made, lambda: False)
  assert made.counts.produced == 0 and states(kv) == []


def test_a_silent_trainer_is_noticed(sessions):
  del sessions
  kv = store.open_exchange('memory://')
  with pytest.raises(TimeoutError, match='trainer.*is it running'):
    run_until(scheduler(kv, quiet_s=0.3), lambda: False)


def test_leases_outlast_their_time_while_sessions_run(sessions):
  """Renewed while it works, whatever `lease_s`; another takes nothing."""

  async def long(index):
    await asyncio.sleep(1.6)

  sessions(long)
  kv = store.open_exchange('memory://')
  made = scheduler(kv)
  group_id = schedule.group_of(TASKS, EXPERIMENT.tasks.seed, 0)
  refused = []

  def look():
    if states(kv):
      other = ('local', '1-b', 1.0, time.time())
      refused.append(leases.lease(kv, group_id, 0, *other) is None)
    return made.counts.produced > 0

  run_until(made, look)
  assert len(refused) > 10 and all(refused)
