"""Whether requests leave when they are meant to, and look Poisson to the server."""

SCENARIOS = ("O50", "O200", "O500")


def test_pacing(measured):
    assert measured["asked"] == measured["sent"] == measured["done"]
    assert measured["aborted"] == 0
    assert measured["tokens"] == measured["tokens_reported"]
