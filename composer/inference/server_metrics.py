"""Counters of the server, and the text in which Prometheus reads them."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Iterator, Mapping
import dataclasses
from typing import Any

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Histogram:
  """Counts of values up to each of `SECONDS`, and beyond."""

  def __init__(self):
    self.counts = [0] * (len(SECONDS) + 1)
    self.total = 0.0

  def add(self, seconds: float) -> None:
    self.counts[bisect.bisect_left(SECONDS, seconds)] += 1
    self.total += seconds


class Metrics:
  """Counters of one server; its event loop owns them.

  Attributes:
    requests: (route, status) -> answered requests.
    cancelled: requests whose client left.
    unrecorded: answers that were recorded as context alone (`max_kept`).
    prompt_tokens, sampled_tokens: of answered requests.
    first_token, whole: seconds of streamed, and of all sampling requests.
  """

  def __init__(self):
    self.requests: collections.Counter[tuple[str, int]] = collections.Counter()
    self.cancelled = 0
    self.unrecorded = 0
    self.prompt_tokens = 0
    self.sampled_tokens = 0
    self.first_token = Histogram()
    self.whole = Histogram()


def text(
  metrics: Metrics, stats: Any, pages: Any, gauges: Mapping[str, float]
) -> Iterator[str]:
  """Lines of Prometheus' text format, version 0.0.4.

  Args:
    metrics: of the server.
    stats, pages: of the engine; each of their numbers becomes a gauge.
    gauges: name -> value, of the rest.
  """
  yield '# TYPE composer_requests_total counter'
  for (route, status), count in sorted(metrics.requests.items()):
    labels = f'{{route="{route}",status="{status}"}}'
    yield f'composer_requests_total{labels} {count}'
  for name in ('cancelled', 'unrecorded', 'prompt_tokens', 'sampled_tokens'):
    yield f'# TYPE composer_{name}_total counter'
    yield f'composer_{name}_total {getattr(metrics, name)}'
  yield from _histogram('composer_first_token_seconds', metrics.first_token)
  yield from _histogram('composer_request_seconds', metrics.whole)
  numbers = {
    f'engine_{prefix}{field.name}': getattr(record, field.name)
    for prefix, record in (('', stats), ('pages_', pages))
    for field in dataclasses.fields(record)
  }
  for name, value in {**gauges, **numbers}.items():
    if isinstance(value, int | float):
      yield f'# TYPE composer_{name} gauge'
      yield f'composer_{name} {value}'


def _histogram(name: str, histogram: Histogram) -> Iterator[str]:
  yield f'# TYPE {name} histogram'
  count = 0
  for bound, more in zip((*SECONDS, None), histogram.counts, strict=True):
    count += more
    label = '+Inf' if bound is None else f'{bound:g}'
    yield f'{name}_bucket{{le="{label}"}} {count}'
  yield f'{name}_sum {histogram.total:.6f}'
  yield f'{name}_count {count}'
