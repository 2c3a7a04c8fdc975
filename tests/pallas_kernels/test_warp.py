"""Kernels of lanes: what the interpreter computes, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import warp


def run(kernel, *inputs, size=64, dtype=jnp.uint32, blocks=1, **memory):
  (out,) = warp.run(
    kernel,
    *inputs,
    out=[jax.ShapeDtypeStruct((size,), dtype)],
    warpgroups=1,
    blocks=blocks,
    interpret=True,
    **memory,
  )
  return np.asarray(out)


def test_loops_branches_and_lanes():
  x = np.arange(64, dtype=np.uint32)[::-1].copy()

  def kernel(w, x, out):
    def row(i):
      value = w.load(x, i * 32 + w.lane)
      odd = (value & 1).equals(1)
      value = w.when(odd, lambda v: [v * 10], [value])[0]
      most = w.reduce('max', value)
      w.store(out, i * 32 + w.lane, value + w.shuffle(value, 0) - most)

    w.loop(w.warp, 2, w.warps, row)

  value = np.where(x % 2 == 1, 10 * x, x).reshape(2, 32)
  want = value + value[:, :1] - value.max(1, keepdims=True)
  np.testing.assert_array_equal(run(kernel, jnp.asarray(x)), want.reshape(-1))


def test_scratch_is_of_a_warp():
  def kernel(w, out, own):
    w.store(own, w.lane, w.warp * 100 + w.lane)
    w.sync()
    value = w.load(own, w.lane ^ 1)
    w.when(w.warp < 2, lambda: w.store(out, w.warp * 32 + w.lane, value))

  lane = np.arange(32) ^ 1
  np.testing.assert_array_equal(
    run(kernel, scratch=32), np.concatenate([lane, 100 + lane])
  )


def from_the_next(w, out, memory, wait=True):
  """Each warp writes what the one before it in its block reads."""
  w.store(memory, w.own * 32 + w.lane, w.warp * 100 + w.lane)
  if wait:
    w.sync_block()
  value = w.load(memory, (w.own + 1) % 4 * 32 + w.lane)
  w.store(out, w.warp * 32 + w.lane, value)


def test_warps_of_a_block_share_memory():
  found = run(from_the_next, size=256, blocks=2, block_scratch=128)
  want = np.arange(8) // 4 * 4 + (np.arange(8) + 1) % 4
  np.testing.assert_array_equal(
    found.reshape(8, 32), want[:, None] * 100 + np.arange(32)[None, :]
  )
  with pytest.raises(Exception, match=r'is of warps 3 and \{0\} at once'):
    run(
      lambda *refs: from_the_next(*refs, wait=False),
      size=128,
      block_scratch=128,
    )
  with pytest.raises(Exception, match='not all warps of a block wait'):
    run(lambda w, out: w.when(w.own < 2, lambda: w.sync_block()))


def test_what_is_not_written_shows():
  def kernel(w, out):
    first = w.warp.equals(0) & (w.lane < 3)
    w.when(first, lambda: w.store(out, w.lane, 0))

  found = run(kernel, size=5)
  np.testing.assert_array_equal(found, [0, 0, 0, 0xABABABAB, 0xABABABAB])


@pytest.mark.parametrize(
  ('kernel', 'message'),
  [
    (lambda w, out: w.store(out, w.lane + 33, 0), 'index 64 of 64'),
    (
      lambda w, out: w.when(w.lane < 3, lambda: w.sync()),
      'without all lanes',
    ),
  ],
)
def test_what_a_device_would_not_forgive(kernel, message):
  with pytest.raises(Exception, match=message):
    run(kernel)


def test_ptx_declares_what_it_uses():
  def kernel(w, x, out):
    half = w.load(x, w.lane) * 0.5
    w.store(out, w.lane, w.where(half > 1.0, half, 0.0))

  arrays = [(np.dtype(np.float32), 32)] * 2
  text = warp.ptx(kernel, arrays, warpgroups=1, blocks=1)
  assert text.startswith('{') and text.endswith('}')
  for kind, name in (('f32', 'kf'), ('b32', 'kr'), ('pred', 'kp')):
    count = int(text.split(f'.reg .{kind} {name}<')[1].split('>')[0])
    used = {
      int(word.strip('[],;')[2:])
      for word in text.replace('+', ' ').split()
      if word.strip('[],;@!').startswith(name) and word[2:3].isdigit()
    }
    assert used == set(range(count))
  assert 'mul.rn.f32' in text and '0f3F000000' in text
