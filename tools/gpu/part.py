"""The process of one part: `python -m tools.gpu.part NAME FOLDER LIMIT [--pretend]`."""

from __future__ import annotations

import faulthandler
import sys
from importlib import import_module
from pathlib import Path

from tools.gpu.parts import GRACE_S, PARTS
from tools.gpu.results import Record, Result
from tools.repository import ROOT


def main(name: str, folder: Path, limit_s: float, *, pretend: bool) -> None:
    faulthandler.dump_traceback_later(limit_s - GRACE_S)  # a part that hangs prints its stacks
    sys.path.append(str(ROOT / "benchmarks"))  # for scripts that import each other by name
    part = next(part for part in PARTS if part.name == name)
    record = Record(folder / "result.json", Result(name, part.title, limit_s=limit_s, on_a_gpu=not pretend))
    from tools.gpu.device import Device

    import_module(f"tools.gpu.{part.module}").run(record, Device(pretend=pretend), folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]), pretend="--pretend" in sys.argv[4:])
