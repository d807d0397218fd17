"""Write the next version into all packages, their pins on each other, and the changelog."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

from tools import repository
from tools.processes import say

VERSION = re.compile(r'(?m)^(version = "|.*"stepscope[a-z-]*(?:\[[a-z]+\])?==)([^"]+)(")')


def bump(arguments: list[str]) -> bool:
    """set the version to X.Y.Z in all packages, their pins on each other and the changelog"""
    if len(arguments) != 1 or not re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        sys.exit(f"bump takes one version such as 0.2.0, not {' '.join(arguments) or 'nothing'}")
    new = arguments[0]
    changelog = repository.ROOT / "CHANGELOG.md"
    texts = {file: file.read_text() for file in (*repository.MANIFESTS, changelog)}
    old = one_version({file: texts[file] for file in repository.MANIFESTS})
    heading = "## [Unreleased]\n"
    if new == old or heading not in texts[changelog]:
        sys.exit(f"the version is {old}; for {new}, CHANGELOG.md needs the heading {heading.strip()!r}")
    for file in repository.MANIFESTS:
        texts[file] = VERSION.sub(rf"\g<1>{new}\g<3>", texts[file])
    released = f"{heading}\n## [{new}] - {time.strftime('%Y-%m-%d')}\n"
    texts[changelog] = texts[changelog].replace(heading, released, 1)
    for file, text in texts.items():
        file.write_text(text)
    say(f"{old} -> {new} in {len(texts)} files. Read `git diff`, run `dev.py test`, commit, tag v{new}")
    return True


def one_version(texts: dict[Path, str]) -> str:
    """Return the only version that the manifests in `texts` contain, pins included. Exit if they differ."""
    stated = {file: {match[2] for match in VERSION.finditer(text)} for file, text in texts.items()}
    versions = set().union(*stated.values())
    if len(versions) != 1:
        paths = {file.relative_to(repository.ROOT): versions for file, versions in stated.items()}
        rows = "\n".join(f"  {path}: {', '.join(sorted(versions))}" for path, versions in paths.items())
        sys.exit(f"the versions do not agree, so there is none to bump from:\n{rows}")
    return versions.pop()
