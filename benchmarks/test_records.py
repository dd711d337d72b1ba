"""A million requests stored, read and summarised: `pytest benchmarks/test_records.py`. Times are shown, none is asserted."""

import importlib.util
from pathlib import Path

import pytest

from pytest_kvcache.core.metrics import measure
from pytest_kvcache.core.validity import trace_problem
from pytest_kvcache.harness.traces import keep, merge, read

MILLION = 1_000_000
SYNTHETIC = Path(__file__).parents[1] / "tests" / "harness" / "synthetic_records.py"


@pytest.fixture(scope="module")
def trace():
    spec = importlib.util.spec_from_file_location("kv_synthetic_records", SYNTHETIC)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.synthetic(MILLION)


@pytest.fixture(scope="module")
def file(trace, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    return folder / keep(folder, "b", trace)["file"]


def test_summarise(benchmark, trace):
    benchmark.group = "summarise 1,000,000 requests"
    found = benchmark.pedantic(measure, args=(trace,), rounds=3)
    assert {"ttft_ms.p99", "itl_ms.p99", "output_tok_s"} <= set(found)


def test_judge(benchmark, trace):
    benchmark.group = "summarise 1,000,000 requests"
    assert benchmark.pedantic(trace_problem, args=(trace,), rounds=3) is not None  # some were refused


def test_store(benchmark, trace, tmp_path):
    benchmark.group = "store 1,000,000 requests"
    row = benchmark.pedantic(keep, args=(tmp_path, "b", trace), rounds=3)
    benchmark.extra_info["bytes"] = (tmp_path / row["file"]).stat().st_size


def test_load(benchmark, trace, file):
    benchmark.group = "load 1,000,000 requests"
    assert benchmark.pedantic(read, args=(file,), rounds=2) == [trace]


def test_gather_at_the_end(benchmark, file, tmp_path):
    """Of two runs."""
    benchmark.group = "gather 2,000,000 requests"
    _, lost = benchmark.pedantic(merge, args=(tmp_path / "records.npz", [file, file]), rounds=2)
    assert lost == {}
