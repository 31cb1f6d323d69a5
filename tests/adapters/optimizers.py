"""Every optimizer that a job may use: torch's, torchao's and those of packages of PyPI, found in the packages.

A package of PyPI is imported from the site ``optimizers`` of ``.ci/sites.txt``; one that is not installed has none.
What an optimizer needs beside the groups of parameters, and why one cannot run here at all, stands in two tables.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import pkgutil
import random
import sys
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

#: Where optimizers are, and whether the site has to be installed for it.
PACKAGES = {
    "torch.optim": False,
    "torchao.optim": False,
    "adabelief_pytorch": True,
    "adam_atan2_pytorch": True,
    "adamw_bf16": True,
    "adan_pytorch": True,
    "adv_optm": True,
    "bitsandbytes.optim": True,
    "apollo_torch": True,
    "came_pytorch": True,
    "dadaptation": True,
    "dog": True,
    "galore_torch": True,
    "grokadamw": True,
    "heavyball": True,
    "ivon": True,
    "lion_pytorch": True,
    "madgrad": True,
    "muon": True,
    "optimi": True,
    "prodigyopt": True,
    "prodigyplus": True,
    "pytorch_optimizer": True,
    "schedulefree": True,
    "torch_optimizer": True,
}
#: The site in ``.ci/sites.txt``.
SITE = "optimizers"


class Model(nn.Module):
    """Matrices, vectors and a tied embedding.

    Args:
        width: Of the vectors between layers.
        tied: Whether the last layer has the embedding's weight; else the embedding has sparse gradients.
    """

    def __init__(self, width: int = 8, *, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, width, sparse=not tied)
        self.up = nn.Linear(width, 2 * width)
        self.norm = nn.LayerNorm(2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, 16, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, number: int) -> torch.Tensor:
        """Return the loss on a batch, which its number makes."""
        tokens = (torch.arange(12) * (number + 3) + number) % 16
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.norm(self.up(x))))
        return nn.functional.cross_entropy(self.head(x).float(), (tokens * 5 + 1) % 16)


def train_plain(model: Model, optimizer: Any, number: int) -> None:
    """Take a step as most optimizers do."""
    optimizer.zero_grad()
    model(number).backward()
    optimizer.step()


def train_with_graph(model: Model, optimizer: Any, number: int) -> None:
    """Take a step of an optimizer that differentiates gradients."""
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the cycle, which the next zero_grad breaks
        model(number).backward(create_graph=True)
    optimizer.step()
    optimizer.zero_grad()


def _make_closure(model: Model, optimizer: Any, number: int) -> Callable[[], torch.Tensor]:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = model(number)
            loss.backward()
        return loss

    return closure


def train_by_closure(model: Model, optimizer: Any, number: int) -> None:
    """Take a step of an optimizer that computes the gradients itself."""
    optimizer.step(_make_closure(model, optimizer, number))


def train_twice(model: Model, optimizer: Any, number: int) -> None:
    """Take a step of an optimizer that wants gradients, and computes them once more."""
    closure = _make_closure(model, optimizer, number)
    closure()
    optimizer.step(closure)


def train_sampled(model: Model, optimizer: Any, number: int) -> None:
    """Take a step of an optimizer that draws the weights by which gradients are computed."""
    with optimizer.sampled_params(train=True):
        optimizer.zero_grad()
        model(number).backward()
    optimizer.step()


def train_in_backward(model: Model, optimizer: Any, number: int) -> None:
    """Take a step of an optimizer that changes the weights while gradients are computed."""
    optimizer.fused_backward(model(number), optimizer.param_groups[0]["lr"])


class Needs(NamedTuple):
    """What an optimizer needs beside its groups.

    Attributes:
        make: Makes it of the class, the model and the groups; by default of the groups alone.
        train: Takes a step.
        option: The option in which groups may differ; without one it takes one group.
        only: Which parameters it takes.
        width: Of the model.
        tied: Whether the model is tied.
        options: Options of the constructor.
    """

    make: Callable[[Any, Model, list[dict[str, Any]]], Any] | None = None
    train: Callable[[Model, Any, int], None] = train_plain
    option: str | None = "lr"
    only: Callable[[str, torch.Tensor], bool] = lambda name, param: True
    width: int = 8
    tied: bool = True
    options: dict[str, Any] = {}  # noqa: RUF012 nobody changes it


def _is_matrix(param: torch.Tensor) -> bool:
    return param.ndim == 2


def _over_adamw(cls: Any, model: Model, groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer that wraps another."""
    return cls(torch.optim.AdamW(groups, lr=0.01))


