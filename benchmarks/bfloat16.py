"""How much a model under bfloat16 autocast changes its KFAC hypergradient: cosine to that of the float32 model.

Beside it what the model's own arithmetic does, whatever the method: the cosine of ∂θ J_out, and of the hypergradient
without curvature. And what our part does: the cosine of v where the factors alone come from the bfloat16 model. Last,
what comes out by default, where the library looks whether autocast is good enough and does without it where it is not.

With random images and labels ∂θ J_out is what is left when hundreds of gradients cancel; with those of CIFAR-10 they
agree more.

python benchmarks/bfloat16.py --device cuda --out bfloat16_h200.json
python benchmarks/bfloat16.py --device cuda --workloads resnet7 resnet3 --cifar data --steps 20 100 300
python benchmarks/bfloat16.py --small
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import write_result
from workloads import INNER_STEPS, WORKLOADS, Workload, inner, outer, under_autocast

import hyperkron as hk
from hyperkron import trees
from hyperkron.cleaning.data import read


def cosine(a: trees.Tree, b: trees.Tree) -> float:
    """Of the angle between two vectors, in float64: angles below 1e-4 have a cosine of one in float32."""
    a, b = ({name: x.double() for name, x in tree.items()} for tree in (a, b))
    return float(trees.dot(a, b) / (trees.norm(a) * trees.norm(b)))


def compared(work: Workload, device: str) -> dict[str, float | str]:
    """One line of the table."""
    half_inner, half_outer = under_autocast(inner, device), under_autocast(outer, device)

    def result(method: hk.Implicit, problem: hk.BilevelProblem) -> hk.HypergradientResult:
        return method.compute(problem, work.model, work.hyper, work.batches[0], work.outer_batch)

    problems = {
        "float32": hk.BilevelProblem(inner, outer),
        "bfloat16": hk.BilevelProblem(half_inner, half_outer, autocast=True),
        "factors": hk.BilevelProblem(half_inner, outer, autocast=True),
        "default": hk.BilevelProblem(half_inner, half_outer),
    }
    found = {label: result(hk.kfac(fisher="type-2"), problem) for label, problem in problems.items()}
    plain = {label: result(hk.identity(), problems[label]) for label in ("float32", "bfloat16")}
    full, half = found["float32"], found["bfloat16"]
    assert all(r.solution is not None for r in (*found.values(), *plain.values()))
    v = {label: r.solution.value for label, r in found.items() if r.solution is not None}
    b = {label: r.solution.value for label, r in plain.items() if r.solution is not None}  # v = ∂θ J_out
    return {
        "workload": work.name,
        "cosine": cosine(full.grads, half.grads),
        "cosine_by_default": cosine(full.grads, found["default"].grads),
        "default": str(found["default"].stats.get("autocast", "kept")),
        "ratio_of_norms": float(trees.norm(half.grads) / trees.norm(full.grads)),
        "outer_gradient": cosine(b["float32"], b["bfloat16"]),
        "identity": cosine(plain["float32"].grads, plain["bfloat16"].grads),
        "v_by_factors": cosine(v["float32"], v["factors"]),
        **{f"cross_{label}": str(found[label].stats["cross"]) for label in ("float32", "bfloat16")},
    }


def pictures(work: Workload, folder: Path) -> None:
    """CIFAR-10's images and labels in place of random ones."""
    rows = read(folder / "cifar10", part="train")
    x, y = torch.as_tensor(rows.inputs).float() / 255, torch.as_tensor(rows.labels)
    size, device = len(work.outer_batch[1]), work.outer_batch[1].device
    x, y = (x[: size * (INNER_STEPS + 1)].to(device) - 0.47) / 0.25, y[: size * (INNER_STEPS + 1)].to(device)
    given = zip(x.split(size), y.split(size), (b[2] for b in [*work.batches, work.outer_batch]), strict=True)
    *work.batches, work.outer_batch = given


def main() -> None:
    """Parse, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, nargs="+", default=[20], help="inner steps before the comparisons")
    parser.add_argument("--cifar", type=Path, help="folder with CIFAR-10, whose images the ResNets then get")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--out")
    args = parser.parse_args()
    rows = []
    for name in args.workloads:
        work = WORKLOADS[name](args.device, args.small)
        if args.cifar:
            pictures(work, args.cifar)
        done = 0
        for steps in args.steps:
            for i in range(done, steps):
                work.inner_step(i)
            done = steps
            images = {"images": "CIFAR-10" if args.cifar else "random"} if name != "bert" else {}
            rows.append({**compared(work, args.device), **images, "steps": steps})
            print(rows[-1], flush=True)
        del work
    if args.out:
        write_result(args.out, {"rows": rows, "seed": 0})


if __name__ == "__main__":
    main()
