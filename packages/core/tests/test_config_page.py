"""docs/configuration.md says what the code does: fields, their defaults, and examples that load.

Keys of an `instrument` entry are in docs/frameworks.md. The reference has sections for one purpose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin

import msgspec
import pytest
import yaml

from stepscope.config import RESERVED_VARIABLES, ProfileConfig

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "configuration.md").read_text()
ROWS = dict(re.findall(r"^\| `([a-z0-9_.<>]+)` \| `([^`]*)` \|", PAGE, re.MULTILINE))
"""{field: default as written} of the tables."""
ELSEWHERE = set(re.findall(r"^\| `([a-z_]+)` \| ", PAGE.partition("## Further sections")[2], re.MULTILINE))
"""Sections whose fields only the reference lists."""


def leaves(section: type[msgspec.Struct], at: str = "") -> Iterator[tuple[str, object]]:
    """Dotted name and default, as `to_mapping` has it, of every field that a user sets."""
    for field in msgspec.structs.fields(section):
        name = f"{at}{field.name}"
        kinds = [kind for kind in (field.type, *get_args(field.type)) if _is_struct(kind)]
        inner = kinds[0] if kinds else None
        if get_origin(field.type) is dict and inner is not None:
            yield name, ProfileConfig().to_mapping()[name]
            yield from leaves(inner, f"{name}.<role>.")
        elif inner is None or field.default is None or get_origin(field.type) is tuple:
            yield name, _plain(field)
        if inner is not None and get_origin(field.type) is not dict and field.name != "steps":
            yield from leaves(inner, f"{name}.")


def _is_struct(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _plain(field: msgspec.structs.FieldInfo) -> object:
    default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return list(default) if isinstance(default, tuple) else default


FIELDS = dict(leaves(ProfileConfig)) | {"steps": []}
KEYS = {name.removeprefix("instrument.") for name in FIELDS if name.startswith("instrument.")}
"""Keys of an entry of `instrument`."""
COUNTS = {name.rpartition(".")[2]: default for name, default in FIELDS.items() if ".schedule." in name}
"""{key of a schedule: its default}."""


def test_the_page_lists_every_field_and_no_other() -> None:
    left_out = {*ELSEWHERE, "instrument"}
    sections = {name: name.partition(".")[0] for name in FIELDS if ".schedule." not in name}
    assert set(ROWS) == {
        name for name, section in sections.items() if section == name or section not in left_out
    }


def test_the_page_names_the_sections_whose_fields_are_in_the_reference() -> None:
    assert {"finish", "recorder", "npu"} <= ELSEWHERE
    assert {name.partition(".")[0] for name in FIELDS if "." in name} >= ELSEWHERE


def test_keys_of_an_entry_are_in_the_page_on_frameworks() -> None:
    page = (DOCS / "frameworks.md").read_text()
    assert {"kind", "where", "engines"} <= KEYS
    assert {key for key in KEYS if f"`{key}`" not in page and f"{key}: " not in page} == set()


def test_the_page_says_the_defaults_of_a_schedule() -> None:
    assert {key for key in COUNTS if f"`{key}`" not in PAGE} == set()
    assert "`active` and `repeat` are 1 by default, the others 0." in " ".join(PAGE.split())
    assert COUNTS == {"skip_first": 0, "wait": 0, "warmup": 0, "active": 1, "repeat": 1}


@pytest.mark.parametrize("field", sorted(ROWS))
def test_v9_defaults_on_the_page_are_those_of_the_code(field: str) -> None:
    written = yaml.safe_load(ROWS[field])
    if field == "roles":
        written = ProfileConfig.from_mapping({"roles": written}).to_mapping()["roles"]
    assert written == FIELDS[field]


def test_v9_a_schedule_works_in_both_modes_as_the_page_says() -> None:
    assert "both modes" in PAGE
    for mode in ("continuous", "discrete"):
        config = ProfileConfig.from_mapping({"mode": mode, "torch": {"schedule": {"active": 2}}})
        assert config.torch.schedule is not None


@pytest.mark.parametrize("block", re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL))
def test_every_yaml_block_loads_and_selects_a_step(block: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(block)
    assert ProfileConfig.from_file(path).steps


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_every_python_block_runs(block: str) -> None:
    exec(block, {})


@pytest.mark.parametrize(
    ("variable", "yaml_text"), re.findall(r"^\| `(STEPSCOPE_.*?)` \| `(.*?)` \|", PAGE, re.MULTILINE)
)
def test_every_variable_means_the_yaml_beside_it(variable: str, yaml_text: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(yaml_text)
    name, _, value = variable.partition("=")
    assert ProfileConfig.from_env({name: value.strip("\"'")}) == ProfileConfig.from_file(path)


def test_the_page_lists_the_variables_with_another_job() -> None:
    assert all(f"`{variable}`" in PAGE for variable in RESERVED_VARIABLES)
