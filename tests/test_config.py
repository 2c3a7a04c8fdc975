"""Configs: loading, overriding, JSON, and what is refused before a run."""

import dataclasses
import re
import typing

from hypothesis import given
from hypothesis import strategies as st
import pytest

from composer import config
from composer.config import Experiment
from composer.environments.machines import pool
from composer.environments.tasks import sets
from composer.rl import loss
from composer.weights import store

DEFAULT = Experiment(name='x')

GOOD = """
from composer.config import Experiment

def get_config():
  return Experiment(name='from_file')
"""


def get(experiment, path):
  for name in path.split('.'):
    experiment = getattr(experiment, name)
  return experiment


# --- load --------------------------------------------------------------------


def test_load(tmp_path):
  path = tmp_path / 'good.py'
  path.write_text(GOOD)
  assert config.load(path) == Experiment(name='from_file')
  assert config.load(str(path)).name == 'from_file'


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('x = 1', r'no get_config\(\)'),
    ('get_config = 3', r'no get_config\(\)'),
    ('def get_config(): return {}', 'returned a dict'),
    ('import nothing_of_the_kind', 'does not import: ModuleNotFoundError'),
    ('def get_config(:', 'does not import: SyntaxError'),
    ('raise RuntimeError("why")', 'does not import: RuntimeError: why'),
  ],
)
def test_broken_experiment_file(tmp_path, text, message):
  path = tmp_path / 'broken.py'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    config.load(path)


def test_missing_experiment_names_the_nearest(tmp_path):
  (tmp_path / 'quickstart.py').write_text(GOOD)
  with pytest.raises(ValueError, match=r'did you mean .*quickstart\.py\?'):
    config.load(tmp_path / 'quikstart.py')
  with pytest.raises(ValueError, match='is not a Python file'):
    config.load(tmp_path)


# --- override ----------------------------------------------------------------


def test_override_by_type():
  settings = [
    'rl.steps=3',
    'rl.learning_rate=1e-4',
    'rl.router_replay=False',
    'model.tie_embeddings=true',
    'machine.driver=process',
    'weights.exchange=file:///a=b',
    'seed = 1_000',
    'session.temperature=1',
  ]
  got = config.override(DEFAULT, settings)
  assert [get(got, s.split('=')[0].strip()) for s in settings] == [
    3,
    1e-4,
    False,
    True,
    'process',
    'file:///a=b',
    1000,
    1.0,
  ]
  assert isinstance(got.session.temperature, float)
  assert DEFAULT == Experiment(name='x'), 'the original is left alone'
  assert got.model.width == DEFAULT.model.width


def test_last_override_wins():
  assert config.override(DEFAULT, ['seed=1', 'seed=2']).seed == 2
  assert config.override(DEFAULT, []) == DEFAULT


@pytest.mark.parametrize(
  ('setting', 'message'),
  [
    ('rl.stalenes=1', r"no field 'rl\.stalenes'; did you mean rl\.staleness\?"),
    ('rl.group_sise=1', r'did you mean rl\.group_size\?'),
    ('staleness=1', r'did you mean rl\.staleness\?'),
    ('steps=1', r'did you mean midtrain\.steps or rl\.steps\?'),
    ('reinforcement.stalenes=1', r'did you mean rl\.staleness\?'),
    ('zzz=1', "no field 'zzz'$"),
    ('=1', "no field ''"),
    ('rl.steps.x=1', 'no field'),
    ('rl=1', r'rl is a section.* rl\.steps'),
    ('rl.steps', 'has no value; write path=value'),
    ('rl.steps=3.5', r"rl\.steps='3\.5' is not a whole number"),
    ('rl.steps=', 'is not a whole number'),
    ('rl.steps=many', 'is not a whole number'),
    ('rl.clip_low=nan', 'is not a finite number'),
    ('rl.clip_low=inf', 'is not a finite number'),
    ('rl.router_replay=1', 'is not true or false'),
    ('rl.router_replay=', 'is not true or false'),
  ],
)
def test_bad_override(setting, message):
  with pytest.raises(ValueError, match=message):
    config.override(DEFAULT, [setting])


