"""One capture on one engine: from what SGLang is told to the files that are left, however it ends.

    state       means                                       leaves it by
    armed       SGLang records from the next forward pass   end(): to one of the others
    stopped     our stop ended the recording
    by itself   SGLang had reached the count before
    by others   somebody else had stopped it before
    unused      no forward pass came: nothing was recorded, and nothing is missing

SGLang does not say which it is: a stop after it has stopped, and one before it has begun, get the same
answer. The files tell. It has no way to disarm either: what is left armed would begin with a later forward
pass and never end, so wherever something may be, a recording is started and stopped at once, which clears it.

The answer to a stop is the first pipeline rank's: the others write after it, and die where their folder is
gone by then. So no folder goes before the whole pipeline has written, and none after a stop that failed: what
comes into it later is handed in by the next capture of this process, or at its end.

This file is above 400 lines, because what has become of a capture is read off its files, and nowhere else.
"""

from __future__ import annotations

import atexit
import logging
import math
import shutil
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from stepscope.engines import EngineCapture
from stepscope.engines.artifacts import Option, publish, read_anchor, stalls_of
from stepscope.errors import EngineError
from stepscope.files.clock import ClockAnchor
from stepscope.files.layout import safe, sidecar_of
from stepscope.files.manifest.records import IDLE, LATE
from stepscope.files.sidecar import Artifact, Ended, Stall
from stepscope_sglang import _versions
from stepscope_sglang._capture.options import (
    UNBOUNDED,
    Plan,
    lacks_plugin,
    plan,
    risk_of_whole_captures,
    stages_end_in_scopes,
)
from stepscope_sglang._driving.facts import EngineFacts
from stepscope_sglang._engine_side.plugin import Stamp, counts_in, stages_in, stamps_in
from stepscope_sglang._files.traces import (
    Content,
    Stage,
    TraceName,
    make_folder,
    parse_name,
    rank_of,
    read,
)

State: TypeAlias = Literal["armed", "stopped", "by itself", "by others", "unused"]

_PATIENCE_S = (5.0, 30.0)
"""Time for a file to become complete once SGLang says it is: here, and on a disk that is shared."""
_PIPELINE_S = 300.0
"""Time that the later ranks of a pipeline may write after the first one's answer."""
_LOOK_S = 0.05
_MEMORY = "cuda_memory_snapshot"
_ONE_AT_A_TIME = "SGLang ends the recording of prefill when decoding begins"
_ENDED: dict[State, Ended] = {"stopped": "capture", "by itself": "count", "by others": "others"}
log = logging.getLogger("stepscope")
_owed: deque[Session] = deque(maxlen=16)
"""Those whose files may still come: of stops that failed, and of pipelines that did not write in time.
Writer: this module, under `_entering`.
"""
_entering = threading.RLock()
_warned: set[str] = set()
"""Logged warnings. One writer: `_warn`."""


class EngineDiedError(EngineError):
    """The engine has died: it writes nothing any more."""


class RefusedError(EngineError):
    """The engine understood the request and said no."""


class Line(Protocol):
    """The way to one engine's profiler. Its calls block, on the thread of the profiler that owns it."""

    remote: bool
    """The engine is not below this process: perhaps another user's, perhaps on another host."""
    engine: object
    """Equal for two lines to one engine."""

    def facts(self) -> EngineFacts: ...

    def start(self, request: Mapping[str, object]) -> None:
        """Start the profiler. Raises `RefusedError`, or EngineError if the engine cannot be reached."""
        ...

    def stop(self) -> None:
        """Stop the profiler; return when the files are written. Raises `RefusedError` when nothing is
        being recorded.
        """
        ...

    def states(self, patience_s: float = math.inf) -> Sequence[object]:
        """Return the state of each data-parallel scheduler; empty where none shows it.

        Raises:
            EngineError: the engine cannot be reached, or not within `patience_s`.
        """
        ...


