"""What shows that a server is ready: one streamed token, and no error beside it."""

import pytest

from pytest_kvcache.harness.ready import gave_a_token

ROLE, TOKEN = b'data: {"choices":[{"delta":{"role":"assistant"}}]}', b'data:{"choices":[{"delta":{"content":"a"}}]}'
DONE, ERROR = b"data: [DONE]", b'data: {"error":{"message":"CUDA error"}}'


@pytest.mark.parametrize(("status", "lines", "ready"), [
    (200, [ROLE, TOKEN, DONE], True), (200, [TOKEN], True), (200, [b": ping", b"", TOKEN, b"data: ping", b"data:", DONE], True),
    (200, [b'data: {"choices":[],"error":null}', DONE], True), (200, [], False), (200, [DONE], False), (200, [b": ping"] * 3, False),
    (200, [b"data: ping", b"data: 1", b"data: [1]", b"data: " + b"[" * 10**5, b"data: \xff"], False), (503, [TOKEN, DONE], False),
    (200, [ERROR], False), (200, [ROLE, b"", ERROR, b"", DONE], False), (200, [TOKEN, ERROR], False),
    (200, [ROLE, b'data: { "error": "boom" }', DONE], False), (200, [b'data: {"object":"error","message":"boom"}', DONE], False),
    (200, [b'{"choices":[{"text":"a"}]}'], False),
])  # fmt: skip
def test_ready_is_a_stream_with_an_event_and_without_an_error(status, lines, ready):
    assert gave_a_token(status, lines) is ready
