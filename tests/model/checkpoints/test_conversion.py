"""Whole conversions: every family, both directions, and what must not happen."""

import json
import shutil
import signal
import subprocess
import sys

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import reference_weights
from safetensors.numpy import load_file

from composer import mesh as mesh_lib
from composer import params as params_lib
from composer.model import checkpoints
from composer.model import transformer
from composer.model.checkpoints import store
from composer.model.checkpoints import tensors as tensors_lib

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def test_every_reference_model_is_read_as_its_tree(
  case, write_hf, expected, same
):
  config, seed = case
  directory, tensors = write_hf(config, seed)
  found, params = checkpoints.load(directory)
  same(params, expected(config, tensors))
  declared = params_lib.named(transformer.spec(found))
  assert {n: s.shape for n, s in declared.items()} == {
    n: v.shape for n, v in params_lib.named(params).items()
  }
  assert found.norm_eps == config['rms_norm_eps']
  assert found.rope_theta == config['rope_theta']


def test_round_trip_is_bit_exact(case, write_hf, same, tmp_path):
  round_trip(case, write_hf, same, tmp_path)


def test_round_trip_in_many_chunks(
  family, write_hf, same, tmp_path, monkeypatch
):
  monkeypatch.setattr(store, 'CHUNK', 1500)
  monkeypatch.setattr(store, 'SMALL', 300)
  round_trip(family, write_hf, same, tmp_path)


def round_trip(case, write_hf, same, tmp_path):
  config, seed = case
  directory, tensors = write_hf(config, seed, BFLOAT16)
  checkpoints.convert(directory, tmp_path / 'ours')
  checkpoints.convert(
    tmp_path / 'ours', tmp_path / 'back', 'hf', shard_bytes=20_000
  )
  checkpoints.convert(tmp_path / 'back', tmp_path / 'again')
  first = checkpoints.load(tmp_path / 'ours')
  again = checkpoints.load(tmp_path / 'again')
  assert first[0] == again[0]
  same(again[1], first[1])
  index = json.loads(
    (tmp_path / 'back' / 'model.safetensors.index.json').read_text()
  )
  shards = set(index['weight_map'].values())
  assert len(shards) > 1
  back = {}
  for shard in shards:
    back |= load_file(tmp_path / 'back' / shard)
  assert back.keys() == index['weight_map'].keys() == tensors.keys()
  if config.get('rope_interleave', True):  # else its rows are written reordered
    same(back, tensors)


def test_orbax_restores_what_is_written(kimi, write_hf, tmp_path, same):
  config, seed = kimi
  directory, _ = write_hf(config, seed, BFLOAT16)
  checkpoints.convert(directory, tmp_path / 'ours')
  found, params = checkpoints.load(tmp_path / 'ours')
  with ocp.PyTreeCheckpointer() as checkpointer:
    restored = checkpointer.restore(tmp_path / 'ours' / 'params')
  same(restored, params)
  # And onto a mesh, each device its part.
  mesh = mesh_lib.make_mesh()
  targets = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=NamedSharding(mesh, _over_first(x, mesh))
    ),
    params,
  )
  with ocp.PyTreeCheckpointer() as checkpointer:
    restored = checkpointer.restore(
      tmp_path / 'ours' / 'params',
      args=ocp.args.PyTreeRestore(
        item=targets,
        restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
      ),
    )
  same(jax.device_get(restored), params)


def _over_first(x, mesh):
  axes = [None] * x.ndim
  for i, n in enumerate(x.shape):
    if n % mesh.size == 0:
      axes[i] = mesh.axis_names
      break
  return PartitionSpec(*axes)


