"""A small transformer whose parameters, and the weights of whose examples, are sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hyperkron as hk
from hyperkron.collectives import Group
from hyperkron.hypergradient import Hypergradient
from hyperkron.sharding import is_sharded, local
from transformer import EncoderLayer

EXAMPLES, TOKENS, WORDS, CLASSES = 12, 4, 7, 3
LAYERS = 5  # where modules are counted
KIND = "cpu"


class Transformer(nn.Module):
    """Layers of attention over tokens and positions, their mean, and a linear head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, 6), nn.Embedding(TOKENS, 6)
        self.layers = nn.ModuleList(EncoderLayer(6, 2, 10) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(TOKENS, device=tokens.device).expand(tokens.shape))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))  # type: ignore[no-any-return]


class Lambda(nn.Module):
    """Example weights, sharded among ``group`` or not, and a weight decay, which every process has."""

    def __init__(self, group: Group | None = None, count: int = EXAMPLES) -> None:
        super().__init__()
        self.weights = hk.SampleWeights(count, "sigmoid", group=group)
        self.decay = hk.as_hyper(torch.tensor(-4.0))


def inner(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    tokens, classes, index = batch
    loss = hk.losses.cross_entropy(model(tokens), classes, weight=hyper.weights(index))
    return loss + hk.losses.l2(model, hyper.decay().exp())


def outer(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
    return hk.losses.cross_entropy(model(batch[0]), batch[1])


PROBLEM = hk.BilevelProblem(inner, outer)


def whole(x: Any) -> Tensor:
    """All rows, detached, on every process; ``x`` itself where it is not sharded."""
    return x.detach().full_tensor() if is_sharded(x) else torch.as_tensor(x)


def network(dtype: torch.dtype = torch.float64, layers: int = 1) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Transformer(layers).to(dtype)


def batches() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> tuple[Tensor, ...]:
        tokens = torch.randint(WORDS, (EXAMPLES, TOKENS), generator=generator)
        classes = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
        return tokens, classes, torch.randperm(EXAMPLES, generator=generator)

    return batch(), batch()


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    """``fully_shard`` of every layer and of the rest."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = options.pop("mesh", None) or init_device_mesh(KIND, (dist.get_world_size(),))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


METHODS: dict[str, Callable[[], Hypergradient]] = {
    "identity": lambda: hk.identity(),
    "identity reverse": lambda: hk.identity(cross="reverse"),
    "identity forward": lambda: hk.identity(cross="forward"),
    "identity difference": lambda: hk.identity(cross="difference"),
    "sama": lambda: hk.sama(),
    "kfac": lambda: hk.kfac(0.1),
    "kfac reverse": lambda: hk.kfac(0.1, cross="reverse"),
    "kfac exact": lambda: hk.kfac(0.1, fisher="type-2", split="exact"),
    "ekfac": lambda: hk.ekfac(0.1),
    "ekfac reverse": lambda: hk.ekfac(0.1, cross="reverse"),
    "cg": lambda: hk.cg(5, 0.1),
    "pcg": lambda: hk.pcg(5, 0.1),
    "ggn": lambda: hk.cg(5, curvature=hk.curvature.GGN(0.1)),
    "neumann": lambda: hk.neumann(5, 0.1),
    "unrolled": lambda: hk.unrolled(2),
}


def hypergradient(method: Hypergradient, problem: hk.BilevelProblem, model: nn.Module, hyper: nn.Module) -> Tensor:
    """The gradient by ``method``, all of it."""
    given = [tuple(x.to(KIND) for x in batch) for batch in batches()]
    grads = method.compute(problem, model, hyper, *given).grads
    return torch.cat([whole(g).reshape(-1).cpu() for g in grads.values()])


ALGORITHMS: dict[str, Callable[[], hk.algorithms.Algorithm]] = {
    "kfac": lambda: hk.AID(hk.kfac(0.1), inner_steps=1),
    "cg": lambda: hk.AID(hk.cg(3, 0.1), inner_steps=1),
    "sama": lambda: hk.algorithms.SAMA(inner_steps=1),
    "soba": lambda: hk.algorithms.SOBA(),
    "kfac cached": lambda: hk.AID(hk.kfac(0.1, refresh_every=3, ema=0.5), inner_steps=1),
    "ekfac cached": lambda: hk.AID(hk.ekfac(0.1, refresh_every=3, basis_every=2), inner_steps=1),
}


def trained(
    algorithm: hk.algorithms.Algorithm,
    problem: hk.BilevelProblem,
    model: nn.Module,
    hyper: nn.Module,
    steps: int,
    folder: Any = None,
) -> dict[str, Tensor]:
    """θ and λ after ``steps`` steps of ``fit`` on shuffled batches; with a folder, continued from it and saved."""
    rows, trusted = batches()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*rows), 8, shuffle=True, drop_last=True)
    run = hk.fit(
        problem,
        model,
        hyper,
        algorithm,
        loader,
        trusted,
        steps=steps,
        inner_optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        outer_optimizer=torch.optim.Adam(hyper.parameters(), lr=0.05),
        callbacks=[] if folder is None else [hk.Checkpoint(folder, every=100)],
        resume=folder,
    )
    states = {**run.state.hyper.state_dict(), **run.state.model.state_dict()}
    return {name: whole(x).clone() for name, x in states.items()}


def named(group: dist.ProcessGroup | None, names: Sequence[str], mode: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Hypergradients by these methods, with θ sharded (``f`` in ``mode``), with λ sharded (``w``), or both."""
    found = {}
    for name in names:
        problem = hk.training.DataParallel(PROBLEM, group)
        model = network(dtype).to(KIND)
        if "f" in mode:
            model = sharded(model, mesh=_mesh(problem.group))
        hyper = Lambda(problem.group if "w" in mode else None).to(dtype)
        (hyper.decay if "w" in mode else hyper).to(KIND)
        found[name] = hypergradient(METHODS[name](), problem, model, hyper)
    return found


def ended(group: dist.ProcessGroup | None, name: str, mode: str, steps: int, folder: Any = None) -> dict[str, Tensor]:
    """θ and λ at the end of a run, of which θ, λ or both are sharded."""
    problem = hk.training.DataParallel(PROBLEM, group)
    model = sharded(network(), mesh=_mesh(problem.group)) if "f" in mode else network()
    hyper = Lambda(problem.group if "w" in mode else None).double()
    return trained(ALGORITHMS[name](), problem, model, hyper, steps, folder)


def _mesh(group: Group) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    assert group.handle is not None
    return DeviceMesh.from_group(group.handle, KIND)


def costs(group: dist.ProcessGroup | None, count: int) -> dict[str, int]:
    """Of ``count`` example weights: what a process holds of λ and of Adam's moments, and sends for a hypergradient."""
    problem = hk.training.DataParallel(PROBLEM, group)
    hyper = Lambda(problem.group, count)
    optimizer = torch.optim.Adam(hyper.weights.parameters())
    method, model = hk.identity(), network(torch.float32)
    method.compute(problem, model, hyper, *batches())  # the first one looks at more
    before = dict(problem.group.sent)
    method.backward(problem, model, hyper, *batches())
    optimizer.step()
    memory = [x for x in optimizer.state[hyper.weights.weight].values() if is_sharded(x)]
    held = [local(x).numel() for x in (hyper.weights.weight, *memory)]
    return {"held": sum(held), **{kind: n - before[kind] for kind, n in problem.group.sent.items()}}


def curvature_held(method: Hypergradient) -> int:
    """Bytes of the inverses that this process keeps after a hypergradient by KFAC."""
    return sum(x.numel() * x.element_size() for x in _tensors(method.state_dict()["curvature"]["inverses"]))


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, dict):
        return [tensor for value in x.values() for tensor in _tensors(value)]
    return [x] if isinstance(x, Tensor) else []


def gathered_at_once(group: dist.ProcessGroup | None, method: Hypergradient, layers: int = LAYERS) -> float:
    """The most of a sharded θ that this process has had whole at one time, as a share of θ: parameters, b, v alike."""
    problem = hk.training.DataParallel(PROBLEM, group)
    model = sharded(network(layers=layers), mesh=_mesh(problem.group))
    alive, most, gather = 0, 0, Group.gather_rows

    def freed(size: int) -> None:
        nonlocal alive
        alive -= size

    def counted(self: Group, tensors: Sequence[Tensor]) -> list[Tensor]:
        nonlocal alive, most
        found = gather(self, tensors)
        for x in found:
            alive += x.numel()
            weakref.finalize(x.untyped_storage(), freed, x.numel())
        most = max(most, alive)
        return found

    Group.gather_rows = counted  # type: ignore[method-assign]
    try:
        hypergradient(method, problem, model, Lambda().double())
    finally:
        Group.gather_rows = gather  # type: ignore[method-assign]
    return most / sum(p.numel() for p in model.parameters())


def checks(
    rank: int, two: dist.ProcessGroup, three: dist.ProcessGroup, folder: Path, legs: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What ``make test`` does on process ``rank`` of four; ``two`` has the first two, ``three`` the first three."""
    tensors: dict[str, Tensor] = {}
    texts: dict[str, Any] = {"sharded": refusals()}
    if rank < 2:
        tensors |= {f"θ 2 {name}": x for name, x in named(two, NAMED, "f", torch.float64).items()}
        tensors |= {f"λ 2 {name}": x for name, x in named(two, WEIGHTED, "w", torch.float64).items()}
        tensors |= {f"θ trained {name}": x for name, x in ended(two, "soba", "f", 2).items()}
        ended(two, "kfac", "w", legs[0], folder / "weights")
        auto, forward, plain = hk.kfac(0.1), hk.kfac(0.1, cross="forward"), hk.kfac(0.1)
        texts["gathered"] = {"auto": gathered_at_once(two, auto), "forward": gathered_at_once(two, forward)}
        hypergradient(plain, hk.training.DataParallel(PROBLEM, two), network(), Lambda().double())
        texts["held"] = {"": curvature_held(plain), "f": curvature_held(auto)}
        for name in CACHED:
            torch.manual_seed(0)
            ended(two, name, "", 2, folder / name)
        texts["costs"] = [costs(two, count) for count in (24, 2400)]
    dist.barrier()
    if rank < 3:
        for name in CACHED:
            ended(three, name, "", 4, folder / name)
    dist.barrier()
    tensors |= {f"θ 4 {name}": x for name, x in named(None, WITHOUT_ROWS, "f", torch.float64).items()}
    tensors |= {f"λ trained {name}": x for name, x in ended(None, "soba", "w", 3).items()}
    ended(None, "kfac", "w", legs[1], folder / "weights")
    return tensors, texts


NAMED = ("identity", "sama", "ekfac reverse", "cg")
WITHOUT_ROWS = ("kfac",)  # the fourth of four processes has no row of the layer norm
CACHED = ("kfac cached", "ekfac cached")
WEIGHTED = ("sama", "kfac reverse", "cg")


def refusals() -> dict[str, str]:
    """What is said about models that are sharded otherwise, on four processes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    problem = hk.training.DataParallel(PROBLEM)

    def said(model: nn.Module, problem: hk.BilevelProblem = problem) -> str:
        words = set()
        for action in (
            lambda: hk.identity().compute(problem, model, Lambda().double(), *batches()),
            lambda: trained(ALGORITHMS["kfac"](), problem, model, Lambda().double(), 1),
        ):
            try:
                action()
            except hk.HyperkronError as error:
                words.add(str(error))
        return words.pop() if len(words) == 1 else f"NOT ALIKE: {words}"

    tensor_parallel, half = network(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    parallelize_module(tensor_parallel.head, init_device_mesh("cpu", (4,)), ColwiseParallel())  # type: ignore[arg-type]
    return {
        "tensor parallel": said(tensor_parallel),
        "two dimensions": said(
            sharded(network(), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        ),
        "mixed precision": said(sharded(network(), mp_policy=half)),
        "plain problem": said(sharded(network()), PROBLEM),
        "weights": _weights_refused(),
    }


def _weights_refused() -> str:
    hyper = Lambda(hk.training.DataParallel(PROBLEM).group).double()
    try:
        hk.identity().compute(PROBLEM, network(), hyper, *batches())
    except hk.HyperkronError as error:
        return str(error)
    return ""
