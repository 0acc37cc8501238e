"""A small language model on several processes: what each of them computes, for tests that compare them.

``python support/parallel_runs.py folder`` starts four processes that do all checks of ``make test`` one after the
other, on all of them and on the first two; the first writes the results into the folder. ``make ranks`` has the others.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch._decomp.decompositions_for_jvp  # forward mode imports and compiles it: once here, not in every process
import torch._dynamo  # and optimizers this, at their first step
import torch.distributed as dist
import torch.distributed.fsdp
from safetensors.torch import save_file
from torch import Tensor, nn

import hyperkron as hk
import hyperkron.algorithms
import hyperkron.training
import sharded_runs
from hyperkron.hypergradient import Hypergradient
from hyperkron.hypergradient.steps import Adam
from sharded_runs import Lambda, inner, outer

EXAMPLES, TOKENS, WORDS, CLASSES = 22, 3, 9, 4
STEPS = 50


def started(size: int, function: Callable[[int], object], folder: Path) -> list[int]:
    """The ids of ``size`` forked processes that meet and run ``function(rank)``; what they say goes to files.

    The process that forks must not have computed anything.
    """
    meeting, found = tempfile.mktemp(dir=folder), []
    for rank in range(size):
        pid = os.fork()
        if pid:
            found.append(pid)
            continue
        code = 1
        try:
            os.dup2(os.open(folder / f"errors-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
            warnings.simplefilter("ignore")
            dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
            function(rank)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return found


def exit_codes(pids: list[int]) -> list[int]:
    """Their exit codes; minus the signal."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


class Network(nn.Module):
    """Every kind of curvature: Kronecker blocks, an exact diagonal (norm, embedding) and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.norm = nn.Embedding(WORDS, 5), nn.Linear(5, 6), nn.LayerNorm(6)
        self.scale, self.out = nn.Parameter(torch.ones(6)), nn.Linear(6, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.scale * self.norm(torch.tanh(self.mix(self.words(tokens)))))  # type: ignore[no-any-return]


def make(dtype: torch.dtype) -> tuple[hk.BilevelProblem, nn.Module, nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Problem, model, λ and two batches whose masked tokens are spread unevenly over the examples."""
    generator = torch.Generator().manual_seed(1)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, hyper = Network().to(dtype), Lambda(count=EXAMPLES).to(dtype)
    batches = []
    for masked in (9, 5):
        tokens = torch.randint(WORDS, (EXAMPLES, TOKENS), generator=generator)
        classes = torch.randint(CLASSES, (EXAMPLES, TOKENS), generator=generator)
        classes[:masked, 1:] = -100
        batches.append((tokens, classes, torch.arange(EXAMPLES)))
    return hk.BilevelProblem(inner, outer), model, hyper, *batches


METHODS: dict[str, Callable[[], Hypergradient]] = {
    "identity": lambda: hk.identity(cross="reverse"),
    "sama": lambda: hk.sama(),
    "kfac mc": lambda: hk.kfac(0.1, samples=2, cross="reverse"),
    "kfac empirical": lambda: hk.kfac(0.1, fisher="empirical", cross="reverse"),
    "kfac type-2": lambda: hk.kfac(0.1, fisher="type-2", split="exact", cross="reverse"),
    "kfac reduce": lambda: hk.kfac(0.1, sharing="reduce", cross="reverse"),
    "ekfac": lambda: hk.ekfac(0.1, cross="reverse"),
    "cg": lambda: hk.cg(5, 0.1),
    "pcg": lambda: hk.pcg(5, 0.1, cross="reverse"),
    "neumann": lambda: hk.neumann(5, 0.1),
    "unrolled": lambda: hk.unrolled(3),
    "unrolled adam": lambda: hk.unrolled(3, Adam(0.01)),
    "kfac auto": lambda: hk.kfac(0.1),
}


COUNTED = ("identity", "cg", "neumann", "kfac mc", "kfac empirical", "kfac auto", "ekfac", "pcg", "unrolled")
"""The methods whose bytes are compared with the formulas of docs/scaling.md."""


