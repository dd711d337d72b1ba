"""The conformance suites: one file per scenario family.

`pytest --kv-gpu=NAME` runs them in a clone, `pytest --pyargs pytest_kvcache.suites --kv-gpu=NAME` from a wheel.
"""
