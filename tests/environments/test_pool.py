"""The pool's scheduler: nobody is forgotten, whatever dies, in a model."""

import asyncio
import random

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest

from composer.bench import fleet
from composer.bench import machines as bench
from composer.bench import sessions
from composer.config import MachineConfig
from composer.environments.machines import MachineError
from composer.environments.machines import MissingFacility
from composer.environments.machines import Pool
from composer.environments.machines import pool as pool_lib
from composer.environments.machines import pressure
from composer.environments.machines import scheduler as scheduler_lib
from composer.environments.machines.scheduler import Scheduler


def forbidden():
  try:
    pool_lib.probe(MachineConfig())
  except MissingFacility as error:
    return str(error)
  return ''


FORBIDDEN = forbidden()
needs_namespaces = pytest.mark.skipif(bool(FORBIDDEN), reason=FORBIDDEN)


def new(slots=2, hosts=1, rng=lambda: 0.5):
  scheduler = Scheduler(rng)
  for number in range(hosts):
    scheduler.add_host(f'h{number}', slots)
  return scheduler


def grants(scheduler, now=0.0):
  found = []
  while grant := scheduler.next(now):
    found.append(grant)
  return found


class TestScheduler:
  def test_in_order_and_bounded(self):
    scheduler = new(slots=2)
    for request in range(5):
      scheduler.submit(request)
    assert [g.request for g in grants(scheduler)] == [0, 1]
    scheduler.done(1)
    assert [g.request for g in grants(scheduler)] == [2]
    assert scheduler.counts() == {'waiting': 2, 'held_back': 0, 'running': 2}

  def test_hosts_fill_evenly(self):
    scheduler = new(slots=3, hosts=3)
    for request in range(6):
      scheduler.submit(request)
    hosts = [g.host for g in grants(scheduler)]
    assert sorted(hosts) == ['h0', 'h0', 'h1', 'h1', 'h2', 'h2']

  def test_a_failure_goes_to_another_host_after_a_backoff(self):
    scheduler = new(slots=1, hosts=2)
    scheduler.submit(0)
    [first] = grants(scheduler)
    assert scheduler.failed(0, now=10.0)
    assert not grants(scheduler, now=10.0)  # not yet
    wake = scheduler.wake_at()
    assert wake == pytest.approx(10.0 + scheduler_lib.BACKOFF_S)
    [second] = grants(scheduler, now=wake)
    assert second.request == 0 and second.host != first.host

  def test_the_only_host_is_tried_again_and_then_given_up(self):
    scheduler = new(slots=1)
    scheduler.submit(0)
    waits, now = [], 0.0
    for attempt in range(scheduler_lib.ATTEMPTS):
      [grant] = grants(scheduler, now)
      assert grant.request == 0
      again = scheduler.failed(0, now)
      assert again == (attempt < scheduler_lib.ATTEMPTS - 1)
      if again:
        waits.append(scheduler.wake_at() - now)
        now = scheduler.wake_at()
    backoff = scheduler_lib.BACKOFF_S
    assert waits == pytest.approx([backoff * 2**n for n in range(len(waits))])
    assert scheduler.counts() == {'waiting': 0, 'held_back': 0, 'running': 0}

  def test_pressure_stops_new_ones_only(self):
    scheduler = new(slots=2)
    scheduler.submit(0)
    assert grants(scheduler)
    scheduler.set_open('h0', False)
    scheduler.submit(1)
    assert not grants(scheduler)
    assert scheduler.counts()['running'] == 1
    scheduler.set_open('h0', True)
    assert [g.request for g in grants(scheduler)] == [1]

  def test_who_left_the_queue_is_passed_over(self):
    scheduler = new(slots=1)
    for request in range(3):
      scheduler.submit(request)
    grants(scheduler)
    scheduler.withdraw(1)
    assert scheduler.counts()['waiting'] == 1
    scheduler.done(0)
    assert [g.request for g in grants(scheduler)] == [2]

  @settings(deadline=None, max_examples=60)
  @given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.integers(0, 5), max_size=120),
    st.integers(0, 1 << 30),
  )
  def test_every_request_is_somewhere(self, hosts, slots, acts, seed):
    """Against a set: waiting, running, ended; never two places, never none."""
    rng = random.Random(seed)
    scheduler = new(slots, hosts, rng.random)
    everyone, ended, running = set(), set(), {}
    now, born = 0.0, hosts
    for act in acts:
      now += rng.random() * 0.05
      if act <= 1:
        scheduler.submit(len(everyone))
        everyone.add(len(everyone))
      elif act == 2 and running:
        request = rng.choice(sorted(running))
        del running[request]
        scheduler.done(request)
        ended.add(request)
      elif act == 3 and running:
        request = rng.choice(sorted(running))
        del running[request]
        if not scheduler.failed(request, now):
          ended.add(request)
      elif act == 4 and scheduler.hosts:
        name = rng.choice(sorted(scheduler.hosts))
        lost = scheduler.remove_host(name)
        assert sorted(lost) == sorted(
          r for r, h in running.items() if h == name
        )
        for request in lost:
          del running[request]
          if not scheduler.failed(request, now):
            ended.add(request)
      elif act == 5:
        scheduler.add_host(f'h{born}', slots)
        born += 1
      for grant in grants(scheduler, now):
        assert grant.request not in running and grant.request not in ended
        running[grant.request] = grant.host
      for name, host in scheduler.hosts.items():
        used = sum(x == name for x in running.values())
        assert host.running == used <= slots
      counts = scheduler.counts()
      assert counts['running'] == len(running)
      assert counts['waiting'] + len(running) + len(ended) == len(everyone)


