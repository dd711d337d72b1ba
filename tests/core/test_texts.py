"""What a probe can be asked, and which arms of a text there are."""

import pytest

from pytest_kvcache.core.arms import narrowed, stored_arms
from pytest_kvcache.core.framework import Probe
from pytest_kvcache.core.scenarios import Text
from pytest_kvcache.core.spec import Arm, SpecError
from pytest_kvcache.core.texts import asks, text_hash, unscored
from pytest_kvcache.frameworks.llama_cpp import LLAMA_CPP
from pytest_kvcache.frameworks.tgi import TGI
from pytest_kvcache.frameworks.transformers import TRANSFORMERS

ARMS = (
    Arm(name="fp16"),
    Arm(name="fp8", kv_dtype="fp8"),
    Arm(name="int4", kv_dtype="int4"),
    Arm(name="big", kv_dtype="int4", block_size=16),
)
TEXT = Text(windows=4, arms=ARMS)


def test_a_probe_is_told_the_precision_of_the_cache_and_of_the_weights_and_nothing_else():
    assert asks(LLAMA_CPP, ARMS[2]) == {"type": "Q4_0"}
    assert asks(LLAMA_CPP, Arm(name="w4", quantization="int4")) == {"type": "F16", "quantize": "Q4_K_M"}
    assert asks(LLAMA_CPP, ARMS[1]) is None
    assert asks(LLAMA_CPP, ARMS[3]) is None, "a block size has no part in a text"
    assert asks(TGI, ARMS[0]) is None


def test_one_precision_less_costs_no_other():
    assert [a.name for a in narrowed(TEXT, lambda a: asks(LLAMA_CPP, a) is not None).arms] == ["fp16", "int4"]


@pytest.mark.parametrize(("framework", "arms", "told", "why"), [
    (LLAMA_CPP, {"int4"}, {}, ""), (LLAMA_CPP, {"fp8"}, {}, "scores no text with kv_dtype='fp8'; it has of the cache int8, int4"),
    (TGI, {"int4"}, {}, "tgi scores no text"), (TRANSFORMERS, {"fp8"}, {"beside": "--kv-ab"}, "leave --kv-ab out"),
    (TRANSFORMERS, {"fp8"}, {"random": True}, "random weights"),
])  # fmt: skip
def test_why_a_text_is_not_scored_is_said(framework, arms, told, why):
    found = unscored(framework, TEXT, arms, **told)
    assert why in found
    assert bool(found) == bool(why)


def test_every_probe_has_a_reference_and_controls_that_are_not_it():
    for framework in (LLAMA_CPP, TRANSFORMERS):
        probe = framework.probe
        assert isinstance(probe, Probe)
        assert "auto" in probe.kv
        assert "auto" in probe.weights
        assert probe.negative not in probe.kv.values()
        assert set(probe.needs) <= {f"kv_dtype={k}" for k in probe.kv} | {f"quantization={k}" for k in probe.weights}


def test_on_a_gpu_llama_cpp_is_told_to_use_it():
    assert LLAMA_CPP.probe.on["cuda"] == {"gpu_layers": -1}


def test_the_arms_of_a_stored_text_are_those_of_its_plan():
    plan = {"blocks": [
        {"id": "llama_cpp/m/text:fp16+int4,kv_dtype=int4", "scenarios": [str(TEXT)], "arms": ["fp16", "int4"]},
        {"id": "llama_cpp/m/base", "scenarios": ["isl1-osl1-c1"], "arms": ["base"]},
    ]}  # fmt: skip
    assert stored_arms(plan, "llama_cpp", "m", TEXT) == {"fp16", "int4"}
    assert stored_arms(plan, "vllm", "m", TEXT) == frozenset()


def test_another_corpus_scheme_or_token_is_another_number():
    one = text_hash(TEXT, "sha256:a", [[1, 2], [3, 4]])
    assert one == text_hash(TEXT, "sha256:a", iter([(1, 2), (3, 4)]))
    others = [
        text_hash(TEXT, "sha256:b", [[1, 2], [3, 4]]), text_hash(TEXT, "sha256:a", [[1, 2], [3, 5]]), text_hash(TEXT, "sha256:a", [[0, 2], [3, 4]]),
        text_hash(Text(windows=4, arms=ARMS, scheme=type(TEXT.scheme)(window=256)), "sha256:a", [[1, 2], [3, 4]]),
    ]  # fmt: skip
    assert len({one, *others}) == 5


@pytest.mark.parametrize("fields", [{"windows": 0}, {"windows": True}, {"reference": "fp32"}, {"arms": ()}, {"profile": "huge"}])
def test_a_text_that_cannot_be_is_refused(fields):
    with pytest.raises(SpecError):
        Text(**({"arms": ARMS} | fields))
