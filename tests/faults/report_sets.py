"""The fault sets of the report: which program runs each, over what, and what its findings come to."""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardckpt import settings
from tests import programs
from tests.faults.chaos.names import OURS, THEIRS, merge_scores
from tests.faults.deaths import StepJob
from tests.faults.foreign_fuzzer import LIBRARIES
from tests.faults.injector import LIES
from tests.faults.mutations import MUTATIONS as _MUTATIONS
from tests.faults.mutations import check_baseline, try_mutation
from tests.faults.programs import ONE_THREAD, run_in_new_interpreter
from tests.faults.rank_deaths import EACH_STEP, EVERY_RANK, check_checkpoint, check_survivors
from tests.remote.fault_proxy import FAULTS, KILLS
from tests.remote.servers import fault_proxy, moto_server, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from tests.faults.deaths import Scenario
    from tests.faults.mutations import Mutation

#: What the sets that end in a load by an oracle come to.
CRASHES = ("old", "new", "damage found", "lost", "silent", "mixed", "other", "hang", "missed")
DAMAGE = ("by load and verify", "by load", "by verify", "not named", "silent", "missed", "other")
DISKS = ("old", "new", "lost", "silent", "mixed", "other", "hang")
RANKS = ("named", "saved", "late", "not named", "hang", "wrong checkpoint", "missed")
CHAOS = ("pass", "lost work", "silent divergence", "hard fail", "drifted")
MUTATIONS = ("caught", "survived")
HOSTILE = ("refused", "loaded", "other", "crash", "slow", "memory")
USE = ("saves", "old", "new", "reads", "lost", "mixed", "other", "hang", "grown")
STORES = ("new", "old", "lost", "silent", "mixed", "other", "hang", "missed")
#: Outcomes that no row of ours may have.
BAD = {
    *("lost", "silent", "mixed", "other", "hang", "late", "not named", "wrong checkpoint"),
    *("crash", "slow", "memory", "grown"),
    *("lost work", "silent divergence", "hard fail", "drifted", "survived"),
}
#: Savers that are in the report for comparison: those of the fault sets, and those of the referee.
_SAVERS = ("dcp", "torch.save")
STOCK = (*_SAVERS, *THEIRS)
_OURS = ("torch_dist", "safetensors")
_IN_PARTS = "safetensors (index in parts)"
#: Formats whose files are (torch_dist, 1)'s, in the sets of one process.
_LIKE_OURS = ("ep",)
_CASES = ("fresh", "existing")
_SEEDS = 24
_MOST_CUTS = 600
_TIMEOUT = 4 * 3600.0  # seconds, for the points of one row


@dataclass(frozen=True)
class FaultSet:
    """A row of the report.

    Attributes:
        threat: The set.
        subject: The format, or another saver.
        case: What is done, and what was there before.
        columns: The names of its outcomes.
        run: Takes the most points; returns how often each came, and a note.
    """

    threat: str
    subject: str
    case: str
    columns: tuple[str, ...]
    run: Callable[[int], tuple[Counter[str], str]]


# ---- outcomes


def outcome_of_kill(found: dict[str, Any], case: str) -> str:
    """What a kill came to; one that came elsewhere counts only where it did harm."""
    state = _state(found["state"], case)
    if state in ("old", "new") and found["later"]:
        return "other"
    return state if found["killed"] or state not in ("old", "new") else "missed"


def outcome_of_fault(found: dict[str, Any], case: str) -> str:
    """What an error or a lie of a call came to."""
    if not found["injected"]:
        return "missed"
    if found["ended"] == "hangs":
        return "hang"
    state = _state(found["state"], case)
    if state == "lost" and found["fault"] in LIES:
        return "damage found"
    if state in ("old", "new") and found["later"]:
        return "other"
    if found["ended"] == "saved":
        failed_sync = found["call"] in ("fsync", "fdatasync") and found["fault"] != "EINTR"
        return "silent" if state in ("old", "lost") or failed_sync else state
    return state if found["ended"].startswith("refused: ") else "other"


def outcome_of_cut(found: dict[str, Any], case: str) -> str:
    """What a power cut came to; a save that had returned must be there."""
    state = _state(found["state"], case)
    return "silent" if found["is_last"] == "True" and state in ("old", "lost") else state


