"""What a precision costs in quality: perplexity, divergence from the 16-bit reference and equal top tokens of one text. Pure.

Negative log-likelihoods and divergences in nats, one a scored token; `tokens` is how many each chunk (a window of the text) has. Tokens of
a chunk depend on each other, so every standard error is clustered by chunk: an error per token would be two to five times too small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .metrics import quantile

TAILS = {"p99": 0.99, "p999": 0.999}
ROUNDING = 1e-7  # log-probabilities come as float32: what they sum to is known to this


class NotScored(ValueError):
    """A log-probability that is none: its `position` and its `kind`, which is `nan_logprob`, `infinite_nll`, `positive_logprob` or
    `missing_logprob`."""

    def __init__(self, kind: str, position: int, value: object) -> None:
        self.kind, self.position = kind, position
        super().__init__(f"{kind}: token {position} has the log-probability {value}")


def scored(logprobs: Sequence[float | None]) -> list[float]:
    """The negative log-likelihoods of a text's tokens from an engine's log-probabilities (natural). The first has no condition and is not
    scored; NotScored where another one is no log-probability: to skip it would make the text look easier."""
    if logprobs and logprobs[0] is not None and not math.isfinite(logprobs[0]):
        raise NotScored("nan_logprob", 0, logprobs[0])
    found = []
    for position, value in enumerate(logprobs[1:], 1):
        if value is None:
            raise NotScored("missing_logprob", position, value)
        if math.isnan(value):
            raise NotScored("nan_logprob", position, value)
        if math.isinf(value):
            raise NotScored("infinite_nll", position, value)
        if value > 1e-4:  # rounding of a float32 softmax may leave this much
            raise NotScored("positive_logprob", position, value)
        found.append(max(0.0, -value))
    return found


def perplexity(nll: Sequence[float]) -> float:
    """exp of the mean negative log-likelihood. ValueError where nothing was scored."""
    if not nll:
        raise ValueError("no token was scored")
    return math.exp(math.fsum(nll) / len(nll))


def clustered_mean(sums: Sequence[float], tokens: Sequence[int]) -> tuple[float, float]:
    """The mean over all tokens and its standard error, from the sum of each chunk: a ratio estimator. At least two chunks."""
    chunks, total = len(tokens), sum(tokens)
    if chunks < 2 or len(sums) != chunks:
        raise ValueError(f"{len(sums)} and {chunks} chunks: at least two are needed, as many sums")
    mean = math.fsum(sums) / total
    squares = math.fsum([(s - mean * n) ** 2 for s, n in zip(sums, tokens, strict=True)])
    return mean, math.sqrt(chunks / (chunks - 1) * squares) / total


def paired_log_ratio(base_nll: Sequence[float], new_nll: Sequence[float], tokens: Sequence[int]) -> tuple[float, float]:
    """ln(PPL_new / PPL_base) and its standard error, from the sums of negative log-likelihoods of each
    chunk. Paired: both scored the same tokens."""
    if not len(base_nll) == len(new_nll) == len(tokens):
        raise ValueError(f"{len(base_nll)}, {len(new_nll)} and {len(tokens)} chunks: at least two are needed, as many on both sides")
    return clustered_mean([new - base for base, new in zip(base_nll, new_nll, strict=True)], tokens)


def paired_error(error: float, base_error: float, correlation: float) -> float:
    """The standard error of a difference of two means from theirs and their correlation, as llama.cpp's perplexity tool prints it."""
    return math.sqrt(max(0.0, error**2 + base_error**2 - 2 * correlation * error * base_error))


def divergence_of_top(reference: Mapping[int, float], found: Mapping[int, float]) -> float:
    """The KL divergence from the log-probabilities of the likeliest tokens on both sides; what is not known of both is one lump. Never
    more than the divergence of the whole vocabulary, so a table that shows it must say so."""
    known = [t for t in reference if t in found]
    p, q = [math.exp(reference[t]) for t in known], [math.exp(found[t]) for t in known]
    rest_p, rest_q = max(0.0, 1 - math.fsum(p)), max(0.0, 1 - math.fsum(q)) + ROUNDING
    lump = rest_p * math.log(rest_p / rest_q) if rest_p else 0.0
    return max(0.0, math.fsum([a * (reference[t] - found[t]) for a, t in zip(p, known, strict=True)]) + lump)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """One arm on one text against the reference, token by token: `chunks` is the chunk of each. `same`: both have the
    same likeliest token."""

    nll: Sequence[float]
    base_nll: Sequence[float]
    kld: Sequence[float]
    same: Sequence[bool]
    chunks: Sequence[int]

    def by_chunk(self, values: Sequence[float]) -> list[float]:
        """Sums of values by chunk, in the order of the chunks."""
        groups: dict[int, list[float]] = {}
        for chunk, value in zip(self.chunks, values, strict=True):
            groups.setdefault(chunk, []).append(value)
        return [math.fsum(group) for group in groups.values()]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure with its clustered standard error; None where it has none (a quantile)."""

    value: float
    error: float | None = None


def summarise(scores: Scores) -> dict[str, Figure]:
    """`ppl`, `ppl_ratio`, `kld.mean`, `kld.p99`, `kld.p999` and `top1` (a share) of an arm; errors of ratios by the delta method."""
    problem = _unusable(scores)
    if problem:
        raise ValueError(problem)
    tokens = [int(n) for n in scores.by_chunk([1.0] * len(scores.nll))]
    nll, nll_error = clustered_mean(scores.by_chunk(scores.nll), tokens)
    ratio, ratio_error = paired_log_ratio(scores.by_chunk(scores.base_nll), scores.by_chunk(scores.nll), tokens)
    kld = clustered_mean(scores.by_chunk(scores.kld), tokens)
    top = clustered_mean(scores.by_chunk([float(s) for s in scores.same]), tokens)
    ascending = sorted(scores.kld)
    return {
        "ppl": Figure(value=math.exp(nll), error=math.exp(nll) * nll_error),
        "ppl_ratio": Figure(value=math.exp(ratio), error=math.exp(ratio) * ratio_error),
        "kld.mean": Figure(value=kld[0], error=kld[1]),
        "top1": Figure(value=top[0], error=top[1]),
        **{f"kld.{name}": Figure(value=float(quantile(ascending, None, q) or 0.0)) for name, q in TAILS.items()},
    }


def _unusable(scores: Scores) -> str:
    """Why the tokens of an arm give no figure; empty when they do."""
    for name, values in (("nll", scores.nll), ("base_nll", scores.base_nll), ("kld", scores.kld)):
        bad = next((i for i, v in enumerate(values) if not 0 <= v < math.inf), None)
        if bad is not None:
            return f"{name} of token {bad} is {values[bad]}"
    return ""


def comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Why two texts were not scored alike, from what each was scored by (`scheme`, `corpus`, `tokenizer`, ...); empty when they were."""
    names = [n for n in dict.fromkeys((*one, *other)) if one.get(n) != other.get(n)]
    return "; ".join(f"{n}: {one.get(n)!r} and {other.get(n)!r}" for n in names)
