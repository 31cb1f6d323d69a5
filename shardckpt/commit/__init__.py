"""Complete or absent: staging directories and uploads, the step that commits them, removals, and leftovers of kills."""

from shardckpt.lazy import attach_stub

__getattr__, __dir__, __all__ = attach_stub(__name__)