@pytest.mark.parametrize('ocdbt', [False, True])
@pytest.mark.parametrize('zarr3', [False, True])
def test_reads_what_orbax_saved(family, write_hf, tmp_path, same, ocdbt, zarr3):
  config, seed = family
  directory, _ = write_hf(config, seed, BFLOAT16)
  checkpoints.convert(directory, tmp_path / 'ours')
  _, params = checkpoints.load(tmp_path / 'ours')
  shutil.rmtree(tmp_path / 'ours' / 'params')
  handler = ocp.PyTreeCheckpointHandler(use_ocdbt=ocdbt, use_zarr3=zarr3)
  with ocp.Checkpointer(handler) as checkpointer:
    checkpointer.save(
      tmp_path / 'ours' / 'params', args=ocp.args.PyTreeSave(params)
    )
  same(checkpoints.load(tmp_path / 'ours')[1], params)
  checkpoints.convert(tmp_path / 'ours', tmp_path / 'hf2')
  same(checkpoints.load(tmp_path / 'hf2')[1], params)


@pytest.mark.parametrize('layout', ['hf', 'ours'])
def test_loads_onto_a_mesh(family, write_hf, tmp_path, same, layout):
  config, seed = family
  directory, tensors = write_hf(config, seed)
  if layout == 'ours':
    checkpoints.convert(directory, tmp_path / 'ours')
    directory = tmp_path / 'ours'
  model, whole = checkpoints.load(directory)
  mesh = mesh_lib.make_mesh()
  shardings = jax.tree.map(
    lambda x: NamedSharding(mesh, _over_first(x, mesh)), whole
  )
  _, params = checkpoints.load(directory, shardings)
  same(jax.device_get(params), whole)
  got = params_lib.named(jax.tree.map(lambda x: x.sharding, params))
  wanted = params_lib.named(shardings)
  assert all(
    got[n].is_equivalent_to(wanted[n], len(x.shape))
    for n, x in params_lib.named(whole).items()
  )


def test_dtypes_asked_for_leave_the_router_alone(kimi, write_hf, tmp_path):
  config, seed = kimi
  directory, _ = write_hf(config, seed)
  checkpoints.convert(directory, tmp_path / 'ours', dtype='bfloat16')
  params = params_lib.named(checkpoints.load(tmp_path / 'ours')[1])
  wide = {n for n, x in params.items() if x.dtype == np.float32}
  assert wide == {'layers/moe/router', 'layers/moe/router_bias'}
  loaded = checkpoints.load(tmp_path / 'ours', dtype=np.float32)[1]
  for name, value in params_lib.named(loaded).items():
    np.testing.assert_array_equal(
      value, np.asarray(params[name]).astype(np.float32)
    )


def test_float16_is_kept(family, write_hf, tmp_path, same, expected):
  config, seed = family
  directory, tensors = write_hf(config, seed, np.float16)
  checkpoints.convert(directory, tmp_path / 'ours')
  same(
    checkpoints.load(tmp_path / 'ours')[1],
    {n: v for n, v in expected(config, tensors).items()},
  )


def test_files_and_ids_go_along(family, write_hf, tmp_path):
  config, seed = family
  directory, _ = write_hf({**config, 'eos_token_id': 7}, seed)
  (directory / 'tokenizer.json').write_text('{"model": {"vocab": {"a": 1}}}')
  (directory / 'modeling_own.py').write_text('raise SystemExit')
  checkpoints.convert(directory, tmp_path / 'ours')
  checkpoints.convert(tmp_path / 'ours', tmp_path / 'hf2')
  for name in ('ours', 'hf2'):
    text = (tmp_path / name / 'tokenizer.json').read_text()
    assert text == '{"model": {"vocab": {"a": 1}}}'
    assert not (tmp_path / name / 'modeling_own.py').exists()
  again = json.loads((tmp_path / 'hf2' / 'config.json').read_text())
  assert again['eos_token_id'] == 7
  assert again['max_position_embeddings'] == config['max_position_embeddings']


