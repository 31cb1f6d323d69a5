"""``shardckpt demo``: the main job on real text, from training with some ranks to going on with others."""

from shardckpt.demo.job import Layout
from shardckpt.demo.outcome import TOLERANCE, Outcome, check, largest_difference, relative_difference
from shardckpt.demo.run import DENSE, EXPERTS, run_demo

__all__ = [
    "DENSE",
    "EXPERTS",
    "TOLERANCE",
    "Layout",
    "Outcome",
    "check",
    "largest_difference",
    "relative_difference",
    "run_demo",
]
