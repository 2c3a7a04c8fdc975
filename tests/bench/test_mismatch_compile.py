"""What is compiled ahead is not compiled again, and who waits hears of failures."""

import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer.bench import ahead as ahead_lib
from composer.bench import mismatch_compile
from composer.inference import engine as engine_lib
from composer.model import presets
from composer.model import transformer
from composer.rl import trainer

EXPERIMENT = config_lib.Experiment(
  name='small',
  model=presets.TINY,
  numerics=config_lib.NumericsConfig(mode='fast', kv_block=4),
  rl=config_lib.RLConfig(micro_batch=2, sequence_length=24),
)


@pytest.fixture
def compiled():
  """Names of the functions that this thread compiles meanwhile."""
  names, own = [], threading.current_thread()

  def listen(event, seconds, **more):
    ours = threading.current_thread() is own
    if ours and event.endswith('backend_compile_duration'):
      names.append(str(more.get('fun_name')))

  jax.monitoring.register_event_duration_secs_listener(listen)
  yield names
  jax.monitoring.unregister_event_duration_listener(listen)


def test_a_score_is_compiled_once(compiled):
  spec = transformer.spec(EXPERIMENT.model)
  drawn = params_lib.init(spec, jax.random.key(0))
  params = jax.jit(lambda p: params_lib.to_published(spec, p))(drawn)
  step = trainer.make_step(EXPERIMENT.model, EXPERIMENT.numerics, EXPERIMENT.rl)
  compiled.clear()
  mismatch_compile.score(EXPERIMENT, step)
  batch = mismatch_compile.blank(EXPERIMENT, seed=1)
  assert compiled
  compiled.clear()
  scored = step.score(params, trainer.place(step, batch), np.bool_(False))
  assert np.all(np.asarray(scored.logprobs) < 0)
  assert not compiled


def test_a_blank_batch_is_full():
  batch = mismatch_compile.blank(EXPERIMENT)
  layers, k = transformer.moe_layers(presets.TINY), 2
  assert batch.tokens.shape == (2, 24)
  assert batch.experts.shape == (2, 24, layers, k)
  pairs = batch.experts.reshape(-1, k)
  assert (pairs[:, 0] != pairs[:, 1]).all() and pairs.min() >= 0
  assert batch.weights.sum() == pytest.approx(1)


def test_waiting(monkeypatch):
  said, go = [], threading.Event()
  ahead = ahead_lib.ahead(said.append)

  def fail():
    raise ValueError('no such shape')

  try:
    ahead.start('slow', lambda: go.wait(60))
    ahead.start('bad', fail)
    ahead.wait('never started')
    with pytest.raises(ValueError, match='no such shape'):
      ahead.wait('bad')
    assert not said
    with monkeypatch.context() as short:
      short.setattr(ahead_lib, 'LIMIT_S', 0.01)
      with pytest.raises(TimeoutError, match='slow is not compiled within'):
        ahead.wait('slow')
    go.set()
    ahead.wait('slow')
    assert said == ['compiled: slow']
  finally:
    ahead.close()


def test_an_engine_that_nobody_took_is_stopped():
  config = config_lib.EngineConfig(
    sequences=2, pages=8, max_context=24, rows=16
  )
  ahead = ahead_lib.ahead(lambda line: None)
  one = engine_lib.Engine(EXPERIMENT.model, EXPERIMENT.numerics, config)
  ahead.start('engine', lambda: one)
  ahead.start('bad', lambda: 1 // 0)
  ahead.close()
  with pytest.raises(records.EngineError, match='stopped'):
    one.check()


FORGETS = """
import sys
import jax
from composer.bench import mismatch_compile

assert not [m for m in sys.modules if m.startswith('pallas_kernels.') and
            m.endswith('.tpu')]
double = jax.jit(lambda x: 2 * x)
double.lower(1.5).compile()
from pallas_kernels.attention import gpu, tpu
from pallas_kernels.grouped_matmul import gpu, tpu
from pallas_kernels.quantize import gpu, tpu
from pallas_kernels.token_logprob import gpu, tpu
with mismatch_compile.compilations() as seconds:
  double(1.5)
assert not seconds, seconds
with mismatch_compile.compilations() as seconds:
  double(jax.numpy.ones(3))
assert seconds
"""


def test_kernels_that_are_imported_later_forget_nothing():
  """What was compiled before the first of them was traced is found again."""
  done = subprocess.run(
    [sys.executable, '-c', FORGETS], capture_output=True, text=True, timeout=120
  )
  assert not done.returncode, done.stderr
