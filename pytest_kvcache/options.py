"""The face of the plugin: `--kv-*` options and `kv_*` ini settings, read once into one frozen Settings."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from . import frameworks
from .core.commandline import masked_words
from .core.framework import Framework
from .core.gpus import find_gpu
from .core.masking import masked
from .core.models import MODELS, default_model, find_model
from .core.spec import PROFILES, Gpu, Model, UserError

# flag, ini type, metavar, help. Help starts with a capital letter; a single phrase has no full stop.
_OPTIONS = (
    ("gpu", "string", "NAME", "Device to judge: a GPU of the catalogue (h100, l40s, ...) or cpu"),
    ("framework", "args", "NAME", "Serving framework (repeatable; default: transformers on cpu, vllm on a GPU)"),
    ("model", "args", "PATH|ID|KEY", "Model to serve: a folder or .gguf file, a hub id, or a key of the catalogue (repeatable)"),
    ("tp", "string", "N", "GPUs that the server spreads a model over (tensor parallelism; default: 1)"),
    ("endpoint", "string", "URL", "Judge a server that runs already, in place of starting one"),
    ("restart", "string", "CMD", "Shell command that gives the server of --kv-endpoint a fresh start, as baselines need"),
    ("serve-arg", "args", "ARG", "Argument passed on to the server as it is (repeatable)"),
    ("profile", "string", "NAME", f"How much to measure: {', '.join(PROFILES)} (default: ci)"),
    ("budget", "string", "TIME", "Stop starting new runs after this time: 90, 45s, 30m, 2h"),
    ("corpus", "string", "PATH|wikitext2", "Text to score: PATH (text, JSON lines, parquet), wikitext2, or nothing for the texts of pydoc"),
    ("baselines", "string", "DIR", "Folder of the stored numbers (default: baselines in the root directory)"),
    ("record", "string", "missing|all", "Record this session's runs as the baseline: where there is none, or anew"),
    ("replay", "string", "RUN", "Judge a stored run (a folder of --kv-report, or its run.json) again; starts no engine"),
    ("ab", "string", "PYTHON", "Interpreter of another build: measure it and this one in turns, and judge this one against it"),
    ("calibrate", "bool", "", "Measure how much restarts and sessions of this machine differ, and keep it for its gates; judges nothing"),
    ("report", "string", "DIR", "Write report.html, run.json and every request into this folder"),
)
# How the server of --kv-endpoint is reached; its key is in the variable KV_API_KEY.
_REACHED: tuple[tuple[str, Literal["linelist", "bool", "string"], str], ...] = (
    ("kv_headers", "linelist", "Headers for the server of --kv-endpoint, a line each: Name: value"),
    ("kv_ca_file", "string", "Certificate of the authority to trust, for an https endpoint"),
    ("kv_cert_file", "string", "Client certificate for an https endpoint"),
    ("kv_key_file", "string", "Its key, where it is not in the same file"),
    ("kv_insecure", "bool", "Check no certificate of an https endpoint"),
)
LOG_LEVELS = ("debug", "info", "warning", "error")
_REPEATABLE = ("framework", "model", "serve-arg")


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvcache", "performance of LLM KV caches")
    for name, kind, metavar, text in _OPTIONS:
        dest = "kv_" + name.replace("-", "_")
        if kind == "bool":
            group.addoption(f"--kv-{name}", dest=dest, action="store_true", default=False, help=text)
        elif name in _REPEATABLE:
            group.addoption(f"--kv-{name}", dest=dest, action="append", metavar=metavar, default=None, help=text)
        else:
            group.addoption(f"--kv-{name}", dest=dest, metavar=metavar, default=None, help=text)
        parser.addini(dest, text, type=kind, default={"args": [], "bool": False, "string": ""}[kind])
    parser.addini("kv_strict", "Fail tests whose gate is inconclusive", type="bool", default=False)
    parser.addini("kv_log_level", f"What servers log: {', '.join(LOG_LEVELS)} (default: their own)", default="")
    parser.addini("kv_start_timeout", "Longest wait for a server to be ready: 90, 45s, 30m (default: 3m on cpu, 15m on a GPU)", default="")
    for name, kind, text in _REACHED:
        parser.addini(name, text, type=kind, default={"linelist": [], "bool": False, "string": ""}[kind])
    for name in frameworks.names():
        parser.addini(f"kv_python_{name}", f"Interpreter that has {name} (default: the one that runs pytest)", default="")
        parser.addini(f"kv_command_{name}", f"Command that starts {name}, in place of its interpreter (a container, say)", default="")


if TYPE_CHECKING:
    from .core.address import Endpoint


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A framework and how to start it here."""

    framework: Framework
    python: str
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything the user asked for, checked. `baselines_given` tells a folder named by the user from the default; `run` is the file
    that `replay` names with its document, `some` says that the user selected tests. `ab` is the interpreter of the other build, of a
    stored run too. `corpus` is as `harness.corpus.load_corpus` takes it."""

    gpu: Gpu
    engines: tuple[Engine, ...]
    models: tuple[Model, ...]
    tp: int
    endpoint: Endpoint | None
    serve_args: tuple[str, ...]
    profile: str
    budget_s: float | None
    baselines: Path
    baselines_given: bool
    record: str | None
    report: Path | None
    replay: Path | None
    run: tuple[Path, Mapping[str, Any]] | None
    some: bool
    ab: str | None
    calibrate: bool
    strict: bool
    start_timeout_s: float | None
    log_level: str
    command: str
    corpus: str = ""


def _value(config: pytest.Config, name: str) -> str:
    dest = "kv_" + name
    return str(config.getoption(dest) or config.getini(dest) or "")


def _values(config: pytest.Config, name: str) -> list[str]:
    dest = "kv_" + name
    return list(config.getoption(dest) or config.getini(dest) or [])


def active(config: pytest.Config) -> bool:
    """Whether a device was named, or a stored run; without either every suite is skipped."""
    return bool(_value(config, "gpu") or _value(config, "replay"))


def _log_level(config: pytest.Config) -> str:
    level = str(config.getini("kv_log_level")).lower()
    if level not in ("", *LOG_LEVELS):
        raise UserError(f"kv_log_level={level}: choose one of {', '.join(LOG_LEVELS)}")
    return level


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise UserError(f"--kv-{option}={value}: choose one of {', '.join(allowed)}")
    return value


def parse_time(text: str, where: str) -> float:
    """Seconds of `90`, `45s`, `30m` or `2h`; UserError naming the setting otherwise."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    seconds = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0
    if seconds <= 0:
        raise UserError(f"{where}={text}: not a time; write 90, 45s, 30m or 2h")
    return seconds


