"""The end-to-end measurement runs, and its figures fit together."""

from __future__ import annotations

import time

import numpy as np
import pytest

from composer.bench import weights_sync


def test_end_to_end_of_a_small_model(tmp_path):
  got = weights_sync.end_to_end(2 << 20, 0.01, 3, str(tmp_path))
  assert got.model_bytes == 2 << 20 and got.versions == 3
  assert 0 < got.delta_bytes < got.base_bytes <= 1.1 * got.model_bytes
  assert got.pause_s <= got.worst_pause_s < got.worst_activated_s
  assert max(got.publish_s, got.fetch_s) < got.activated_s
  assert list(tmp_path.iterdir()) == []


def test_publishing_beside_a_step(tmp_path):
  rng = np.random.default_rng(0)
  flat = weights_sync.make_weights(1 << 20, rng)
  made = []

  def weights():
    made.append(weights_sync.step_weights(flat, 0.01, rng))
    return made[-1]

  got = weights_sync.on_the_step(
    lambda: time.sleep(0.02), weights, 12, str(tmp_path)
  )
  assert got.versions == 12 and got.replaced == 0
  # That handing over does not wait for the writing is shown by `test_pipeline`.
  assert got.step_s >= 0.02 and got.with_publishing_s >= 0.02
  assert got.blocked == pytest.approx(got.submit_s / got.step_s)
  assert got.slower == pytest.approx(got.with_publishing_s / got.step_s - 1)
