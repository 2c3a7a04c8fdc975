"""Where training starts: from nothing, or from a model in `init_from`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import params as params_lib
from composer.model import checkpoints
from composer.model import transformer


def resolve(experiment: config_lib.Experiment) -> config_lib.Experiment:
  """The experiment with the tokenizer of the model that it starts from.

  Raises:
    ValueError: `init_from` is no model, or another than `model`.
  """
  if not experiment.init_from:
    return experiment
  found = checkpoints.read_config(experiment.init_from)
  # A layer that drafts may be new, or be left out.
  found = dataclasses.replace(found, mtp_layers=experiment.model.mtp_layers)
  differing = checkpoints.differences(found, experiment.model)
  if differing:
    raise ValueError(
      f'init_from={experiment.init_from!r} is another model than the'
      f" experiment's: {'; '.join(differing)}. Set these fields of model as"
      ' they are there'
    )
  path = pathlib.Path(experiment.init_from) / 'tokenizer.json'
  if experiment.tokenizer or not path.is_file():
    return experiment
  return dataclasses.replace(experiment, tokenizer=str(path))


def params(experiment: config_lib.Experiment, shardings: Any) -> Any:
  """The float32 master parameters that the first stage starts from.

  Args:
    experiment: `init_from`, `model` and `seed` are read.
    shardings: by name; every device reads its own part of a stored model.
  """
  spec = transformer.spec(experiment.model)
  key = jax.random.key(experiment.seed)
  if not experiment.init_from:
    return params_lib.init(spec, key)
  _, loaded = checkpoints.load(
    experiment.init_from, shardings=shardings, dtype=jnp.float32
  )
  if 'mtp' not in spec:
    return params_lib.without_drafts(loaded)
  if 'mtp' not in loaded:
    loaded |= params_lib.init({'mtp': spec['mtp']}, key)
  return loaded