def _endpoint(config: pytest.Config, record: str) -> Endpoint | None:
    """The server that runs already; UserError for what cannot be right of it, or beside it."""
    text, restart = _value(config, "endpoint"), _value(config, "restart")
    if not text:
        if restart:
            raise UserError("--kv-restart goes with --kv-endpoint: it restarts the server that this names")
        return None
    from .core.address import Endpoint, parse, reached

    if other := next(
        (o for o in ("ab", "calibrate", "corpus", "serve-arg", "tp") if _value(config, o.replace("-", "_")) not in ("", "[]", "False")), ""
    ):
        raise UserError(f"--kv-{other}: nothing is started with --kv-endpoint; leave one of the two out")
    if record and not restart:
        raise UserError(
            "--kv-record with --kv-endpoint: a baseline is made of fresh starts; name the command that makes one by --kv-restart"
        )
    headers = dict(_header(line) for line in config.getini("kv_headers"))
    if (key := os.environ.get("KV_API_KEY")) and not any(name.lower() == "authorization" for name in headers):
        headers["Authorization"] = f"Bearer {key}"
    address = parse(text)
    tls = _tls(config, address.origin)
    try:
        server = reached(address, os.environ, headers=headers, **tls)
    except ValueError as e:
        raise UserError(f"--kv-endpoint: {e}") from e
    return Endpoint(address=address, server=server, restart=restart)


def _header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon or not re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name.strip()):
        raise UserError("kv_headers: a line is no header; write Name: value")  # the line itself may be a secret
    return name.strip(), value.strip()


def _tls(config: pytest.Config, origin: str) -> dict[str, Any]:
    """How certificates are checked and shown; UserError for what would not be used."""
    found: dict[str, Any] = {name: _file(config, name) for name in ("ca_file", "cert_file", "key_file")}
    found["insecure"] = bool(config.getini("kv_insecure"))
    given = [f"kv_{name}" for name, value in found.items() if value]
    if given and not origin.startswith("https:"):
        raise UserError(f"{given[0]}: --kv-endpoint is an http address, which has no certificate; write https there, or leave this out")
    if found["key_file"] and not found["cert_file"]:
        raise UserError("kv_key_file: it is the key of a certificate; name that by kv_cert_file")
    return found


def _file(config: pytest.Config, name: str) -> str | None:
    named = str(config.getini(f"kv_{name}"))
    if not named:
        return None
    path = config.rootpath / Path(named).expanduser()
    if not path.is_file():
        raise UserError(f"kv_{name}={named}: no such file")
    return str(path)


def _tensor_parallel(text: str, gpu: str) -> int:
    if not text:
        return 1
    if not text.isdecimal() or not 1 <= int(text) <= 1024:
        raise UserError(f"--kv-tp={text}: not a number of GPUs; write 1, 2, 4, 8")
    if int(text) > 1 and gpu == "cpu":
        raise UserError(f"--kv-tp={text}: tensor parallelism is over GPUs; leave it out with --kv-gpu=cpu")
    return int(text)


