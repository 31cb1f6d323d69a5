"""The private names of torch that the core uses, each with its reason; ``compat`` and ``archive`` have their own.

``adapters`` read the hooks and children of modules themselves, since a model may have 20,000 tensors.
"""

from __future__ import annotations

import re
import threading
from contextlib import contextmanager
from dataclasses import replace
from inspect import isfunction
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils import _pytree

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType
    from typing import TypeGuard


#: The oldest torch that trains with FSDP2 on the CPU and cuts uneven ``_StridedShard`` placements as FSDP2 does. 2.6
#: fails there; 2.7 and 2.8 sum gradients that they should average (their gloo takes ReduceOp.AVG in a reduce-scatter
#: for SUM); 2.9 cuts otherwise. ``pyproject.toml`` has the same number.
OLDEST_TORCH = (2, 10)


def check_torch(version: str) -> None:
    """Raise ImportError if a release of torch is older than :data:`OLDEST_TORCH`."""
    # major and minor alone: 2.10.0a0+... of a vendor's container is a 2.10
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers and tuple(map(int, numbers.groups())) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(
            f"shardckpt needs torch {oldest} or newer, and found torch {version} in {torch.__path__[0]}: "
            f"run `pip install 'torch>={oldest}'` in this environment"
        )


# Here, because every module that saves or loads imports this one.
check_torch(torch.__version__)


def _forget_default_group(module: ModuleType) -> None:
    """Replace process groups in the default arguments of a module's functions by None, which means the same to them."""
    # A module that is imported while there is a default group would keep that group alive for ever:
    # destroy_process_group would not end its threads, and they would abort the interpreter at its exit.

    def drop_group(default: Any) -> Any:
        return None if isinstance(default, dist.ProcessGroup) else default

    for function in filter(isfunction, vars(module).values()):
        if function.__defaults__:
            function.__defaults__ = tuple(map(drop_group, function.__defaults__))
        if function.__kwdefaults__:
            function.__kwdefaults__ = {name: drop_group(value) for name, value in function.__kwdefaults__.items()}


if dist.is_available():
    # The only module with such defaults that this package, torch.distributed.checkpoint, FSDP and torch._dynamo import.
    # Corrected as soon as a module of ours that imports any of them is imported, whoever has imported it first.
    import torch.distributed.nn.functional

    _forget_default_group(torch.distributed.nn.functional)


def group_timeout(group: Any) -> dt.timedelta:
    """Return the timeout of a group's collectives, for a gloo group of the same ranks; torch does not publish it."""
    backend = group._get_backend(group._device_types[0])  # noqa: SLF001
    return backend.options._timeout  # type: ignore[no-any-return]  # noqa: SLF001


def group_store(group: Any, prefix: str) -> Any:
    """Return the store through which a group's ranks met, with a prefix for the caller's keys.

    A ValueError if the group was destroyed.
    """
    try:
        _, store = dist.distributed_c10d._world.pg_map[group]  # noqa: SLF001
    except KeyError:
        raise ValueError("the process group was destroyed") from None
    return dist.PrefixStore(prefix, store)


def split_factor(placement: Any) -> int | None:
    """Return the ``split_factor`` of a ``_StridedShard`` (FSDP2 over tensor parallelism); None for other placements."""
    # a subclass of Shard in some releases of torch: no public name distinguishes it
    from torch.distributed.tensor.placement_types import _StridedShard

    return int(placement.split_factor) if isinstance(placement, _StridedShard) else None


def is_sharded_tensor(value: object) -> TypeGuard[Any]:
    """Return whether the value is a ShardedTensor of torch's, as FSDP1 makes them: the class has no public name."""
    if not any(kind.__module__.startswith("torch.distributed._shard") for kind in type(value).__mro__):
        return False  # checked first, because it does not import the module
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    return isinstance(value, ShardedTensor)


def move_placement(placement: Any, dim: int) -> Any:
    """Return the placement along another axis: a Shard, or a ``_StridedShard`` of the same factor."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    factor = split_factor(placement)
    return Shard(dim) if factor is None else _StridedShard(dim, split_factor=factor)


def empty_sharded_tensor_like(value: Any, dtype: torch.dtype) -> Any:
    """Return an uninitialised ShardedTensor with the same shards, group and devices, and another dtype."""
    metadata = value.metadata()
    properties = replace(metadata.tensor_properties, dtype=dtype, requires_grad=False, pin_memory=False)
    shards = [type(shard)(_empty_shard(shard.tensor, dtype), shard.metadata) for shard in value.local_shards()]
    return type(value)._init_from_local_shards_and_global_metadata(  # noqa: SLF001
        shards,
        sharded_tensor_metadata=replace(metadata, tensor_properties=properties),
        process_group=value._process_group,  # noqa: SLF001
    )


def new_wrapper(kind: Any, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    """Return a contiguous CPU tensor of a subclass, without memory of its own: torch has no public way."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=dtype, device=torch.device("cpu"))  # noqa: SLF001


