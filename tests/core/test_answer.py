"""One streamed answer: what is a token event, how many tokens it holds, which class of failure; nothing that comes raises."""

import json
import tracemalloc
from itertools import accumulate

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.answer import KEPT, Answer, Asked, read_exchange
from pytest_kvcache.core.record import OK

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"
ASKED = Asked(osl=3, ignore_eos=False)
OUTCOMES = {
    OK, "stream_error", "truncated_stream", "short_output", "aborted", "empty_output", "bad_json", "not_event_stream", "connection_reset",
    "stall_timeout", "http_status",
}  # fmt: skip


def read(*parts: bytes, end="close", asked=ASKED, head=HEAD) -> Answer:
    """The answer whose head comes at 0 and whose further reads come at 10, 20, …"""
    reads = [head, *parts]
    return read_exchange(b"".join(reads), list(accumulate(map(len, reads))), range(0, 10 * len(reads), 10), end, asked, keep_text=True)


def event(**value) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def used(n, prompt=2):
    return {"usage": {"prompt_tokens": prompt, "completion_tokens": n}}


def delta(finish=None, usage=None, **inner) -> bytes:
    """A chunk of a chat; `usage` where every chunk states it."""
    return event(choices=[{"index": 0, "delta": inner, "finish_reason": finish}], **({} if usage is None else used(usage)))


def text(words="x", finish=None, usage=None) -> bytes:
    """A chunk of a completion."""
    return event(choices=[{"index": 0, "text": words, "finish_reason": finish}], **({} if usage is None else used(usage)))


def last(n) -> bytes:
    return event(choices=[], **used(n))


def test_the_length_that_was_asked_for_is_a_count_only_where_the_stream_ended_for_it():
    told, asked = (text("a"), text("b"), text("c"), text("", "length"), DONE), Asked(osl=3, by_length=True)
    found = read(*told, asked=asked)
    assert (found.outcome, found.times, found.tokens, found.output_tokens) == (OK, [10, 20, 30], [1, 1, 1], 3)
    assert found.notes == ("counted_by_length",)
    assert read(*told, asked=Asked(osl=3)).notes == ("usage_missing",)
    joined = read(text("a"), text("bc"), text("", "length"), DONE, asked=asked)
    assert (joined.tokens, joined.output_tokens) == (None, 3), "which event had two is not known"
    ended = read(text("a"), text("", "stop"), DONE, asked=asked)
    assert (ended.outcome, ended.error) == ("short_output", "the text ended (finish_reason stop) before the 3 tokens asked for")
    assert read(*told[:3], DONE, asked=asked).outcome == "truncated_stream", "llama.cpp's server ends a stream that another interrupts so"
    assert read(*told[:4], last(2), DONE, asked=asked).outcome == "short_output", "a count of the server's own goes before it"


def test_tokens_without_any_text_are_counted_where_every_event_states_them():
    """Random weights make tokens that the tokenizer does not have."""
    told, random = (text("", usage=1), text("", usage=2), text("", "length", usage=3), last(3), DONE), Asked(osl=3, textless=True)
    assert read(*told).outcome == "empty_output", "any other model that says nothing is broken"
    found = read(*told, asked=random)
    assert (found.outcome, found.times, found.tokens, found.output_tokens) == (OK, [10, 20, 30], [1, 1, 1], 3)
    assert read(text(""), text("", "length"), last(3), DONE, asked=random).outcome == "empty_output"
    assert read(text(""), text("", "length", usage=3), DONE, asked=random).outcome == "empty_output"


def test_a_whole_answer():
    found = read(
        delta(role="assistant", content=""), delta(content="a"), delta(content="b"), delta(content="c"), delta("length"), last(3), DONE
    )
    assert found == Answer(
        times=[20, 30, 40], tokens=[1, 1, 1], answer_at=20, output_tokens=3, input_tokens=2, status=200, finish_reason="length", text="abc"
    )
    assert found.gaps() == [(10, 1), (10, 1)] and found.first_event_tokens == 1


# --- token events and their tokens ---

CALL = {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}


