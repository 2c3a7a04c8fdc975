"""A soak of the engine: short requests, cancelled, oversized, across swaps.

python tests/inference/engine_soak.py [REQUESTS] runs the long one. Every request ends
with an answer or a typed error, pages return exactly, memory stays flat, and
answers of one version equal those of the same requests served alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import sys

import numpy as np
import serving

from composer import records


@dataclasses.dataclass
class Counts:
  """How requests ended."""

  answered: int = 0
  refused: int = 0
  cancelled: int = 0
  compared: int = 0


def make_request(rng: np.random.Generator) -> records.SampleRequest:
  """Short ones that share prefixes; one in twelve is too long."""
  size = int(rng.integers(1, 30))
  tokens = (np.arange(size) * int(rng.integers(1, 4))) % 64
  tokens[size // 2 :] = rng.integers(0, 64, size - size // 2)
  most = int(rng.integers(40, 60)) if rng.random() < 1 / 12 else 14
  plain = serving.request(
    tokens,
    seed=int(rng.integers(0, 2**31)),
    max_tokens=int(rng.integers(1, most)),
    stop=(3, 7),
    temperature=float(rng.choice([0.0, 0.5, 1.0, 1.3])),
  )
  if rng.random() < 0.2:
    return dataclasses.replace(plain, top_p=0.8, stop_sequences=((5, 9),))
  return plain


async def serve(engine, count: int, at_once: int, version: int, seed: int):
  """Serves `count` requests, (request, answer) of those that had one."""
  rng, counts, answers = np.random.default_rng(seed), Counts(), []
  left, swap_every = count, max(count // 4, 1)

  async def worker() -> None:
    nonlocal left, version
    while left > 0:
      left -= 1
      if left % swap_every == 0:
        version += 1
        engine.activate(version, serving.weights()[version % 2])
      request, leave = make_request(rng), rng.random() < 0.1
      task = asyncio.create_task(engine.sample(request))
      if leave:
        await asyncio.sleep(float(rng.exponential(0.004)))
        task.cancel()
      try:
        answers.append((request, await asyncio.wait_for(task, 120)))
        counts.answered += 1
      except ValueError:
        total = len(request.tokens) + request.max_tokens
        assert total > serving.CONFIG.max_context
        counts.refused += 1
      except asyncio.CancelledError:
        assert leave
        counts.cancelled += 1

  await asyncio.gather(*(worker() for _ in range(at_once)))
  return counts, answers


PAGES = 30  # of 160, so that they run out


def run(count: int, at_once: int = 40, seed: int = 0) -> Counts:
  """One soak; raises where anything is not as it must be."""
  with serving.starting() as start:
    engine = start(pages=PAGES)
    engine.warm_up(cuts=True)
    memory = [peak_kb()]
    counts, answers = Counts(), []
    for part in range(4):
      some, more = asyncio.run(
        serve(engine, count // 4, at_once, 100 * part, seed + part)
      )
      for field in dataclasses.fields(some):
        total = getattr(counts, field.name) + getattr(some, field.name)
        setattr(counts, field.name, total)
      answers += more[:: max(len(more) // 50, 1)]
      memory.append(peak_kb())
    serving.until(lambda: engine._pool.available == PAGES, 'every page returns')
    assert engine.waiting == 0 and engine.stats.compilations == 0
    assert len(set(engine._pool.allocate(PAGES))) == PAGES
    assert engine.stats.preempted > 0, 'no pages ran out'
    # What the first quarter takes is taken for good; nothing comes on top.
    assert memory[-1] - memory[1] < 20_000, f'memory grew: {memory} KiB'
    counts.compared = compare(start, answers)
    print(counts, engine.stats, f'peak {memory} KiB')
  return counts


def compare(start, answers) -> int:
  """Serves again, alone, what was answered by one version; how many."""
  alone = []
  for weights in serving.weights():
    engine = start(activate=False)
    engine.activate(0, weights)
    alone.append(engine)
  compared = 0
  for request, answer in answers:
    computed = answer.computed_versions[:-1]
    if len({*answer.versions.tolist(), *computed.tolist()}) > 1:
      continue  # it saw a swap
    (want,) = serving.answer(alone[answer.versions[0] % 2], request)
    for name in ('tokens', 'logprobs', 'experts', 'kept_ids'):
      np.testing.assert_array_equal(
        getattr(answer, name), getattr(want, name), name
      )
    compared += 1
  return compared


def peak_kb() -> int:
  """The most memory that this process ever held, KiB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == '__main__':
  run(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
