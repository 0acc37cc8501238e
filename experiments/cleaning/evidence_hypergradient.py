"""Does the hypergradient of (log κ, log β, log γ) point where retraining says? KFAC, identity, two curvatures.

    python -m experiments.cleaning.evidence_hypergradient            # TREC, Youtube, SMS with 10 trusted rows a class

The inner loss of `hyperkron clean` has a term −log Σ_k f(k) e(k). Its gradient is that of a cross-entropy with EM's
soft target, whose Gauss–Newton matrix is larger: it is the one the true labels would have given. The truth is the
central difference of the held-out loss over fold models retrained from the same seeds with κ, β or γ times e^±0.5.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch

import hyperkron as hk
from experiments.cleaning.compare import work_for
from experiments.cleaning.datasets import Setting, load
from experiments.records import write_result
from hyperkron.cleaning.evidence import Evidence
from hyperkron.cleaning.fold_models import Half, Learner, inner
from hyperkron.cleaning.method import halves, matrix_expert, opinion, pooled_expert, trusted_expert
from hyperkron.cleaning.trainer import Separate, descend
from hyperkron.cleaning.work import Work

STEP = 0.5


def halves_of(work: Work) -> list[Half]:
    """The two problems, as ``clean`` makes them."""
    alone, pooled = trusted_expert(work), pooled_expert(work)
    first = opinion(work, [alone["asked"], pooled, matrix_expert(work, pooled)])
    return halves(work, first, alone["halved"])


def trained(work: Work, half: Half, shift: Sequence[float], seed: int) -> tuple[Learner, Evidence]:
    """A fold model trained to the end with λ kept at its start, moved by ``shift``."""
    evidence = Evidence()
    evidence.log_scale.data += torch.tensor(shift)
    learner, plan = Learner(work.build, work.inputs, work.given, half, work.short, seed), work.short
    group = Separate([learner.network], work.inputs)
    group.set_targets([learner.targets(evidence)])
    descend(group, [learner.batches()], plan, plan.steps(len(half.noisy)))
    return learner, evidence


def held_out(work: Work, both: list[Half], shift: Sequence[float], seeds: int) -> float:
    """Mean held-out loss of retrained fold models."""
    total = 0.0
    for seed in range(seeds):
        for half in both:
            learner, evidence = trained(work, half, shift, seed)
            with torch.no_grad():
                total += float(plain_outer(learner.network, evidence, learner.trusted()).value)
    return total / (seeds * len(both))


def plain_outer(network: Any, evidence: Any, batch: Any) -> hk.losses.Loss:
    """The held-out loss alone."""
    return hk.losses.cross_entropy(network(*batch[0]), batch[1])


def soft_target(network: Any, evidence: Any, batch: Any) -> hk.losses.Loss:
    """EM's form of the inner loss: the same gradient, the curvature of complete data."""
    x, opinion_, given, sure, label, belief = batch
    weight, believed = evidence.shares(belief)
    output = network(*x)
    log_e = torch.cat([evidence(opinion_, given), sure])
    soft = hk.losses.cross_entropy(output, (output.log_softmax(1).detach() + log_e).softmax(1), weight=weight)
    return soft + hk.losses.cross_entropy(output, label, weight=believed)


def hypergradient(work: Work, both: list[Half], make: Callable[[], Any], loss: Any, seeds: int) -> list[float]:
    """The mean over halves and seeds, at the start of λ."""
    found = torch.zeros(3)
    for seed in range(seeds):
        for half in both:
            learner, evidence = trained(work, half, (0.0, 0.0, 0.0), seed)
            evidence.zero_grad()
            batch = learner.batch(len(half.noisy))
            problem = hk.BilevelProblem(loss, plain_outer)
            make().backward(problem, learner.network, evidence, batch, learner.trusted())
            assert evidence.log_scale.grad is not None
            found += evidence.log_scale.grad / (seeds * len(both))
    return found.tolist()


def measure(setting: Setting, seeds: int) -> dict[str, list[float]]:
    """The truth and every method, d/d(log κ), d/d(log β) and d/d(log γ)."""
    work = work_for(load(setting, 0), 0, torch.device("cpu"), hk.CleanConfig())
    both = halves_of(work)
    steps = (STEP * torch.eye(3)).tolist()
    ends = [[held_out(work, both, [sign * x for x in step], seeds) for sign in (1, -1)] for step in steps]
    found = {"retraining": [(up - down) / (2 * STEP) for up, down in ends]}
    methods = {
        "identity": hk.identity,
        "KFAC 1e-2": lambda: hk.kfac(1e-2),
        "CG-50 on GGN 1e-2": lambda: hk.cg(50, curvature=hk.curvature.GGN(1e-2)),
    }
    for name, make in methods.items():
        found[name] = hypergradient(work, both, make, inner, seeds)
        found[f"{name}, soft target"] = hypergradient(work, both, make, soft_target, seeds)
    return found


def main() -> None:
    """Print the table and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", default="trec,youtube,sms")
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    for name in options.datasets.split(","):
        results[name] = measure(Setting(name, "weak", options.per_class), options.seeds)
        print(name)
        for method, slopes in results[name].items():
            told = "   ".join(f"d/dlog {name} {slope:+.4f}" for name, slope in zip("κβγ", slopes, strict=True))
            print(f"  {method:32} {told}", flush=True)
    found = {"per_class": options.per_class, "seeds": options.seeds, "results": results}
    write_result("cleaning/evidence_hypergradient.json", found)


if __name__ == "__main__":
    main()
