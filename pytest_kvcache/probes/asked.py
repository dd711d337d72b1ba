"""What a probe's script is asked for and answers: `script REQUEST ANSWER`, JSON in, .npz out. Needs numpy only.

`want` in the request names it: `walk` (lockstep.py; where nothing is named), `tokens`, `greedy` (greedy.py), and what an engine has beside
these. `told` in the answer is JSON. What a caller asked wrongly ends in one line on stderr and exit status 1.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Answer = Callable[[Mapping[str, Any]], dict[str, Any]]  # of a request: the arrays by name, and `told`


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """A model's tokenizer. `encode` adds no special token and reads none in the text: "<s>" in it is three characters; `decode` leaves
    them out. `ends` are all tokens that end an answer, of which `eos` is one; `size` counts tokens, which may be fewer than a model has
    logits."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[list[int]], str]
    size: int
    bos: int | None = None
    eos: int | None = None
    ends: Collection[int] = ()


def tokens(request: Mapping[str, Any], vocabulary: Vocabulary, about: Mapping[str, Any]) -> dict[str, Any]:
    """`tokens/NAME` of every text in `texts`, int32, and of what vocabulary they are."""
    found: dict[str, Any] = {f"tokens/{name}": np.array(vocabulary.encode(text), np.int32) for name, text in request["texts"].items()}
    return found | {"told": {"bos": vocabulary.bos, "eos": vocabulary.eos, "vocabulary": vocabulary.size, **about}}


def main(wants: Mapping[str, Answer]) -> None:
    """Answers the request that the command line names."""
    request = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    want = request.get("want", "walk")
    if want not in wants:
        raise SystemExit(f"{Path(sys.argv[0]).name} has no {want!r}: {', '.join(wants)}")
    found = wants[want](request)
    np.savez(sys.argv[2], **found | {"told": json.dumps(found["told"])})
