"""Boxes of parameters: any part equals the part of the whole, and goes back."""

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import numpy as np
import pytest

from composer import config as config_lib
from composer.model.checkpoints import names
from composer.model.checkpoints import store

MODELS = {
  'latent': config_lib.ModelConfig(
    vocab_size=11,
    layers=3,
    dense_layers=1,
    width=6,
    heads=3,
    q_lora=5,
    kv_lora=4,
    nope_dim=3,
    rope_dim=4,
    value_dim=2,
    dense_hidden=7,
    experts=5,
    expert_hidden=3,
  ),
  'grouped': config_lib.ModelConfig(
    vocab_size=11,
    layers=2,
    width=6,
    heads=4,
    kv_heads=2,
    head_dim=4,
    qk_norm=True,
    experts=3,
    expert_hidden=3,
    router='softmax',
    shared_experts=0,
  ),
}


def stored(entries):
  """Every tensor with numbers that occur once, and a count of rows read."""
  tensors, values, count = {}, {}, 0
  for entry in entries:
    for place in entry.places():
      for piece in entry.pieces:
        size = int(np.prod(piece.shape))
        value = np.arange(count, count + size, dtype=np.float32)
        count += size
        name = entry.tensor(piece, place)
        assert name not in values
        values[name] = value.reshape(piece.shape)
        flat = value.reshape(piece.shape[0], -1)
        dtype = np.dtype(np.float32)
        tensors[name] = names.Stored(
          piece.shape, dtype, dtype, lambda a, b, flat=flat: flat[a:b]
        )
  return tensors, values


@pytest.mark.parametrize('interleaved', [True, False])
@pytest.mark.parametrize('model', MODELS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_box_is_a_part_of_the_whole(model, interleaved, data):
  entries = names.table(MODELS[model], interleaved)
  tensors, _ = stored(entries)
  entry = data.draw(st.sampled_from(entries))
  dtype = np.dtype(np.float32)
  whole = names.assemble(entry, tensors, names.full(entry.shape), dtype)
  assert np.unique(whole).size == whole.size
  box = []
  for n in entry.shape:
    start = data.draw(st.integers(0, n - 1))
    box.append((start, data.draw(st.integers(start + 1, n))))
  part = names.assemble(entry, tensors, tuple(box), dtype)
  np.testing.assert_array_equal(part, whole[tuple(slice(*s) for s in box)])


@pytest.mark.parametrize('interleaved', [True, False])
@pytest.mark.parametrize('model', MODELS)
def test_there_and_back(model, interleaved):
  entries = names.table(MODELS[model], interleaved)
  tensors, values = stored(entries)
  dtype = np.dtype(np.float32)
  for entry in entries:
    for place in entry.places():
      for piece in entry.pieces:
        n = piece.outer[0]
        cuts = [0, n // 2, n] if piece.divisible and n > 1 else [0, n]
        parts = []
        for first, last in zip(cuts, cuts[1:], strict=False):
          box = names.box_of(entry, piece, place, first, last)
          value = names.assemble(entry, tensors, box, dtype)
          value = value.reshape(value.shape[entry.stacked :])
          if piece.pair is not None:
            value = value.take(0, axis=len(piece.inner))
          parts.append(names.to_theirs(piece, value))
        name = entry.tensor(piece, place)
        got = np.concatenate(parts).reshape(piece.shape)
        np.testing.assert_array_equal(got, values[name])


@given(
  st.sampled_from(sorted(MODELS)),
  st.integers(1, 3000),
  st.integers(1, 300),
)
@settings(max_examples=40, deadline=None)
def test_chunks_cover_every_parameter_once(model, chunk, small):
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(store, 'CHUNK', chunk)
    patch.setattr(store, 'SMALL', min(small, chunk))
    for entry in names.table(MODELS[model]):
      shape = store.chunk_shape(entry)
      assert len(shape) == len(entry.shape)
      count = np.zeros(entry.shape, int)
      for box in store.boxes(entry.shape, shape):
        count[tuple(slice(*span) for span in box)] += 1
      assert (count == 1).all()
      unit = np.prod(entry.shape[entry.stacked :])
      if unit <= chunk and entry.stacked:
        assert np.prod(shape) <= chunk
