"""Stands in for `nsys profile`: starts a program, and writes a report for each CUDA profiler range in it.

A range is seen through a `libcudart.so` of our own (`build_cudart`), which writes to the file that
STANDIN_RANGES names. A report holds what the program did in it: the lines that it added to STANDIN_WORK.

What each part models (Guide: NVIDIA's Nsight Systems User Guide, "CLI Profile Command Switch Options"):

* `main`: `nsys profile [options] program`; options are `--long=value`; the program goes on when a range ends
  (Guide, `--kill`, for ranges by cudaProfilerStart/Stop), and its exit code is passed on.
* `cudaProfilerStart`, `cudaProfilerStop`: a range is what lies between (CUDA Runtime API, Profiler Control).
* `--capture-range=cudaProfilerApi` with `--capture-range-end`: `repeat` makes a report for each range, `stop`
  one report, and later ranges are not recorded (Guide, the two options).
* `%p` in `--output` is the program's process id; reports of `repeat` are numbered from 1 (Guide, `--output`).
* `report`: a raw `.qdstrm` becomes the `.nsys-rep` beside it (Guide, "Installing the CLI on Your Target").
* NSYS_PROFILING_SESSION_ID is set for what is recorded: others rely on it, and the Guide does not have it.
* STANDIN_REFUSES: a range is refused with an error code. Which one a driver gives is not documented.

Not modelled, and so shown by no test: that NVTX start/end ranges are in a report; how long one takes and
whether it pauses while it grows; CUPTI's refusal beside torch.profiler; forked children; several recorded
processes; that `nsys export` writes what `test_reader_nsys.py` makes; that Ray's `nsight` starts nsys.

    python nsys_standin.py profile --trace=cuda,nvtx ... python program.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

CUDART = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>
static int say(const char *word) {
    const char *path = getenv("STANDIN_RANGES");
    int file = path ? open(path, O_WRONLY) : -1;
    const char *work = getenv("STANDIN_WORK");
    struct stat status;
    long done = work && stat(work, &status) == 0 ? (long)status.st_size : 0;
    char line[64];
    int length = snprintf(line, sizeof line, "%s %ld\\n", word, done);
    if (file < 0) return 999;
    if (write(file, line, length) != length) return 998;
    close(file);
    return getenv("STANDIN_REFUSES") ? 8 : 0;
}
int cudaProfilerStart(void) { return say("start"); }
int cudaProfilerStop(void) { return say("stop"); }
"""


def build_cudart(folder: Path) -> Path:
    """Return a `libcudart.so` in `folder`; raise if there is no C compiler."""
    source = folder / "cudart.c"
    source.write_text(CUDART)
    library = folder / "libcudart.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return library


def main(words: list[str]) -> int:
    assert words[0] == "profile"
    program = next(at for at, word in enumerate(words[1:], 1) if not word.startswith("-"))
    options = dict(word.lstrip("-").partition("=")[::2] for word in words[1:program])
    ranges = Path(os.environ["STANDIN_RANGES"])
    os.mkfifo(ranges)
    keep_open = os.open(ranges, os.O_RDWR)
    process = subprocess.Popen(
        words[program:], env={**os.environ, "NSYS_PROFILING_SESSION_ID": str(os.getpid())}
    )
    threading.Thread(target=serve, args=(ranges, options, process.pid), daemon=True).start()
    code = process.wait()
    time.sleep(0.1)
    os.close(keep_open)
    return code


def serve(ranges: Path, options: dict[str, str], pid: int) -> None:
    work = Path(os.environ["STANDIN_WORK"])
    output = options["output"].replace("%p", str(pid))
    repeats = options.get("capture-range-end") == "repeat"
    count = begun = 0
    with open(ranges) as lines:
        for line in lines:
            word, size = line.split()
            if word == "start":
                begun = int(size)
            elif repeats or not count:
                count += 1
                did = work.read_text()[begun : int(size)].splitlines()
                name = f"{output}.{count}.nsys-rep" if repeats else f"{output}.nsys-rep"
                threading.Thread(target=report, args=(Path(name), did)).start()


def report(path: Path, did: list[str]) -> None:
    """In two pieces, with the raw recording beside it meanwhile, as a large one is written."""
    raw = path.with_suffix(".qdstrm")
    raw.touch()
    text = "\n".join(["report", *did, "end"])
    with path.open("w") as file:
        file.write(text[:5])
        file.flush()
        time.sleep(0.5)
        file.write(text[5:])
    raw.unlink()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