def hypergradients(
    group: dist.ProcessGroup | None,
    dtype: torch.dtype,
    traffic: dict[str, dict[str, int]] | None = None,
    names: Sequence[str] = tuple(METHODS),
) -> dict[str, Tensor]:
    """The gradient by every method, and J_out.

    With ``traffic``, also the bytes of a second hypergradient: the first one looks at more.
    """
    found = {}
    for name, make_method in ((name, METHODS[name]) for name in names):
        problem, model, hyper, *batches = make(dtype)
        divided, method = hk.training.DataParallel(problem, group), make_method()
        result = method.compute(divided, model, hyper, *batches)
        found[name] = torch.cat([g.reshape(-1) for g in result.grads.values()])
        found[f"{name} loss"] = torch.tensor(result.outer_loss)
        if traffic is not None and name in COUNTED:
            before = dict(divided.group.sent)
            result = method.compute(divided, model, hyper, *batches)
            traffic[name] = {kind: n - before[kind] for kind, n in divided.group.sent.items()}
            traffic[name]["products"] = int(result.stats.get("products", 0))
    return found


def trained(
    group: dist.ProcessGroup | None, steps: int, folder: Path | None = None, every: int = 10
) -> tuple[dict[str, Tensor], hk.Run]:
    """λ and θ after ``steps`` steps of ``fit`` on shuffled batches; with a folder, continued from it and saved."""
    problem, model, hyper, rows, trusted = make(torch.float64)
    data = torch.utils.data.TensorDataset(*rows)
    loader = torch.utils.data.DataLoader(data, batch_size=10, shuffle=True, drop_last=True)
    run = hk.fit(
        hk.training.DataParallel(problem, group),
        model,
        hyper,
        hk.AID(METHODS["kfac mc"](), inner_steps=1),
        loader,
        trusted,
        steps=steps,
        inner_optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        outer_optimizer=torch.optim.Adam(hyper.parameters(), lr=0.05),
        callbacks=[] if folder is None else [hk.Checkpoint(folder, every=every)],
        resume=folder,
    )
    return {name: p.detach().clone() for m in (hyper, model) for name, p in m.state_dict().items()}, run


def refused(action: Callable[[], object]) -> str:
    """The message of the error that ``action`` raises."""
    try:
        action()
    except hk.HyperkronError as error:
        return str(error)
    return ""


def refusals(rank: int) -> dict[str, str]:
    """What the processes say about data and losses that are not right, each a sentence."""
    problem, model, hyper, rows, trusted = make(torch.float64)
    method = hk.identity()

    def compute(problem: hk.BilevelProblem, batch: Any, net: nn.Module = model) -> Any:
        return lambda: method.compute(hk.training.DataParallel(problem), net, hyper, batch, trusted)

    def normalised(model: nn.Module, hyper: Any, batch: Any) -> hk.losses.Loss:
        weights = hyper.weights(batch[2]) * torch.arange(1.0, 1 + len(batch[2]), dtype=torch.float64)
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights / weights.mean())

    own = (*rows[:2], (rows[2] + rank) % EXAMPLES)
    broken = make(torch.float64)[1]
    if rank == 1:
        with torch.no_grad():
            broken.get_parameter("scale").fill_(torch.nan)
    wrapped = nn.parallel.DistributedDataParallel(make(torch.float64)[1])
    frozen = make(torch.float64)[1]
    frozen.get_parameter("scale").requires_grad_(rank != 1)
    weights = hk.SampleWeights(EXAMPLES, init=0.5 + 0.1 * rank).double()
    no_mean = hk.training.DataParallel(hk.BilevelProblem(normalised, outer))
    one = hk.training.DataParallel(hk.BilevelProblem(normalised if rank == 1 else inner, outer))
    said = [refused(lambda p=p: method.compute(p, model, hyper, rows, trusted)) for p in (no_mean, no_mean, one, one)]
    return {
        "hyper": refused(lambda: method.compute(hk.training.DataParallel(problem), model, weights, rows, trusted)),
        "frozen": refused(compute(problem, rows, frozen)),
        "different": refused(compute(problem, own)),
        "small": refused(compute(problem, tuple(x[:3] for x in rows))),
        "normalised": said[0],
        "normalised again": said[1],
        "found on one process": said[2],
        "found on one process again": said[3],
        "nan": refused(compute(problem, rows, broken)),
        "pieces": refused(lambda: hk.training.Accumulated(hk.training.DataParallel(problem), 4)),
        "plain": refused(lambda: hk.fit(problem, wrapped, hyper, hk.AID(method), rows, trusted, steps=1)),
    }


class Dropped(nn.Module):
    """λ does not see the dropout of this model, but the masks show in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(())), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.dropout(x)  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """λ: a weight for each of eight examples, and a factor of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.full((8,), 0.5, dtype=torch.float64))
        self.factor = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))


