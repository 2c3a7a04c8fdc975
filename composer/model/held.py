"""Parameters as an engine holds them on its device.

What reaches an engine, and what a trainer computes with, are float32 values
(`params.as_computed`). The model casts them where they multiply, and decoding is
as fast as the parameters are read: so an engine casts once, when it takes them,
and a step reads half the bytes. The same cast of the same values gives the same
bits, whoever makes it and whenever.

Wide stay the scales of norms, which multiply in float32, and the router and its
bias, whose least bit may decide which expert a token goes to.
"""

from __future__ import annotations

from typing import Any

from composer import config as config_lib
from composer.model import layers
from composer.model import operations

PARTS = 'router_parts'  # beside 'router'; see `operations.parts`


def held(params: Any, numerics: config_lib.NumericsConfig) -> Any:
  """Parameters for `transformer.step` and the logprobs of what it gives.

  Results are those of `params`, bit for bit.

  Args:
    params: of one device, float32 or published, nested as `transformer.spec`.
    numerics: static.

  Returns:
    the same tree in `numerics.compute`, but norms and routers, and in float32
    everything, as they came. Where kernels multiply there is more in it than
    `transformer.spec` has, which they would have to make again in every step:
    `unembed`, which is a transposed copy where a model ties it to the
    embedding, and `router_parts`.
  """
  ops = operations.of(numerics)
  params = layers.as_compute(numerics, params)
  if ops.sparse != operations.XLA and 'unembed' not in params:
    params = {**params, 'unembed': params['embed'].T}
  moe = params.get('layers', {}).get('moe')
  if moe is None or not operations.splits(ops, layers.dtype(numerics)):
    return params
  parts = operations.parts(moe['router'], layers.dtype(numerics))
  stack = {**params['layers'], 'moe': {**moe, PARTS: parts}}
  return {**params, 'layers': stack}
