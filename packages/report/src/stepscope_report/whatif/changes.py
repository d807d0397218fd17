"""Changes that a replay can predict: read from options and checked against the step."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

import msgspec

from stepscope.errors import ConfigError
from stepscope_report.whatif import Rollout, Step, peak
from stepscope_report.whatif.read import UNKNOWN

Balance: TypeAlias = Literal["length", "load"]
_NUMBER = re.compile(r"(?P<sign>[+-]?)(?P<count>\d+)|x(?P<times>\d+(\.\d+)?)")
_PERCENTILE = re.compile(r"p(\d{1,2})")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Changes as written on the command line. An option is None if that change is not wanted."""

    replicas: str | None = None
    """Change of the number of inference replicas: `+2`, `-1`, `x2` or `6`."""
    balance: str | None = None
    """Assignment to replicas. `length`: trajectories by their tokens. `load`: each request to the replica
    with the fewest requests."""
    cut_tail: str | None = None
    """`p95`: start the training as soon as 95 % of the trajectories have ended."""
    tool_pool: str | None = None
    """Change of the number of tools that can run at once, written like `replicas`."""
    max_requests: str | None = None
    """Change of the number of requests that a replica serves at once, written like `replicas`."""
    staleness: int | None = None
    """1 to run the rollout of the next step at the same time as the training. No other number is
    supported."""
    overlap: str | None = None
    """`reward`: score each trajectory as soon as it ends, at the same time as the rollout."""


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """The changes of `Options` for one step, as numbers."""

    replicas: int
    balance: Balance | None = None
    cut_tail: int | None = None
    """Percentage of the trajectories that the training waits for. None for all."""
    tool_pool: int | None = None
    """Number of tools that can run at once after the change; without a change, the present number. None for
    no limit."""
    slots: int | None = None
    """Number of requests that a replica serves at once after the change. None if the number is not
    changed."""
    staleness: bool = False
    overlap_reward: bool = False
    words: tuple[str, ...] = ()
    """The changes as text."""

    def assumptions(self) -> tuple[str, ...]:
        """Return the assumptions that the prediction makes, as text."""
        conditions = {
            "a replica more or less serves as the others do, and trajectories take the replicas in turn": any(
                part.startswith("replicas") for part in self.words
            ),
            "lengths are known before the rollout": self.balance == "length",
            "the training takes as long, because earlier trajectories fill the batch": self.cut_tail
            is not None,
            "the KV cache holds as many requests": self.slots is not None,
            "rollout and training share no device": self.staleness,
            "rewards are computed one after the other, each as long": self.overlap_reward,
        }
        return tuple(text for text, holds in conditions.items() if holds)


def changes_of(options: Options, step: Step) -> Changes:
    """Return the changes of `options` for this step.

    Raises:
        ConfigError: an option is wrong, or cannot apply to this step.
    """
    rollout = step.rollout
    words: list[str] = []
    replicas = len(rollout.replicas)
    if options.replicas is not None:
        replicas = _replicas(options.replicas, rollout)
        words.append(f"replicas {len(rollout.replicas)} -> {replicas}")
    balance = None
    if options.balance is not None:
        balance = _balance(options.balance, rollout, replicas)
        words.append(f"balance by {balance}")
    cut = None
    if options.cut_tail is not None:
        cut = _percent(options.cut_tail, rollout)
        words.append(f"train on the first {cut} % of the trajectories")
    pool = rollout.tool_pool
    if options.tool_pool is not None:
        pool = _pool(options.tool_pool, rollout)
        words.append(f"tools at once {rollout.tool_pool or 'any'} -> {pool}")
    slots = None
    if options.max_requests is not None:
        slots = _slots(options.max_requests, rollout)
        words.append(f"requests at once in a replica {rollout.slots} -> {slots}")
    if options.staleness is not None:
        _check_staleness(options.staleness, step)
        words.append("rollout of the next step beside the training")
    if options.overlap is not None:
        _check_overlap(options.overlap, step)
        words.append("reward beside the rollout")
    return Changes(
        replicas=replicas,
        balance=balance,
        cut_tail=cut,
        tool_pool=pool,
        slots=slots,
        staleness=options.staleness is not None,
        overlap_reward=options.overlap is not None,
        words=tuple(words),
    )


_MOST = 100_000


