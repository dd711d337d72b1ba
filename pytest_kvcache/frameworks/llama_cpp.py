"""llama.cpp: the OpenAI-compatible server of `llama-cpp-python`, which serves a GGUF file as it is, one request at a time.

Read in abetlen/llama-cpp-python 0.3.36: flags in `llama_cpp/server/settings.py` and `cli.py` (a boolean needs its value); the variables
in `server/__main__.py`; the lock that lets one request in, and that a second one ends the
first unless `interrupt_requests` is off, in `server/app.py`; the loop of a completion in `llama.py`. Numbers of precisions are `ggml_type`
(ggml-org/llama.cpp `ggml/include/ggml.h`); a quantised V needs flash attention (`src/llama-context.cpp`).

* It has no page of health or of metrics.
* Its streams tell no token counts, its plain answers do: one of the scenario's own shape is asked for first, see `harness.counted`.
  `finish_reason: length` then says that as many tokens came as were asked for. A last token that is half a character makes it one more.
* It cannot be told to ignore the end of text: the tokens that end one are made impossible by `logit_bias`.
* A request longer than the context is cut short without a word, hence the model's own context by default (0) in place of 2048.
* It always reuses what a prompt has in common with the one before it.
* HOST and PORT of the environment go before the flags, hence `environ`, and so does CONFIG_FILE, which must not be set; other settings
  have variables too (N_THREADS, …), which the fingerprint shows.
* A build without GPU support takes `--n_gpu_layers` without a word: `on_gpu` is what its log must say.
* Flash attention is on for all arms, as a quantised V needs it and another attention would be another arm.
* By default it generates on half of the processors (`--n_threads`) and reads prompts on all.
* `logit_bias` costs it a copy of the logits in Python for every token: tenths of a millisecond for a large vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.flags import words
from ..core.framework import Flag, Framework, Launch, Probe
from ..core.readings import READINGS
from .shared import OUT_OF_MEMORY, PORT_TAKEN, UNKNOWN_ARGUMENT

GGML = {"f32": "0", "f16": "1", "q4_0": "2", "q4_1": "3", "q5_0": "6", "q5_1": "7", "q8_0": "8", "iq4_nl": "20", "bf16": "30"}
KV_DTYPES = {"auto": "", "int8": GGML["q8_0"], "int4": GGML["q4_0"], **GGML}
IMPOSSIBLE = -1e9


FLAGS = {
    "kv_dtype": (Flag(words=lambda v: ["--type_k", v, "--type_v", v]),),
    "max_batched_tokens": (Flag(words=lambda v: ["--n_batch", str(v), "--n_ubatch", str(v)]),),
    "context": (Flag(words=lambda v: ["--n_ctx", str(v)]),),
}

# Python source for `Framework.vocabulary`.
VOCABULARY = """
import json, sys
import llama_cpp as l
params = l.llama_model_default_params()
params.vocab_only = True
model = l.llama_model_load_from_file(sys.argv[1].encode(), params)
if not model: sys.exit("this llama.cpp cannot read the file")
vocab = l.llama_model_get_vocab(model)
texts = [l.llama_vocab_get_text(vocab, i).decode(errors="replace") for i in range(l.llama_vocab_n_tokens(vocab))]
ends = [{"id": i, "content": t, "special": True} for i, t in enumerate(texts) if l.llama_vocab_is_eog(vocab, i)]
print(json.dumps({"model": {"vocab": {t: i for i, t in enumerate(texts)}}, "added_tokens": ends}))
"""


def argv(launch: Launch) -> list[str]:
    said = list(launch.command) or [launch.python, "-m", "llama_cpp.server"]
    said += ["--model", launch.model, "--host", launch.host, "--port", str(launch.port)]
    said += ["--interrupt_requests", "false", "--logits_all", "false", "--flash_attn", "true"]
    if launch.arm.context is None:
        said += ["--n_ctx", "0"]
    if launch.device != "cpu":
        said += ["--n_gpu_layers", "-1", "--split_mode", "0"]
    if launch.log_level:
        said += ["--verbose", "true" if launch.log_level in ("debug", "info") else "false"]
    return said + words("llama_cpp", FLAGS, launch.arm, launch.version, {"kv_dtype": KV_DTYPES}) + list(launch.serve_args)


def environ(launch: Launch) -> dict[str, str]:
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if launch.device == "cpu" else {}  # of a build for GPUs, which would use one for long prompts
    return {"HOST": launch.host, "PORT": str(launch.port), **hidden}


def body(model: str, prompt: str, osl: int) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": osl, "temperature": 0, "stream": True}


def without_end(ends: Sequence[int]) -> dict[str, Any]:
    return {"logit_bias": {str(token): IMPOSSIBLE for token in ends}, "logit_bias_type": "input_ids"}


# A control that its tensors show: a cache that forgets all but the newest 64 tokens.
PROBE = Probe(
    script="in_llama_cpp.py",
    kv={"auto": {"type": "F16"}, "int8": {"type": "Q8_0"}, "int4": {"type": "Q4_0"}},
    weights={"auto": {}, "int8": {"quantize": "Q8_0"}, "int4": {"quantize": "Q4_K_M"}},
    negative={"type": "F16", "forget": 64},
    on={"cuda": {"gpu_layers": -1}},  # all; without it the text would be scored on the processor under the name of a GPU
)

LLAMA_CPP = Framework(
    name="llama_cpp",
    argv=argv,
    environ=environ,
    body=body,
    without_end=without_end,
    vocabulary=VOCABULARY,
    streams_usage=False,
    one_at_a_time=True,
    on_gpu="gpu_layers",
    health="/v1/models",
    needs=("llama_cpp", "uvicorn", "fastapi", "sse_starlette", "starlette_context", "pydantic_settings"),
    cure="pip install 'llama-cpp-python[server]'",
    distributions=("llama-cpp-python",),
    flags=FLAGS,
    probe=PROBE,
    kv_dtypes=KV_DTYPES,
    unsupported=dict.fromkeys(READINGS, "the server of llama-cpp-python has no metrics page"),
    known_failures=(
        PORT_TAKEN,
        (r"Model path does not exist: ([^\n]+)", "there is no file {0}"),
        (
            r"Failed to load model from file: ([^\n]+)",
            "llama.cpp cannot read {0}: is it a whole GGUF file of a model that this version knows?",
        ),
        (r"quantized V cache (?:was requested|requires)", "a quantised V needs flash attention, which was turned off"),
        (
            r"([KV]) cache type (\S+) with block size (\d+) does not divide",
            "the model's heads do not divide into blocks of {2} numbers ({0} as {1})",
        ),
        (r"failed to allocate buffer for kv cache|unable to allocate \S+ buffer", "no memory is left for a context of this length"),
        UNKNOWN_ARGUMENT,
        OUT_OF_MEMORY,
    ),
    resolved=(
        ("gpu_layers", r"offloaded (\d+/\d+) layers to GPU"),
        ("max_model_len", r"\bn_ctx\s+= (\d+)"),
        ("flash_attn", r"\bflash_attn\s+= (\w+)"),
        ("kv_tokens", r"\(\s*(\d+) cells,"),
        ("kv_memory", r"\bsize\s*=\s*([\d.]+ MiB) \(\s*\d+ cells,"),
        ("kv_dtype", r"K \((\w+)\):"),
        ("quantization", r"\bfile type\s+= (\w+)"),
    ),
    source="abetlen/llama-cpp-python 0.3.36 llama_cpp/server/settings.py, app.py, __main__.py, llama_cpp/llama.py",
)  # fmt: skip
