"""Counters of Ascend NPUs, from DCMI, the library of the driver that `npu-smi` uses.

Huawei's DCMI API Reference and `dcmi_interface_api.h` define the functions, structures and units. This module
has not run on hardware yet; a test compiles a library with the same functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import TypeAlias

from stepscope._recording.counters.devices import DeviceCounter
from stepscope._recording.counters.sampler import AbsentError
from stepscope.backends.counters import CounterSource
from stepscope.errors import ours
from stepscope.files.counters import NPU

LIBRARIES = ("libdcmi.so", "/usr/local/dcmi/libdcmi.so")
"""The library on the loader's path, then the place where the driver's package installs it."""
_MOST_CARDS = 64
_AI_CORE = 2
"""DCMI_UTILIZATION_RATE_AICORE."""
_AI_CORE_CLOCK = 7
"""DCMI_FREQ_AICORE_CURRENT_."""
_MB = 1 << 20
Chip: TypeAlias = tuple[int, int]
"""(number of the card, number of the device on the card)."""


class _Hbm(ctypes.Structure):
    """`struct dcmi_hbm_info`."""

    _fields_ = [
        ("memory_size", ctypes.c_ulonglong),  # MB
        ("freq", ctypes.c_uint),
        ("memory_usage", ctypes.c_ulonglong),  # MB
        ("temp", ctypes.c_int),
        ("bandwith_util_rate", ctypes.c_uint),  # DCMI's spelling
    ]


class DcmiError(Exception):
    """A DCMI call returned an error code."""


class _Dcmi:
    """Calls of DCMI functions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._call("dcmi_init")

    def chips(self) -> dict[str, Chip]:
        """Return {name: chip} of every chip, with the numbers that `npu-smi` shows."""
        count, cards = ctypes.c_int(), (ctypes.c_int * _MOST_CARDS)()
        self._call("dcmi_get_card_list", ctypes.byref(count), cards, _MOST_CARDS)
        chips = []
        for card in cards[: count.value]:
            devices = ctypes.c_int()
            self._call("dcmi_get_device_num_in_card", card, ctypes.byref(devices))
            chips += [(card, device) for device in range(devices.value)]
        return {f"NPU {number}": chip for number, chip in enumerate(chips)}

    def utilisation(self, chip: Chip) -> float:
        rate = ctypes.c_uint()
        self._call("dcmi_get_device_utilization_rate", *chip, _AI_CORE, ctypes.byref(rate))
        return float(rate.value)

    def memory_bytes(self, chip: Chip) -> float:
        hbm = _Hbm()
        self._call("dcmi_get_device_hbm_info", *chip, ctypes.byref(hbm))
        return float(hbm.memory_usage * _MB)

    def power_w(self, chip: Chip) -> float:
        tenths = ctypes.c_int()
        self._call("dcmi_get_device_power_info", *chip, ctypes.byref(tenths))
        return tenths.value / 10

    def clock_mhz(self, chip: Chip) -> float:
        clock = ctypes.c_uint()
        self._call("dcmi_get_device_frequency", *chip, _AI_CORE_CLOCK, ctypes.byref(clock))
        return float(clock.value)

    def _call(self, function: str, *arguments: object) -> None:
        try:
            code = getattr(self._library, function)(*arguments)
        except AttributeError:
            raise DcmiError(f"{LIBRARIES[0]} has no {function}") from None
        if code != 0:
            raise DcmiError(f"{function} answers {code}")


def _library() -> ctypes.CDLL:
    """Load the first library of `LIBRARIES` that exists. Raise `OSError` if there is none."""
    first, second = LIBRARIES
    try:
        return ctypes.CDLL(first)
    except ours(OSError):
        return ctypes.CDLL(second)


def ascend_npus() -> Iterator[CounterSource]:
    """Yield the counters of this host's NPUs.

    Raises:
        AbsentError: the library cannot be loaded, or a call fails.
    """
    try:
        dcmi = _Dcmi(_library())
        chips = dcmi.chips()
    except ours(OSError, DcmiError) as error:
        raise AbsentError(f"{LIBRARIES[0]}, the library of npu-smi, cannot be used: {error}") from None
    yield DeviceCounter(NPU, "%", dcmi.utilisation, chips, error=DcmiError, kind="interval")
    yield DeviceCounter("NPU memory", "B", dcmi.memory_bytes, chips, error=DcmiError)
    yield DeviceCounter("NPU power", "W", dcmi.power_w, chips, error=DcmiError)
    yield DeviceCounter("NPU AI core clock", "MHz", dcmi.clock_mhz, chips, error=DcmiError)
