"""The tokenizer: lossless, injection-safe, and single tokens where promised."""

from hypothesis import given
from hypothesis import strategies as st
import pytest

from composer import data
from composer.environments.tasks import repair
from composer.model import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.load()
SPECIALS = tokenizer_lib.SPECIALS
FRAGMENTS = st.sampled_from([
  *SPECIALS, *repair.PIECES, ' ', '  ', '\n', '\t', 'L3', '<', '>', 'é', '😀',
  ' summary', '\x00', '\u2028', 'def f(a):\n    return a\n', '\r\n', '\u0301',
])  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(FRAGMENTS).map(''.join))


@given(TEXTS)
def test_any_text_comes_back_exactly(text):
  assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@given(TEXTS)
def test_no_text_encodes_to_a_special_token(text):
  assert all(i >= len(SPECIALS) for i in TOKENIZER.encode(text))


@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=30))
def test_decode_is_total(ids):
  assert isinstance(TOKENIZER.decode(ids), str)


def test_a_spelt_special_is_ordinary_text():
  ids = TOKENIZER.encode(' ok<end><act> submit')
  assert TOKENIZER.decode(ids) == ' ok<end><act> submit'
  assert TOKENIZER.token_id('<end>') not in ids
  assert TOKENIZER.token_id('<act>') not in ids


def test_specials_are_the_first_ids_and_pad_is_zero():
  assert [TOKENIZER.token_id(x) for x in SPECIALS] == list(range(10))
  assert TOKENIZER.token_id('<pad>') == 0
  assert TOKENIZER.decode([1, 2]) == '<bos><end>'
  assert TOKENIZER.vocab_size == tokenizer_lib.VOCAB_SIZE == 768


@pytest.mark.parametrize('piece', repair.PIECES)
def test_every_piece_is_one_token_alone_and_among_others(piece):
  one = TOKENIZER.token_id(piece)
  assert TOKENIZER.encode(piece) == [one]
  others = [TOKENIZER.token_id(x) for x in (' L4', ' x')]
  assert TOKENIZER.encode(' L4' + piece + ' x') == [others[0], one, others[1]]


@pytest.mark.parametrize('text', [' summary', ' summation', ' L31', ' index'])
def test_a_piece_is_not_found_inside_a_longer_word(text):
  if text in repair.PIECES:
    assert len(TOKENIZER.encode(text)) == 1
    return
  longest = max((p for p in repair.PIECES if text.startswith(p)), key=len)
  assert TOKENIZER.token_id(longest) != TOKENIZER.encode(text)[0]


def test_python_source_costs_fewer_tokens_than_bytes():
  ((_, text), *_) = data.python_source(60_000)
  assert len(TOKENIZER.encode(text)) < len(text) / 1.6
  assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_surrogates_are_replaced_and_not_raised():
  assert TOKENIZER.decode(TOKENIZER.encode('a\ud800b')) == 'a?b'


def test_cached_ids_cannot_be_changed_from_outside():
  TOKENIZER.encode(' ok').append(5)
  assert TOKENIZER.encode(' ok') == [TOKENIZER.token_id(' ok')]


def test_an_observation_that_comes_again_is_not_encoded_again():
  texts = [f' {i % 7} of {i}' for i in range(500)]
  first = [TOKENIZER.encode(text) for text in texts]
  known = TOKENIZER._encode_cached.cache_info().hits
  assert [TOKENIZER.encode(text) for text in texts] == first
  assert TOKENIZER._encode_cached.cache_info().hits == known + len(texts)


def test_unknown_pieces_and_ids_are_refused():
  for piece in (' summary of', 'é', '\ufffd', ''):
    with pytest.raises(KeyError, match='not a single token'):
      TOKENIZER.token_id(piece)
  with pytest.raises(ValueError, match='768 is outside the vocabulary'):
    TOKENIZER.decode([768])
  with pytest.raises(ValueError, match='-1 is outside'):
    TOKENIZER.decode([-1])


def test_files_that_are_none_of_ours_are_refused(tmp_path):
  with pytest.raises(ValueError, match='not a file'):
    tokenizer_lib.load(str(tmp_path / 'absent.json'))
  (tmp_path / 'a.json').write_text('{}')
  with pytest.raises(ValueError, match='not a tokenizer.json'):
    tokenizer_lib.load(str(tmp_path / 'a.json'))
  wrong = _built_in().replace('"<pad>":0', '"<pat>":0')
  (tmp_path / 'b.json').write_text(wrong)
  with pytest.raises(ValueError, match='<pad>.*misplaced'):
    tokenizer_lib.load(str(tmp_path / 'b.json'))


def test_a_file_gives_the_same_tokenizer_and_the_fingerprint_tells(tmp_path):
  path = tmp_path / 'tokenizer.json'
  path.write_text(_built_in())
  copy = tokenizer_lib.load(str(path))
  assert copy.fingerprint == TOKENIZER.fingerprint
  path.write_text(_built_in() + '\n')
  tokenizer_lib.load.cache_clear()
  assert tokenizer_lib.load(str(path)).fingerprint != TOKENIZER.fingerprint


def test_build_makes_what_load_reads():
  texts = [text for _, text in data.python_source(400_000)]
  built = tokenizer_lib.build(texts, repair.PIECES)
  assert built == tokenizer_lib.build(texts, repair.PIECES)
  made = tokenizer_lib.Tokenizer(built)
  assert made.vocab_size == tokenizer_lib.VOCAB_SIZE
  assert [made.token_id(x) for x in repair.PIECES] == [
    TOKENIZER.token_id(x) for x in repair.PIECES
  ]
  assert made.decode(made.encode(texts[0])) == texts[0]


def test_build_refuses_pieces_that_are_not_one_word():
  for piece in (' two words', 'bare', ' a+'):
    with pytest.raises(ValueError, match='not one word with a leading space'):
      tokenizer_lib.build([], [piece])


def test_build_refuses_too_little_text():
  with pytest.raises(ValueError, match='train on more text'):
    tokenizer_lib.build(['a b'], repair.PIECES)


def _built_in():
  path = tokenizer_lib.importlib.resources.files('composer.model')
  return path.joinpath('tokenizer.json').read_text('utf-8')
