"""A capture lacks what was asked for: its manifest, `ls`, the report and the exit codes say so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.runs import manifest_of, outcomes
from stepscope import ProfileConfig, capture, flush, prepare, span
from stepscope._recording.capture.omissions import no_profiler
from stepscope._recording.capture.result import CaptureResult
from stepscope._recording.process import failures, identity
from stepscope._recording.session import selection, session
from stepscope.errors import MissingArtifactsError
from stepscope.files.manifest import Expectation
from stepscope.testing.fake_backend import FakeBackend
from stepscope.testing.fake_engine import FakeEngine, FakeEngineProfiler
from stepscope_report.cli import run


@pytest.fixture(autouse=True)
def nothing_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_warned", set())


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> FakeBackend:
    made = FakeBackend()
    for user in ("session.session", "fanout.worker_side"):
        monkeypatch.setattr(f"stepscope._recording.{user}.load_backend", lambda name, config: made)
    monkeypatch.setattr(selection, "LIBRARY", {})
    return made


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "library_loaded", lambda tool: False)


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 0 of 2."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")


def config_of(folder: Path, **roles: Any) -> ProfileConfig:
    settings = {"roles": roles} if roles else {}
    return ProfileConfig(save_path=folder, steps=[1], **settings)  # type: ignore[arg-type]  # forms


def captured(config: ProfileConfig, **given: Any) -> CaptureResult:
    with capture(1, config=config, **given) as cap, span("update", role="actor"):
        pass
    flush()  # `ls` tells of a trace that is still being written
    return cap.result


def item(result: CaptureResult, name: str) -> Expectation:
    return outcomes(result)[name]


def codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, bool]:
    """Return the exit code of `ls`, and whether the report calls the step complete."""
    capsys.readouterr()
    code = run(["ls", str(folder)])
    capsys.readouterr()
    run(["report", str(folder), "--json", "--no-traces"])  # the fake backend's are none
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    return code, step["health"]["complete"]


@pytest.mark.slow
@pytest.mark.usefixtures("backend")
def test_a_mistyped_role_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    result = captured(config_of(tmp_path, actr={"ranks": "all"}, **{"*": {"ranks": "first"}}), workers={})
    assert item(result, "roles.actr").state == "missing"
    assert caplog.text.count("roles.actr matched") == 1
    with pytest.raises(MissingArtifactsError, match="mean 'actor'"):
        result.raise_for_missing()
    assert codes(tmp_path, capsys) == (3, False)


@pytest.mark.usefixtures("backend")
def test_a_role_that_asks_for_spans_alone_may_be_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    captured(config_of(tmp_path, rollout={"profiler": "off"}, **{"*": {"ranks": "first"}}), workers={})
    assert codes(tmp_path, capsys) == (0, True)
    assert "roles." not in caplog.text


@pytest.mark.usefixtures("backend")
def test_a_mistyped_role_is_told_once_even_if_it_asks_for_spans_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, aktor={"profiler": "off"}, **{"*": {"ranks": "first"}})
    prepare(config=config, workers={})
    captured(config, workers={})
    assert caplog.text.count("roles.aktor matched nothing") == 1
    assert "Did you mean 'actor'" in caplog.text


@pytest.mark.usefixtures("backend", "two_ranks")
def test_a_rank_that_nobody_has_is_missing_and_prepare_warns_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(tmp_path, trainer={"ranks": [0, 7]})
    prepare(config=config, workers={})
    assert "trainer rank 7: " in caplog.text
    result = captured(config, workers={})
    assert item(result, "trainer rank 7").state == "missing"
    assert codes(tmp_path, capsys) == (3, False)


@pytest.mark.usefixtures("backend", "two_ranks")
def test_a_rank_that_a_pattern_asks_of_all_roles_is_a_warning_where_one_role_lacks_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`"*": {ranks: [0, 7]}` is right where another role has eight ranks."""
    result = captured(config_of(tmp_path, **{"*": {"ranks": [0, 7]}}), workers={})
    assert (item(result, "trainer rank 7").state, item(result, "trainer rank 7").kind) == (
        "skipped",
        "selection",
    )
    assert codes(tmp_path, capsys) == (0, True)


