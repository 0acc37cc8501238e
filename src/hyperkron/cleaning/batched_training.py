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

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from hyperkron.cleaning.trainer import (
    Dense,
    Inputs,
    Tick,
    TrainingPlan,
    TrainingTargets,
    batches,
    refuse_not_finite,
    schedule_for,
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

    Args:
        build: makes a fresh network.
        inputs: of all rows.
        all_targets: what each network learns from.
        plan: of each training.
        seeds: of each network's initialisation and batches.
        tick: called after every step, with the number of networks that made it.
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
    stack = Stack(networks, inputs, plan, steps)
    stack.set_targets(all_targets)
    for _ in range(steps):
        stack.step([next(stream) for stream in streams])
        if tick is not None:
            tick(len(networks))
    stack.release()
    return [network.eval() for network in networks]


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


class Stack:
    """Perceptrons in training, their weights in blocks; the parameters of each network are views of its share.

    So a network can be asked, or differentiated, between any two steps; :meth:`release` gives it weights of its own.

    Args:
        networks: that are ``stackable`` with these inputs.
        inputs: of all rows.
        plan: of each training.
        steps: after which the learning rate has come to its end.
    """

    def __init__(self, networks: Sequence[nn.Module], inputs: Inputs, plan: TrainingPlan, steps: int) -> None:
        assert isinstance(inputs, Dense)
        self.networks, self.plan, self.steps = list(networks), plan, steps
        self.values = inputs.values.flatten(1)
        self.layers: list[tuple[Tensor, Tensor | None] | nn.Module] = []
        self.blocks: list[Tensor] = []
        for same in zip(*(_layers(network) for network in networks), strict=True):
            if isinstance(same[0], nn.Linear):
                weight = self._block([layer.weight for layer in same], turned=True)
                self.layers.append((weight, None if same[0].bias is None else self._block([n.bias for n in same])))
            elif not isinstance(same[0], nn.Flatten):
                self.layers.append(same[0])
        fused = self.values.device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.AdamW(self.blocks, lr=plan.rate, weight_decay=plan.decay, fused=fused)
        self.schedule = schedule_for(self.optimizer, steps)
        self.loss = torch.zeros(len(networks))

    def _block(self, parameters: Sequence[Tensor], turned: bool = False) -> Tensor:
        block = torch.stack([p.detach().T if turned else p.detach() for p in parameters])
        for parameter, share in zip(parameters, block, strict=True):
            parameter.data = share.T if turned else share
        self.blocks.append(block.requires_grad_())
        return block

    def set_targets(self, all_targets: Sequence[TrainingTargets]) -> None:
        """From now on each network learns from its targets."""
        self.rows = torch.cat([targets.rows for targets in all_targets])
        evidence = torch.cat([targets.evidence for targets in all_targets]).to(self.values)
        self.evidence = evidence - evidence.max(1, keepdim=True).values
        counts = torch.tensor([0, *(len(targets.rows) for targets in all_targets)], device=self.rows.device)
        self.begin = counts.cumsum(0)[:-1, None]
        self.weight, self.believed = None, None
        if any(targets.weight is not None for targets in all_targets):
            self.weight = self._joined([targets.weight for targets in all_targets], 1.0)
        if any(targets.believed is not None for targets in all_targets):
            labels = torch.cat([0 * n.rows if n.believed is None else n.believed[0] for n in all_targets])
            told = [None if targets.believed is None else targets.believed[1] for targets in all_targets]
            self.believed = labels, self._joined(told, 0.0)

    def _joined(self, parts: list[Tensor | None], otherwise: float) -> Tensor:
        """A number for each row of the targets, one after the other."""
        lengths = [*self.begin[1:, 0].tolist(), len(self.rows)]
        counts = [end - begin for begin, end in zip(self.begin[:, 0].tolist(), lengths, strict=True)]
        filled = [torch.full((n,), otherwise) if p is None else p for p, n in zip(parts, counts, strict=True)]
        return torch.cat([part.to(self.values) for part in filled])

    def step(self, parts: Sequence[Tensor]) -> None:
        """One step of every network, on these positions in its targets."""
        share: Tensor | float
        if all(len(part) == len(parts[0]) for part in parts):
            at, share = torch.stack(list(parts)), 1 / len(parts[0])
        else:  # rows that fill up a batch count for nothing
            at = pad_sequence(list(parts), batch_first=True, padding_value=-1)
            there = at >= 0
            at, share = at.clamp(min=0), (there.to(self.values) / there.sum(1, keepdim=True))[..., None]
        at, even = at + self.begin, share
        if self.weight is not None:
            share = share * self.weight[at][..., None]
        output = self._forward(self.values[self.rows[at]])
        with torch.no_grad():
            slope, seen = self._slope(output, self.evidence[at])
            self.loss = -(seen * share).sum((1, 2))
            slope = slope.mul_(share)
            if self.believed is not None:
                self._believe(output, at, even, slope)
        for block in self.blocks:
            block.grad = None
        output.backward(slope)
        self.optimizer.step()
        self.schedule.step()

    def _forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if isinstance(layer, nn.Module):
                x = layer(x)
            elif layer[1] is None:
                x = torch.bmm(x, layer[0])
            else:
                x = torch.baddbmm(layer[1][:, None], x, layer[0])
        return x

    def _believe(self, output: Tensor, at: Tensor, share: Tensor | float, slope: Tensor) -> None:
        """Add the slope of the cross-entropy of the believed labels, share · b · (f − 1_y)."""
        assert self.believed is not None
        label, share = self.believed[0][at][..., None], share * self.believed[1][at][..., None]
        f = output.log_softmax(-1)
        self.loss = self.loss - (f.gather(-1, label) * share).sum((1, 2))
        slope += f.exp_().scatter_add_(-1, label, -torch.ones_like(share)).mul_(share)

    @staticmethod
    def _slope(output: Tensor, evidence: Tensor) -> tuple[Tensor, Tensor]:
        """f − q, nothing where all is seen; and log Σ_k f(k) e(k), both of every row."""
        f = output.log_softmax(-1)
        joint = f + evidence
        seen = joint.logsumexp(-1, keepdim=True)
        return f.exp_().sub_(joint.sub_(seen).exp_()).mul_(seen <= SATURATED), seen

    def release(self) -> None:
        """Give every network weights of its own, and refuse those that went wrong."""
        refuse_not_finite(self.loss, self.plan, self.steps)
        for network in self.networks:
            for parameter in network.parameters():
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
