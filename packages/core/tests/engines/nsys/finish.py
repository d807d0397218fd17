"""Put a real Nsight Systems into this environment: Debian's packages, unpacked and not installed.

Their own layout hides the importer from nsys, so the folders of host and target lie side by side. Where that
cannot be had, the reason is printed and left in `nsys-absent.txt`, and the tests are skipped with it.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HOME, ABSENT = Path(sys.prefix, "nsys"), Path(sys.prefix, "nsys-absent.txt")
APT = Path("/etc/apt")
SUITE = "trixie"
"""Debian's suite with the newest nsys, 2023.4. It runs on older ones too, beside their own libssh."""


def sources(folder: Path, suite: str) -> Path:
    """Return a folder with this machine's sources of packages, of that suite, with the component non-free."""
    made = folder / "sources"
    made.mkdir()
    own = platform.freedesktop_os_release()["VERSION_CODENAME"]
    for file in [
        *APT.glob("sources.list.d/*.sources"),
        *APT.glob("sources.list.d/*.list"),
        APT / "sources.list",
    ]:
        if file.is_file():
            text = file.read_text().replace(own, suite)
            text = re.sub(r"(?m)^Components:.*", "Components: main non-free", text)
            text = re.sub(r"(?m)^(deb (?:\[[^]]*\] )?\S+ \S+) .*", r"\1 main non-free", text)
            (made / (file.name if file.name != "sources.list" else "main.list")).write_text(text)
    return made


def unpack(folder: Path, suite: str, *packages: str) -> Path:
    """Download packages, and return the folder with their files."""
    (folder / "lists" / "partial").mkdir(parents=True)
    options = {
        "Dir::Etc::sourcelist": "/dev/null", "Dir::Etc::sourceparts": sources(folder, suite),
        "Dir::State::lists": folder / "lists", "Dir::Cache::pkgcache": "", "Dir::Cache::srcpkgcache": "",
        "APT::Sandbox::User": "root",
    }  # fmt: skip
    apt = ["apt-get", "-q", *(word for key, value in options.items() for word in ("-o", f"{key}={value}"))]
    subprocess.run([*apt, "update"], check=True, timeout=300)
    subprocess.run([*apt, "download", *packages], check=True, timeout=900, cwd=folder)
    for package in sorted(folder.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package, folder / "files"], check=True)
    return folder / "files" / "usr" / "lib"


def install(folder: Path) -> None:
    files = unpack(folder / "nsys", SUITE, "nsight-systems", "nsight-systems-target")
    own = unpack(folder / "own", platform.freedesktop_os_release()["VERSION_CODENAME"], "libssh-4")
    host, target = HOME / "host-linux-x64", HOME / "target-linux-x64"
    shutil.move(files / "nsight-systems" / host.name, host)
    shutil.move(files / "x86_64-linux-gnu" / "nsight-systems" / target.name, target)
    library = next(path for path in own.glob("*/libssh.so.4*") if not path.is_symlink())
    for name in ("libssh.so", "libssh.so.4"):
        (host / name).unlink(missing_ok=True)
        shutil.copy(library, host / name)
    subprocess.run([host / "QdstrmImporter", "--version"], check=True, timeout=60)
    subprocess.run([target / "nsys", "--version"], check=True, timeout=60)


def main() -> None:
    shutil.rmtree(HOME, ignore_errors=True)
    ABSENT.unlink(missing_ok=True)
    try:
        system = platform.freedesktop_os_release().get("ID")
        if system != "debian" or platform.machine() != "x86_64":
            raise OSError(
                f"its packages are Debian's for x86_64, and this is {system} on {platform.machine()}"
            )
        HOME.mkdir()
        with tempfile.TemporaryDirectory(dir=sys.prefix) as folder:
            install(Path(folder))
    except (OSError, LookupError, StopIteration, subprocess.SubprocessError) as error:
        shutil.rmtree(HOME, ignore_errors=True)
        reason = f"no nsys for the tests: {error}. To try again, remove {sys.prefix}"
        ABSENT.write_text(reason)
        print(reason)


if __name__ == "__main__":
    main()