@pytest.mark.parametrize('to', ['ours', 'hf'])
def test_saves_what_is_in_memory(family, write_hf, tmp_path, same, to):
  config, seed = family
  directory, _ = write_hf(config, seed, BFLOAT16)
  model, params = checkpoints.load(directory)
  checkpoints.save(tmp_path / 'nested', model, params, to=to)
  flat = {n: np.asarray(v) for n, v in params_lib.named(params).items()}
  checkpoints.save(tmp_path / 'flat', model, flat, to=to)
  for name in ('nested', 'flat'):
    found, again = checkpoints.load(tmp_path / name)
    assert not checkpoints.differences(found, model)
    same(again, params)


def test_save_refuses_other_parameters(family, write_hf, tmp_path):
  config, seed = family
  model, params = checkpoints.load(write_hf(config, seed)[0])
  flat = dict(params_lib.named(params))
  flat['final_norm'] = flat['final_norm'][:-1]
  flat['more'] = flat.pop('embed')
  with pytest.raises(ValueError) as error:
    checkpoints.save(tmp_path / 'x', model, flat)
  for words in ('embed is missing', 'more is surplus', 'final_norm has shape'):
    assert words in str(error.value)
  assert not list(tmp_path.glob('x*'))


# --- nothing half-written ----------------------------------------------------


def test_an_existing_directory_is_left_alone(family, write_hf, tmp_path):
  directory, _ = write_hf(*family)
  (tmp_path / 'ours').mkdir()
  (tmp_path / 'ours' / 'mine').write_text('x')
  with pytest.raises(ValueError, match='exists already'):
    checkpoints.convert(directory, tmp_path / 'ours')
  assert (tmp_path / 'ours' / 'mine').read_text() == 'x'


def test_folders_above_the_destination_are_made(family, write_hf, tmp_path):
  directory, _ = write_hf(*family)
  checkpoints.convert(directory, tmp_path / 'new' / 'er' / 'ours')
  assert [x.name for x in (tmp_path / 'new' / 'er').iterdir()] == ['ours']
  (tmp_path / 'file').write_text('x')
  for name in ('file/ours', 'file/er/ours'):
    with pytest.raises(ValueError, match='is no directory'):
      checkpoints.convert(directory, tmp_path / name)


@pytest.mark.parametrize('to', ['ours', 'hf'])
def test_an_interruption_leaves_nothing(family, write_hf, tmp_path, to):
  directory, _ = write_hf(*family)
  reports = []

  def interrupt(done, total):
    reports.append(done)
    if len(reports) == 4:
      raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    checkpoints.convert(directory, tmp_path / 'x', to, report=interrupt)
  assert not list(tmp_path.glob('x*'))
  checkpoints.convert(directory, tmp_path / 'x', to)
  assert [p.name for p in tmp_path.glob('x*')] == ['x']


SLOW = """
import sys, time
from composer.model import checkpoints
def report(done, total):
  print('working', flush=True)
  time.sleep(0.2)
checkpoints.convert(sys.argv[1], sys.argv[2], report=report)
"""


def test_a_killed_conversion_is_cleared_by_the_next(
  family, write_hf, tmp_path, same
):
  directory, _ = write_hf(*family)
  child = subprocess.Popen(
    [sys.executable, '-c', SLOW, str(directory), str(tmp_path / 'x')],
    stdout=subprocess.PIPE,
  )
  try:
    assert child.stdout.readline() == b'working\n'
    with pytest.raises(ValueError, match='another process is writing'):
      checkpoints.convert(directory, tmp_path / 'x')
  finally:
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    child.stdout.close()
  assert (tmp_path / 'x.part').is_dir()
  assert not (tmp_path / 'x').exists()
  checkpoints.convert(directory, tmp_path / 'x')
  assert [p.name for p in tmp_path.glob('x*')] == ['x']
  same(checkpoints.load(tmp_path / 'x')[1], checkpoints.load(directory)[1])


