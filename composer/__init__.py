"""Composer: asynchronous reinforcement learning for code agents, in JAX.

Axes, in comments (`# [B, T, D]`), in einsums and in names:

    B  rows of a batch            L  layers; of routes, the MoE layers only
    T  tokens of a row            G  rollouts of a group
    D  width of the model         S  sampled tokens; staleness bound where so said
    H  query heads                P  tokens of context before the sampled ones
    K  experts a token; in attention, key positions
    E  experts                    F  hidden width of a feed-forward or an expert
    V  vocabulary                 N  tokens of a global step, the loss's constant

How data flows:

  1. `environments.tasks` gives tasks; `rollout.schedule` draws groups of them,
     one lease each (`leases`), no further ahead than the staleness bound allows.
  2. `rollout.session` runs one rollout: an engine (`inference`, reached through
     `records.Sampler`) writes an act, `environments.tools` executes it in a
     machine, `chat` renders what came of it, and so on. `rollout.recorder`
     keeps every token as the model saw it: logprob, version, experts.
  3. `rewards` grades the result in a second, clean machine.
  4. The G trajectories of a group are committed to the exchange (`groups`).
  5. The trainer (`rl`) lists them, scores, subtracts the group's mean, packs
     segments into a `records.Batch` and takes a step, replaying the experts
     that the engine chose.
  6. `weights` publishes what changed; engines fetch it between two steps.

Neither side waits for the other beyond the staleness bound. Mid-training
(`midtrain`) shares train state, optimizer and checkpoint with it; `fleet` puts
the parts into threads and processes. `config` holds every field of a run, and
`records` everything that crosses a stage.

Import what you need by its module; nothing is exported from here.
"""

__version__ = '0.1.0'
