"""Score a text through an engine's caches: its probe runs in its own interpreter, and one number a token comes back."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core import sanity, tasks
from ..core.corpora import Corpus
from ..core.framework import Framework, Probe
from ..core.perplexity import divergence_of_top, scores_of, summarise
from ..core.quality import never_read
from ..core.record import Trace
from ..core.scenarios import Text
from ..core.schemes import Window, windows
from ..core.spec import Arm, UserError, json_hash
from ..core.texts import asks, text_hash
from . import weights
from .probe import ask

TIMEOUT_S = 3600.0
CONTROLS = ("floor", "negative")
TOP = ("top_ids", "top_logprobs")
FIGURES = ("ppl", "ppl_ratio", "kld.mean", "kld.p99", "kld.p999", "top1")
TASK_SEED, TASK_TOKENS = 1, 12
MADE = "model.gguf"  # of other weights, in a folder of its own


@dataclass(kw_only=True)
class Scorer:
    """Scores texts with one engine: its interpreter, the model it would serve, the corpus. `folder` takes requests and answers. `serves`:
    an arm as its engine is told of it, and the weights that it loads where they are not the model's own."""

    framework: Framework
    python: str
    model: str
    serves: Callable[[Arm], tuple[Arm, str]] = lambda arm: (arm, "")
    device: str
    corpus: Callable[[], Corpus]
    folder: Path
    env: Mapping[str, str]
    say: Callable[[str], None]
    _texts: dict[Text, tuple[tuple[Window, ...], str]] = field(default_factory=dict)

    @property
    def probe(self) -> Probe:
        assert self.framework.probe  # as the plan sees to
        return self.framework.probe

    @cached_property
    def _text(self) -> Corpus:
        return self.corpus()

    @cached_property
    def _tokens(self) -> tuple[list[int], int | None]:
        """The corpus in tokens of the model, and the model's token of a beginning."""
        found = self._ask("tokens", {"want": "tokens", "texts": {"corpus": self._text.text}})
        return found["tokens/corpus"].tolist(), found["told"]["bos"]

    def windows(self, scenario: Text) -> tuple[Window, ...]:
        """The windows of a text. UserError where the corpus has fewer than two."""
        return self._cut(scenario)[0]

    def workload(self, scenario: Text) -> str:
        """The hash of what is scored."""
        return self._cut(scenario)[1]

    def _cut(self, scenario: Text) -> tuple[tuple[Window, ...], str]:
        if scenario not in self._texts:
            tokens, bos = self._tokens
            found = tuple(windows(tokens, scenario.scheme, bos, scenario.windows))
            if len(found) < 2:
                what = f"{len(found)} window(s) of {scenario.scheme.window}; two are the least"
                raise UserError(f"--kv-corpus: {self._text.name} has {len(tokens)} tokens, {what}: name a longer text")
            self._texts[scenario] = found, text_hash(scenario, self._text.digest, (w.tokens for w in found))
        return self._texts[scenario]

    def score(self, scenario: Text, arms: Sequence[Arm]) -> list[Trace]:
        """A trace of each arm, in their order; one that the engine cannot score has the reason in `load["refused"]`. UserError, with what
        the engine said last, where the probe fails."""
        cut = self.windows(scenario)
        refused = {a.name: why for a in arms if (why := self._lacks(a))}
        own = {f"arm:{a.name}": self._words(a) for a in arms if a.name not in refused}
        asked = own | {f"control:{name}": dict(getattr(self.probe, name)) for name in CONTROLS}
        reference = f"arm:{scenario.reference}"
        request: dict[str, Any] = {
            "windows": [{"tokens": w.tokens, "first": w.first} for w in cut], "step": scenario.scheme.step or scenario.scheme.window,
            "reference": reference,
        }  # fmt: skip
        tokens = sum(w.scored for w in cut)
        how = "one after another" if self.probe.alone else "side by side"
        self.say(f"  scoring {tokens:,} tokens of {self._text.name} ({len(cut)} windows) through {len(asked)} caches {how}")
        found = self._alone(scenario, request, asked, refused) if self.probe.alone else self._ask("scores", request | {"arms": asked})
        scored = {name: words for name, words in own.items() if f"{name}/nll" in found}
        answers = self._answers(scenario, scored, found) if scenario.answer_tokens else {}
        controls = {name: _figures(found, f"control:{name}", reference) for name in CONTROLS}
        return [self._trace(scenario, a, found, controls, refused.get(a.name, ""), answers.get(f"arm:{a.name}", {})) for a in arms]

    def _words(self, arm: Arm) -> dict[str, Any]:
        """What the probe is told of an arm; a file of other weights is made first."""
        told, model = self.serves(arm)
        words = asks(self.framework, told) or {}
        if model:
            words["model"] = model
        if kind := words.pop("quantize", ""):
            source = Path(self.model)

            def make(folder: Path) -> None:
                self.say(f"  making {kind} of {source.name}, once")
                self._ask("quantize", {"want": "quantize", "source": self.model, "type": kind, "target": str(folder / MADE)})

            name = f"{source.stem.lower()}-{kind.lower()}-{json_hash([weights.file_hash(source), kind])}"
            words["model"] = str(weights.made_once(weights.cache_dir() / name, make, proof=MADE) / MADE)
        return words

    def _alone(
        self, scenario: Text, request: dict[str, Any], asked: dict[str, dict[str, Any]], refused: dict[str, str]
    ) -> dict[str, Any]:  # fmt: skip
        """As the answer of all arms in one process, from one process after another, which writes its texts and does its tasks as well. An
        arm that does not start joins `refused`; without the reference or a control no other says anything."""
        prompts, tasked = sanity.PROMPTS if scenario.answer_tokens else {}, {i.name: i.prompt for i in _items(scenario)}
        new = dict.fromkeys(prompts, scenario.answer_tokens) | dict.fromkeys(tasked, TASK_TOKENS)
        writes = {"prompts": {**prompts, **tasked}, "new": new} if new else {}
        found: dict[str, Any] = {}
        told: dict[str, Any] = {"compare_s": {}, "engines": {}}
        for name, words in asked.items():
            try:
                more = writes if name.startswith("arm:") else {}
                one = self._ask(name.replace(":", "-"), request | more | {"arms": {name: words}, "top": self.probe.top})
            except UserError as e:
                kind, _, arm = name.partition(":")
                if kind == "control" or name == request["reference"]:
                    raise
                refused[arm] = str(e)
                continue
            about = one.pop("told")
            told["engines"][name] = _words_of(about)
            for key, value in about.items():
                if isinstance(value, dict):
                    told[key] = told.get(key, {}) | value
            found |= one
        for name in (n for n in asked if f"{n}/nll" in found):
            began = time.monotonic()
            found |= against_top(found, name, request["reference"])
            told["compare_s"][name] = time.monotonic() - began
        return found | {"told": told}

    def _answers(self, scenario: Text, own: Mapping[str, Any], scores: Any) -> dict[str, dict[str, Any]]:
        """What each arm goes on to write: of a fixed set of prompts (those that live alone have written with their `scores`), and where the
        scenario asks for them of short tasks."""
        request = {"want": "greedy", "arms": own, "step": scenario.scheme.step or scenario.scheme.window}
        reference = f"arm:{scenario.reference}"
        found = scores if self.probe.alone else self._ask("answers", request | {"prompts": sanity.PROMPTS, "new": scenario.answer_tokens})
        ids = {arm: {name: found[f"{arm}/{name}"].tolist() for name in sanity.PROMPTS} for arm in own}
        base, none = ids[reference], sanity.no_reference(ids[reference])
        answers: dict[str, dict[str, Any]] = {}
        for arm, texts in ids.items():
            garbage = none or (sanity.garbage(base, texts) if arm != reference else "")
            answers[arm] = {
                "answers": {name: found["told"]["texts"][arm][name][:400] for name in texts},
                "parts_at": {name: sanity.first_divergence(base[name], texts[name]) for name in texts},
                **({"garbage": f"the texts that {arm.partition(':')[2]} writes are garbage: {garbage}"} if garbage else {}),
            }
        if items := _items(scenario):
            prompts = {i.name: i.prompt for i in items}
            done = scores if self.probe.alone else self._ask("tasks", request | {"prompts": prompts, "new": TASK_TOKENS})
            for arm in own:
                answers[arm]["tasks"] = _right(items, done["told"]["texts"][arm])
        return answers

    def _trace(
        self, scenario: Text, arm: Arm, found: Any, controls: dict[str, Any], refused: str, answers: dict[str, Any]
    ) -> Trace:  # fmt: skip
        name, reference, told = f"arm:{arm.name}", f"arm:{scenario.reference}", found["told"]
        load = {
            "corpus": self._text.name, "corpus_hash": self._text.digest, "scheme": str(scenario.scheme),
            "reads_back": scenario.scheme.reads_back, **answers,
            "engine": told["engines"].get(name, {}) if self.probe.alone else _words_of(told),
        }  # fmt: skip
        if self.probe.alone:
            load["kld"] = f"of the {self.probe.top} likeliest tokens, the rest as one: a lower bound"
        if name != reference:
            load |= {"controls": controls, "precision": ", ".join(f"{k}={v}" for k, v in arm.asked().items())}
        if refused:
            load["refused"] = refused
        else:
            nll, base, floor = (found[f"{of}/nll"].tolist() for of in (name, reference, "control:floor"))
            if name != reference and (why := never_read(nll, base, floor, load["precision"])):
                load["never_read"] = why
            load |= {"seconds": round(told["seconds"][name], 3), "compare_s": round(told["compare_s"][name], 3)}
            load["cache_bytes"] = told["cache_bytes"].get(name) or None
        return Trace(
            scenario=str(scenario), arm=arm.name, run=1, workload=self.workload(scenario), isl=scenario.scheme.window, osl=0, records=(),
            load=load, tokens={} if refused else _tokens(found, name, reference),
        )  # fmt: skip

    def _lacks(self, arm: Arm) -> str:
        """What there is not of an arm's weights, or what the interpreter lacks for its precision; empty when nothing."""
        try:
            told, _ = self.serves(arm)
        except UserError as e:
            return str(e)
        for setting in ("kv_dtype", "quantization"):
            precision = getattr(told, setting)
            module, cure = self.probe.needs.get(f"{setting}={precision}", ("", ""))
            if module and weights.missing_modules(self.python, (module.partition(".")[0],)):
                return f"{self.framework.name}: {self.python} has no {module}, which {setting}={precision} needs; {cure}"
        return ""

    def _ask(self, name: str, request: dict[str, Any]) -> Any:
        request = {"model": self.model, "device": self.device, **self.probe.on.get(self.device, {}), **request}
        return ask(self.python, self.probe.script, name, request, self.folder, env=self.env, timeout_s=TIMEOUT_S)


