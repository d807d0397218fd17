"""Publication of one recording: move its files to the capture's folder, with ranks and sidecars."""

from __future__ import annotations

from pathlib import Path

from stepscope.engines.artifacts import Option, publish, read_anchor
from stepscope.engines.passes import publish_passes
from stepscope.errors import EngineError
from stepscope.files.layout import safe, sidecar_of
from stepscope.files.manifest import IDLE, LATE
from stepscope.files.sidecar import Artifact
from stepscope_sglang import _versions
from stepscope_sglang._capture import outcome
from stepscope_sglang._capture.options import UNBOUNDED
from stepscope_sglang._capture.outcome import Recording
from stepscope_sglang._driving.target import EngineFacts
from stepscope_sglang._engine_side.states import counts_in, why_not_shown
from stepscope_sglang._files.capture_folder import Content, File, Stage, TraceName

DECODE_MIN = "SGLANG_PROFILE_BY_STAGE_DECODE_MIN_BS"
"""Variable with the number of requests at which SGLang begins to record the decode stage (from 0.5.20 on)."""
_IDLE = "the engine ran no forward pass during the capture"


def publish_files(recording: Recording, *, complete_only: bool) -> list[Artifact]:
    """Publish the files of a recording that has ended.

    Args:
        complete_only: True to leave out incomplete files, which a rank may still be writing.

    Raises:
        EngineError: nothing was recorded. The message has the reason.
    """
    if not recording.capture.profiler:
        return []
    folder = recording.folder
    files = [file for file in recording.files() if not complete_only or folder.is_complete(file)]
    if not files and recording.is_idle:
        recording.ignored[IDLE] = _IDLE
        return []
    if not files:
        raise EngineError(_why_nothing(recording))
    recording.published = [file.name for file in files]
    recording.closed = recording.closed or read_anchor()
    contents = [(file, folder.content(file)) for file in files]
    wanted = [(file, content) for file, content in contents if _is_wanted(recording, file.name, content)]
    _note_absent_ranks(recording, files)
    staged = [(file, content, _stage(recording, file, content, files)) for file, content in wanted]
    return [_take(recording, file, content, stage) for file, content, stage in staged]


def publish_passes_of(recording: Recording) -> list[Artifact]:
    """Publish the notes of the schedulers' passes."""
    files = recording.folder.passes()
    if not files and not recording.capture.profiler and recording.failure is None:
        raise EngineError(f"no scheduler noted its passes. {why_not_shown(recording.states)}")
    if not files and recording.capture.passes and recording.failure is None and not recording.is_idle:
        recording.ignored["passes"] = f"no scheduler noted its passes. {why_not_shown(recording.states)}"
    artifacts = [one for file in files for one in publish_passes(file, recording.capture)]
    if not artifacts and not recording.capture.profiler:
        recording.ignored[IDLE] = _IDLE
    return artifacts


def publish_late(recording: Recording, *, wanted: bool) -> bool:
    """Publish files that were written after the end of the recording, or remove the files if they are not
    wanted. Return whether more files may come.
    """
    recording.ignored.pop(LATE, None)
    folder = recording.folder
    files = [file for file in recording.files() if folder.is_complete(file)]
    for file in files:
        content = folder.content(file)
        if _is_wanted(recording, file.name, content) and wanted:
            _take(recording, file, content, _stage(recording, file, content, files))
        else:
            file.path.unlink()
    recording.published += [file.name for file in files]
    traces = sum(name.kind == "torch_trace" for name in recording.published)
    stages = 2 if recording.plan.by_stage else 1
    return traces < recording.facts.world_size * stages and folder.exists()


def _why_nothing(recording: Recording) -> str:
    if recording.failure is not None:
        return recording.failure
    if recording.state == "unused" and recording.ran_without_stages:
        passes = sum(counts_in(recording.states)) - sum(recording.passes_before)
        return (
            f"the engine ran {passes} forward passes, and recorded no stage. Fix: engine.by_stage: false, or "
            f"a smaller {DECODE_MIN} where the engine is started, if that is set"
        )
    if recording.state == "unused":
        start = recording.plan.start
        return (
            f"nothing was recorded: the engine ran no more than the first {start} "
            "forward passes of the capture. Fix: a smaller iterations.start"
        )
    where = (
        " Does the server see this folder? Fix: a save_path on a disk that both share"
        if recording.remote
        else ""
    )
    return f"SGLang stopped and left no file in {recording.folder.path.parent}.{where}"


def _is_wanted(recording: Recording, name: TraceName, content: Content) -> bool:
    """Return whether a file is of a wanted rank. A file whose name has no rank is wanted."""
    ranks = recording.capture.ranks
    if ranks is None or name.kind == "merged_trace":
        return True
    rank = _rank(recording, name, content)
    if rank is None:
        recording.ignored["ranks"] = "SGLang's files do not say of which rank each is; all were kept"
        return True
    return rank in ranks


