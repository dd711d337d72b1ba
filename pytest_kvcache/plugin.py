"""The pytest hooks: options, selection, planning, measuring at a block's first test, outcomes, the end of the session."""

from __future__ import annotations

import json
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from . import options
from .core.scenarios import Scenario
from .core.spec import SpecError, UserError
from .fixtures import (
    BILL,
    PARAMETRIZE,
    SETTINGS,
    KvResult,
    kv_drive,
    kv_endpoint,
    kv_framework,
    kv_gate,
    kv_gpu,
    kv_model,
    kv_result,
    kv_scenario,
)

if TYPE_CHECKING:
    from .core.plan import Wanted
    from .session import KvSession

# What only a session with a device needs is imported where it is used: without one, this module is all that pytest pays.
__all__ = ["kv_drive", "kv_endpoint", "kv_framework", "kv_gate", "kv_gpu", "kv_model", "kv_result", "kv_scenario"]

NEEDS_GPU = "needs --kv-gpu (for example: pytest --kv-gpu=cpu)"
NO_SERVER = "measures by hand on a running server; --kv-replay starts none"
MEASURED = "kv_result"  # a test that uses this fixture is measured before it runs
BY_HAND = {"kv_endpoint", "kv_drive"}
OURS = {"kv_gpu", "kv_framework", "kv_model", "kv_result", *BY_HAND}  # these need a device


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    from . import hookspecs

    pluginmanager.add_hookspecs(hookspecs)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kv_gates(*gates): metrics or Gate(...) that this test claims. Provided by pytest-kvcache.")
    config.addinivalue_line("markers", "kvcache: set on every test that is measured. Provided by pytest-kvcache.")
    if config.getoption("help", False) or config.getoption("version", False):
        return
    with _usage_errors():
        options.check_named(config)
        if not options.active(config):
            options.check_inactive(config)
            return
        config.stash[SETTINGS] = options.read_settings(config)
    config.pluginmanager.register(Conductor(config), "kvcache-session")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    settings = metafunc.config.stash.get(SETTINGS, None)
    if settings and "kv_framework" in metafunc.fixturenames:
        names = sorted(e.framework.name for e in settings.engines)
        metafunc.parametrize("kv_framework", names, indirect=True, scope="session")
    if settings and "kv_model" in metafunc.fixturenames:
        metafunc.parametrize("kv_model", sorted(m.key for m in settings.models), indirect=True, scope="session")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    settings = config.stash.get(SETTINGS, None)
    for item in items:
        if ours := OURS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.kvcache)
            if settings is None:
                item.add_marker(pytest.mark.skip(reason=NEEDS_GPU))
            elif settings.replay and BY_HAND & ours:
                item.add_marker(pytest.mark.skip(reason=NO_SERVER))


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turns our errors into pytest's usage error: one line, exit code 4."""
    try:
        yield
    except (UserError, SpecError) as error:
        from .report import terminal

        raise pytest.UsageError(terminal.told(str(error))) from None
    except OSError as error:  # a full or read-only disk under the temporary folder, say
        raise pytest.UsageError(f"{error.filename or 'the disk'}: {error.strerror or error}") from None


def _interrupt(*_: object) -> None:
    # Raised rather than re-sent as SIGINT: a background job may ignore that. Without it SIGTERM would skip every finally.
    raise KeyboardInterrupt("SIGTERM")


