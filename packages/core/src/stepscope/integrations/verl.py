"""stepscope inside verl: a backend of its `Tracking`, and a tool of its `DistProfiler`.

From 0.9 on, verl loads this module wherever it is imported: it is an entry point of the group `verl.plugins`.
In older versions VERL_USE_EXTERNAL_MODULES names it. The preset `verl` loads it too. Each part waits until
verl imports what it belongs to, so this imports nothing of verl.

Where verl's own configuration selects stepscope, its trainer publishes that configuration for the whole Ray
job, in the key-value store of Ray's control service, which all nodes reach. A process of the job that imports
verl later, on whatever node, finds it here, before it imports what is instrumented.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import msgspec
import wrapt

from stepscope._recording.capture import configure
from stepscope._recording.process import failures, ray_connection
from stepscope.config import ProfileConfig
from stepscope.errors import ours
from stepscope.files import switch

if TYPE_CHECKING:
    from types import ModuleType

_PLACES = {
    "verl.utils.tracking": "stepscope.integrations.verl_tracking",
    "verl.utils.profiler.profile": "stepscope.integrations.verl_tool",
    "verl.trainer.ppo.ray_trainer": "stepscope.integrations.verl_tool",
    "verl.trainer.ppo.v1.trainer_base": "stepscope.integrations.verl_tool",
}
"""{module of verl: module of stepscope whose `extend` is called with it}."""
_NAMESPACE = "stepscope"


def publish(config: ProfileConfig) -> None:
    """Make `config` available to the processes that this job starts from now on. Does nothing without Ray."""
    key = _key()
    if key is not None:
        from ray.experimental import internal_kv

        value = msgspec.json.encode(config.to_settings())
        internal_kv._internal_kv_put(key, value, overwrite=True, namespace=_NAMESPACE)


def published() -> ProfileConfig | None:
    """Return the configuration that a process of this job published, or None."""
    key = _key()
    if key is None:
        return None
    from ray.experimental import internal_kv

    value: Any = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
    return None if value is None else ProfileConfig.from_mapping(msgspec.json.decode(value))


def _key() -> bytes | None:
    """Return the key of this job; None if this process is not connected to Ray."""
    ray = ray_connection.connected()
    if ray is None:
        return None
    return f"configuration of {ray.get_runtime_context().get_job_id()}".encode()


def _extend(module: ModuleType) -> None:
    try:
        import_module(_PLACES[module.__name__]).extend(module)
    except ours() as error:  # the import is the user's, and succeeds
        failures.note(f"stepscope in {module.__name__}", error)


def _join_the_job() -> None:
    """Use the configuration that the trainer of this Ray job has published, if there is one."""
    try:
        config = None if switch.DISABLED else published()
        if config is not None:
            configure.start_up(config)
    except ours() as error:  # likewise
        failures.note("taking the configuration of verl's trainer", error)


for _name in _PLACES:
    wrapt.register_post_import_hook(_extend, _name)
_join_the_job()
