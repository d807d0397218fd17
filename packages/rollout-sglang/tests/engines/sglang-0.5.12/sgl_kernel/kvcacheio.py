"""Functions that copy the KV cache between devices. sglang imports the names, and the tests call none."""

from __future__ import annotations

from typing import NoReturn


def _absent(*args: object, **options: object) -> NoReturn:
    raise NotImplementedError("a kernel of sgl-kernel, which is not installed here")


transfer_kv_all_layer = transfer_kv_all_layer_mla = transfer_kv_direct = transfer_kv_per_layer = _absent
transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_lf_pf = transfer_kv_all_layer_lf_ph = _absent
transfer_kv_all_layer_mla_lf_pf = transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_mla = _absent
transfer_kv_per_layer_mla_pf_lf = transfer_kv_per_layer_pf_lf = transfer_kv_per_layer_ph_lf = _absent
