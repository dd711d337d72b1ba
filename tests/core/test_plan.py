"""Tests become gates and blocks; what cannot be a gate is refused at collection."""

import pytest

from pytest_kvcache.core.plan import Wanted, gate_specs
from pytest_kvcache.core.spec import ClosedLoop, Gate, SpecError


def test_a_quantile_of_too_few_requests_is_no_gate():
    want = Wanted(framework="f", model="m", family="s", scenario=ClosedLoop(isl=8, osl=4, concurrency=4), gates=(Gate("ttft_ms.p99"),))
    with pytest.raises(SpecError, match=r"s/isl8-osl4-c4: ttft_ms.p99 of 24 requests is only their largest value; .*requests=100"):
        gate_specs(want, 0.05)
    enough = Wanted(
        framework="f", model="m", family="s", scenario=ClosedLoop(isl=8, osl=4, concurrency=4, requests=100), gates=(Gate("ttft_ms.p99"),)
    )
    assert gate_specs(enough, 0.05)
