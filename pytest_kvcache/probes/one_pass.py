"""Tokens through a model of transformers all at once, without a cache: the floor of every figure, and the fault `fresh`."""

from __future__ import annotations

from typing import Any

import torch


class Hidden:
    """What a model makes of tokens before its head, which is applied to a few of them at a time: logits of all would be the greatest
    thing in memory."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.model = model
        self.tokens = torch.tensor([tokens], device=model.device)
        self.output = model.base_model(self.tokens, use_cache=False)

    def logits(self, start: int, end: int) -> Any:
        """Of these tokens. The model's own forward applies the head, since some models scale or cap what comes out of it (Gemma's
        `final_logit_softcapping`, Granite's `logits_scaling`); only its base gives back what is known already."""
        rows = type(self.output)(last_hidden_state=self.output.last_hidden_state[:, start:end])
        base = self.model.base_model
        base.forward = lambda *_, **__: rows
        try:
            return self.model(self.tokens[:, start:end], use_cache=False).logits[0].float().cpu().numpy()
        finally:
            del base.forward  # the class's own is seen again


class OnePass:
    """The whole window at once."""

    def __init__(self, model: Any, tokens: list[int]) -> None:
        self.hidden, self.at = Hidden(model, tokens), 0

    def logits(self, tokens: list[int]) -> Any:
        self.at += len(tokens)
        return self.hidden.logits(self.at - len(tokens), self.at)

    def cache_bytes(self) -> int:
        return 0


class Fresh:
    """Each step anew, with all before it, filled up to `length` tokens: what follows a token changes nothing of it, but the order of sums
    depends on how many there are, and so a window's figures are exactly those of one pass."""

    def __init__(self, model: Any, length: int) -> None:
        self.model, self.length = model, length
        self.seen: list[int] = []

    def logits(self, tokens: list[int]) -> Any:
        start = len(self.seen)
        self.seen += tokens
        end = len(self.seen)
        return Hidden(self.model, self.seen + self.seen[-1:] * (self.length - end)).logits(start, end)

    def cache_bytes(self) -> int:
        return 0
