"""Pictures of checkpoints: HTML pages that stand in one file, work offline and ask no server."""

from shardckpt.pages.checkpoint import describe_checkpoint
from shardckpt.pages.difference import describe_difference
from shardckpt.pages.render import render_page, write_page

__all__ = ["describe_checkpoint", "describe_difference", "render_page", "write_page"]
