"""Optimizer state loaded by the model's state dict alone, before there is an optimizer."""

from shardckpt.optimizer import load_sharded_optimizer_state_dict

__all__ = ["load_sharded_optimizer_state_dict"]
