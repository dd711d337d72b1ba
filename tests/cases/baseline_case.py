"""Cases of kinds `baseline_file` and `baseline_recipe` on the product: a file where the baseline belongs, or steps done to a good one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness.baselines import baseline_path, load_baseline

from ..plugin.conftest import Project, Result, make_project
from .catalogue import contains
from .gate_case import classes

WHERE = ("cpu", "transformers", "smollm2-135m")
USAGE_ERROR = 4  # of pytest
CLASSES = {
    "unreadable": r" is empty;| is not valid JSON |Git LFS pointer|merge conflict| a web page| is not UTF-8| cannot be read| is nested more",
    "non_finite_value": r"NaN is no|Infinity is no| is no finite number", "bad_schema": r" @ \$| nested more than",
    "schema_unsupported": r": written for schema ",
}  # fmt: skip
# How a field of `expected` is compared with what was found.
TESTS: dict[str, Callable[[Any, Any], bool]] = {
    "must_name_file": lambda found, wanted: found or not wanted, "error_class": lambda found, wanted: wanted in found,
    "hint_contains": lambda found, wanted: contains(found.lower(), wanted.lower()), "never": lambda found, wanted: not found & set(wanted),
    "strict_exit_code_not": lambda found, wanted: found != wanted, "summary_mentions": contains,
    "baseline_bytes_below": lambda found, wanted: 0 < found < wanted,
}  # fmt: skip
RECIPE_TESTS = TESTS | {"outcome": lambda found, wanted: wanted in found}


def said(message: str, path: Path) -> dict[str, Any]:
    """What a refusal in one line says."""
    return {
        "outcome": "error", "must_name_file": str(path) in message, "hint_contains": message,
        "error_class": {name for name, words in CLASSES.items() if re.search(words, message)},
    }  # fmt: skip


def with_alternatives(case: Mapping[str, Any]) -> dict[str, Any]:
    """The other outcomes that a case accepts, as the catalogue reads them."""
    other = case["expected"].get("accept", ())
    return dict(case) | {"accept": {"outcome": [{"value": v} for v in other]}}


def put(folder: Path, content: bytes) -> Path:
    path = baseline_path(folder, *WHERE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def read(folder: Path, content: bytes) -> dict[str, Any]:
    """What comes of a file where the baseline belongs."""
    path, message = put(folder, content), ""
    try:
        load_baseline(folder, *WHERE)
    except UserError as e:
        message = str(e)
    found = {"outcome": "ok", "must_name_file": False, "error_class": set(), "hint_contains": ""}
    return found | (said(message, path) if message else {}) | {
        "no_traceback": message.isprintable(), "file_unchanged": path.read_bytes() == content,
    }  # fmt: skip


def carried(content: bytes, good: str) -> bytes:
    """A good file carried as the case's is: a byte order mark before it, other line ends, another coding."""
    for mark, coding in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16"), (b"\xfe\xff", "utf-16")):
        if content.startswith(mark):
            return good.encode(coding)
    return (good.replace("\n", "\r\n") if b"\r\n" in content else good).encode()


# --- recipes -------------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """A throw-away project of one test with two gates, and what its sessions have said."""

    folder: Path
    project: Project = field(init=False)
    sessions: list[Result] = field(default_factory=list)
    smoke: Result | None = None
    gpu: str = "Test CPU, 2 cores"
    content: bytes | None = None

    def __post_init__(self) -> None:
        self.project = make_project(self.folder)
        (self.folder / "test_other.py").unlink()
        suite = self.folder / "test_fixed.py"
        suite.write_text(suite.read_text().replace("(1, 2, 4)", "(1,)").replace("concurrency=c)", "concurrency=c, profile='smoke')"))

    def good(self) -> dict[str, Any]:
        """A good baseline of the product, recorded where there is none."""
        if not self.project.baseline.exists():
            save(self, gpu=None)
        return json.loads(self.project.baseline.read_text())


def save(bench: Bench, *, gpu: str | None, **_: Any) -> None:
    bench.gpu = gpu or bench.gpu
    done = bench.project.run("--kv-record=missing", cpu=bench.gpu)
    assert done.code == 0, done.out
    bench.content = bench.project.baseline.read_bytes()


def compare(bench: Bench, *, gpu: str | None, **_: Any) -> None:
    """Once as it is, where a missing baseline fails, and once in profile smoke, which only reports it."""
    before, now = bench.gpu, gpu or bench.gpu
    path = bench.project.baseline
    bench.content = path.read_bytes() if path.is_file() else None
    bench.sessions.append(bench.project.run(seed=1, cpu=now))
    if before != now:
        assert before in bench.sessions[-1].out and now in bench.sessions[-1].out
    bench.smoke = bench.project.run("--kv-profile=smoke", seed=1, cpu=now)


