"""Rows of single operations: what they measure, on a machine without a GPU."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench
from pallas_kernels import bench_others
from pallas_kernels import bench_paged
from pallas_kernels import bench_rows
from pallas_kernels import grouped_matmul
from pallas_kernels import token_logprob


def measured(operation, number):
  compiled, *rows = bench.rows_of(operation, number)
  assert compiled is None and all(row.seconds > 0 for row in rows)
  return rows


def test_gated_products_are_checked(monkeypatch):
  found, compiled = {}, bench_rows.ahead

  def ahead(programs, untimed=()):
    del programs['alone']  # elements that differ, which a GPU has none of
    found.update(compiled(programs, untimed))
    return found

  monkeypatch.setattr(bench_rows, 'ahead', ahead)
  ours, theirs = measured('gated matmul', 1)
  assert (ours.who, theirs.who) == ('ours', 'xla')
  assert ours.error < bench.TOLERANCE and ours.bytes == theirs.bytes
  x, w = bench_rows.draw(found['draw'])
  sizes = bench.small(bench.CASES['gated matmul'][1][1]).sizes()
  swapped = found['ours'](x, w[:, :, ::-1], sizes)  # the gate is not the first
  assert found['error'](x, w, swapped) > bench.TOLERANCE


def of_the_gradient():
  *_, ours, theirs = measured('token_logprob', 2)
  assert ours.operation == 'token_logprob + gradient'
  assert (ours.who, theirs.who) == ('ours', 'xla')
  return ours


def test_gradients_of_logprobs_are_checked():
  ours = of_the_gradient()
  assert 0 < ours.error < bench.TOLERANCE and bench.fault(ours) is None


@pytest.mark.parametrize(
  'wrong',
  [
    lambda right, *a: (1.01 * right(*a)[0], right(*a)[1]),
    lambda right, *a: (right(*a)[0], right(*a)[1].at[:, -1].set(0)),
    # What comes of the entropy, left out.
    lambda right, *a: right(*a[:2], (a[2][0], 0 * a[2][1])),
    lambda right, *a: (right(*a)[0].at[3, 5].set(jnp.nan), right(*a)[1]),
  ],
  ids=['dhidden', 'dunembed', 'entropy', 'nan'],
)
def test_a_wrong_gradient_is_said(monkeypatch, wrong):
  """Of hidden states alone, of one column alone, of a part, of one number."""
  right = token_logprob._gradients
  monkeypatch.setattr(
    token_logprob, '_gradients', functools.partial(wrong, right)
  )
  assert bench.fault(of_the_gradient()).startswith('relative error')


def test_a_step_writes_and_attends_in_one_kernel_or_in_two(monkeypatch):
  monkeypatch.setattr(bench_paged, 'LOOP', 2)
  took, compiled = [], bench_rows.ahead

  def ahead(programs, untimed=()):
    for who in ('ours', 'apart'):
      del programs[f'{who} once']  # to be compared, on a GPU
    return compiled(programs, untimed)

  def timed(row, ready, *arguments):
    jax.block_until_ready(ready(*arguments))
    took.append(row.who)
    return dataclasses.replace(row, seconds=6.0)

  monkeypatch.setattr(bench_rows, 'ahead', ahead)
  monkeypatch.setattr(bench_rows, 'timed', timed)
  ours, apart = measured('decode step', 1)
  assert took == [ours.who, apart.who] == ['ours', 'apart']
  assert ours.seconds == apart.seconds == 3.0  # of a step
  assert apart.note == 'write, then attend'
  assert bench.fault(dataclasses.replace(apart, seconds=None)) is not None


@pytest.fixture
def library(monkeypatch):
  """What has tokamax's interface."""

  def ragged_dot(x, w, sizes, implementation):
    assert implementation == 'mosaic'
    return jax.lax.ragged_dot(x, w, sizes)

  found = types.SimpleNamespace(ragged_dot=ragged_dot)
  monkeypatch.setattr(bench_others, 'tokamax', lambda: found)


def test_gradients_are_measured_beside_tokamax(monkeypatch, library):
  shape = bench.small(grouped_matmul.shapes.TRAINING[0])
  monkeypatch.setattr(grouped_matmul.shapes, 'TRAINING', (shape,))
  _, *rows = bench.CASES['grouped_matmul'][0](shape)
  assert [(row.operation, row.who) for row in rows] == [
    ('grouped_matmul', 'ours'),
    ('grouped_matmul', 'xla'),
    ('grouped_matmul', 'tokamax'),
    ('grouped_matmul dx', 'ours'),
    ('grouped_matmul dx', 'tokamax'),
    ('grouped_matmul dw', 'ours'),
    ('grouped_matmul dw', 'tokamax'),
  ]
  for row in rows:
    assert row.seconds > 0
    assert row.who != 'ours' or row.error < bench.TOLERANCE
    assert (row.note == bench_others.UNTUNED) == (row.who == 'tokamax')


@pytest.mark.parametrize('name', ['', 'dx', 'dw'])
def test_what_tokamax_is_asked_for(library, name):
  rng = np.random.default_rng(0)
  x, w, dy = (
    jnp.asarray(rng.normal(size=size), jnp.float32)
    for size in ((6, 4), (3, 4, 5), (6, 5))
  )
  sizes = jnp.asarray([2, 0, 4])
  found = jax.jit(bench_others.grouped()[name])(x, w, dy, sizes)
  ours = {
    '': lambda: grouped_matmul.grouped_matmul(x, w, sizes),
    'dx': lambda: grouped_matmul.grouped_matmul(dy, w, sizes, transpose=True),
    'dw': lambda: grouped_matmul.weight_gradient(x, dy, sizes),
  }
  np.testing.assert_allclose(found, ours[name](), atol=1e-5)


def test_numbers_that_are_rounded_have_all_bits(monkeypatch):
  """Of rows of all sizes; few quotients would hide how they are divided."""
  found, compiled = {}, bench_rows.ahead

  def ahead(programs, untimed=()):
    found.update(compiled({'draw': programs['draw']}, untimed))
    return found

  monkeypatch.setattr(bench_rows, 'ahead', ahead)
  shape = bench.small(bench.CASES['quantize'][1][0])
  next(bench.CASES['quantize'][0](shape))
  x = np.asarray(bench_rows.draw(found['draw']))
  assert len(np.unique(x.view(np.uint16) & 127)) == 128
  largest = np.abs(np.asarray(x, np.float32)).max(1)
  assert largest.max() > 1000 * largest.min()
