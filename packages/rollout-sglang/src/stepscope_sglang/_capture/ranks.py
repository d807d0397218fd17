"""Global ranks of an engine's schedulers."""

from __future__ import annotations

from stepscope_sglang._driving.facts import EngineFacts
from stepscope_sglang._files.names import TraceName
from stepscope_sglang._files.traces import Content


def rank_of(name: TraceName, content: Content, facts: EngineFacts, replica: int) -> int | None:
    """Return the global rank of the GPU.

    It is None if the name leaves out an axis that the engine has, or contradicts the content.

    SGLang numbers its processes pp-major, `pp * tp_size + tp`, in each data-parallel copy of the model; with
    attention data-parallel the dp ranks are among the tp ranks.
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
