"""Greedy continuations of an engine that is a table: where they stop, what their cache has seen, and what is refused. The answer file."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

import pytest_kvcache

sys.path.insert(0, str(Path(pytest_kvcache.__file__).parent / "probes"))

import asked
from asked import Vocabulary, tokens
from greedy import continuation, greedy, prompts_of

VOCABULARY = Vocabulary(
    encode=lambda text: [ord(c) - 96 for c in text], decode=lambda ids: "".join(chr(96 + i) for i in ids), size=27, bos=None, eos=26, ends={26}
)  # fmt: skip


class Counter:
    """Says one more than the token before; `forgets`: says `a` as soon as its cache is read."""

    def __init__(self, forgets=False):
        self.past, self.steps, self.forgets = [], [], forgets

    def logits(self, tokens):
        says = [1 if self.forgets and self.past else t + 1 for t in tokens]
        self.past += tokens
        self.steps.append(len(tokens))
        return np.eye(27, dtype=np.float32)[says]


def request(**other):
    return {"prompts": {"one": "xy", "other": [1, 2, 3, 4, 5]}, "new": 3, "step": 2, "arms": {"f16": {}, "bad": {}}} | other


def test_each_arm_continues_each_prompt_and_stops_at_the_end():
    arms = {"f16": lambda tokens: Counter(), "bad": lambda tokens: Counter(forgets=True)}
    found = greedy(request(), prompts_of(request(), VOCABULARY), arms, VOCABULARY)
    assert found["f16/one"].tolist() == [26] and found["f16/one"].dtype == np.int32, "the end is part of the answer"
    assert found["f16/other"].tolist() == [6, 7, 8]
    assert found["bad/one"].tolist() == [26], "a prompt of one step is not read back"
    assert found["bad/other"].tolist() == [1, 1, 1]
    assert found["told"]["texts"] == {"f16": {"one": "z", "other": "fgh"}, "bad": {"one": "z", "other": "aaa"}}
    assert set(found["told"]["seconds"]) == {"f16", "bad"}


def test_a_prompt_goes_in_by_steps_and_new_tokens_one_by_one():
    walker = Counter()
    continuation(walker, [1, 2, 3, 4, 5], 3, 2, ())
    assert walker.steps == [2, 2, 1, 1, 1] and walker.past == [1, 2, 3, 4, 5, 6, 7], "the last new token need not go in"


@pytest.mark.parametrize("odd", [{"prompts": {"none": ""}}, {"new": 0}, {"step": 0}, {"arms": {"floor": {"one_pass": True}}}])
def test_what_cannot_be_continued_is_said_in_one_line(odd):
    with pytest.raises(SystemExit, match=r"^greedy: .*"):
        prompts_of(request(**odd), VOCABULARY)


def test_a_logit_that_is_none_is_no_token():
    class Broken:
        def logits(self, tokens):
            return np.full((len(tokens), 3), np.nan)

    with pytest.raises(ValueError, match="not finite"):
        continuation(Broken(), [1], 1, 1, ())


def test_tokens_and_what_they_are_of():
    found = tokens({"texts": {"a": "abc", "b": ""}}, VOCABULARY, {"engine": "1.0"})
    assert found["tokens/a"].tolist() == [1, 2, 3] and found["tokens/a"].dtype == found["tokens/b"].dtype == np.int32
    assert found["told"] == {"bos": None, "eos": 26, "vocabulary": 27, "engine": "1.0"}


def test_a_request_is_answered_in_a_file(tmp_path, monkeypatch):
    asking, answer = tmp_path / "request.json", tmp_path / "answer.npz"
    wants = {"walk": lambda _: {"told": {}}, "tokens": lambda r: tokens(r, VOCABULARY, {})}
    monkeypatch.setattr(sys, "argv", ["in_engine.py", str(asking), str(answer)])
    asking.write_text(json.dumps({"want": "tokens", "texts": {"a/b.txt": "abc"}}))
    asked.main(wants)
    with np.load(answer) as found:
        assert found["tokens/a/b.txt"].tolist() == [1, 2, 3] and json.loads(str(found["told"]))["eos"] == 26
    asking.write_text(json.dumps({}))
    asked.main(wants)
    with np.load(answer) as found:
        assert found.files == ["told"], "a request that names nothing is for a walk"
    asking.write_text(json.dumps({"want": "poem"}))
    with pytest.raises(SystemExit, match=r"in_engine\.py has no 'poem': walk, tokens"):
        asked.main(wants)
