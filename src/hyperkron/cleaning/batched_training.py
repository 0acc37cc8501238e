"""Networks of one structure trained side by side: one computation for all of them where they are perceptrons.

A step of a small network is mostly the overhead of its operations, not their arithmetic. K perceptrons are therefore
trained as one, with their weights in blocks (K, in, out),

    h ← σ(W_k h + b_k)     for all k at once,          ∂J_k/∂output = share · (f_k − q_k) ,     q_k ∝ f_k e_k ,

where f are the probabilities of the classes, e is the evidence about a row, and share its weight over the number of
rows in its batch. Each network has the initialisation and the batches that it would have alone, and AdamW treats every
number by itself, so the result is that of training one after the other, up to rounding. Networks of other kinds are
trained one after the other: their steps are mostly arithmetic, or draw numbers and keep statistics of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hyperkron.cleaning.trainer import (
    Dense,
    Inputs,
    NetworkGroup,
    Tick,
    TrainingPlan,
    TrainingTargets,
    batches,
    descend,
    seeded,
    train,
)

ELEMENTWISE = (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Softplus, nn.Tanh, nn.Sigmoid, nn.Identity)
"""Activations without parameters or random numbers."""

SATURATED = -1e-6
"""Log-likelihood above which ``evidence.likelihood`` asks for no more."""


def train_batched(
    build: Callable[[], nn.Module],
    inputs: Inputs,
    all_targets: Sequence[TrainingTargets],
    plan: TrainingPlan,
    *,
    seeds: Sequence[int],
    tick: Tick | None = None,
) -> list[nn.Module]:
    """Fresh networks, one fitted to each set of targets, in evaluation mode; see :func:`train` for a single one.

    All take as many steps as the plan says for the longest training among them. Their batches may differ in size.
    """
    device, steps = all_targets[0].rows.device, max(plan.steps(len(targets.rows)) for targets in all_targets)
    networks: list[nn.Module] = []
    streams = []
    for targets, seed in zip(all_targets, seeds, strict=True):
        with seeded(seed, device):
            networks.append(build().to(device).train())
            count, random = len(targets.rows), _continued(device)
        streams.append(batches(count, plan.batch_for(count), random, device))
        if len(all_targets) == 1 or not stackable(networks, inputs):
            return [
                train(build, inputs, one, plan, seed=seed, steps=steps, tick=tick)
                for one, seed in zip(all_targets, seeds, strict=True)
            ]
    return descend(Stack(networks, inputs, all_targets), streams, plan, steps, tick)


def stackable(networks: Sequence[nn.Module], inputs: Inputs) -> bool:
    """Whether these are perceptrons of one structure on rows of numbers, with nothing in them that a stack misses."""
    first = _layers(networks[0])
    if not isinstance(inputs, Dense) or not (inputs.values.dim() == 2 or type(first[0]) is nn.Flatten):
        return False
    parameters = [p for network in networks for p in network.parameters()]
    alone = [p for network in networks for layer in _layers(network) for p in layer.parameters()]
    return (
        all(_plain(module) for network in networks for module in network.modules())
        and all(repr(network) == repr(networks[0]) for network in networks)
        and all(p.requires_grad for p in parameters)
        and len(set(map(id, parameters))) == len(alone) > 0  # none is shared
    )


def _layers(network: nn.Module) -> list[nn.Module]:
    return list(network) if type(network) is nn.Sequential else [network]


def _plain(module: nn.Module) -> bool:
    """Whether all that this module does is known here."""
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return False
    if type(module) is nn.Sequential:
        return all(type(layer) is not nn.Sequential for layer in module)
    if type(module) is nn.Linear:
        return {name for name, _ in module.named_parameters()} <= {"weight", "bias"}
    flat = type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1)
    return flat or type(module) in ELEMENTWISE


def _continued(device: torch.device) -> torch.Generator:
    """A generator that draws what the global one of the device would draw from now on."""
    random = torch.Generator(device)
    random.set_state(torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state())
    return random


class Stack(NetworkGroup):
    """Perceptrons in training, their weights in blocks; the parameters of each network are views of its share.

    So a network can be asked, or differentiated, between any two steps; :meth:`finish` gives it weights of its own.
    """

    def __init__(self, networks: Sequence[nn.Module], inputs: Inputs, all_targets: Sequence[TrainingTargets]) -> None:
        super().__init__(networks)
        assert isinstance(inputs, Dense)
        self._values = inputs.values.flatten(1)
        self.blocks = nn.ParameterList()
        self._layers: list[tuple[Tensor, Tensor | None] | nn.Module] = []
        for same in zip(*(_layers(network) for network in networks), strict=True):
            if isinstance(same[0], nn.Linear):
                weight = self._block([layer.weight for layer in same], turned=True)
                self._layers.append((weight, None if same[0].bias is None else self._block([n.bias for n in same])))
            elif not isinstance(same[0], nn.Flatten):
                self._layers.append(same[0])
        self._join_targets(all_targets)

    def _block(self, parameters: Sequence[Tensor], turned: bool = False) -> Tensor:
        block = torch.stack([p.detach().T if turned else p.detach() for p in parameters])
        for parameter, share in zip(parameters, block, strict=True):
            parameter.data = share.T if turned else share
        self.blocks.append(nn.Parameter(block))
        return self.blocks[-1]

    def optimizer(self, plan: TrainingPlan) -> torch.optim.AdamW:
        fused = self._values.device.type in ("cpu", "cuda")
        return torch.optim.AdamW(self.blocks, lr=plan.rate, weight_decay=plan.decay, fused=fused)

    def _join_targets(self, all_targets: Sequence[TrainingTargets]) -> None:
        self._rows = torch.cat([targets.rows for targets in all_targets])
        evidence = torch.cat([targets.evidence for targets in all_targets]).to(self._values)
        self._evidence = evidence - evidence.max(1, keepdim=True).values
        counts = torch.tensor([0, *(len(targets.rows) for targets in all_targets)], device=self._rows.device)
        self._begin = counts.cumsum(0)[:-1, None]
        self._weight, self._believed = None, None
        if any(targets.weight is not None for targets in all_targets):
            self._weight = self._joined([targets.weight for targets in all_targets], all_targets, 1.0)
        if any(targets.believed is not None for targets in all_targets):
            labels = torch.cat([0 * n.rows if n.believed is None else n.believed[0] for n in all_targets])
            told = [None if targets.believed is None else targets.believed[1] for targets in all_targets]
            self._believed = labels, self._joined(told, all_targets, 0.0)

    def _joined(self, parts: Sequence[Tensor | None], like: Sequence[TrainingTargets], otherwise: float) -> Tensor:
        """A number for each row of the targets, one after the other."""
        filled = [torch.full((len(t.rows),), otherwise) if p is None else p for p, t in zip(parts, like, strict=True)]
        return torch.cat([part.to(self._values) for part in filled])

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        share: Tensor | float
        if all(len(part) == len(parts[0]) for part in parts):
            at, share = torch.stack(list(parts)), 1 / len(parts[0])
        else:  # rows that fill up a batch count for nothing
            at = pad_sequence(list(parts), batch_first=True, padding_value=-1)
            there = at >= 0
            at, share = at.clamp(min=0), (there.to(self._values) / there.sum(1, keepdim=True))[..., None]
        at = at + self._begin
        weighed = share if self._weight is None else share * self._weight[at][..., None]
        label, belief = None, None
        if self._believed is not None:
            label, belief = self._believed[0][at][..., None], share * self._believed[1][at][..., None]
        x = self._values[self._rows[at]]
        for layer in self._layers:
            if isinstance(layer, nn.Module):
                x = layer(x)
            elif layer[1] is None:
                x = torch.bmm(x, layer[0])
            else:
                x = torch.baddbmm(layer[1][:, None], x, layer[0])
        return GroupLoss.apply(x, self._evidence[at], weighed, label, belief, self._losses)

    def finish(self, plan: TrainingPlan, steps: int) -> list[nn.Module]:
        """The networks, with weights of their own."""
        networks = super().finish(plan, steps)
        for network in networks:
            for parameter in network.parameters():
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        return networks


class GroupLoss(torch.autograd.Function):
    """The sum of the losses of all networks, with its gradient in one go.

        J_k = −Σ_n share_n log Σ_c f(c) e(c) − Σ_n belief_n log f(y_n) ,
        ∂J_k/∂output = share (f − q) + belief (f − 1_y) ,     q ∝ f e

    Nothing is asked for where all of the evidence is seen. ``losses`` receives the J_k.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        evidence: Tensor,
        share: Tensor | float,
        label: Tensor | None,
        belief: Tensor | None,
        losses: list[Tensor],
    ) -> Tensor:
        f = output.log_softmax(-1)
        joint = f + evidence
        seen = joint.logsumexp(-1, keepdim=True)
        loss = -(seen * share).sum((1, 2))
        if label is None or belief is None:
            slope = f.exp_().sub_(joint.sub_(seen).exp_()).mul_(seen <= SATURATED).mul_(share)
        else:
            loss = loss - (f.gather(-1, label) * belief).sum((1, 2))
            f = f.exp_()
            slope = f.sub(joint.sub_(seen).exp_()).mul_(seen <= SATURATED).mul_(share)
            slope += f.scatter_add_(-1, label, -torch.ones_like(belief)).mul_(belief)
        ctx.slope, losses[:] = slope, [loss]
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Of the logits alone."""
        return ctx.slope.mul_(gradients[0]), None, None, None, None, None