def changing_use(divide: bool) -> dict[str, Tensor]:
    """A hypergradient where the examples of one process get the factor of λ, after one where none did."""

    def inner(model: nn.Module, hyper: Scaled, batch: tuple[Tensor, ...]) -> hk.losses.Loss:
        x, y, index = batch
        out = model(x) * (1 + hyper.factor) if float(x.max()) > 50 else model(x)
        return hk.losses.cross_entropy(out, y, weight=hyper.weights[index])

    def outer(model: nn.Module, hyper: Scaled, batch: tuple[Tensor, ...]) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    def whole(model: nn.Module, hyper: Scaled, batch: tuple[Tensor, ...]) -> hk.losses.Loss:
        x, y, index = batch
        large = torch.arange(8)[:, None] < 2  # the examples of the first of four processes
        return hk.losses.cross_entropy(model(x) * (1 + large * hyper.factor), y, weight=hyper.weights[index])

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, dtype=torch.float64, generator=generator)
    y, index, model = torch.arange(8) % 3, torch.arange(8), nn.Linear(4, 3).double()
    nn.init.constant_(model.bias, 0.1)
    nn.init.eye_(model.weight)
    marked = x.clone()
    marked[0, 0] = 60.0
    if not divide:
        method = hk.identity(cross="reverse")
        return method.compute(hk.BilevelProblem(whole, outer), model, Scaled(), (marked, y, index), (x, y)).grads
    problem, method, hyper = hk.training.DataParallel(hk.BilevelProblem(inner, outer)), hk.identity(), Scaled()
    method.compute(problem, model, hyper, (x, y, index), (x, y))
    return method.compute(problem, model, hyper, (marked, y, index), (x, y)).grads


