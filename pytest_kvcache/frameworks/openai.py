"""Any server that speaks the OpenAI API, by `--kv-endpoint`: nothing is known of it but its answers. It cannot be started.

The request asks for a fixed length by `ignore_eos`, which vLLM, SGLang, TensorRT-LLM and llama.cpp's server know and others ignore: an
answer that ended early makes a run invalid. Where the framework behind the address is known, naming it (`--kv-framework=vllm`) reads its
metrics page too.
"""

from __future__ import annotations

from ..core.framework import Framework, Launch
from ..core.readings import READINGS
from ..core.spec import UserError
from .shared import UNPACK_GGUF, ignoring_eos


def argv(launch: Launch) -> list[str]:
    raise UserError("--kv-framework=openai is a server that runs already: name it by --kv-endpoint=URL")


OPENAI = Framework(
    name="openai",
    argv=argv,
    body=ignoring_eos,
    needs=(),
    cure="",
    prepare=UNPACK_GGUF,
    unsupported=dict.fromkeys(READINGS, "nothing is known of this server's metrics page; name its framework by --kv-framework"),
    source="OpenAI API reference, completions; vllm-project/vllm vllm/entrypoints/openai/completion/protocol.py for ignore_eos",
)
