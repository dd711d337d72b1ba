"""Golden command lines, variables and files of every adapter, by version. No framework is installed for this."""

import json
import os
import subprocess

import pytest

from pytest_kvcache.core.framework import Launch
from pytest_kvcache.core.spec import Arm, UserError
from pytest_kvcache.frameworks.llama_cpp import LLAMA_CPP
from pytest_kvcache.frameworks.sglang import SGLANG
from pytest_kvcache.frameworks.tensorrt_llm import CONFIG, TENSORRT_LLM
from pytest_kvcache.frameworks.tgi import TGI
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.frameworks.vllm import VLLM

PYTHON = "/venv/bin/python"
HERE = ["--host", "127.0.0.1", "--port", "8000"]


def launch(arm=None, **more):
    defaults = {"python": PYTHON, "model": "/models/m", "port": 8000, "device": "gpu", "folder": "/scratch/launch"}
    return Launch(**defaults | more, arm=arm or Arm())


def after(framework, arm=None, **more):
    """What an adapter writes for this launch after what it writes for a plain one."""
    plain = framework.argv(launch())
    words = framework.argv(launch(arm, **more))
    assert words[: len(plain)] == plain
    return words[len(plain) :]


@pytest.mark.parametrize(("framework", "words"), [
    (VLLM, [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/m", *HERE]),
    (SGLANG, [PYTHON, "-m", "sglang.launch_server", "--model-path", "/models/m", *HERE, "--enable-metrics", "--decode-log-interval", "1"]),
    (TENSORRT_LLM, [
        "/venv/bin/trtllm-serve", "/models/m", *HERE, "--backend", "pytorch", "--extra_llm_api_options", f"/scratch/launch/{CONFIG}",
    ]),
    (TGI, ["text-generation-launcher", "--model-id", "/models/m", "--hostname", "127.0.0.1", "--port", "8000", "--num-shard", "1"]),
    (LLAMA_CPP, [
        PYTHON, "-m", "llama_cpp.server", "--model", "/models/m", *HERE, "--interrupt_requests", "false", "--logits_all", "false",
        "--flash_attn", "true", "--n_ctx", "0", "--n_gpu_layers", "-1", "--split_mode", "0",
    ]),
])  # fmt: skip
def test_a_plain_launch(framework, words):
    assert framework.argv(launch()) == words


EVERYTHING = Arm(
    name="b", kv_dtype="fp8", weight_dtype="bfloat16", quantization="fp8", block_size=32, kv_gib=2.0, max_requests=64,
    max_batched_tokens=4096, prefix_cache=False, chunked_prefill=True, context=8192, cpu_offload_gib=1.5,
)  # fmt: skip


def test_vllm_is_told_everything_an_arm_asks_for():
    assert after(VLLM, EVERYTHING, version="0.25.1+cu130", tp=4, serve_args=("--seed", "7"), dummy=True) == [
        "--load-format", "dummy", "--tensor-parallel-size", "4", "--kv-cache-dtype", "fp8", "--dtype", "bfloat16", "--quantization", "fp8",
        "--block-size", "32", "--kv-cache-memory-bytes", "2147483648", "--max-num-seqs", "64", "--max-num-batched-tokens", "4096",
        "--no-enable-prefix-caching", "--enable-chunked-prefill", "--max-model-len", "8192",
        "--kv-offloading-size", "1.5", "--kv-offloading-backend", "native", "--seed", "7",
    ]  # fmt: skip


@pytest.mark.parametrize(("arm", "version", "words"), [
    (Arm(chunked_prefill=False), "0.8.5", ["--enable-chunked-prefill=false"]),
    (Arm(chunked_prefill=False), "0.9.1", ["--no-enable-chunked-prefill"]),
    (Arm(chunked_prefill=False), "", ["--no-enable-chunked-prefill"]),
    (Arm(prefix_cache=True), "0.8.5", ["--enable-prefix-caching"]),
    (Arm(kv_dtype="int8"), "0.33.0", ["--kv-cache-dtype", "int8_per_token_head"]),
    (Arm(kv_dtype="int4"), "0.33.0", ["--kv-cache-dtype", "int4_per_token_head"]),
])  # fmt: skip
def test_vllm_by_version(arm, version, words):
    assert after(VLLM, arm, version=version) == words


@pytest.mark.parametrize(("framework", "arm", "version", "words"), [
    (VLLM, Arm(kv_gib=1.0), "0.10.2", "vllm 0.10.2 cannot be told kv_gib=1.0; versions from 0.11.1 on can"),
    (VLLM, Arm(cpu_offload_gib=1.0), "0.11.0", "versions from 0.11.1 on can"),
    (VLLM, Arm(disk_offload_gib=1.0), "0.32.0", "vllm 0.32.0 cannot be told disk_offload_gib=1.0"),
    (SGLANG, Arm(disk_offload_gib=5.0), "0.5.23", "sglang 0.5.23 cannot be told disk_offload_gib=5.0"),
    (SGLANG, Arm(kv_gib=1.0), "0.5.23", "sglang 0.5.23 cannot be told kv_gib=1.0"),
    (SGLANG, Arm(kv_dtype="nvfp4"), "0.5.15", "sglang 0.5.15 cannot be told kv_dtype='nvfp4'; versions from 0.5.16 on can"),
    (SGLANG, Arm(kv_dtype="mxfp8"), "0.5.15", "versions from 0.5.16 on can"),
    (SGLANG, Arm(kv_dtype="bfloat16"), "0.5.3", "versions from 0.5.4 on can"),
    (SGLANG, Arm(kv_dtype="fp4_e2m1"), "0.5.5", "versions from 0.5.16 on or from 0.5.6 on and before 0.5.16 can"),
    (TENSORRT_LLM, Arm(block_size=64), "1.0.0", "versions from 1.1 on can"),
    (TENSORRT_LLM, Arm(disk_offload_gib=1.0), "1.2.0rc4", "tensorrt_llm 1.2.0rc4 cannot be told disk_offload_gib=1.0"),
    (TGI, Arm(kv_dtype="fp8"), "2.3.1", "versions from 2.4 on can"),
    (TGI, Arm(chunked_prefill=False), "3.3", "tgi 3.3 cannot be told chunked_prefill=False"),
])  # fmt: skip
def test_what_a_version_cannot_be_told_is_an_error_that_names_the_one_that_can(framework, arm, version, words):
    one = launch(arm, version=version)
    with pytest.raises(UserError, match="arm base: ") as caught:
        framework.argv(one), framework.files(one)
    assert words in str(caught.value)


@pytest.mark.parametrize("version", ["", "0.11.1", "0.32.0"])
def test_vllm_offloads_from_a_gpu_only(version):
    arm = Arm(name="tier", cpu_offload_gib=1.5)
    assert after(VLLM, arm, version=version) == ["--kv-offloading-size", "1.5", "--kv-offloading-backend", "native"]
    with pytest.raises(UserError, match=r"^arm tier: vllm offloads from a GPU only, leave cpu_offload_gib=1\.5 out on a CPU$"):
        VLLM.argv(launch(arm, version=version, device="cpu"))


@pytest.mark.parametrize(("arm", "gib"), [
    (Arm(), "4"), (Arm(kv_gib=2.0), "2"), (Arm(memory_share=0.1), "1"), (Arm(memory_share=0.25), "1"), (Arm(memory_share=0.5), "2"),
])  # fmt: skip
def test_vllm_on_a_cpu_is_told_its_pool_by_a_variable(arm, gib):
    one = launch(arm, device="cpu")
    assert VLLM.environ(one) == {"VLLM_CPU_KVCACHE_SPACE": gib}
    assert "--kv-cache-memory-bytes" not in VLLM.argv(one)
    assert VLLM.environ(launch(arm)) == {}


def test_sglang_is_told_what_it_can_be():
    arm = Arm(
        kv_dtype="fp8", weight_dtype="bfloat16", quantization="fp8", block_size=64, max_requests=8, max_batched_tokens=4096,
        prefix_cache=False, chunked_prefill=False, context=8192, cpu_offload_gib=16.0,
    )  # fmt: skip
    assert after(SGLANG, arm, version="0.5.23", tp=2) == [
        "--tp-size", "2", "--kv-cache-dtype", "fp8_e4m3", "--dtype", "bfloat16", "--quantization", "fp8", "--page-size", "64",
        "--max-running-requests", "8", "--max-prefill-tokens", "4096", "--disable-radix-cache", "--chunked-prefill-size", "-1",
        "--context-length", "8192", "--enable-hierarchical-cache", "--hicache-size", "16",
    ]  # fmt: skip


@pytest.mark.parametrize("chunked", [None, True])
def test_a_step_of_sglang_is_bounded_by_its_chunk(chunked):
    words = after(SGLANG, Arm(max_batched_tokens=4096, chunked_prefill=chunked))
    assert words == ["--chunked-prefill-size", "4096", "--max-prefill-tokens", "4096"]


@pytest.mark.parametrize(("value", "version", "word"), [
    ("fp4_e2m1", "", "fp4_mx_block16"), ("fp4_e2m1", "0.5.16", "fp4_mx_block16"), ("fp4_e2m1", "0.5.15.post1", "fp4_e2m1"),
    ("fp4_e2m1", "0.5.6", "fp4_e2m1"), ("fp4_mx_block16", "0.5.23", "fp4_mx_block16"), ("fp4_mx_block16", "0.5.10", "fp4_e2m1"),
    ("nvfp4", "0.5.16", "nvfp4"), ("bfloat16", "0.5.4", "bf16"), ("fp8", "0.4.3", "fp8_e4m3"),
])  # fmt: skip
def test_sglang_calls_a_precision_by_its_name_of_the_version(value, version, word):
    assert after(SGLANG, Arm(kv_dtype=value), version=version) == ["--kv-cache-dtype", word]


@pytest.mark.parametrize(("framework", "arm", "device", "words"), [
    (VLLM, Arm(kv_gib=2.5), "cpu", "in whole GiB, kv_gib=2.5 is none"), (VLLM, Arm(kv_gib=0.2), "cpu", "in whole GiB"),
    (SGLANG, Arm(cpu_offload_gib=0.5), "gpu", "in whole GB, cpu_offload_gib=0.5 is none"),
])  # fmt: skip
def test_a_size_is_never_rounded_to_another_ones(framework, arm, device, words):
    one = launch(arm, device=device)
    with pytest.raises(UserError, match=words):
        framework.argv(one), framework.environ(one)


def test_tensorrt_llm_is_told_everything_in_its_file():
    arm = Arm(
        kv_dtype="fp8", weight_dtype="bfloat16", block_size=64, kv_gib=2.0, max_requests=8, max_batched_tokens=4096, prefix_cache=False,
        chunked_prefill=True, context=8192, cpu_offload_gib=1.0,
    )  # fmt: skip
    one = launch(arm, version="1.2.0rc4", tp=2)
    assert TENSORRT_LLM.argv(one) == TENSORRT_LLM.argv(launch(tp=2))
    assert TENSORRT_LLM.argv(one)[-4:-2] == ["--tp_size", "2"]
    assert json.loads(TENSORRT_LLM.files(one)[CONFIG]) == {
        "enable_iter_perf_stats": True, "dtype": "bfloat16", "max_batch_size": 8, "max_num_tokens": 4096,
        "enable_chunked_prefill": True, "max_seq_len": 8192, "kv_cache_config": {
            "dtype": "fp8", "tokens_per_block": 64, "max_gpu_total_bytes": 2**31, "enable_block_reuse": False, "host_cache_size": 2**30,
        },
    }  # fmt: skip
    old = json.loads(TENSORRT_LLM.files(launch(Arm(kv_dtype="fp8"), version="0.20.0"))[CONFIG])
    assert old["kv_cache_dtype"] == "fp8" and "kv_cache_config" not in old


def test_tgi_is_told_what_it_can_be():
    arm = Arm(kv_dtype="fp8", weight_dtype="float16", max_requests=8, max_batched_tokens=4096, prefix_cache=True, context=8192)
    assert TGI.argv(launch(arm, version="3.3.4", tp=2, serve_args=("--json-output",)))[7:] == [
        "--num-shard", "2", "--kv-cache-dtype", "fp8_e4m3fn", "--dtype", "float16", "--max-batch-size", "8",
        "--max-batch-prefill-tokens", "4096", "--max-input-tokens", "8191", "--max-total-tokens", "8192", "--json-output",
    ]  # fmt: skip
    container = ("docker", "run", "image")
    assert TGI.environ(launch(arm, command=container)) == {"PREFIX_CACHING": "1", "USE_PREFIX_CACHING": "1"}
    assert TGI.environ(launch(command=container)) == {}


def test_tgi_and_what_it_starts_are_found_in_the_interpreters_folder_first_and_by_the_search_path(monkeypatch):
    monkeypatch.setenv("PATH", "/usr/local/bin:/usr/bin")
    assert TGI.environ(launch()) == {"PATH": "/venv/bin:/usr/local/bin:/usr/bin"}
    assert TGI.environ(launch(python="python3")) == {}


def test_tgi_starts_where_its_image_has_it(tmp_path, monkeypatch):
    """The launcher in one folder, what it starts in the interpreter's; a launcher beside the interpreter is the one that is meant."""
    own, others = tmp_path / "conda" / "bin", tmp_path / "usr" / "local" / "bin"

    def script(folder, name, text="echo $0; command -v text-generation-server"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)

    def started():
        one = launch(python=str(own / "python"))
        return subprocess.run(TGI.argv(one), env=os.environ | TGI.environ(one), capture_output=True, text=True, check=True).stdout.split()

    for folder in (own, others):
        script(folder, "text-generation-server")
    script(others, "text-generation-launcher")
    monkeypatch.setenv("PATH", f"{others}:{os.environ['PATH']}")
    assert started() == [str(others / "text-generation-launcher"), str(own / "text-generation-server")]
    script(own, "text-generation-launcher")
    assert started()[0] == str(own / "text-generation-launcher")


@pytest.mark.parametrize(("arm", "words"), [
    (Arm(kv_dtype="int8"), ["--n_ctx", "0", "--type_k", "8", "--type_v", "8"]),
    (Arm(kv_dtype="q4_0"), ["--n_ctx", "0", "--type_k", "2", "--type_v", "2"]),
    (Arm(kv_dtype="bf16"), ["--n_ctx", "0", "--type_k", "30", "--type_v", "30"]),
    (Arm(context=4096, max_batched_tokens=256), ["--n_batch", "256", "--n_ubatch", "256", "--n_ctx", "4096"]),
])  # fmt: skip
def test_llama_cpp_is_told_what_it_can_be(arm, words):
    one = launch(arm, device="cpu")
    assert LLAMA_CPP.argv(one)[15:] == words
    assert LLAMA_CPP.environ(one) == {"HOST": "127.0.0.1", "PORT": "8000", "CUDA_VISIBLE_DEVICES": ""}
    assert "CUDA_VISIBLE_DEVICES" not in LLAMA_CPP.environ(launch(arm))


@pytest.mark.parametrize(("framework", "words", "variables"), [
    (VLLM, [], {"VLLM_LOGGING_LEVEL": "WARNING"}), (SGLANG, ["--log-level", "warning"], {}), (TENSORRT_LLM, ["--log_level", "warning"], {}),
    (TGI, [], {"LOG_LEVEL": "warn"}), (TRANSFORMERS, ["--log-level", "warning"], {}), (LLAMA_CPP, ["--verbose", "false"], {}),
])  # fmt: skip
def test_each_is_told_what_to_log(framework, words, variables):
    quiet, plain = launch(log_level="warning"), launch()
    told = framework.argv(quiet)
    for word in framework.argv(plain):
        told.remove(word)
    assert told == words
    assert framework.environ(quiet).items() - framework.environ(plain).items() == variables.items()


def test_llama_cpps_body_makes_the_end_of_text_impossible():
    assert LLAMA_CPP.body("m", " a b", 7) == {"model": "m", "prompt": " a b", "max_tokens": 7, "temperature": 0, "stream": True}
    assert LLAMA_CPP.without_end((0, 2)) == {"logit_bias": {"0": -1e9, "2": -1e9}, "logit_bias_type": "input_ids"}


@pytest.mark.parametrize("framework", [VLLM, SGLANG, TENSORRT_LLM, TGI, LLAMA_CPP], ids=lambda f: f.name)
def test_a_command_of_the_users_own_takes_the_place_of_the_interpreter(framework):
    words = framework.argv(launch(command=("docker", "run", "image")))
    assert words[:3] == ["docker", "run", "image"] and PYTHON not in words and "/models/m" in words[:6]


@pytest.mark.parametrize("framework", [VLLM, SGLANG, TENSORRT_LLM])
def test_bodies_ask_for_a_fixed_length_and_for_the_tokens_of_every_event(framework):
    assert framework.body("m", " a b", 7) == {
        "model": "m", "prompt": " a b", "max_tokens": 7, "ignore_eos": True, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip


def test_tgis_body_is_a_chat_since_only_that_tells_token_counts():
    body = TGI.body("m", " a b", 7)
    assert (body["model"], body["messages"], body["max_tokens"]) == ("tgi", [{"role": "user", "content": " a b"}], 7)
    assert body["stream_options"] == {"include_usage": True} and "ignore_eos" not in body
