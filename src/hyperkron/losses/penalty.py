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
    values, records, divided = [], [], list[tuple[Tensor, Coefficient]]()
    for parameter, alpha in zip(tensors, given, strict=True):
        if trained and not parameter.requires_grad:
            continue
        _check_coefficient(alpha, parameter)
        records.append(L2(parameter, alpha.detach() if isinstance(alpha, Tensor) else float(alpha), (alpha,)))
        if is_sharded(parameter):
            divided.append((parameter, alpha))
            continue
        squares = parameter.to(torch.promote_types(parameter.dtype, torch.float32)).square()
        spread = isinstance(alpha, Tensor) and alpha.ndim > 0
        values.append((alpha * squares).sum() if spread else alpha * squares.sum())
    if divided:
        norms = squared_norms([parameter for parameter, _ in divided])
        values += [alpha * norm for (_, alpha), norm in zip(divided, norms, strict=True)]
    return Loss(torch.stack(values).sum(), l2=tuple(records))


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
            "or a list (a generator can be read only once)."
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
            f"coefficient has shape {tuple(alpha.shape)}, but a parameter is divided among processes (fully_shard); "
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
