"""Places for stepscope inside frameworks: callbacks, loggers and options. The rest imports none of them."""

from __future__ import annotations

from stepscope.integrations.arguments import add_arguments, config_from_args

__all__ = ["add_arguments", "config_from_args"]
