"""One streamed answer of an OpenAI-compatible server: token events, counts, outcome, from timed bytes. Pure.

Rules of the design, section 2. A *token event* has a choice and carries non-empty content, reasoning, text or a tool
call, or, where every such event states its usage (continuous usage), a larger `completion_tokens` than the one before.
Role-only, empty, usage-only and ping events and `[DONE]` are none. Counts are the server's own; events are never counted
as tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any

import msgspec

from .http1 import BadHttp, Body, body_of, split_head
from .record import OK
from .sse import Events

KEPT = 400  # characters of a failure's answer kept as its reason
GAVE_UP = frozenset(("abort", "error", "cancelled", "canceled", "timeout"))


MAX_COUNT = 2**53  # beyond, a number is no count of tokens
_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_COUNT)]


class _Usage(msgspec.Struct):
    completion_tokens: _Count | None = None
    prompt_tokens: _Count | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None
    function_call: dict[str, msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None
    object: str | None = None
    error_type: Any = None


_typed: Callable[[bytes], _Event] = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the answer is held against: output tokens, and whether the end of text was to be ignored. `textless` allows an answer without
    any text: random weights make tokens that the tokenizer does not have, and any other model that says nothing is broken. `by_length`
    takes `finish_reason: length` for a count: as many tokens came as were asked for, of a server whose streams tell no number."""

    osl: int
    ignore_eos: bool = True
    textless: bool = False
    by_length: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one answer says. `times` are the stamps of its token events, in the unit of the reads.

    `tokens` are the tokens of each event where that is known, else None; `answer_at` is the first token of answer text
    (no reasoning, no tool call). A failure keeps its first words in `error`, and what is known of it.
    """

    times: Sequence[int] = ()
    tokens: Sequence[int] | None = None
    answer_at: int | None = None
    output_tokens: int | None = None
    input_tokens: int | None = None
    status: int | None = None
    finish_reason: str | None = None
    outcome: str = OK
    error: str = ""
    notes: tuple[str, ...] = ()
    text: str = ""
    reasoning: str = ""

    @property
    def first_event_tokens(self) -> int:
        return max(1, self.tokens[0]) if self.tokens else 1

    def gaps(self) -> list[tuple[int, int]] | None:
        """(gap, tokens that came after it) for each event after the first; None when tokens per event are unknown."""
        if self.tokens is None:
            return None
        found, waited = [], 0
        for (a, b), n in zip(pairwise(self.times), self.tokens[1:], strict=True):
            waited += b - a
            if n:  # text that came without a token of its own is part of the wait for the next
                found.append((waited, n))
                waited = 0
        return found


def read_exchange(
    raw: bytes, read_ends: Sequence[int], stamps: Sequence[int], end: str, asked: Asked, *, keep_text: bool = False
) -> Answer:
    """An HTTP/1.1 answer as it came over the wire: read i ended at `read_ends[i]` and arrived at `stamps[i]`.

    `end` is how it ended: `complete`, `close`, `reset`, `stall`, or another class with its words (`class: words`).
    """
    name, _, words = end.partition(": ")
    try:
        split = split_head(raw)
        if split is None:
            return _no_head(name, words, len(raw))
        head, at = split
        body = body_of(raw, at, head)
    except BadHttp as e:
        return Answer(outcome="not_event_stream", error=str(e))
    return read_body(head.status, head.headers, body, read_ends, stamps, end, asked, keep_text=keep_text)


def read_body(
    status: int, headers: dict[str, str], body: Body, read_ends: Sequence[int], stamps: Sequence[int], end: str, asked: Asked,
    *, keep_text: bool = False,
) -> Answer:  # fmt: skip
    """The same for a body out of its framing, with status and headers."""
    if status != 200:
        return Answer(outcome="http_status", error=f"HTTP {status}: {_words(body.data)}", status=status)
    kind = headers.get("content-type", "")
    if "event-stream" not in kind.lower():
        return Answer(outcome="not_event_stream", error=f"content-type {kind or 'missing'}: {_words(body.data)}", status=status)
    if coding := headers.get("content-encoding", "").replace("identity", ""):
        return Answer(outcome="not_event_stream", error=f"the stream is compressed ({coding}); identity was asked for", status=status)
    events = body.events()
    stream = _Stream(keep_text=keep_text)
    try:
        stream.read(events, body.arrivals(events.ends, read_ends, stamps))
    except _Failed as e:
        return stream.failed(status, e.outcome, e.words)
    return stream.answer(status, end, asked)


def _no_head(name: str, words: str, size: int) -> Answer:
    if name == "stall":
        return Answer(outcome="stall_timeout", error=words or "no answer at all")
    seen = f"the answer ended after {size} bytes, before its headers were complete" if size else "the connection ended without an answer"
    outcome = "connection_reset" if name in ("complete", "close", "reset") else name
    return Answer(outcome=outcome, error=words or seen)


def _words(data: bytes) -> str:
    return data[: 4 * KEPT].decode(errors="replace").strip()[:KEPT]


class _Failed(Exception):
    def __init__(self, outcome: str, words: str) -> None:
        super().__init__(words)
        self.outcome, self.words = outcome, words


@dataclass(slots=True)
class _Stream:
    """The events of one stream, read once. `seen` has (stamp, completion tokens or None, carries text) of every event that
    may be a token event."""

    keep_text: bool = False
    seen: list[tuple[int, int | None, bool]] = field(default_factory=list)
    usage: _Usage = field(default_factory=_Usage)
    finish: str | None = None
    done: bool = False
    answer_at: int | None = None
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def read(self, events: Events, stamps: Sequence[int]) -> None:
        """All events in order; _Failed at the first that makes the answer a failure."""
        names, seen, keep = events.names, self.seen, self.keep_text
        decode, count = _typed, None
        for i, data in enumerate(events.data):
            try:
                event = decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                if names.get(i) == b"error":
                    raise _Failed("stream_error", _words(data)) from None
                if names.get(i) == b"ping":
                    continue
                odd = self._odd(data)
                if self.done:
                    break
                if odd is None:
                    continue
                event = odd
            if event.error or event.object == "error" or (names and names.get(i) == b"error"):
                raise _Failed("stream_error", _error_words(event, data))
            if event.usage is not None:
                self.usage, count = event.usage, event.usage.completion_tokens
            if not event.choices:
                continue
            texted = False
            for choice in event.choices:
                if choice.finish_reason:
                    self.finish = choice.finish_reason
                delta = choice.delta
                if choice.text or (delta is not None and delta.content):
                    texted = True
                    if self.answer_at is None:
                        self.answer_at = stamps[i]
                elif delta is not None and (delta.reasoning_content or delta.reasoning or delta.tool_calls or delta.function_call):
                    texted = True
                if keep:
                    self._keep(choice)
            if texted or event.usage is not None:
                seen.append((stamps[i], count if event.usage is not None else None, texted))

    def _odd(self, data: bytes) -> _Event | None:
        """An event that the strict decoder refuses: the end mark, a ping, JSON of unexpected types; _Failed when it is no JSON object."""
        stripped = data.strip()
        if stripped == b"[DONE]":
            self.done = True
            return None
        if not stripped:
            return None
        try:
            value = json.loads(stripped)
        except (ValueError, RecursionError):
            raise _Failed("bad_json", f"an event is not JSON: {_words(data)}") from None
        if not isinstance(value, dict):
            raise _Failed("bad_json", f"an event is no JSON object: {_words(data)}")
        return _loose(value)

    def _keep(self, choice: _Choice) -> None:
        delta = choice.delta or _Delta()
        self.text.append(choice.text or delta.content or "")
        self.reasoning.append(delta.reasoning_content or delta.reasoning or "")

    def failed(self, status: int, outcome: str, words: str) -> Answer:
        """A failure with what came before it: partial events count for nothing but are named."""
        times = [at for at, _, texted in self.seen if texted]
        return Answer(
            times=times, output_tokens=self.usage.completion_tokens, status=status, finish_reason=self.finish, outcome=outcome,
            error=words[:KEPT].encode(errors="replace").decode(), text="".join(self.text), reasoning="".join(self.reasoning),
        )  # fmt: skip

    def answer(self, status: int, end: str, asked: Asked) -> Answer:
        """The answer, or the class of failure that its end or its content make it."""
        n, by_length = self.usage.completion_tokens, False
        if n is None and asked.by_length and self.finish == "length":
            n, by_length = asked.osl, True
        times, tokens = self._token_events(asked.textless, n)
        if failure := self._failure(end, asked, len(times), n):
            return self.failed(status, *failure)
        return Answer(
            times=times, tokens=tokens, answer_at=self.answer_at, output_tokens=n, input_tokens=self.usage.prompt_tokens, status=status,
            finish_reason=self.finish, notes=self._notes(times, tokens, n) + ("counted_by_length",) * by_length,
            text="".join(self.text), reasoning="".join(self.reasoning),
        )  # fmt: skip

    def _token_events(self, textless: bool, n: int | None) -> tuple[list[int], list[int] | None]:
        """Stamps of the token events and the tokens of each, if known: by continuous usage, or one each when the sums agree."""
        counts = [count for _, count, texted in self.seen if texted]
        # One count alone is that of the whole answer.
        stated = None not in counts if counts else textless and len({count for _, count, _ in self.seen if count}) > 1
        if not stated:
            times = [at for at, _, texted in self.seen if texted]
            return times, [1] * len(times) if len(times) == n else None
        times, tokens, before = [], [], 0
        for at, count, texted in self.seen:
            grown = (count or 0) - before
            if texted or grown > 0:
                times.append(at)
                tokens.append(max(0, grown))
                before += tokens[-1]
        return times, tokens

    def _failure(self, end: str, asked: Asked, events: int, n: int | None) -> tuple[str, str] | None:
        name, _, words = end.partition(": ")
        if self.finish in GAVE_UP:
            return "aborted", f"finish_reason {self.finish}"
        if not self.done and self.finish is None and name == "reset":
            return "connection_reset", words or f"the connection was reset after {events} token events"
        if not self.done and self.finish is None:
            if name == "stall":
                return "stall_timeout", words or f"nothing more came after {events} token events"
            if name not in ("complete", "close"):
                return name, words
            return "truncated_stream", f"ended after {events} token events without finish_reason or [DONE]"
        if asked.by_length and n is None and self.finish is None:
            return "truncated_stream", f"ended after {events} token events without finish_reason, by which they are counted"
        if not events:
            return "empty_output", "no token event in the whole answer"
        if asked.ignore_eos and asked.by_length and self.finish == "stop":
            return "short_output", f"the text ended (finish_reason stop) before the {asked.osl} tokens asked for"
        if asked.ignore_eos and n is not None and n < asked.osl:
            return "short_output", f"{n} output tokens of {asked.osl} asked for"
        return None

    def _notes(self, times: Sequence[int], tokens: Sequence[int] | None, n: int | None) -> tuple[str, ...]:
        many = n is not None and n > len(times) if tokens is None else any(t > 1 for t in tokens)
        off = n is not None and (n < len(times) if tokens is None else n != sum(tokens))
        noted = {
            "missing_done": not self.done,
            "missing_finish_reason": self.finish is None,
            "usage_missing": n is None,
            "multi_token_events": many,
            "event_tokens_unknown": many and tokens is None,
            "first_event_multi_token": bool(tokens) and tokens is not None and tokens[0] > 1,
            "token_count_mismatch": off,
            "coalesced_reads": len(set(times)) < len(times),
        }
        return tuple(name for name, holds in noted.items() if holds)


def _error_words(event: _Event, data: bytes) -> str:
    error = event.error
    if isinstance(error, dict) and error.get("message") and isinstance(error["message"], str):
        code = error.get("code") or error.get("type")
        return error["message"] + (f" ({code})" if code and isinstance(code, str | int) else "")
    if isinstance(error, str):
        return error + (f" ({event.error_type})" if isinstance(event.error_type, str) else "")
    return _words(data)


def _is(kind: type[Any], value: Any) -> Any:
    return value if isinstance(value, kind) and not (kind is int and isinstance(value, bool)) else None


def _loose(value: dict[str, Any]) -> _Event:
    """An event of any shape: what has an unexpected type counts as absent."""
    usage = _is(dict, value.get("usage"))
    choices = [_loose_choice(c) for c in _is(list, value.get("choices")) or () if isinstance(c, dict)]
    counted = None
    if usage:
        counted = _Usage(
            *(n if (n := _is(int, usage.get(k))) is not None and 0 <= n <= MAX_COUNT else None for k in _Usage.__struct_fields__)
        )
    return _Event(
        choices=choices, usage=counted, error=value.get("error"), error_type=value.get("error_type"), object=_is(str, value.get("object"))
    )


def _loose_choice(value: dict[str, Any]) -> _Choice:
    inner = _is(dict, value.get("delta")) or {}
    words = {k: _is(str, inner.get(k)) for k in ("content", "reasoning_content", "reasoning")}
    calls = [msgspec.Raw(b"0")] * len(_is(list, inner.get("tool_calls")) or ())
    delta = _Delta(**words, tool_calls=calls, function_call=_is(dict, inner.get("function_call")))
    return _Choice(text=_is(str, value.get("text")), delta=delta, finish_reason=_is(str, value.get("finish_reason")))
