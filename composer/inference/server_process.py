"""`composer serve`: a checkpoint behind a server, until a signal.

The model, its vocabulary and its template come from the checkpoint. Its weights
do too, as version 0; or, with an exchange, they are the newest that a trainer
has published there, and every later version is activated between two decode
steps, while the server goes on.

    engine thread     samples (`composer.inference.engine`)
    weight thread     polls the exchange, decodes, activates
    event loop        the server; this thread
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
import contextlib
import dataclasses
import logging
import os
import pathlib
import resource
import signal
import socket
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

from composer import config as config_lib
from composer import params as params_lib
from composer import templates
from composer.inference import drafts
from composer.inference import engine as engine_lib
from composer.inference import server
from composer.inference import server_http
from composer.inference import server_sessions
from composer.inference import speculate
from composer.inference.server_state import LOG
from composer.model import checkpoints
from composer.model import tokenizer as tokenizer_lib
from composer.model import transformer
from composer.model import vocabularies
from composer.records import EngineError
from composer.weights import forms
from composer.weights import store
from composer.weights import sync

DENSE_EXPERTS = 16_384  # E x F up to which every expert meets every row
POLL_S = 0.2
FIRST_S = 120.0  # in which the exchange must have weights
END_S = 30.0  # for the weight thread to end
READY_S = 600.0  # for the first weights to be active, and steps to be compiled
CACHE_SHARE = 0.1  # of a machine's memory that pages take, beside other work
CACHE_SHARE_DEVICE = 0.7  # of an accelerator's, beside the parameters
PARAMETER_BYTES = 6  # float32, and once more as they compute
FILES = 65_536  # that may be open: every connection is one
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class Options:
  """What is asked of `composer serve`; '' and 0 leave it to the model.

  Attributes:
    checkpoint: a model, as `composer convert` reads it.
    server: where to listen, and limits; `model` is the name.
    exchange: URL of published weights to follow, or ''.
    form: of those.
    tokenizer, template: other than the checkpoint's own.
    numerics: 'fast', 'aligned' or 'bitwise'.
    compute: dtype of activations and products.
    max_context: tokens of a sequence.
    sequences: running at once.
    draft: 'ngram', 'mtp' or '', see `EngineConfig`.
    draft_tokens: proposed at most a sequence and step.
    cache_gb: for KV pages.
    sessions: directory that recorded sessions are written to, or ''.
    session_s: seconds after its last use that a session is kept.
  """

  checkpoint: str
  server: server.ServerConfig
  exchange: str = ''
  form: str = 'bf16'
  tokenizer: str = ''
  template: str = ''
  numerics: str = 'fast'
  compute: str = ''
  max_context: int = 0
  sequences: int = 0
  draft: str = ''
  draft_tokens: int = 4
  cache_gb: float = 0.0
  sessions: str = ''
  session_s: float = 3600.0


def run(
  options: Options, say: Say = lambda line: print(line, flush=True)
) -> int:
  """Serves until SIGTERM (0) or SIGINT (130).

  Raises:
    ValueError: no model, no vocabulary, an address that cannot be listened at,
      or one that anybody could reach without a token.
    EngineError: the engine failed.
  """
  server.validate(options.server)
  _check(options)
  server_http.check_free(options.server)
  logging.basicConfig(format='%(asctime)s %(levelname)s %(message)s')
  LOG.setLevel(logging.INFO)
  began = time.monotonic()
  _allow_files()
  source = checkpoints.open_source(options.checkpoint)
  tokenizer = open_tokenizer(source, options.tokenizer)
  template = templates.choose(options.template, tokenizer)
  vocabularies.check_embedding(tokenizer, source.config.vocab_size)
  numerics = numerics_of(source.config, options)
  config = engine_config(source, numerics, options)
  count = params_lib.count(transformer.spec(source.config))
  say(
    f'{options.checkpoint}: {count / 1e6:,.1f} M parameters, template'
    f' {template.name}, context {config.max_context:,} tokens,'
    f' {config.pages:,} KV pages, {numerics.mode}, {numerics.compute}'
  )
  with contextlib.ExitStack() as stack:
    engine = engine_lib.Engine(source.config, numerics, config)
    stack.callback(engine.close)
    _weights(options, source, engine, stack, say)
    _warm(engine, say)
    shape = (
      transformer.moe_layers(source.config),
      source.config.experts_per_token,
    )
    table = server_sessions.Table(
      shape,
      server_sessions.Limits(seconds=options.session_s),
      pathlib.Path(options.sessions) if options.sessions else None,
    )
    made = server.make(
      options.server,
      engine,
      template,
      tokenizer,
      vocab_size=source.config.vocab_size,
      max_context=config.max_context,
      table=table,
    )
    say(f'ready after {time.monotonic() - began:.1f} s')
    return asyncio.run(_serve(made, say))


def _check(options: Options) -> None:
  if options.max_context < 0 or options.sequences < 0:
    raise ValueError('--max-context and --sequences must be at least 1')
  if options.draft_tokens < 1:
    raise ValueError(
      f'--draft-tokens={options.draft_tokens} must be at least 1'
    )
  if not options.cache_gb >= 0:
    raise ValueError(f'--cache-gb={options.cache_gb} must be more than 0')
  if not options.session_s > 0:
    raise ValueError('--session-minutes must be more than 0')
  if options.sessions:
    try:
      os.makedirs(options.sessions, exist_ok=True)
    except OSError as error:
      raise ValueError(f'--sessions: {error}') from error


def _allow_files() -> None:
  """As many open files as this process may have, up to `FILES`; a shell gives
  1,024, fewer than the requests that are served at once."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = FILES if hard == resource.RLIM_INFINITY else min(hard, FILES)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(made: server.Server, say: Say) -> int:
  """Listens until a signal, or the engine fails."""
  loop, ended = asyncio.get_running_loop(), asyncio.Event()
  signals: list[int] = []

  def stop(number: int) -> None:
    if signals:
      os._exit(128 + number)
    signals.append(number)
    ended.set()

  for number in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(number, stop, number)
  try:
    async with server.listening(made) as address:
      say(f'serving {made.config.model} at {address}/v1')
      while not ended.is_set():
        made.engine.check()
        try:
          async with asyncio.timeout(1.0):
            await ended.wait()
        except TimeoutError:
          made.table.expire()
          made.table.write_idle()
      say(
        f'stopping: {len(made.active)} requests under way have'
        f' {made.config.drain_s:g} s; once more leaves at once'
      )
  finally:
    made.table.close()
    for number in (signal.SIGINT, signal.SIGTERM):
      loop.remove_signal_handler(number)
  say('stopped')
  return 130 if signals[0] == signal.SIGINT else 0


