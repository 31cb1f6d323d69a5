"""The weights of several checkpoints of one training in their merge."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointingException, name_known
from shardckpt.validation.arguments import check_annotated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

#: Decays of the learning rate that a merge can stand for: from the part of the decay that is done, from 0 to 1, to the
#: rate that is left, from 1 to 0.
WSM_DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda part: 1 - part,
    "cosine": lambda part: (1 + math.cos(math.pi * part)) / 2,
    "1-sqrt": lambda part: 1 - math.sqrt(part),
}


def compute_ema_weights(count: int, decay: float) -> list[float]:
    """Return the weights of an exponential moving average over checkpoints, the oldest first.

    The average begins as the first checkpoint; each later one makes it ``decay * average + (1 - decay) * checkpoint``.

    Args:
        count: Number of checkpoints.
        decay: What the average keeps of itself at each checkpoint, above 0 and below 1.

    Returns:
        The weights; their sum is 1.

    Raises:
        CheckpointingException: The decay is not between 0 and 1.
    """
    check_annotated(compute_ema_weights, locals())
    if not 0 < decay < 1:
        raise CheckpointingException(f"decay {decay:g}: an EMA's decay is above 0 and below 1, such as 0.9")
    return [(1 - decay if number else 1.0) * decay ** (count - 1 - number) for number in range(count)]


def compute_wsm_weights(steps: Sequence[float], decay: str = "1-sqrt") -> list[float]:
    """Return the weights by which a merge of checkpoints of a constant learning rate stands for a decay of it.

    This is warmup-stable and merge (WSM, arXiv:2507.17634): the change of the weights between two checkpoints counts as
    much as the learning rate of the decay at that step.

    Args:
        steps: The step of each checkpoint, ascending; ``range(count)`` where they are equally far apart.
        decay: The learning rate that the merge stands for, one of :data:`WSM_DECAYS`. With ``linear``, checkpoints
            that are equally far apart weigh the same.

    Returns:
        The weights; their sum is 1.

    Raises:
        CheckpointingException: The decay is unknown, or the steps do not ascend.
    """
    check_annotated(compute_wsm_weights, locals())
    if decay not in WSM_DECAYS:
        raise CheckpointingException(f"decay={decay!r} is no decay of WSM {name_known(decay, WSM_DECAYS, 'decays')}")
    ascend = all(math.isfinite(later - earlier) and later > earlier for earlier, later in pairwise(steps))
    if len(steps) < 2 or not ascend:  # noqa: PLR2004
        raise CheckpointingException(
            f"the steps of the checkpoints are {list(steps)}: WSM merges at least two, the oldest first, of one "
            "training; give them in the order of their steps"
        )
    # The decay begins at the first checkpoint and would reach 0 one interval after the last.
    end = steps[-1] + (steps[-1] - steps[0]) / (len(steps) - 1)
    # The k-th rate is that of the update that leads from checkpoint k - 1 to k.
    rates = [WSM_DECAYS[decay]((step - steps[0]) / (end - steps[0])) for step in steps]
    return [1 - rates[1], *(now - after for now, after in zip(rates[1:], [*rates[2:], 0.0], strict=True))]


def check_weights(weights: Sequence[float], count: int) -> None:
    """Raise CheckpointingException unless the weights are of ``count`` checkpoints, and have a sum to divide by."""
    if len(weights) != count:
        raise CheckpointingException(
            f"weights {list(weights)}: there are {len(weights)} for {count} sources: give one for each"
        )
    try:
        largest = max((abs(float(weight)) for weight in weights), default=0.0)
        is_finite = math.isfinite(largest * len(weights)) and all(map(math.isfinite, weights))
    except (TypeError, ValueError, OverflowError):  # no numbers, or integers that no float holds
        is_finite = False
    if not is_finite or not all(isinstance(weight, (int, float)) for weight in weights):
        raise CheckpointingException(
            f"weights {list(weights)!r:.300}: weights are finite numbers whose sum a float holds. Only their ratios "
            "count: divide all by the largest"
        )
    if not have_sum(weights):
        raise CheckpointingException(f"weights {list(weights)}: weights are divided by their sum, which must not be 0")


def have_sum(weights: Sequence[float]) -> bool:
    """Return whether weights have a sum to divide by: one close to 0, compared with them, magnifies rounding."""
    return abs(math.fsum(weights)) > 1e-6 * max(map(abs, weights))
