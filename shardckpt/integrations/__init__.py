"""Adapters to trainers, a file each that imports its trainer's package: ``shardckpt.integrations.lightning``."""