def _state(state: str, case: str) -> str:
    """What a load found: nothing stands for old where nothing was before; an old one that was set aside is old."""
    if state in ("old", "set aside") or (state == "absent" and case.endswith("fresh")):
        return "old"
    if state.startswith("mixed"):
        return "mixed"
    if state == "absent" or state.startswith(("CorruptCheckpointError: ", "refused: ")):
        return "lost"
    return state if state == "new" else "other"


def outcome_of_damage(found: dict[str, Any]) -> str:
    """What a damage came to."""
    load, verify = found["load"], found["verify"]
    if load.startswith("WRONG"):
        return "silent"
    if load.startswith("ALIEN") or "ALIEN" in verify:
        return "other"
    if (load and not found["is_error_named"]) or (verify and not found["is_blamed"]):
        return "not named"
    if load:
        return "by load and verify" if verify else "by load"
    return "by verify" if verify else "missed"


def outcome_of_lost_rank(what: Scenario, report: dict[str, Any]) -> str:
    """What the loss of a rank came to, by the tests' own oracle."""
    if report["hung"]:
        return "hang"
    try:
        check_survivors(what, report)
    except AssertionError:
        return "not named"
    try:
        check_checkpoint(what, report)
    except AssertionError:
        return "wrong checkpoint"
    return "named" if report["seconds"] <= StepJob.timeout + _GRACE else "late"


def outcome_of_request(report: dict[str, Any]) -> str:
    """What a fault at a request of a save of 2 ranks came to; without the fault, nothing was tried."""
    after, fault = report["after"], report["fault"]
    if report["hung"]:
        return "hang"
    if not report["killed"] and not any(hit == fault for _, _, hit in report["requests"]):
        return "missed"
    # the values of the save that was there before are "a mixture" where those of the new one are asked for
    if "a mixture" in after["load"][1] and after["old"] != ["", ""]:
        return "mixed"
    is_saved = report["errors"] == [["", ""]] * len(report["errors"]) and not report["killed"]
    if after["second"] != ["", ""] or (len({tuple(error) for error in report["errors"]}) > 1 and not report["killed"]):
        return "other"
    if after["load"] == ["", ""]:
        return "new"
    is_old = after["old"] == ["", ""] if report["overwrites"] else not is_saved
    return "lost" if not is_old else "silent" if is_saved else "old"


def outcome_of_full_disk(found: dict[str, Any], case: str, *, must_say_so: bool = True) -> str:
    """What a save to a disk without room came to: an error, which says so, and old, or the new one; and then room."""
    if found["ended"] == "hangs":
        return "hang"
    state = _state(found["state"], case)
    if found["ended"] == "saved":
        state = "silent" if state in ("old", "lost") else state
    elif not found["ended"].startswith("refused: ") or (must_say_so and "No space left" not in found["ended"]):
        return "other"
    return "other" if state in ("old", "new") and (found["later"] or found["beside"]) else state


def outcome_of_slow_disk(found: dict[str, Any], victim: int, world: int, seconds: float) -> str:
    """What a call that took long came to: nothing within the group's timeout, else an error that names the rank."""
    if not found["held"]:
        return "missed"
    told = found["told"]
    if len(told) < world:
        return "hang"
    if found["state"] not in ("old", "new") or found["later"] or found["beside"]:
        return "wrong checkpoint"
    if seconds < StepJob.timeout:
        return "saved" if found["state"] == "new" and not any(kind for kind, _, _ in told.values()) else "not named"
    others = [told[rank] for rank in told if int(rank) != victim]
    expected = f"rank {victim} did not answer within {StepJob.timeout:g} s"
    if not all(kind == "CommunicationError" and text.startswith(expected) for kind, text, _ in others):
        return "not named"
    return "late" if max(after for _, _, after in others) > StepJob.timeout + _GRACE else "named"


