"""Mixed lengths, arriving as they come: what each user waits for below the knee."""

import pytest

from pytest_kvcache import Gate, LogNormal, OpenLoop, Uniform

# Short chats with a few long ones among them; a chat template may take forty tokens of the shortest.
# On two cores the embedded default answers about two such a second.
CHATS = {"isl": LogNormal(median=96, sigma=0.8, low=48, high=512), "osl": Uniform(low=8, high=32)}
# As many tokens as conversations have; a thousand requests, as a P99 at a margin of 20 % needs.
LONG_PROMPTS, LONG_ANSWERS = LogNormal(median=512, sigma=1.0, low=64, high=8192), LogNormal(median=128, sigma=0.8, high=1024)
LONG_CHATS = {"isl": LONG_PROMPTS, "osl": LONG_ANSWERS, "requests": 1000}
BURSTS = {"arrivals": "gamma", "burstiness": 0.25}  # a coefficient of variation of 2
CPU = [
    OpenLoop(**CHATS, rate=0.5, requests=20, device="cpu", profile="smoke"),
    OpenLoop(**CHATS, rate=0.5, requests=40, device="cpu", profile="ci"),
    OpenLoop(**CHATS, rate=0.5, requests=40, **BURSTS, device="cpu", profile="full"),
]
GPU = [
    OpenLoop(**LONG_CHATS, rate=8, device="gpu", profile="ci"),
    OpenLoop(**LONG_CHATS, rate=8, **BURSTS, device="gpu", profile="full"),
]
EACH = ("ttft_ms.p50", "tpot_ms.p50", "e2e_ms.p50")
TAILS = (*EACH, "ttft_ms.p95", "tpot_ms.p95", "e2e_ms.p95", *(Gate(f"{m}.p99", margin=0.2) for m in ("ttft_ms", "tpot_ms", "e2e_ms")))


@pytest.mark.parametrize(
    "kv_scenario",
    [pytest.param(s, marks=pytest.mark.kv_gates(*gates)) for loads, gates in ((CPU, EACH), (GPU, TAILS)) for s in loads],
    ids=str,
)
def test_mixed_length(kv_result, kv_gate):
    """Requests of many lengths keep their first token, cadence and end, whatever arrives beside them."""
    kv_gate(kv_result)