def _of_model(**options: Any) -> Any:
    """Return how to make an optimizer that takes the model."""
    return lambda cls, model, groups: cls(model, **options)


def _split(groups: list[dict[str, Any]]) -> Iterator[tuple[bool, dict[str, Any]]]:
    """Yield the groups of matrices, and those of other parameters."""
    for group in groups:
        for chosen in (True, False):
            params = [param for param in group["params"] if _is_matrix(param) == chosen]
            if params:
                yield chosen, {**group, "params": params}


def _for_muon(cls: Any, model: Model, groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer whose groups say whether they are for Muon."""
    return cls([{**group, "use_muon": chosen} for chosen, group in _split(groups)])


_LOWRANK = {"rank": 2, "update_proj_gap": 2, "scale": 1.0, "proj_type": "std"}


def _low_rank(more: dict[str, Any] | None = None, **options: Any) -> Needs:
    """Return what an optimizer needs whose groups say the rank of gradients."""
    low = {**_LOWRANK, **(more or {})}

    def make(cls: Any, model: Model, groups: list[dict[str, Any]]) -> Any:
        found = [{**group, **(low if chosen else {})} for chosen, group in _split(groups)]
        return cls(found, lr=0.01, **options)

    return Needs(make)


def train_conflicting(model: Model, optimizer: Any, number: int) -> None:
    """Take a step of an optimizer that projects the gradients of several losses."""
    optimizer.zero_grad()
    optimizer.pc_backward([model(number), model(number + 20)])
    optimizer.step()


def train_scaled(model: Model, optimizer: Any, number: int) -> None:
    """Take a step of an optimizer that scales the loss."""
    optimizer.zero_grad()
    optimizer.backward(model(number))
    optimizer.step()


def _muon_with_adam(cls: Any, model: Model, groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer whose groups say whether they are for Muon, and their learning rate."""
    return cls([{"lr": 0.01, **group, "use_muon": chosen} for chosen, group in _split(groups)])


def _matrices_first(**options: Any) -> Any:
    """Return how to make an optimizer of matrices and of other parameters."""

    def make(cls: Any, model: Model, groups: list[dict[str, Any]]) -> Any:
        params = groups[0]["params"]
        return cls([*filter(_is_matrix, params)], [each for each in params if not _is_matrix(each)], **options)

    return make


def _gsam(cls: Any, model: Model, groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer with a scheduler of its radius."""
    from pytorch_optimizer.lr_scheduler import ProportionScheduler

    base = torch.optim.AdamW(groups, lr=0.01)
    schedule = ProportionScheduler(torch.optim.lr_scheduler.ConstantLR(base), max_lr=0.01, max_value=0.1, min_value=0.1)
    return cls(groups, base_optimizer=base, model=model, rho_scheduler=schedule)


def train_gsam(model: Model, optimizer: Any, number: int) -> None:
    """Take a step of an optimizer that is given the loss and the batch."""
    optimizer.set_closure(lambda loss, target: loss, number, None)
    optimizer.step()


def _sam_of_heavyball(cls: Any, model: Model, groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer that wraps one with modes, which it asks for."""
    import heavyball

    return cls(groups, heavyball.SFAdamW)


def _split_of_heavyball(cls: Any, model: Model, groups: list[dict[str, Any]]) -> Any:
    """Make an optimizer of several."""
    import heavyball

    params = groups[0]["params"]
    others = [each for each in params if not _is_matrix(each)]
    parts = [([*filter(_is_matrix, params)], heavyball.Muon), (others, heavyball.AdamW)]
    return cls([{"params": each, "optimizer": optimizer} for each, optimizer in parts])


_COPIES = Needs(option="weight_decay")  # its groups must have one learning rate
_PYTORCH_OPTIMIZER = {
    **dict.fromkeys(("Lookahead", "OrthoGrad", "TRAC", "ScheduleFreeWrapper"), Needs(_over_adamw)),
    "Magma": Needs(_over_adamw),
    "PCGrad": Needs(_over_adamw, train_conflicting),
    "SafeFP16Optimizer": Needs(_over_adamw, train_scaled, None),
    **dict.fromkeys(
        ("SAM", "LookSAM", "FriendlySAM"),
        Needs(lambda cls, model, groups: cls(groups, torch.optim.AdamW, lr=0.01), train_twice),
    ),
    "WSAM": Needs(lambda cls, model, groups: cls(model, groups, torch.optim.AdamW, lr=0.01), train_twice),
    "BSAM": Needs(lambda cls, model, groups: cls(groups, num_data=12), train_twice),
    "LOMO": Needs(_of_model(), train_in_backward, None),
    "AdaLOMO": Needs(_of_model(), train_in_backward, None),
    "AdamMini": Needs(_of_model(num_embeds=8, num_heads=2), option=None),
    **dict.fromkeys(("AdaHessian", "SophiaH"), Needs(train=train_with_graph)),
    "AliG": Needs(lambda cls, model, groups: cls(groups, max_lr=0.1), train_by_closure, "max_lr"),
    **dict.fromkeys(("AdaMuon", "AdaGO", "Muon", "MuonClip", "NorMuon"), Needs(_for_muon)),
    "GSAM": Needs(_gsam, train_gsam),
    "SpectralSphere": Needs(only=lambda name, param: _is_matrix(param)),
    "Ranger21": Needs(options={"num_iterations": 100}),
    **dict.fromkeys((*(f"DAdapt{name}" for name in ("AdaGrad", "Adam", "Adan", "Lion", "SGD")), "Prodigy"), _COPIES),
}

NEEDS: dict[str, Needs] = {
    "torch.optim.LBFGS": Needs(train=train_by_closure, option=None),
    "torch.optim.SparseAdam": Needs(only=lambda name, param: name == "embedding.weight", tied=False),
    "torch.optim.Muon": Needs(only=lambda name, param: _is_matrix(param)),
    **{f"pytorch_optimizer.{name}": needs for name, needs in _PYTORCH_OPTIMIZER.items()},
    "adam_atan2_pytorch.MuonAdamAtan2": Needs(_matrices_first(remove_muon_params_from_params=False), option=None),
    "adam_atan2_pytorch.PolarAdamAtan2": Needs(_matrices_first(remove_polar_params_from_params=False), option=None),
    "apollo_torch.APOLLOAdamW": _low_rank({"proj": "random", "scale_type": "channel"}),
    **{f"dadaptation.DAdapt{name}": _COPIES for name in ("Adam", "Adan", "SGD")},
    "dadaptation.DAdaptAdaGrad": Needs(option="weight_decay", options={"eps": 1e-6}),
    **{f"{package}.GaLoreAdamW": _low_rank() for package in ("galore_torch", "apollo_torch")},
    **{f"{package}.GaLoreAdafactor": _low_rank(relative_step=False) for package in ("galore_torch", "apollo_torch")},
    "heavyball.PSGDLRA": Needs(lambda cls, model, groups: cls(groups[0]["params"]), option=None),
    "heavyball.SAMWrapper": Needs(_sam_of_heavyball, train_by_closure),
    "heavyball.SplitOpt": Needs(_split_of_heavyball, option=None),
    "ivon.IVON": Needs(train=train_sampled, options={"ess": 100.0}),
    "muon.SingleDeviceMuon": Needs(only=lambda name, param: _is_matrix(param)),
    "muon.SingleDeviceMuonWithAuxAdam": Needs(_muon_with_adam),
    "prodigyopt.Prodigy": _COPIES,
    "prodigyplus.ProdigyPlusScheduleFree": _COPIES,
    **{
        f"schedulefree.{name}Closure": Needs(train=train_by_closure)
        for name in ("AdamWScheduleFree", "RAdamScheduleFree", "SGDScheduleFree")
    },
    "schedulefree.ScheduleFreeWrapper": Needs(_over_adamw),
    "schedulefree.ScheduleFreeWrapperReference": Needs(_over_adamw),
    "torch_optimizer.Adahessian": Needs(train=train_with_graph),
}
for _name in ("SGD", "SGD8bit", "SGD32bit", "LARS", "LARS8bit", "LARS32bit", "PytorchLARS"):
    NEEDS[f"bitsandbytes.optim.{_name}"] = Needs(width=64, options={"momentum": 0.9})
#: What all of a package need; states of fewer than 4,096 values are not quantized.
NEEDS_OF_PACKAGES = {"torchao.optim": Needs(width=64), "bitsandbytes.optim": Needs(width=64)}
#: Why an optimizer cannot run here at all.
SKIPPED: dict[str, str] = {
    "torchao.optim.CPUOffloadOptimizer": "needs an accelerator",
    "apollo_torch.GaLoreAdamW8bit": "needs an accelerator",
    "apollo_torch.QAPOLLOAdamW": "needs an accelerator",
    "galore_torch.GaLoreAdamW8bit": "needs an accelerator",
    "heavyball.PSGDBase": "a base class",
    "heavyball.SOAPBase": "a base class",
    "muon.Muon": "needs a process group",
    "muon.MuonWithAuxAdam": "needs a process group",
    "prodigyplus.CoreOptimiser": "a base class",
    "pytorch_optimizer.DeMo": "needs a process group",
    "pytorch_optimizer.DistributedMuon": "needs a process group",
    "torch_optimizer.Lookahead": "its state_dict() fails on any torch that is supported",
}


#: Classes of the values in the state, by the package: a load has to allow them.
CLASSES = {
    "apollo_torch": ("svd_projector.GaLoreProjector", "random_projector.GradientProjector"),
    "galore_torch": ("galore_projector.GaLoreProjector",),
    "pytorch_optimizer": (
        "optimizer.scion.LMONorm",
        "optimizer.utils.galore.GaLoreProjector",
        "optimizer.utils.graft.SGDGraft",
        "optimizer.utils.partition.PreConditionerType",
        "optimizer.utils.preconditioner.PreConditioner",
    ),
}


class Entry(NamedTuple):
    """An optimizer.

    Attributes:
        name: Its package and its class.
        cls: The class.
        needs: What it needs.
    """

    name: str
    cls: Any
    needs: Needs

    def make(self, model: Model, groups: list[dict[str, Any]]) -> Any:
        """Return an optimizer of some groups of a model's parameters."""
        options = dict(self.needs.options)
        if "lr" in inspect.signature(self.cls).parameters and self.needs.make is None:
            options.setdefault("lr", self.get_lr())
        return (self.needs.make or _make_of_groups)(functools.partial(self.cls, **options), model, groups)

    def list_classes(self) -> list[Any]:
        """Return the classes that its state may have."""
        package = self.name.partition(".")[0]
        return [pkgutil.resolve_name(f"{package}.{name}") for name in CLASSES.get(package, ())]

    def get_lr(self) -> float:
        """Return the learning rate that is the class's default, or a usual one."""
        found = inspect.signature(self.cls).parameters.get("lr")
        default = found.default if found else None
        return float(default) if isinstance(default, (int, float)) and default else 0.01


def _make_of_groups(cls: Any, model: Model, groups: list[dict[str, Any]]) -> Any:
    return cls(groups)


@contextlib.contextmanager
def use_site(site: str | None) -> Iterator[None]:
    """Let packages of the site be imported."""
    if site is None:
        yield
        return
    sys.path.append(site)
    try:
        yield
    finally:
        sys.path.remove(site)


def find_optimizers(site: str | None, packages: Sequence[str] = ()) -> tuple[list[Entry], dict[str, str]]:
    """Return all optimizers of packages that are installed, and why others are not there.

    Args:
        site: The folder with packages of PyPI; without it they are left out.
        packages: Only these.
    """
    entries: dict[Any, Entry] = {}
    absent = dict(SKIPPED)
    for package, foreign in PACKAGES.items():
        if (packages and package not in packages) or (foreign and site is None):
            continue
        with warnings.catch_warnings(), use_site(site if foreign else None):
            warnings.simplefilter("ignore")
            try:
                module = importlib.import_module(package)
            except Exception as error:  # noqa: BLE001 a package may raise anything
                absent[package] = f"cannot be imported: {type(error).__name__}: {error}"
                continue
        for name, cls in sorted(vars(module).items()):
            full = f"{package}.{name}"
            is_optimizer = isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
            if not is_optimizer or cls is torch.optim.Optimizer or name.startswith("_") or full in SKIPPED:
                continue
            if foreign and cls.__module__.startswith("torch."):
                continue  # a package's own names for torch's
            needs = NEEDS.get(full) or NEEDS_OF_PACKAGES.get(package, Needs())
            entries.setdefault(cls, Entry(full, cls, needs))
    return [*entries.values()], absent


def seed(number: int) -> None:
    """Make the random numbers of a step the same in each run."""
    random.seed(number)
    torch.manual_seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number)
