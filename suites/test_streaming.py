"""Streaming: time to the first token against token cadence as load rises."""

import pytest

from pytest_kvcache import ClosedLoop

CPU = [ClosedLoop(isl=128, osl=32, concurrency=c, device="cpu", profile=p) for c, p in ((1, "smoke"), (2, "ci"), (4, "ci"), (8, "full"))]
GPU = [
    ClosedLoop(isl=512, osl=128, concurrency=c, device="gpu", profile=p) for c, p in ((1, "smoke"), (8, "ci"), (32, "ci"), (128, "full"))
]


@pytest.mark.kv_gates("ttft_ms.p50", "tpot_ms.p50")
@pytest.mark.parametrize("kv_scenario", CPU + GPU, ids=str)
def test_streaming(kv_result, kv_gate):
    """The first token stays prompt and the cadence steady as load rises."""
    kv_gate(kv_result)
