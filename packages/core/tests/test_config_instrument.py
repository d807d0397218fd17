"""The list `instrument`: its spellings, what is refused, and that it travels."""

from __future__ import annotations

import pickle

import pytest

from stepscope.config import InstrumentConfig, ProfileConfig
from stepscope.config.presets import preset_names, read_preset
from stepscope.errors import ConfigError

ENTRY = {"module": "trainer.loop", "name": "Loop.update", "role": "actor"}
FUNCTION = {"module": "trainer.loop", "name": "Loop.update"}


def listed(*entries: object) -> tuple[InstrumentConfig, ...]:
    return ProfileConfig.from_mapping({"instrument": list(entries)}).instrument


def test_an_entry_is_a_function_or_a_preset() -> None:
    assert listed(ENTRY, {"preset": "trl"}, "verl") == (
        InstrumentConfig(module="trainer.loop", name="Loop.update", role="actor"),
        InstrumentConfig(preset="trl"),
        InstrumentConfig(preset="verl"),
    )


def test_the_environment_names_presets_or_has_json() -> None:
    for text in ("trl,verl", '["trl", {"preset": "verl"}]'):
        config = ProfileConfig.from_env({"STEPSCOPE_INSTRUMENT": text})
        assert config.instrument == listed("trl", "verl")


def test_it_travels_as_plain_data_and_by_pickle() -> None:
    rollout = FUNCTION | {"kind": "trajectory", "id": ["uid", "attempt"], "values": {"n": "len(result.ids)"}}
    config = ProfileConfig.from_mapping({"instrument": [ENTRY | {"attrs": {"size": 7}}, rollout, "trl"]})
    assert ProfileConfig.from_mapping(config.to_mapping()) == config
    assert pickle.loads(pickle.dumps(config)) == config  # as Ray sends it to workers


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"preset": "verll"}, r"instrument\.preset is 'verll'.*did you mean 'verl'\?"),
        ({"preset": "trl", "role": "actor"}, r"instrument\.role.*nothing else in the entry of a preset"),
        ({"name": "Loop.update", "role": "actor"}, r"instrument\.module is None.*a dotted name"),
        (ENTRY | {"name": "Loop.update()"}, r"instrument\.name.*a dotted name"),
        ({**ENTRY, "role": None}, r"instrument\.role is None.*say who does the work"),
        (ENTRY | {"step": "before"}, r"instrument\.step is 'before'.*'around', 'begin', 'end' or 'next'"),
        (ENTRY | {"step": "around", "stage": "x"}, r"instrument\.stage.*an entry of its own"),
        (ENTRY | {"number": "self.step"}, r"instrument\.number.*nothing without `step`"),
        (ENTRY | {"step": "begin", "number": "self.step - 1"}, r"instrument\.number.*step\+1"),
        (ENTRY | {"where": {"1x": 1}}, r"instrument\.where.*an argument, or a dotted path"),
        (ENTRY | {"same": {"model": "self ref"}}, r"instrument\.same is 'self ref'"),
        (ENTRY | {"engines": {"vllm": "self.x"}}, r"instrument\.engines.*nothing without `step`"),
        (ENTRY | {"step": "around", "values": {"n": "x"}}, r"instrument\.values.*nothing beside `step`"),
        (ENTRY | {"kind": "turns"}, r"instrument\.kind is 'turns'.*did you mean 'turn'\?"),
        (ENTRY | {"kind": "turn"}, r"instrument\.role is 'actor'.*`kind: turn`.*kind: span or kind: weight"),
        (FUNCTION | {"kind": "turn", "id": "uid"}, r"instrument\.id.*or write kind: trajectory or kind: con"),
        (FUNCTION | {"kind": "tool", "index": "n"}, r"instrument\.index.*`kind: tool`.*write kind: turn"),
        (FUNCTION | {"kind": "consume"}, r"instrument\.id is \(\).*a path.*id: batch\.uid"),
        (FUNCTION | {"kind": "engine", "engine": "self.x"}, r"instrument\.adapter.*adapter: vllm"),
        (FUNCTION | {"kind": "trajectory", "id": "a b"}, r"instrument\.id is 'a b'.*dotted path"),
        (FUNCTION | {"kind": "trajectory", "id": [7]}, r"instrument\.id is \[7\].*a list of paths"),
        (FUNCTION | {"kind": "trajectory", "id": "result.uid"}, r"instrument\.id.*known before the call"),
        (FUNCTION | {"kind": "turn", "values": {"n": "max(x)"}}, r"instrument\.values.*len\(result\.ids\)"),
        (ENTRY | {"stege": "x"}, r"did you mean 'stage'\?"),
        (7, r"instrument is 7.*mappings, or names of presets"),
    ],
)
def test_a_wrong_entry_says_what_is_allowed(entry: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        listed(entry)


@pytest.mark.parametrize("value", [7, {"preset": "trl"}, None])
def test_what_is_no_list_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="functions and presets"):
        ProfileConfig.from_mapping({"instrument": value})
    with pytest.raises(ConfigError, match="JSON of"):
        ProfileConfig.from_env({"STEPSCOPE_INSTRUMENT": "[{preset: trl}]"})


def test_an_entry_that_no_call_reaches_is_refused() -> None:
    conditional = ENTRY | {"where": {"kind": "ref"}}
    assert len(listed(conditional, ENTRY, ENTRY | {"role": None, "step": "around"})) == 3
    assert len(listed(ENTRY, FUNCTION | {"kind": "trajectory"}, FUNCTION | {"kind": "turn"})) == 3
    for second in (ENTRY, conditional, ENTRY | {"role": "critic"}, FUNCTION | {"kind": "tool"}):
        with pytest.raises(ConfigError, match=r"loop:Loop\.update"):
            listed(ENTRY, second)


@pytest.mark.parametrize("name", preset_names())
def test_each_preset_is_a_list_that_one_could_have_written(name: str) -> None:
    entries = read_preset(name).entries
    assert listed(*(entry for entry in entries)) == entries
    assert any(entry.step in ("begin", "next", "around") for entry in entries)
    assert {"actor", "rollout"} <= {entry.role for entry in entries}


def test_entries_newer_than_what_is_installed_are_left_out() -> None:
    def count(version: str) -> int:
        return len(read_preset("verl", lambda _: version).entries)

    assert count("0.7.0") < count("0.8.0") < count("0.9.0.dev1") == count("0.9.1+cu12") == count("1.0")
    assert (
        count("0.8.0") == count("0.8rc1") == count("v0.8") < count("0.9rc1") == count("0.9") == count("1!0.9")
    )
