"""The terminal display: live, plain, narrow, in old encodings, cut off."""

import io
import os
import re
import subprocess
import sys
import threading

from hypothesis import given
from hypothesis import strategies as st
import pytest

from composer import console

CONTROL = re.compile(r'[\x00-\x09\x0b-\x1f\x7f-\x9f]')
ROWS = [
  {
    'set': name,
    'who': who,
    'solve_rate': rate,
    'se': 0.0187,
    'sessions': 512,
    'best_of_k': 0.9,
  }
  for name in ('held_out_bugs', 'held_out_functions')
  for who, rate in (('after mid-training', 0.231), ('after RL', 0.756))
]


def run_both_stages(progress, steps=6):
  """What the two stages of a run tell the display."""
  progress.stage('mid-training', steps)
  for step in range(1, steps + 1):
    progress.update('mid-training', step, loss=5 / step, tokens_per_s=14_823.4)
  progress.stage('RL', steps)
  for step in range(1, steps + 1):
    progress.update(
      'RL',
      step,
      reward=0.2 + step / 20,
      solve_rate=0.4,
      solve_rate_se=0.04,
      staleness=0.9,
      staleness_max=2,
      busy_trainer=0.62,
      busy_rollout=0.88,
      sessions_per_s=41.2,
      version=step,
    )
  progress.log('evaluating')
  progress.table(ROWS, report='/run/report.html')


def test_plain_lines_have_the_figures_and_no_control_codes():
  file = io.StringIO()
  with console.Progress('quickstart', file=file, every_s=0) as progress:
    run_both_stages(progress)
  text = file.getvalue()
  assert CONTROL.search(text) is None
  assert 'mid-training 6/6 · loss 0.833 · 14.8k tokens/s' in text
  last = next(line for line in text.splitlines() if 'RL 6/6' in line)
  for words in (
    'reward 0.500',
    'solve rate 0.400 ± 0.040',
    'staleness 0.900 (max 2)',
    'busy: trainer 62 %, rollout 88 %',
    '41.2 sessions/s',
    'version 6',
  ):
    assert words in last
  assert text.count('first reward: 0.250') == 1
  assert '0.756 ± 0.019' in text and '0.231 ± 0.019' in text
  assert text.endswith('report: /run/report.html\n')


def test_plain_lines_are_rare_but_the_last_step_is_always_there():
  file = io.StringIO()
  progress = console.Progress('quickstart', file=file, every_s=1000)
  run_both_stages(progress)
  for reward in (0.1, 0.2):  # of sessions that end after the last step
    progress.update('RL', 6, reward=reward)
  lines = file.getvalue().splitlines()
  assert sum('mid-training ' in line and '/6' in line for line in lines) == 3
  assert sum('RL 6/6' in line for line in lines) == 1


@pytest.mark.parametrize('columns', [1, 2, 5, 12, 20, 40, 80, 200])
def test_the_live_display_survives_any_width(columns, monkeypatch):
  monkeypatch.setenv('COLUMNS', str(columns))
  monkeypatch.setenv('LINES', '5')
  monkeypatch.setenv('TERM', 'xterm')
  file = io.StringIO()
  with console.Progress('quickstart', live=True, file=file) as progress:
    run_both_stages(progress)
  text = re.sub(r'\x1b\[[0-?]*[ -/]*[@-~]', '', file.getvalue())
  assert '\x1b' in file.getvalue()
  assert 'report: /run/report.html' in text
  if columns >= 80:
    assert 'first reward: 0.250' in text
    assert '0.756 ± 0.019' in text


def test_live_shows_bars_rates_and_the_course_of_the_reward(monkeypatch):
  monkeypatch.setenv('COLUMNS', '160')
  monkeypatch.setenv('TERM', 'xterm')
  file = io.StringIO()
  with console.Progress('quickstart', live=True, file=file) as progress:
    run_both_stages(progress)
  text = re.sub(r'\x1b\[[0-?]*[ -/]*[@-~]', '', file.getvalue())
  assert '6/6' in text and '14.8k tokens/s' in text
  assert 'reward 0.500 ▁▂▄▅▇█' in text


def test_an_encoding_without_our_signs_is_no_error():
  raw = io.BytesIO()
  file = io.TextIOWrapper(raw, encoding='ascii')
  with console.Progress('été', live=True, file=file) as progress:
    run_both_stages(progress)
    progress.log('→ 汉')
  file.flush()
  text = raw.getvalue().decode('ascii')
  assert '0.756 +/- 0.019' in text
  assert '-> ?' in text


def test_text_of_others_carries_no_codes_and_no_markup():
  file = io.StringIO()
  progress = console.Progress('quickstart', file=file)
  progress.log('a\x1b[2Jb\x07 [bold]c[/nothing] \u202edne')
  assert 'ab [bold]c[/nothing] dne' in file.getvalue()
  assert CONTROL.search(file.getvalue()) is None


def test_a_stage_that_has_not_begun_is_named():
  progress = console.Progress('quickstart', file=io.StringIO())
  progress.stage('RL', 3)
  with pytest.raises(ValueError, match="stage='rl' has not begun.*known: RL"):
    progress.update('rl', 1)


def test_a_reader_that_goes_away_does_not_end_the_run():
  read, write = os.pipe()
  os.close(read)
  file = os.fdopen(write, 'w')
  progress = console.Progress('quickstart', file=file, every_s=0)
  run_both_stages(progress)
  progress.close()
  # The buffer still holds what nobody read; drop it with the descriptor.
  with pytest.raises(BrokenPipeError):
    file.close()


def test_close_does_not_wait_for_updates_of_other_threads(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  progress = console.Progress('quickstart', live=True, file=io.StringIO())
  progress.stage('RL', 10_000)
  stop = threading.Event()

  def work():
    step = 0
    while not stop.is_set():
      step += 1
      progress.update('RL', step, reward=0.5)

  threads = [threading.Thread(target=work) for _ in range(3)]
  for thread in threads:
    thread.start()
  closer = threading.Thread(target=progress.close)
  closer.start()
  closer.join(timeout=10)
  stop.set()
  for thread in threads:
    thread.join(timeout=10)
  assert not closer.is_alive()


@given(
  st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=200)
)
def test_a_sparkline_has_its_extremes_where_the_values_have(values):
  drawn = console.spark(values)
  assert len(drawn) == min(len(values), console.SPARK)
  if len(values) <= console.SPARK and max(values) > min(values):
    assert drawn[values.index(max(values))] == console.BARS[-1]
    assert drawn[values.index(min(values))] == console.BARS[0]


@pytest.mark.parametrize('module', ['console', 'metrics'])
def test_imports_are_light(module):
  code = (
    f'import sys, composer.{module}; '
    'assert not {"jax", "tensorboardX", "flax"} & set(sys.modules)'
  )
  subprocess.run([sys.executable, '-c', code], check=True, timeout=60)
