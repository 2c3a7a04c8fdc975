"""Which implementation of an operation runs.

A named one runs or raises with the reason why it cannot. None takes the best
that the device has; where that is the plain one on an accelerator, a warning
says so, once for each operation and reason.
"""

from __future__ import annotations

from collections.abc import Iterator
import contextlib
import contextvars
import functools
import json
import pathlib
from typing import Any
import warnings

import jax

# What jax has compiled it finds again under the settings that it was compiled with,
# and this import adds one (since jax 0.11). Where it came later, with the first
# kernel that is traced, all programs until then would be compiled a second time.
import jax.experimental.pallas.tpu  # noqa: F401

# The interpreted ones run the kernels' code on CPU, for tests.
NAMES = ('reference', 'gpu', 'tpu', 'gpu_interpret', 'tpu_interpret')
TUNINGS = pathlib.Path(__file__).parent / 'tunings'
_tried: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
  'tried', default=()
)


def platform() -> str:
  """'cpu', 'gpu' or 'tpu': what is lowered for, or else the default device."""
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  if abstract is not None:
    kind = abstract.platform if hasattr(abstract, 'platform') else 'gpu'
    return 'gpu' if kind in ('cuda', 'rocm') else kind
  found = jax.devices()[0].platform
  return 'gpu' if found in ('cuda', 'rocm') else found


def choose(
  operation: str,
  implementation: str | None,
  gpu: str | None,
  tpu: str | None = None,
) -> str:
  """The name of the implementation to run.

  Args:
    operation: for messages.
    implementation: one of NAMES, or None for the best that the device has.
    gpu: why the GPU kernel cannot take these arguments, or None.
    tpu: the same of the TPU kernel.

  Raises:
    ValueError: unknown name, or the named one cannot run.
  """
  faults = {'gpu': gpu, 'tpu': tpu}
  if implementation is None:
    device = platform()
    if device not in faults:
      return 'reference'
    reason = faults[device] or _missing(device)
    if reason is None:
      return device
    warn(operation, device, reason)
    return 'reference'
  if implementation not in NAMES:
    raise ValueError(
      f'implementation={implementation!r} of {operation} is unknown; there are'
      f' {", ".join(NAMES)}, and None for the best that the device has'
    )
  device = implementation.removesuffix('_interpret')
  reason = faults.get(device)
  if reason is None and implementation in faults:
    reason = _missing(device)
  if reason is not None:
    raise ValueError(f'{operation} cannot run as {implementation!r}: {reason}')
  return implementation


def _missing(device: str) -> str | None:
  """Why kernels for `device` cannot run here at all, or None."""
  if platform() != device:
    return f'the default device is a {platform()}'
  if jax.sharding.get_abstract_mesh().abstract_device is not None:
    return None  # lowering only
  if device == 'gpu':
    from pallas_kernels import mosaic

    return mosaic.available()
  return None


@functools.cache
def warn(operation: str, device: str, reason: str) -> None:
  """Says once that an operation has no kernel on a device, and why."""
  warnings.warn(
    f'{operation} runs through XLA on this {device}, slower and without a fixed'
    f' order of addition: {reason}',
    stacklevel=4,
  )


def tuning(operation: str) -> dict[str, Any]:
  """The entry of an operation in the tunings of this kind of device.

  `tunings/<device>.json` maps operation to shape key to parameters. Without a
  file for the device there are only the defaults of the kernels.
  """
  own = tunings().get(operation, {})
  for changed, key, entry in _tried.get():
    if changed == operation:
      own = {k: v for k, v in own.items() if k != key}
      own |= {} if entry is None else {key: entry}
  return own


def tunings() -> dict[str, dict[str, Any]]:
  """All that the file of the kind of device that is lowered for says."""
  return _read(device_key())


@functools.cache
def _read(device: str) -> dict[str, dict[str, Any]]:
  path = TUNINGS / f'{device}.json'
  if not path.is_file():
    return {}
  return json.loads(path.read_text(encoding='utf-8'))


@contextlib.contextmanager
def tuned(
  operation: str, key: str, entry: dict[str, Any] | None
) -> Iterator[None]:
  """What is traced meanwhile finds this entry of the tunings, or none."""
  token = _tried.set((*_tried.get(), (operation, key, entry)))
  try:
    yield
  finally:
    _tried.reset(token)


def device_key() -> str:
  """'h100', 'h200', 'tpu_v5p', ...: the name of the tunings file."""
  abstract = jax.sharding.get_abstract_mesh().abstract_device
  kind = abstract.device_kind if abstract else jax.devices()[0].device_kind
  words = kind.lower().replace('nvidia', '').split()
  return '_'.join(words[:1] if 'h100' in words or 'h200' in words else words)


def concrete(array: Any) -> Any | None:
  """The values of an array where they are known while tracing, else None."""
  if isinstance(array, jax.core.Tracer):
    return None
  return array
