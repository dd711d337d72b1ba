"""pytest-kvcache: performance conformance of LLM KV caches, one pytest outcome per claim."""

from .core.framework import Framework, Launch
from .core.spec import Arm, ClosedLoop, Gate, Gpu, Model, OpenLoop

__all__ = ["Arm", "ClosedLoop", "Framework", "Gate", "Gpu", "Launch", "Model", "OpenLoop"]
__version__ = "0.1.0"
