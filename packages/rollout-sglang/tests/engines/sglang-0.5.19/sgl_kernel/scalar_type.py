"""Names of number formats: only named while modules are imported."""

from __future__ import annotations


class ScalarType:
    """Any format."""

    def __getattr__(self, name: str) -> ScalarType:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


scalar_types = ScalarType()
