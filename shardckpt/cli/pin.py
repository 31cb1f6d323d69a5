"""Keep a step under a label, whatever a retention policy says, or list the pins and leases of a folder.

No CheckpointManager and no verb removes or replaces a pinned step, until the pin is taken away with --remove.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardckpt.cli.folders import refuse_checkpoint, refuse_lost_link
from shardckpt.cli.output import Output
from shardckpt.cli.table import fit_table
from shardckpt.errors import CheckpointingException, StorageError, listed, name_call, name_known
from shardckpt.manifest.names import LINKS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def add_options(parser: Any) -> None:
    """Add the options."""
    parser.add_argument("folder", help="the directory or URL of the steps")
    parser.add_argument(
        "step",
        nargs="?",
        type=_parse_step,
        help="the step, the name of its directory, such as ckpt_000010, or latest or best; without it, pins and leases "
        "are listed",
    )
    parser.add_argument("text", nargs="?", metavar="LABEL", help="why it is kept, such as 'release 1.2'")
    parser.add_argument("--label", help="the same as LABEL")
    parser.add_argument("--remove", action="store_true", help="remove the pin with this label")


def run(options: Any) -> Output:
    """Pin, unpin or list."""
    if options.text is not None:
        if options.label is not None:
            options.parser.error(f"two labels are given, {options.text!r} and {options.label!r}")
        options.label = options.text
    refuse_lost_link(options.folder)
    _refuse_missing_folder(options.folder)
    if options.step is None:
        if options.label or options.remove:
            options.parser.error("--label and --remove need a STEP")
        return _list(options.folder)
    try:
        options.step = _name_step(options.folder, options.step)
        _check_step_and_label(options)
    except CheckpointingException:
        refuse_checkpoint(options.folder)  # a step that was given in the place of its folder
        raise
    from shardckpt.manager.holds import pin_step, unpin_step  # it imports torch, and a listing needs none

    if options.remove:
        unpin_step(options.folder, options.step, options.label)
    else:
        pin_step(options.folder, options.step, options.label)
    how = "no longer pinned" if options.remove else "pinned"
    return Output(
        lambda: {"step": options.step, "label": options.label, "pinned": not options.remove},
        lambda: [f"{options.step} is {how} as {options.label!r}"],
    )


def _list(folder: str) -> Output:
    from shardckpt import manager  # reading a store imports torch, reading a directory does not
    from shardckpt.engine.locations import find_local

    place = find_local(folder)
    found = manager.find_holds(folder) if place is None else manager.find_local_holds(place)
    held = [(directory, hold) for directory, holds in sorted(found.items()) for hold in holds]
    if not held:
        refuse_checkpoint(folder)
    rows = [(directory, str(hold)) for directory, hold in held]
    return Output(
        lambda: [
            {"step": directory, "kind": hold.kind, "holder": hold.holder, "until": hold.until}
            for directory, hold in held
        ],
        lambda: fit_table(("step", "held"), rows) if rows else [f"nothing is held in {folder}"],
    )


def _parse_step(text: str) -> int | str:
    """Parse a step; anything else is the name of a directory."""
    return int(text) if text.isascii() and text.isdecimal() else text


def _name_step(folder: str, step: int | str) -> int | str:
    """Return the name of the directory that ``latest`` or ``best`` stands for now; any other step as it is."""
    from shardckpt.engine.locations import locate
    from shardckpt.manager.named_steps import find_named_step
    from shardckpt.plugins.manager import get_plugin_manager

    if step not in LINKS:
        return step
    return locate(find_named_step(f"{folder.rstrip('/')}/{step}"), get_plugin_manager()).name  # a link is followed


def _refuse_missing_folder(folder: str) -> None:
    """Raise an error that names similar folders, if a local folder does not exist."""
    from shardckpt.engine.locations import find_local
    from shardckpt.storage.filesystem import name_siblings

    place = find_local(folder)
    if place is not None and not place.is_dir():
        raise StorageError(f"{place} is no directory: give the folder of the steps {name_siblings(place)}".rstrip())


def _check_step_and_label(options: Any) -> None:
    """Raise if the step does not exist, or no label is given, or the step has no pin of the label to remove."""
    from shardckpt.manager.holds import find_holds, find_step

    pins = {
        directory: [hold.holder for hold in holds if hold.kind == "pin"]
        for directory, holds in find_holds(options.folder).items()
    }
    steps, step = find_step(options.folder, options.step, also=LINKS)
    name, existing = steps.names.name(step), steps.steps()
    if step not in existing and not (options.remove and pins.get(name)):  # a pin stays where its step was lost
        show = str if isinstance(options.step, int) else steps.names.name
        known = name_known(show(step), [*map(show, existing)], "steps")
        raise CheckpointingException(f"{options.folder} has no step {show(step)} {known}")
    if options.remove:
        _refuse_other_label(options, name, pins)
    elif not options.label:
        call = _show_call(options, "release 1.2")
        raise CheckpointingException(f"a pin needs a label that says why {name} is kept: {call}")


def _refuse_other_label(options: Any, name: str, pins: Mapping[str, Sequence[str]]) -> None:
    """Raise an error that names the pins there are, unless the step has one of the label to remove.

    ``name`` is the step's directory; ``pins`` are the labels of all steps, by directory.
    """
    own = pins.get(name, ())
    if options.label in own:
        return
    if own and not options.label:
        calls = listed([_show_call(options, label) for label in own])
        raise CheckpointingException(f"{name} is pinned as {listed([*map(repr, own)])}: {calls}")
    as_label = f" as {options.label!r} {name_known(options.label, own, 'its pins')}" if options.label else ""
    others = [f"{label!r} of {directory}" for directory, labels in sorted(pins.items()) for label in labels]
    raise CheckpointingException(
        f"{name} of {options.folder} is not pinned{as_label}; pins of all steps: {listed(others) or 'none'}"
    )


def _show_call(options: Any, label: str) -> str:
    """Return the call that pins the step under a label, or takes that pin away."""
    remove = ["--remove"] if options.remove else []
    return name_call("pin", options.folder, options.step, *remove, "--label", label)
