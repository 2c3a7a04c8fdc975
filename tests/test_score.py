"""`composer score`: its answers, and what it refuses."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from composer import __main__ as cli
from composer import params as params_lib
from composer import score
from composer.model import checkpoints
from composer.model import presets
from composer.model import transformer

CONFIG = presets.preset('tiny')
V = CONFIG.vocab_size
LENGTHS = (1, 2, 64, 65)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  params = params_lib.init(transformer.spec(CONFIG), jax.random.key(0))
  where = tmp_path_factory.mktemp('score') / 'model'
  checkpoints.save(where, CONFIG, params)
  return where, params


def some_lists():
  rng = np.random.default_rng(1)
  return [rng.integers(0, V, n).tolist() for n in LENGTHS]


def command(capsys, where, path, *flags):
  code = cli.main(
    ['score', '--checkpoint', str(where), '--tokens', str(path), *flags]
  )
  out, err = capsys.readouterr()
  return code, out, err


def naive(params, tokens):
  """Logits of one list with nothing beside it, softmax in float64."""
  one = jnp.asarray(tokens, jnp.int32)[None, :]
  numerics = score.numerics(CONFIG)
  fast = dataclasses.replace(numerics, mode='fast')
  output = transformer.forward(
    params, CONFIG, fast, one, jnp.ones_like(one), jnp.arange(one.size)[None, :]
  )
  x = np.asarray(output.hidden[0], np.float64)
  x /= np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + CONFIG.norm_eps)
  x *= np.asarray(params['final_norm'], np.float64)
  logits = x @ np.asarray(transformer.unembedding(params), np.float64)
  top = logits.max(axis=-1, keepdims=True)
  logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
  chosen = [logprobs[i, token] for i, token in enumerate(tokens[1:])]
  return chosen, np.asarray(output.experts[0])


def test_answers_equal_those_of_the_naive_way(model, tmp_path, capsys):
  where, params = model
  lists = some_lists()
  (tmp_path / 'tokens.json').write_text(json.dumps(lists))
  code, out, _ = command(capsys, where, tmp_path / 'tokens.json', '--experts')
  assert code == 0
  answers = json.loads(out)
  assert len(answers) == len(lists)
  for tokens, answer in zip(lists, answers, strict=True):
    logprobs, experts = naive(params, tokens)
    assert len(answer['logprobs']) == len(tokens) - 1
    np.testing.assert_allclose(answer['logprobs'], logprobs, atol=1e-4)
    np.testing.assert_array_equal(answer['experts'], experts)
    for value in answer['logprobs']:
      assert float(np.float32(value)) == value


def test_a_list_has_the_same_bits_alone_and_among_others(model):
  _, params = model
  lists = some_lists()
  together = score.score(params, CONFIG, lists * 3, experts=True)
  for i, tokens in enumerate(lists):
    alone = score.score(params, CONFIG, [tokens], experts=True)[0]
    for name, value in alone.items():
      np.testing.assert_array_equal(together[i][name], value)
      np.testing.assert_array_equal(together[i + len(lists)][name], value)


def test_without_experts_there_are_none(model, tmp_path, capsys):
  (tmp_path / 'tokens.json').write_text('[[1, 2]]')
  code, out, _ = command(capsys, model[0], tmp_path / 'tokens.json')
  assert code == 0
  (answer,) = json.loads(out)
  assert list(answer) == ['logprobs']


def test_no_lists_give_no_answers(model, tmp_path, capsys):
  (tmp_path / 'tokens.json').write_text('[]')
  assert command(capsys, model[0], tmp_path / 'tokens.json')[:2] == (0, '[]\n')


@pytest.mark.parametrize(
  'text, message',
  [
    ('{', 'is not JSON'),
    ('{"a": 1}', 'holds a dict'),
    ('[1, 2]', 'entry 0 is 1'),
    ('[[1], []]', 'entry 1 is []'),
    ('[[1, 2.5]]', 'has 2.5 at place 1'),
    ('[[true]]', 'has True at place 0'),
    ('[["a"]]', 'has a at place 0'),
    (f'[[0], [1, {V}]]', f'entry 1 has {V} at place 1'),
    ('[[-1]]', 'has -1 at place 0'),
  ],
)
def test_bad_tokens_are_refused(model, tmp_path, capsys, text, message):
  (tmp_path / 'tokens.json').write_text(text)
  code, out, err = command(capsys, model[0], tmp_path / 'tokens.json')
  assert (code, out) == (2, '')
  assert message in err and err.count('\n') == 1


def test_no_file_and_no_model_are_refused(model, tmp_path, capsys):
  code, out, err = command(capsys, model[0], tmp_path / 'none.json')
  assert (code, out) == (2, '') and 'none.json' in err
  (tmp_path / 'tokens.json').write_text('[[1, 2]]')
  code, out, err = command(capsys, tmp_path, tmp_path / 'tokens.json')
  assert (code, out) == (2, '') and 'is no model' in err


def test_weights_that_are_no_numbers_are_named(model, tmp_path, capsys):
  _, params = model
  broken = params_lib.named(params)
  broken['final_norm'] = broken['final_norm'].at[3].set(jnp.nan)
  with pytest.warns(UserWarning, match='model.norm.weight'):
    checkpoints.save(tmp_path / 'broken', CONFIG, params_lib.unnamed(broken))
  (tmp_path / 'tokens.json').write_text('[[1, 2]]')
  code, out, err = command(
    capsys, tmp_path / 'broken', tmp_path / 'tokens.json'
  )
  assert (code, out) == (2, '')
  assert 'token 1 of entry 0 is nan' in err