def _changed(option: str, value: str, now: int | None, fix: str) -> int:
    match = _NUMBER.fullmatch(value)
    if match is None or (now is None and (match["times"] or match["sign"])):
        allowed = "a number" if now is None else f"+N, -N, xN or N, from {now} now"
        raise ConfigError(option, value, allowed, fix)
    if match["times"]:
        times = float(match["times"])
        size = max(1, round((now or 0) * times)) if times else 0
    else:
        sign = {"+": 1, "-": -1}.get(match["sign"])
        size = int(match["count"]) if sign is None else (now or 0) + sign * int(match["count"])
    if size < 1:
        raise ConfigError(option, value, f"at least 1 left, from {now} now", "remove fewer")
    if size > _MOST:
        raise ConfigError(option, value, f"at most {_MOST:,} of them", fix)
    return size


def _replicas(value: str, rollout: Rollout) -> int:
    if UNKNOWN in rollout.replicas:
        raise ConfigError(
            "--replicas",
            value,
            "only if the spans say which replica served each request",
            "set the attribute `replica` on generations, or record the replicas",
        )
    return _changed("--replicas", value, len(rollout.replicas), "for instance --replicas +2")


def _balance(value: str, rollout: Rollout, replicas: int) -> Balance:
    if value not in ("length", "load"):
        raise ConfigError("--balance", value, "length or load", "--balance length")
    if UNKNOWN in rollout.replicas or replicas == 1:
        known = "only one" if replicas == 1 else "unknown"
        raise ConfigError(
            "--balance",
            value,
            f"only with several replicas, and this step's are {known}",
            "omit it, or add --replicas +1"
            if replicas == 1
            else "set the attribute `replica` on generations",
        )
    return "length" if value == "length" else "load"


def _percent(value: str, rollout: Rollout) -> int:
    match = _PERCENTILE.fullmatch(value)
    if match is None or int(match[1]) < 1:
        raise ConfigError("--cut-tail", value, "p1 to p99", "--cut-tail p95")
    count = rollout.consumed
    if kept(count, int(match[1])) == count:
        raise ConfigError(
            "--cut-tail",
            value,
            f"a part of {count} trajectories, and this is all of them",
            "a lower percentile",
        )
    return int(match[1])


def kept(count: int, percent: int) -> int:
    """Return `percent` of `count` trajectories, rounded up."""
    return -(-count * percent // 100)


def _pool(value: str, rollout: Rollout) -> int:
    tools = [call for call in rollout.calls() if call.kind == "tool"]
    if not tools:
        raise ConfigError("--tool-pool", value, "only for a step with tools, and it has none", "omit it")
    most = peak((call.start_ns, call.end_ns) for call in tools)
    if rollout.tool_pool is None and (not value.isdecimal() or int(value) >= most):
        raise ConfigError(
            "--tool-pool",
            value,
            f"a number below {most}, because no tool waited for a place and {most} ran at once",
            "omit it; if tools do wait, record that as a span `queue` below the tool's",
        )
    return _changed("--tool-pool", value, rollout.tool_pool, "for instance --tool-pool x2")


def _slots(value: str, rollout: Rollout) -> int:
    if rollout.slots is None:
        raise ConfigError(
            "--max-requests",
            value,
            "only for a step whose requests waited in front of a replica, and none did",
            "omit it",
        )
    return _changed("--max-requests", value, rollout.slots, "for instance --max-requests x2")


def _check_staleness(value: int, step: Step) -> None:
    if value != 1:
        raise ConfigError(
            "--staleness", value, "1, because one step cannot tell what more of it gains", "--staleness 1"
        )
    if not any(stage.kind == "train" for stage in step.after):
        raise ConfigError(
            "--staleness",
            value,
            "only if the driver records its training after the rollout, and it has no such stage",
            "record the training as span('update_actor') in the driver",
        )


def _check_overlap(value: str, step: Step) -> None:
    if value != "reward":
        raise ConfigError("--overlap", value, "reward", "--overlap reward")
    if not any(stage.kind == "reward" for stage in step.after):
        inside = any(call.kind == "reward" for call in step.rollout.calls())
        where = "its trajectories score themselves already" if inside else "it has none"
        raise ConfigError(
            "--overlap",
            value,
            f"only for a step with a reward stage after the rollout, and {where}",
            "omit it",
        )
