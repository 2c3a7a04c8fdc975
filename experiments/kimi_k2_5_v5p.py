"""The whole of Kimi K2.5, 1.03T parameters, on 1,024 chips of TPU v5p.

What it shows: mid-training at 32k tokens of context and reinforcement at 64k,
with float32 masters and moments, bfloat16 compute, experts over 32 devices, the
sequence over 8, everything else sharded over all 1,024. Nothing needs a TPU to
be checked:

    composer plan experiments/kimi_k2_5_v5p.py --topology v5p:8x8x16

compiles its steps with libtpu on any host and prints what a chip holds, sends
and computes. It takes some minutes and some gigabytes on two cores. The long
phase of mid-training, 256k tokens:

    composer plan experiments/kimi_k2_5_v5p.py --topology v5p:8x8x16 \\
      --set midtrain.sequence_length=262144 --set midtrain.batch_size=32 \\
      --set parallel.context=32 --set rl.steps=0

It has not been run on a pod. The tasks are those of the quick start: put your own
there, and the checkpoint that `composer convert` made in `init_from`.
"""

from composer import config
from composer.model import presets


def get_config() -> config.Experiment:
  return config.Experiment(
    name='kimi_k2_5_v5p',
    model=presets.KIMI_K2_5,
    numerics=config.NumericsConfig(
      mode='fast', moe='sorted', mla='split', compute='bfloat16', kv_block=64
    ),
    parallel=config.ParallelConfig(
      expert=32, context=8, chunk=4096, rollout_expert=128
    ),
    midtrain=config.MidtrainConfig(
      steps=10_000,
      batch_size=128,
      sequence_length=32_768,
      learning_rate=2e-5,
      schedule='cosine',
      warmup_steps=200,
      router_bias_rate=1e-3,
    ),
    session=config.SessionConfig(
      max_turns=50,
      max_act_tokens=4096,
      context_tokens=60_000,
      summary_tokens=2048,
      max_summaries=8,
      max_seconds=3600.0,
      observation_tokens=4096,
    ),
    engine=config.EngineConfig(
      rows=128, sequences=4, pages=4 * 1024, max_context=65_536
    ),
    rl=config.RLConfig(
      steps=1000,
      groups_per_step=64,
      group_size=16,
      loss_tokens=32_000_000,
      learning_rate=1e-6,
      micro_batch=128,
      sequence_length=65_536,
    ),
  )
