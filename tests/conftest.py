"""`pytest --kv-gpu=NAME` in a clone judges the device: it runs `suites/`, not the tests of the plugin itself."""


def pytest_ignore_collect(config):
    return True if config.getoption("kv_gpu", None) else None


def pytest_configure(config):
    """A run of the tests says the same as the one before it; `pytest --hypothesis-profile=explore` looks for examples that none has met.
    No property is a matter of time: the first example may load scipy, and the machine may be busy."""
    if config.getoption("kv_gpu", None):
        return
    from hypothesis import settings

    settings.register_profile("same", deadline=None, derandomize=True)
    settings.register_profile("explore", deadline=None, max_examples=3000)
    settings.load_profile("same")