def test_a_full_disk_is_told_and_leaves_nothing(
  family, write_hf, tmp_path, monkeypatch
):
  directory, _ = write_hf(*family)
  usage = shutil.disk_usage(tmp_path)._replace(free=10)
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: usage)
  with pytest.raises(OSError, match='GB are free; nothing is left of it'):
    checkpoints.convert(directory, tmp_path / 'x')
  assert not list(tmp_path.glob('x*'))


LIMITED = """
import resource, sys
from composer import __main__
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.exit(__main__.main(['convert', *sys.argv[2:]]))
"""


def test_a_file_that_cannot_grow_leaves_nothing(kimi, write_hf, tmp_path):
  directory, _ = write_hf(*kimi)
  done = subprocess.run(
    [
      *(sys.executable, '-c', LIMITED, '20000', str(directory)),
      *(str(tmp_path / 'x'), '--to', 'hf'),
    ],
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 1, done.stderr
  assert 'composer: error' in done.stderr
  assert not list(tmp_path.glob('x*'))


# --- what the numbers are ----------------------------------------------------


def test_values_that_are_no_numbers_are_named(kimi, write_hf, tmp_path):
  config, seed = kimi
  tensors = reference_weights.tensors(config, seed)
  tensors['model.layers.2.mlp.experts.5.up_proj.weight'][3, 4] = np.nan
  tensors['model.norm.weight'][0] = -np.inf
  directory, _ = write_hf(config, seed, tensors=tensors)
  with pytest.warns(UserWarning) as caught:
    checkpoints.convert(directory, tmp_path / 'ours')
  (text,) = (str(warning.message) for warning in caught)
  assert '2 tensors have values that are no numbers' in text
  assert 'model.layers.2.mlp.experts.5.up_proj.weight (NaN)' in text
  assert 'model.norm.weight (inf)' in text


def test_overflow_of_float16_is_named(family, write_hf, tmp_path):
  config, seed = family
  tensors = reference_weights.tensors(config, seed)
  tensors['model.layers.0.self_attn.o_proj.weight'][:] = 1e5
  directory, _ = write_hf(config, seed, tensors=tensors)
  with pytest.warns(UserWarning, match=r'layers\.0\.self_attn\.o_proj.*inf'):
    checkpoints.convert(directory, tmp_path / 'ours', dtype='float16')


PEAK = """
import resource, sys
from composer.model import checkpoints
checkpoints.convert(*sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
@pytest.mark.parametrize('to', ['ours', 'hf'])
def test_memory_does_not_grow_with_the_model(tmp_path, config_of, to):
  """Peak memory of converting 60 MB and 480 MB; chunks are 34 MB at most."""
  config = {
    **config_of('qwen3_raw'),
    'hidden_size': 256,
    'moe_intermediate_size': 512,
    'num_experts': 16,
  }
  peaks = []
  for layers in (4, 36):
    sizes = {**config, 'num_hidden_layers': layers}
    directory = tmp_path / f'{layers}'
    directory.mkdir()
    (directory / 'config.json').write_text(json.dumps(sizes))
    write_large(directory, reference_weights.shapes(sizes))
    out = tmp_path / f'{layers}-{to}'
    run = subprocess.run(
      [sys.executable, '-c', PEAK, str(directory), str(out), to],
      capture_output=True,
      text=True,
      timeout=300,
    )
    assert run.returncode == 0, run.stderr
    peaks.append(int(run.stdout) * 1024)
    shutil.rmtree(directory)
    shutil.rmtree(out)
  assert peaks[1] - peaks[0] < 64e6, peaks


def write_large(directory, shapes):
  """bfloat16 tensors one by one: the test must not be large itself."""
  noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
  tensors = [
    tensors_lib.Outgoing(
      name,
      BFLOAT16,
      shape,
      lambda shape=shape: iter([np.resize(noise, shape).astype(BFLOAT16)]),
    )
    for name, shape in shapes.items()
  ]
  tensors_lib.write_file(directory / 'model.safetensors', tensors)
