"""How numbers, times and texts are written in a report: the same way everywhere, and null as a dash."""

from __future__ import annotations

import datetime
import math
import re
from typing import Any

NONE = "\N{EM DASH}"
MINUS = "\N{MINUS SIGN}"
THIN = "\N{NARROW NO-BREAK SPACE}"
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
# Characters that XML forbids, that UTF-8 cannot carry, or that turn the direction of the text around them.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def clean(value: Any) -> Any:
    """The same JSON-plain value with every character that cannot be shown replaced by U+FFFD."""
    if isinstance(value, str):
        return _UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, dict):
        return {clean(str(k)): clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [clean(v) for v in value]
    return value


def finite(value: Any) -> float | None:
    """The value as a float; None for whatever is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def finites(values: Any) -> list[float]:
    """The finite numbers among `values`, in order."""
    return [x for x in map(finite, values or ()) if x is not None]


def number(value: Any, digits: int = 3) -> str:
    """`digits` significant digits, more where the whole part has more: 41.0, 0.0213, 12 346; an int as it is."""
    x = finite(value)
    if x is None:
        return NONE
    if x == 0:
        return "0"
    size = abs(x)
    if size >= 1e15 or size < 1e-4:
        mantissa, _, exponent = f"{size:.2e}".partition("e")
        text = f"{mantissa}e{exponent.lstrip('+0') if exponent[0] == '+' else MINUS + exponent.lstrip('-0')}"
    elif isinstance(value, int):
        text = f"{abs(value):,}"
    else:
        exponent10 = math.floor(math.log10(float(f"{size:.{digits - 1}e}")))
        text = f"{size:,.{max(0, digits - 1 - exponent10)}f}"
    return (MINUS if x < 0 else "") + text.replace(",", THIN)


def brief(value: Any) -> str:
    """A number without idle zeros, where nothing has to line up."""
    text = number(value)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text


_FINE = {"ppl": 4, "ppl_ratio": 5, "top1": 4}  # of these the last digits are what is judged


def digits(metric: Any) -> int:
    """How many significant digits a metric is written with."""
    return _FINE.get(metric, 3)


def quantity(value: Any, unit: str, digits: int = 3) -> str:
    """A number with its unit."""
    text = number(value, digits)
    return text if text == NONE or not unit else f"{text}{THIN}{unit}"


def _percents(fraction: float) -> str:
    """A signed percentage without its sign of percent."""
    size = abs(100 * fraction)
    if not math.isfinite(size):
        return NONE
    text = f"{size:,.{0 if size >= 99.95 else 1 if size >= 0.095 else 2}f}".replace(",", THIN)
    if not text.strip("0."):
        return "0.0"
    return (MINUS if fraction < 0 else "+") + text


def percent(fraction: Any) -> str:
    """A change, signed."""
    x = finite(fraction)
    return NONE if x is None else f"{_percents(x)}{THIN}%"


def share(fraction: Any) -> str:
    """A size such as a margin: a percentage without a sign and without idle zeros."""
    x = finite(fraction)
    return NONE if x is None else f"{float(f'{abs(100 * x):.3g}'):g}{THIN}%"


def interval(low: Any, high: Any) -> str:
    """Both bounds of a change; a missing bound is a dash."""
    a, b = finite(low), finite(high)
    if a is None and b is None:
        return NONE
    return f"{NONE if a is None else _percents(a)} to {NONE if b is None else _percents(b)}{THIN}%"


def probability(value: Any) -> str:
    """What p is: two significant digits; what is below 0.0001 says only that."""
    x = finite(value)
    if x is None:
        return NONE
    return "< 0.0001" if x < 1e-4 else f"= {x:.2g}"


def duration(seconds: Any) -> str:
    """Seconds as one would say them."""
    x = finite(seconds)
    if x is None:
        return NONE
    if x < 59.5:
        return f"{number(float(x), 2)}{THIN}s"
    if x < 3599.5:
        return f"{int(x + 0.5) // 60}{THIN}min {int(x + 0.5) % 60}{THIN}s"
    return f"{int(x + 30) // 3600}{THIN}h {int(x + 30) % 3600 // 60}{THIN}min"


def moment(text: Any) -> str:
    """An ISO time to the minute, with its zone; anything else as it is."""
    try:
        when = datetime.datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return str(text or NONE)
    return f"{when:%Y-%m-%d %H:%M} {when.tzname() or ''}".strip()


def elide(text: str, limit: int) -> str:
    """The text, its middle left out when it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    tail = (limit - 1) // 2
    return text[: limit - 1 - tail] + ELLIPSIS + text[len(text) - tail :]
