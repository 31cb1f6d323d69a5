"""megatron.core.dist_checkpointing.strategies.state_dict_saver."""

from __future__ import annotations

from shardckpt.compat.megatron.external_writers import save_state_dict_async_finalize
from shardckpt.compat.megatron.refusals import QUEUE, make_refusing_getattr

REFUSED = {
    "_compare_dataclasses": "every save compares its plan with the last one for itself",
    "save_state_dict_async_plan": QUEUE,
    "verify_global_md_reuse": "every save checks that for itself",
}

__getattr__ = make_refusing_getattr(__name__, REFUSED)

__all__ = ["save_state_dict_async_finalize"]