def test_a_simulated_fleet_loses_nothing():
  """Its own assertions look for lost requests and for those that end twice."""
  starts = [0.002, 0.004, 0.02]
  small = fleet.Fleet(
    requests=3000, hosts=30, slots=20, dying=0.2, session_s=5.0, window_s=9.0
  )
  found = fleet.simulate(small, starts)
  assert found['hosts_dead'] == 6 and found['killed'] > 0
  assert found['given_up'] == 0 and found['all_s'] > found['half_s'] > 0
  still = fleet.Fleet(requests=400, hosts=20, slots=20, dying=0.0)
  found = fleet.simulate(still, starts)
  # 20 machines a host, in 8 lanes: three starts one after another at most.
  assert 0.002 < found['all_s'] < 0.12 and found['killed'] == 0


def test_pressure_is_what_the_kernel_says():
  assert 0 <= pressure.stalled('cpu') <= 100
  assert pressure.available_mb() > 0
  assert not pressure.bearable(1e12)


@needs_namespaces
def test_a_burst_of_a_thousand_at_once():
  config = MachineConfig(warm=2, concurrent=24)

  async def run():
    pool = Pool(config)
    try:
      return await bench.burst_of(pool, 1000), pool.counters, pool.pressure()
    finally:
      await pool.close()

  burst, counters, pressure_now = asyncio.run(run())
  assert burst['served'] == burst['requested'] == 1000
  assert counters.started == 1000 and counters.failures == 0
  assert pressure_now['running'] == pressure_now['waiting'] == 0


@needs_namespaces
def test_the_benchmark_measures_what_it_says():
  config = MachineConfig(warm=0)

  async def run():
    pool = Pool(config)
    try:
      times = await bench.latencies(pool, {'runner.py': '', 'x': 'y'}, 2)
    finally:
      await pool.close()
    return times, await bench.idle_memory(config, 4)

  times, idle = asyncio.run(run())
  assert set(times) >= {'start', 'stop', 'exec', 'python', 'snapshot', 'fork'}
  assert all(0 < median <= p99 for median, p99 in times.values())
  assert 100e3 < idle['bytes'] < 40e6  # a few pages of its own, no more
  assert idle['fit'] == int((8 << 30) - idle['base']) // idle['bytes']


@needs_namespaces
def test_pressure_holds_back_and_lets_go(monkeypatch):
  """No memory: one machine at a time, and none of the others is lost."""
  monkeypatch.setattr(pressure, 'available_mb', lambda: 1.0)
  monkeypatch.setattr(pool_lib, 'LOOK_S', 0.0)
  most = 0

  async def one(pool, number):
    nonlocal most
    machine = await pool.acquire({'n': str(number)})
    most = max(most, len(pool._live))
    try:
      return int(await machine.read('n'))
    finally:
      await pool.release(machine)

  async def run():
    pool = Pool(MachineConfig(warm=0, concurrent=8))
    try:
      return await asyncio.gather(*(one(pool, n) for n in range(6)))
    finally:
      await pool.close()

  assert asyncio.run(run()) == list(range(6))
  assert most == 1


@needs_namespaces
def test_who_waits_can_leave_and_nobody_is_forgotten():
  async def run():
    pool = Pool(MachineConfig(warm=0, concurrent=1))
    try:
      held = await pool.acquire({})
      waiting = [asyncio.create_task(pool.acquire({})) for _ in range(4)]
      await asyncio.sleep(0.05)
      assert pool.pressure()['waiting'] == 4
      waiting[0].cancel()
      waiting[2].cancel()
      await asyncio.sleep(0.05)
      assert pool.pressure()['waiting'] == 2
      for task in (waiting[1], waiting[3]):
        await pool.release(held)
        held = await asyncio.wait_for(task, 10)
      await pool.release(held)
      last = asyncio.create_task(pool.acquire({}))
      await pool.release(await last)
      assert pool.pressure()['running'] == 0
      held = await pool.acquire({})
      late = asyncio.create_task(pool.acquire({}))
      await asyncio.sleep(0.05)
    finally:
      await pool.close()
    with pytest.raises(MachineError, match='closed'):
      await late

  asyncio.run(run())


@needs_namespaces
def test_sessions_while_machines_are_killed():
  """The full size is `composer bench sessions`."""
  result = sessions.measure(MachineConfig(concurrent=12), 60)
  assert result.kills > 0
  assert result.hung == 0 and result.broken == [] and result.left == []
  assert len(result.rewards) + sum(result.failed.values()) == 60
  assert result.wrong == 0  # no death became a zero
  assert len(result.rewards) > 50 and set(result.failed) <= {'machine'}
