"""The L2 penalty; its curvature is added to the damping."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.losses.base import L2, Loss
from hyperkron.sharded_functions import squared_norms
from hyperkron.sharding import is_sharded
from hyperkron.solution import HyperkronError

Coefficient = float | Tensor

SMALL = 2**18
"""Parameters of up to this many numbers are joined into one tensor, because each operation costs more than its numbers.
Larger ones are not, because the joined tensor is kept for the backward pass."""


def l2(parameters: nn.Module | Tensor | Iterable[Tensor], coefficient: Coefficient | Sequence[Coefficient]) -> Loss:
    r"""The penalty Σ_p α_p ‖p‖² (not ½α‖p‖²), which adds 2α_p to the Hessian at p.

    For a module, the trainable parameters are penalised. If none requires a gradient (as during a finite difference),
    all are, so that the penalty does not disappear.

    Args:
        parameters: a module, a tensor, or tensors.
        coefficient: α: a number; a tensor that broadcasts to each parameter and may carry a gradient to λ; or
            a list or tuple of these with one entry for each of ``parameters`` (for a module: for each of
            ``module.parameters()``, frozen ones included).

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> decay = torch.tensor(0.1, requires_grad=True)
        >>> loss = l2(model, decay)
        >>> loss.backward()
        >>> model.weight.grad, decay.grad
        (tensor([[0.2000, 0.2000]]), tensor(2.))
    """
    tensors = _tensors(parameters)
    given = coefficient if isinstance(coefficient, (list, tuple)) else [coefficient] * len(tensors)
    if len(given) != len(tensors):
        raise HyperkronError(
            f"coefficient has {len(given)} entries for {len(tensors)} parameters; give one entry "
            "per parameter (frozen ones included), or a single number."
        )
    trained = isinstance(parameters, nn.Module) and any(p.requires_grad for p in tensors)
    chosen = [(p, alpha) for p, alpha in zip(tensors, given, strict=True) if p.requires_grad or not trained]
    for parameter, alpha in chosen:
        _check_coefficient(alpha, parameter)
    sharded = [(p, alpha) for p, alpha in chosen if is_sharded(p)]
    values = [_value(group, alpha) for group, alpha in _groups(pair for pair in chosen if not is_sharded(pair[0]))]
    if sharded:
        norms = squared_norms([parameter for parameter, _ in sharded])
        values += [alpha * norm for (_, alpha), norm in zip(sharded, norms, strict=True)]
    value = values[0] if len(values) == 1 else torch.stack(values).sum()
    return Loss(value, l2=tuple(L2(p, a.detach() if isinstance(a, Tensor) else float(a), (a,)) for p, a in chosen))


def _groups(pairs: Iterable[tuple[Tensor, Coefficient]]) -> list[tuple[list[Tensor], Coefficient]]:
    """Parameters whose penalty is computed together: small ones of one kind with one number as coefficient."""
    found: dict[Any, tuple[list[Tensor], Coefficient]] = {}
    for number, (p, alpha) in enumerate(pairs):
        one = id(alpha) if isinstance(alpha, Tensor) else alpha
        alone = not 0 < p.numel() <= SMALL or (isinstance(alpha, Tensor) and alpha.ndim > 0)
        key = number if alone else (one, p.dtype, p.device, p.requires_grad)
        found.setdefault(key, ([], alpha))[0].append(p)
    return list(found.values())


def _value(parameters: list[Tensor], alpha: Coefficient) -> Tensor:
    """Σ_p α ‖p‖² of a group."""
    joined = parameters[0] if len(parameters) == 1 else torch.cat([_flat(p) for p in parameters])
    squares = joined.to(torch.promote_types(joined.dtype, torch.float32)).square()
    return (alpha * squares).sum() if isinstance(alpha, Tensor) and alpha.ndim > 0 else alpha * squares.sum()


def _flat(p: Tensor) -> Tensor:
    """The numbers of ``p`` in the order of its memory, so that they need not be copied."""
    if not p.is_contiguous():
        p = p.permute(sorted(range(p.ndim), key=p.stride, reverse=True))
    return p.reshape(-1)


def _tensors(parameters: Any) -> list[Tensor]:
    """The parameters as a list, frozen ones included."""
    if isinstance(parameters, Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    if not isinstance(parameters, Iterable):
        raise HyperkronError(
            f"parameters is a {type(parameters).__name__}; pass a module, a tensor or an iterable of tensors."
        )
    found = list(parameters)
    if not found:
        raise HyperkronError(
            f"parameters ({type(parameters).__name__}) has no tensor in it; pass a module with parameters, "
            "or a list (a generator can be read only once; no parameter requires a gradient during finite differences)."
        )
    for p in found:
        if not isinstance(p, Tensor):
            raise HyperkronError(
                f"parameters contains a {type(p).__name__} ({p!r:.40}); pass tensors: module.parameters() "
                "rather than named_parameters(), or the .values() of a dict."
            )
        if not p.is_floating_point():
            raise HyperkronError(
                f"parameters contains a tensor of dtype {p.dtype}, shape {tuple(p.shape)}; leave it out."
            )
    return found


def _check_coefficient(alpha: Any, parameter: Tensor) -> None:
    """Refuse what is not a number, is elsewhere, or does not broadcast to the parameter."""
    if isinstance(alpha, (int, float)) and not isinstance(alpha, bool):
        return
    if not isinstance(alpha, Tensor):
        raise HyperkronError(
            f"coefficient={alpha!r:.60} is a {type(alpha).__name__}; pass a number, a tensor, or a list of these."
        )
    if alpha.ndim > 0 and alpha.device != parameter.device:
        raise HyperkronError(
            f"coefficient is on {alpha.device} but a parameter is on {parameter.device}; move it with "
            f"coefficient.to({str(parameter.device)!r})."
        )
    if alpha.ndim > 0 and is_sharded(parameter):
        raise HyperkronError(
            f"coefficient has shape {tuple(alpha.shape)}, but a parameter is sharded (fully_shard); "
            "use one number for each parameter."
        )
    if not alpha.is_floating_point():
        raise HyperkronError(f"coefficient has dtype {alpha.dtype}; use a floating point tensor.")
    trailing = zip(reversed(alpha.shape), reversed(parameter.shape), strict=False)
    if alpha.ndim > parameter.ndim or any(a not in (1, p) for a, p in trailing):
        raise HyperkronError(
            f"coefficient has shape {tuple(alpha.shape)}, which does not broadcast to a parameter of shape "
            f"{tuple(parameter.shape)}; use a scalar, or a list with one coefficient per parameter."
        )
