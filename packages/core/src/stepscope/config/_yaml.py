"""YAML files as people mean them: `10:50:10` is a text, and a key that stands twice is a mistake."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping

import yaml

from stepscope.errors import ConfigError

_INT = "tag:yaml.org,2002:int"


class _Loader(yaml.SafeLoader):
    """YAML 1.1 as PyYAML has it, without octal and base-60 integers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        # PyYAML keeps the last of two equal keys and says nothing.
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


# Base 60 would read the range 10:50:10 as the step 39010.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))


def load(path: str | os.PathLike[str], named_by: str) -> Mapping[str, object]:
    """The top-level mapping of a YAML file; an empty file is an empty one. Errors call the file `named_by`.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds something else.
    """
    name = os.fspath(path)
    try:
        with open(path, "rb") as file:
            data = yaml.load(file, _Loader)
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise ConfigError(named_by, name, allowed, "correct the path, or the file's permissions") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(named_by, name, "a YAML file", f"correct it: {error}") from None
    if data is not None and not isinstance(data, Mapping):
        raise ConfigError(named_by, name, "a YAML file that holds a mapping", "write lines like `steps: [2]`")
    return data or {}