def outcome_of_local(report: dict[str, Any]) -> str:
    """What the kill of a rank in a save of local checkpoints came to: one step on all ranks, and then the next one."""
    after = report["after"]
    if None in after:
        return "hang"
    latest = {step for step, _, _ in after}
    if not all(is_right for _, is_right, _ in after) or len(latest) > 1:
        return "mixed"
    if any(names != [[3, 0], [3, 1]] for _, _, names in after):
        return "other"
    return {1: "old", 2: "new", None: "lost"}.get(latest.pop(), "other")


def outcome_of_upload(report: dict[str, Any]) -> str:
    """What the kill of all ranks at an upload came to: whole or absent; a save over it takes the place, no other."""
    if report["hung"]:
        return "hang"
    is_whole = report["load"] == ["", ""]
    if not is_whole and report["load"][0] not in ("NotACheckpointError", "IncompleteCheckpointError"):
        return "mixed" if "AssertionError" in report["load"][0] else "lost"
    if report["again"] != ["", ""] or report["after"] != ["", ""]:
        return "other"
    if is_whole:
        return "new" if "is not empty" in report["refused"][1] else "other"
    return "old"


# ---- runs


def _run(
    program: str,
    subject: str,
    *arguments: str,
    text: str = "",
    allowed: tuple[int, ...] = (0,),
    environment: dict[str, str] | None = None,
) -> Any:
    """What a program has printed, as JSON or as lines of it, over a format."""
    before = os.environ.get("TESTS_BACKEND")
    os.environ["TESTS_BACKEND"] = subject
    try:
        module = program if "." in program else f"tests.faults.{program}"
        variables = ONE_THREAD | (environment or {})
        done = programs.run(
            "", *arguments, module=module, text=text, cwd=programs.ROOT, environment=variables, timeout=_TIMEOUT
        )
    finally:
        os.environ.pop("TESTS_BACKEND")
        if before is not None:
            os.environ["TESTS_BACKEND"] = before
    if done.returncode not in allowed:
        raise SystemExit(f"{program} {' '.join(arguments)} over {subject}: {done.stderr[-4000:]}")
    if program == "tests.remote.killer":
        return [json.loads(line) for line in done.stdout.splitlines()]
    return json.loads(done.stdout)


#: The program of each set of crashes, and what it is told besides the count of points.
_PROGRAMS = {"kills": ("killer", ()), "io": ("injector", ()), "power": ("power_cutter", (str(_SEEDS),))}


def _crash(threat: str, subject: str, scenario: str, case: str, points: int) -> tuple[Counter[str], str]:
    """Run the program of kills, errors or power cuts."""
    program, more = _PROGRAMS[threat]
    count = min(points, _MOST_CUTS) if threat == "power" else points
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        report = _run(program, _find_format(subject), scenario, folder, case, str(count), *more)
    if threat == "kills":
        return Counter(outcome_of_kill(found, case) for found in report["outcomes"]), ""
    if threat == "io":
        return Counter(outcome_of_fault(found, case) for found in report["endings"]), ""
    return Counter(outcome_of_cut(found, case) for found in report), ""


def _find_format(subject: str) -> str:
    """The format that a program saves by: a tree's, or another saver's, has none of ours."""
    return subject if subject in (*_OURS, *_LIKE_OURS) else "torch_dist"


def _crash_set(threat: str, subject: str, case: str, scenario: str = "foreground") -> FaultSet:
    """A row of a scenario, which is named where the subject does not name it."""
    name = case if scenario in ("foreground", "tree", "storage writer", *_SAVERS) else f"{scenario}, {case}"
    return FaultSet(threat, subject, name, CRASHES, partial(_crash, threat, subject, scenario, case))


