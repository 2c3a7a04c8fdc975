"""Fields of a request's body that are not served, and what to do instead.

Other servers of OpenAI's interface take more fields than this one. One that
cannot change an answer is taken and left; one that could is taken with the value
under which it does not, and else refused by its name, with the way that there is
here. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import difflib
import json
from typing import Any

from composer.inference.server_values import invalid

# Cannot change an answer of ours.
NEUTRAL = (
  'user',
  'store',
  'service_tier',
  'prediction',
  'prompt_cache_key',
  'prompt_cache_options',
  'prompt_cache_retention',
  'safety_identifier',
)
# Would change it; served with these values only.
FIXED: Mapping[str, tuple[Any, ...]] = {
  'frequency_penalty': (0,),
  'presence_penalty': (0,),
  'repetition_penalty': (1,),
  'no_repeat_ngram_size': (0,),
  'typical_p': (1,),
  'modalities': (['text'],),
  'best_of': (1,),
  'echo': (False,),
  'suffix': ('',),
  'priority': (0,),
  'use_beam_search': (False,),
  'length_penalty': (1,),
  'early_stopping': (False,),
  'spaces_between_special_tokens': (True,),
  'add_special_tokens': (False,),
  'add_generation_prompt': (True,),
  'continue_final_message': (False,),
  'chat_template_kwargs': ({},),
  'documents': ([],),
  'include_reasoning': (True,),
  'separate_reasoning': (True,),
  'stream_reasoning': (True,),
  'detokenize': (True,),
  'functions': ([],),
  'function_call': ('none', 'auto'),
  'verbosity': ('medium',),
  'reasoning_effort': ('medium',),
}
_SCORE = (
  'prompts are not scored here: `composer score` is, or ask for logprobs of'
  ' what is sampled'
)
_RENDER = (
  'send ids to /v1/completions, which /tokenize gives of messages, or of any'
  ' text'
)
_TEMPLATE = 'the template is chosen where the server starts (--template)'
_FORM = 'use structured_outputs, or response_format'
# Logprobs would be right, but of logits that depend on what was sampled before,
# which training does not have: it has the model's, and the kept ids.
_HISTORY = (
  'training could not compute again the distribution that it draws from; leave'
  ' it out'
)
_THINKING = (
  'whether turns are thought over is told by the template, chosen where the'
  ' server starts (--template); leave it out'
)
_TRIM = 'shorten the prompt before it is sent'
_INSTEAD = {
  'frequency_penalty': _HISTORY,
  'presence_penalty': _HISTORY,
  'repetition_penalty': _HISTORY,
  'no_repeat_ngram_size': _HISTORY,
  'typical_p': 'use top_p, top_k or min_p',
  'best_of': 'ask for n answers with logprobs, and choose among them',
  'use_beam_search': 'ask for n answers with logprobs, and choose among them',
  'echo': _SCORE,
  'prompt_logprobs': _SCORE,
  'return_logprob': 'use logprobs',
  'logprob_start_len': _SCORE,
  'top_logprobs_num': 'use top_logprobs, or a number of logprobs',
  'suffix': 'write what is to be filled in into the prompt',
  'priority': 'requests are served in the order in which they come',
  'add_generation_prompt': _RENDER,
  'add_special_tokens': 'the prompt holds what it says: ' + _RENDER,
  'continue_final_message': _RENDER,
  'truncate_prompt_tokens': _TRIM,
  'truncation': _TRIM,
  'chat_template': _TEMPLATE,
  'chat_template_kwargs': _TEMPLATE,
  'enable_thinking': _THINKING,
  'reasoning_effort': _THINKING,
  'thinking': _THINKING,
  'thinking_token_budget': 'use max_tokens',
  'documents': 'write them into a message',
  'functions': 'use tools',
  'function_call': 'use tool_choice',
  'guided_json': _FORM,
  'guided_choice': _FORM,
  'guided_regex': _FORM,
  'guided_grammar': _FORM,
  'regex': _FORM,
  'ebnf': _FORM,
  'json_schema': _FORM,
  'bad_words': 'ban token ids by a logit_bias of -100',
  'logits_processors': 'allowed_token_ids and logit_bias are served',
  'request_id': 'use the header X-Request-Id',
  'rid': 'use the header X-Request-Id',
  'session_id': 'use the header X-Session-Id, or metadata.session_id',
  'cache_salt': 'prefixes are shared by all who may use this server',
  'max_new_tokens': 'use max_tokens',
  'sampling_params': 'write its fields beside the prompt',
  'input_ids': 'use prompt, which takes ids',
  'text': 'use prompt',
  'stop_sequences': 'use stop',
  'messages': 'use /v1/chat/completions',
  'prompt': 'use /v1/completions, which takes text and ids',
  'input': 'use messages with /v1/chat/completions, prompt with /v1/completions',
  'audio': 'text is served only',
  'web_search_options': 'offer a tool that searches',
}


def refuse_unknown(body: Mapping[str, Any], known: Sequence[str]) -> None:
  """Refuses the first field that would have to be served and is not.

  Raises:
    ApiError: it names the field and what there is instead.
  """
  for name, value in body.items():
    if name in known or name in NEUTRAL:
      continue
    if name not in FIXED:
      raise invalid(
        f'unknown parameter: {name[:80]!r}; {_remedy(name, known)}',
        name[:80],
        'unknown_parameter',
      )
    if value not in FIXED[name]:
      raise invalid(
        f'{name}={json.dumps(value)[:80]} is not served;'
        f' {_remedy(name, known)}',
        name,
        'unsupported_value',
      )


def _remedy(name: str, known: Sequence[str]) -> str:
  if name in _INSTEAD:
    return _INSTEAD[name]
  near = difflib.get_close_matches(name[:80], known, 1, 0.75)
  return f'did you mean {near[0]}?' if near else 'leave it out'
