"""Steps of a release before its upload. `dev.py release` itself builds and installs the real packages."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from tests.tree import CORE, PACKAGES, project
from tools import release, smoke


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[release.Wheel]:
    """Return wheels of all distributions with nothing but their metadata."""
    monkeypatch.setattr(release, "ROOT", tmp_path)
    monkeypatch.setattr(release, "DIST", tmp_path)
    return [wheel_of(package, tmp_path) for package in PACKAGES]


def wheel_of(package: Path, folder: Path) -> release.Wheel:
    table = project(package)
    stem = f"{table['name'].replace('-', '_')}-{table['version']}"
    extras = [f"Provides-Extra: {name}" for name in table["optional-dependencies"]]
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        home = f"Project-URL: Homepage, {table['urls']['Homepage']}"
        lines = [f"Name: {table['name']}", f"Version: {table['version']}", home, *extras, "", ""]
        archive.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines))
    return release.Wheel(path)


def test_each_extra_is_tried_alone_and_the_smoke_test_knows_what_it_brings(
    wheels: list[release.Wheel],
) -> None:
    extras = list(project(CORE)["optional-dependencies"])
    tried = release.combinations(wheels[0])
    assert tried == [(), *((name,) for name in extras), ("cli", "ray")]
    assert {*smoke.NEEDED, "all"} == set(extras)


def test_our_packages_come_from_the_built_wheels_and_not_from_the_index(
    wheels: list[release.Wheel], tmp_path: Path
) -> None:
    command = release.installation(("cli", "ray"), wheels, tmp_path)
    assert command[-1] == "stepscope[cli,ray]"
    constraints = Path(command[command.index("--constraint") + 1]).read_text().splitlines()
    assert constraints == [f"{wheel.metadata['Name']} @ {wheel.path.as_uri()}" for wheel in wheels]


def test_a_combination_that_fails_is_named_with_its_output(
    wheels: list[release.Wheel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "build", lambda: wheels)
    monkeypatch.setattr(release, "run", lambda *command: None)
    monkeypatch.setattr(release, "installation", lambda *_: ["sh", "-c", "echo broken; false"])
    assert release.main(["--only", "cli", "--python", "true"]) == 1
    output = capsys.readouterr().out
    assert "broken\n(exited with 1)" in output
    assert "FAILED: stepscope[cli]. " in output


def test_the_core_is_uploaded_before_what_requires_it(wheels: list[release.Wheel]) -> None:
    lines = [line for line in release.instructions(wheels).splitlines() if "twine upload stepscope" in line]
    assert len(lines) == len(PACKAGES)
    assert (
        f"{project(CORE)['urls']['Homepage']}. Make sure that it is the project's."
        in release.instructions(wheels)
    )
    assert lines[0].split()[2] == f"stepscope-{project(CORE)['version']}-py3-none-any.whl"


def test_a_checkout_is_no_installed_package() -> None:
    with pytest.raises(AssertionError, match="stepscope"):
        smoke.check_package()