# --- JSON --------------------------------------------------------------------


@st.composite
def experiments(draw):
  """Any value of the right type in any field, sensible or not."""
  values = {
    bool: st.booleans(),
    int: st.integers(-(2**70), 2**70),
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(),
  }

  def build(cls):
    kinds = typing.get_type_hints(cls)
    return cls(
      **{
        name: build(kind)
        if dataclasses.is_dataclass(kind)
        else draw(values[kind])
        for name, kind in kinds.items()
      }
    )

  return build(Experiment)


@given(experiments())
def test_json_round_trip(experiment):
  assert config.from_json(config.to_json(experiment)) == experiment


@pytest.mark.parametrize(
  ('old', 'new', 'message'),
  [
    (
      '"staleness": 2',
      '"staleness": 2.5',
      r'rl\.staleness=2\.5 is not a whole',
    ),
    ('"staleness": 2', '"staleness": true', 'is not a whole number'),
    ('"staleness": 2', '"staleness": "2"', 'is not a whole number'),
    (
      '"staleness"',
      '"stalenes"',
      r"'rl\.stalenes'; did you mean rl\.staleness",
    ),
    ('"staleness": 2,', '', r"no field 'rl\.staleness'; .* another version"),
    ('"plausibility": 0.0', '"plausibility": NaN', 'is not a finite number'),
    ('"name": "x"', '"name": null', 'name=None is not text'),
    ('{', '', 'is not JSON'),
  ],
)
def test_damaged_json(old, new, message):
  text = config.to_json(DEFAULT)
  assert old in text
  with pytest.raises(ValueError, match=message):
    config.from_json(text.replace(old, new, 1))


def test_json_of_another_kind():
  with pytest.raises(ValueError, match=r'section \(whole\)'):
    config.from_json('[]')
  text = re.sub(
    r'"rl": \{.*?\}', '"rl": 3', config.to_json(DEFAULT), flags=re.S
  )
  with pytest.raises(ValueError, match='section rl'):
    config.from_json(text)


# --- validate ----------------------------------------------------------------


def test_defaults_are_valid():
  assert config.validate(DEFAULT) is DEFAULT


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    # A group of one trains on nothing, silently, if it is let through.
    (['rl.group_size=1'], r'rl\.group_size=1; .*use 2 or more'),
    (['rl.staleness=-1'], r'rl\.staleness=-1 is negative'),
    (['rl.groups_per_step=0'], r'rl\.groups_per_step=0 is not positive'),
    (
      ['eval.temperature=1e-7'],
      r'eval\.temperature=1e-07 .* use 1e-06 or more',
    ),
    (['rl.learning_rate=0'], r'rl\.learning_rate=0\.0 is not positive'),
    (['midtrain.python_share=1.5'], 'lies between 0 and 1'),
    (['rl.clip_low=-0.1'], 'lies between 0 and 1'),
    (['numerics.mode=bitwize'], "did you mean 'bitwise'"),
    (['numerics.mode=exact'], 'choose one of bitwise, aligned, fast'),
    (['machine.driver=docker'], 'choose one of namespace, microvm, process'),
    (['rl.loss=ppo'], r"rl\.loss='ppo' is not known.*clip, none, tis"),
    (['rl.lineage=maybe'], 'choose one of drop, keep'),
    (['weights.form=fp7'], r"weights\.form='fp7' is not known"),
    (['tasks.kind=repare'], "did you mean 'repair'"),
    (
      ['tasks.kind=migration', 'midtrain.steps=0', 'machine.image=postgres'],
      r"machine\.driver='namespace'.*set machine\.driver=microvm",
    ),
    (['weights.exchange=ftp://x'], 'unknown scheme.*memory://, file://'),
    (['name=a/b'], "name='a/b' cannot name a directory"),
    (['name='], "name='' cannot name a directory"),
    (['fleet.cluster=..'], 'cannot name a directory'),
    (
      ['model.heads=3', 'model.kv_heads=2'],
      r'not divisible by model\.kv_heads',
    ),
    (['model.head_dim=31'], r'model\.head_dim=31 is odd'),
    (['model.experts_per_token=9'], r'exceeds model\.experts=8'),
    (['model.dense_layers=4'], r'exceeds model\.layers=3'),
    (['rl.sequence_length=250'], r'multiple of numerics\.kv_block=16; use 256'),
    (['midtrain.sequence_length=8'], r'numerics\.kv_block=16; use 16'),
    (['engine.max_context=200'], 'use 208'),
    (['engine.draft=mtp'], r'model\.mtp_layers=0; give the model the layer'),
    (['model.mtp_layers=2'], 'model.mtp_layers=2; one layer drafts'),
    (
      ['midtrain.mtp_depth=5000'],
      r'midtrain\.mtp_depth=5000 with midtrain\.seq',
    ),
    (['session.context_tokens=176'], r'engine\.max_context=192 does not hold'),
    (['engine.max_context=112'], r'does not hold session\.context_tokens=120'),
    (['rl.sequence_length=176'], r'shorter than engine\.max_context=192'),
    (['engine.pages=12'], 'one sequence.*use 13 or more'),
    (
      ['engine.rows=64'],
      r'engine\.rows=64 is not a multiple, at least the dou',
    ),
    (['engine.rows=160'], r'of numerics\.row_block=64'),
    (
      ['rl.micro_batch=3', 'numerics.row_block=512', 'engine.rows=1024'],
      r'rl\.micro_batch x rl\.sequence_length=768 is not a multiple',
    ),
    (
      ['midtrain.batch_size=1', 'numerics.row_block=256', 'engine.rows=512'],
      r'midtrain\.batch_size x midtrain\.sequence_length=256',
    ),
    (['fleet.trainer_processes=3'], r'rl\.micro_batch=16 is not divisible'),
    (['fleet.lease_s=3'], r'under twice fleet\.heartbeat_s=2\.0'),
  ],
)
def test_refused(settings, message):
  with pytest.raises(ValueError, match=message) as caught:
    config.validate(config.override(DEFAULT, settings))
  text = str(caught.value)
  path = settings[0].split('=')[0]
  assert '\n' not in text
  assert path in text or path.rpartition('.')[2] in text, 'names the field'


