"""Every verb and every kind of name that matches nothing: an error with the nearest right one, and nothing is done."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING

import pytest
import torch

from shardckpt import dist_checkpointing as dc
from shardckpt.cli import _VERBS, main
from shardckpt.manager import pin_step
from shardckpt.manifest.names import CONTENT_KEY
from shardckpt.mapping import ShardedTensor
from tests.tables import table

if TYPE_CHECKING:
    from pathlib import Path

#: A call with a wrong name, and what the error must say.
ROWS = [
    # verbs and options
    ("verfy runs", "did you mean verify?"),
    ("rmeove runs model.", "did you mean remove?"),
    ("purne runs", "did you mean prune?"),
    # no verb that removes is advised for another word
    *((f"{word} runs", f"there is no verb {word!r} (verbs: ") for word in ("resume", "rename", "run", "restore")),
    ("--json ls runs", "options of a verb stand behind it: shardckpt ls runs --json"),
    ("ls runs --jsno", "did you mean --json?"),
    ("inspect runs/step-1 --treee", "did you mean --tree?"),
    ("diff runs/step-1 runs/step-2 --rtoll=1", "did you mean --rtol?"),
    ("verify runs --marked", "did you mean --mark?"),
    ("export runs/step-1 new --asets x", "did you mean --assets?"),
    ("convert runs/step-1 new --prefx model.", "did you mean --prefix?"),
    ("merge runs/step-1 runs/step-2 new --decays 0.9", "did you mean --decay?"),
    ("migrate runs/step-1 new --overwritten", "did you mean --overwrite?"),
    ("remove runs/step-1 model. --dryrun", "did you mean --dry-run?"),
    ("prune runs --keep-besst loss", "did you mean --keep-best?"),
    ("prune runs --keep-lates 1", "did you mean --keep-latest?"),
    ("pin runs 1 --labels x", "did you mean --label?"),
    ("strategies --jason", "options: --help"),
    ("config --jason", "did you mean --json?"),
    ("config intervl", "did you mean interval?"),
    ("demo --rank 3", "unrecognized arguments: --rank 3 ("),
    ("completion bash --shel", "options: --help"),
    # choices
    ("completion bahs", "'bash'"),
    ("inspect runs/step-1 --sort siez", "'size'"),
    ("export runs/step-1 new --format safetensor", "'safetensors'"),
    ("merge runs/step-1 runs/step-2 new --optimizer dorp", "'drop'"),
    ("merge runs/step-1 runs/step-2 new --missing available_", "'available'"),
    ("merge runs/step-1 runs/step-2 new --accumulate fp46", "'fp64'"),
    ("merge runs/step-1 runs/step-2 new --wsm csoine", "did you mean cosine?"),
    # paths
    ("ls rusn", "did you mean runs?"),
    ("inspect runs/stpe-1", "did you mean step-1?"),
    ("diff runs/step-1 runs/stpe-2", "did you mean step-2?"),
    ("diff runs/stpe-1 runs/step-2", "did you mean step-1?"),
    ("verify runs/stpe-1", "did you mean step-1?"),
    ("export runs/stpe-1 new", "did you mean step-1?"),
    ("export runs new", 'runs is a folder of 3 checkpoints: give one, such as "step-3"'),
    ("remove runs model.", 'runs is a folder of 3 checkpoints: give one, such as "step-3"'),
    ("export runs/step-1 new --assets asets", "did you mean assets?"),
    ("convert runs/stpe-1 new", "did you mean step-1?"),
    ("convert runs/step-1 new --to hf --assets asets", "did you mean assets?"),
    ("merge runs/step-1 runs/stpe-2 new", "did you mean step-2?"),
    ("migrate runs/stpe-1 new", "did you mean step-1?"),
    ("remove runs/stpe-1 model.", "did you mean step-1?"),
    ("prune rusn", "did you mean runs?"),
    ("prune rusn --keep-latest 1", "did you mean runs?"),
    ("pin rusn", "did you mean runs?"),
    ("pin rusn 1 --label x", "did you mean runs?"),
    # keys and prefixes
    ("inspect runs/step-1 modle.", "did you mean model.?"),
    ("inspect runs/step-1 model.laeyr", "did you mean model.layer.?"),
    ("inspect runs/step-1 modle. --json", "did you mean model.?"),
    ("inspect runs/step-1 modle. --tree", "did you mean model.?"),
    ("inspect runs/step-1 --tree --html page.html", "leave out --tree and --files"),
    ("inspect runs/step-1 modle. --html page.html", "did you mean model.?"),
    ("inspect runs/step-1 model.layer.wieght[]", "did you mean model.layer.weight?"),
    ("inspect runs/step-1 layer.weight[]", "did you mean model.layer.weight?"),
    ("diff runs/step-1 runs/step-2 --prefix modle.", "did you mean model.?"),
    ("export runs/step-1 new --prefix modle.", "did you mean model.?"),
    ("convert runs/step-1 new --to ep --prefix modle.", "did you mean model.?"),
    ("convert runs/step-1 new --to hf --prefix modle.", "did you mean model.?"),
    ("convert runs/step-1 new --to torch --prefix modle.", "did you mean model.?"),
    ("merge runs/step-1 runs/step-2 new --prefix modle.", "did you mean model.?"),
    ("remove runs/step-2 modle.", "did you mean model.?"),
    ("export runs/step-1 new --leave-out layer.wieght", "did you mean layer.weight?"),
    ("convert runs/step-1 new --to ep --leave-out model.layer.wieght", "did you mean model.layer.weight?"),
    ("convert runs/step-1 new --to ep --leave-out wieght", "did you mean model.layer.weight?"),
    ("convert runs/step-1 new --to torch --leave-out iteratoin", "did you mean iteration?"),
    ("merge runs/step-1 runs/step-2 new --leave-out iteratoin", "did you mean iteration?"),
    # renames
    ("inspect runs/step-1 --rename modle=net", "did you mean model?"),
    ("inspect runs/step-1 --rename model=optimizer", "the checkpoint has optimizer.state.exp_avg.layer.weight"),
    ("inspect runs/step-1 --rename model=model", "'model' is given as its own new name"),
    ("inspect runs/step-1 --rename model", "'model' is not OLD=NEW"),
    ("inspect runs/step-1 --rename model=a --rename model=b", "'model' cannot become both 'a' and 'b'"),
    ("diff runs/step-1 runs/step-2 --rename modle=net", "did you mean model?"),
    ("export runs/step-1 new --rename modle=net", "did you mean model?"),
    ("convert runs/step-1 new --rename modle=net", "did you mean model?"),
    ("convert runs/step-1 new --rename model=net --mapping megatron", "do not go together: convert twice"),
    ("convert runs/step-1 new --rename model=iteration", "the checkpoint has iteration"),
    ("merge runs/step-1 runs/step-2 new --rename modle=net", "did you mean model?"),
    # formats, dtypes, mappings
    ("convert runs/step-1 new --to torch_dits", "did you mean torch_dist?"),
    ("convert runs/step-1 new --to torhc", "did you mean torch?"),
    ("convert runs/step-1 new --to hff", "saves 'hff' (did you mean hf? installed: "),
    ("convert runs/step-1 new --to huggingface", "did you mean hf?"),
    (
        "convert runs/step-1 new --to torch_dist@9",
        "no strategy saves version 9 of 'torch_dist': installed is version 1",
    ),
    ("convert runs/step-1 new --to safetensors@2 --json", "saves version 2 of 'safetensors': installed is version 1 ("),
    ("merge runs/step-1 runs/step-2 new --to torch_dits", "torch_dist"),
    ("migrate runs/step-1 new --to torch_dits", "torch_dist"),
    ("migrate runs/step-1 new --to 9", "no installed plugin has a migration from version 1 to 9"),
    ("export runs/step-1 new --dtype flaot32", "float32"),
    ("convert runs/step-1 new --to ep --dtype flaot32", "float32"),
    ("diff runs/step-1 runs/step-2 --mapping qwen3_mo", "qwen3_moe"),
    ("export runs/step-1 new --mapping qwen3_mo", "qwen3_moe"),
    ("convert runs/step-1 new --to ep --mapping qwen3_mo", "qwen3_moe"),
    ("merge runs/step-1 runs/step-2 new --mapping qwen3_mo", "qwen3_moe"),
    # metrics, steps, labels
    ("prune runs --keep-best los", "did you mean loss? metrics: loss, ppl)"),
    ("prune runs --keep-best los --keep-latest 1", "did you mean loss?"),
    ("prune runs --keep-best loss --keep-best ppls:max:2", "did you mean ppl?"),
    ("prune runs --keep-best los --verify", "did you mean loss?"),
    ("prune runs --keep-best los --dry-run", "did you mean loss?"),
    ("prune runs --keep-best loss:mni", "METRIC[:min|max[:COUNT]]"),
    ("prune runs --keep-latest 1 --keep-step 4", "steps: 1, 2, 3)"),
    ("ls runs --metric los", "did you mean loss? metrics: loss, ppl)"),
    ("ls runs --metric ppls:max", "did you mean ppl?"),
    ("ls runs --json --metric los", "did you mean loss?"),
    ("pin runs 4 --label x", "has no step 4 (steps: 1, 2, 3)"),
    ("pin runs 1 --label relase --remove", "did you mean release?"),
    ("pin runs 2 --label release --remove", "'release' of step-1"),
    ("pin runs 4", "has no step 4 (steps: 1, 2, 3)"),
    ("pin runs 4 --remove", "has no step 4 (steps: 1, 2, 3)"),
    ("pin runs 4 --label release --remove", "has no step 4 (steps: 1, 2, 3)"),
    ("pin runs 2", "`shardckpt pin runs 2 --label 'release 1.2'`"),
    ("pin runs 2 --remove", "step-2 of runs is not pinned; pins of all steps: 'release' of step-1"),
    ("pin runs 1 --remove", "step-1 is pinned as 'release': `shardckpt pin runs 1 --remove --label release`"),
    ("pin runs 1 --remove --json", "`shardckpt pin runs 1 --remove --label release`"),
    ("pin runs lates --label x", "did you mean latest?"),
    ("pin runs/step-1 release", "runs/step-1 is a checkpoint, not a folder of steps"),
    ("pin runs/step-1 1 --label x", "runs/step-1 is a checkpoint, not a folder of steps"),
    ("pin runs/step-1 latest --label x", "runs/step-1 is a checkpoint, not a folder of steps"),
    ("pin trained 4", "has no step 4 (steps: 1)"),
    ("pin trained 1", "`shardckpt pin trained 1 --label 'release 1.2'`"),
    ("merge runs/step-1 runs/step-2 new --base 3", "there are 2 SRC"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three steps with metrics, one of them pinned; a checkpoint with a step in it; a folder of assets."""
    place = tmp_path_factory.mktemp("wrong-names")
    (place / "assets").mkdir()
    for step in (1, 2, 3):
        keys = ("model.layer.weight", "model.layer.bias", "optimizer.state.exp_avg.layer.weight")
        state = {key: ShardedTensor.from_rank_offsets(key, torch.full((2,), float(step))) for key in keys}
        content = {CONTENT_KEY: {"metrics": {"loss": 1 / step, "ppl": 2.0}}}
        path = place / "runs" / f"step-{step}"
        dc.save({**state, "iteration": step}, path, "torch_dist", content_metadata=content, step=step)
    pin_step(place / "runs", 1, "release")
    dc.save({"last": ShardedTensor.from_rank_offsets("last", torch.ones(2))}, place / "trained", "torch_dist")
    shutil.copytree(place / "runs" / "step-1", place / "trained" / "step-1")
    return place


