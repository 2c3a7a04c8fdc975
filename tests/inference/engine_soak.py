"""A soak of the engine: short requests, cancelled, oversized, across swaps.

python tests/inference/engine_soak.py [REQUESTS] runs the long one, in parts of
different options. Every request ends with an answer or a typed error, pages
return exactly, memory stays flat, and answers of one version equal those of the
same requests served alone.
"""

from __future__ import annotations

import asyncio
import dataclasses
import resource
import sys

import numpy as np
import serving

from composer import records

PAGES = 20  # of 160, so that they run out
SWAP_EVERY = 32  # requests
ALIKE = 100  # answers of a part that are served again, at most
PARTS = (
  {},
  # Of as many rows as one of the programs of the others, so that none is new.
  {'draft': 'ngram', 'rows': 16},
  {'on_new_weights': 'restart'},
  {'draft': 'ngram', 'rows': 16, 'on_new_weights': 'restart'},
)


@dataclasses.dataclass
class Counts:
  """How requests ended, and what happened to the engines meanwhile."""

  answered: int = 0
  refused: int = 0
  refused_prompts: int = 0  # of those, too long before anything is sampled
  cancelled: int = 0
  compared: int = 0
  swaps: int = 0
  preempted: int = 0
  proposed: int = 0
  accepted: int = 0


def make_request(rng: np.random.Generator) -> records.SampleRequest:
  """Short ones that share prefixes; one in eight is too long, or its prompt."""
  context, odd = serving.CONFIG.max_context, rng.random()
  size = int(rng.integers(1, 30))
  if odd < 1 / 24:
    size = int(rng.integers(context, 2 * context))
  tokens = (np.arange(size) * int(rng.integers(1, 4))) % 64
  tokens[size // 2 :] = rng.integers(0, 64, size - size // 2)
  most = int(rng.integers(40, 60)) if odd > 11 / 12 else 14
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
  """Serves `count` requests, the first at `version` and later ones beyond.

  Returns:
    (counts, (request, answer) of those that had one, the newest version).
  """
  rng, counts, answers = np.random.default_rng(seed), Counts(), []
  left = count

  async def worker() -> None:
    nonlocal left, version
    while left > 0:
      left -= 1
      if left % SWAP_EVERY == 0:
        version += 1
        engine.activate(version, serving.weights()[version % 2])
      request, leave = make_request(rng), rng.random() < 0.1
      size = len(request.tokens)
      fits = size + request.max_tokens <= serving.CONFIG.max_context
      task = asyncio.create_task(engine.sample(request))
      if leave:
        await asyncio.sleep(float(rng.exponential(0.004)))
        task.cancel()
      try:
        answers.append((request, await asyncio.wait_for(task, 120)))
        assert fits
        counts.answered += 1
      except ValueError:
        assert not fits
        counts.refused += 1
        counts.refused_prompts += size >= serving.CONFIG.max_context
      except asyncio.CancelledError:
        assert leave
        counts.cancelled += 1

  await asyncio.gather(*(worker() for _ in range(at_once)))
  return counts, answers, version


def count_swaps(engine) -> list[int]:
  """Versions that the engine took up, as it does: some are overtaken."""
  taken, swap = [], engine._swap

  def counted(version, params) -> None:
    swap(version, params)
    taken.append(version)

  engine._swap = counted
  return taken


def run(count: int, at_once: int = 40, seed: int = 0) -> Counts:
  """One soak; raises where anything is not as it must be."""
  with serving.starting() as start:
    memory, version = [peak_kb()], 0
    counts, answers = Counts(), []
    for part, options in enumerate(PARTS):
      config = dataclasses.replace(serving.CONFIG, **options)
      engine = start(config, activate=False, pages=PAGES)
      taken = count_swaps(engine)
      engine.activate(version, serving.weights()[version % 2])
      if part == 0:
        engine.warm_up(cuts=True)
      some, more, version = asyncio.run(
        serve(engine, count // len(PARTS), at_once, version, seed + part)
      )
      assert all(np.diff(taken) > 0)
      check_end(engine)
      stats, some.swaps = engine.stats, len(taken) - 1
      for name in ('preempted', 'proposed', 'accepted'):
        setattr(some, name, getattr(stats, name))
      assert bool(stats.proposed) == bool(config.draft)
      for field in dataclasses.fields(some):
        total = getattr(counts, field.name) + getattr(some, field.name)
        setattr(counts, field.name, total)
      answers += more[:: -(-len(more) // ALIKE)]
      memory.append(peak_kb())
    assert counts.preempted > 0, 'no pages ran out'
    # What the first part takes is taken for good; nothing comes on top.
    assert memory[-1] - memory[1] < 20_000, f'memory grew: {memory} KiB'
    counts.compared = compare(start, answers)
    assert counts.compared >= max(count // 100, 5), counts
    print(counts, f'peak {memory} KiB')
  return counts


def check_end(engine) -> None:
  """Nothing is left of what it served, and nothing was compiled for it."""
  serving.until(lambda: engine._pool.available == PAGES, 'every page returns')
  assert engine.waiting == 0 and engine.stats.compilations == 0
  assert len(set(engine._pool.allocate(PAGES))) == PAGES


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
