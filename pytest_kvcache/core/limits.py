"""How much quality a precision may cost: a limit for each figure, documented with what was published and measured. Pure.

Published, all against 16 bits on WikiText-2 by llama.cpp (increase of the perplexity, mean divergence):
- KV q8_0: LLaMA-3-8B +0.035 % and 0.00098 nats, of which the f16 cache itself has 0.0002 (ggml-org/llama.cpp PR 7412); Gemma-3-4B +0.02 %
  (PR 21551); Qwen3.6-35B-A3B +0.09 % and 0.0067 (LLMKube issue 601).
- KV q4_0: Llama-2-7B +0.2 to +2.4 %, Gemma-3-4B +1.2 % (PR 21551); Qwen3-30B-A3B +11 % without a rotation of the keys and +0.9 % with one
  (ik_llama.cpp PR 1034): what exceeds the limit here is the known failure of keys with outliers.
- KV FP8 (ExLlamaV2): Mistral-7B +0.2 to +0.8 %, Mixtral +0.5 to +1.7 %.
- Weights (LLaMA-3-8B, llama.cpp README of perplexity): q8_0 +0.02 % and 0.0014; q6_K +0.3 % and 0.0055; q4_K_M +2.8 % and 0.031.
  W8A8 by SmoothQuant +0.8 to +3.2 %, W4 by GPTQ in groups of 128 +1.9 to +3.7 %, LLaMA-3-8B +6.8 % (QServe README); AWQ costs about as
  much. FP8, Llama-3.1-8B: +0.9 % (vLLM's post on PTPC-FP8).
Small models lose more: SmolLM2-135M has 0.0040 nats at q8_0 and 0.049 at q4_0, and 0.0037 from the order of the arithmetic
(docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Mapping

# How many times the tokens of 16 bits a cache must hold in as many bytes; less says that the option was not applied. By arithmetic: FP8 2;
# INT8 1.88 (llama.cpp's q8_0; vLLM with a float32 scale a token and head of 64 numbers) to 1.94 (heads of 128); INT4 3.56 to 3.76.
GAINS: Mapping[str, float] = {"fp8": 1.9, "int8": 1.8, "int4": 3.4}

_WEIGHTS_OF_4_BITS = {"ppl_ratio": 1.08, "kld.mean": 0.2, "kld.p99": 2.0, "top1": 0.75}
# Of the cache: fp8, int8, int4. Of the weights: w8 and w4 by the engine itself (weights only), wfp8, w8a8 (the activations too), awq, gptq.
LIMITS: Mapping[str, Mapping[str, float]] = {
    "fp8": {"ppl_ratio": 1.02, "kld.mean": 0.03, "kld.p99": 0.3, "top1": 0.90},
    "int8": {"ppl_ratio": 1.005, "kld.mean": 0.015, "kld.p99": 0.15, "top1": 0.93},
    "int4": {"ppl_ratio": 1.03, "kld.mean": 0.12, "kld.p99": 1.2, "top1": 0.80},
    "w8": {"ppl_ratio": 1.01, "kld.mean": 0.02, "kld.p99": 0.2, "top1": 0.92},
    "wfp8": {"ppl_ratio": 1.02, "kld.mean": 0.03, "kld.p99": 0.3, "top1": 0.90},
    "w8a8": {"ppl_ratio": 1.035, "kld.mean": 0.04, "kld.p99": 0.4, "top1": 0.88},
    **dict.fromkeys(("w4", "awq", "gptq"), _WEIGHTS_OF_4_BITS),
}
