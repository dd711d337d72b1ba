"""Nothing secret that a user types, and nothing that a log says, gets into terminal, report or JUnit as it is."""

import pytest

SECRET = "Zq9-Secret"
EVIL = "died: \\x1b[32mpass\\rpass  forged\\x1b[0m\\npass  forged/a/b/c  1 tok/s\\n\\x1b]0;title\\x07  to cure it: forged"
WRITES_A_LOG = """
import pathlib, tempfile

def pytest_runtest_setup(item):
    for scratch in pathlib.Path(tempfile.gettempdir()).glob("pytest-kvcache-*"):
        (scratch / "logs").mkdir(exist_ok=True)
        (scratch / "logs" / "x.log").write_text("ready\\nkey {0} of {0}x\\nargs: {{'api_key': ['Other1']}}\\n")
"""


def everything(project, result):
    """All that a session left for others: its output and every file of its report."""
    found = [result.out, *(p.read_text(errors="replace") for p in project.folder.glob("junit*.xml"))]
    folders = (project.folder / f"report{project.calls}", project.folder / "baselines")
    found += [p.read_text(errors="replace") for folder in folders for p in folder.rglob("*") if p.is_file()]
    return "\n".join(found)


@pytest.mark.parametrize(
    "args",
    [
        ["-o", f"kv_serve_arg=--api-key {SECRET}"],
        ["-o", f"kv_serve_arg=--port=1 --hftoken={SECRET}"],
        [f"--override-ini=kv_serve_arg=--api-key {SECRET}"],
        [f"--kv-serve-arg=--api-key={SECRET}"],
        ["--kv-serve-arg=--api-key", f"--kv-serve-arg={SECRET}"],
        ["-o", f"kv_command_transformers=docker run -e SSHPASS={SECRET} img"],
        ["-o", f'kv_command_transformers=serve --config \'{{"api_key": ["{SECRET}"]}}\''],
    ],
    ids=" ".join,
)
def test_a_secret_among_the_arguments_is_stored_nowhere(kv_project, args):
    result = kv_project.run(*args, "-k", "c1", "--kv-record=missing")
    assert result.run is not None, result.out
    assert "***" in result.run["command"]
    assert SECRET not in everything(kv_project, result)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([f"--kv-model=https://me:{SECRET}@host/m"], ["--kv-model=https://***@host/m: no such model", "hub id"]),
        ([f"--kv-model=https://host/x/m?token={SECRET}"], ["?token=***: no such model", "hub id"]),
        ([f"--kv-serve-arg=--port={SECRET}"], ["--kv-serve-arg=--port: what follows is no port; write a number from 1 to 65535"]),
        (["--kv-serve-arg=--port", f"--kv-serve-arg={SECRET}"], ["what follows is no port"]),
        (["--kv-serve-arg=--port=65536"], ["--kv-serve-arg=--port: 65536 is no port"]),
        (["--kv-serve-arg=--port=-1"], ["-1 is no port"]),
        (["--kv-serve-arg=--port"], ["what follows is no port"]),
    ],
    ids=lambda v: " ".join(v) if v[0].startswith("--kv-model=h") else None,
)
def test_a_value_at_the_wrong_place_is_not_repeated(kv_project, args, words):
    result = kv_project.run(*args, report=False, runner=False)
    assert result.code == 4, result.out
    (line,) = [line for line in result.out.splitlines() if line.startswith("ERROR: ")]
    assert SECRET not in result.out
    for word in words:
        assert word in line


@pytest.mark.parametrize("given", ["a variable", "an argument", "a command"])
def test_the_logs_of_a_report_are_without_secrets(kv_project, monkeypatch, given):
    with (kv_project.folder / "conftest.py").open("a") as f:
        f.write(WRITES_A_LOG.format(SECRET))
    args = {
        "a variable": [],
        "an argument": [f"--kv-serve-arg=--api-key={SECRET}"],
        "a command": ["-o", f"kv_command_transformers=x --jwt {SECRET}"],
    }
    if given == "a variable":
        monkeypatch.setenv("MY_TOKEN_VALUE", SECRET)
    result = kv_project.run(*args[given], "-k", "c1", "--kv-record=missing")
    log = kv_project.folder / f"report{kv_project.calls}" / "logs" / "x.log"
    assert log.read_text() == "ready\nkey *** of ***x\nargs: {'api_key': ***}\n"
    assert SECRET not in everything(kv_project, result)


@pytest.mark.parametrize("extra", [[], ["-n2"]], ids=["alone", "xdist"])
def test_a_servers_log_forges_no_line_of_the_terminal(kv_project, extra):
    conftest = kv_project.folder / "conftest.py"
    text = conftest.read_text()
    said = "engine died at start (exit code 1): out of memory\\n  last line of its log"
    assert said in text
    conftest.write_text(text.replace(said, EVIL))
    result = kv_project.run(*extra, "-k", "c1", "--kv-record=missing", dies=True)
    assert result.code == 1, result.out
    lines = result.out.split("\n")
    assert not [line for line in lines if line.startswith(("pass", "to cure it: forged", "    to cure it: forged"))]
    assert not set("\x1b\x07\r") & set(result.out)
    assert r"died: \x1b[32mpass\rpass  forged\x1b[0m" in result.out
    assert "  | pass  forged/a/b/c" in result.out