def empty(bench: Bench, **_: Any) -> None:
    folder = bench.folder / "baselines"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()


def parametrize(bench: Bench, *, size: str, **_: Any) -> None:
    suite = bench.folder / "test_fixed.py"
    payload = f'[{{"text": "x" * {size.replace(",", "")}}}]'
    text = suite.read_text().replace("@pytest.mark.kv_gates", f'@pytest.mark.parametrize("payload", {payload})\n@pytest.mark.kv_gates')
    suite.write_text(text.replace("(kv_result, kv_gate)", "(kv_result, kv_gate, payload)"))


def delete(bench: Bench, **_: Any) -> None:
    bench.good()
    bench.project.baseline.unlink()


def cut(bench: Bench, **_: Any) -> None:
    bench.good()
    content = bench.project.baseline.read_bytes()
    bench.project.baseline.write_bytes(content[: len(content) // 2])


OURS = {"direction": "better", "schema version": "schema", "gpu name": "gpu"}


def change(bench: Bench, *, name: str, value: str | None, **_: Any) -> None:
    """Every field of that name in the file is set to a value, or taken out."""
    doc, name = bench.good(), OURS.get(name.lower(), name)
    found = []

    def walk(inner: Any) -> None:
        if isinstance(inner, dict) and name in inner:
            found.append(inner)
        for each in inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ():
            walk(each)

    walk(doc)
    assert found, f"the product's baseline has no field {name!r}"
    for inner in found:
        if value is None:
            del inner[name]
        else:
            inner[name] = "@@"
    text = "" if value is None else json.dumps(value.strip("'")) if value.startswith("'") else value
    bench.project.baseline.write_text(json.dumps(doc).replace('"@@"', text))


FIELD = r"(?:the )?(?:stored )?'?(?P<name>[\w ]+?)'?"
STEPS: dict[str, Callable[..., None]] = {
    r"empty baseline (?:directory|folder)": empty,
    r"save (?:a|the) (?:good )?baseline(?: on GPU name '(?P<gpu>[^']+)')?": save,
    r"run (?:the|with|with the) comparison(?: with the GPU name reported as '(?P<gpu>[^']+)')?(?: and the failing limit switched on)?": compare,
    r"parametrize a test with a dict that holds a (?P<size>[\d,]+)-character string": parametrize,
    r"(?:delete|remove) the baseline file": delete,
    r"(?:truncate|cut) the baseline file(?: in the middle)?": cut,
    rf"(?:set|change) {FIELD} to (?P<value>'[^']*'|\S+)": change,
    rf"(?:delete|remove) the (?:field|key) {FIELD}(?P<value>)": lambda bench, *, name, **_: change(bench, name=name, value=None),
}


def do(bench: Bench, step: str) -> None:
    """One step of a recipe; AssertionError for one that this runner does not know."""
    for pattern, act in STEPS.items():
        if found := re.fullmatch(pattern, step, re.IGNORECASE):
            act(bench, **found.groupdict() | ({"gpu": None} if "gpu" not in found.groupdict() else {}))
            return
    raise AssertionError(f"this runner does not know the step {step!r}")


def outcome(result: Result, path: Path) -> set[str]:
    """What a session came to, in the words of the cases: what all of its gates came to."""
    if result.code == USAGE_ERROR:
        (line,) = (x for x in result.out.splitlines() if x.startswith("ERROR: "))
        return {"error", "invalid_baseline"} if str(path) in line else {"usage_error"}
    rows = [SimpleNamespace(**row) for row in result.run["verdicts"]]
    return set.intersection(*map(classes, rows))


def found_of(bench: Bench, expected: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe led to; only what there is."""
    path = bench.project.baseline
    found: dict[str, Any] = {"baseline_bytes_below": path.stat().st_size if path.is_file() else 0}
    if bench.sessions and bench.smoke:
        both, last = [*bench.sessions, bench.smoke], bench.sessions[-1]
        words = [r.out for r in both]
        found |= {
            "outcome": outcome(last, path), "never": set().union(*(outcome(r, path) for r in both)),
            # Where two exit codes are named, the one that forgives is that of a session which only reports.
            "exit_code": (bench.smoke if "strict_exit_code_not" in expected else last).code, "strict_exit_code_not": last.code,
            "summary_mentions": min(words, key=lambda w: contains(w, expected.get("summary_mentions", ""))),
            "no_traceback": not any("Traceback" in w or "INTERNALERROR" in w for w in words),
            "must_name_file": str(path) in last.out, "file_unchanged": (path.read_bytes() if path.is_file() else None) == bench.content,
        }  # fmt: skip
    return found