def _model(name: str) -> Model:
    path = Path(name).expanduser()
    model = find_model(str(path.absolute()) if path.exists() else name)
    if model is None:
        raise UserError(f"--kv-model={masked(name)}: no such model. Known: {', '.join(sorted(MODELS))}; or a path, or a hub id (org/name)")
    return model


def _engine(config: pytest.Config, name: str) -> Engine:
    framework = frameworks.load(name)
    python = str(config.getini(f"kv_python_{framework.name}")) or sys.executable
    command = tuple(shlex.split(str(config.getini(f"kv_command_{framework.name}"))))
    return Engine(framework=framework, python=python, command=command)


def _unique(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is judged: said by the options or, for a stored run, by that run."""

    gpu: str
    profile: str
    frameworks: list[str]
    models: tuple[Model, ...]
    run: tuple[Path, Mapping[str, Any]] | None


def _asked(config: pytest.Config) -> Subject:
    gpu = find_gpu(_value(config, "gpu"))
    return Subject(
        gpu=gpu.key,
        profile="ci",
        frameworks=_unique(
            _values(config, "framework") or [frameworks.default_name("endpoint" if _value(config, "endpoint") else gpu.kind)]
        ),
        models=tuple(_model(n) for n in _unique(_values(config, "model") or [default_model(gpu)])),
        run=None,
    )


def _stored(config: pytest.Config, path: Path) -> Subject:
    """From the run to be judged again. What the ini file asks of measuring is no matter; an option that says otherwise is an error."""
    from . import replay

    file, run = replay.head(path)
    plan = replay.plan_of(run)
    named = [_unique([b.split("/", 2)[i] for b in plan]) for i in (0, 1)]
    typed: dict[str, list[str]] = {name: config.getoption(f"kv_{name}") or [] for name in ("framework", "model")}
    gpu = config.getoption("kv_gpu")
    for option, has, meant in (
        ("gpu", [run["gpu"]], {gpu: find_gpu(gpu).key} if gpu else {}),
        ("framework", named[0], {n: frameworks.load(n).name for n in typed["framework"]}),
        ("model", named[1], {n: _model(n).key for n in typed["model"]}),
    ):
        if other := [given for given, key in meant.items() if key not in has]:
            raise UserError(f"--kv-{option}={other[0]}: the run to be judged again is of {', '.join(has)}; leave the option out")
    if config.getoption("kv_ab"):
        raise UserError("--kv-ab: nothing is measured with --kv-replay; a stored run of two builds is judged as such without it")
    if config.getoption("kv_calibrate"):
        raise UserError("--kv-calibrate: nothing is measured with --kv-replay; leave one of the two out")
    if config.getoption("kv_corpus"):
        raise UserError("--kv-corpus: nothing is measured with --kv-replay; leave one of the two out")
    if config.getoption("kv_record"):
        raise UserError("--kv-record: nothing is measured with --kv-replay, so there is nothing to record")
    report = _value(config, "report")
    if report and (config.invocation_params.dir / report).resolve() == file.parent.resolve():
        raise UserError(f"--kv-report={report}: that is the run to be judged again, and would be overwritten; name another folder")
    models = tuple(find_model(key) or Model(key=key) for key in named[1])
    return Subject(gpu=run["gpu"], profile=run["profile"], frameworks=named[0], models=models, run=(file, run))


def _other_build(config: pytest.Config, subject: Subject, engines: tuple[Engine, ...], record: str) -> str | None:
    """The interpreter of `--kv-ab`; UserError where there is none such, or where it is no question."""
    if subject.run:
        return str(subject.run[1]["ab"]) if "ab" in subject.run[1] else None
    named = _value(config, "ab")
    if not named:
        return None
    if record:
        raise UserError("--kv-ab compares two builds with each other and stores nothing: leave --kv-record out")
    if commands := [e.framework.name for e in engines if e.command]:
        raise UserError(
            f"--kv-ab names an interpreter, but {commands[0]} is started by kv_command_{commands[0]}; use kv_python_{commands[0]}"
        )
    path = (config.invocation_params.dir if config.getoption("kv_ab") else config.rootpath) / Path(named).expanduser()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise UserError(f"--kv-ab={masked(named)}: no such interpreter; name the python of the environment that has the other build")
    return os.path.abspath(path)  # not resolved: the python of a virtual environment is a link


def _calibrates(config: pytest.Config, subject: Subject, record: str) -> bool:
    """Whether this session measures the machine's noise; UserError beside an option that asks for something else."""
    if subject.run or not (config.getoption("kv_calibrate") or config.getini("kv_calibrate")):
        return False
    if other := [name for name, given in (("record", record), ("ab", _value(config, "ab"))) if given]:
        raise UserError(f"--kv-calibrate stores the machine's noise and judges nothing: leave --kv-{other[0]} out")
    return True


def _corpus(config: pytest.Config) -> str:
    """What `--kv-corpus` asks for, a path from where it was written; it is read when it is scored."""
    from .core.corpora import WIKITEXT2

    named = _value(config, "corpus")
    if named in ("", WIKITEXT2):
        return named
    # By os.path: what follows a # is no path, and stays as it is.
    return os.path.join(config.invocation_params.dir if config.getoption("kv_corpus") else config.rootpath, os.path.expanduser(named))


def _selects(config: pytest.Config) -> bool:
    """Whether the user asks for some of the tests only."""
    some = ("keyword", "markexpr", "lf", "deselect", "stepwise")
    return any(config.getoption(name, None) for name in some) or any("::" in str(a) for a in config.invocation_params.args)


def read_settings(config: pytest.Config) -> Settings:
    """The settings; raises UserError, one line, for anything that cannot be right."""
    run = _value(config, "replay")
    # An option is typed somewhere, an ini value belongs to the project.
    replay = (config.invocation_params.dir if config.getoption("kv_replay") else config.rootpath) / run if run else None
    subject = _stored(config, replay) if replay else _asked(config)
    named = _value(config, "baselines")
    folder = (config.invocation_params.dir if config.getoption("kv_baselines") else config.rootpath) / (named or "baselines")
    if len({m.key for m in subject.models}) < len(subject.models):
        raise UserError(f"--kv-model: two models would share a name in baselines: {', '.join(m.key for m in subject.models)}")
    timeout = str(config.getini("kv_start_timeout"))
    report, record, budget = _value(config, "report"), _value(config, "record"), _value(config, "budget")
    if replay:  # the run and the options decide, not what the ini file says of measuring
        named, record = config.getoption("kv_baselines") or "", ""
    profile = config.getoption("kv_profile") if replay else _value(config, "profile")
    engines = tuple({e.framework.name: e for e in (_engine(config, n) for n in subject.frameworks)}.values())
    if len(engines) > 1 and _value(config, "endpoint") and not replay:
        raise UserError(f"--kv-framework: one server is one framework, {len(engines)} are named; leave all but one out")
    return Settings(
        gpu=find_gpu(subject.gpu),
        engines=engines,
        models=subject.models,
        tp=1 if subject.run else _tensor_parallel(_value(config, "tp"), subject.gpu),
        endpoint=None if subject.run else _endpoint(config, record),
        serve_args=tuple(_values(config, "serve_arg")),
        profile=_choice("profile", profile or subject.profile, PROFILES),
        budget_s=parse_time(budget, "--kv-budget") if budget else None,
        baselines=folder,
        baselines_given=bool(named),
        record=_choice("record", record, ("missing", "all")) if record else None,
        report=config.invocation_params.dir / report if report else None,
        replay=replay,
        run=subject.run,
        some=_selects(config),
        ab=_other_build(config, subject, engines, record),
        calibrate=_calibrates(config, subject, record),
        strict=bool(config.getini("kv_strict")),
        start_timeout_s=parse_time(timeout, "kv_start_timeout") if timeout else None,
        log_level=_log_level(config),
        command=shlex.join(["pytest", *_without_restart(masked_words(map(str, config.invocation_params.args)))]),
        corpus="" if subject.run else _corpus(config),
    )


def _without_restart(words: Iterable[str]) -> list[str]:
    """The arguments without the command of `--kv-restart`: passwords of other programs stand there in forms that nobody knows."""
    found: list[str] = []
    for word in words:
        hidden = bool(found) and found[-1] == "--kv-restart"
        found.append("..." if hidden else "--kv-restart=..." if word.startswith("--kv-restart=") else word)
    return found


def check_named(config: pytest.Config) -> None:
    """UserError for an option that names nothing: a variable of a script that was not set, say."""
    for name, *_ in _OPTIONS:
        given = config.getoption("kv_" + name.replace("-", "_"))
        if given == "" or (isinstance(given, list) and "" in given):
            raise UserError(f"--kv-{name}= names nothing; give it a value or leave it out")


def check_inactive(config: pytest.Config) -> None:
    """UserError when an option was given that means nothing without a device."""
    given = [name for name, *_ in _OPTIONS if name != "gpu" and config.getoption("kv_" + name.replace("-", "_"))]
    if given:
        raise UserError(f"--kv-{given[0]} needs a device: add --kv-gpu=NAME (--kv-gpu=cpu runs on this machine's processors)")
