"""Megatron-Core's checkpoint modules, 0.9 to 0.20, mapped to ours, so that a code base ports by one rule.

Replace ``megatron.core.dist_checkpointing`` by ``shardckpt.compat.megatron.dist_checkpointing``, and
``from megatron.core import dist_checkpointing`` by ``from shardckpt.compat.megatron import dist_checkpointing``:
``python -m shardckpt.compat.megatron FOLDER`` does so in all files of a folder.
"""
