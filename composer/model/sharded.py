"""The forward pass and the logprobs on one device of a mesh.

What `transformer.forward` and `transformer.token_logprob` do where they get a
layout: inside of `shard_map` over the axes of the mesh, with the collectives of
`parallel` written out.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from composer import mesh as mesh_lib
from composer.model import attention
from composer.model import blockwise
from composer.model import layers
from composer.model import logprobs
from composer.model import mla
from composer.model import operations
from composer.model import parallel
from composer.model import sharded_logprobs
from composer.model import trunk


def _attend(p, config, form, layout, x, cos, sin, ids):
  """Heads [R, H, W] of x [B, T / CP, D]; keys come from all of `context`."""
  b, t, d = x.shape
  rows = x.reshape(b * t, d)

  def packed(a):
    return a.reshape(b, t, *a.shape[1:])

  if config.kv_lora:
    y = layers.rms_norm(rows, p['norm'], config.norm_eps)
    q = mla.queries(p, config, y, cos, sin)
    if form == 'absorbed':
      q = mla.absorb(p, config, q)
    latents = packed(mla.latents(p, config, y, cos, sin))
    source = parallel.spread(layout, latents)
  else:
    q, k, v = attention.project(p, config, form, rows, cos, sin)
    source = tuple(parallel.spread(layout, packed(a)) for a in (k, v))
  heads = blockwise.attend(
    config, form, layout.size('context'), p, packed(q), source, *ids
  )
  return heads.reshape(b * t, *heads.shape[2:])


def _layer(
  config, numerics, plausibility, audit, layout, specs, ids, shards, x, replay
):
  """One layer on one device: gathers its parameters, computes its tokens.

  Args:
    config, numerics, plausibility, audit, layout: static.
    specs: declarations of one layer.
    ids: segment ids and positions, int32 [B, T]; whole rows.
    shards: the device's part of the layer's parameters.
    x: [B, T / CP, D]; replay: int [B, T / CP, K].

  Returns:
    (x', (experts, native int16 [B, T / CP, K], load float32 [E])).
  """
  b, t, d = x.shape
  p = parallel.gather(layout, specs, numerics, shards)
  form = mla.form(numerics, training=True)
  own = parallel.own(layout, ids[1]).reshape(-1)
  cos, sin = trunk.rope(config, own, ids[1].shape[1])
  heads = _attend(p['attention'], config, form, layout, x, cos, sin, ids)
  x, used, native = trunk.finish(
    p,
    config,
    numerics,
    form,
    plausibility,
    x.reshape(b * t, d),
    heads,
    replay.reshape(b * t, -1),
    layout,
    audit,
  )
  real = parallel.own(layout, ids[0]).reshape(-1) > 0
  hits = used[..., None] == jnp.arange(config.experts)[None, None]  # [R, K, E]
  load = jnp.sum(hits & real[:, None, None], axis=(0, 1), dtype=jnp.float32)
  routes = [a.reshape(b, t, -1).astype(jnp.int16) for a in (used, native)]
  return x.reshape(b, t, d), (*routes, load)


def forward(
  params,
  config,
  numerics,
  tokens,
  segment_ids,
  positions,
  experts,
  plausibility,
  layout,
  audit=True,
) -> trunk.Output:
  """`transformer.forward` on one device of a mesh, inside of `shard_map` over its axes.

  In mode `fast`, whatever `numerics` says. The layers are computed again in the
  backward pass, from nothing but their input.

  Args:
    params: the device's parts, by `layout.rules`; masters, not rounded yet.
    tokens, segment_ids, positions, experts: the device's rows, [B, T, ...],
      each of which all devices of `context` hold whole.

  Returns:
    `Output` of the device's own tokens (`parallel.own`), [B, T / CP, ...];
    `load` is that of all devices.
  """
  sparse, k = trunk.moe_layers(config), config.experts_per_token
  specs, ids = trunk.spec(config), (segment_ids, positions)
  if sparse:
    mesh_lib.check_experts(layout, config.experts)
  own = parallel.own(layout, tokens)
  x = parallel.embed(layout, specs['embed'], params['embed'], own)
  x = x.astype(layers.dtype(numerics))
  b, t = own.shape

  def run(name, x, replay):
    layer = functools.partial(
      _layer,
      config,
      numerics,
      plausibility,
      audit,
      layout,
      parallel.one_layer(specs[name]),
      ids,
    )

    def body(x, inputs):
      return jax.checkpoint(layer, prevent_cse=False)(inputs[0], x, inputs[1])

    return jax.lax.scan(body, x, (params[name], replay))

  def unknown(count):
    return jnp.full((count, b, t, k), -1, jnp.int16)

  if config.dense_layers:
    x, _ = run('dense', x, unknown(config.dense_layers))
  if not sparse:
    empty = jnp.zeros((b, t, 0, k), jnp.int16)
    return trunk.Output(x, empty, empty, jnp.zeros((0, config.experts)))
  if experts is None:
    replay = unknown(sparse)
  else:
    replay = jnp.moveaxis(parallel.own(layout, experts), 2, 0)
  x, (used, native, load) = run('layers', x, replay)
  return trunk.Output(
    hidden=x,
    experts=jnp.moveaxis(used, 0, 2),
    native=jnp.moveaxis(native, 0, 2),
    load=parallel.sum_tokens(jax.lax.stop_gradient(load)),
  )


def token_logprob(
  params, config, numerics, layout, hidden, tokens, temperatures, kept=None
):
  """`transformer.token_logprob` of whole rows, on every device of `context`.

  From its own hidden states [B, T / CP, D]: each scores the tokens that follow
  its own. Kernels score them where the numerics have some and nothing was cut.
  """
  b, t, d = hidden.shape

  def following(x):
    own = parallel.own(layout, jnp.roll(x, -1, axis=1))
    return own.reshape(b * t, *own.shape[2:])

  rows = hidden.reshape(b * t, d), following(tokens), following(temperatures)
  if kept is None and operations.of(numerics).sparse != operations.XLA:
    both = _by_kernels(params, config, numerics, layout, *rows)
  else:
    rows += () if kept is None else (following(kept),)
    both = _by_xla(params, config, numerics, layout, *rows)
  both = parallel.whole(layout, both.reshape(b, t, 2))
  both = jnp.roll(both, 1, axis=1)
  return both[..., 0], both[..., 1]


def _unembedding(config) -> str:
  """The parameter that hidden states are multiplied with."""
  return 'embed' if config.tie_embeddings else 'unembed'


def _by_kernels(params, config, numerics, layout, x, tokens, temperatures):
  """Logprob and entropy of rows x [R, D], [R, 2]."""
  ops, specs = operations.of(numerics), trunk.spec(config)
  name = _unembedding(config)
  norm = parallel.gather_one(
    layout, specs['final_norm'], jnp.float32, params['final_norm']
  )
  h = layers.rms_norm(x, norm, config.norm_eps, ops)
  both = sharded_logprobs.token_logprob(
    layout, specs[name], ops.sparse, params[name], h, tokens, temperatures
  )
  return jnp.stack(both, axis=-1)


def _by_xla(params, config, numerics, layout, *block):
  """The same, of blocks of rows; the last of them what each was kept among."""
  specs, names = trunk.spec(config), ['final_norm', _unembedding(config)]
  p = parallel.gather(
    layout,
    {name: specs[name] for name in names},
    numerics,
    {name: params[name] for name in names},
  )
  # In float32, so that the gradients of all blocks are added up in it.
  unembed = logprobs.unembedding(p).astype(jnp.float32)

  def rows(*block):
    both = logprobs.logprob_rows(config, p['final_norm'], unembed, *block)
    return jnp.stack(both, axis=-1)

  most = max(logprobs.LOGITS // config.vocab_size // 256, 1) * 256
  return layers.in_blocks(rows, min(most, block[0].shape[0]), *block)
