"""Values of a request's body, and OpenAI's errors for what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
import json
import math
from typing import Any

INVALID = 'invalid_request_error'


class ApiError(Exception):
  """An error as OpenAI's API words it; `status` is that of HTTP, `allow` the
  methods that a path takes."""

  def __init__(
    self,
    message: str,
    *,
    status: int = 400,
    kind: str = INVALID,
    param: str | None = None,
    code: str | None = None,
    allow: tuple[str, ...] = (),
  ):
    super().__init__(message)
    self.allow = allow
    self.status, self.kind, self.param, self.code = status, kind, param, code

  def body(self) -> dict[str, Any]:
    return {
      'error': {
        'message': str(self),
        'type': self.kind,
        'param': self.param,
        'code': self.code,
      }
    }


def invalid(message: str, param: str, code: str = 'invalid_value') -> ApiError:
  return ApiError(message, param=param, code=code)


def _told(value: float) -> str:
  text = str(value)
  return text if len(text) <= 40 else f'{text[:40]}...'


def flag(body: Mapping[str, Any], name: str, default: bool = False) -> bool:
  value = body.get(name, default)
  if not isinstance(value, bool):
    raise invalid(
      f'{name}={json.dumps(value)[:80]} is neither true nor false',
      name,
      'invalid_type',
    )
  return value


def whole(body, name, default, low, high=2**31 - 1):
  value = body.get(name, default)
  if value is default:
    return default
  if type(value) is not int:
    raise invalid(
      f'{name}={json.dumps(value)[:80]} is no whole number',
      name,
      'invalid_type',
    )
  if not low <= value <= high:
    raise invalid(f'{name}={_told(value)} must lie in {low}..{high}', name)
  return value


def number(body, name, default, low, high, above=False):
  value = body.get(name, default)
  if type(value) not in (int, float):
    raise invalid(
      f'{name}={json.dumps(value)[:80]} is no number', name, 'invalid_type'
    )
  if not (low <= value <= high and math.isfinite(value)) or (
    above and value == low
  ):
    side = f'more than {low:g}' if above else f'at least {low:g}'
    raise invalid(
      f'{name}={_told(value)} must be {side}, at most {high:g}', name
    )
  return float(value)
