"""Attributes on disk: bounded, redacted, and never a prompt that the user did not pass."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stepscope import attach, consume, flush, profile_step, redact, span, trajectory
from stepscope._recording.capture.capture import capture
from stepscope.config import ProfileConfig
from stepscope.errors import ConfigError
from stepscope.files.values import MAX_TEXT, AttrValue
from stepscope.testing.recorded_run import RecordedRun

SECRET = "the user's own words"


@pytest.fixture
def recorded(tmp_path: Path) -> RecordedRun:
    return RecordedRun(tmp_path / "run")


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_pattern_hides_the_value_and_keeps_the_key(recorded: RecordedRun) -> None:
    recorded.configure(redact=["prompt*", "*token"])
    with capture(1), span("a", attrs={"prompt": SECRET, "prompt_ids": SECRET, "api_token": SECRET, "n": 1}):
        pass
    (written,) = recorded.spans()
    hidden = dict.fromkeys(("prompt", "prompt_ids", "api_token"), "[redacted]")
    assert written.attrs == {**hidden, "n": 1}
    assert SECRET.encode() not in everything(recorded.layout.root)


def test_the_type_of_an_exception_is_kept_and_its_message_hidden(recorded: RecordedRun) -> None:
    recorded.configure(redact=["error"])
    with pytest.raises(ValueError, match="own words"), capture(1), span("a"):
        raise ValueError(SECRET)
    (written,) = recorded.spans()
    assert written.error == "ValueError: [redacted]"
    assert recorded.manifest(1).processes[0].error == "ValueError: [redacted]"
    assert SECRET.encode() not in everything(recorded.layout.root)


def test_a_function_decides_what_is_written(recorded: RecordedRun) -> None:
    @redact
    def hide(key: str, value: AttrValue) -> AttrValue:
        return len(value) if isinstance(value, str) else value

    with capture(1), span("a", attrs={"question": SECRET, "n": 1}):
        pass
    assert recorded.spans()[0].attrs == {"question": len(SECRET), "n": 1}


def test_a_function_that_raises_lets_nothing_through(
    recorded: RecordedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_RAISE", "0")

    @redact
    def broken(key: str, value: AttrValue) -> AttrValue:
        raise RuntimeError("no")

    with capture(1), span("a", attrs={"question": SECRET}):
        pass
    assert recorded.spans()[0].attrs == {"question": "[redacted]"}


def test_what_no_span_could_use_is_left_out_and_counted(recorded: RecordedRun) -> None:
    many = {f"key{number}": number for number in range(1000)}
    with capture(1), span("a", attrs=many), span("b", attrs={"k" * 10_000: "v" * 10_000}):
        pass
    first, second = recorded.spans()
    assert first.attrs is not None
    assert len(first.attrs) == 65
    assert first.attrs["attributes_left_out"] == 936
    assert second.attrs == {"k" * 100 + "...": "v" * 500 + "..."}


def test_arguments_and_results_of_decorated_functions_are_not_recorded(recorded: RecordedRun) -> None:
    @profile_step(role="rollout")
    def generate(prompt: str, *, system: str) -> str:
        return prompt + system

    with capture(1):
        assert generate(SECRET, system=SECRET)
    assert recorded.stages() == ["rollout/generate"]
    assert SECRET.encode() not in everything(recorded.layout.root)


def test_what_can_hold_prompts_is_readable_by_its_owner_alone(recorded: RecordedRun) -> None:
    before = os.umask(0o022)
    try:
        with capture(1), span("a", attrs={"question": SECRET}):
            pass
        flush()  # a file that is being written has another name
    finally:
        os.umask(before)
    files = [path for path in recorded.layout.root.rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o077 for path in files} == {0}


@pytest.mark.parametrize("wrong", [5, [""], [lambda key, value: None]])
def test_what_is_no_pattern_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"stepscope\.redact"):
        ProfileConfig.from_mapping({"redact": wrong})


def test_what_nobody_could_call_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"redact\(hook\)"):
        redact("prompt")  # type: ignore[type-var]  # as somebody might


def test_names_are_bounded_as_texts_are_and_those_that_differ_at_the_end_stay_apart(
    recorded: RecordedRun,
) -> None:
    long = "x" * 10_000
    with capture(1):
        for end in "ab":
            with trajectory(long + end), span(long + end, role=long + end):
                consume(long + end)
        with attach({"trajectory": long + "a"}), span("elsewhere"):
            pass
        with attach({"process": long, "span": 1}), span("below nobody"):
            pass
    written = recorded.spans()
    names = [name for line in written for name in (line.stage, line.role, line.trajectory) if name]
    assert max(map(len, names)) == MAX_TEXT
    assert len({line.trajectory for line in written} - {None}) == 2
    assert len({line.stage for line in written if line.stage[:1] == "x"}) == 2
    assert [line.trajectory for line in written if line.stage == "elsewhere"] == [
        next(line.trajectory for line in written if line.stage == "trajectory")
    ]
    assert all(line.link is None for line in written)
    assert max(len(path.name) for path in recorded.layout.root.rglob("*")) < 255


def test_an_object_is_its_type_and_a_list_its_text(recorded: RecordedRun) -> None:
    recorded.configure()
    odd: dict[str, AttrValue] = {"sizes": [1, 2], "of": object(), "in": [object()]}  # type: ignore[dict-item]
    with capture(1), span("update", "actor", attrs=odd):
        pass
    (written,) = recorded.spans()
    assert written.attrs == {"sizes": "[1, 2]", "of": "<object object>", "in": "[<object object>]"}
    assert written.role == "actor"
