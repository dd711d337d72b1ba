"""What an adapter says of a serving framework: how it is started, what it can be told, where it says what it does. Frozen values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    `memory_gib` is what this machine has.
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
    memory_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Flag:
    """How a framework is told one setting: `words` gives the arguments for a value. Versions from `since` on have it, `until` and later
    do not."""

    words: Callable[[Any], list[str]]
    since: str = ""
    until: str = ""


@dataclass(frozen=True, kw_only=True)
class Framework:
    """An adapter: facts about one serving framework and pure functions, found by entry point.

    `argv` writes the command line, `body` one streaming completion request of `osl` tokens that ignores the end of text, `needs` are the
    importable modules without which it cannot start, `cure` the pip line that installs them. `flags` says how it is told the settings of
    an arm (see `core.flags`); what it has no flag for it cannot be asked. `environ` gives the variables of one launch, beside `env`,
    those of all, and `files` the texts that it reads from its folder, by name. `distributions` begins with the one whose version is the
    framework's. `kv_dtypes` and `weight_dtypes` give its own word for each precision that it has, by the common names (`fp8`, `int8`,
    `int4`) and by its own. A server that is `one_at_a_time` answers no two requests at once; one that has `dummy` can make up random
    weights. `prepare` is Python source run in the framework's own interpreter with (source file, target directory) to make weights
    loadable that the framework cannot serve as they are; it is skipped when the target exists. `known_failures` maps patterns of the
    server's log to what they mean; `known_warnings` names what a server that runs nevertheless warns of; `history` says of arguments
    which version has them. `readings` says where its metrics page (`metrics`) has the common readings, `unsupported` why it has none of
    some. `resolved` names what the server decides itself (`attention_backend`, `block_size`, `kv_blocks`, `kv_tokens`, `max_model_len`,
    `dtype`, `kv_dtype`, `quantization`, `eager`, …) with patterns of its log or metrics page; see `core.resolved`.
    """

    name: str
    argv: Callable[[Launch], list[str]]
    body: Callable[[str, str, int], dict[str, Any]]
    needs: tuple[str, ...]
    cure: str
    distributions: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    environ: Callable[[Launch], dict[str, str]] = lambda launch: {}
    files: Callable[[Launch], dict[str, str]] = lambda launch: {}
    flags: Mapping[str, tuple[Flag, ...]] = field(default_factory=dict)
    health: str = "/health"
    metrics: str = "/metrics"
    readings: Places = field(default_factory=dict)
    unsupported: Mapping[str, str] = field(default_factory=dict)
    endpoint: str = "/v1/completions"
    prepare: str | None = None
    kv_dtypes: Mapping[str, str] = field(default_factory=lambda: {"auto": ""})
    weight_dtypes: Mapping[str, str] = field(default_factory=lambda: {"auto": ""})
    one_at_a_time: bool = False
    dummy: bool = False
    known_failures: tuple[tuple[str, str], ...] = ()
    known_warnings: tuple[tuple[str, str], ...] = ()
    history: Mapping[str, str] = field(default_factory=dict)
    resolved: tuple[tuple[str, str], ...] = ()
    source: str = ""
