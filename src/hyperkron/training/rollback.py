"""A step that can be undone: everything it may change, kept from before it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hyperkron.algorithms import State
from hyperkron.optimizers import LevelOptimizer, load_scaler
from hyperkron.solution import NonFiniteError
from hyperkron.training.randomness import random_state, set_random_state


class TrainingSnapshot:
    """θ with buffers, λ, optimizers, schedules and the memories of algorithm and hypergradient, as they are now.

    It costs a copy of θ, λ and what optimizers and algorithm keep; factors and inverses are shared, not copied.
    """

    def __init__(self, state: State) -> None:
        self.step = state.step
        self._state, self._random = state, random_state()
        self._saved = state.state_dict(copy_caches=False)

    def restore(self, *, random: bool) -> None:
        """Put all of it back; the random states only with ``random``, as for trying the same step again.

        A gradient scaler keeps what it has learnt, or it would overflow again.
        """
        scaler = self._state.inner.scaler
        learnt = None if scaler is None else scaler.state_dict()
        self._state.load_state_dict(self._saved)
        for level_optimizer in _level_optimizers(self._state):
            level_optimizer.optimizer.zero_grad(set_to_none=True)
        if scaler is not None and learnt is not None:
            load_scaler(scaler, learnt)
        if random:
            set_random_state(self._random)


def refuse_non_finite(state: State) -> None:
    """Raise for a NaN or an infinity that a step has left behind; one copy to the host for each device."""
    tensors = dict(_left_behind(state))
    by_device: dict[torch.device, list[Tensor]] = {}
    for x in tensors.values():
        by_device.setdefault(x.device, []).append(x)
    largest = [torch.stack(torch._foreach_norm(found, float("inf"))).isfinite().all() for found in by_device.values()]
    if all(bool(good) for good in largest):
        return
    bad = [name for name, x in tensors.items() if not bool(torch.isfinite(x).all())]
    if bad:
        raise NonFiniteError(
            f"step {state.step - 1} left nan or infinite values in {', '.join(bad[:5])}; lower the step sizes, clip "
            "with Updates(optimizer, clip=1.0), or look for extreme values in the batches."
        )


def _level_optimizers(state: State) -> Iterator[LevelOptimizer]:
    yield from (state.inner, state.outer, *state.twins.values())


def _left_behind(state: State) -> Iterator[tuple[str, Tensor]]:
    for level, level_optimizer in (("θ", state.inner), ("λ", state.outer), *state.twins.items()):
        for name, p in level_optimizer.params.items():
            yield from _floating(f"{level} {name}", p)
            for key, x in level_optimizer.optimizer.state.get(p, {}).items():
                yield from _floating(f"{level} {name} ({key} of the optimizer)", x)
    for key, tree in state.trees.items():
        for name, x in tree.items():
            yield from _floating(f"{key} {name}", x)
    for name, x in state.model.named_buffers():
        yield from _floating(f"buffer {name}", x)


def _floating(name: str, x: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(x, Tensor) and x.is_floating_point() and x.numel() and x.dim():
        yield name, x.detach()