def _fill_disk(subject: str, what: str, case: str, way: str, points: int) -> tuple[Counter[str], str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        most = str(points if points > 1 else 2)
        found = _run("disk_filler", _find_format(subject), way, folder, what, case, most)
    must_say_so = subject not in _SAVERS
    return Counter(outcome_of_full_disk(each, case, must_say_so=must_say_so) for each in found), ""


def _hold_disk(subject: str, victim: int, world: int, seconds: float, points: int) -> tuple[Counter[str], str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        arguments = (str(victim), str(world), str(seconds), folder, "existing", str(min(points, _HELD_CALLS)))
        found = _run("slow_disk", subject, *arguments)
    outcomes = Counter(outcome_of_slow_disk(each, victim, world, seconds) for each in found)
    slowest = max((told[2] for each in found for rank, told in each["told"].items() if int(rank) != victim), default=0)
    return outcomes, f"the slowest of the others ended {slowest:.1f} s after the call was held"


def _crash_local(subject: str, _: int) -> tuple[Counter[str], str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        found = _run("tests.local.crashes", subject, folder, "1")
    return Counter(map(outcome_of_local, found[:-1])), ""  # the last one was not killed


def _crash_upload(subject: str, world: int, files: str, _: int) -> tuple[Counter[str], str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        (Path(folder) / "spool").mkdir()
        environment = {settings.SPOOL_DIR: f"{folder}/spool"}
        found = _run("tests.remote.killer", subject, folder, str(world), files, environment=environment)
    return Counter(outcome_of_upload(each) for each in found if each["killed"]), ""


def _run_chaos(program: str, ranks: int, _: int) -> tuple[Counter[str], str]:
    """Let the referee run; its scores stay beside its program, too."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        scores = Path(folder) / "scores.json"
        done = run_in_new_interpreter("chaos", program, "--ranks", str(ranks), "-o", str(scores), timeout=_TIMEOUT)
        if not scores.exists():
            raise SystemExit(f"chaos {program}: {done.stderr[-4000:]}")
        merge_scores(json.loads(scores.read_text()))
        (score,) = json.loads(scores.read_text())["scores"].values()
    outcomes = Counter({name.lower().replace("_", " "): count for name, count in score["verdicts"].items()})
    outcomes["pass"] -= 1  # the control run
    outcomes["drifted"] = len(score["drifted"])
    return outcomes, ""


def _mutate(mutation: Mutation, _: int) -> tuple[Counter[str], str]:
    check_baseline()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        found = try_mutation(mutation, Path(folder))
    return Counter(["caught" if found == "caught" else "survived"]), "" if found == "caught" else found


def _damage(subject: str, case: str, points: int) -> tuple[Counter[str], str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        program = "stock_damager" if subject in _SAVERS else "damager"
        before = (subject,) if subject in _SAVERS else ()
        stands = "torch_dist" if subject in _SAVERS else subject
        found = _run(program, stands, *before, f"{folder}/damage", case, str(min(points, _DAMAGED_BITS)))
    return Counter(map(outcome_of_damage, found)), ""


def _lose_ranks(subject: str, scenarios: list[Scenario], points: int) -> tuple[Counter[str], str]:
    if len(scenarios) > points:
        scenarios = scenarios[:: -(-len(scenarios) // points)]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        found = _run("deaths", subject, "step", folder, text=json.dumps(scenarios))
    outcomes = Counter(outcome_of_lost_rank(*each) for each in zip(scenarios, found, strict=True))
    slowest = max(report["seconds"] for report in found)
    return outcomes, f"the slowest error came {slowest:.1f} s after the rank was lost"


def _fuzz(subject: str, points: int) -> tuple[Counter[str], str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        if subject in LIBRARIES:
            found = _run("foreign_fuzzer", "torch_dist", folder, subject, str(min(points, _MUTANTS)))
        elif subject == _IN_PARTS:
            found = _run("fuzzer", "safetensors", folder, str(min(points, _MUTANTS)), "parts")
        else:
            found = _run("fuzzer", subject, folder, str(min(points, _MUTANTS)))
    told = [line for line in found if ":" in line]
    return Counter(line.partition(":")[0] for line in found), " ".join(told)[:1000]


def _fail_requests(fault: str, case: str, points: int) -> tuple[Counter[str], str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, moto_server() as endpoint:
        spool = Path(folder) / "spool"
        spool.mkdir()
        with fault_proxy(endpoint) as proxy:
            options = {settings.REMOTE_PART_MIB: "5", settings.SPOOL_DIR: str(spool)}
            environment = variables(proxy.endpoint) | options
            done = programs.run(
                "",
                folder,
                proxy.endpoint,
                fault,
                case,
                module="tests.remote.request_faults",
                environment=environment,
                timeout=_TIMEOUT,
            )
    if done.returncode:
        raise SystemExit(f"request_faults {fault}: {done.stderr[-4000:]}")
    return Counter(outcome_of_request(json.loads(line)) for line in done.stdout.splitlines()), ""


def _soak(subject: str, minutes: str, saves: str, points: int) -> tuple[Counter[str], str]:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        report = _run("soak", subject, "--minutes", minutes, "--saves", saves, folder, allowed=(0, 1))
    outcomes = Counter({name.partition(":")[0]: count for name, count in report.get("kills", {}).items()})
    outcomes["saves"] = report.get("saves", 0) + (report["held"][-1]["saves"] if report["held"] else 0)
    outcomes["reads"] = sum(report.get("reads", {}).values())
    outcomes["other"] += len(report.get("bad", []))
    outcomes["grown"] = len(report["grown"])
    held = [
        each for each in report["held"] if each["saves"] in (report["held"][5]["saves"], report["held"][-1]["saves"])
    ]
    told = "; ".join(", ".join(f"{value} {name}" for name, value in each.items()) for each in held)
    return outcomes, "; ".join([*filter(None, [told]), *report.get("bad", [])])[:1000]


_DAMAGED_BITS = 10_000
_HELD_CALLS = 12
_MUTANTS = 7000
#: Seconds beyond the group's timeout in which all must have raised.
_GRACE = 2.0

#: Saves by others than the one process in the foreground, and what stands before.
_SAVES = {
    "thread": _CASES,
    "process": _CASES,
    "training": _CASES,
    "rank 0 of 2": _CASES,
    "rank 1 of 2": _CASES,
    "rank 0 of 4": ("existing",),
    "rank 3 of 4": ("existing",),
    "contiguous, rank 0 of 2": ("existing",),
    "contiguous, rank 1 of 2": ("existing",),
}
#: Operations of one process, and what stands before.
OPERATIONS = {
    "convert": _CASES,
    "export": _CASES,
    "remove": ("existing",),
    "prune": ("existing",),
    "migrate": ("existing",),
    "contiguous": _CASES,
    "manager": _CASES,
    "pointer": ("existing",),
    "links": ("existing",),
    "pin": ("existing",),
    "unpin": ("existing",),
    "mark": ("existing",),
    "local checkpoints": _CASES,
}
#: What these remove may come back after a power cut.
UNSYNCED = ("prune", "unpin")
#: What of them one format has, or does not depend on the format.
OF_ONE_FORMAT = {
    "migrate": "torch_dist",
    **dict.fromkeys(("contiguous", "contiguous, rank 0 of 2", "contiguous, rank 1 of 2"), "safetensors"),
    **dict.fromkeys(("pointer", "links", "pin", "unpin", "mark"), "torch_dist"),
}


def _kills() -> list[FaultSet]:
    found = []
    for subject in _OURS:
        found += [_crash_set("kills", subject, case) for case in (*_CASES, "existing, no exchange")]
        found += [
            _crash_set("kills", subject, case, operation)
            for operation, cases in {**_SAVES, **OPERATIONS}.items()
            if OF_ONE_FORMAT.get(operation, subject) == subject
            for case in cases
        ]
        found.append(
            FaultSet("kills", subject, "local checkpoints of 2 ranks", CRASHES, partial(_crash_local, subject))
        )
        found.append(FaultSet("kills", subject, "URL, fresh", CRASHES, partial(_crash_upload, subject, 2, "flat")))
    for subject in _LIKE_OURS:
        found += [_crash_set("kills", subject, case) for case in _CASES]
        found += [
            _crash_set("kills", subject, "existing", operation)
            for operation in ("thread", "process", "training", "rank 1 of 2")
        ]
    found += [_crash_set("kills", "a tree of files", case, "tree") for case in _CASES]
    found += [_crash_set("kills", "dcp.save by our writer", case, "storage writer") for case in _CASES]
    return found


def _change_sets(threat: str, without: Collection[str] = ()) -> list[FaultSet]:
    """Rows of the operations of one process."""
    return [
        _crash_set(threat, subject, case, operation)
        for subject in _OURS
        for operation, cases in OPERATIONS.items()
        if OF_ONE_FORMAT.get(operation, subject) == subject and operation not in without
        for case in cases
    ]


def _stock(threat: str) -> list[FaultSet]:
    return [_crash_set(threat, saver, case, saver) for saver in _SAVERS for case in _CASES]


def _full_disks() -> list[FaultSet]:
    ours = [(subject, way) for subject in _OURS for way in ("foreground", "thread", "process")]
    found = []
    for subject, way in (*ours, *((saver, saver) for saver in _SAVERS)):
        for what in ("pages", "inodes"):
            for case in _CASES:
                name = ", ".join([*([way] if way in ("thread", "process") else []), f"{what}, {case}"])
                found.append(FaultSet("disks", subject, name, DISKS, partial(_fill_disk, subject, what, case, way)))
    return found


def _lost_ranks() -> list[FaultSet]:
    found = []
    for subject in _OURS:
        cases = {
            **{f"{how} in each step": each for how, each in EACH_STEP.items()},
            "each rank, each store": EVERY_RANK,
        }
        found += [
            FaultSet("ranks", subject, case, RANKS, partial(_lose_ranks, subject, each)) for case, each in cases.items()
        ]
        found += [
            FaultSet("ranks", subject, name, RANKS, partial(_hold_disk, subject, victim, world, seconds))
            for name, victim, world, seconds in (
                ("a call of rank 0 of 2 takes 1 s", 0, 2, 1.0),
                ("a call of rank 0 of 2 takes 6 s", 0, 2, 6.0),
                ("a call of rank 1 of 3 takes 6 s", 1, 3, 6.0),
            )
        ]
    return found


def list_sets() -> list[FaultSet]:
    """Every row of the report, in its order."""
    return [
        *_kills(),
        *_stock("kills"),
        *(
            _crash_set("io", subject, case, way)
            for subject in _OURS
            for way in ("foreground", "thread", "process")
            for case in _CASES
        ),
        *(_crash_set("io", subject, case) for subject in _LIKE_OURS for case in _CASES),
        *_change_sets("io"),
        *(
            _crash_set("io", subject, "existing", way)
            for subject in _OURS
            for way in ("rank 1 of 2", "copies of local checkpoints")
        ),
        *_stock("io"),
        *_full_disks(),
        *(
            _crash_set("power", subject, case, way)
            for subject in _OURS
            for way in ("foreground", "thread", "process")
            for case in _CASES
        ),
        *(_crash_set("power", subject, case) for subject in _LIKE_OURS for case in _CASES),
        *_change_sets("power", UNSYNCED),
        *_stock("power"),
        *(
            FaultSet("damage", subject, case, DAMAGE, partial(_damage, subject, case))
            for subject in ("torch_dist", "ep", "safetensors", *_SAVERS)
            for case in ("headers", "payload", "files")
            if subject not in _SAVERS or case != "headers"
        ),
        *_lost_ranks(),
        *(
            FaultSet("hostile", subject, "every file", HOSTILE, partial(_fuzz, subject))
            for subject in ("torch_dist", "ep", "safetensors", _IN_PARTS, *LIBRARIES)
        ),
        *(
            FaultSet("stores", "S3", f"{name}{fault}", STORES, partial(_fail_requests, fault, case))
            for name, case in (("", "new"), ("overwrite, ", "overwrite"))
            for fault in (*KILLS, *FAULTS)
        ),
        *(
            FaultSet("use", subject, case, USE, partial(_soak, subject, *arguments))
            for subject in _OURS
            for case, arguments in (("200 saves of one process", ("0", "200")), ("2 minutes of kills", ("2", "0")))
        ),
        FaultSet("use", "torch_dist", "30 minutes of kills", USE, partial(_soak, "torch_dist", "30", "1000")),
        *(
            FaultSet("chaos", program, f"{ranks} rank{'s' * (ranks > 1)}", CHAOS, partial(_run_chaos, program, ranks))
            for program in (*OURS, *THEIRS)
            for ranks in (1, 2)
        ),
        *(
            FaultSet("mutations", each.file, f"{each.what}: `{each.test}`", MUTATIONS, partial(_mutate, each))
            for each in _MUTATIONS
        ),
    ]
