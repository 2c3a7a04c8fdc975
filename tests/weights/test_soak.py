"""The short form of `soak.py`: four readers over a bad line, one killed at times."""

from __future__ import annotations

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

VERSIONS = 1200


@pytest.mark.slow
def test_readers_over_a_bad_line_converge_beside_a_live_publisher(tmp_path):
  soak = Path(__file__).with_name('soak.py')
  done = subprocess.run(
    [sys.executable, str(soak), '--exchange', f'file://{tmp_path}/exchange']
    + ['--versions', str(VERSIONS), '--kill', '300', '--pause', '0.004'],
    capture_output=True,
    text=True,
    timeout=240,
    env=os.environ | {'PYTHONPATH': os.pathsep.join(p for p in sys.path if p)},
  )
  assert done.returncode == 0, done.stderr
  told = json.loads(done.stdout)
  assert told['codes'] == [0] * 4, done.stderr
  assert [r['version'] for r in told['readers']] == [VERSIONS - 1] * 4
  assert sum(r['activated'] for r in told['readers']) > 50
  assert sum(r['lost'] for r in told['readers']) > 5, 'the line was too good'
  first, second = told['most objects, first half and second']
  assert second < 2 * first + 100, 'the exchange grows'
  assert max(r['grown MB'] for r in told['readers']) < 20