def _list_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@table("call, said", ROWS, ids=[call for call, _ in ROWS])
def test_a_name_that_matches_nothing_is_an_error(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    call: str,
    said: str,
) -> None:
    """Exit code 2, the nearest right name, or all there are, on standard error; no file is changed, made or removed."""
    shutil.copytree(runs, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    before = _list_all(tmp_path)
    try:
        code = main(call.split())
    except SystemExit as exc:
        code = exc.code
    assert code == 2
    out, err = capsys.readouterr()
    assert said in err, err
    if "--json" in call and out:
        assert said in json.loads(out)["error"]["message"]
    else:
        assert not out, "an error is the only answer"
    assert _list_all(tmp_path) == before
    assert {path.name for path in (tmp_path / "place").iterdir()} == {"assets", "runs", "trained"}


@pytest.mark.parametrize(
    ("verb", "ours"),
    [
        *[("rm", "prune, of steps and of leftovers of killed saves, or remove, of keys in a checkpoint")],
        *[("gc", "prune"), ("cp", "convert"), ("list", "ls"), ("show", "inspect"), ("compare", "diff")],
        *[("best", "ls, which shows the best step, or inspect FOLDER/best"), ("check", "verify"), ("prun", "prune")],
        ("repair", "verify --repair"),
    ],
)
def test_the_verbs_of_other_commands_name_ours(verb: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What other commands call it is no typing error of ours, and the error names the verb all the same."""
    with pytest.raises(SystemExit):
        main([verb, "runs"])
    assert f"there is no verb '{verb}' (did you mean {ours}? verbs: completion, config, " in capsys.readouterr().err


def test_an_error_stands_alone(runs: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A prefix of no key is said once: no warning says the same before the error."""
    assert main(["remove", str(runs / "runs" / "step-2"), "modle."]) == 2
    assert not caplog.records


def test_each_verb_has_rows() -> None:
    """No verb is left out of the sweep."""
    assert {call.split()[0] for call, _ in ROWS} >= {*_VERBS}


def test_right_names_are_taken(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names that the errors give work: the sweep refuses no more than wrong ones."""
    shutil.copytree(runs, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    for call in (
        "inspect runs/step-1 model.",
        "inspect runs/step-1 model.layer.weight[]",
        "convert runs/step-1 new --to ep --prefix model.",
        "export runs/step-1 hf --leave-out layer.weight",
        "convert runs/step-1 few --to torch --leave-out optimizer.",
        "pin runs 1 --label release --remove",
        "prune runs --keep-best loss --keep-step 1",
    ):
        assert main(call.split()) == 0, (call, capsys.readouterr().err)
    assert "optimizer" not in {key.partition(".")[0] for key in torch.load("few")}
    assert {path.name for path in (tmp_path / "place" / "runs").iterdir()} == {"step-1", "step-3"}


def test_an_optional_argument_may_stand_behind_options(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``inspect DIR --stats PREFIX`` and ``pin FOLDER --remove STEP``, which argparse refuses before Python 3.13."""
    step = str(runs / "runs" / "step-1")
    assert main(["inspect", step, "--stats", "model.", "--json"]) == 0
    assert {each["key"][:6] for each in json.loads(capsys.readouterr().out)["tensors"]} == {"model."}
    pin_step(runs / "runs", 1, "order")
    assert main(["pin", str(runs / "runs"), "--remove", "1", "--label", "order"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["inspect", step, "--stats", "model.", "optimizer."])
    assert "unrecognized arguments: optimizer." in capsys.readouterr().err
