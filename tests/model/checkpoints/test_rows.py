"""Storage formats of numbers, against definitions written out one by one."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import ml_dtypes
import numpy as np
import pytest

from composer.model.checkpoints import rows


def e4m3(code):
  """The value of an E4M3 (finite, with NaN) byte, by its definition."""
  sign = -1.0 if code & 0x80 else 1.0
  exponent, mantissa = (code >> 3) & 15, code & 7
  if exponent == 15 and mantissa == 7:
    return np.nan
  if exponent == 0:
    return sign * mantissa * 2.0**-9
  return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def test_fp8_every_code():
  codes = np.arange(256, dtype=np.uint8)[None, :]
  got = rows.fp8_blocks(codes, np.ones((1, 2), np.float32), 0, (128, 128))
  wanted = np.array([[e4m3(int(c)) for c in codes[0]]], np.float32)
  np.testing.assert_array_equal(got, wanted)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_fp8_blocks_of_any_rows(data):
  height, width = data.draw(st.sampled_from([(4, 8), (128, 128), (3, 5)]))
  total = data.draw(st.integers(1, 3 * height))
  columns = data.draw(st.integers(1, 3 * width))
  first = data.draw(st.integers(0, total - 1))
  last = data.draw(st.integers(first + 1, total))
  rng = np.random.default_rng(data.draw(st.integers(0, 99)))
  codes = rng.integers(0, 256, (total, columns), np.uint8)
  codes[(codes & 127) == 127] = 0  # no NaN, which would equal nothing
  scales = rng.standard_normal((-(-total // height), -(-columns // width)))
  scales = scales.astype(np.float32)
  whole = np.array(
    [
      [
        np.float32(e4m3(int(codes[i, j]))) * scales[i // height, j // width]
        for j in range(columns)
      ]
      for i in range(first, last)
    ],
    np.float32,
  )
  part = scales[first // height : -(-last // height)]
  got = rows.fp8_blocks(codes[first:last], part, first, (height, width))
  np.testing.assert_array_equal(got, whole)


def test_an_all_zero_fp8_block_is_zero():
  codes = np.zeros((128, 256), np.uint8)
  for scale in (0.0, 1e-30):
    scales = np.full((1, 2), scale, np.float32)
    assert not rows.fp8_blocks(codes, scales, 0, (128, 128)).any()


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_int4_groups(data):
  height = data.draw(st.integers(1, 5))
  columns = data.draw(st.integers(1, 100))
  group = data.draw(st.sampled_from([8, 32]))
  rng = np.random.default_rng(data.draw(st.integers(0, 99)))
  values = rng.integers(-8, 8, (height, columns))
  scales = rng.standard_normal((height, -(-columns // group)))
  scales = scales.astype(ml_dtypes.bfloat16)
  packed = np.zeros((height, -(-columns // 8)), np.uint32)
  for i in range(height):
    for j in range(columns):
      packed[i, j // 8] |= np.uint32((values[i, j] + 8) << (4 * (j % 8)))
  got = rows.int4_groups(packed.view(np.int32), scales, columns, group)
  wanted = [
    [
      np.float32(values[i, j]) * np.float32(scales[i, j // group])
      for j in range(columns)
    ]
    for i in range(height)
  ]
  np.testing.assert_array_equal(got, np.array(wanted, np.float32))


def blocks(rng, count, size, scales):
  data = rng.integers(0, 256, (count, size), np.uint8)
  halves = rng.standard_normal((count, scales)).astype(np.float16)
  data[:, : 2 * scales] = halves.view(np.uint8)
  return data, halves.astype(np.float32)


def test_q8_0():
  data, scale = blocks(np.random.default_rng(0), 7, 34, 1)
  got = rows.q8_0(data)
  for i in range(7):
    for j in range(32):
      code = int(data[i, 2 + j])
      code -= 256 if code > 127 else 0
      assert got[i, j] == np.float32(code) * scale[i, 0]


def test_q4_1():
  data, scale = blocks(np.random.default_rng(0), 7, 20, 2)
  got = rows.q4_1(data)
  for i in range(7):
    for j in range(32):
      byte = int(data[i, 4 + j % 16])
      code = byte & 15 if j < 16 else byte >> 4
      assert got[i, j] == np.float32(code) * scale[i, 0] + scale[i, 1]


@pytest.mark.parametrize('name', ['Q4_1', 'Q8_0'])
def test_against_the_gguf_package(name):
  gguf = pytest.importorskip('gguf')
  kind = gguf.GGMLQuantizationType[name]
  size, scales = {'Q4_1': (20, 2), 'Q8_0': (34, 1)}[name]
  data, _ = blocks(np.random.default_rng(1), 64, size, scales)
  wanted = gguf.dequantize(data.reshape(8, -1), kind)
  decode = {'Q4_1': rows.q4_1, 'Q8_0': rows.q8_0}[name]
  got = decode(data).reshape(8, -1)
  np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
  'dtype', [np.float16, np.float32, np.float64, ml_dtypes.bfloat16]
)
def test_non_finite(dtype):
  rng = np.random.default_rng(0)
  plain = rng.standard_normal((3, 50)).astype(dtype)
  plain[0, :2] = [ml_dtypes.finfo(dtype).max, -ml_dtypes.finfo(dtype).max]
  assert rows.non_finite(plain) == (False, False)
  assert rows.non_finite(np.zeros((0,), dtype)) == (False, False)
  for value, wanted in (
    (np.nan, (True, False)),
    (-np.nan, (True, False)),
    (np.inf, (False, True)),
    (-np.inf, (False, True)),
  ):
    odd = plain.copy()
    odd[2, 7] = value
    assert rows.non_finite(odd) == wanted