@pytest.mark.parametrize(("part", "answer", "reasoning"), [
    ({"content": "x"}, True, ""), ({"reasoning_content": "x"}, False, "x"), ({"reasoning": "x"}, False, "x"), (CALL, False, ""),
    ({"function_call": {"arguments": "{"}}, False, ""), ({"content": "x", "reasoning": "y"}, True, "y"), ({"content": None, **CALL}, False, ""),
    ({"content": "x", "unheard_of": [1, {"a": None}]}, True, ""), ({"content": "x", "tool_calls": None, "role": 7}, True, ""),
    ({"content": ["x"], "reasoning": "y"}, False, "y"),
])  # fmt: skip
def test_whatever_carries_a_token_is_a_token_event(part, answer, reasoning):
    found = read(delta(**part), delta("stop"), last(1), DONE)
    assert (found.outcome, list(found.times), found.answer_at) == (OK, [10], 10 if answer else None)
    assert (found.tokens, found.reasoning) == ([1], reasoning)


@pytest.mark.parametrize("part", [
    delta(), delta(role="assistant"), delta(content=""), delta(content=None, reasoning="", reasoning_content="", tool_calls=[], function_call={}),
    text(""), event(choices=[]), event(choices=None), event(choices=None, usage=None), event(), event(choices=[{}]), event(choices=[None]),
    event(choices={}), event(choices="x"), event(choices=7), event(choices=[[]]), event(choices=[{"delta": "x"}]), event(choices=[{"text": 5}]),
    event(choices=[{"delta": {"content": 5, "tool_calls": "x"}}]), event(error=None, choices=[]), event(object="chat.completion.chunk"),
    b": ping\n\n", b"data\n\n", b"data: \n\n", b"data:  \n\n", b"event: ping\ndata: {}\n\n", b"event: ping\ndata:\n\n", b"event: error\n\n",
    event(choices=[], usage=7), event(choices=[], usage=[]), event(choices=[], usage=None),
])  # fmt: skip
def test_what_carries_none_is_no_event_and_no_failure(part):
    found = read(part, text("a"), part, text("b", "stop"), last(2), part, DONE)
    assert (found.outcome, list(found.times), found.tokens, found.output_tokens, found.notes) == (OK, [20, 40], [1, 1], 2, ())


def test_the_answer_begins_after_the_reasoning():
    found = read(delta(reasoning="a"), delta(reasoning_content="b"), delta(content="c"), delta("stop"), last(3), DONE)
    assert (found.times[0], found.answer_at, found.reasoning, found.text) == (10, 30, "ab", "c")


def test_two_choices_are_one_event_when_they_come_in_one():
    both = event(choices=[{"index": i, "delta": {"content": c}} for i, c in enumerate("ab")])
    found = read(both, both, delta("stop"), last(4), DONE)
    assert (list(found.times), found.tokens, found.output_tokens, found.notes) == (
        [10, 20],
        None,
        4,
        ("multi_token_events", "event_tokens_unknown"),
    )
    other = event(choices=[{"index": 1, "delta": {"reasoning": "a"}, "finish_reason": "stop"}, {"index": 0, "delta": {}}])
    assert list(read(other, last(1), DONE).times) == [10]


