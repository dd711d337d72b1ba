"""The cases of log-probabilities, run on the product."""

import pytest

from . import ppl_case
from .catalogue import EXACT, cases


@pytest.mark.parametrize("case", cases("ppl"))
def test_case(case):
    found, wanted = ppl_case.found(case), ppl_case.wanted(case)
    assert {key: (found.get(key), value) for key, value in wanted.items() if not EXACT(key, found.get(key), value)} == {}
