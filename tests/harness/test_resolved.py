"""A server that is ready is asked what it resolved: log and metrics page together, and neither need be there."""

import dataclasses

import pytest

from pytest_kvcache.frameworks.vllm import VLLM
from pytest_kvcache.harness.resolved import LOG_BYTES, resolved_configuration

from .pages import served

ENGINE = dataclasses.replace(
    VLLM, known_warnings=(), resolved=(("backend", r"Using (\w+) backend"), ("kv_blocks", r'[{,]num_gpu_blocks="(\d+)"'))
)
PAGE = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="364"} 1.0\n'


@pytest.fixture
def url():
    with served({"/metrics": PAGE, "/half/metrics": PAGE}) as address:
        yield address


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_bytes(b"10 %\r\x1b[32mINFO\x1b[0m Using \x1b[1mFLASH\x1b[0m backend\n\xff\n")
    return path


def test_log_and_metrics_page_together(log, url):
    assert resolved_configuration(ENGINE, log, url) == {"backend": "FLASH", "kv_blocks": 364}


def test_only_the_beginning_of_the_log_counts(log, url):
    log.write_bytes(b"x" * LOG_BYTES + log.read_bytes())
    assert resolved_configuration(ENGINE, log, url) == {"kv_blocks": 364}


@pytest.mark.parametrize("below", ["/none", "/half", "/odd"])
def test_a_page_that_cannot_be_read_costs_its_own_fields(log, url, below):
    assert resolved_configuration(ENGINE, log, url + below) == {"backend": "FLASH"}


def test_nobody_there_and_no_log(tmp_path):
    assert resolved_configuration(ENGINE, tmp_path / "none.log", "http://127.0.0.1:9") == {}


def test_a_framework_without_patterns_is_not_asked(log):
    assert resolved_configuration(dataclasses.replace(ENGINE, resolved=()), log, "not a URL") == {}
    assert resolved_configuration(dataclasses.replace(ENGINE, metrics=""), log, "not a URL") == {"backend": "FLASH"}
