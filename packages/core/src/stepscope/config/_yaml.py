"""YAML files, with three changes to PyYAML: `10:50:10` is text, `5e10` is a number, and a duplicate key is an
error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping

import yaml

from stepscope.errors import ConfigError

_INT = "tag:yaml.org,2002:int"
_MOST_BYTES = 1 << 20
_SHOWN = 120
"""Largest number of characters of a line that an error quotes."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, without octal and base-60 integers."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        # PyYAML silently keeps the last of two equal keys.
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} stands twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


# In base 60, the range 10:50:10 would be the step 39010.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _INT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(_INT, re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
# 5e10 is a number in YAML 1.2. PyYAML accepts only a point and a sign: 5.0e+10.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load(path: str | os.PathLike[str], named_by: str) -> Mapping[str, object]:
    """Return the top-level mapping of a YAML file; {} if it is empty. Errors call the file `named_by`.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or does not contain a mapping.
    """
    name, text = os.fspath(path), b""
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise ConfigError(named_by, name, f"a YAML file of at most {_MOST_BYTES} bytes", "shorten it")
        data = yaml.load(text, _Loader)
    except OSError as error:
        allowed = f"a file that can be read ({error.strerror})"
        raise ConfigError(named_by, name, allowed, "correct the path, or the file's permissions") from None
    except ConfigError:
        raise
    # PyYAML does not wrap errors of int() and date(), nor a RecursionError.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(named_by, name, "a YAML file", _correction(error, text)) from None
    if data is not None and not isinstance(data, Mapping):
        raise ConfigError(named_by, name, "a YAML file that holds a mapping", "write lines like `steps: [2]`")
    return data or {}


def _correction(error: Exception, text: bytes) -> str:
    """Return the wrong line, what is wrong with it, and how to write it."""
    lines = text.decode(errors="replace").splitlines()
    mark, begun = (getattr(error, name, None) for name in ("problem_mark", "context_mark"))
    if mark is not None and mark.line >= len(lines):
        mark = begun  # the mark is behind the last line
    if mark is None or mark.line >= len(lines):
        return f"correct it: {error}"
    problem = getattr(error, "problem", None) or "it cannot be read"
    advice = f"line {mark.line + 1} is `{lines[mark.line].strip()[:_SHOWN]}`: {problem}"
    if begun is not None and begun.line != mark.line:
        advice += f" ({getattr(error, 'context', '')} in line {begun.line + 1})"
    if re.search("alias|anchor|'[%@`]'", f"{getattr(error, 'context', '')} {problem}"):
        advice += '. Put names that begin with *, &, %, @ or ` in quotes: "*"'
    elif "\t" in lines[mark.line]:
        advice += ". Indent with spaces, not tabs"
    return advice
