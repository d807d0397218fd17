"""Folders for traces of engines, hidden in the folder of the run.

Captures move traces out of them. A trace stays if it belongs to no capture, or came too late for its own.
"""

from __future__ import annotations

import os

from stepscope import ProfileConfig


def of_replica(config: ProfileConfig, replica: int) -> str:
    """Return the folder of one replica."""
    return os.path.join(os.path.abspath(config.save_path), ".vllm", f"replica{replica}")


def of_unedited(config: ProfileConfig) -> str:
    """Return the folder of all engines that an unedited program builds."""
    return os.path.join(os.path.abspath(config.save_path), ".vllm", "unedited")
