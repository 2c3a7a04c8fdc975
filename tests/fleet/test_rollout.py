"""What a rollout does before its first session; its engine notes it."""

import threading
import types
from unittest import mock

import pytest
import tensorstore as ts

from composer import config
from composer import records
from composer.fleet import rollout as rollout_lib
from composer.fleet import stopping
from composer.inference import engine as engine_lib
from composer.weights import sync

SECONDS = 20.0  # that any wait here may take


class Enough(Exception):
  """Raised by the first session."""


@pytest.fixture
def begin(monkeypatch):
  """begin(platform, warm) starts a rollout: (rollout, what it did, said)."""
  did, said = [], []

  def session(tasks):
    did.append('session')
    raise Enough

  def begin(platform, warm):
    engine = mock.create_autospec(engine_lib.Engine, instance=True)
    engine.stats = engine_lib.Stats()
    engine.activate.side_effect = lambda version, params: did.append('activate')
    engine.warm_up.side_effect = lambda **named: (
      did.append('warm') or warm(engine, **named)
    )
    subscriber = mock.create_autospec(sync.Subscriber, instance=True)
    subscriber.poll.side_effect = [(0, {}), *[None] * 10_000]
    subscriber.version = 0
    for module, name, value in (
      (rollout_lib, 'engine', lambda experiment: engine),
      (
        rollout_lib,
        'dispatch',
        types.SimpleNamespace(platform=lambda: platform),
      ),
      (rollout_lib.sync, 'Subscriber', lambda *args, **named: subscriber),
      (rollout_lib.task_sets, 'build_tasks', session),
    ):
      monkeypatch.setattr(module, name, value)
    kv = ts.KvStore.open({'driver': 'memory'}).result()
    made = rollout_lib.start(
      config.Experiment('any'),
      kv,
      stopping.Stopper(),
      sole=False,
      say=said.append,
    )
    return made, did, said

  return begin


def test_a_cpu_compiles_what_is_needed_when_it_is_needed(begin):
  rollout, did, said = begin('cpu', None)
  with pytest.raises(Enough):
    rollout.join()
  assert did == ['activate', 'session'] and not said


def test_an_accelerator_compiles_all_before_the_first_session(begin):
  compiling, go_on = threading.Event(), threading.Event()

  def warm(engine, seconds, say):
    assert 60 <= seconds <= 3600
    say('1 of 1 programs compiled, 0 s')
    compiling.set()
    assert go_on.wait(SECONDS)
    return 1

  rollout, did, said = begin('gpu', warm)
  assert compiling.wait(SECONDS)
  rollout.threads[1].join(0.2)
  assert did == ['activate', 'warm'] and rollout.threads[1].is_alive()
  go_on.set()
  with pytest.raises(Enough):
    rollout.join()
  assert did == ['activate', 'warm', 'session']
  assert said[:2] == [
    'compiling what sessions need',
    '1 of 1 programs compiled, 0 s',
  ]
  assert len(said) == 3 and said[2].startswith('1 shapes compiled in ')


def test_a_rollout_that_ends_waits_for_no_more_programs(begin):
  compiling, closed = threading.Event(), threading.Event()

  def warm(engine, seconds, say):
    engine.close.side_effect = lambda *args: closed.set()
    compiling.set()
    assert closed.wait(SECONDS)
    raise records.EngineError('the engine was stopped')

  rollout, did, _ = begin('gpu', warm)
  assert compiling.wait(SECONDS)
  rollout.end(SECONDS)
  assert did == ['activate', 'warm']


def test_programs_that_do_not_come_end_the_rollout(begin):
  def warm(engine, seconds, say):
    raise records.EngineError(f'no warm-up within {seconds} s')

  rollout, did, _ = begin('gpu', warm)
  with pytest.raises(records.EngineError, match='no warm-up within'):
    rollout.join()
  assert did == ['activate', 'warm']