def map_arguments(kind: type[Any], function: Callable[[Any], Any], arguments: Any) -> Any:
    """Return an operator's nested arguments with ``function`` applied to those of a class; torch has no public way."""
    return _pytree.tree_map_only(kind, function, arguments)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each source into the target of the same shape, in one call: for a few KiB the calls dominate the cost."""
    with torch.inference_mode():  # neither gradients nor tangents
        torch._foreach_copy_(targets, sources)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Take a step of an optimizer without the hooks that its user has registered: torch has no public way."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # torch has wrapped the class's step in a function that runs the hooks
        step = getattr(step, "__wrapped__", step)
    step(optimizer, closure=None)


def find_wrapped_child(kind: type[Any]) -> str:
    """Return the name of the child that a class of modules wraps and that torch leaves out of full names; "" if none.

    Wrappers are DDP's, FSDP1's, torch.compile's and activation checkpoints'.
    """
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.nn.parallel import DistributedDataParallel

    if issubclass(kind, DistributedDataParallel):
        return "module"
    if issubclass(kind, FullyShardedDataParallel):
        return "_fsdp_wrapped_module"
    if issubclass(kind, ActivationWrapper):
        return "_checkpoint_wrapped_module"
    # by its name: its module takes seconds to import, and nothing is compiled before it is imported
    compiled = ("torch._dynamo.eval_frame", "OptimizedModule")
    return "_orig_mod" if any((base.__module__, base.__qualname__) == compiled for base in kind.__mro__) else ""


def is_wrapper_save_hook(hook: object) -> bool:
    """Return whether a state dict hook belongs to activation checkpoints, which removes their names from the keys."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

    return hook is ActivationWrapper._post_state_dict_hook  # noqa: SLF001


def is_wrapper_load_hook(hook: object) -> bool:
    """Return whether a load hook belongs to activation checkpoints, which adds their names to the keys."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

    return hook == ActivationWrapper._pre_load_state_dict_hook  # noqa: SLF001


def is_fsdp2_hook(hook: object) -> bool:
    """Return whether a state dict pre-hook is FSDP2's, which puts the sharded parameters into the modules."""
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp._fully_shard.")


def read_local_tensor(dtensor: Any) -> torch.Tensor:
    """Return the local tensor of a DTensor as it is: ``to_local`` makes a new view of a parameter's."""
    return dtensor._local_tensor  # type: ignore[no-any-return]  # noqa: SLF001


def read_local_tensors(dtensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return the local tensor of each DTensor, as :func:`read_local_tensor` does, in one loop in C."""
    return list(map(attrgetter("_local_tensor"), dtensors))


def read_specs(dtensors: Iterable[Any]) -> list[Any]:
    """Return each DTensor's mesh, placements, shape and dtype; torch replaces it when one of them changes."""
    return list(map(attrgetter("_spec"), dtensors))


#: Held by :func:`one_thread` while it changes torch's number of threads: a thread that asks for its own meanwhile, for
#: the first time, would get this one.
_THREAD_COUNT_LOCK = threading.Lock()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on the calling thread alone in this block; other threads keep their numbers of threads.

    For a pool whose threads all call torch: each would have OpenMP threads of its own, more in all than there are
    cores, and each call would wait for the slowest of them.
    """
    with _THREAD_COUNT_LOCK:
        # torch has a number for each thread, and one for all, which a thread copies when it first needs its own: this
        # call makes the copy, which in the block would replace the 1
        number = torch.get_num_threads()
        if number > 1:
            torch.set_num_threads(1)
            # the number for all is 1, too, now: a call on a thread that ends at once restores it, and leaves this
            # thread's own
            restoring = threading.Thread(target=torch.set_num_threads, args=(number,), name="shardckpt-threads")
            try:
                restoring.start()
                restoring.join()
            except RuntimeError:  # no more threads can be started: so there is no pool, either
                torch.set_num_threads(number)
    try:
        yield
    finally:
        if number > 1:
            with _THREAD_COUNT_LOCK:
                torch.set_num_threads(number)


def _empty_shard(tensor: Any, dtype: torch.dtype) -> Any:
    if is_sharded_tensor(tensor):
        return empty_sharded_tensor_like(tensor, dtype)
    return tensor.detach().new_empty(tensor.shape, dtype=dtype)