@pytest.mark.parametrize(("parts", "times", "tokens", "n", "notes"), [
    ([text("a", usage=1), text("b", usage=4), text("c", "stop", 5)], [10, 20, 30], [1, 3, 1], 5, {"multi_token_events"}),
    ([text("a", usage=3), text("b", "stop", 4)], [10, 20], [3, 1], 4, {"multi_token_events", "first_event_multi_token"}),
    # Tokens that show no text yet: their event is the first.
    ([text("", usage=0), text("", usage=2), text("a", "stop", 3)], [20, 30], [2, 1], 3, {"multi_token_events", "first_event_multi_token"}),
    ([delta(role="assistant", usage=0), delta(usage=1), delta(content="a", usage=2), delta("stop", usage=2)], [20, 30], [1, 1], 2, set()),
    # The last, empty chunk may hold the token that ended the text.
    ([text("a", usage=1), text("b", usage=2), text("", "stop", 3)], [10, 20, 30], [1, 1, 1], 3, set()),
    # Usage that only grows behind the text, or shrinks.
    ([text("a", usage=1), text("b", usage=1), text("c", "stop", 3)], [10, 20, 30], [1, 0, 2], 3, {"multi_token_events"}),
    ([text("a", usage=3), text("b", usage=1), text("c", "stop", 5)], [10, 20, 30], [3, 0, 2], 5, {"multi_token_events", "first_event_multi_token"}),
    ([text("a", usage=1), text("b", usage=2), last(9), text("", "stop")], [10, 20], [1, 1], 9, {"token_count_mismatch"}),
    # One chunk with text and without usage: nothing is known of any event but by the sum.
    ([text("a", usage=1), text("b"), text("c", "stop", 3)], [10, 20, 30], [1, 1, 1], 3, set()),
    ([text("a", usage=1), text("b"), text("c", "stop", 4)], [10, 20, 30], None, 4, {"multi_token_events", "event_tokens_unknown"}),
    # Usage with the last text only.
    ([text("a"), text("b"), event(choices=[{"text": "", "finish_reason": "stop"}], **used(2))], [10, 20], [1, 1], 2, set()),
    ([text("a"), text("b", "stop"), last(7)], [10, 20], None, 7, {"multi_token_events", "event_tokens_unknown"}),
    ([text("a"), text("b", "stop"), last(1)], [10, 20], None, 1, {"token_count_mismatch"}),
    ([text("a"), text("b", "stop"), last(0)], [10, 20], None, 0, {"token_count_mismatch"}),
    ([text("a"), text("b", "stop")], [10, 20], None, None, {"usage_missing"}),
    ([text("abc", "stop", 3)], [10], [3], 3, {"multi_token_events", "first_event_multi_token"}),
])  # fmt: skip
def test_tokens_of_events(parts, times, tokens, n, notes):
    found = read(*parts, DONE)
    assert (found.outcome, list(found.times), found.tokens, found.output_tokens, set(found.notes)) == (OK, times, tokens, n, notes)
    assert found.first_event_tokens == (tokens[0] if tokens else 1)


@pytest.mark.parametrize("count", [-1, True, "3", 3.0, 2.5, None, [], {}, 2**63, 10**30])
def test_a_count_that_is_none_is_absent(count):
    for parts in (
        [text("a"), text("b", "stop"), event(choices=[], usage={"completion_tokens": count, "prompt_tokens": count})],
        [text("a", "stop", count)],
    ):
        found = read(*parts, DONE)
        assert (found.outcome, found.output_tokens, found.input_tokens) == (OK, None, 2 if len(parts) == 1 and count is not None else None)
        assert "usage_missing" in found.notes and found.tokens is None and found.gaps() is None


def test_events_of_one_read_have_its_stamp_and_are_noted():
    found = read(text("a") + text("b")[:20], text("b")[20:] + text("c", "stop") + last(3) + DONE)
    assert (list(found.times), found.tokens, found.notes) == ([10, 20, 20], [1, 1, 1], ("coalesced_reads",))


def test_the_head_may_come_in_the_same_read_as_tokens_and_in_pieces():
    whole = HEAD + text("a") + text("b", "stop") + last(2) + DONE
    assert list(read(head=whole).times) == [0, 0]
    single = [whole[i : i + 1] for i in range(len(whole))]
    first = 10 * (len(HEAD + text("a")) - 1)
    assert list(read(*single[1:], head=single[0]).times) == [first, first + 10 * len(text("b", "stop"))]


# --- ways to end ---

GOOD = [text("a"), text("b"), text("c", "stop"), last(3), DONE]


