"""Chaos: a small trainer on Ray, captured step by step, to which something happens in every other step.

    python run.py [--rounds 100] [--seed 0] [--first 0] [--fault NAME] [--no-drivers] [--recorder]

Rounds are played in sessions: a driver with its own Ray, and a seed that decides everything it chooses.
Behind each full session another driver is itself killed, terminated or interrupted in the middle of its work.
A finding is printed with the arguments that repeat its round. Exit status 0 without findings.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from truth import after_a_death, alive_with, temporary_files

from stepscope.files.layout import RunLayout

SESSION, DUMPS = (Path(__file__).with_name(name) for name in ("session.py", "dumps.py"))
ROUNDS = 12
"""Number of rounds of one session."""
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
END_S = 90
"""The longest exit of a driver, which waits for traces that are being written."""
GONE_S = 30
RAYS_OWN = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Leftovers of Ray, for a while, after a driver is killed."""
AGAIN = """
import sys
from stepscope import ProfileConfig, capture
config = ProfileConfig(save_path=sys.argv[1], steps="every:1", control={"requests": False})
with capture(10**6, config=config):
    pass
"""


class Sessions:
    def __init__(self, folder: Path, script: Path = SESSION) -> None:
        self.folder = folder
        self.script = script
        self.found = 0

    def play(self, seed: int, first: int, count: int, fault: str | None) -> None:
        """One session, whose findings it prints itself; then what is left of it."""
        process, marker, save_path = self._start(seed, str(first), str(count), *([fault] if fault else []))
        code = process.wait()
        self.found += code != 0
        if code not in (0, 1):
            print(f"  FOUND: the driver of seed {seed} ended with {code}", flush=True)
        self._nobody_left(marker, seed)
        shutil.rmtree(save_path, ignore_errors=True)

    def kill_the_driver(self, seed: int) -> None:
        """A driver that captures step after step is ended from outside; the folder must stay truthful."""
        rng = random.Random(f"{seed}/driver")
        number, wait_s = rng.choice(SIGNALS), rng.uniform(0, 4)
        print(
            f"the driver gets {number.name} after {wait_s:.2f} s (--seed {seed} --fault driver):",
            end=" ",
            flush=True,
        )
        process, marker, save_path = self._start(seed, "0", "100000", "nothing", stdout=subprocess.PIPE)
        assert process.stdout is not None
        for line in process.stdout:
            if line == b"ready\n":
                break
        time.sleep(wait_s)
        process.send_signal(number)
        began = time.monotonic()
        try:
            process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._say(f"the driver did not end within {END_S} s of {number.name}; its stacks:")
            process.send_signal(signal.SIGUSR2)
            time.sleep(1)
            process.kill()
            print(process.communicate()[0].decode()[-2000:], flush=True)
        print(f"ended with {process.returncode} in {time.monotonic() - began:.1f} s", flush=True)
        self._nobody_left(marker, seed)
        layout = RunLayout(save_path)
        for step in layout.steps().values():
            for text in after_a_death(step):
                self._say(f"{step.root.name}: {text}")
        subprocess.run([sys.executable, "-c", AGAIN, str(save_path)], check=True, timeout=60)
        for path in temporary_files(save_path):
            self._say(f"{path} is left, and the next capture did not remove it")
        shutil.rmtree(save_path, ignore_errors=True)

    def _start(
        self, seed: int, *arguments: str, stdout: int | None = None
    ) -> tuple[subprocess.Popen[bytes], str, Path]:
        marker = f"STEPSCOPE_CHAOS={secrets.token_hex(8)}"
        save_path = self.folder / f"seed-{seed}-{secrets.token_hex(2)}"
        environ = {**os.environ, **dict([marker.split("=")]), "CHAOS_TEMP": str(self.folder)}
        command = [sys.executable, str(self.script), str(save_path), str(seed), *arguments]
        return subprocess.Popen(command, env=environ, stdout=stdout), marker, save_path

    def _nobody_left(self, marker: str, seed: int) -> None:
        until = time.monotonic() + GONE_S
        left = alive_with(marker)
        while not all(command.startswith(RAYS_OWN) for command in left.values()) and time.monotonic() < until:
            time.sleep(0.2)
            left = alive_with(marker)
        for pid, command in left.items():
            if not command.startswith(RAYS_OWN):
                self._say(f"process {pid} of seed {seed} is left behind: {command}")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _say(self, text: str) -> None:
        self.found += 1
        print(f"  FOUND: {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--first", type=int, default=0, help="first round of the session, to repeat one")
    parser.add_argument("--fault", help="only this one; `driver`: the driver is the victim")
    parser.add_argument("--no-drivers", action="store_true", help="no driver is itself the victim")
    parser.add_argument("--recorder", action="store_true", help="of the flight recorder, while it writes")
    chosen = parser.parse_args()
    seed = secrets.randbelow(10**6) if chosen.seed is None else chosen.seed
    print(f"chaos: {chosen.rounds} rounds from --seed {seed}", flush=True)
    # Short, and below /tmp: the paths of Ray's sockets may not exceed 107 characters.
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        sessions = Sessions(Path(folder), DUMPS if chosen.recorder else SESSION)
        left = chosen.rounds
        while left > 0:
            count = min(left, ROUNDS)
            if chosen.fault != "driver":
                sessions.play(seed, chosen.first, count, chosen.fault)
            drivers = not (chosen.no_drivers or chosen.recorder)
            if chosen.fault == "driver" or (chosen.fault is None and drivers and count == ROUNDS):
                sessions.kill_the_driver(seed)
            left, seed = left - count, seed + 1
    print(f"chaos: {sessions.found or 'no'} session(s) with findings", flush=True)
    return 1 if sessions.found else 0


if __name__ == "__main__":
    sys.exit(main())
