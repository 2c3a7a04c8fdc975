"""What crosses the stages of the loop, and the protocol that rollouts speak.

Legend: T tokens of a segment, L MoE layers, K experts a token, G rollouts of a
group, B rows and T columns of a packed batch. Arrays of a `Segment` are aligned
with its tokens: the logprob at t belongs to token t given the tokens before it.

Two kinds of record live here. Pytrees (`Routing`, `Batch`, `TrainState`) hold
arrays only and may enter `jax.jit`. Plain frozen dataclasses (`Segment`,
`Trajectory`, `Group`, `Task`, ...) never do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import hashlib
from typing import Any, Protocol

from flax import struct
import jax
import numpy as np

Array = jax.Array
Params = Mapping[str, Any]

UNKNOWN_EXPERT = -1
UNSAMPLED_VERSION = -1
TOP_LOGPROBS = 20  # the most likeliest tokens that a request may ask for


@struct.dataclass
class Routing:
  """Experts that every MoE layer chose: int16 [T, L, K]; -1 is unknown."""

  experts: Array


@struct.dataclass
class Batch:
  """Packed segments, one micro-batch. Every array is aligned with `tokens`.

  A segment starts at a multiple of the KV block, so that its attention blocks
  lie where they lay in the engine. Values at positions where `loss_mask` is
  false are meaningless and are never reduced without it.
  """

  tokens: Array  # int32 [B, T]; 0 where padded
  segment_ids: Array  # int32 [B, T]; 0 is padding, segments count from 1
  positions: Array  # int32 [B, T]; position within the segment
  loss_mask: Array  # bool [B, T]; true at sampled tokens
  behaviour_logprobs: Array  # float32 [B, T]
  reference_logprobs: Array  # float32 [B, T]
  temperatures: Array  # float32 [B, T]; 1 where not sampled, or greedily
  advantages: Array  # float32 [B, T]
  experts: Array  # int16 [B, T, L, K]; -1 routes natively
  versions: Array  # int32 [B, T]; -1 where not sampled
  weights: Array  # float32 [B, T]; 1/N at sampled tokens, else 0
  auditable: Array  # bool [B, T]
  # int32 [B, T, J]: ids that the token was drawn among, then -1; -1 alone is
  # all of them. None where no segment's distribution was cut.
  kept: Array | None = None


@struct.dataclass
class TrainState:
  """All that a training step reads and writes.

  `step` counts optimizer steps over all stages; `version` is the number under
  which `params` were last published.
  """

  step: Array  # int32 []
  version: Array  # int32 []
  params: Any  # float32 master parameters
  opt_state: Any
  rng: Array  # key


@dataclasses.dataclass(frozen=True)
class Segment:
  """One context that the model saw, from its first token to its last.

  Attributes:
    tokens: int32 [T].
    sampled: bool [T]; true exactly once, in the whole trajectory, for each token
      that the model sampled.
    logprobs: float32 [T]; under the distribution really sampled from; 0 where
      not sampled.
    temperatures: float32 [T]; 1 where not sampled; 0 where sampled greedily,
      with the logprob at temperature 1.
    versions: int32 [T]; policy version that sampled the token, else -1.
    experts: int16 [T, L, K]; -1 where unknown.
    auditable: bool [T]; sampled, and the whole prefix was computed at the
      version that sampled it.
    stop_reason: why the segment ended: 'finished', 'summary', 'turns',
      'tokens', 'seconds', 'context', or 'rewritten' (a later call changed its prefix).
    parent: index in the trajectory of the segment whose summary this one starts
      from, or -1.
    kept_ids, kept_offsets: int32 [n] and [T + 1], or None where no token's
      distribution was cut: token t was drawn among
      kept_ids[kept_offsets[t] : kept_offsets[t + 1]], or, where those are none,
      among all. Its logprob is over those alone.
  """

  tokens: np.ndarray
  sampled: np.ndarray
  logprobs: np.ndarray
  temperatures: np.ndarray
  versions: np.ndarray
  experts: np.ndarray
  auditable: np.ndarray
  stop_reason: str
  parent: int
  kept_ids: np.ndarray | None = None
  kept_offsets: np.ndarray | None = None

  def __post_init__(self):
    length = len(self.tokens)
    for name in (
      'sampled',
      'logprobs',
      'temperatures',
      'versions',
      'experts',
      'auditable',
    ):
      got = len(getattr(self, name))
      if got != length:
        raise ValueError(
          f'Segment.{name} has {got} entries for {length} tokens; every array of'
          ' a segment is aligned with its tokens'
        )
    if not np.all(np.isfinite(self.logprobs)):
      where = np.flatnonzero(~np.isfinite(self.logprobs))[:4].tolist()
      raise ValueError(
        f'Segment.logprobs is not finite at positions {where}; use 0 where a'
        ' token was not sampled'
      )
    if (self.kept_ids is None) != (self.kept_offsets is None):
      raise ValueError('Segment.kept_ids and kept_offsets: give both or none')
    if self.kept_offsets is not None:
      _check_kept(length, self.kept_ids, self.kept_offsets)


def _check_kept(length: int, ids: np.ndarray, offsets: np.ndarray) -> None:
  if (
    len(offsets) != length + 1
    or offsets[0] != 0
    or offsets[-1] != len(ids)
    or np.any(np.diff(offsets) < 0)
  ):
    raise ValueError(
      f'Segment.kept_offsets must rise from 0 to the {len(ids)} kept ids in'
      f' {length + 1} entries for {length} tokens; got {len(offsets)} from'
      f' {offsets[:1].tolist()} to {offsets[-1:].tolist()}'
    )


@dataclasses.dataclass(frozen=True)
class Turn:
  """One turn as a person would read it.

  `kind` is 'prompt', 'call', 'text', 'broken', 'observation' or 'summary';
  [start, end) are the turn's tokens in segment `segment`.
  """

  kind: str
  text: str
  segment: int
  start: int
  end: int
  seconds: float


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One whole session: what the model saw, did and earned.

  `reward` is the combination of `reward_parts` (name -> value); the part
  'tests' is the verifiable one. `provenance` says where it came from (cluster,
  process, machine driver and its isolation, seed, engine settings). `timings`
  holds seconds by name.
  """

  task_id: str
  group_id: str
  index: int
  segments: tuple[Segment, ...]
  turns: tuple[Turn, ...]
  reward: float
  reward_parts: Mapping[str, float]
  stop_reason: str
  provenance: Mapping[str, Any]
  timings: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Group:
  """The G trajectories of one draw of one task.

  `produced_index` counts the groups that the producing process has committed,
  this one included (from 1).
  """

  group_id: str
  task_id: str
  draw: int
  trajectories: tuple[Trajectory, ...]
  cluster: str
  incarnation: str
  produced_index: int


