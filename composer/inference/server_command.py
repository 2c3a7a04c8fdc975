"""The arguments of `composer serve`. Light: nothing heavy is imported before it
runs."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

TOKEN = 'COMPOSER_SERVE_TOKEN'  # the environment, for arguments can be listed


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    '--checkpoint',
    metavar='DIR',
    required=True,
    help="a model: Hugging Face's or our directory, a run's, a .gguf file, or"
    ' smollm2',
  )
  parser.add_argument(
    '--host',
    default='127.0.0.1',
    help=f'default: 127.0.0.1; others need a secret in {TOKEN}, which clients'
    ' give as their API key',
  )
  for name, metavar, text in (
    ('model', 'NAME', "that requests give (default: the checkpoint's)"),
    ('exchange', 'URL', 'serve and follow the weights published there'),
    ('tokenizer', 'PATH', "default: the checkpoint's"),
    ('template', 'NAME', "of turns (default: what the tokenizer's tells)"),
    (
      'sessions',
      'DIR',
      'write recorded sessions there, at the latest once they have rested for a'
      ' minute (default: do not)',
    ),
  ):
    parser.add_argument(f'--{name}', default='', metavar=metavar, help=text)
  parser.add_argument(
    '--form', default='bf16', help="of the exchange's weights (default: bf16)"
  )
  parser.add_argument(
    '--numerics',
    choices=('fast', 'aligned', 'bitwise'),
    default='fast',
    help='default: fast',
  )
  parser.add_argument(
    '--compute',
    choices=('float32', 'bfloat16'),
    default='',
    help='default: float32 on a CPU, else bfloat16',
  )
  parser.add_argument(
    '--draft',
    choices=('ngram', 'mtp'),
    default='',
    help='what proposes tokens that one step verifies: text seen before, or the'
    " model's own layer for it; no answer changes (default: nothing)",
  )
  for name, default, text in (
    ('draft-tokens', 4, 'proposed at most a sequence and step (default: 4)'),
    ('port', 8000, 'default: 8000; 0 takes a free one'),
    ('max-context', 0, "tokens of a sequence (default: the model's, <= 4096)"),
    ('sequences', 0, 'running at once (default: 32 on a CPU, else 256)'),
    (
      'max-kept',
      4096,
      'ids that a token of an answer to train on may have been drawn among,'
      ' where its distribution was cut (default: 4096)',
    ),
  ):
    parser.add_argument(
      f'--{name}', type=int, default=default, metavar='N', help=text
    )
  for name, default, text in (
    ('cache-gb', 0.0, 'of KV pages (default: a share of the memory)'),
    ('session-minutes', 60.0, 'that an unused session is kept (default: 60)'),
    ('request-seconds', 600.0, 'for a whole answer (default: 600)'),
    ('drain-seconds', 30.0, 'for requests under way at SIGTERM (default: 30)'),
  ):
    parser.add_argument(
      f'--{name}', type=float, default=default, metavar='X', help=text
    )


def run(arguments: argparse.Namespace) -> int:
  """Raises ValueError where the package for HTTP is not installed; for more see
  `server_process.run`."""
  if importlib.util.find_spec('aiohttp') is None:
    raise ValueError(
      "composer serve needs aiohttp, which pip install -e '.[serve]' installs"
    )
  from composer.inference import server
  from composer.inference import server_process

  name = arguments.model or Path(arguments.checkpoint).resolve().name
  return server_process.run(
    server_process.Options(
      checkpoint=arguments.checkpoint,
      server=server.ServerConfig(
        model=name,
        host=arguments.host,
        port=arguments.port,
        token=os.environ.get(TOKEN, ''),
        request_s=arguments.request_seconds,
        drain_s=arguments.drain_seconds,
        max_kept=arguments.max_kept,
      ),
      exchange=arguments.exchange,
      form=arguments.form,
      tokenizer=arguments.tokenizer,
      template=arguments.template,
      numerics=arguments.numerics,
      compute=arguments.compute,
      max_context=arguments.max_context,
      sequences=arguments.sequences,
      draft=arguments.draft,
      draft_tokens=arguments.draft_tokens,
      cache_gb=arguments.cache_gb,
      sessions=arguments.sessions,
      session_s=60 * arguments.session_minutes,
    )
  )
