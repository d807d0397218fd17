"""The mirror: copies whose sizes are verified, by programs that may be killed at any moment.

Stores are fsspec's own: a folder, and memory with faults. S3 over HTTP is in `real/test_writers_s3.py`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from packages.core.tests.mirrored import HOST, a_config, a_step, contents, drain
from stepscope import ProfileConfig, capture
from stepscope.cli.app import run
from stepscope.config import check_finish
from stepscope.errors import ConfigError
from stepscope.files.layout import RunLayout
from stepscope.files.mirror import files_below, is_whole, uncopied
from stepscope.mirror.copy import Store, copy_step, open_store

pytest.importorskip("fsspec")
from fsspec.implementations.memory import MemoryFileSystem

pytestmark = pytest.mark.usefixtures("nothing_is_left")


# Copying ----------------------------------------------------------------------------------------------------


def test_the_copy_holds_every_file_and_none_is_sent_twice(tmp_path: Path, url: str) -> None:
    step = a_step(tmp_path / "run")
    first = copy_step(open_store(url), step)
    again = copy_step(open_store(url), step)
    assert (first.files, first.sent, first.failed) == (5, 5, {})
    assert (again.files, again.sent, again.failed) == (5, 0, {})
    assert contents(tmp_path / "store" / step.root.name) == contents(step.root)
    assert (tmp_path / "store" / step.root.name / step.mirror_record(HOST).name).exists()
    assert uncopied(step, HOST, url) == []


def test_temporary_files_and_links_stay_here(tmp_path: Path, url: str) -> None:
    step = a_step(tmp_path / "run", files=0)
    (step.root / ".export-x").mkdir()
    (step.root / ".export-x" / "half.json").write_bytes(b"{")
    (step.root / ".tmp").write_bytes(b"x")
    (tmp_path / "secret").write_bytes(b"not ours")
    (step.root / "link").symlink_to(tmp_path / "secret")
    assert sorted(files_below(step.root)) == sorted(
        path.relative_to(step.root).as_posix()
        for path in step.root.rglob("*.json*")
        if ".export" not in str(path)
    )
    copy_step(open_store(url), step)
    assert not list((tmp_path / "store").rglob("*half*")) + list((tmp_path / "store").rglob("link"))


def test_what_was_removed_there_or_changed_here_is_sent_again(tmp_path: Path, url: str) -> None:
    step = a_step(tmp_path / "run")
    copy_step(open_store(url), step)
    (tmp_path / "store" / step.root.name / "traces/actor/0.json").unlink()
    (step.traces / "actor" / "2.json").write_bytes(b"shorter")
    assert uncopied(step, HOST, url) == ["traces/actor/2.json"]
    assert copy_step(open_store(url), step).sent == 2
    assert contents(tmp_path / "store" / step.root.name) == contents(step.root)


class Faulty(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A store of this process whose next copies go wrong as given: an error, or half a file."""

    cachable = False

    def __init__(self, *faults: Exception | str | None) -> None:
        super().__init__()
        self.faults = list(faults)
        self.store: dict[str, Any] = {}  # that of the class is shared by all
        self.pseudo_dirs = [""]

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, Exception):
            raise fault
        data = Path(lpath).read_bytes()
        self.pipe_file(rpath, data[: len(data) // 2] if fault == "half" else data)


def faulty(*faults: Exception | str | None) -> Store:
    return Store("memory://bucket", Faulty(*faults), "/bucket")


def test_a_file_that_fails_is_named_and_sent_the_next_time(tmp_path: Path) -> None:
    store, step = faulty(PermissionError("AccessDenied")), a_step(tmp_path)
    first = copy_step(store, step)
    assert list(first.failed.values()) == ["PermissionError: AccessDenied"]
    assert uncopied(step, HOST, store.url) == list(first.failed)
    again = copy_step(store, step)
    assert (again.sent, again.failed) == (1, {})
    assert uncopied(step, HOST, store.url) == []


def test_a_store_that_cannot_be_listed_keeps_the_record_of_what_it_has(tmp_path: Path) -> None:
    class Unlisted(Faulty):
        def find(self, *_: Any, **__: Any) -> Any:
            raise OSError("away")

    store, step = faulty(), a_step(tmp_path)
    copy_step(store, step)
    outcome = copy_step(Store(store.url, Unlisted(), "/bucket"), step)
    assert set(outcome.failed.values()) == {"OSError: away"}
    assert uncopied(step, HOST, store.url) == []


def test_a_copy_of_another_size_does_not_count(tmp_path: Path) -> None:
    store, step = faulty("half"), a_step(tmp_path)
    [(path, reason)] = copy_step(store, step).failed.items()
    size = (step.root / path).stat().st_size
    assert reason == f"OSError: the store has {size // 2} of {size} bytes"
    assert uncopied(step, HOST, store.url) == [path]


def test_a_store_that_is_away_is_given_up_after_three_files(tmp_path: Path) -> None:
    store = faulty(*[OSError("away") for _ in range(1000)])
    reasons = list(copy_step(store, a_step(tmp_path, files=40)).failed.values())
    assert reasons[:3] == ["OSError: away"] * 3
    assert set(reasons[3:]) == {"not tried after 3 failures"}


def test_a_file_that_grows_meanwhile_does_not_count(tmp_path: Path) -> None:
    step = a_step(tmp_path, files=1)

    class Growing(Faulty):
        def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
            super().put_file(lpath, rpath)
            if lpath.endswith("0.json"):
                with open(lpath, "ab") as file:
                    file.write(b"more")

    outcome = copy_step(Store("memory://bucket", Growing(), "/bucket"), step)
    assert outcome.failed == {"traces/actor/0.json": "OSError: it changed while it was copied"}
    assert uncopied(step, HOST, "memory://bucket") == ["traces/actor/0.json"]


SLOW = """
import sys, time
from fsspec.implementations.local import LocalFileSystem

def put_file(self, here, there, **_):
    # The disk of a slow store: what is under way lies there half.
    self.makedirs(self._parent(there), exist_ok=True)
    data = open(here, "rb").read()
    with open(there, "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        if here.endswith("3.json"):
            print("half", flush=True)
            time.sleep(600)
        file.write(data[len(data) // 2 :])

LocalFileSystem.put_file = put_file
from stepscope.cli.app import run
from stepscope.mirror import copy
copy._RECORD_EVERY_S = 0
sys.exit(run(sys.argv[1:]))
"""


def test_after_kill_9_in_the_middle_of_a_file_the_rest_is_sent_and_nothing_else(
    tmp_path: Path, url: str
) -> None:
    step = a_step(tmp_path / "run", files=6)
    command = [sys.executable, "-c", SLOW, "mirror", str(tmp_path / "run"), "--to", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    store = tmp_path / "store" / step.root.name
    before = {path: status.st_mtime_ns for path, status in files_below(store).items()}
    assert (store / "traces/actor/3.json").stat().st_size == 5000
    outcome = copy_step(open_store(url), step)
    assert outcome.failed == {}
    assert contents(store) == contents(step.root)
    after = {path: status.st_mtime_ns for path, status in files_below(store).items()}
    assert {path for path in before if before[path] != after[path]} == {"traces/actor/3.json"}
    assert outcome.sent == len(after) - len(before) + 1


def test_two_at_once_leave_one_whole_copy(tmp_path: Path, url: str) -> None:
    step = a_step(tmp_path / "run", files=20)
    command = [sys.executable, "-m", "stepscope", "mirror", str(tmp_path / "run"), "--to", url]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert contents(tmp_path / "store" / step.root.name) == contents(step.root)


# The command ------------------------------------------------------------------------------------------------


def test_the_command_takes_the_runs_own_mirror_and_copies_its_record(
    tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = a_config(tmp_path, url)
    with capture(1, config=config):
        pass
    drain()
    (RunLayout(config.save_path).step(1).root / "notes.txt").write_text("mine")
    assert run(["mirror", config.save_path]) == 0
    assert "1 sent (4 B)" in capsys.readouterr().err
    assert [record.read_bytes() for record in (tmp_path / "store").glob("run_*.json")] == [
        (tmp_path / "run" / "run.json").read_bytes()
    ]
    assert (tmp_path / "store" / "step_000001" / "notes.txt").read_text() == "mine"


def test_what_out_of_memory_errors_left_is_copied_too(tmp_path: Path, url: str) -> None:
    a_step(tmp_path / "run", files=0)
    left = tmp_path / "run" / "oom" / "actor_1.pickle"
    left.parent.mkdir()
    left.write_bytes(b"snapshot")
    for _ in range(2):
        assert run(["mirror", str(tmp_path / "run"), "--to", url]) == 0
    assert (tmp_path / "store" / "oom" / "actor_1.pickle").read_bytes() == b"snapshot"


def test_what_steps_took_that_nobody_captured_is_copied_too_and_again_once_it_grew(
    tmp_path: Path, url: str
) -> None:
    a_step(tmp_path / "run", files=0)
    file = tmp_path / "run" / "uncaptured" / "trainer_rank0_h_pid1_run1.jsonl"
    file.parent.mkdir()
    for line in ("{}\n", "{}\n{}\n"):
        file.write_text(line)
        assert run(["mirror", str(tmp_path / "run"), "--to", url]) == 0
        assert (tmp_path / "store" / "uncaptured" / file.name).read_text() == line


def test_two_runs_in_one_mirror_keep_their_records_apart(tmp_path: Path, url: str) -> None:
    for name, run_id in (("one", "aaaaaaaa"), ("two", "bbbbbbbb")):
        a_step(tmp_path / name)
        (tmp_path / name / "run.json").write_text(
            f'{{"run_id": "{run_id}", "started_ns": 1, "host": "h", "pid": 1, "command": [], "config": {{}},'
            ' "versions": {}}'
        )
        assert run(["mirror", str(tmp_path / name), "--to", url]) == 0
    assert sorted(path.name for path in (tmp_path / "store").glob("run*")) == [
        "run_aaaaaaaa.json",
        "run_bbbbbbbb.json",
    ]


def test_the_copy_in_a_folder_is_as_private_as_the_original(tmp_path: Path, url: str) -> None:
    a_step(tmp_path / "run")
    subprocess.run(
        [sys.executable, "-m", "stepscope", "mirror", str(tmp_path / "run"), "--to", url], check=True
    )
    modes = {path.stat().st_mode & 0o077 for path in (tmp_path / "store").rglob("*")}
    assert modes == {0}


def test_what_fails_is_named_and_the_exit_code_is_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_step(tmp_path / "run", files=0)
    (tmp_path / "store").write_text("a file where the folder should be")
    assert run(["mirror", str(tmp_path / "run"), "--to", f"file://{tmp_path}/store/x"]) == 3
    assert re.search(r"step_000002/\S+: (NotADirectory|FileExists)Error", capsys.readouterr().err)


# The configuration ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mirror", "match"),
    [
        ("/data/copy", r"write s3://bucket/prefix"),
        ("memory://x", r"a URL of a store that fsspec writes to"),
        ("simplecache::s3://bucket", r"write s3://bucket/prefix"),
        (5, r"finish.mirror is 5"),
    ],
)
def test_what_no_copy_could_be_kept_under_is_refused(mirror: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ProfileConfig.from_mapping({"finish": {"mirror": mirror}})


def test_a_password_in_the_url_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"without a user name or password") as caught:
        ProfileConfig.from_mapping({"finish": {"mirror": "ftp://anna:geheim@host/x"}})
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("mirror", "match"),
    [
        ("adl://bucket/x", r"Fix: pip install 'stepscope\[mirror\]'"),
        ("gs://bucket/x", r"gcsfs.*Fix: pip install 'stepscope\[mirror\]' gcsfs"),
        ("s4://bucket/x", r"a protocol that fsspec knows: .*s3.*'s4' is none of them"),
    ],
)
def test_a_protocol_that_is_not_installed_or_unknown_names_the_fix_before_the_run(
    mirror: str, match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        check_finish(ProfileConfig.from_mapping({"finish": {"mirror": mirror}}))


def test_a_copy_that_another_host_of_a_shared_folder_made_is_whole(tmp_path: Path, url: str) -> None:
    step = a_step(tmp_path / "run")
    assert not is_whole(step, url)
    copy_step(open_store(url), step)
    step.mirror_record(HOST).rename(step.mirror_record("another"))
    assert is_whole(step, url)
    assert not is_whole(step, f"{url}/elsewhere")
    (step.traces / "actor" / "0.json").write_text("changed since")
    assert not is_whole(step, url)


def test_a_folder_that_cannot_be_read_is_not_taken_for_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = a_step(tmp_path / "run")
    scandir = os.scandir

    def refusing(path: str) -> Any:
        if str(path).endswith("actor"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(PermissionError):
        files_below(step.root)
