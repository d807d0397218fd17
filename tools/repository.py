"""The checkout: its folder, its packages, and the files that state their version."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "report", "rollout-vllm", "rollout-sglang", "npu")
"""Folders of the packages, in the order of their upload: all others require `core`."""
MANIFESTS = [ROOT / "packages" / name / "pyproject.toml" for name in PACKAGES]
