from __future__ import annotations

from shardckpt.manager import ReplicaManager
from tests.manager.replicas.torchft import torchft


def test_its_manager_is_what_is_asked_for() -> None:
    """The Manager of torchft has the methods of the protocol, and one of the two ways to register functions."""
    assert issubclass(torchft.Manager, ReplicaManager)
    assert hasattr(torchft.Manager, "register_state_dict_fn") or hasattr(torchft.Manager, "set_state_dict_fns")
