"""Perplexity of one text under two models, compared chunk by chunk. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def paired_log_ratio(base_nll: Sequence[float], new_nll: Sequence[float], tokens: Sequence[int]) -> tuple[float, float]:
    """ln(PPL_new / PPL_base) and its standard error, from the sums of negative log-likelihoods (nats) and the tokens of each chunk.

    A ratio estimator clustered by chunk: tokens of a chunk depend on each other, so that an error per token would be too
    small. Needs at least two chunks.
    """
    chunks, total = len(tokens), sum(tokens)
    if chunks < 2 or not len(base_nll) == len(new_nll) == chunks:
        raise ValueError(f"{len(base_nll)}, {len(new_nll)} and {chunks} chunks: at least two are needed, as many on both sides")
    gaps = [new - base for base, new in zip(base_nll, new_nll, strict=True)]
    ratio = math.fsum(gaps) / total
    squares = math.fsum([(gap - ratio * n) ** 2 for gap, n in zip(gaps, tokens, strict=True)])
    return ratio, math.sqrt(chunks / (chunks - 1) * squares) / total
