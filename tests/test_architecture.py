"""The star holds: everything may import core; harness, frameworks and report never import each other; pytest stays outside."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pytest_kvcache

ROOT = Path(pytest_kvcache.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).parts[0] != "suites")
PYTEST_MODULES = {"plugin.py", "options.py", "fixtures.py", "hookspecs.py"}
TOP = {*PYTEST_MODULES, "__init__.py", "session.py", "blocks.py", "finish.py", "recording.py", "replay.py", "rows.py", "selection.py"}
FAMILIES = ("core", "harness", "frameworks", "probes", "report", "schemas")
EDGE_MODULES = {"subprocess", "socket", "pathlib", "http", "aiohttp", "psutil", "pynvml", "os", "tempfile", "shutil", "asyncio"}


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever in it."""
    package = ["pytest_kvcache", *path.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{module}.{alias.name}" for alias in node.names} | {module}
    return found


def test_every_file_lies_in_the_star():
    assert {p.name for p in ROOT.glob("*.py")} == TOP
    assert {p.name for p in ROOT.iterdir() if p.is_dir() and p.name not in ("__pycache__", "suites", "slo")} == set(FAMILIES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_dependency_rule(path):
    family, names = path.relative_to(ROOT).parts[0], imports(path)
    if family in FAMILIES:
        allowed = {"core", family} | ({"schemas"} if family == "harness" else set())
        ours = {n.split(".")[1] for n in names if n.startswith("pytest_kvcache.")}
        assert ours <= allowed | {"__version__"}, f"{path} reaches beyond the star"
    if path.name not in PYTEST_MODULES or family in FAMILIES:
        assert not {n for n in names if n.split(".")[0] in ("pytest", "_pytest")}, f"{path} imports pytest"
    if path.name != "plugin.py":
        assert "pytest_kvcache.plugin" not in names
    assert not {n for n in names if n.split(".")[0] == "_pytest"}, "private pytest"


@pytest.mark.parametrize("path", [p for p in FILES if p.relative_to(ROOT).parts[0] == "core"], ids=lambda p: p.name)
def test_the_core_touches_no_world(path):
    reached = {n.split(".")[0] for n in imports(path)} & EDGE_MODULES
    assert reached <= ({"os"} if path.name == "models.py" else set()), "values in, values out (models only takes paths apart)"


def test_the_plugin_is_light():
    """Loading the plugin imports no heavy library."""
    script = (
        "import sys, pytest, importlib.metadata; before = set(sys.modules); import pytest_kvcache.plugin;"
        "import json; print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout)
    heavy = {"numpy", "scipy", "aiohttp", "torch", "transformers", "psutil", "jsonschema", "jinja2", "asyncio", "pynvml"}
    assert not heavy & {name.split(".")[0] for name in loaded}


def test_the_plugin_imports_in_a_fraction_of_what_pytest_takes():
    """20 ms where pytest takes 80. The best of several fresh interpreters, in CPU time: what the machine does besides does not count."""
    script = (
        "import time; a = time.process_time(); import pytest; b = time.process_time(); import pytest_kvcache.plugin; c = time.process_time();"
        "print(b - a, c - b)"
    )
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    told = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env).stdout.split() for _ in range(7)]
    theirs, ours = (min(map(float, column)) for column in zip(*told, strict=True))
    assert ours < 0.25 * theirs, told


def test_public_names_are_exact():
    exported = {n for n in vars(pytest_kvcache) if not n.startswith("_") and n not in FAMILIES and n[0].isupper()}
    assert sorted(exported) == sorted(pytest_kvcache.__all__)