class Conductor:
    """The hooks that act only when a device was named."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.settings = config, config.stash[SETTINGS]
        self.worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self.verdicts: dict[str, dict[str, Any]] = {}
        self.notes: list[tuple[str, str]] = []
        self.skipped: Counter[str] = Counter()
        self.scratch: Path | None = Path(self.worker["kv_scratch"]) if self.worker else None
        self._session: KvSession | None = None
        self._old_sigterm: Any = None
        self._why = "interrupted"

    @property
    def session(self) -> KvSession:
        from .session import KvSession, make_scratch

        if self._session is None:
            self.scratch = self.scratch or make_scratch()
            self._session = KvSession(self.settings, self.scratch, self.say, self._runner)
        return self._session

    def _runner(self, framework: str, model: str) -> Any:
        return self.config.hook.pytest_kv_runner(config=self.config, framework=framework, model=model)

    def say(self, line: str) -> None:
        """A line for the user, at once. An xdist worker has a reporter, but nobody hears it."""
        from .report import terminal

        line = terminal.told(line)
        if self.worker:
            print(f"kv: {line}", file=sys.__stderr__, flush=True)
        elif self.config.get_verbosity() >= 0 and (reporter := self.config.pluginmanager.get_plugin("terminalreporter")):
            reporter.ensure_newline()
            reporter.write_line(f"kv: {line}")
            reporter.flush()

    # -- start ----------------------------------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        from .core.masking import masked
        from .core.text import one_line

        s = self.settings
        if s.replay:
            return one_line(f"kvcache: judging {s.replay} again, profile {s.profile}")
        engines = ", ".join(e.framework.name for e in s.engines)
        models = ", ".join(m.key for m in s.models)
        judged = f"against the build of {masked(s.ab)}, in turns" if s.ab else f"baselines {s.baselines}"
        return one_line(f"kvcache: {engines} serving {models} on {s.gpu.key}, profile {s.profile}, {judged}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self) -> None:
        if self._only_shows():
            return
        if not self.worker:
            with _usage_errors():
                self.session.preflight()
        try:
            self._old_sigterm = signal.signal(signal.SIGTERM, _interrupt)
        except ValueError:  # not the main thread: whoever owns it decides
            self._old_sigterm = None

    def pytest_unconfigure(self) -> None:
        if self._old_sigterm is not None:
            signal.signal(signal.SIGTERM, self._old_sigterm)
            self._old_sigterm = None
        if self._session and not self.worker:
            self._session.leave_nothing_empty()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """xdist: every worker works in the controller's scratch folder."""
        node.workerinput["kv_scratch"] = str(self.session.scratch)

    def _only_shows(self) -> bool:
        return any(self.config.getoption(o, False) for o in ("collectonly", "setupplan", "setuponly"))

    # -- selection and plan ---------------------------------------------------------------------------------------

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out what the profile and the device do not include; let a block's tests stand together."""
        from .core.plan import block_id

        s = self.settings
        for item in items:
            if (scenario := scenario_of(item)) and not s.replay and (why := self._beyond(item, scenario)):
                item.add_marker(pytest.mark.skip(reason=why))
        out = [i for i in items if (sc := scenario_of(i)) and not (self._is_stored(i) if s.replay else self._is_asked(i, sc))]
        if out:
            self.config.hook.pytest_deselected(items=out)
        left_out = set(map(id, out))
        first: dict[str, int] = {}
        places: list[tuple[int, pytest.Item]] = []
        for n, item in enumerate(i for i in items if id(i) not in left_out):
            want = self._wanted(item, strict=False)
            places.append((first.setdefault(block_id(want), n) if want else n, item))
        items[:] = [item for _, item in sorted(places, key=lambda p: p[0])]

    def _beyond(self, item: pytest.Item, scenario: Scenario) -> str:
        """Why the framework of a test cannot do what its scenario asks for; empty when it can."""
        from .selection import beyond

        params = item.callspec.params  # type: ignore[attr-defined]
        return beyond(self.settings, params["kv_framework"], params["kv_model"], scenario, _arms_named(item))

    def _is_asked(self, item: pytest.Item, scenario: Scenario) -> bool:
        """Whether the profile and the device include a scenario, and a calibration anything that its test claims."""
        s = self.settings
        if not scenario.applies_to(s.profile, s.gpu.kind):
            return False
        return not s.calibrate or _is_skipped(item) or self._wanted(item, strict=False) is not None

    def _is_stored(self, item: pytest.Item) -> bool:
        """Whether the run that is judged again has measured what a test asks for."""
        from .core.arms import kind_of
        from .core.plan import block_id

        want = self._wanted(item, strict=False)
        if want is None:
            return True
        names = {a.name for a in want.scenario.arms}  # those that were measured
        claimed = not kind_of(want.scenario) or {a for g in want.gates for a in (g.arm, g.against) if a} <= names
        return claimed and str(want.scenario) in self._stored.get(block_id(want), ())

    @cached_property
    def _stored(self) -> dict[str, frozenset[str]]:
        """The scenarios of each block of the run that is judged again."""
        from .replay import plan_of

        assert self.settings.run
        return plan_of(self.settings.run[1])

    def _wanted(self, item: pytest.Item, *, strict: bool = True) -> Wanted | None:
        """What a test asks to be measured; None for an ordinary or a skipped one."""
        from .core.plan import Wanted, as_gate, on_two_builds
        from .selection import with_its_arms

        scenario = scenario_of(item)
        if scenario is None or _is_skipped(item):
            return None
        params = item.callspec.params  # type: ignore[attr-defined]
        marks = [g for m in item.iter_markers("kv_gates") for g in m.args]
        try:
            gates = tuple(as_gate(g) for g in marks)
        except SpecError as e:
            if not strict:
                return None
            raise UserError(f"{item.nodeid}: {e}") from None
        if self.settings.calibrate:
            gates = tuple(g for g in gates if not g.against)
            if marks and not gates:
                return None
        if not gates and strict:
            raise UserError(f"{item.nodeid}: no kv_gates marker; say what it claims, as @pytest.mark.kv_gates('output_tok_s')")
        family = getattr(item, "originalname", item.name).removeprefix("test_")
        scenario = with_its_arms(self.settings, params["kv_framework"], params["kv_model"], scenario)
        want = Wanted(framework=params["kv_framework"], model=params["kv_model"], family=family, scenario=scenario, gates=gates)
        return on_two_builds(want) if self.settings.ab else want

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The plan is final only here: -k, -m and --lf deselect after every pytest_collection_modifyitems."""
        if self.worker is None and self._is_controller():
            return
        with _usage_errors():
            self.session.plan([w for i in session.items if (w := self._wanted(i))])
            if self.session.blocks and not (self.worker and self.worker["workerid"] != "gw0"):
                self.session.show_plan(read=not self._only_shows())

    def _is_controller(self) -> bool:
        return bool(self.config.pluginmanager.hasplugin("dsession"))

    # -- tests ----------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measure before anything else sees the test: outside pytest-timeout's timer and of every fixture."""
        from .core.plan import block_id

        if self._only_shows():
            return (yield)
        if want := self._wanted(item, strict=False):
            self.session.ensure(block_id(want))
        elif self.worker and not OURS & set(getattr(item, "fixturenames", ())):
            with self.session.beside_others():
                return (yield)
        return (yield)

    def result_of(self, item: pytest.Item) -> KvResult:
        """The verdicts of one test's own gates, with outcome, cause and cure; also put into its user properties."""
        from .core.plan import block_id, gate_specs
        from .report import terminal
        from .rows import row

        want = self._wanted(item)
        if want is None:
            pytest.fail(PARAMETRIZE, pytrace=False)
        if self._only_shows():
            return KvResult(scenario=want.scenario, verdicts=())
        block = self.session.ensure(block_id(want))
        share = sum(
            bool(w and block_id(w) == block_id(want) and w.scenario == want.scenario) for w in map(self._wanted, item.session.items)
        )
        item.stash[BILL] = (block["spent_s"].get(str(want.scenario)) or 0.0) / max(share, 1)
        rows = [row(self.session, block, spec, item.nodeid) for spec in gate_specs(want, self.session.rule.margin)]
        item.user_properties += [(f"kv.{r['key'].split('/')[2]}.{r['metric']}", terminal.junit(r)) for r in rows]
        item.user_properties.append(("kv.record", json.dumps(rows)))
        metrics = tuple(m for m in block["measurements"] if m["scenario"] == str(want.scenario))
        return KvResult(scenario=want.scenario, verdicts=tuple(rows), metrics=metrics)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Bill each test its share of the measuring, so that durations and JUnit add up to the session."""
        report = yield
        if report.when == "call":
            report.duration += item.stash.get(BILL, 0.0)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """On the controller too: user properties cross xdist. Reruns only read again, so the last one counts."""
        if report.skipped and "kvcache" in report.keywords and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.when != "call" or self.worker:
            return
        for name, value in report.user_properties:
            if name == "kv.record":
                for row in json.loads(str(value)):
                    self._seen(row)

    def _seen(self, row: dict[str, Any]) -> None:
        where = f"{row['block']} {row['key']}"
        if where not in self.verdicts:
            self.config.hook.pytest_kv_verdict(config=self.config, record=row)
        self.verdicts[where] = row

    # -- end ------------------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self.worker or self._session is None or not self.scratch or self._only_shows():
            return
        from .finish import finish

        interrupted = self._why if exitstatus == pytest.ExitCode.INTERRUPTED else None
        cache = getattr(self.config, "cache", None)  # absent under -p no:cacheprovider
        rows = list(self.verdicts.values())
        lines, failed = finish(self.session, rows, exit_code=int(exitstatus), interrupted=interrupted, cache=cache)
        self.notes += lines
        if failed and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._why = str(excinfo.value) or "Ctrl-C"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        from .report import terminal

        rows = list(self.verdicts.values())
        if not rows and not self.notes and not self.skipped:
            return
        terminalreporter.ensure_newline()
        terminalreporter.section("kv cache verdicts")
        if rows:
            terminalreporter.write_line(terminal.headline(rows), bold=True)
        for colour, line in terminal.summary(rows):
            terminalreporter.write_line(line, **terminal.COLOURS.get(colour, {}))
        for line in terminal.side_by_side(rows):
            terminalreporter.write_line(line)
        if judged := sum(r["p_seq"] is not None for r in rows):
            from .core.gate import false_alarms

            expected = false_alarms(judged)
            terminalreporter.write_line(f"false alarms to expect by chance in {judged} judged gate(s): below {expected:.3f}")
        for why, n in self.skipped.items():
            terminalreporter.write_line(terminal.told(f"not judged: {n} test(s): {why}"), **terminal.COLOURS["no-baseline"])
        for colour, line in self.notes:
            terminalreporter.write_line(terminal.told(line), **terminal.COLOURS.get(colour, {}))


def _arms_named(item: pytest.Item) -> set[str]:
    """The arms that the gates of a test name."""
    gates = (g for m in item.iter_markers("kv_gates") for g in m.args)
    return {a for g in gates for a in (getattr(g, "arm", None), getattr(g, "against", None)) if a}


def _is_skipped(item: pytest.Item) -> bool:
    """Whether marks skip the test; conditions written as strings are left to pytest, and measured if they do not hold."""
    conditions = (m.args[0] for m in item.iter_markers("skipif") if m.args)
    return item.get_closest_marker("skip") is not None or any(c for c in conditions if not isinstance(c, str))


def scenario_of(item: pytest.Item) -> Scenario | None:
    """The scenario of a test that is measured; None for every other test."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    scenario = params.get("kv_scenario")
    measured = MEASURED in getattr(item, "fixturenames", ()) and "kv_framework" in params
    return scenario if measured and isinstance(scenario, Scenario) else None
