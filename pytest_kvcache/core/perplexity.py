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
from .stats import ALPHA

TAILS = {"p99": 0.99, "p999": 0.999}
MOST_LOG = 700.0  # exp of more is no float
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
    """The KL divergence from the log-probabilities of the likeliest tokens on both sides; what neither side tells is one lump. Never
    more than the divergence of the whole vocabulary, so a table that shows it must say so.

    A token that only the reference tells has no more on the other side than the least of those which that tells. What is left of the other
    side is shared out as it diverges least: in proportion to the reference, up to that cap.
    """
    known = [t for t in reference if t in found]
    p = [math.exp(reference[t]) for t in known]
    alone = sorted((math.exp(v) for t, v in reference.items() if t not in found), reverse=True)
    rest = max(0.0, 1 - math.fsum(p) - math.fsum(alone))
    free = max(0.0, 1 - math.fsum([math.exp(found[t]) for t in known])) + ROUNDING
    cap = math.exp(min(found.values(), default=0.0)) + ROUNDING
    terms = [a * (reference[t] - found[t]) for a, t in zip(p, known, strict=True)]
    left = rest + math.fsum(alone)
    while alone and alone[0] * free > cap * left:
        terms.append(alone[0] * math.log(alone[0] / cap))
        free, left = max(free - cap, ROUNDING), left - alone.pop(0)
    if left > 0:
        terms.append(left * math.log(left / free))
    return max(0.0, math.fsum(terms))


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
    """A figure with its clustered standard error; None where it has none (a quantile). `bounds`: the ends that 5 % of texts like it lie
    below and above of by chance; an end beyond what the text can show is -inf or inf."""

    value: float
    error: float | None = None
    bounds: tuple[float, float] = (-math.inf, math.inf)


def scores_of(tokens: Mapping[str, Sequence[Any]]) -> Scores:
    """From what a trace keeps of its scored tokens."""
    return Scores(
        nll=tokens["nll"], base_nll=tokens["base_nll"], kld=tokens["kld"], same=[bool(s) for s in tokens["same"]], chunks=tokens["chunk"]
    )


def summarise(scores: Scores) -> dict[str, Figure]:
    """`ppl`, `ppl_ratio`, `kld.mean`, `kld.p99`, `kld.p999` and `top1` (a share) of an arm; errors of ratios by the delta method."""
    problem = unusable(scores)
    if problem:
        raise ValueError(problem)
    tokens = [int(n) for n in scores.by_chunk([1.0] * len(scores.nll))]
    half = _half(len(tokens))
    nll = clustered_mean(scores.by_chunk(scores.nll), tokens)
    ratio = paired_log_ratio(scores.by_chunk(scores.base_nll), scores.by_chunk(scores.nll), tokens)
    kld = clustered_mean(scores.by_chunk(scores.kld), tokens)
    top = clustered_mean(scores.by_chunk([float(s) for s in scores.same]), tokens)
    return {
        "ppl": _exponential(*nll, half),
        "ppl_ratio": _exponential(*ratio, half),
        "kld.mean": _plain(*kld, half),
        "top1": _plain(*top, half, most=1.0),
        **{f"kld.{name}": _tail(scores, tokens, q, half) for name, q in TAILS.items()},
    }


def _half(chunks: int) -> float:
    """How many standard errors of so many chunks a bound lies away."""
    from scipy.special import stdtrit

    return float(stdtrit(chunks - 1, 1 - ALPHA))


def _plain(value: float, error: float, half: float, *, most: float = math.inf) -> Figure:
    """A figure that is not below 0."""
    return Figure(value=value, error=error, bounds=(max(0.0, value - half * error), min(most, value + half * error)))


def _exponential(log: float, error: float, half: float) -> Figure:
    """A figure from its logarithm; the error by the delta method."""
    low, high = (math.exp(min(log + side * half * error, MOST_LOG)) for side in (-1, 1))
    return Figure(value=math.exp(log), error=math.exp(log) * error, bounds=(low, high))


def _tail(scores: Scores, tokens: Sequence[int], q: float, half: float) -> Figure:
    """A quantile of the divergences. Its bounds are those of the share below it, turned back into divergences (Woodruff 1952, J. Amer.
    Statist. Assoc. 47:635): a share of tokens that depend on each other has a clustered error like any other mean."""
    ascending, n = sorted(scores.kld), len(scores.kld)
    value = float(quantile(ascending, None, q) or 0.0)
    _, error = clustered_mean(scores.by_chunk([float(v <= value) for v in scores.kld]), tokens)
    error = max(error, math.sqrt(q * (1 - q) / n))  # no text says more of it than independent tokens would

    def at(share: float) -> float:
        rank = math.ceil(share * n - 1e-9)
        return math.inf if rank > n else ascending[rank - 1] if rank >= 1 else 0.0

    return Figure(value=value, bounds=(at(q - half * error), at(q + half * error)))


def unusable(scores: Scores) -> str:
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
