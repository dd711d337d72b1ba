"""How a text is cut into windows and which of its tokens are scored: perplexities of two schemes are never compared. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .spec import SpecError

_BOS = {True: "bos", False: "nobos", None: "anybos"}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Windows of `window` tokens that begin every `stride` tokens. The tokens from `first` on are scored, of a window that overlaps the one
    before it only those that are new. `bos`: the first token of each window gives its place to the model's beginning-of-sequence token
    (None: where the model has one).
    `step` tokens go through the model in one pass: what a pass attends to of the passes before it, it reads from the KV cache, so a step as
    long as the window reads nothing back. 0 is such a step.
    """

    window: int = 512
    stride: int = 0
    first: int = 1
    bos: bool | None = False
    step: int = 0

    def __post_init__(self) -> None:
        lengths_fit = 0 <= self.stride <= self.window and 0 <= self.step <= self.window
        if not lengths_fit or not 1 <= self.first < self.window:
            raise SpecError(
                f"{self}: the first token of a window has no condition and is not scored, and neither the stride (0: as long as the "
                "window) nor the step (0: all at once) is longer than the window"
            )

    @property
    def advance(self) -> int:
        """Tokens from the beginning of one window to that of the next."""
        return self.stride or self.window

    @property
    def reads_back(self) -> bool:
        """Whether any scored token is predicted from what was read from the cache."""
        return 0 < self.step < self.window

    def __str__(self) -> str:
        """Its id: part of the identity of every figure."""
        return f"w{self.window}-s{self.advance}-f{self.first}-{_BOS[self.bos]}-r{self.step or self.window}"


@dataclass(frozen=True, kw_only=True)
class Window:
    """`tokens` go through the model from an empty cache; the one at each index from `first` on is scored, given those before it."""

    tokens: tuple[int, ...]
    first: int

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.first


# llama.cpp: tools/perplexity/perplexity.cpp (`first = n_ctx/2`, targets one later; BOS in the place of each window's first token).
# GPTQ and AWQ: windows of 2048 of the whole text, every token but the first of a window (IST-DASLab/gptq, llama.py).
PROTOCOLS = {
    "llama.cpp-512": Scheme(window=512, first=257, bos=True),
    "gptq-2048": Scheme(window=2048, first=1),
}


def windows(tokens: Sequence[int], scheme: Scheme, bos: int | None = None, most: int = 0) -> Iterator[Window]:
    """The whole windows of a text, at most so many; what is left at its end is not scored. `bos` is the model's token; SpecError where a
    scheme asks for it and there is none."""
    if scheme.bos and bos is None:
        raise SpecError(f"{scheme}: the model has no beginning-of-sequence token; choose a scheme without one")
    for n, start in enumerate(range(0, len(tokens) - scheme.window + 1, scheme.advance)):
        if most and n >= most:
            return
        cut = tuple(tokens[start : start + scheme.window])
        new = scheme.window - scheme.advance if n else 0
        yield Window(tokens=(bos, *cut[1:]) if scheme.bos is not False and bos is not None else cut, first=max(scheme.first, new))