class Branched(nn.Module):
    """J_in does not use ``extra``, and calls ``out`` with constants, too; where ``calls`` it calls a layer once more
    without using the result. ``expert`` has rows of some processes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out, self.extra = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.expert, self.calls = nn.Linear(5, 3), False

    def forward(self, x: Tensor, whole: bool = False) -> Tensor:
        hidden = torch.tanh(self.mix(x))
        if self.calls:
            self.mix(x.square())
        constants = {name: p.detach() for name, p in self.out.named_parameters()}
        found = self.out(hidden) + torch.func.functional_call(self.out, constants, (hidden.sin(),))
        found[x[:, 0] > 0.9] += self.expert(hidden[x[:, 0] > 0.9])
        return found + (self.extra(hidden) if whole else 0.0)  # type: ignore[no-any-return]


def layers_without_use(divide: bool, calls: bool) -> dict[str, Tensor]:
    """Hypergradients of a model of which J_in leaves out parameters, and calls of layers where ``calls``."""

    def inner(model: nn.Module, weights: nn.Module, batch: tuple[Tensor, ...]) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights(batch[2]))

    def outer(model: nn.Module, weights: nn.Module, batch: tuple[Tensor, ...]) -> hk.losses.Loss:
        return hk.losses.cross_entropy(model(batch[0], whole=True), batch[1])

    methods = {
        "kfac": hk.kfac(0.1),
        "ekfac": hk.ekfac(0.1),
        "cg": hk.cg(3, 0.1),
        "ggn": hk.cg(3, curvature=hk.curvature.GGN(0.1)),
    }
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model, weights = Branched().double(), hk.SampleWeights(9, init=0.7).double()
        batch = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3, torch.arange(9)
    model.calls = calls
    plain = hk.BilevelProblem(lambda model, weights, batch: inner(model, weights, batch).value, outer)
    problems = {name: hk.BilevelProblem(inner, outer) for name in methods} | {"plain": plain}
    methods["plain"] = hk.kfac(0.1, fisher="empirical")
    problems = {name: hk.training.DataParallel(p) if divide else p for name, p in problems.items()}
    given = model, weights, batch, batch
    return {name: m.compute(problems[name], *given).grads["weight"] for name, m in methods.items()}


def from_the_first(rank: int) -> bool:
    """Whether each process continues from the state that the first one had of a method whose curvature is not kept."""
    problem, model, hyper, *batches = make(torch.float64)
    divided, method = hk.training.DataParallel(problem), hk.kfac(0.1)
    method.compute(divided, model, hyper, *batches)
    state = [method.state_dict()]
    dist.broadcast_object_list(state, 0)
    other = method.fresh()
    other.load_state_dict(state[0])
    found, wanted = (m.compute(divided, model, hyper, *batches).grads for m in (other, method))
    return all(torch.equal(found[name], wanted[name]) for name in wanted)


def but_for_rounding(rank: int) -> bool:
    """Whether parameters are taken as they are whose sums are rounding alone, and differ between processes."""
    problem, model, hyper, *batches = make(torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.mean()).mul_(1.0 + 1e-14 * rank)
    return not refused(lambda: hk.identity().compute(hk.training.DataParallel(problem), model, hyper, *batches))


def ways_of_use(rank: int) -> dict[str, bool]:
    """What else must hold: batches of one's own, a wrapped model, masks of one's own, one random state and one loss."""
    problem, model, hyper, rows, trusted = make(torch.float64)
    cut = slice(EXAMPLES * rank // 4, EXAMPLES * (rank + 1) // 4)
    own = [tuple(x[cut] for x in batch) for batch in (rows, trusted)]
    parts = hk.training.DataParallel(problem, divide=False)
    wanted = hk.identity().compute(hk.training.DataParallel(problem), model, hyper, rows, trusted).grads
    found = hk.identity().compute(parts, model, hyper, *own).grads
    net = nn.parallel.DistributedDataParallel(make(torch.float64)[1])
    wrapped = hk.AID(hk.identity(), inner_steps=2)
    run = hk.fit(hk.training.DataParallel(problem), net, hyper, wrapped, rows, trusted, steps=2)
    bare = make(torch.float64)
    hk.fit(hk.training.DataParallel(problem), bare[1], bare[2], wrapped, rows, trusted, steps=2)
    pairs = zip(net.module.parameters(), bare[1].parameters(), strict=True)
    torch.manual_seed(rank // 4)
    seen: list[Tensor] = []

    def drawn(model: nn.Module, hyper: nn.Module, batch: Tensor) -> Tensor:
        seen.append(model(batch))
        return seen[-1].mean()

    noisy, group = hk.training.DataParallel(hk.BilevelProblem(drawn), divide=False), run.group
    noisy.inner(Dropped(), nn.Module(), torch.ones(64))
    masks = group.gather(seen[-1])
    after = group.gather(torch.rand(3))
    changed, alone = changing_use(divide=True), changing_use(divide=False)
    left_out, used = layers_without_use(True, calls=rank == 1), layers_without_use(False, calls=False)
    return {
        "left out": all(torch.allclose(left_out[n], used[n], rtol=1e-10, atol=1e-14) for n in used),
        "state of the first": from_the_first(rank),
        "rounding": but_for_rounding(rank),
        "changed on one": all(torch.allclose(changed[n], alone[n], rtol=1e-6, atol=1e-12) for n in alone),
        "own batches": all(torch.equal(found[name], wanted[name]) for name in wanted),
        "wrapped": run.state.model is net.module and all(torch.equal(x, y) for x, y in pairs),
        "masks": len({tuple(x.tolist()) for x in masks}) == 4,
        "random state": bool((after == after[0]).all()),
    }


FEW = ("kfac mc", "cg")
"""The methods that four processes try in ``make test``."""
TESTED = (*COUNTED, "sama")
"""The methods that two processes try in ``make test``; in ``make ranks`` 2, 3 and 4 processes try all."""
LEGS = (3, 6, 8)
"""A run of ``make test``: where two processes stop, and four, and one."""


def checks(rank: int, folder: Path) -> None:
    """All checks, on process ``rank`` of four."""
    two, three = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    tensors: dict[str, Tensor] = {}
    traffic: dict[str, dict[str, int]] = {}
    tensors |= {f"4 {name}": x for name, x in hypergradients(None, torch.float64, names=FEW).items()}
    if rank < 2:
        tensors |= {f"2 {name}": x for name, x in hypergradients(two, torch.float64, traffic, TESTED).items()}
        trained(two, LEGS[0], folder / "run", every=LEGS[0])
    dist.barrier()
    state, run = trained(None, LEGS[1], folder / "run", every=LEGS[1])
    alike = torch.cat([x.reshape(-1) for x in state.values()])
    texts: dict[str, Any] = {"same": bool((run.group.gather(alike) == alike).all()), "traffic": traffic}
    texts |= {"refusals": refusals(rank), "use": ways_of_use(rank)}
    texts |= {"history": len(run.history), "loss": run.history.column("outer_loss")}
    more, words = sharded_runs.checks(rank, two, three, folder, LEGS)
    if rank == 0:
        save_file(tensors | more, folder / "tensors.safetensors")
    (folder / f"texts-{rank}.json").write_text(json.dumps(texts | words))
    dist.barrier()


def main(folder: Path) -> None:
    """Four processes do all checks."""
    codes = exit_codes(started(4, lambda rank: checks(rank, folder), folder))
    assert codes == [0] * 4, "\n".join(f"{rank}: {(folder / f'errors-{rank}').read_text()}" for rank in range(4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