class Sized(FakeEngineProfiler):
    world_size = 2


def test_a_rank_that_no_engine_has_is_missing(tmp_path: Path) -> None:
    engines = [Sized(FakeEngine()), Sized(FakeEngine())]
    result = captured(config_of(tmp_path, rollout={"ranks": [3, 4]}), engines=engines)
    assert item(result, "replica 1").state == "ok"
    assert "up to 3" in str(item(result, "rollout rank 4").reason)
    assert item(result, "rollout rank 4").state == "missing"


@pytest.mark.usefixtures("without_torch")
def test_a_capture_in_which_no_profiler_ran_is_not_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = captured(config_of(tmp_path, **{"*": {"ranks": "all"}}), workers={})
    assert item(result, "profiler").state == "missing"
    assert "no profiler ran" in str(result.problems())
    assert codes(tmp_path, capsys) == (3, False)


@pytest.mark.usefixtures("without_torch")
def test_a_run_that_asks_for_no_profiler_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    captured(config_of(tmp_path, **{"*": {"profiler": "off"}}), workers={})
    assert codes(tmp_path, capsys) == (0, True)


@pytest.mark.needs("torch")  # installed, and not imported
@pytest.mark.usefixtures("without_torch")
def test_of_roles_that_nobody_wrote_a_capture_without_a_profiler_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    captured(config_of(tmp_path), workers={})
    assert caplog.text.count("no profiler ran") == 1
    assert run(["ls", str(tmp_path)]) == 0
    assert "no profiler ran" in capsys.readouterr().out
    run(["report", str(tmp_path), "--json"])
    (step,) = json.loads(capsys.readouterr().out)["steps"]
    (warning,) = step["health"]["warnings"]
    assert "no profiler ran" in warning
    with capture(2, config=config_of(tmp_path).replace(steps=[2]), workers={}):
        pass
    run(["ls", str(tmp_path)])
    assert capsys.readouterr().out.count("no profiler ran") == 1  # a line for both steps


def test_where_no_profiler_is_installed_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(selection.LIBRARY, "torch", "a_library_that_is_absent")
    result = captured(config_of(tmp_path), workers={})
    assert manifest_of(result).warnings() == []
    assert no_profiler(config_of(tmp_path), manifest_of(result).processes) is None  # of a request's answer
    assert "no profiler" not in caplog.text


def test_a_profiler_that_was_asked_for_and_is_not_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(selection.LIBRARY, "cuda_memory", "a_library_that_is_absent")
    result = captured(config_of(tmp_path).replace(tool="cuda_memory"), workers={})
    assert len(manifest_of(result).warnings()) == 1


def test_a_rank_that_closes_before_the_others_opened_says_nothing_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "place", lambda: (0, 2))
    result = captured(config_of(tmp_path, nobody={"ranks": "all"}))
    assert not [line for line in result.problems() if "matched nothing" in line]


def test_a_rank_that_is_left_out_on_purpose_is_not_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks of a launcher, without a process group. The one without a profiler closes first."""
    config = config_of(tmp_path, trainer={"ranks": [0]})
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        result = captured(config, workers={})
        manifest = manifest_of(result)
        assert not [
            entry for part in manifest.processes for entry in part.expected if entry.name == "profiler"
        ]
    assert codes(tmp_path, capsys) == (0, True)
    monkeypatch.delenv("WORLD_SIZE")  # a rank alone knows of no others
    monkeypatch.setenv("RANK", "1")
    captured(config_of(tmp_path / "alone", trainer={"ranks": [0]}), workers={})
    assert codes(tmp_path / "alone", capsys) == (0, True)
