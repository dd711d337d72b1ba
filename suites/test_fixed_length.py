"""Fixed-length requests: what the engine gives when every request has the same shape."""

import pytest

from pytest_kvcache import ClosedLoop

CPU = [
    ClosedLoop(isl=128, osl=32, concurrency=1, device="cpu", profile="smoke"),
    ClosedLoop(isl=128, osl=32, concurrency=4, device="cpu", profile="ci"),
    ClosedLoop(isl=512, osl=64, concurrency=1, device="cpu", profile="full"),
    ClosedLoop(isl=512, osl=64, concurrency=4, device="cpu", profile="full"),
]
GPU = [
    ClosedLoop(isl=512, osl=128, concurrency=8, device="gpu", profile="smoke"),
    ClosedLoop(isl=512, osl=128, concurrency=32, device="gpu", profile="ci"),
    ClosedLoop(isl=2048, osl=256, concurrency=32, device="gpu", profile="ci"),
    ClosedLoop(isl=2048, osl=256, concurrency=128, device="gpu", profile="full"),
]


@pytest.mark.kv_gates("output_tok_s", "tpot_ms.p50")
@pytest.mark.parametrize("kv_scenario", CPU + GPU, ids=str)
def test_fixed_length(kv_result, kv_gate):
    """Fixed-length requests keep their throughput and token cadence."""
    kv_gate(kv_result)