@pytest.mark.parametrize(
  'settings',
  [
    ['rl.staleness=0', 'rl.steps=0', 'midtrain.steps=0', 'eval.every=0'],
    ['numerics.mode=fast', 'engine.rows=24', 'rl.micro_batch=1'],
    ['session.max_summaries=0', 'session.context_tokens=192'],
    ['fleet.trainer_processes=2', 'fleet.cluster=eu-west.1'],
    ['weights.exchange=s3://bucket/path', 'rl.group_size=2'],
    ['reward.effort_weight=0', 'midtrain.demo_give_up=0'],
    [
      *('tasks.kind=migration', 'midtrain.steps=0', 'machine.driver=microvm'),
      *('machine.image=postgres', 'machine.disk_mb=128'),
    ],
  ],
)
def test_accepted(settings):
  config.validate(config.override(DEFAULT, settings))


def test_wrong_type_in_a_python_file():
  wrong = dataclasses.replace(
    DEFAULT, rl=dataclasses.replace(DEFAULT.rl, steps='3')
  )
  with pytest.raises(ValueError, match=r"rl\.steps='3' is not a whole number"):
    config.validate(wrong)


def test_tables_name_real_fields():
  known = config.fields()
  assert set(config.CHOICES) | config.MAY_BE_ZERO | config.SHARES <= set(known)
  assert not config.MAY_BE_ZERO & config.SHARES
  assert all(known[path] is str for path in config.CHOICES)
  assert all(kind in (bool, int, float, str) for kind in known.values())


def test_choices_are_those_of_the_code():
  assert set(config.CHOICES['rl.loss']) == set(loss.LOSSES)
  assert set(config.CHOICES['machine.driver']) == set(pool.DRIVERS)
  assert set(config.CHOICES['tasks.kind']) == set(sets.KINDS)
  for scheme in store.SCHEMES:
    url = f'weights.exchange={scheme}://x'
    config.validate(config.override(DEFAULT, [url]))


def test_model_config_stays_readable():
  assert len(dataclasses.fields(config.ModelConfig)) <= 30
