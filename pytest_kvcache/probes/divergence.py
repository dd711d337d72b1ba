"""Two models' logits on the same tokens, row by row: negative log-likelihoods, KL divergence of the whole vocabulary, equal top tokens.

Runs in an engine's interpreter; needs numpy only. Sums over a vocabulary are made in float64: a divergence of 1e-6 nats is the difference
of 50,000 terms of float32.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

ROUNDING = 1e-5  # a divergence below 0 by this much is one of 0


def log_softmax(logits: Any) -> Any:
    """Natural log-probabilities, float32, of rows of logits [tokens, vocabulary]. ValueError for a row that has none (NaN, all -inf)."""
    rows = np.array(logits, dtype=np.float32, ndmin=2)  # a copy: the engine's buffer is its own
    rows -= rows.max(axis=1, keepdims=True)
    sums = np.exp(rows).sum(axis=1, dtype=np.float64)
    if not np.isfinite(sums).all():
        raise ValueError("the engine's logits are not finite")
    rows -= np.log(sums).astype(np.float32)[:, None]
    return rows


class Tokens:
    """What an arm scored, token by token, and the seconds that comparing took."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Any]] = {"nll": [], "kld": [], "same": []}
        self.seconds = 0.0

    def add(self, reference: Any, logits: Any, targets: Any) -> None:
        """Rows of a step: the `reference`'s log-probabilities, the arm's logits, the token that each should predict."""
        began = time.perf_counter()
        found = log_softmax(logits)
        self.parts["nll"].append(-np.take_along_axis(found, targets[:, None], axis=1)[:, 0])
        self.parts["same"].append(found.argmax(axis=1) == reference.argmax(axis=1))
        np.subtract(reference, found, out=found)
        found *= np.exp(reference)
        kld = found.sum(axis=1, dtype=np.float64)
        if (kld < -ROUNDING).any():
            raise ValueError(f"a divergence of {kld.min()}: the reference's probabilities do not sum to 1")
        self.parts["kld"].append(np.maximum(kld, 0.0))
        self.seconds += time.perf_counter() - began

    def arrays(self, name: str) -> dict[str, Any]:
        """One array a figure, named `name/figure`."""
        return {f"{name}/{figure}": np.concatenate(parts) for figure, parts in self.parts.items()}
