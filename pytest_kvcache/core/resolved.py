"""What a server decided itself (attention back end, block size, KV blocks), read from what it says of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .spec import Arm

PREFIX = "resolved:"


def resolved(text: str, patterns: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """`{name: value}` of the patterns that occur in a server's log or metrics page; what is not said is absent.

    A pattern's first group is the value, the last one when it has none that took part; several patterns may have one name.
    `1,823,372` is a number, `True` and `False` are truths, `None` is a text: the server said so. Ranks and engines each
    say their own: different values stand side by side, in the order of the text.
    """
    found: dict[str, dict[str, None]] = {}
    for name, pattern in patterns:
        for match in re.finditer(pattern, text, re.MULTILINE):
            said = next((g for g in match.groups() if g is not None), match[0]).strip()
            if said:
                found.setdefault(name, {})[said] = None
    return {name: _value(next(iter(said))) if len(said) == 1 else " + ".join(said) for name, said in found.items()}


_NO, _YES = ("False", "false", "0", "disabled"), ("True", "true", "1", "enabled")
_WIDTHS = ("bfloat16", "float16", "float32")
CONTEXT_STEP = 256  # llama.cpp rounds a context up to a multiple of it (`src/llama-context.cpp`); others add a token or two


def _above(asked: int, said: Any) -> bool:
    return _number(said) and said > asked


def _switched(asked: bool, said: Any) -> bool:
    return str(said) in (_NO if asked else _YES)


def _number(said: Any) -> bool:
    return isinstance(said, int) and not isinstance(said, bool)


# Of each setting that an arm may ask for, what a server calls it, and whether what it says denies that. Only what cannot have been meant
# does: a server may lower a limit, name a method more exactly (`awq_marlin` for `awq`), or say two values, of two ranks, as one text.
_DENIED: tuple[tuple[str, str, Callable[[Any, Any], bool]], ...] = (
    ("kv_dtype", "kv_dtype", lambda asked, said: said == "auto"),
    ("weight_dtype", "dtype", lambda asked, said: {asked, said} <= {*_WIDTHS} and said != asked),
    ("quantization", "quantization", lambda asked, said: said == "None"),
    ("block_size", "block_size", lambda asked, said: _number(said) and said != asked),
    ("max_requests", "max_requests", _above),
    ("max_batched_tokens", "max_batched_tokens", _above),
    ("max_batched_tokens", "chunked_prefill_size", _above),
    ("prefix_cache", "prefix_caching", _switched),
    ("chunked_prefill", "chunked_prefill", _switched),
    ("chunked_prefill", "chunked_prefill_size", lambda asked, said: said == "-1" if asked else _above(0, said)),
    ("context", "max_model_len", lambda asked, said: _number(said) and not asked <= said < asked + CONTEXT_STEP),
)


def not_applied(found: Mapping[str, Any], arm: Arm) -> str:
    """How a server says that it did not do what an arm asks for (`found` of its log and page); empty when it does not say so. What was
    measured on it would stand under the wrong name."""
    asked = arm.asked()
    if "kv_dtype" in asked and (instead := found.get("kv_dtype_not_applied")):
        return f"kv_dtype={arm.kv_dtype!r} was not applied: the server fell back to {instead}"
    for setting, name, denied in _DENIED:
        if setting in asked and name in found and denied(asked[setting], found[name]):
            return f"{setting}={asked[setting]!r} was not applied: the server says {name.replace('_', ' ')} {found[name]}"
    return ""


def _value(said: str) -> Any:
    if re.fullmatch(r"\d{1,3}(,\d{3})+|\d{1,15}", said):
        return int(said.replace(",", ""))
    return {"True": True, "False": False}.get(said, said)


def noted(subject: Mapping[str, Any], arm: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint's subject with what a server of `arm` resolved: `resolved:block_size`, `resolved:int8:block_size`.

    Starts that resolve differently are told apart: the values of all of them, in the order in which they were seen.
    """
    told = dict(subject)
    for name, value in found.items():
        key = PREFIX + (name if arm == "base" else f"{arm}:{name}")
        before = told.get(key)
        known = before if isinstance(before, list) else [] if before is None else [before]
        if value not in known:
            told[key] = [*known, value] if known else value
    return told
