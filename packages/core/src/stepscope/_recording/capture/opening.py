"""First part of opening a capture: the claim on the process, its session, and the errors that are raised."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stepscope._recording.after import pipeline
from stepscope._recording.capture import omissions
from stepscope._recording.capture.asked import Asked
from stepscope._recording.process import run
from stepscope._recording.process.identity import identify
from stepscope._recording.session.claims import Claim
from stepscope._recording.session.session import Session
from stepscope.errors import CaptureError, is_users

if TYPE_CHECKING:
    from stepscope._recording.fanout.participants import Participants


def make_session(asked: Asked, participants: Participants | None, began_ns: int) -> Session:
    """Return the session of this process, joined with the sessions of the other participants."""
    session = Session(
        config=asked.config,
        step=asked.step,
        process=identify(asked.role, rank=asked.rank),
        roles=(asked.role,),
        run_id=run.run_id(),
        capture_id=os.urandom(8).hex(),
        owner=True,
        began_ns=began_ns,
        opened_by=asked.opened_by,
        on_artifact=pipeline.artifact_done,
    )
    if participants is not None:
        participants.join(session)
    if not asked.names_workers:
        omissions.enter_missing_workers(
            session.manifest_part, engines=asked.engines is not None, opened_by=asked.opened_by
        )
    return session


def refusal(step: int, other: Claim) -> str:
    """Return the reason why a capture of `step` may not open while another claim holds this process."""
    state = None if other.taker is None else other.taker.state
    if state is None:
        return (
            f"this process is recorded as a worker in a capture of step {other.step}. "
            "Fix: open captures in one place, the driver"
        )
    return (
        f"a capture of step {other.step} is {state} in this process, and profilers are process-wide. "
        f"Fix: close it before opening step {step}"
    )


def is_for_the_user(error: BaseException, asked: Asked) -> bool:
    """Return whether an error of opening is raised to the user: a wrong argument, or an exception of the
    user's own.

    Internal failures, disk errors, and a wrong configuration from a request do not stop a run.
    """
    return isinstance(error, CaptureError) or is_users(error)