@pytest.mark.parametrize(("parts", "end", "outcome", "notes"), [
    (GOOD, "close", OK, ()), (GOOD, "complete", OK, ()), (GOOD, "reset", OK, ()), (GOOD, "stall: nothing", OK, ()),
    (GOOD[:-1], "close", OK, ("missing_done",)), (GOOD[:-1], "complete", OK, ("missing_done",)), (GOOD[:-1], "stall: nothing", OK, ("missing_done",)),
    (GOOD[:-1], "reset", OK, ("missing_done",)), ([*GOOD[:2], last(2), DONE], "close", OK, ("missing_finish_reason",)),
    (GOOD[:2], "close", "truncated_stream", None), (GOOD[:2], "complete", "truncated_stream", None), (GOOD[:2], "reset", "connection_reset", None),
    (GOOD[:2], "stall: nothing", "stall_timeout", None), ([], "close", "truncated_stream", None), ([], "stall: nothing", "stall_timeout", None),
    ([DONE], "close", "empty_output", None), ([text("", "stop"), last(0), DONE], "close", "empty_output", None),
    ([text("", "stop", 0), DONE], "close", "empty_output", None), ([*GOOD[:2], text("", "abort"), DONE], "close", "aborted", None),
    ([*GOOD[:2], text("", "error"), DONE], "close", "aborted", None), ([text("a")[:-1]], "close", "truncated_stream", None),
    ([b"data: [DONE]"], "close", "truncated_stream", None), (GOOD[:2], "stream_error: too long", "stream_error", None),
])  # fmt: skip
def test_how_it_ends(parts, end, outcome, notes):
    found = read(*parts, end=end)
    assert found.outcome == outcome and (found.error == "") == (outcome == OK)
    if outcome == OK:
        assert found.notes == notes
    elif ": " in end and outcome != "empty_output":
        assert found.error == end.partition(": ")[2], "the words of the end are kept"
    else:
        assert len(found.times) == sum(part in GOOD[:3] for part in parts), "what came before is named"


def test_short_output_counts_only_where_the_end_of_text_was_to_be_ignored():
    parts = [text("a"), text("b", "stop"), last(2), DONE]
    assert read(*parts, asked=Asked(osl=3, ignore_eos=False)).outcome == OK
    found = read(*parts, asked=Asked(osl=3))
    assert (found.outcome, found.output_tokens, found.error) == ("short_output", 2, "2 output tokens of 3 asked for")
    assert read(*parts, asked=Asked(osl=2)).outcome == OK
    assert read(*parts[:2], DONE, asked=Asked(osl=3)).notes == ("usage_missing",), "unknown is not short"


@pytest.mark.parametrize(("part", "words"), [
    (event(error={"message": "no memory", "type": "ServerError", "code": 500}), "no memory (500)"), (event(error={"message": "gone", "type": "T"}), "gone (T)"),
    (event(error={"message": "gone"}), "gone"), (event(error="no memory", error_type="generation"), "no memory"),
    (event(error={"reason": "other shape"}), '{"error": {"reason": "other shape"}}'), (event(error=7), '{"error": 7}'), (event(error=["a"]), '{"error": ["a"]}'),
    (event(object="error", message="bad request", code=400), '{"object": "error", "message": "bad request", "code": 400}'),
    (b"event: error\n" + event(message="engine died"), '{"message": "engine died"}'), (b"event: error\ndata: engine died\n\n", "engine died"),
    (b'event: error\ndata: "died"\n\n', '"died"'), (b"event: error\n" + event(choices=[{"text": "x"}]), '{"choices": [{"text": "x"}]}'),
    (event(error={"message": "x"}, choices="odd"), "x"), (event(error={"message": "x", "code": 10**400}), "x"), (event(error={"message": {"a": 1}}), '{"message": {"a": 1}}'),
])  # fmt: skip
def test_an_error_in_the_stream_fails_it_and_keeps_its_words(part, words):
    for before, after in (([], []), ([text("a")], [DONE]), ([text("a")], [text("b", "stop"), last(2), DONE])):
        found = read(*before, part, *after)
        assert (found.outcome, len(found.times)) == ("stream_error", len(before))
        assert words in found.error and len(found.error) <= KEPT