def group_id(task_id: str, epoch: int, draw: int) -> str:
  """Names a draw of a task: a hash of what it is, never of a position."""
  text = f'{task_id}/{epoch}/{draw}'
  return hashlib.blake2b(text.encode(), digest_size=10).hexdigest()


@dataclasses.dataclass(frozen=True)
class Task:
  """A piece of work with a hidden check.

  Attributes:
    id: unique name, stable over runs.
    kind: name of the task family, e.g. 'repair'.
    instruction: what the model is asked to do, as text.
    files: path -> text or bytes of the machine's workspace at the start.
    tools: names of the tools that the session offers.
    test_command: argv that runs the visible tests in the workspace.
    allowed: paths that may be carried to the clean machine for grading; in one
      with a `*` it stands for any text.
    hidden_files: path -> contents laid over the workspace of the clean machine.
    hidden_command: argv that runs there; exit code 0 means solved.
    metadata: family-specific, JSON-able (function, bug, split, ...).
  """

  id: str
  kind: str
  instruction: str
  files: Mapping[str, str | bytes]
  tools: tuple[str, ...]
  test_command: tuple[str, ...]
  allowed: tuple[str, ...]
  hidden_files: Mapping[str, str | bytes]
  hidden_command: tuple[str, ...]
  metadata: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class SampleRequest:
  """Asks for a continuation of `tokens` (the whole context, int32 [P]).

  Sampling ends at the first token of `stop_tokens`, at the end of the first of
  `stop_sequences` (either is included in the answer), or after `max_tokens`.
  Equal requests with equal seeds give equal answers at one version, whatever
  else the engine serves.

  The distribution is softmax(logits / temperature), cut to the `top_k` likeliest
  tokens (0: all), then to the fewest of those that hold `top_p` of what they
  hold together, then to those of at least `min_p` times the likeliest. Ties go
  to the lower id. A temperature of 0 takes the argmax, and its logprobs are those
  of temperature 1, for the engine and the trainer; other temperatures are at least
  `config.GREEDY`.

  `mask` maps the tokens sampled so far, int32 [s], to the tokens that may come
  next, bool [V]; it is called on the engine's thread before every token, which
  then waits for the host. `on_tokens` is called on the requester's event loop
  with every new piece of the answer, in order, before `sample` returns. It may
  give how many of the sampled tokens are enough: once it did, the answer ends
  when the experts of all those are known, and may hold more tokens.

  `max_kept` bounds what is kept of a cut distribution: once a token was drawn
  among more ids, but not among all, the answer tells none (`kept_ids` is None),
  and cannot be trained on. None: there is no bound.

  `top_logprobs` asks for the likeliest tokens beside each that was sampled.
  """

  tokens: np.ndarray
  max_tokens: int
  stop_tokens: tuple[int, ...]
  temperature: float
  seed: int
  top_p: float = 1.0
  top_k: int = 0
  min_p: float = 0.0
  stop_sequences: tuple[tuple[int, ...], ...] = ()
  mask: Callable[[np.ndarray], np.ndarray] | None = None
  on_tokens: Callable[[Piece], int | None] | None = None
  max_kept: int | None = None
  top_logprobs: bool = False


