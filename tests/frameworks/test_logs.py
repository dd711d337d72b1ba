"""What a log says why a server failed, in the words of their sources: each adapter's reason is the first line of the error."""

import sys

import pytest

from pytest_kvcache.core.framework import Launch
from pytest_kvcache.core.spec import Arm
from pytest_kvcache.frameworks.llama_cpp import LLAMA_CPP
from pytest_kvcache.frameworks.sglang import SGLANG
from pytest_kvcache.frameworks.tensorrt_llm import TENSORRT_LLM
from pytest_kvcache.frameworks.tgi import TGI
from pytest_kvcache.frameworks.transformers import TRANSFORMERS
from pytest_kvcache.frameworks.vllm import VLLM
from pytest_kvcache.harness.server import EngineProcess

EXTRA = "1 validation error for TorchLlmArgs\n{}\n  Extra inputs are not permitted [type=extra_forbidden, input_value=64, input_type=int]"


@pytest.mark.parametrize(("adapter", "log", "reason"), [
    (VLLM, "api_server.py: error: unrecognized arguments: --kv-offloading-size 4",
     "this version does not know the argument --kv-offloading-size; --kv-offloading-size came with 0.11.1"),
    (VLLM, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "out of memory"),
    (SGLANG, "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: 0.88",
     "no memory is left for the KV cache: see what else uses the device"),
    (SGLANG, "AssertionError: chunked_prefill_size must be divisible by page_size", "max_batched_tokens must be a multiple of block_size"),
    (SGLANG, "RuntimeError: The server socket has failed to listen on any local network address. port: 30000", "the port is taken"),
    (SGLANG, "launch_server.py: error: unrecognized arguments: --page-size 64",
     "this version does not know the argument --page-size; --page-size is there from 0.4.5 on"),
    (SGLANG, "launch_server.py: error: argument --kv-cache-dtype: invalid choice: 'nvfp4' (choose from 'auto', 'fp8_e5m2')",
     "this version has no 'nvfp4' for --kv-cache-dtype"),
    (TENSORRT_LLM, "RuntimeError: Failed to bind socket to 127.0.0.1:8000: [Errno 98] Address already in use", "the port is taken (127.0.0.1:8000:)"),
    (TENSORRT_LLM, EXTRA.format("kv_cache_config.tokens_per_block"), "this version does not know the setting kv_cache_config.tokens_per_block; "
     "kv_cache_config.tokens_per_block is there from 1.1 on"),
    (TENSORRT_LLM, "Error: No such option: --config", "this version does not know the option --config; --config came with 1.2"),
    (TENSORRT_LLM, "ValueError: The prompt length (9000) should not exceed max_num_tokens (8192)", "a prompt is longer than a step may be (8192 tokens)"),
    (TENSORRT_LLM, "[TRT-LLM] Assertion failed: maxTokensInPagedKvCache (64) must be large enough to process at least 1 sequence",
     "the KV cache, of 64 tokens, is too small for one request"),
    (TGI, "error: unexpected argument '--kv-cache-dtype' found",
     "this version does not know the argument --kv-cache-dtype; --kv-cache-dtype is there from 2.4 on"),
    (TGI, "`max_total_tokens` must be <= `max_batch_total_tokens`. Given: 4096 and 2048",
     "the context of 4096 tokens is larger than the KV cache, which holds 2048"),
    (TGI, "Argument validation error: `max_batch_prefill_tokens` must be >= `max_input_tokens`. Given: 4096 and 8191",
     "a prompt of 8191 tokens is longer than a step may be (4096): ask for more max_batched_tokens, or a shorter context"),
    (TGI, "RuntimeError: Not enough memory to handle 4096 prefill tokens. You need to decrease `--max-batch-prefill-tokens`",
     "no memory is left for a prefill of 4096 tokens"),
    (TRANSFORMERS, "Error: No such option: --cb-block-size", "this version of transformers does not know the option --cb-block-size"),
    (TRANSFORMERS, "ImportError: Missing dependencies for serving", "its serving extra is not installed"),
    (LLAMA_CPP, "ValueError: Model path does not exist: /models/m.gguf", "there is no file /models/m.gguf"),
    (LLAMA_CPP, "ValueError: Failed to load model from file: /models/m.gguf", "llama.cpp cannot read /models/m.gguf"),
    (LLAMA_CPP, "llama_init_from_model: quantized V cache requires flash_attn to be enabled\nValueError: Failed to create llama_context",
     "a quantised V needs flash attention"),
    (LLAMA_CPP, "llama_init_from_model: V cache type q4_K with block size 256 does not divide n_embd_head_v=64", "the model's heads do not divide into blocks of 256 numbers (V as q4_K)"),
    (LLAMA_CPP, "llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache", "no memory is left for a context"),
    (LLAMA_CPP, "__main__.py: error: unrecognized arguments: --n_contexts 4", "this version does not know the argument --n_contexts"),
    (LLAMA_CPP, "ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 8000): address already in use", "the port is taken"),
])  # fmt: skip
def test_a_failure_is_told_by_its_reason(adapter, log, reason, tmp_path):
    file = tmp_path / "server.log"
    file.write_text(f"INFO: all was well\n{log}\n")
    launch = Launch(python=sys.executable, model="m", port=8000, device="cpu", arm=Arm(), folder=str(tmp_path))
    first, *rest = str(EngineProcess(adapter, launch, file).failure("the engine ended")).splitlines()
    assert first.startswith(f"{adapter.name}: the engine ended; reason: {reason}")
    assert any(log.splitlines()[-1].strip() in line for line in rest), "and the end of the log is shown"