@pytest.mark.parametrize(
    "data", [b"{broken", b'{"choices": [', b"[1]", b"null", b"7", b'"x"', b"{} {}", b"\xff", b"{'a': 1}", b"[DONE", b'{"a": \xff}']
)
def test_an_event_that_is_no_json_object_fails_and_is_kept(data):
    found = read(text("a"), b"data: " + data + b"\n\n", *GOOD)
    assert (found.outcome, len(found.times)) == ("bad_json", 1)
    assert data.decode(errors="replace") in found.error


@pytest.mark.parametrize(("status", "headers", "outcome", "words"), [
    (503, "content-type: application/json\r\n", "http_status", "HTTP 503: data: hello"), (201, "content-type: text/event-stream\r\n", "http_status", "HTTP 201"),
    (200, "content-type: text/html\r\n", "not_event_stream", "content-type text/html: data: hello"),
    (200, "", "not_event_stream", "content-type missing"), (200, "content-type: application/json\r\n", "not_event_stream", "hello"),
    (200, "content-type: text/event-stream\r\ncontent-encoding: gzip\r\n", "not_event_stream", "compressed (gzip)"),
])  # fmt: skip
def test_other_answers_keep_their_first_words(status, headers, outcome, words):
    found = read(b"data: hello" + b"o" * 5000, head=f"HTTP/1.1 {status} X\r\n{headers}\r\n".encode())
    assert (found.outcome, found.status, found.times, found.output_tokens) == (outcome, status, (), None)
    assert words in found.error and len(found.error) < KEPT + 100


@pytest.mark.parametrize(
    "header", ["Text/Event-Stream", "text/event-stream;charset=UTF-8", "text/event-stream\r\ncontent-encoding: identity"]
)
def test_the_type_may_be_written_in_any_way(header):
    assert read(*GOOD, head=f"HTTP/1.1 200 OK\r\nContent-Type: {header}\r\n\r\n".encode()).outcome == OK


@pytest.mark.parametrize(("raw", "end", "outcome", "words"), [
    (b"", "close", "connection_reset", "without an answer"), (b"", "reset", "connection_reset", ""), (b"", "stall: nothing for 2 s", "stall_timeout", "nothing for 2 s"),
    (b"", "stall", "stall_timeout", "no answer"), (b"", "connection_reset: cannot connect", "connection_reset", "cannot connect"),
    (HEAD[:20], "close", "connection_reset", "after 20 bytes"), (HEAD[:20], "stall: x", "stall_timeout", "x"), (b"SSH-2.0-x", "close", "not_event_stream", "SSH"),
    (HEAD[:-2] + b"transfer-encoding: chunked\r\n\r\nhello\r\n", "close", "not_event_stream", "hello"),
])  # fmt: skip
def test_what_is_no_answer_at_all(raw, end, outcome, words):
    found = read(head=raw, end=end)
    assert (found.outcome, found.status, found.times) == (outcome, None, ())
    assert words in found.error


# --- whatever comes ---

ENDS = st.sampled_from(["close", "complete", "reset", "stall: nothing", "stall"])
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["stop", "abort", "\ud800", 2**64, -(10**400)])
)
names = st.sampled_from(["choices", "delta", "text", "content", "reasoning", "tool_calls", "function_call", "usage", "completion_tokens", "prompt_tokens",
                         "error", "message", "code", "type", "object", "finish_reason"])  # fmt: skip
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=4), max_leaves=14)
objects = st.dictionaries(names, values, max_size=4)
choices = st.lists(st.fixed_dictionaries({}, optional={"delta": objects, "text": values, "finish_reason": values}), max_size=2)
chunks = st.fixed_dictionaries({}, optional={"choices": choices, "usage": objects | values, "error": st.none() | values})


@pytest.mark.parametrize("key", [b"message", b"code"])
def test_no_depth_of_an_error_raises(key):
    """What the decoder just takes must not be too deep for whatever is done with it."""
    for depth in range(960, 1010):
        sane(read(b'data: {"error": {"message": "x", "' + key + b'": ' + b'{"a": ' * depth + b"1" + b"}" * depth + b"}}\n\n"))