# --- the model -----------------------------------------------------------------


def open_tokenizer(source: Any, path: str) -> Any:
  """The vocabulary of an opened model, or the one at `path`.

  Raises:
    ValueError: there is none.
  """
  if path:
    return tokenizer_lib.load(path)
  if source.kind == 'gguf':
    return vocabularies.load(source.where)
  for name in ('tokenizer.json', 'tiktoken.model'):
    if name in source.files:
      return tokenizer_lib.load(str(source.files[name]))
  raise ValueError(
    f'{source.where} has no tokenizer.json and no tiktoken.model; give'
    ' --tokenizer PATH'
  )


def numerics_of(
  model: config_lib.ModelConfig, options: Options
) -> config_lib.NumericsConfig:
  """float32 on a CPU, which has no faster bfloat16, else bfloat16."""
  on_cpu = jax.default_backend() == 'cpu'
  small = model.experts * model.expert_hidden <= DENSE_EXPERTS
  return config_lib.NumericsConfig(
    mode=options.numerics,
    moe='dense' if small else 'sorted',
    mla='expanded' if options.numerics == 'bitwise' else 'absorbed',
    compute=options.compute or ('float32' if on_cpu else 'bfloat16'),
  )


def engine_config(
  source: Any, numerics: config_lib.NumericsConfig, options: Options
) -> config_lib.EngineConfig:
  """Sizes of the engine: as asked, as trained, and as memory allows.

  Raises:
    ValueError: there is no memory for a single sequence, or no layer that drafts.
  """
  if options.draft == drafts.ON_DEVICE and not source.config.mtp_layers:
    raise ValueError(
      f'--draft={options.draft}: {options.checkpoint} has no layer that drafts;'
      ' use --draft ngram, or none'
    )
  on_cpu = jax.default_backend() == 'cpu'
  context = options.max_context or min(
    int(source.carried.get('max_position_embeddings') or 4096), 4096
  )
  sequences = options.sequences or (32 if on_cpu else 256)
  page = _page_bytes(source.config, numerics, options.draft)
  room = options.cache_gb * 1e9 or _cache_bytes(source.config, on_cpu)
  columns = -(-context // numerics.kv_block)
  pages = min(int(room // page), sequences * columns + 1)
  if pages < columns + 1:
    raise ValueError(
      f'one sequence of {context} tokens takes {columns * page / 1e9:.2f} GB of'
      f' KV pages, and there are {room / 1e9:.2f} GB; lower --max-context or'
      ' raise --cache-gb'
    )
  return config_lib.EngineConfig(
    rows=max(sequences, 128 if on_cpu else 512),
    sequences=sequences,
    pages=pages,
    max_context=context,
    draft=options.draft,
    draft_tokens=options.draft_tokens,
  )


def _page_bytes(model, numerics, draft: str) -> int:
  def size(pages: int) -> int:
    cache = jax.eval_shape(
      lambda: speculate.init_cache(model, numerics, pages, draft)
    )
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))

  return size(3) - size(2)


def _cache_bytes(model: config_lib.ModelConfig, on_cpu: bool) -> float:
  if on_cpu:
    total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    return CACHE_SHARE * total
  stats = jax.local_devices()[0].memory_stats() or {}
  held = PARAMETER_BYTES * params_lib.count(transformer.spec(model))
  return CACHE_SHARE_DEVICE * max(stats.get('bytes_limit', 8e9) - held, 0)


def _warm(engine: engine_lib.Engine, say: Say) -> None:
  """Compiles what serving needs, so that no client waits for it."""
  began = time.monotonic()
  say('compiling what serving needs')
  shapes = engine.warm_up(cuts=True, seconds=READY_S, say=say)
  say(f'{shapes} shapes compiled in {time.monotonic() - began:.1f} s')


# --- weights -----------------------------------------------------------------


def _weights(
  options: Options,
  source: Any,
  engine: engine_lib.Engine,
  stack: contextlib.ExitStack,
  say: Say,
) -> None:
  """Activates the first weights; starts a thread that follows an exchange,
  which `stack` ends."""
  if options.exchange:
    kv = store.open_exchange(options.exchange, writable=False)
    subscriber = sync.Subscriber(
      kv,
      options.form,
      reader=('serve', f'{socket.gethostname()}-{os.getpid()}'),
    )
    _first(subscriber, options, source, engine, say)
    stop = threading.Event()
    thread = threading.Thread(
      target=_follow,
      args=(subscriber, options, source, engine, stop, say),
      name='weights',
      daemon=True,
    )
    thread.start()
    stack.callback(thread.join, END_S)
    stack.callback(stop.set)
    return
  began = time.monotonic()
  params = checkpoints.read_params(source, dtype=jnp.float32)
  if source.kind == 'run':  # its masters are rounded before they compute
    params = params_lib.as_computed(transformer.spec(source.config), params)
  params = _used(options, params)
  engine.activate(0, jax.block_until_ready(params))
  engine.wait_active(0, READY_S)
  say(f'weights read in {time.monotonic() - began:.1f} s, as version 0')


def _used(options: Options, params: Any) -> Any:
  """Without the layer that drafts, where it does not: nothing else reads it."""
  if options.draft == drafts.ON_DEVICE:
    return params
  return params_lib.without_drafts(params)


def _first(subscriber, options, source, engine, say: Say) -> None:
  deadline, problem = time.monotonic() + FIRST_S, ''
  while True:
    try:
      update = subscriber.poll()
    except (store.BrokenWeights, OSError) as error:
      update, problem = None, f' ({error})'
    if update is not None:
      _activate(subscriber, options, source, engine, update, say)
      return
    if time.monotonic() > deadline:
      raise ValueError(
        f'{options.exchange} has no weights of form {options.form} after'
        f' {FIRST_S:.0f} s{problem}; is a trainer publishing there?'
      )
    time.sleep(POLL_S)


def _activate(subscriber, options, source, engine, update, say: Say) -> None:
  version, flat = update
  if subscriber.model is not None:
    found = config_lib.model_from_values(subscriber.model)
    differing = checkpoints.differences(found, source.config)
    if differing:
      raise ValueError(
        f'{options.exchange} holds another model than {options.checkpoint}:'
        f' {"; ".join(differing)}'
      )
  flat = forms.widen(options.form, flat)
  widened = _used(options, params_lib.unnamed(flat))
  engine.activate(version, jax.block_until_ready(widened))
  engine.wait_active(version, READY_S)
  say(
    f'version {version} active after a pause of'
    f' {engine.stats.pause_s * 1000:.0f} ms'
  )


def _follow(subscriber, options, source, engine, stop, say: Say) -> None:
  """Every newer version, until `stop`; what is broken is told once."""
  told = ''
  while not stop.wait(POLL_S):
    try:
      update = subscriber.poll()
      problem = '; '.join(subscriber.problems)
      if update is not None:
        _activate(subscriber, options, source, engine, update, say)
    except EngineError as error:
      problem = str(error)
      try:
        engine.check()  # it may only have been slow, and goes on then
      except EngineError:
        LOG.error('no more weights are followed: %s', error)
        return
    except (store.BrokenWeights, OSError, ValueError) as error:
      problem = str(error)
    except Exception as error:  # ours: told, and the next version is tried
      if str(error) != told:
        LOG.exception('following %s', options.exchange)
      problem = told = str(error)
    if problem and problem != told:
      LOG.warning('version %s stays: %s', engine.version, problem)
    told = problem
  with contextlib.suppress(OSError):
    subscriber.close()