@dataclasses.dataclass(frozen=True)
class Piece:
  """The next s tokens of an answer under way; arrays as in `Completion`.

  `kept` are the ids that each was drawn among, where the request cut or masked
  its distribution; none are all. From the first token that had more than
  `max_kept` on, nothing stands there.
  """

  tokens: np.ndarray  # int32 [s]
  logprobs: np.ndarray  # float32 [s]
  versions: np.ndarray  # int32 [s]
  kept: tuple[np.ndarray, ...] | None = None
  top_ids: np.ndarray | None = None  # int32 [s, N]
  top_logprobs: np.ndarray | None = None  # float32 [s, N]


@dataclasses.dataclass(frozen=True)
class Completion:
  """The answer to a `SampleRequest`; S sampled tokens after P of context.

  Attributes:
    tokens: int32 [S].
    logprobs: float32 [S], under the distribution really sampled from.
    versions: int32 [S].
    experts: int16 [P + S, L, K], prompt tokens included; -1 where the engine
      did not compute the token (the last sampled one, which no later token has
      needed yet).
    computed_versions: int32 [P + S]; the version at which each token's keys and
      values were computed, -1 where they were not. A sampled token is auditable
      when every position before it was computed at the version that sampled it.
      Where an answer under way was computed again (it had given its pages back,
      or new weights restart it), this and `experts` stay as they were when the
      token was first computed.
    stop_reason: 'stop', 'length' or 'context'.
    kept_ids, kept_offsets: int32 [n] and [S + 1], where the request cut or
      masked its distribution, else None: token s was drawn among
      kept_ids[kept_offsets[s] : kept_offsets[s + 1]], ascending, and its
      logprob is log_softmax(logits / T) over those alone. None of its own: it
      was drawn among all. A greedy token was drawn from nothing: all ids that
      its mask allows stand there.
    top_ids, top_logprobs: int32 and float32 [S, N], where the request asked:
      the N likeliest of each token's distribution, likeliest first, and their
      logprobs under it; -inf where it had fewer.
    cached: of the P tokens of context, those that the prefix cache held when the
      request first started; 0 where a sampler does not tell. How it was served,
      and not what was answered: equal answers may differ in it.
  """

  tokens: np.ndarray
  logprobs: np.ndarray
  versions: np.ndarray
  experts: np.ndarray
  computed_versions: np.ndarray
  stop_reason: str
  kept_ids: np.ndarray | None = None
  kept_offsets: np.ndarray | None = None
  top_ids: np.ndarray | None = None
  top_logprobs: np.ndarray | None = None
  cached: int = dataclasses.field(default=0, compare=False)


class Sampler(Protocol):
  """All that a rollout knows of an inference engine."""

  async def sample(self, request: SampleRequest) -> Completion: ...


class EngineError(RuntimeError):
  """The engine could not answer (infrastructure, never the model's fault)."""
