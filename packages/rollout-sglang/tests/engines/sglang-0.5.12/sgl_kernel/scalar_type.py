"""Names of number formats, which sglang uses only while it imports modules."""

from __future__ import annotations


class ScalarType:
    """Stands for every number format."""

    def __getattr__(self, name: str) -> ScalarType:
        if name.startswith("__"):
            raise AttributeError(name)
        return self


scalar_types = ScalarType()
