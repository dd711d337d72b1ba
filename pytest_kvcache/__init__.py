"""pytest-kvcache: performance conformance of LLM KV caches, one pytest outcome per claim."""

from .core.framework import Framework, Launch
from .core.lengths import Empirical, LogNormal, Uniform
from .core.limits import GAINS, LIMITS
from .core.scenarios import DECODING, Capacity, ClosedLoop, OpenLoop, Text
from .core.schemes import PROTOCOLS, Scheme
from .core.spec import Arm, Gate, Gpu, Model

__all__ = [
    "DECODING", "GAINS", "LIMITS", "PROTOCOLS", "Arm", "Capacity", "ClosedLoop", "Empirical", "Framework", "Gate", "Gpu",
    "Launch", "LogNormal", "Model", "OpenLoop", "Scheme", "Text", "Uniform",
]  # fmt: skip
__version__ = "0.1.0"