def _rank(recording: Recording, name: TraceName, content: Content) -> int | None:
    if recording.label is not None or name.kind == "merged_trace":
        return None  # the replica has several servers, whose order is unknown
    return rank_of(name, content, recording.facts, recording.capture.replica)


def rank_of(name: TraceName, content: Content, facts: EngineFacts, replica: int) -> int | None:
    """Return the global rank of the process that wrote a trace.

    Return None if the name lacks an axis that the engine has, or contradicts the content.

    SGLang numbers the processes of each data-parallel copy of the model as `pp * tp_size + tp`. With DP
    attention, the dp ranks are a part of the tp ranks.
    """
    at = name.topology
    tp, pp, dp = at.get("tp"), at.get("pp", 0), at.get("dp", 0)
    if tp is None or tp >= facts.tp or pp >= facts.pp or dp >= facts.dp:
        return None
    if (facts.pp > 1 and "pp" not in at) or (facts.dp > 1 and not facts.dp_attention and "dp" not in at):
        return None
    inside = pp * facts.tp + tp
    if content.rank is not None and content.rank != inside:
        return None
    copy = 0 if facts.dp_attention else dp
    return replica * facts.world_size + copy * facts.tp * facts.pp + inside


def _note_absent_ranks(recording: Recording, files: list[File]) -> None:
    ranks = {tuple(sorted(file.name.topology.items())) for file in files if file.is_trace}
    if len(ranks) < recording.facts.world_size:
        recording.ignored["files"] = (
            f"{len(ranks)} of {recording.facts.world_size} ranks left a file: the others ran no forward "
            "pass, or write to a disk that is not seen here"
        )


def _stage(recording: Recording, file: File, content: Content, files: list[File]) -> Stage | None:
    """Return the stage of a trace, or None if the capture is not by stage or if the trace contains both
    stages.

    The stage is read from the file's name, unless the content shows another stage. If requests come and go,
    SGLang may give the decode trace the name of a prefill trace.
    """
    if not recording.plan.by_stage or not file.is_trace:
        return None
    stage = file.name.stage
    if stage is None:  # stepscope stopped the recording; its stage was decode if a prefill trace exists
        names = [*recording.published, *(other.name for other in files)]
        has_prefill = any(name.topology == file.name.topology and name.stage == "prefill" for name in names)
        stage = "decode" if has_prefill else "prefill"
    if content.prefills and content.decodes:
        recording.ignored["by_stage"] = (
            f"{file.path.name} holds {content.prefills} prefill and {content.decodes} decode iterations: "
            "SGLang does not part them when requests come during decoding"
        )
        return None
    return stage


def _take(recording: Recording, file: File, content: Content, stage: Stage | None) -> Artifact:
    final = _final_path(recording, file.path.name)
    file.path.rename(final)
    note = outcome.note(recording, content, stage)  # may add to `recording.ignored`
    facts, name, merged = recording.facts, file.name, file.name.kind == "merged_trace"
    named = not _versions.older(facts.version, _versions.STEPS_NAMED_SINCE)
    return publish(
        final,
        recording.capture,
        kind=name.kind,
        tool="sglang",
        stage=stage,
        rank=_rank(recording, name, content),
        world_size=facts.world_size,
        topology=None if merged else name.topology,
        pid=content.pid if not merged else None,
        truncated=outcome.why_truncated(recording, content),
        ignored=recording.ignored,
        opened=recording.opened,
        closed=recording.closed,
        versions={} if facts.version is None else {"sglang": facts.version},
        options=_options(recording, content),
        stalls=() if merged else outcome.stalls(recording, final, content),
        iterations=content.passes if named and file.is_trace else None,
        iterations_asked=recording.plan.count,
        ended=outcome.ended_by(recording),
        note=note if file.is_trace else None,
    )


def _final_path(recording: Recording, name: str) -> Path:
    """Return a path in the capture's folder that no earlier capture uses."""
    stem, folder = safe(recording.capture.name), recording.folder.path
    name = name if name.startswith(stem) else f"{stem}_{name}"
    name = name if recording.label is None else f"{safe(recording.label)}_{name}"
    path, number = folder.with_name(name), 2
    while path.exists() or sidecar_of(path).exists():
        path, number = folder.with_name(f"{number}_{name}"), number + 1
    return path


def _options(recording: Recording, content: Content) -> dict[str, Option]:
    request = recording.plan.request
    options: dict[str, Option] = {
        name: value
        for name, value in request.items()
        if isinstance(value, (str, int, float, bool)) and value != UNBOUNDED
    }
    options["activities"] = ",".join(map(str, request["activities"]))  # type: ignore[call-overload]  # a list of ours
    if recording.label is not None:
        options["server"] = recording.label
    if content.prefills or content.decodes:
        options["prefill_iterations"], options["decode_iterations"] = content.prefills, content.decodes
    return {**recording.facts.sidecar(), **options, "ended": recording.state}
