"""Integrations of stepscope into frameworks: callbacks, loggers and options. The rest of stepscope imports
none of them.
"""

from __future__ import annotations

from stepscope.integrations.arguments import add_arguments, config_from_args

__all__ = ["add_arguments", "config_from_args"]
