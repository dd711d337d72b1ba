"""Recorded traffic: read strictly, its lengths kept, its prefixes shared as the hashes say and nowhere else."""

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import combinations
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_kvcache.core.recorded_load import BLOCK, Excerpt, Row, block_keys, due_times, prompts, requests_of, rows, taken, warm_up_rows
from pytest_kvcache.core.spec import SpecError, UserError

WORDS = tuple(f"w{i}" for i in range(1500))
LINES = [
    {"timestamp": 40, "input_length": 1100, "output_length": 5, "hash_ids": [7, 8, 9]},
    {"timestamp": 40, "input_length": 1024, "output_length": 1, "hash_ids": [7, 8]},
    {"timestamp": 1540.5, "input_length": 600, "output_length": 2000, "hash_ids": [7, 11]},
]
MOONCAKE = "\n".join(map(json.dumps, LINES)) + "\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n2030-01-02 23:59:59.9000000,12,3\r\n"
    "2030-01-03 00:00:00.0000019,4000,1\r\n2030-01-03 00:01:00.0000000,7,90"
)
READ = (
    Row(at_s=0.0, isl=1100, osl=5, hashes=(7, 8, 9)), Row(at_s=0.0, isl=1024, osl=1, hashes=(7, 8)),
    Row(at_s=1.5005, isl=600, osl=2000, hashes=(7, 11)),
)  # fmt: skip


@st.composite
def traces(draw):
    """Rows whose hashes are few, so that they meet again."""
    made, at = [], 0.0
    for hashes in draw(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=8)):
        at += draw(st.sampled_from([0.0, 0.5, 3.25]))
        isl = len(hashes) * BLOCK - draw(st.integers(0, BLOCK - 1))
        made.append(Row(at_s=at, isl=isl, osl=draw(st.integers(1, 9)), hashes=tuple(hashes)))
    return tuple(replace(row, at_s=row.at_s - made[0].at_s) for row in made)


PLAIN = st.lists(st.builds(Row, at_s=st.just(0.0), isl=st.integers(1, 60), osl=st.integers(1, 9)), min_size=1, max_size=12).map(tuple)