def _words_of(told: Mapping[str, Any]) -> dict[str, str]:
    """What a probe says of its engine."""
    return {k: v for k, v in told.items() if isinstance(v, str)}


def _items(scenario: Text) -> list[tasks.Item]:
    """The short tasks that a scenario asks for."""
    return [i for kind in tasks.TASKS for i in tasks.items(kind, scenario.tasks, TASK_SEED)] if scenario.tasks else []


def _right(items: Sequence[tasks.Item], texts: Mapping[str, str]) -> dict[str, list[int]]:
    """Of each kind of task, how many have the right answer and how many there are."""
    right = {kind: [tasks.scored(i, texts[i.name]) for i in items if i.kind == kind] for kind in tasks.TASKS}
    return {kind: [sum(found), len(found)] for kind, found in right.items()}


def _tokens(found: Any, name: str, reference: str) -> dict[str, list[Any]]:
    """What a trace keeps of each scored token."""
    return {
        "nll": [float(v) for v in found[f"{name}/nll"]], "base_nll": [float(v) for v in found[f"{reference}/nll"]],
        "kld": [float(v) for v in found[f"{name}/kld"]], "same": [int(v) for v in found[f"{name}/same"]],
        "chunk": [int(v) for v in found["chunk"]],
    }  # fmt: skip


def against_top(found: Mapping[str, Any], name: str, reference: str) -> dict[str, Any]:
    """`kld` and `same` of an arm, from the likeliest tokens (`top_ids` and `top_logprobs`, [tokens, k]) of it and of the reference."""
    sides = [
        [dict(zip(ids, logprobs, strict=True)) for ids, logprobs in zip(*(found[f"{of}/{part}"].tolist() for part in TOP), strict=True)]
        for of in (reference, name)
    ]
    same = found[f"{name}/{TOP[0]}"][:, 0] == found[f"{reference}/{TOP[0]}"][:, 0]
    return {f"{name}/kld": [divergence_of_top(one, other) for one, other in zip(*sides, strict=True)], f"{name}/same": same}


def _figures(found: Any, name: str, reference: str) -> dict[str, list[float | None]]:
    """Each figure of a control and its error."""
    figures = summarise(scores_of(_tokens(found, name, reference)))
    return {k: [figures[k].value, figures[k].error] for k in FIGURES}
