"""Interruptions of functions of stepscope, at any instruction."""

from __future__ import annotations

import os

import pytest

import stepscope

OURS = os.path.dirname(stepscope.__file__)
LEFTOVERS = [
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # one that no variable got yet
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),  # one that just began
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # in a generator's own end
    pytest.mark.usefixtures("leftovers_are_collected"),
]
"""Marks of tests in which a signal between two instructions leaves objects to the collector, which warns."""
