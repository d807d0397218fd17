"""The section `npu`: what it takes, and what it refuses with the fix."""

from __future__ import annotations

import pytest

from stepscope.config import NpuConfig, ProfileConfig
from stepscope.errors import ConfigError


def npu(**fields: object) -> NpuConfig:
    return ProfileConfig.from_mapping({"tool": "npu", "npu": fields}).npu


def test_the_defaults_record_the_device_the_host_and_markers() -> None:
    config = npu()
    assert (config.level, config.contents, config.markers) == ("level0", ("npu", "cpu"), True)
    assert config.domains_exclude == ("communication",)
    assert not config.analysis


def test_an_empty_list_of_contents_is_the_default_and_never_no_data() -> None:
    assert npu(contents=[]).contents == ("npu", "cpu")


def test_contents_are_taken_once_each_and_from_a_text_with_commas() -> None:
    assert npu(contents="npu, cpu,npu,module").contents == ("npu", "cpu", "module")
    config = ProfileConfig.from_env(
        {"STEPSCOPE_NPU__CONTENTS": "npu,stack", "STEPSCOPE_NPU__LEVEL": "level1"}
    )
    assert (config.npu.contents, config.npu.level) == (("npu", "stack"), "level1")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"contents": ["gpu"]}, r"npu\.contents is 'gpu'"),
        ({"level": "Level1"}, r"npu\.level is 'Level1'.*did you mean 'level1'"),
        ({"aic_metrics": "L2Cache"}, r"npu\.aic_metrics.*Fix: npu\.level: level1"),
        ({"level": "level1", "aic_metrics": "pipeutilization"}, "did you mean 'PipeUtilization'"),
        ({"level": "level_none", "markers": False}, r"npu\.markers.*Fix: npu\.level: level0"),
        ({"extra": {"mstx": True}}, r"npu\.extra is 'mstx'.*Fix: set npu\.markers"),
        ({"domains_exclude": [""]}, r"npu\.domains_exclude"),
        ({"domains_include": [1]}, r"npu\.domains_include"),
        ({"leve": "level1"}, r"did you mean 'level'"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_fix(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        npu(**fields)


def test_it_travels_as_plain_json_and_comes_back_equal() -> None:
    config = ProfileConfig.from_mapping(
        {
            "npu": {
                "level": "level2",
                "schedule": {"active": 2},
                "extra": {"host_sys": ["cpu"], "sys_io": True},
            }
        }
    )
    assert ProfileConfig.from_mapping(config.to_mapping()) == config
