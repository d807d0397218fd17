"""Facts that must hold after every step, with any fault: findings are sentences, and none is good."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from stepscope.files.layout import StepLayout, sidecar_of
from stepscope.files.manifest import Expectation, Manifest, ProcessPart
from stepscope.files.manifest_parts import fold, read_parts
from stepscope.files.spans import End, Header, Line
from stepscope_report.timeline import load_step

TEMPORARY = re.compile(r"^\.(?!recordings$).*")
"""Names of files that nobody should find later."""


Gone: TypeAlias = Literal["before the end", "perhaps after it"] | None


def findings(
    step: StepLayout,
    manifest: Manifest,
    took_part: dict[str, str],
    harmed: Collection[str],
    lost: Gone = None,
) -> Iterator[str]:
    """Yield the errors of one captured step.

    Args:
        took_part: {name: Ray actor id, or `replica N`} of everybody who was to take part.
        harmed: Names whose part may be less than ok; `*` for anybody.
        lost: When files on disk were taken away, if they were. What lay there then is not to be found.
    """
    yield from _unexplained(manifest)
    if lost != "perhaps after it":
        yield from _unmentioned(manifest, took_part)
    for part in manifest.processes:
        if lost is None:
            yield from _untrue(step, part)
        if lost != "perhaps after it":
            yield from _spans_differ(step, part)
    if "*" not in harmed:
        yield from _collateral(manifest, took_part, harmed)
    if lost is None:
        yield from _disk_disagrees(step, manifest)
        yield from _unannounced(step, manifest)
        yield from _unreadable(step)


def after_a_death(step: StepLayout) -> Iterator[str]:
    """Yield the errors of a step whose driver was killed, part by part."""
    for part in read_parts(step)[0]:
        yield from _untrue(step, part)
        yield from _spans_differ(step, part)
        yield from _open_and_well(part)
    yield from _unreadable(step)


def _open_and_well(part: ProcessPart) -> Iterator[str]:
    if part.closed is None and all(item.state in ("ok", "skipped") for item in part.expected):
        yield f"{part.process.key} never closed its capture, and says that all is well"


def temporary_files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob(".*") if TEMPORARY.match(path.name)]


def _unexplained(manifest: Manifest) -> Iterator[str]:
    for part in manifest.processes:
        for item in part.expected:
            if item.state != "ok" and not item.reason:
                yield f"{part.process.key}: {item.name} is {item.state} without a reason"
        for absent in part.absent:
            if not absent.reason:
                yield f"{absent.name} is {absent.state} without a reason"


def _unmentioned(manifest: Manifest, took_part: dict[str, str]) -> Iterator[str]:
    mentioned = {part.process.actor_id for part in manifest.processes}
    mentioned |= {item.name for part in manifest.processes for item in part.expected}
    absent = " ".join(item.name for part in manifest.processes for item in part.absent)
    # Of who shares no folder with the owner, as nobody does whose folder was taken away; not of what is `ok`,
    # since those have a part here.
    absent += " ".join(i.name for part in manifest.processes for i in part.expected if i.state != "ok")
    for name, known_as in took_part.items():
        if known_as not in mentioned and known_as[:8] not in absent:
            yield f"the manifest has no word about {name} ({known_as[:8]})"


def _untrue(step: StepLayout, part: ProcessPart) -> Iterator[str]:
    key = part.process.key
    for item in part.expected:
        for artifact in item.artifacts:
            path = step.root / artifact.path
            if not path.exists():
                yield f"{key}: {item.name} ({item.state}) names {artifact.path}, which is not there"
            elif path.is_file() and path.stat().st_size != artifact.size_bytes:
                yield f"{key}: {artifact.path} has {path.stat().st_size} bytes, not {artifact.size_bytes}"
            elif path.suffix == ".gz":
                yield from _broken_gzip(path)
        if item.state == "ok" and "trace" in item.name and not item.artifacts:
            yield f"{key}: {item.name} is ok and has no file"


def _broken_gzip(path: Path) -> Iterator[str]:
    try:
        json.loads(gzip.decompress(path.read_bytes()))
    except (OSError, EOFError, ValueError) as error:
        yield f"{path.name} is promised and broken: {error}"


def _spans_differ(step: StepLayout, part: ProcessPart) -> Iterator[str]:
    key = part.process.key
    if states(part.expected).get("spans") != "ok":
        return
    decoder = msgspec.json.Decoder(Line)
    for path in sorted(step.spans.glob("*.jsonl")) if step.spans.is_dir() else []:
        lines = decoder.decode_lines(path.read_bytes())
        if (
            lines  # a process that is killed before its header leaves an empty file
            and isinstance(lines[0], Header)
            and lines[0].process == part.process
            and lines[0].run_id == part.run_id
        ):
            end = lines[-1]
            if isinstance(end, End) and end.spans == part.spans:
                return
    yield f"{key}: spans are ok and no whole file with {part.spans} spans is there"


def _collateral(manifest: Manifest, took_part: dict[str, str], harmed: Collection[str]) -> Iterator[str]:
    """Trouble of somebody that nothing was done to."""
    well = {known_as for name, known_as in took_part.items() if name not in harmed}
    for part in manifest.processes:
        owner = part.owner and "driver" not in harmed
        for item in part.expected:
            unharmed = (
                part.process.actor_id in well
                or (owner and not item.name.startswith("replica"))
                or item.name in well
            )
            waits = item.pending == "running" and harmed  # the command waits for others' files
            if unharmed and not waits and item.state not in ("ok", "skipped"):
                yield f"nothing was done to {part.process.key}: {item.name} is {item.state}: {item.reason}"
        for absent in part.absent:
            if any(known_as[:8] in absent.name for known_as in well) and absent.state != "skipped":
                yield f"nothing was done to {absent.name}: {absent.state}: {absent.reason}"


def _disk_disagrees(step: StepLayout, manifest: Manifest) -> Iterator[str]:
    parts = [part for part in read_parts(step)[0] if part.run_id == manifest.run_id]
    if not parts:
        yield "there is no part of the manifest on disk"
        return
    if fold(parts) != manifest:
        on_disk = {part.process.key: states(part.expected) for part in parts}
        known = {part.process.key: states(part.expected) for part in manifest.processes}
        if on_disk != known:
            yield f"the parts on disk say {on_disk}, the result {known}"
    try:
        written = msgspec.json.decode(step.manifest.read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError) as error:
        yield f"manifest.json: {error}"
        return
    if written.run_id == manifest.run_id and written.state != manifest.state:
        yield f"manifest.json says {written.state}, the result {manifest.state}"


def states(items: Collection[Expectation]) -> dict[str, str]:
    return {item.name: item.state for item in items}


def _unannounced(step: StepLayout, manifest: Manifest) -> Iterator[str]:
    """Traces with a sidecar of this run that no expectation names, though none of their kind failed."""
    named = {a.path for part in manifest.processes for item in part.expected for a in item.artifacts}
    trouble = any(item.state != "ok" for part in manifest.processes for item in part.expected) or any(
        part.absent for part in manifest.processes
    )
    for path in step.traces.rglob("*") if step.traces.is_dir() else []:
        if not path.is_file() or path.name.startswith(".") or path.name.endswith(".meta.json"):
            continue
        relative = str(path.relative_to(step.root))
        if relative not in named and not trouble and _run_of(path) == manifest.run_id:
            yield f"{relative} lies there and no expectation names it"
        if not sidecar_of(path).exists() and not trouble:
            yield f"{relative} has no sidecar"


def _run_of(path: Path) -> str | None:
    try:
        return str(json.loads(sidecar_of(path).read_bytes())["run_id"])
    except (OSError, ValueError, KeyError):
        return None


def _unreadable(step: StepLayout) -> Iterator[str]:
    try:
        load_step(step.root)
    except Exception as error:
        yield f"the report cannot read {step.root.name}: {type(error).__name__}: {error}"


def alive_with(marker: str) -> dict[int, str]:
    """Processes whose environment holds `marker`, with their command lines; not this one or its parent."""
    commands = {}
    own = {os.getpid(), os.getppid()}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) in own:
            continue
        try:
            environ = (entry / "environ").read_bytes()
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if marker.encode() in environ and state != "Z":
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                commands[int(entry.name)] = command.strip()[:120]
        except OSError:
            continue
    return commands
