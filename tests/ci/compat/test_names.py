from __future__ import annotations

from tests import programs


def test_modules_are_attributes() -> None:
    """As in Megatron, modules are reached as attributes of the package after one import."""
    code = (
        "from shardckpt.compat.megatron import dist_checkpointing as dc;"
        "dc.strategies.torch.TorchDistSaveShardedStrategy; dc.validation.StrictHandling; dc.mapping.ShardedTensor"
    )
    done = programs.run(code)
    assert done.returncode == 0, done.stderr
