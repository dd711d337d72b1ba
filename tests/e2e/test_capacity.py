"""What the caches of real engines hold is what arithmetic says, and a filled pool loses no request."""

import shutil

import pytest

from pytest_kvcache import frameworks
from pytest_kvcache.core.models import EMBEDDED
from pytest_kvcache.harness import weights

from .conftest import PYTHON, REPO
from .test_frameworks import EAGER, interpreter_of, measurements

SIZES = "suites/test_capacity.py"


@pytest.fixture
def suite(project):
    shutil.copytree(REPO / "suites", project.folder / "suites")
    return project


def figures(found, framework):
    return {m["arm"]: m for m in measurements(found.run, framework) if m["valid"]}


def test_llama_cpp_holds_what_arithmetic_says_in_each_precision(suite):
    """30 layers of 3 heads of 64, keys and values: 16 bits, and blocks of 32 numbers with a scale of 16 bits. Its log has two decimals."""
    words = [SIZES, "--kv-framework=llama_cpp", "-o", interpreter_of("llama_cpp")]
    found = suite.run(*words, "--kv-record=missing")
    assert found.code == 0, found.out
    sizes = {arm: m["metrics"]["kv_bytes_per_token"] for arm, m in figures(found, "llama_cpp").items()}
    assert sizes == {"fp16": 23040, "int8": pytest.approx(12240, rel=2e-3), "int4": pytest.approx(6480, rel=2e-3)}
    for m in figures(found, "llama_cpp").values():
        told = m["load"]["capacity"]
        assert told["longest"]["failed"] == 0 and told["longest"]["fits"] == 511
        assert told["longest"]["beyond"]["became"] == "refused" and "maximum context length is 512" in told["longest"]["beyond"]["words"]
        assert "no metrics page" in told["not_told"]["drained"]
    again = suite.run(*words)
    assert again.code == 0 and {v["verdict"] for v in again.run["verdicts"]} == {"pass"}, again.out


# Of little arithmetic and many bytes a token, so that a whole GiB is filled in a minute: 4 layers of 32 heads of 256, 128 KiB.
WIDE = """
import shutil, sys, torch, transformers
source, target = sys.argv[1:]
torch.manual_seed(1)
config = transformers.LlamaConfig(
    vocab_size=49152, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=32, num_key_value_heads=32, head_dim=256,
    bos_token_id=1, eos_token_id=2, tie_word_embeddings=True, max_position_embeddings=512,
)
transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(target)
for name in ("tokenizer.json", "tokenizer_config.json"):
    shutil.copy(f"{source}/{name}", target)
"""


@pytest.mark.release
def test_vllm_fills_its_pool_and_half_as_much_again_and_is_empty_afterwards(suite, tmp_path):
    source, wide = weights.locate(EMBEDDED, frameworks.load("transformers"), PYTHON, print).serve, tmp_path / "wide"
    wide.mkdir()
    weights.run_python(PYTHON, WIDE, source, str(wide))
    words = [SIZES, "--kv-framework=vllm", "-o", interpreter_of("vllm"), f"--kv-model={wide}", EAGER, "--kv-profile=full"]
    found = suite.run(*words, "--kv-record=missing", "-k", "filled", timeout=590)
    assert found.code == 0, found.out
    m = figures(found, "vllm")["pool1"]
    told = m["load"]["capacity"]
    assert m["metrics"] == {"kv_tokens": 8192, "kv_bytes_per_token": 131072, "kv_size_ratio": 1}
    assert told["batch"] == {"requests": 14, "share": 0.875, "preempted": 0}, "in whole blocks of 128 tokens"
    assert told["above"]["requests"] == 24 and told["above"]["failed"] == 0
    assert told["drained"]["usage"] == told["drained"]["before"] == 0
    assert told["longest"]["failed"] == 0 and told["longest"]["beyond"]["became"] == "refused"
    assert told["not_told"] == {}


def test_transformers_tells_nothing_of_its_pool_and_says_so(suite):
    found = suite.run(SIZES)
    assert found.code == 0, found.out
    assert "transformers does not tell how many tokens its KV cache holds and how many bytes it takes" in found.out
