"""What a KV cache holds: bytes of a token and of the pool against arithmetic, what fewer bits buy, and that filling it loses nothing."""

import pytest

from pytest_kvcache import GAINS, Arm, Capacity, Gate

# Of every arm: what a request of the longest context takes is seconds on two cores. One request fills nine tenths of a context.
ON_TWO_CORES, ON_A_CARD = 512, 2048
# llama.cpp's own words on a CPU, where it alone has such caches; the common ones on a GPU.
ON_CPU = {"fp16": "auto", "int8": "q8_0", "int4": "q4_0"}
ON_GPU = {"fp16": "auto", "fp8": "fp8", "int8": "int8", "int4": "int4"}


def sizes(precisions, context, **more):
    arms = tuple(Arm(name=name, kv_dtype=word, context=context) for name, word in precisions.items())
    return Capacity(isl=7 * context // 8, osl=context // 32, fill=0, arms=arms, **more)


def bits(name):
    """The bytes that arithmetic says, and as few as such a precision must take; the reference keeps what it holds, too."""
    gates = [Gate("kv_size_ratio", arm=name, limit=1.05), Gate("kv_bytes_per_token", arm=name)]
    if name in GAINS:
        gates.append(Gate("kv_bytes_per_token", arm=name, against="fp16", at_least=GAINS[name]))
    else:
        gates.append(Gate("kv_tokens", arm=name))
    return gates


def claims(scenario):
    return [pytest.param(a.name, scenario, marks=pytest.mark.kv_gates(*bits(a.name)), id=f"{a.name}-{scenario}") for a in scenario.arms]


@pytest.mark.parametrize(
    ("precision", "kv_scenario"), [*claims(sizes(ON_CPU, ON_TWO_CORES, device="cpu")), *claims(sizes(ON_GPU, ON_A_CARD, device="gpu"))]
)
def test_kv_size(precision, kv_result, kv_gate):
    """A token takes the bytes that arithmetic gives; fewer bits hold as many times the tokens, less their scales; no request is lost."""
    kv_gate(kv_result)


BLOCKS = tuple(Arm(name=f"block{n}", block_size=n, kv_gib=2, context=ON_A_CARD) for n in (16, 32, 64))
FILLED = [
    Capacity(isl=448, osl=16, arms=(Arm(name="pool1", kv_gib=1, context=ON_TWO_CORES),), device="cpu", profile="full"),
    Capacity(isl=1792, osl=32, arms=(Arm(name="pool4", kv_gib=4, context=ON_A_CARD),), device="gpu", profile="ci"),
    Capacity(isl=1792, osl=32, arms=BLOCKS, device="gpu", profile="ci"),
]


@pytest.mark.kv_gates(Gate("kv_size_ratio", limit=1.05), "kv_tokens", "kv_bytes_per_token")
@pytest.mark.parametrize("kv_scenario", FILLED, ids=lambda s: f"{s.arms[0].name}-{s}")
def test_filled_pool(kv_result, kv_gate):
    """As many requests as fit run at once without one preempted, half as many again are all answered, and the pool is empty afterwards."""
    kv_gate(kv_result)
