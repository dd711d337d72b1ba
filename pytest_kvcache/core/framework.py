"""What an adapter says of a serving framework: how it is started, what it can be told, where it says what it does. Frozen values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .spec import Arm

if TYPE_CHECKING:
    from .readings import Places


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Everything an adapter needs to write a command line. `python` is the interpreter that has the framework, `version` the framework's
    there (empty when it is not known: a container's), `folder` an existing one of this start's own.

    `dummy` asks for random weights in the model's shape.
    `arm.memory_share` below 1 says that another server will live beside this one: take no more of the memory than that share.
    `memory_gib` is what this machine has. `log_level` is `debug`, `info`, `warning`, `error`, or empty for the framework's own.
    """

    python: str
    model: str
    port: int
    device: str
    arm: Arm
    version: str = ""
    command: tuple[str, ...] = ()
    tp: int = 1
    dummy: bool = False
    serve_args: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    folder: str = ""
    log_level: str = ""
    memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How a framework is told one setting: `words` gives the arguments for a value. Versions from `since` on have it, `until` and later
    do not."""

    words: Callable[[Any], list[str]]
    since: str = ""
    until: str = ""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How a framework scores a text in its own process: `script`, one of this package's probes, run by its interpreter. It is told an
    arm's precision of the cache and of the weights by `kv` and `weights`, by the names that arms have; what has no row it cannot do.

    `floor` and `negative` are the controls: 16 bits in one pass, and a cache made worse on purpose. `needs`: modules of its interpreter for
    a setting (`kv_dtype=int8`), with the pip line that installs them. `on`: what else it is told on a device (`cpu`, `cuda`). `alone`: its
    interpreter holds one cache at a time, so each arm has a process of its own, which tells the `top` likeliest tokens of each place: a
    divergence from these is a lower bound.
    """

    script: str
    kv: Mapping[str, Mapping[str, Any]]
    weights: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"auto": {}})
    floor: Mapping[str, Any] = field(default_factory=lambda: {"one_pass": True})
    negative: Mapping[str, Any]
    needs: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    on: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    alone: bool = False
    top: int = 20


@dataclass(frozen=True, kw_only=True)
class Framework:
    """An adapter: facts about one serving framework and pure functions, found by entry point."""

    name: str
    source: str = ""  # what was read for it: repository, version, file

    # --- how it is installed: modules without which it cannot start, the pip line that installs them, distributions whose versions
    # matter (those before torch are the framework itself)
    needs: tuple[str, ...]
    cure: str
    distributions: tuple[str, ...] = ()

    # --- how it is started: its command line; variables of every launch and of one; texts that it reads from the launch's folder
    argv: Callable[[Launch], list[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    environ: Callable[[Launch], dict[str, str]] = lambda launch: {}
    files: Callable[[Launch], dict[str, str]] = lambda launch: {}

    # --- what an arm may ask of it: a row for each span of versions (`core.flags`; what has none it cannot be told), and its own word for
    # each precision, by the common names (`fp8`, `int8`, `int4`) and by its own; `quantizations` are those that it makes of 16-bit weights
    # as it loads them, by the common names; its other words for a method are passed on as they are
    flags: Mapping[str, tuple[Flag, ...]] = field(default_factory=dict)
    kv_dtypes: Mapping[str, str] = field(default_factory=lambda: {"auto": ""})
    weight_dtypes: Mapping[str, str] = field(default_factory=lambda: {"auto": ""})
    quantizations: Mapping[str, str] = field(default_factory=dict)
    one_at_a_time: bool = False  # it answers no two requests at once
    tensor_parallel: bool = False  # it can spread a model over several GPUs
    on_gpu: str = (
        ""  # a name of `resolved`, below, that it says only if it really uses a GPU: its builds for processors take the same flags
    )
    dummy: bool = False  # it can make up random weights
    checkpoints: bool = False  # it loads checkpoints of quantised weights (compressed-tensors, AWQ, GPTQ) and sees itself what they are

    # --- weights that it cannot serve as they are: Python source run in its own interpreter with (source file, target directory), skipped
    # when the target exists; or Python source that prints the vocabulary of a packed file (*.gguf) which it serves as it is, in the form of
    # a tokenizer.json: `model.vocab`, and the tokens that end a text as special `added_tokens`
    prepare: str | None = None
    vocabulary: str | None = None

    # --- how it is asked: the path, and one streamed completion of so many tokens (model, prompt, tokens) that ignores the end of text;
    # what is added where that takes the ids of the tokens that end one; whether a stream tells its token counts
    endpoint: str = "/v1/completions"
    body: Callable[[str, str, int], dict[str, Any]]
    without_end: Callable[[Sequence[int]], dict[str, Any]] = lambda ends: {}
    streams_usage: bool = True
    health: str = "/health"

    # --- how it scores a text through its cache, or why it cannot here
    probe: Probe | None = None
    no_probe: str = ""

    # --- what its metrics page says in common readings, and why it has none of some
    metrics: str = "/metrics"
    readings: Places = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)

    # --- what its log says: why it failed (pattern, meaning), what a server that runs nevertheless warns of (name, pattern), which version
    # has an argument, and what it decided itself (`attention_backend`, `block_size`, `kv_blocks`, `kv_tokens`, `max_model_len`, `dtype`,
    # `kv_dtype`, `quantization`, `eager`, …; see `core.resolved`), also on its metrics page
    known_failures: tuple[tuple[str, str], ...] = ()
    known_warnings: tuple[tuple[str, str], ...] = ()
    history: Mapping[str, str] = field(default_factory=dict)
    resolved: tuple[tuple[str, str], ...] = ()