class Session:
    """Used on one thread."""

    def __init__(self, line: Line, capture: EngineCapture, label: str | None = None) -> None:
        """
        Args:
            label: Tells this engine's files from those of the others of a replica.
        """
        self.ignored: dict[str, str] = {}
        self.patience_s = _PATIENCE_S[line.remote]
        self._line = line
        self._capture = capture
        self._label = label
        self._state: State = "armed"
        self._truncated: str | None = None
        self._failed: str | None = None
        """Reason why the engine may still be writing, or never will again."""
        self._unstopped = False
        """The engine may still record for it: its stop failed, and no start was taken since."""
        self._unwanted = False
        """It was given up: what comes of it is thrown away."""
        self._opened: ClockAnchor | None = None
        self._closed: ClockAnchor | None = None
        self._facts: EngineFacts | None = None
        self._plan: Plan | None = None
        self._contents: dict[Path, tuple[tuple[int, int], Content]] = {}
        self._begun: tuple[int, ...] = ()
        """Forward passes that its schedulers had begun before, where they were asked."""
        self._states: Sequence[object] = ()
        """The states of its schedulers once it was over."""
        self._left = False
        """A rank may still write, and dies if it finds no folder."""
        self._came: list[TraceName] = []
        """Of the files that were handed in."""
        self._folder = Path(capture.out_dir, f".sglang-{uuid.uuid4().hex[:12]}")

    def open(self) -> None:
        """Arm the engine's profiler.

        Raises:
            EngineError: it was refused, here or by the engine. Nothing is armed then.
        """
        hand_in_late()
        self._facts = self._line.facts()
        later = self._capture.iterations.start > 0
        states: Sequence[object] = ()
        by_stage = self._capture.by_stage and stages_end_in_scopes(self._facts)
        if later or by_stage or self._facts.pp > 1:
            try:
                states = self._line.states()
            except EngineError:
                if later:  # else, one that does not answer is one that shows no plugin
                    raise
        self._plan = plan(self._capture, self._facts, states)
        self._begun = counts_in(states)
        self.ignored = dict(self._plan.ignored)
        if lacks_plugin(self._facts, states):
            _warn(risk_of_whole_captures(self._facts, states))
        make_folder(self._folder, open_to_all=self._line.remote)
        try:
            self._start({**self._plan.request, "output_dir": str(self._folder)})
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._opened = read_anchor()
        if later:
            self._note_late_start()

    def _start(self, request: Mapping[str, object]) -> None:
        try:
            self._line.start(request)
        except RefusedError as error:
            if "already in progress" not in str(error):
                raise
            ours = [each for each in _owed_by(self._line) if each._unstopped]
            if not ours:
                raise EngineError(
                    f"{str(error).rstrip('.')}. If it is running, and not for us, somebody started it by "
                    "hand, or the process that did has died. Fix: call stop_profile on the engine"
                ) from error
            ours[-1]._stop_again(self._line)
            self._line.start(request)
        for each in _owed_by(self._line):
            each._unstopped = False

    def _stop_again(self, line: Line) -> None:
        """Repeat a stop that failed: the engine still records for this session.

        Args:
            line: Today's way to the engine.
        """
        try:
            line.stop()
        except EngineError as error:
            raise EngineError(
                f"this engine's profiler still runs for step {self._capture.step}: {self._failed}; and "
                f"again: {error}. Fix: call stop_profile on the engine"
            ) from error
        self._until(lambda: bool(self._files()), self.patience_s)
        hand_in_late()

    def _note_late_start(self) -> None:
        first = self._planned.request["start_step"]
        try:
            begun = max(counts_in(self._line.states()), default=0)
        except Exception as error:  # of any library: it is armed, and what became of it shows at the stop
            self.ignored["iterations.start"] = (
                f"whether recording began later than at pass {first} is not known: "
                f"{type(error).__name__}: {error}"
            )
            return
        if isinstance(first, int) and begun >= first:
            self.ignored["iterations.start"] = (
                f"the engine ran to pass {begun} while it was told to begin at pass {first}: recording may "
                "have begun later"
            )

    def expire(self, reason: str) -> None:
        """End the recording before the capture does."""
        if self._state == "armed":
            self._truncated = reason
            try:
                self.end()
            except EngineError as error:
                self._fail(error)

    def end(self) -> None:
        """Stop the engine's recording, and disarm it."""
        if self._state != "armed":
            return
        self._state = "stopped"  # also where the next line raises: there is no second stop
        if not (self._bounded and self._all_there()):
            self._left = True  # also where the next line raises: it may be writing all the same
            try:
                self._line.stop()
            except RefusedError:
                self._state = self._without_us()
            except EngineDiedError:
                self._left = False
                raise
            self._left = self._known.pp > 1  # until all of them are seen to have written
            self._closed = read_anchor()
            if not self._all_there():
                self._disarm()
        else:
            self._state = self._without_us()

    def close(self) -> list[Artifact]:
        """Return the artifacts, once complete. Of an engine that fails at its stop, those that are.

        Raises:
            EngineError: nothing was recorded, and why.
        """
        try:
            try:
                self.end()
                if self._failed is None:
                    self._wait()
                    self._ask_schedulers()
            except EngineError as error:
                self._fail(error)
            return self._publish()
        finally:
            self._remove(self._folder)
            if self._left:
                why = self._failed or f"not all ranks had written within {_PIPELINE_S:g} s"
                self.ignored[LATE] = f"{why}. {self._folder.name} is left for a scheduler that writes later"
                _owe(self)

    def _ask_schedulers(self) -> None:
        """Ask for their times and counts. Without our plugin they show neither."""
        if not _versions.older(self._known.version, _versions.PLUGINS_SINCE):
            with suppress(Exception):  # of any library: what it does not tell is derived from its files
                self._states = self._line.states(self.patience_s)

    def hand_in(self) -> bool:
        """Publish files that came since the close; return whether more may still come."""
        self.ignored.pop(LATE, None)
        files = [each for each in self._files() if self._whole(*each)]
        for path, name in files:
            content = Content(complete=True) if name.kind == _MEMORY else self._content(path)
            if self._wanted(name, content) and not self._unwanted:
                self._take(path, name, content, self._stage(path, name, content, files))
            else:
                path.unlink()
        self._came += [name for _, name in files]
        stages = 2 if self._planned.by_stage else 1
        traces = sum(name.kind == "torch_trace" for name in self._came)
        self._left = traces < self._known.world_size * stages and self._folder.is_dir()
        if not self._left:
            shutil.rmtree(self._folder, ignore_errors=True)
        return self._left

    def _fail(self, error: EngineError) -> None:
        self._truncated = self._failed = f"the stop failed: {error}"
        self._unstopped = True

    def drop(self) -> None:
        """End the recording and leave nothing of it.

        Raises:
            EngineError: its stop failed. It is owed then, like one that was closed.
        """
        self._unwanted = True
        try:
            self.end()
            self._wait()
        except EngineError as error:
            self._fail(error)
            raise
        finally:
            self._remove(self._folder)
            if self._left:
                _owe(self)

    # What the engine has done.

    @property
    def _bounded(self) -> bool:
        return self._planned.count is not None

    @property
    def _planned(self) -> Plan:
        if self._plan is None:
            raise RuntimeError("Session.open comes first")
        return self._plan

    @property
    def _known(self) -> EngineFacts:
        if self._facts is None:
            raise RuntimeError("Session.open comes first")
        return self._facts

    def _files(self, folder: Path | None = None) -> list[tuple[Path, TraceName]]:
        folder = folder or self._folder
        if not folder.is_dir():
            return []
        found = ((path, parse_name(path.name)) for path in sorted(folder.iterdir()))
        files = [(path, name) for path, name in found if name is not None]
        return files if self._failed is None else [each for each in files if self._whole(*each)]

    def _content(self, path: Path) -> Content:
        """Return the content of a trace, read again when it has changed."""
        status = path.stat()
        version = (status.st_size, status.st_mtime_ns)
        known = self._contents.get(path)
        if known is None or known[0] != version:
            known = self._contents[path] = (version, read(path))
        return known[1]

    def _whole(self, path: Path, name: TraceName) -> bool:
        return name.kind == _MEMORY or self._content(path).complete

    def _all_there(self) -> bool:
        """Every file that SGLang writes when it stops by itself is there and complete."""
        files = self._files()
        stages: tuple[Stage | None, ...] = ("prefill", "decode") if self._planned.by_stage else (None,)
        for stage in stages:
            mine = [name for _, name in files if name.stage == stage and name.kind == "torch_trace"]
            if len(mine) < self._known.world_size:
                return False
        merged = sum(name.kind == "merged_trace" for _, name in files)
        if self._planned.merged and not merged:
            return False
        return all(self._content(path).complete for path, name in files if name.kind != _MEMORY)

    def _without_us(self) -> State:
        """Return what ended it before our stop. Of several data-parallel schedulers only the first answer is
        heard, and the others may have run fewer passes.
        """
        files = self._files()
        if not files:
            return "unused"
        if self._known.dp > 1:
            return "by itself" if self._bounded else "stopped"
        if not self._bounded:
            return "by others"
        counts = [self._content(path).passes for path, name in files if name.kind == "torch_trace"]
        if self._planned.by_stage:
            cut = any(name.stage is None for _, name in files if name.kind == "torch_trace")
        else:
            cut = 0 < max(counts, default=0) < (self._planned.count or 0)
        return "by others" if cut else "by itself"

    def _cleared(self) -> bool:
        """Return whether what has happened leaves nothing armed."""
        if self._state == "unused" or self._known.dp > 1:
            return False
        stages = {name.stage for _, name in self._files()}
        return not self._planned.by_stage or ("prefill" in stages and len(stages) > 1)

    def _disarm(self) -> None:
        """Clear whatever is armed still."""
        if self._cleared():
            return
        scrap = self._folder.with_name(f"{self._folder.name}-scrap")
        used = False  # by a scheduler, which dies if it finds no folder
        try:
            make_folder(scrap, open_to_all=self._line.remote)
            used = True
            self._line.start(
                {"output_dir": str(scrap), "activities": ["CPU"], "with_stack": False, "record_shapes": False}
            )
            self._line.stop()
            used = False
            self._await_pipeline(scrap)
        except (EngineError, OSError) as error:
            used = used and not isinstance(error, RefusedError)
            self.ignored["stop"] = f"what is left armed in the engine could not be cleared: {error}"
        finally:
            if not used:
                self._remove(scrap)

    def _wait(self) -> None:
        """Wait until the files are complete or time is up: a shared disk may lag."""
        if self._state == "unused" and not self._files():  # nor did a pass begin it behind our stop
            self._left = False
            return
        self._until(lambda: bool(self._files()) and self._complete(self._folder), self.patience_s)
        self._await_pipeline(self._folder)

    def _await_pipeline(self, folder: Path) -> None:
        """SGLang's answer to a stop is its first pipeline rank's. The others hear of it afterwards."""
        if self._known.pp > 1:
            self._left = not self._until(lambda: self._pipeline_there(folder), _PIPELINE_S)

    def _pipeline_there(self, folder: Path) -> bool:
        """Return whether all pipeline ranks wrote the files that one of them wrote."""
        traces = [name for _, name in self._files(folder) if name.kind == "torch_trace"]
        ranks = Counter((name.topology.get("tp"), name.topology.get("dp"), name.stage) for name in traces)
        return all(count >= self._known.pp for count in ranks.values()) and self._complete(folder)

    def _complete(self, folder: Path) -> bool:
        return all(
            self._content(path).complete for path, name in self._files(folder) if name.kind == "torch_trace"
        )

    def _until(self, there: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        never = threading.Event()
        while not there():
            if time.monotonic() > deadline:
                return False
            never.wait(_LOOK_S)
        return True

    def _remove(self, folder: Path) -> None:
        if not self._left:
            shutil.rmtree(folder, ignore_errors=True)

    # From files to artifacts.

    def _publish(self) -> list[Artifact]:
        files = [each for each in self._files() if not self._left or self._whole(*each)]
        if not files and self._is_idle():
            self.ignored[IDLE] = "the engine ran no forward pass during the capture"
            return []
        if not files:
            raise EngineError(self._nothing())
        self._came = [name for _, name in files]
        self._closed = self._closed or read_anchor()
        contents = {
            path: Content(complete=True) if name.kind == _MEMORY else self._content(path)
            for path, name in files
        }
        wanted = [each for each in files if self._wanted(each[1], contents[each[0]])]
        self._note_absent(files)
        stages = {path: self._stage(path, name, contents[path], files) for path, name in wanted}
        return [self._take(path, name, contents[path], stages[path]) for path, name in wanted]

    def _is_idle(self) -> bool:
        if self._state != "unused" or self._failed is not None:
            return False
        return self._capture.iterations.start == 0 or counts_in(self._states) == self._begun

    def _nothing(self) -> str:
        if self._failed is not None:
            return self._failed
        if self._state == "unused":
            start = self._capture.iterations.start
            return (
                f"nothing was recorded: the engine ran no more than the first {start} "
                "forward passes of the capture. Fix: a smaller iterations.start"
            )
        where = (
            " Does the server see this folder? Fix: a save_path on a disk that both share"
            if self._line.remote
            else ""
        )
        return f"SGLang stopped and left no file in {self._folder.parent}.{where}"

    def _wanted(self, name: TraceName, content: Content) -> bool:
        """Only files of the ranks that were asked for; what says no rank is kept."""
        if self._capture.ranks is None or name.kind == "merged_trace":
            return True
        rank = self._rank(name, content)
        if rank is None:
            self.ignored["ranks"] = "SGLang's files do not say of which rank each is; all were kept"
            return True
        return rank in self._capture.ranks

    def _rank(self, name: TraceName, content: Content) -> int | None:
        if self._label is not None or name.kind == "merged_trace":
            return None  # several servers make up the replica, and nothing says in which order
        return rank_of(name, content, self._known, self._capture.replica)

    def _note_absent(self, files: list[tuple[Path, TraceName]]) -> None:
        there = {tuple(sorted(name.topology.items())) for _, name in files if name.kind == "torch_trace"}
        if len(there) < self._known.world_size:
            self.ignored["files"] = (
                f"{len(there)} of {self._known.world_size} ranks left a file: the others ran no forward "
                "pass, or write to a disk that is not seen here"
            )

    def _stage(
        self, path: Path, name: TraceName, content: Content, files: list[tuple[Path, TraceName]]
    ) -> Stage | None:
        """Return the stage by name, unless the content says otherwise: when requests come and go, SGLang
        closes the decode
        trace under the name of the prefill one.
        """
        if not self._planned.by_stage or name.kind != "torch_trace":
            return None
        stage = name.stage
        if stage is None:  # our stop came first; it was decode if its prefill is there
            known = [*self._came, *(each for _, each in files)]
            others = [each for each in known if each.topology == name.topology and each.stage == "prefill"]
            stage = "decode" if others else "prefill"
        if content.prefills and content.decodes:
            self.ignored["by_stage"] = (
                f"{path.name} holds {content.prefills} prefill and {content.decodes} decode iterations: "
                "SGLang does not part them when requests come during decoding"
            )
            return None
        return stage

    def _take(self, path: Path, name: TraceName, content: Content, stage: Stage | None) -> Artifact:
        final = self._final(path.name)
        path.rename(final)
        note = self._note(content, stage)  # it may add to what is ignored
        facts, merged = self._known, name.kind == "merged_trace"
        return publish(
            final,
            self._capture,
            kind=name.kind,
            tool="sglang",
            stage=stage,
            rank=self._rank(name, content),
            world_size=facts.world_size,
            topology=None if merged else name.topology,
            pid=content.pid if not merged else None,
            truncated=self._why_short(content),
            ignored=self.ignored,
            opened=self._opened,
            closed=self._closed,
            versions={} if facts.version is None else {"sglang": facts.version},
            options=self._options(content),
            stalls=() if merged else self._stalls(final, content),
            iterations=content.passes if self._names_passes and name.kind == "torch_trace" else None,
            iterations_asked=self._planned.count,
            ended=self._ended(),
            note=note if name.kind == "torch_trace" else None,
        )

    @property
    def _names_passes(self) -> bool:
        return not _versions.older(self._known.version, _versions.STEPS_NAMED_SINCE)

    def _final(self, name: str) -> Path:
        """Return a path in the capture's folder that no earlier capture has taken."""
        stem = safe(self._capture.name)
        name = name if name.startswith(stem) else f"{stem}_{name}"
        name = name if self._label is None else f"{safe(self._label)}_{name}"
        path, number = self._folder.with_name(name), 2
        while path.exists() or sidecar_of(path).exists():
            path, number = self._folder.with_name(f"{number}_{name}"), number + 1
        return path

    # Asked for, and recorded.

    def _why_short(self, content: Content) -> str | None:
        """Return why the file ends before the capture, although the engine went on."""
        if not content.complete:
            return "SGLang did not finish writing it"
        if self._state != "by others":
            return self._truncated
        more = self._run_since(content)
        if more == 0:
            return None
        ran = "how many more it ran is not known" if more is None else f"it ran {more} more"
        return f"{self._stopped_by_others(content)}; {ran}"

    def _stopped_by_others(self, content: Content) -> str:
        seen = f"after {content.passes} engine iterations" if content.passes else "early"
        count = self._planned.count
        wanted = "" if count is None else f" of the {count} asked for"
        return f"somebody else stopped the engine's profiler {seen}{wanted}"

    def _note(self, content: Content, stage: Stage | None) -> str | None:
        """Return a fact about a file that has all that it could have; None: nothing to say."""
        if self._state == "by others":
            return (
                f"{self._stopped_by_others(content)}; it ran no more"
                if self._run_since(content) == 0
                else None
            )
        count, mixed = self._planned.count, self._planned.by_stage and stage is None
        if count is None or mixed or self._truncated:
            return None
        seen = content.passes if content.passes else None
        kind = f"{stage} iterations" if stage else "engine iterations"
        if seen is None:
            return (
                None if self._state == "by itself" else f"fewer than {count} {kind}: the engine ran no more"
            )
        if seen >= count:
            return None
        ran = self._ran(stage)
        if ran is not None and ran > seen:
            self.ignored["iterations.count"] = (
                f"{seen} of {count} {kind} were recorded, and {ran} ran: {_ONE_AT_A_TIME}"
            )
            return None
        if ran is None and stage == "prefill":
            return f"{seen} of {count} {kind}: {_ONE_AT_A_TIME}"
        return f"{seen} of {count} {kind}: the engine ran no more"

    def _run_since(self, content: Content) -> int | None:
        """Forward passes after the file's recording had ended. None: nothing counts them."""
        counts = counts_in(self._states)
        stamps = [stamp for stamp in self._stamps() if stamp.doing == "writing" and stamp.pid == content.pid]
        return counts[0] - stamps[-1].passes if len(counts) == 1 and stamps else None

    def _ran(self, stage: Stage | None) -> int | None:
        """Return the passes of a stage in the capture, by the engine's own counter. None: it is not shown."""
        shown = [stages for stages in stages_in(self._states) if stages is not None]
        return shown[0].get(stage) if stage is not None and len(shown) == 1 else None

    def _stamps(self) -> list[Stamp]:
        return stamps_in(self._states, str(self._folder))

    def _stalls(self, path: Path, content: Content) -> tuple[Stall, ...]:
        stamped = [
            Stall(start_ns=stamp.start_ns, end_ns=stamp.end_ns, doing=stamp.doing, source="stamps")
            for stamp in self._stamps()
            if stamp.pid == content.pid
        ]
        return stalls_of(content.window, stamped, path.stat().st_mtime_ns)

    def _ended(self) -> Ended | None:
        if self._failed is not None or self._state not in _ENDED:
            return None
        return "budget" if self._truncated else _ENDED[self._state]

    def _options(self, content: Content) -> dict[str, Option]:
        told = {
            key: value
            for key, value in self._planned.request.items()
            if isinstance(value, (str, int, float, bool)) and value != UNBOUNDED
        }
        told["activities"] = ",".join(map(str, self._planned.request["activities"]))  # type: ignore[call-overload]  # a list of ours
        if self._label is not None:
            told["server"] = self._label
        if content.prefills or content.decodes:
            told["prefill_iterations"], told["decode_iterations"] = content.prefills, content.decodes
        return {**self._known.sidecar(), **told, "ended": self._state}


def hand_in_late() -> None:
    """Hand in files that came after their captures. An error of one does not stop the others."""
    with _entering:
        for session in tuple(_owed):
            try:
                if not session.hand_in():
                    _owed.remove(session)
            except Exception as error:  # it stays where it is, and is looked at again
                log.warning("stepscope: files of step %d that came late: %s", session._capture.step, error)


def _warn(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("stepscope: %s", text)


def _owed_by(line: Line) -> list[Session]:
    """Return the owed sessions of the line's engine, in the order in which they ended."""
    return [each for each in tuple(_owed) if each._line.engine == line.engine]


def _owe(session: Session) -> None:
    with _entering:
        if not _owed:
            atexit.unregister(hand_in_late)
            atexit.register(hand_in_late)
        _owed.append(session)