def alike(a, b):
    """How many words two prompts have in common from the first on."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def shared(a, b):
    """The tokens that two rows share, by their hashes."""
    same = next((i for i, (x, y) in enumerate(zip(a.hashes, b.hashes, strict=False)) if x != y), min(len(a.hashes), len(b.hashes)))
    return min(same * BLOCK, a.isl, b.isl)


# -- reading


def test_both_formats_are_read():
    assert rows(MOONCAKE, "a.jsonl") == READ
    assert [(r.at_s, r.isl, r.osl, r.hashes) for r in rows(AZURE, "a.csv")] == [
        (0.0, 12, 3, ()),
        (0.100001, 4000, 1, ()),
        (60.1, 7, 90, ()),
    ]


@given(traces())
def test_what_is_written_as_mooncake_is_read_again(recorded):
    text = "\n".join(
        json.dumps({"timestamp": r.at_s * 1000, "input_length": r.isl, "output_length": r.osl, "hash_ids": r.hashes}) for r in recorded
    )
    assert rows(text, "x") == recorded


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1).map(sorted))
def test_what_is_written_as_azure_is_read_again(told):
    began = datetime(2030, 1, 1)
    lines = [f"{began + timedelta(microseconds=us):%Y-%m-%d %H:%M:%S.%f}0,{isl},{osl}" for us, isl, osl in told]
    found = rows("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]), "x")
    assert [(r.at_s, r.isl, r.osl) for r in found] == [((us - told[0][0]) / 1e6, isl, osl) for us, isl, osl in told]


def test_columns_in_another_order_marks_and_empty_lines_are_no_matter():
    text = '\ufeff\nModel,GeneratedTokens,TIMESTAMP,ContextTokens\n"a, b",3,2024-05-10 00:00:00+00:00,12\n\nc, 4 ,2024-05-10 02:00:01+02:00,13\n'
    assert rows(text, "x") == (Row(at_s=0.0, isl=12, osl=3), Row(at_s=1.0, isl=13, osl=4))
    without = MOONCAKE.replace(', "hash_ids": [7, 8, 9]', "").replace(', "hash_ids": [7, 8]', "").replace(', "hash_ids": [7, 11]', "")
    assert rows("\ufeff\n" + without.replace("\n", "\r\n"), "x") == tuple(replace(row, hashes=()) for row in READ)


def mooncake(**changed):
    """The trace with something else in its third line."""
    return "\n".join(map(json.dumps, [*LINES[:2], {k: v for k, v in (LINES[2] | changed).items() if v != "left out"}]))


@pytest.mark.parametrize(("text", "told"), [
    ("", "no request in it"), ("\n \n", "no request in it"), ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request in it"),
    ("hello", "line 1: neither a JSON object .* 'hello'"), ("TIMESTAMP,ContextTokens\n", "line 1: neither"), ("[1, 2]", "line 1: neither"),
    ("2030-01-02 23:59:59,12,3", "line 1: neither"), ("\n\n\x1b[31m", r"line 3: neither .* '\\x1b\[31m'"),
    (MOONCAKE[:-20], "line 3: no JSON .* at column"), (MOONCAKE + "{", "line 4: no JSON"), (MOONCAKE + "[]", r"line 4: no JSON object: \[\]"),
    (MOONCAKE + "7", "line 4: no JSON object: 7"), (MOONCAKE + '{"timestamp": ' + "9" * 5000 + "}", "line 4: no JSON that can be read"),
    (MOONCAKE + "[" * 100_000, "line 4: no JSON"), (mooncake(output_length="left out"), "line 3: has no output_length"),
    (mooncake(timestamp=-1), "line 3: timestamp is -1"), (mooncake(timestamp=float("nan")), "line 3: NaN is no number"),
    (MOONCAKE.replace("1540.5", "1e999"), "line 3: timestamp is inf"), (mooncake(timestamp="0"), "line 3: timestamp is '0'"),
    (mooncake(timestamp=True), "line 3: timestamp is True"), (mooncake(timestamp=39), "line 3: arrives before the request above it"),
    (mooncake(input_length=-600), "line 3: input_length is -600"), (mooncake(input_length=600.0), "line 3: input_length is 600.0"),
    (mooncake(input_length=10**12), "line 3: input_length is 1000000000000"), (mooncake(output_length=None), "line 3: output_length is None"),
    (mooncake(hash_ids=[7]), "line 3: 1 hash_ids where 600 tokens are 2 blocks of 512"), (mooncake(hash_ids=[7, -1]), r"line 3: hash_ids is no list .* \[7, -1\]"),
    (mooncake(hash_ids="ab"), "line 3: hash_ids is no list"), (mooncake(hash_ids=[7, True]), "line 3: hash_ids is no list"),
    (mooncake(hash_ids="left out"), "line 3: has no hash_ids, unlike the lines above it"),
    (AZURE.replace(",4000,", ",-4000,"), "line 3: ContextTokens is '-4000'"), (AZURE.replace(",4000,", ",nan,"), "line 3: ContextTokens is 'nan'"),
    (AZURE.replace(",4000,", ",4000.0,"), "line 3: ContextTokens is '4000.0'"), (AZURE.replace(",4000,", ",\u0664,"), "line 3: ContextTokens"),
    (AZURE.replace(",4000,", ",,"), "line 3: ContextTokens is ''"), (AZURE.replace(",4000,1", ",4000"), "line 3: 2 values where the head has 3"),
    (AZURE.replace(",4000,", ",\"4000,"), "line 3: no CSV"), (AZURE[:-14], "line 4: 1 values"), (AZURE.replace("2030-01-03 00:01", "2029-01-03 00:01"), "line 4: arrives before"),
    (AZURE.replace("23:59:59", "23:59:60"), "line 2: TIMESTAMP is .* no date and time"), (AZURE.replace(",4000,", "," + "9" * 5000 + ","), "line 3: ContextTokens is '999"),
])  # fmt: skip
def test_what_is_no_trace_is_refused_with_its_line(text, told):
    with pytest.raises(UserError, match="^my trace: " + told) as e:
        rows(text, "my trace")
    assert "\n" not in str(e.value) and str(e.value).isprintable() and len(str(e.value)) < 300


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    for start in ("", "{", "TIMESTAMP,ContextTokens,GeneratedTokens\n", MOONCAKE):
        with suppress(UserError):
            assert rows(start + text, "x")


# -- choosing


def test_an_excerpt_leaves_out_what_is_too_long_and_says_so():
    found = taken(READ, Excerpt(most=1105), "x")
    assert (found.rows, found.too_long, found.empty) == (READ[:2], 1, 0)
    assert taken(READ, Excerpt(most=1104), "x").rows == READ[1:2]
    nothing = (Row(at_s=0.0, isl=0, osl=4), Row(at_s=0.5, isl=4, osl=0), Row(at_s=2.0, isl=4, osl=4))
    found = taken(nothing, Excerpt(), "x")
    assert (found.rows, found.too_long, found.empty) == ((replace(nothing[2], at_s=0.0),), 0, 2)


def test_an_excerpt_begins_anywhere_and_goes_faster_or_slower():
    assert due_times(taken(READ, Excerpt(start=1, speed=3), "x").rows) == (0.0, 1.5005 / 3)
    assert due_times(taken(READ, Excerpt(start=1, speed=0.5), "x").rows) == (0.0, 3.001)
    assert due_times(taken(READ, Excerpt(start=2), "x").rows) == (0.0,)


@given(traces(), st.integers(0, 3), st.integers(1, 8), st.integers(1, 8), st.sampled_from([600, 1100, 9999]))
def test_fewer_requests_are_the_first_of_more(recorded, start, fewer, more, most):
    def sent(n):
        try:
            found = taken(recorded, Excerpt(start=start, rows=n, most=most), "x").rows
        except UserError:
            return None
        return found, requests_of(found, WORDS, seed=1)

    low, high = sent(min(fewer, more)), sent(max(fewer, more))
    if low is None:
        assert high is None
    elif high is not None:
        assert low[0] == high[0][: len(low[0])] and low[1] == high[1][: len(low[1])]


@pytest.mark.parametrize(("excerpt", "told"), [
    (Excerpt(start=3), r"x: 0 of 3 requests from row 3 on \(0 longer than None tokens, 0 without any\); none can be sent"),
    (Excerpt(start=1, rows=2, most=1100), r"x: 1 of 3 requests from row 1 on \(1 longer than 1100 tokens, 0 without any\); 2 are asked for"),
])  # fmt: skip
def test_an_excerpt_of_too_little_is_refused(excerpt, told):
    with pytest.raises(UserError, match=told):
        taken(READ, excerpt, "x")


@pytest.mark.parametrize("wrong", [
    {"start": -1}, {"start": None}, {"start": True}, {"rows": 0}, {"rows": 1.5}, {"most": 1}, {"speed": 0}, {"speed": float("nan")}, {"speed": True},
    {"speed": float("inf")},
])  # fmt: skip
def test_an_excerpt_that_cannot_be_is_refused(wrong):
    with pytest.raises(SpecError, match=next(iter(wrong))):
        Excerpt(**wrong)


def test_ids():
    assert [str(Excerpt()), str(Excerpt(start=5, rows=9, speed=2, most=512)), str(Excerpt(speed=0.25))] == [
        "all",
        "from5-n9-x2-max512",
        "x0.25",
    ]


# -- requests


@given(traces(), st.integers(0, 3))
def test_prompts_are_alike_as_far_as_their_hashes_are_and_no_further(recorded, seed):
    said = list(prompts(recorded, len(WORDS), seed=seed))
    assert [len(p) for p in said] == [r.isl for r in recorded]
    for (a, of_a), (b, of_b) in combinations(zip(recorded, said, strict=True), 2):
        assert alike(of_a, of_b) == shared(a, b)


@given(PLAIN, st.integers(0, 3))
def test_without_hashes_every_prompt_is_its_own_from_the_first_word_on(recorded, seed):
    said = list(prompts(recorded, len(WORDS), seed=seed))
    assert [len(p) for p in said] == [r.isl for r in recorded]
    assert all(alike(a, b) == 0 for a, b in combinations(said, 2))


@given(traces(), st.integers(0, 5), st.integers(0, 3))
def test_a_block_has_the_same_words_wherever_it_stands(recorded, number, seed):
    (alone,) = prompts([Row(at_s=0, isl=BLOCK, osl=1, hashes=(number,))], len(WORDS), seed=seed)
    for row, said in zip(recorded, prompts(recorded, len(WORDS), seed=seed), strict=True):
        for i, h in enumerate(row.hashes):
            if h == number:
                block = said[i * BLOCK : (i + 1) * BLOCK]
                assert block == alone[: len(block)]


def test_hashes_of_64_bits_are_hashes():
    a, b = (Row(at_s=0.0, isl=BLOCK, osl=1, hashes=(h,)) for h in (2**64 - 1, 2**64 - 2))
    of_a, of_b = prompts((a, b), 1000, seed=0)
    assert alike(of_a, of_b) == 0


@given(st.one_of(traces(), PLAIN), st.sampled_from([16, 100, 512, 700, 1024]))
def test_keys_of_blocks_are_equal_where_the_tokens_are(recorded, block):
    said = list(prompts(recorded, len(WORDS), seed=0))
    keys = list(block_keys(recorded, block))
    by_key, by_tokens = {}, {}
    for prompt, of in zip(said, keys, strict=True):
        assert len(of) == len(prompt) // block
        for i, key in enumerate(of):
            until = prompt[: (i + 1) * block]
            assert by_key.setdefault(key, until) == until
            assert by_tokens.setdefault(until, key) == key


@given(st.one_of(traces(), PLAIN))
def test_requests_are_the_prompts_in_words(recorded):
    for i, (row, request, ids) in enumerate(
        zip(recorded, requests_of(recorded, WORDS, seed=2), prompts(recorded, len(WORDS), seed=2), strict=True)
    ):
        assert (request.index, request.isl, request.osl) == (i, row.isl, row.osl)
        assert request.prompt == "".join(f" w{j}" for j in ids)


def test_a_seed_gives_the_same_bytes_on_every_machine():
    """What was recorded by another process; a change of it is another workload, and CONVERSATIONS_VERSION must say so."""
    for recorded, digest in ((READ, "3dc8ef04b9818fd4"), (rows(AZURE, "x"), "2bbbb211d5638e14")):
        asked = requests_of(recorded, WORDS, seed=1)
        assert hashlib.sha256("\n".join(r.prompt for r in asked).encode()).hexdigest()[:16] == digest


def test_seeds_and_parts_have_prompts_of_their_own():
    starts = {
        tuple(requests_of(recorded, WORDS, seed=seed, part=part)[0].prompt.split()[:4])
        for recorded in (READ, rows(AZURE, "x")) for seed in (0, 1) for part in ("measured", "warm-up")
    }  # fmt: skip
    assert len(starts) == 8


@given(st.one_of(traces(), PLAIN), st.integers(1, 9))
def test_a_warm_up_meets_the_longest_first_and_shares_nothing(recorded, n):
    found = warm_up_rows(recorded, n)
    assert len(found) == n and found[0].isl == max(r.isl for r in recorded)
    assert [r.isl for r in found] == sorted((r.isl for r in found), reverse=True)
    assert all(r.hashes == () and r.at_s == 0 for r in found)


# -- the public traces, where they are


FOLDER = os.environ.get("KV_TRACES_DIR")


@pytest.mark.skipif(not FOLDER, reason="KV_TRACES_DIR names no folder with the public traces")
@pytest.mark.parametrize(("name", "n", "last_s", "isl", "osl", "longest", "hit"), [
    ("mooncake_conversation_trace.jsonl", 12_031, 3536.999, 12_035.1, 342.6, 126_195, 0.366),
    ("mooncake_synthetic_trace.jsonl", 3_993, 1022.025, 15_325.5, 149.1, 191_378, 0.640),
    ("azure_llm_2023_code.csv", 8_819, 3435.948056, 2_047.8, 27.9, 7_437, 0.0),
    ("azure_llm_2023_conv.csv", 19_366, 3501.721937, 1_154.7, 211.1, 14_050, 0.0),
])  # fmt: skip
def test_public_traces_are_read_whole(name, n, last_s, isl, osl, longest, hit):
    recorded = rows((Path(FOLDER) / name).read_bytes().decode(), name)
    assert (len(recorded), recorded[-1].at_s, max(r.isl for r in recorded)) == (n, last_s, longest)
    assert (round(mean(r.isl for r in recorded), 1), round(mean(r.osl for r in recorded), 1)) == (isl, osl)
    seen, found, asked = set(), 0, 0
    for row in recorded:
        asked += len(row.hashes)
        found += next((i for i, h in enumerate(row.hashes) if h not in seen), len(row.hashes))
        seen |= set(row.hashes)
    assert (found / asked if asked else 0.0) == pytest.approx(hit, abs=0.0005)
    some = taken(recorded, Excerpt(rows=60, most=4096), name)
    assert all(len(r.prompt.split()) == r.isl and r.isl + r.osl <= 4096 for r in requests_of(some.rows, WORDS, seed=0))