def sane(found: Answer) -> None:
    """An answer that counts is whole, one that does not says why, and both cross to another process."""
    assert found.outcome in OUTCOMES
    assert (found.error == "") <= (found.outcome in (OK, "stream_error"))
    assert list(found.times) == sorted(found.times) and (found.tokens is None or len(found.tokens) == len(found.times))
    assert found.outcome != OK or found.times
    msgspec.msgpack.encode(
        [list(found.times), found.tokens, found.output_tokens, found.input_tokens, found.status, found.outcome, found.error, found.notes]
    )


@given(st.lists(st.one_of(chunks, objects, values), max_size=4), ENDS, st.booleans())
def test_no_json_raises(events, end, done):
    parts = [b"data: " + json.dumps(value).encode() + b"\n\n" for value in events]
    sane(read(*parts, *[DONE] * done, end=end, asked=Asked(osl=2)))


@given(st.lists(st.binary(max_size=30), max_size=4), ENDS)
def test_no_event_raises(events, end):
    sane(read(*[b"data: " + data + b"\n\n" for data in events], end=end))


@given(st.binary(max_size=80), ENDS, st.sampled_from([b"", HEAD, HEAD[:-2] + b"transfer-encoding: chunked\r\n\r\n", b"HTTP/1.1 "]))
def test_no_bytes_raise(data, end, start):
    sane(read(data, head=start, end=end))


@given(st.data(), ENDS)
def test_no_cut_raises(data, end):
    raw = HEAD + b"".join(GOOD)
    cut = data.draw(st.integers(0, len(raw)))
    found = read(head=raw[:cut], end=end)
    sane(found)
    assert found.outcome != OK or cut >= len(raw) - len(GOOD[-1] + GOOD[-2]), (
        "only the whole, or all but the end mark and the usage, is an answer"
    )


DEEP = 3 * 10**5
ODD = {
    "nested lists": b'{"error": ' + b"[" * DEEP + b"]" * DEEP + b"}", "nested objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "nested not so deep": b'{"error": {"message": ' + b"[" * 700 + b"]" * 700 + b"}}", "nested choices": b'{"choices": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a long number": b'{"usage": {"completion_tokens": ' + b"9" * DEEP + b"}}", "a long code": b'{"error": {"message": "x", "code": ' + b"9" * 5000 + b"}}",
    "a long message": b'{"error": {"message": ' + b"9" * 4000 + b"}}", "a large exponent": b'{"usage": {"completion_tokens": 1e999}}',
    "NaN": b'{"usage": {"completion_tokens": NaN}, "error": Infinity}', "half a pair": b'{"error": "\\ud800 x"}', "half a pair in a code": b'{"error": {"message": "\\udfff", "code": "\\ud800"}}',
    "half a pair raw": b'{"error": "\xed\xa0\x80 x"}', "half a pair as the reason": b'{"choices": [{"finish_reason": "\\ud800", "text": "\\udc00"}]}',
    "another encoding": '{"error": "x"}'.encode("utf-16"), "twice the same": b'{"error": null, "error": "x"}',
}  # fmt: skip


@pytest.mark.parametrize("data", ODD.values(), ids=ODD)
def test_odd_json_does_not_raise(data):
    sane(read(text("a"), b"data: " + data + b"\n\n", DONE))


UNITS = {
    "texts": text("a"), "comments": b": x\n\n", "CR": b"\r", "no line end": b"x", "one long event": b"data: x\n", "empty events": b"data\n\n", "names": b"event: error\n\n",
    "usage": text("", usage=1), "brackets": b"[", "digits": b"9", "open strings": b'data: {"a": "', "mixed": b"data: {}\r\n\r",
}  # fmt: skip


@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS)
def test_memory_is_in_proportion_to_the_answer(unit):
    half, whole = (peak(b"data: " + unit * (size // len(unit)) + b"\n\n") for size in (2**18, 2**19))
    assert whole < 2.3 * half + 65536 and whole < 200 * 2**19


def peak(body: bytes) -> int:
    raw = HEAD + body
    tracemalloc.start()
    try:
        read_exchange(raw, [len(HEAD), len(raw)], [0, 1], "close", ASKED)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
