"""Test of the loop on the documentation's page about SGLang, unchanged. Run by `test_engines.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import sglang
from tiny_sglang import on_its_loop

from stepscope.files.layout import RunLayout, StepLayout
from stepscope_report.timeline import load_step

PAGE = Path(__file__).parents[4] / "docs" / "engines-sglang.md"
CONFIG = """
save_path: {folder}
steps: [3]
roles: {{rollout: {{ranks: all}}, "*": {{ranks: first}}}}
torch: {{activities: [cpu]}}
"""


def code() -> str:
    (example,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
        if "training_step" in block
    ]
    return str(example)


@pytest.fixture
def layout(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StepLayout:
    """Run the page's loop and return the folder of step 3."""

    def made(model_path: str, **options: object) -> Any:
        told = {name: getattr(engine.server_args, name) for name in options}
        assert told == options  # the engine of these tests is built as the page says
        return engine

    monkeypatch.setattr(sglang, "Engine", made)
    monkeypatch.chdir(tmp_path)
    # An absolute path, because background work of the run goes on after the working directory has changed.
    Path("stepscope.yaml").write_text(CONFIG.format(folder=tmp_path / "profile"))
    names: dict[str, Any] = {}
    exec(compile(code(), str(PAGE), "exec"), names)
    on_its_loop(engine, names["training_step"](3, [[1, 2, 3], [4, 5, 6, 7]]))
    return RunLayout(tmp_path / "profile").steps()[3]


def test_its_lines_are_about_ten() -> None:
    assert len(re.findall(r"# \d", code())) <= 10


def test_they_record_the_step_and_say_where_each_turn_went(layout: StepLayout) -> None:
    timeline = load_step(layout.root)
    assert timeline.manifest is not None
    assert timeline.manifest.problems() == []
    assert len(list(layout.traces.rglob("*.trace.json.gz"))) == 1
    turns = {index: span for index, span in enumerate(timeline.spans) if span.stage == "turn"}
    assert len(turns) == 2
    for index, turn in turns.items():
        below = {span.stage: span for span in timeline.spans if span.parent == index}
        assert list(below) == ["queue", "prefill", "decode"]
        assert turn.attrs is not None
        assert turn.attrs["prompt_tokens"] in (3, 4)
        assert turn.start_ns <= below["queue"].start_ns
        assert timeline.until_ns(below["decode"]) <= timeline.until_ns(turn)
