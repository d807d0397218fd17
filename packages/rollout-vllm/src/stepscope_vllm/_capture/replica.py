"""A replica as captures see it: the profiler that VllmProfiler and VllmServer share."""

from __future__ import annotations

from stepscope.engines import EngineCapture, EngineProfilerBase
from stepscope.errors import EngineError
from stepscope.files.sidecar import Artifact
from stepscope_vllm._capture.session import Desk, Session
from stepscope_vllm._driving import work_loop
from stepscope_vllm._driving.target import Target


class ReplicaProfiler(EngineProfilerBase):
    """Profiler of one replica, whose captures are those of one desk."""

    def __init__(self, replica: int | None, desk: Desk) -> None:
        super().__init__(replica)
        self._desk = desk

    async def stop(self) -> list[Artifact]:
        """Return the artifacts of the running capture. If this is cancelled, they still come, later."""
        session = self._desk.give_back()
        if session is None:
            return []
        artifacts = await work_loop.result_of(session.end())
        self._ignored = session.recording.ignored
        return artifacts

    async def _begin(self, target: Target, capture: EngineCapture, ignored: dict[str, str]) -> None:
        """Return when every worker has begun. If cancelled or failed, nothing is left running."""
        self._ignored = ignored
        session = Session(self._desk, target, capture, ignored)
        self._desk.take(session)
        try:
            await work_loop.result_of(work_loop.submit(session.begin()))
        except BaseException as error:
            self._desk.give_back()
            session.give_up()
            if isinstance(error, Exception) and not isinstance(error, EngineError):
                raise EngineError(
                    f"the profiler of vLLM did not start: {type(error).__name__}: {error}"
                ) from error
            raise
