"""No property is a matter of time: the first example may load scipy, and the machine may be busy."""

from hypothesis import settings

settings.register_profile("core", deadline=None)
settings.load_profile("core")
