"""A trl 9.9 that the preset does not fit: one function has another name, and a module is gone."""

from __future__ import annotations

from pathlib import Path

_METHODS = ("_calculate_rewards", "_generate_all", "_generate_and_score_completions", "compute_loss")


def write_stale_trl(folder: Path) -> Path:
    package = folder / "trl" / "trainer"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    body = "".join(f"    def {name}(self): return {name!r}\n" for name in _METHODS)
    body += "    def _get_per_token_logps_and_entropies(self, model, compute_entropy=False): pass\n"
    (package / "grpo_trainer.py").write_text(f"class GRPOTrainer:\n{body}")
    info = folder / "trl-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 9.9\n")
    return folder
