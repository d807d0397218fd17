"""Rows of `stepscope doctor`, for possible states of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope_npu._doctor import Seen, cann_version, rows_of

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
LIBHCCL = "ImportError: libhccl.so: cannot open shared object file: No such file or directory"


def states(seen: Seen) -> dict[str, str]:
    return {row.subject: row.state for row in rows_of(seen)}


def test_without_torch_npu_there_is_one_row_and_it_is_no_trouble() -> None:
    assert states(Seen(torch_npu=None)) == {"torch_npu": "absent"}


def test_a_machine_without_cann_breaks_import_torch_and_one_variable_repairs_it() -> None:
    seen = Seen(torch_npu="2.13.0", autoloads=True, message=LIBHCCL)
    [torch_npu, cann, msprof, autoload] = rows_of(seen)
    assert (torch_npu.state, cann.state, msprof.state, autoload.state) == ("red", "amber", "amber", "red")
    assert "libhccl.so" in torch_npu.found
    assert "set_env.sh" in str(torch_npu.fix)
    assert autoload.fix == f"export {AUTOLOAD}=0"
    repaired = Seen(torch_npu="2.13.0", autoloads=True, message=LIBHCCL, environ={AUTOLOAD: "0"})
    assert AUTOLOAD not in states(repaired)
    old = Seen(torch_npu="2.1.0.post8", message=LIBHCCL)  # `import torch` does not load this torch_npu
    assert AUTOLOAD not in states(old)


def test_a_driver_that_shows_no_npu_is_red_and_points_to_the_versions() -> None:
    [row, *_] = rows_of(Seen(torch_npu="2.13.0", imported="False|0"))
    assert row.state == "red"
    assert "driver's version" in str(row.fix)


def test_a_machine_that_has_it_all_is_green(tmp_path: Path) -> None:
    (tmp_path / "version.info").write_text("Version=8.3.RC1\n")
    seen = Seen(torch_npu="2.13.0", autoloads=True, imported="True|8", cann=tmp_path, msprof="/opt/msprof")
    assert set(states(seen).values()) == {"green"}
    findings = " ".join(row.found for row in rows_of(seen))
    assert "8 NPU(s)" in findings
    assert "8.3.RC1" in findings
    assert "not installed (optional)" in findings


def test_msprof_analyze_is_named_where_it_is() -> None:
    [_, _, msprof] = rows_of(Seen(torch_npu="2.13.0", msprof="/opt/msprof", msprof_analyze=True))
    assert msprof.found.startswith("/opt/msprof, ")


@pytest.mark.parametrize("variable", ["PROFILING_MODE", "PROFILER_SAMPLECONFIG"])
def test_a_process_under_msprof_is_red(variable: str) -> None:
    seen = Seen(torch_npu="2.13.0", imported="True|1", environ={variable: "dynamic"})
    assert states(seen)[variable] == "red"


def test_the_file_that_torch_npu_reads_the_version_of_cann_in_comes_first(tmp_path: Path) -> None:
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "version.info").write_text("Version=7.7\n")
    (tmp_path / "x86_64-linux").mkdir()
    (tmp_path / "x86_64-linux" / "ascend_toolkit_install.info").write_text(
        "package_name=x\nversion=8.3.RC1\n"
    )
    assert cann_version(tmp_path) == "8.3.RC1"


def test_a_cann_without_a_version_file_is_of_unknown_version(tmp_path: Path) -> None:
    assert cann_version(tmp_path) is None
