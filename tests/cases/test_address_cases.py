"""The cases of public bug reports about addresses, proxy variables and certificates."""

import pytest

from pytest_kvcache.core.address import Endpoint, parse, reached
from pytest_kvcache.core.spec import UserError
from pytest_kvcache.harness.attached import Client

from ..plugin.served import over_tls
from . import address_case
from .catalogue import EXACT, cases, problems

ROWS = [
    pytest.param(kind, row, id=f"{case.id}-{i}")
    for kind in ("base_url", "proxy_env")
    for case in cases(kind)
    for i, row in enumerate(address_case.rows(case.values[0]))
]


@pytest.mark.parametrize(("kind", "row"), ROWS)
def test_case_of_an_address(kind, row):
    found = (address_case.address if kind == "base_url" else address_case.proxy)(row)
    if row.get("accept_error") and found["expected_url"] is None:
        return
    assert not problems(row, found, address_case.TESTS, EXACT)


def test_every_fault_of_a_row_is_seen():
    """The comparison itself: a wrong answer is told, whichever field it is in."""
    kind, row = next(p.values for p in ROWS if p.values[0] == "base_url")
    found = address_case.address(row)
    assert problems(row, found | {"expected_url": "http://elsewhere/v1"}, address_case.TESTS, EXACT)
    assert kind == "base_url" and problems(row | {"expected": {"expected_port": 3}}, found, address_case.TESTS, EXACT)


@pytest.mark.parametrize("case", cases("tls"))
def test_case_of_a_certificate(case, tmp_path):
    """Asked as the product asks a server before it measures: refused with the options' names, or as the user says."""
    with over_tls(tmp_path) as (url, certificate):
        for one in case["expected"]:
            options = {"default": {}, "ca_file": {"ca_file": str(certificate)}, "insecure": {"insecure": True}}[one["option"]]
            found = {"outcome": "ok", "error_class": None, "message_names_option": False, "warnings": _warned(options)}
            try:
                address = parse(url)
                assert Client(Endpoint(address=address, server=reached(address, {}, **options))).ask("/v1/models")[0] == 200
            except UserError as e:
                verify = "its certificate is not trusted" in str(e)
                found |= {
                    "outcome": "error",
                    "error_class": "tls_verify" if verify else "other",
                    "message_names_option": "kv_ca_file" in str(e),
                }
            assert not problems({"expected": {k: v for k, v in one.items() if k != "option"}}, found, address_case.TESTS, EXACT)


def _warned(options):
    return ["tls_verification_off"] if "insecure" in options else []
