"""Token counts of a server whose streams tell none: by a plain answer, which does."""

from __future__ import annotations

import json
from typing import Any

from ..core.load import Target
from ..core.masking import masked
from ..core.spec import UserError
from .asking import ask, opener


class Broken(UserError):
    """The connection broke, or nobody is there."""


def plain_counts(target: Target, body: dict[str, Any], timeout_s: float, secrets: tuple[str, ...] = ()) -> tuple[int, int]:
    """Input and output tokens of one completion that does not stream, as the server counts them; UserError when it does not say, Broken
    when it is gone or needs longer than `timeout_s`."""
    data = json.dumps(body | {"stream": False}, ensure_ascii=False).encode()
    headers = {"Content-Type": "application/json", **target.headers}
    try:
        _, text = ask(opener(target), target.base_url + target.endpoint, limit_s=timeout_s, headers=headers, body=data)
    except OSError as e:
        raise Broken(f"a plain request, by which tokens are counted (at most {timeout_s:g} s), failed: {str(e) or repr(e)}") from e
    try:
        usage = json.loads(text)["usage"]
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        if not all(type(n) is int for n in counts):
            raise TypeError
    except (ValueError, LookupError, TypeError):
        words = masked(" ".join(text.split()), secrets)[:300]
        raise UserError(f"a plain answer, by which tokens are counted, tells no usage: {words or 'nothing'}") from None
    return counts
