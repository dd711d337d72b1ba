"""How many events and requests a second, and for how much CPU."""

SCENARIOS = ("F64", "F512", "S64", "R64")


def test_ceiling(measured):
    assert measured["asked"] == measured["sent"] == measured["done"]
    assert measured["aborted"] == 0
    assert measured["tokens"] == measured["tokens_reported"]
