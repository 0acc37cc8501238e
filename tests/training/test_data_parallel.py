"""Several processes on the CPU: the same hypergradients, the same run, and what they send."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

import hyperkron as hk
import parallel_runs
import sharded_runs
from hyperkron.collectives import Group
from hyperkron.curvature.kfac.coverage import plan
from hyperkron.curvature.kfac.owners import Owners
from hyperkron.sharded_functions import sharded_over, squared_norms, taken
from hyperkron.training.encoding import CheckpointError
from hyperkron.training.sharded_checkpoint import write_rows


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that four processes, the first two of them also by themselves, have left their results in."""
    folder = tmp_path_factory.mktemp("ranks")
    here = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", parallel_runs.__file__, str(folder)]
    done = subprocess.run(command, env=here, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def tensors(four: Path) -> dict[str, Tensor]:
    return load_file(four / "tensors.safetensors")


@pytest.fixture(scope="module")
def texts(four: Path) -> list[dict[str, Any]]:
    return [json.loads((four / f"texts-{rank}.json").read_text()) for rank in range(4)]


@pytest.mark.filterwarnings("ignore::hyperkron.HyperkronWarning")
def test_one_two_and_four_processes_give_the_same_hypergradient(tensors: dict[str, Tensor]) -> None:
    for name, wanted in parallel_runs.hypergradients(None, torch.float64, names=parallel_runs.TESTED).items():
        for size in (2, 4) if f"4 {name}" in tensors else (2,):
            error = float((tensors[f"{size} {name}"] - wanted).norm() / wanted.norm())
            assert error < 1e-12, f"{name} on {size} processes differs by {error:.1e}"
    assert sum(name.startswith("4 ") for name in tensors) == 2 * len(parallel_runs.FEW)


@pytest.mark.filterwarnings("ignore::hyperkron.HyperkronWarning")
def test_a_run_continues_with_another_number_of_processes(
    four: Path, tensors: dict[str, Tensor], texts: list[dict[str, Any]]
) -> None:
    """Some steps on 2 processes, some on 4 and the last on 1, from one checkpoint to the next, end as all on 1."""
    _, middle, end = parallel_runs.LEGS
    wanted, whole = parallel_runs.trained(None, end)
    resumed, run = parallel_runs.trained(None, end, four / "run")
    for name, x in wanted.items():
        assert float((resumed[name] - x).abs().max()) < 1e-10, name
    assert all(text["same"] and text["history"] == middle for text in texts)  # to the last bit, on all of them
    losses = whole.history.column("outer_loss")
    assert run.state.step == end and texts[3]["loss"] == pytest.approx(losses[:middle], rel=1e-10)
    assert wanted["weights.weight"].std() > 0.01  # λ has moved


def test_what_cannot_be_divided_is_refused_on_every_process(texts: list[dict[str, Any]]) -> None:
    wanted = {
        "different": "different batches of inner",
        "frozen": "the processes train different parameters",
        "hyper": "hyper parameter weight differs between the processes",
        "small": "3 examples, too few for 4 processes",
        "normalised": "not a mean over examples",
        "normalised again": "not a mean over examples",
        "found on one process": "not a mean over examples",
        "found on one process again": "not a mean over examples",
        "nan": "∂θ J_out is nan|outer loss is nan|inner loss is nan",
        "pieces": "divided among 4 processes",
        "plain": r"DataParallel\(problem\)",
    }
    for text in texts:
        for name, message in wanted.items():
            assert any(part in text["refusals"][name] for part in message.replace("\\", "").split("|")), text[
                "refusals"
            ]


def test_own_batches_wrapped_models_and_random_numbers(texts: list[dict[str, Any]]) -> None:
    for text in texts:
        assert all(text["use"].values()), text["use"]


def test_the_bytes_of_a_hypergradient_are_those_of_the_formula(texts: list[dict[str, Any]]) -> None:
    """docs/scaling.md: θ and λ are one number for each entry and tensor, an evaluation is three or four numbers."""
    _, model, hyper, *_ = parallel_runs.make(torch.float64)
    theta, lam = (sum(p.numel() + 1 for p in module.parameters()) for module in (model, hyper))
    sides = [(6, 6), (7, 4)]  # (d_in + 1, d_out) of the two Kronecker blocks
    counts = len(sides) + model.get_parameter("words.weight").numel() + 2 * 6  # of rows, and exact diagonals
    factors = sum(d * (d + 1) // 2 for pair in sides for d in pair)
    bases = sum(d**2 for pair in sides for d in pair)
    solve = sum(a * b for a, b in sides)
    traffic = texts[0]["traffic"]
    products = {name: one["products"] for name, one in traffic.items()}
    assert products["pcg"] == 5 and min(products["cg"], products["neumann"]) > 1
    cases = {  # evaluations; sums of θ and of λ; numbers summed for the owners of blocks, and shared by them
        "identity": (2, 2, 1, 0, 0),
        "cg": (2, 2 + products["cg"], 1, 0, 0),
        "neumann": (2, 2 + products["neumann"], 1, 0, 0),
        "kfac mc": (3, 2 + 2, 1, factors, solve),  # a sum for each of two samples: of the bare parameter
        "kfac empirical": (3, 2 + 1, 1, factors, solve),
        "kfac auto": (4, 1 + 1, 1, factors, solve),
        "ekfac": (4, 2 + 1, 1, factors + solve, bases + solve),
        "pcg": (4, 3 + 1 + products["pcg"], 1, factors, products["pcg"] * solve),
        "unrolled": (6, 9, 3, 0, 0),
    }
    assert set(cases) == set(parallel_runs.COUNTED)
    for name, (evaluations, of_theta, of_lambda, reduced, shared) in cases.items():
        passes = bool(reduced) + (name == "ekfac")  # each asks for layers called and inputs kept, and how it went
        weighted = 2 * (name == "kfac auto")  # both evaluations of the cross term: whether λ still only weights
        assert traffic[name]["sum"] == 8 * (of_theta * theta + of_lambda * lam + bool(reduced) * counts), name
        assert traffic[name]["gather"] == 8 * (3 * evaluations + 3 * passes + weighted), name
        assert all(text["traffic"][name]["reduce"] == 8 * reduced for text in texts[:2]), name
        assert sum(text["traffic"][name]["share"] for text in texts[:2]) == 8 * shared, name
        assert traffic[name]["exchange"] == 0, name


@pytest.mark.parametrize("size", [2, 4, 8])
def test_inversions_are_balanced(size: int) -> None:
    """The work of the layers of a BERT-base and of a Llama with 16 layers of 2048; their factors are balanced too."""
    group: Any = Second(Path())
    group.size = size
    attention, llama = [(768, 768)] * 4, [(2048, 2048)] * 4
    shapes = {
        "bert": (12, attention, [(768, 3072), (3072, 768)]),
        "llama": (16, llama, [(2048, 8192)] * 2 + [(8192, 2048)]),
    }
    for name, (count, heads, mlp) in shapes.items():
        parts = [nn.ModuleList(nn.Linear(a, b, name == "bert", device="meta") for a, b in one) for one in (heads, mlp)]
        owners = Owners(plan(nn.ModuleList(nn.ModuleList(map(deepcopy, parts)) for _ in range(count)), "zero"), group)
        assert len(owners.of) == count * (len(heads) + len(mlp))
        for power, most in ((3, 1.1), (2, 1.2)):
            load = [0.0] * size
            for block, rank in owners.of.items():
                load[rank] += sum(float(n) ** power for n in owners.blocks[block].shape[1:])
            assert max(load) <= most * sum(load) / size, (name, power)


def test_a_process_keeps_its_share_of_inverses_and_gathers_one_module_at_a_time(texts: list[dict[str, Any]]) -> None:
    """Of two processes, with θ on both and sharded by ``fully_shard``; five layers that are one module each."""
    for mode, layers in (("", 1), ("f", sharded_runs.LAYERS)):
        blocks = plan(sharded_runs.network(layers=layers), "zero").blocks.values()
        whole = 8 * sum(n**2 for block in blocks for n in block.shape[1:])
        held = [text["held"][mode] for text in texts[:2]]
        assert sum(held) == whole and max(held) < 0.6 * whole
    for text in texts[:2]:
        assert text["gathered"]["auto"] < 0.25 and text["gathered"]["forward"] < 0.5  # of θ; with tangents twice


def test_cached_curvature_continues_with_another_number_of_processes(four: Path) -> None:
    """Two processes, then three whose parts of a batch differ in size, then one."""
    for name in sharded_runs.CACHED:
        torch.manual_seed(0)
        wanted = _alone(name, 6)
        for key, x in _alone(name, 6, four / name).items():
            assert float((x - wanted[key]).abs().max()) < 1e-10, (name, key)


def test_one_process_is_the_problem_itself() -> None:
    problem, model, hyper, rows, trusted = parallel_runs.make(torch.float64)
    divided = hk.training.DataParallel(problem)
    assert divided.group.size == 1
    found, wanted = (hk.kfac().compute(p, model, hyper, rows, trusted).grads for p in (divided, problem))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(hk.HyperkronError, match="divided already"):
        hk.training.DataParallel(divided)


# --- θ and λ that are sharded ----------------------------------------------------------------


def test_a_model_of_fully_shard_gives_the_same_hypergradient_and_run(tensors: dict[str, Tensor]) -> None:
    for size, names in ((2, sharded_runs.NAMED), (4, sharded_runs.WITHOUT_ROWS)):
        for name in names:
            problem, model, hyper = sharded_runs.PROBLEM, sharded_runs.network(), sharded_runs.Lambda().double()
            wanted = sharded_runs.hypergradient(sharded_runs.METHODS[name](), problem, model, hyper)
            error = float((tensors[f"θ {size} {name}"] - wanted).norm() / wanted.norm())
            assert error < 1e-10, f"{name} on {size} differs by {error:.1e}"
    for name, x in _alone("soba", 2).items():
        assert float((tensors[f"θ trained {name}"] - x).abs().max()) < 1e-10, name


def test_a_model_that_fully_shard_has_given_to_one_process_is_the_model_itself(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        found, wanted = (sharded_runs.named(None, ["kfac", "ekfac"], mode, torch.float64) for mode in ("f", ""))
    finally:
        dist.destroy_process_group()
    for name, x in wanted.items():
        assert float((found[name] - x).norm() / x.norm()) < 1e-10, name


def test_forward_mode_with_lambda_inside_a_sharded_model_is_refused(tmp_path: Path) -> None:
    """Tangents of a softmax are computed in place, which autograd does not notice in tensors that are gathered."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rows, labels = torch.randn(8, 4, dtype=torch.float64), torch.arange(8) % 3

    def inner(model: nn.Module, shift: nn.Module, batch: Any) -> hk.Loss:
        return hk.losses.cross_entropy(model(batch[0] + shift(torch.ones_like(batch[0])).tanh()), batch[1])

    def outer(model: nn.Module, shift: nn.Module, batch: Any) -> hk.Loss:
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        problem, shift = hk.training.DataParallel(hk.BilevelProblem(inner, outer)), nn.Linear(4, 4).double()
        with pytest.raises(hk.HyperkronError, match=r"cross='forward' does not pass .* sharded, .*use cross='reverse'"):
            hk.cg(3, cross="forward").compute(problem, model, shift, (rows, labels), (rows, labels))
    finally:
        dist.destroy_process_group()


class Stopped(torch.autograd.Function):
    """x, whose gradient is ``None``."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> None:
        return None


def test_a_function_without_a_gradient_stops_that_of_sharded_tensors(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        group = Group(dist.group.WORLD)
        x = nn.Parameter(sharded_over(group, torch.ones(6), 6))
        for made in (taken(group, x, torch.tensor([0, 2])), squared_norms([x])):
            (found,) = torch.autograd.grad(Stopped.apply(made).sum(), x)
            assert float(sharded_runs.whole(found).abs().sum()) == 0
    finally:
        dist.destroy_process_group()


def test_sharded_weights_take_any_whole_numbers_and_name_those_that_do_not_fit(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        sharded, plain = hk.SampleWeights(6, group=Group(dist.group.WORLD)), hk.SampleWeights(6)
        with torch.no_grad():
            for one in (sharded, plain):
                getattr(one.weight, "_local_tensor", one.weight).copy_(torch.arange(6) / 6)
        for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
            index = torch.tensor([1, 0, 1, 0, 0, 5], dtype=dtype)
            assert torch.equal(sharded(index), plain(index))
        for wrong in (torch.tensor([6]), torch.tensor([0.0, 1.0]), None):
            with pytest.raises(hk.HyperkronError, match="does not fit 6 rows of λ"):
                sharded(wrong)
    finally:
        dist.destroy_process_group()


def test_a_run_of_fully_shard_continues_on_one_process(tmp_path: Path) -> None:
    """Its model is sharded there, too, though into one part; checkpoints were read as those of plain models."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        for steps in (2, 4):
            problem, hyper = hk.training.DataParallel(sharded_runs.PROBLEM), sharded_runs.Lambda().double()
            model, algorithm = sharded_runs.sharded(sharded_runs.network()), sharded_runs.ALGORITHMS["kfac"]()
            found = sharded_runs.trained(algorithm, problem, model, hyper, steps, tmp_path / "run")
    finally:
        dist.destroy_process_group()
    for name, x in _alone("kfac", 4).items():
        assert float((found[name] - x).abs().max()) < 1e-10, name


def test_an_evaluation_of_a_sharded_model_changes_nothing(tmp_path: Path) -> None:
    """A forward pass without gradients leaves the parameters of the root whole; they were taken for plain ones."""

    class Evaluating(hk.training.Callback):
        def on_step(self, run: hk.Run, report: Any) -> None:
            with torch.no_grad():
                run.state.model(sharded_runs.batches()[0][0])

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    try:
        ends = []
        for callbacks in ([], [Evaluating()]):
            model, hyper = sharded_runs.sharded(sharded_runs.network()), sharded_runs.Lambda().double()
            problem, method = hk.training.DataParallel(sharded_runs.PROBLEM), hk.kfac(1e-2, refresh_every=3)
            data = sharded_runs.batches()
            hk.fit(problem, model, hyper, hk.AID(method, inner_steps=2), *data, steps=4, callbacks=callbacks)
            ends.append(torch.cat([p.detach().reshape(-1) for p in hyper.parameters()]))
    finally:
        dist.destroy_process_group()
    assert torch.equal(*ends)


def test_sharded_example_weights_are_those_of_one(tensors: dict[str, Tensor], four: Path) -> None:
    """The same hypergradients and runs; a run of 2, then 4 processes continues on 1."""
    for name in sharded_runs.WEIGHTED:
        problem, model, hyper = sharded_runs.PROBLEM, sharded_runs.network(), sharded_runs.Lambda().double()
        wanted = sharded_runs.hypergradient(sharded_runs.METHODS[name](), problem, model, hyper)
        error = float((tensors[f"λ 2 {name}"] - wanted).norm() / wanted.norm())
        assert error < 1e-12, f"{name} differs by {error:.1e}"
    for name, x in _alone("soba", 3).items():
        assert float((tensors[f"λ trained {name}"] - x).abs().max()) < 1e-10, name
    end = parallel_runs.LEGS[-1]
    files = {path.name for path in max((four / "weights").glob("step-*")).iterdir()}
    assert {f"tensors-rank0000{rank}.safetensors" for rank in range(4)} < files
    resumed, wanted_end = _alone("kfac", end, four / "weights"), _alone("kfac", end)
    for name, x in wanted_end.items():
        assert float((resumed[name] - x).abs().max()) < 1e-10, name


def _alone(name: str, steps: int, folder: Path | None = None) -> dict[str, Tensor]:
    """θ and λ at the end of a run of this process."""
    problem = hk.training.DataParallel(sharded_runs.PROBLEM)
    model, hyper = sharded_runs.network(), sharded_runs.Lambda().double()
    return sharded_runs.trained(sharded_runs.ALGORITHMS[name](), problem, model, hyper, steps, folder)


def test_a_process_holds_its_share_of_sharded_weights_and_sends_as_much_for_any_number(
    texts: list[dict[str, Any]],
) -> None:
    for text in texts[:2]:
        few, many = text["costs"]
        assert few.pop("held") == 3 * 24 // 2 and many.pop("held") == 3 * 2400 // 2  # λ and the two moments of Adam
        assert few == many and few["scatter"] > 0


def test_what_is_sharded_otherwise_is_refused_by_name(texts: list[dict[str, Any]]) -> None:
    wanted = {
        "tensor parallel": "model parameter head.weight is a DTensor (S(0)) that fully_shard has not made",
        "two dimensions": "over a mesh of shape (2, 2); only rows over one dimension",
        "mixed precision": "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
        "plain problem": "by fully_shard, but problem is not a DataParallel; use hyperkron.training",
        "weights": "hyper parameter weights.weight is sharded, but problem is not a DataParallel",
    }
    for text in texts:
        for name, message in wanted.items():
            assert message in text["sharded"][name], text["sharded"][name]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_nccl_with_one_process() -> None:
    """θ, λ and both sharded, against a plain process."""
    folders = [str(Path(__file__).parents[2] / "benchmarks"), *sys.path]
    here = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
    code = "import json, ranks; print(json.dumps(ranks.nccl()))"
    done = subprocess.run([sys.executable, "-c", code], env=here, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    for name, error in json.loads(done.stdout.splitlines()[-1]).items():
        assert name == "device" or error < (1e-10 if "float64" in name else 1e-5), (name, error)


def test_a_problem_that_each_process_computes_for_itself_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, model, hyper, *batches = parallel_runs.make(torch.float64)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(hk.solution, "_warned", set())
    with pytest.warns(hk.HyperkronWarning, match="there are 2 processes, but problem is not divided among them"):
        hk.identity().compute(problem, model, hyper, *batches)


def test_softmax_weights_are_not_sharded() -> None:
    with pytest.raises(hk.HyperkronError, match="softmax"):
        hk.SampleWeights(4, "softmax", group=hk.training.DataParallel(sharded_runs.PROBLEM).group)


class Second:
    """The second of two processes; the first makes the folder, or cannot, while the second waits for it."""

    rank, size = 1, 2

    def __init__(self, folder: Path, fails: bool = False) -> None:
        self.folder, self.fails = folder, fails

    def all(self, condition: bool) -> bool:
        if not self.fails:
            self.folder.mkdir()
        return condition and not self.fails

    def numbers(self, *values: float) -> list[list[float]]:
        return [[float(self.fails), *[0.0] * (len(values) - 1)], list(values)]


def test_rows_are_written_once_the_folder_is_there(tmp_path: Path) -> None:
    group: Any = Second(tmp_path / "staging")
    [(name, record)] = write_rows(tmp_path / "staging", {}, group).items()
    assert (tmp_path / "staging" / name).stat().st_size == record["size"] > 0
    broken: Any = Second(tmp_path / "gone", fails=True)
    with pytest.raises(CheckpointError, match=r"could not be saved in .* \(another process says why\)"):
        write_rows(tmp_path / "gone", {}, broken)
