"""A version from the exchange as a checkpoint that others read.

`composer score` and `composer run` (`init_from`) read both layouts of a
directory, `transformers` that of Hugging Face.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import safetensors.numpy
import tensorstore as ts

from composer import config as config_lib
from composer import params as params_lib
from composer.model import checkpoints
from composer.weights import forms
from composer.weights import pieces
from composer.weights import versions


def fetch(
  kv: ts.KvStore,
  form: str,
  version: int | None,
  out: pathlib.Path,
  to: str = 'ours',
) -> str:
  """Rebuilds a version (None: the newest) bit for bit; what it wrote, in words.

  Args:
    out: a directory that does not exist yet, or a file named .safetensors, which
      gets the arrays as they were published.
    to: layout of the directory, 'ours' or 'hf'.

  Raises:
    ValueError: no such version, damaged, or published without a configuration;
      nothing was written.
    OSError: no room; nothing is left.
  """
  chain = versions.chain(kv, form, version)
  newest = chain[-1]
  what = f'version {newest.version} of {form}'
  plain = out.suffix == '.safetensors'
  if not plain:
    config = _config(chain[0], out)
    _check_free(out)
  flat = pieces.assemble(versions.rebuild(kv, chain), newest.shapes)
  if plain:
    _write_file(out, flat, {'form': form, 'version': str(newest.version)})
    return f'{what}: {out}'
  checkpoints.save(
    out, config, params_lib.unnamed(_params(form, flat)), to=to, source=what
  )
  layout = 'Hugging Face' if to == 'hf' else 'ours'
  return f'{what}: {out} ({layout}; read it with composer score --checkpoint)'


def _config(base: versions.Manifest, out: pathlib.Path) -> Any:
  if base.model is None:
    raise ValueError(
      f'version {base.version} of {base.form} was published without the'
      f' configuration of its model; fetch it as {out}.safetensors'
    )
  return config_lib.model_from_values(base.model)


def _check_free(out: pathlib.Path) -> None:
  if out.exists():
    raise ValueError(f'{out} exists already; remove it, or choose another name')


def _params(form: str, flat: dict[str, np.ndarray]) -> dict[str, Any]:
  """Parameters by name; what is quantised as the float32 it stands for."""
  widened = forms.widen(form, flat)
  return {
    name: flat[name] if name in flat else np.asarray(value)
    for name, value in widened.items()
  }


def _write_file(out: pathlib.Path, flat, about: dict[str, str]) -> None:
  # Under another name first: an interrupted fetch leaves no half a file.
  part = out.with_name(out.name + '.part')
  try:
    safetensors.numpy.save_file(flat, part, about)
    part.replace(out)
  finally:
    part.unlink(missing_ok=True)
