"""Merge checkpoints of any formats into one: an average, an EMA, a decay of the learning rate, or an interpolation.

Each SRC is a source that `shardckpt convert` reads; all need the same keys. The weights of the sources are
  --weights W,W,...  one for each SRC, in their order; they are divided by their sum (all equal)
  --decay D          an exponential moving average, the oldest SRC first: average = D * average + (1 - D) * next
  --wsm DECAY        warmup-stable and merge: replaces a decay of the learning rate, linear, cosine or 1-sqrt,
                     the oldest SRC first; see --steps
  --linear T         two: 1 - T and T
  --slerp T          two: each tensor along the sphere, T of the way from the first to the second

Sources that have other names: --rename 2:OLD=NEW renames in the second SRC alone; with --mapping megatron folders of
the Hub and checkpoints of Megatron go together, each read by Megatron's names.

Sums are computed in one dtype and rounded once. The bits of DST depend neither on the order of sources that have the
same weights, nor on --memory. Tensors that are not floating-point must be equal. Objects and common state are those of
the last SRC, or see --base.

DST is complete or absent: before it gets its name it is read again, and fingerprints are compared. A merge that was
killed goes on, as a conversion does, when it is run again with the same sources and options on the same host.

exit codes:
  0  merged
  1  with --skip-damaged: merged but for what is damaged in a SRC
  2  an error
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.cli.convert import add_target_options, describe_conversion, read_target_options
from shardckpt.cli.exit_codes import FINE, FOUND
from shardckpt.cli.output import Output
from shardckpt.cli.renames import split_renames
from shardckpt.cli.table import fit_table
from shardckpt.errors import CheckpointingException

if TYPE_CHECKING:
    from shardckpt.maintenance.merge import MergeReport


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument(
        "sources", metavar="SRC", nargs="+", help="directory or URL of a checkpoint or folder, or a file"
    )
    parser.add_argument("target", metavar="DST", help="the target, which must be absent or empty, or see --overwrite")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--weights", type=parse_numbers, metavar="W,W,...", help="the weight of each SRC")
    how.add_argument("--decay", type=float, metavar="D", help="an exponential moving average")
    how.add_argument("--wsm", metavar="DECAY", help="merge as a decay of the learning rate: linear, cosine or 1-sqrt")
    how.add_argument("--linear", type=float, metavar="T", help="interpolate two linearly")
    how.add_argument("--slerp", type=float, metavar="T", help="interpolate two spherically")
    parser.add_argument(
        "--steps", type=parse_numbers, metavar="S,S,...", help="--wsm: the step of each SRC (equally far apart)"
    )
    parser.add_argument("--accumulate", choices=("fp32", "fp64"), default="fp32", help="dtype of sums (fp32)")
    parser.add_argument(
        "--optimizer",
        choices=("average", "drop", "base"),
        default="average",
        help="optimizer state: merge it, do not write it, or take it from --base (average)",
    )
    parser.add_argument(
        "--missing",
        choices=("error", "drop", "available"),
        default="error",
        help="tensors that not all SRC have: an error, not written, or merged from those that have them (error)",
    )
    parser.add_argument("--base", type=int, metavar="N", help="objects and common state of the N-th SRC (the last)")
    add_target_options(parser)
    parser.set_defaults(reads=("sources",), writes="target")


def run(options: Any) -> Output:
    """Merge, and return the report."""
    from shardckpt.engine.display import show_progress
    from shardckpt.maintenance.merge import merge_checkpoints

    if options.base is not None and not 1 <= options.base <= len(options.sources):
        raise CheckpointingException(f"--base {options.base}: there are {len(options.sources)} SRC, numbered from 1")
    _refuse_neighbour(options)
    target = read_target_options(options) | {"rename": split_renames(options, len(options.sources))}
    with show_progress("convert", "merge", part="verify"):  # a merge is a conversion of its merged source
        report = merge_checkpoints(
            options.sources,
            options.target,
            weights=_compute_weights(options),
            slerp=options.slerp,
            accumulate=options.accumulate,
            optimizer=options.optimizer,
            missing=options.missing,
            base=-1 if options.base is None else options.base - 1,
            **target,
        )
    return Output(
        lambda: report,
        lambda: _describe(report, options.target, verbose=options.verbose),
        FOUND if report.conversion.damaged else FINE,
    )


def _refuse_neighbour(options: Any) -> None:
    """Raise if DST is the last of the steps that a shell's ``run/step-*`` has named, which ``--overwrite`` replaces."""
    from pathlib import PurePath

    from shardckpt.engine.locations import find_local, locate
    from shardckpt.manager.step_names import parse_step, split_path
    from shardckpt.plugins.manager import get_plugin_manager

    if not options.overwrite:
        return
    places = [*options.sources, options.target]
    found = [locate(place, get_plugin_manager()) for place in places]
    parts = [split_path(place) for place in places]  # a link counts where it is
    names = [PurePath(name).stem if at.is_file() else name for at, (_, name) in zip(found, parts, strict=True)]
    folders = {find_local(folder) or folder for folder, _ in parts}
    families = {name.rstrip("0123456789") for name in names}
    *steps, last = (parse_step(name) for name in names)
    if len(folders) > 1 or len(families) > 1 or last is None or any(step is None or step >= last for step in steps):
        return
    target = found[-1]
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise CheckpointingException(
            f"{options.target} is the last step in the folder of all SRC: a pattern such as "
            f"{parts[-1][0]}/{families.pop()}* may have named it, and --overwrite would replace it. Give another DST, "
            "or remove that one first"
        )


def parse_numbers(text: str) -> list[float]:
    """Parse numbers with commas between them; raise ValueError for anything else."""
    return [float(number) for number in text.split(",")]


#: The type's name in argparse's error.
parse_numbers.__name__ = "list of numbers, such as 1,2,1,"


def _compute_weights(options: Any) -> list[float] | None:
    """Return the weights that the options say; None for equal ones, and for slerp."""
    from shardckpt.maintenance.merge_weights import compute_ema_weights, compute_wsm_weights

    count = len(options.sources)
    if options.steps is not None and (options.wsm is None or len(options.steps) != count):
        raise CheckpointingException(f"--steps: give --wsm, too, and a step for each of the {count} SRC")
    if options.decay is not None:
        return compute_ema_weights(count, options.decay)
    if options.wsm is not None:
        return compute_wsm_weights(range(count) if options.steps is None else options.steps, options.wsm)
    if options.linear is not None:
        return [1 - options.linear, options.linear]
    weights: list[float] | None = options.weights
    return weights


def _describe(report: MergeReport, target: str, *, verbose: bool) -> list[str]:
    rows = [
        (f"{weight:.6g}", source + (" (base)" if number == report.base else ""))
        for number, (source, weight) in enumerate(zip(report.sources, report.weights, strict=True))
    ]
    how = f"merged from {len(report.sources)} sources"
    lines = describe_conversion(report.conversion, target, how, verbose=verbose)
    return [*fit_table(("weight", "source"), rows), *lines]
