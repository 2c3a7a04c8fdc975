"""The delta benchmark: its entropies, its rows, and the arithmetic of plans."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from composer import __main__ as cli
from composer.bench import weights
from composer.bench import weights_codecs
from composer.bench import weights_inputs


def _pair(count=4000):
  """Half of the words with one exponent, which move; half that never do."""
  still = np.full(count // 2, 1.5, ml_dtypes.bfloat16)
  moving = np.full(count // 2, 0.01, ml_dtypes.bfloat16)
  base = {'w': np.concatenate([still, moving])}
  words = base['w'].view(np.uint16).copy()
  words[count // 2 :: 4] += 1
  words[count // 2 + 2 :: 8] -= 1
  return base, {'w': words.view(ml_dtypes.bfloat16)}


def _entropy(*shares):
  return -sum(p * math.log2(p) for p in shares if p)


def test_entropies_are_those_of_mask_and_step():
  base, new = _pair()
  got = weights_codecs.entropies(base, new)
  # Of those that move, 3 in 8 do: two up for each one down.
  values = 750 * _entropy(2 / 3, 1 / 3)
  alike = 4000 * _entropy(3 / 16, 13 / 16) + values
  given = 2000 * _entropy(3 / 8, 5 / 8) + values
  assert got.changed == 750 / 4000
  np.testing.assert_allclose(
    [got.alike, got.by_exponent], [alike / 8, given / 8]
  )


def test_a_row_has_what_its_line_says():
  item = weights_inputs.Input('tiny', *_pair(), heavy=True)
  row = weights.measure(item, with_arc=False, repeats=1)
  assert row['model_bytes'] == 8000 and row['ours']['encode_per_core'] > 0
  assert 0.9 < row['ours']['bytes'] / row['entropies']['by_exponent'] < 1.4
  line = weights._line(row)
  assert line.startswith('tiny') and '18.750%' in line


def test_synthetic_inputs_have_their_share():
  for share, item in zip(
    (0.01, 0.5), weights_inputs.synthetic((0.01, 0.5), 1 << 16), strict=True
  ):
    got = weights_codecs.entropies(item.base, item.new)
    assert abs(got.changed - share) < 0.2 * share
    assert abs(got.by_exponent / got.alike - 1) < 0.02


def test_a_plan_adds_up():
  got = weights.plan(1e12, 250, 2.5e9, 0.005, 4e9, 8e9)
  assert got.delta_bytes == 5e9 and got.upload_s == got.download_s == 2.0
  assert got.encode_s == 1.0 and got.apply_s == 0.5
  parts = (got.store_s, got.device_s)
  assert got.total_s == pytest.approx(5.5 + sum(parts))


@pytest.mark.parametrize(
  'parse, text, value',
  [
    (weights.parse_bytes, '1TB', 1e12),
    (weights.parse_bytes, '1.5 GB', 1.5e9),
    (weights.parse_bits, '25Gbit', 3.125e9),
    (weights.parse_bits, '800Mbit/s', 1e8),
  ],
)
def test_sizes_and_rates(parse, text, value):
  assert parse(text) == value


@pytest.mark.parametrize(
  'words, message',
  [
    (('--plan', '1TiB'), "'1TiB' is not a size"),
    (('--plan', '0TB'), "'0TB' is not a size"),
    (('--plan', '1TB', '--egress', '25GB'), "'25GB' is not a rate"),
    (('--plan', '1TB', '--hosts', '0'), '--hosts 0'),
    (('--hosts', '3'), 'belong to a plan'),
  ],
)
def test_what_cannot_be_planned_is_refused(words, message, capsys):
  assert cli.main(['bench', 'weights', *words]) == 2
  assert message in capsys.readouterr().err
