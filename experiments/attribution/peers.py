"""Every way to score examples that is compared: (model, setting) → (queries × examples), higher for the helpful."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import hyperkron as hk
from experiments.attribution.settings import DECAY, Setting
from hyperkron.attribution import Attribution, agreeing_damping
from hyperkron.curvature import EKFAC, GGN, ShrunkGGN
from hyperkron.solvers import CG, Direct

DEFAULT = "EKFAC rademacher, δ=0.0001 (default)"
"""What ``hk.attribute`` does by itself."""
AGREEING = "EKFAC, δ by agreement with PCG"
LAYERS = ", without norms"
"""Marks methods that leave out what KFAC does not cover; they differ from others only where there is such a thing."""


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> hk.losses.Loss:
    """What the networks are trained on."""
    return hk.losses.cross_entropy(model(batch[0]), batch[1]) + hk.losses.l2(model, DECAY)


def ours(method: Any, **options: Any) -> Any:
    """A score by ``hk.attribute``."""

    def score(model: nn.Module, setting: Setting) -> Tensor:
        return hk.attribute(
            loss, model, setting.train, setting.queries, method=method, batch_size=600, **options
        ).scores

    return score


def example_gradients(model: nn.Module, rows: tuple[Tensor, Tensor], of: str = "loss") -> Tensor:
    """One gradient per row: of the loss, or of the margin log p/(1 − p) that TRAK uses."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def value(one: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(model, one, (x[None],))
        if of == "loss":
            return F.cross_entropy(logits, y[None])
        log_p = -F.cross_entropy(logits, y[None])
        return log_p - torch.log1p(-log_p.exp().clamp(max=1 - 1e-6))

    found = []
    for x, y in zip(rows[0].split(200), rows[1].split(200), strict=True):
        gradients = vmap(grad(value), in_dims=(None, 0, 0))(params, x, y)
        found.append(torch.cat([g.flatten(1) for g in gradients.values()], 1))
    return torch.cat(found)


def cosine(model: nn.Module, setting: Setting) -> Tensor:
    """Cosines of gradients."""
    train, queries = (F.normalize(example_gradients(model, rows)) for rows in (setting.train, setting.queries))
    return queries @ train.T


def trak(model: nn.Module, setting: Setting, width: int = 512, seed: int = 0) -> Tensor:
    """TRAK (Park et al., 2023) with one network: projected gradients of margins, (ΦᵀΦ)⁻¹, times 1 − p."""
    train, queries = (example_gradients(model, rows, "margin") for rows in (setting.train, setting.queries))
    random = torch.Generator().manual_seed(seed)
    projection = torch.randn(train.shape[1], width, generator=random).to(train) / width**0.5
    train, queries = train @ projection, queries @ projection
    with torch.no_grad():
        p = model(setting.train[0]).softmax(1).gather(1, setting.train[1][:, None])[:, 0]
    gram = train.T @ train
    gram.diagonal().add_(1e-6 * gram.diagonal().mean())
    return (queries @ torch.linalg.solve(gram, train.T)) * (1 - p)


def kronfluence(damping: float | None, aggregate: bool = False, share: int = 1, batch_size: int = 600) -> Any:
    """kronfluence's EK-FAC; ``None`` is its default damping, a tenth of the mean eigenvalue of each layer.

    With ``aggregate`` the gradients of all queries are added up, and there is one row of scores. Factors and spectrum
    are measured on one of ``share`` rows.
    """
    several = kronfluence_with([damping], aggregate, share, batch_size)
    return lambda model, setting: several(model, setting)[damping]


def kronfluence_with(
    dampings: Sequence[float | None], aggregate: bool = False, share: int = 1, batch_size: int = 600
) -> Callable[[nn.Module, Setting], dict[float | None, Tensor]]:
    """The scores with each of several dampings, from the same factors and spectrum."""

    def score(model: nn.Module, setting: Setting) -> dict[float | None, Tensor]:
        import copy

        from kronfluence.analyzer import Analyzer, prepare_model  # type: ignore[import-not-found]
        from kronfluence.arguments import FactorArguments, ScoreArguments  # type: ignore[import-not-found]
        from kronfluence.task import Task  # type: ignore[import-not-found]
        from torch.utils.data import TensorDataset

        class Classification(Task):  # type: ignore[misc]
            def compute_train_loss(self, batch: Any, model: nn.Module, sample: bool = False) -> Tensor:
                logits = model(batch[0])
                if not sample:
                    return F.cross_entropy(logits, batch[1], reduction="sum")
                with torch.no_grad():
                    drawn = torch.multinomial(logits.softmax(1), 1)[:, 0]
                return F.cross_entropy(logits, drawn, reduction="sum")

            def compute_measurement(self, batch: Any, model: nn.Module) -> Tensor:
                return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

        task = Classification()
        network = prepare_model(copy.deepcopy(model), task)
        train, queries = (TensorDataset(*(x.cpu() for x in rows)) for rows in (setting.train, setting.queries))
        with tempfile.TemporaryDirectory() as folder:
            analyzer = Analyzer(
                "a",
                network,
                task,
                cpu=setting.train[0].device.type == "cpu",
                output_dir=folder,
                disable_tqdm=True,
                disable_model_save=True,
            )
            most = None if share == 1 else len(train) // share
            measured = FactorArguments(strategy="ekfac", covariance_max_examples=most, lambda_max_examples=most)
            analyzer.fit_all_factors("f", train, per_device_batch_size=batch_size, factor_args=measured)
            found: dict[float | None, Tensor] = {}
            for damping in dampings:
                analyzer.compute_pairwise_scores(
                    f"scores {damping}",
                    "f",
                    queries,
                    train,
                    per_device_query_batch_size=100,
                    per_device_train_batch_size=batch_size,
                    score_args=ScoreArguments(damping_factor=damping, aggregate_query_gradients=aggregate),
                )
                found[damping] = analyzer.load_pairwise_scores(f"scores {damping}")["all_modules"]
        return found

    return score


def agreeing(solver: Any = None, grid: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5), count: int = 10) -> Any:
    """EKFAC with the damping whose scores of a few queries correlate most with those of ``solver``, by default PCG-10
    with the damping by the rule; no retraining is used."""

    def score(model: nn.Module, setting: Setting) -> Tensor:
        few = replace(setting, queries=(setting.queries[0][:count], setting.queries[1][:count]))
        wanted = Attribution((solver or by_rule(10))(model, few))
        best = agreeing_damping(lambda d: Attribution(ours(hk.ekfac(d, fisher="type-2"))(model, few)), wanted, grid)
        return ours(hk.ekfac(best, fisher="type-2"))(model, setting)

    return score


def layers_only(damping: float, fisher: Any) -> hk.Implicit:
    """EKFAC without the parameters that KFAC does not cover."""
    return hk.Implicit(EKFAC(damping, fisher=fisher, fallback="zero"), Direct())


def by_rule(iterations: int) -> Any:
    """PCG with the damping that the length of the training amounts to."""

    def score(model: nn.Module, setting: Setting) -> Tensor:
        d = setting.damping
        return ours(hk.pcg(iterations, d, preconditioner=EKFAC(d, fisher="type-2")))(model, setting)

    return score


def shrunk(iterations: int) -> Any:
    """The same with the Gauss–Newton matrix drawn towards EKFAC; the share is the default of the library."""

    def score(model: nn.Module, setting: Setting) -> Tensor:
        d = setting.damping
        curvature = ShrunkGGN(d, fisher="type-2")
        return ours(hk.pcg(iterations, curvature=curvature, preconditioner=EKFAC(d, fisher="type-2")))(model, setting)

    return score


def cg_by_rule(iterations: int) -> Any:
    """Plain CG with the same damping."""
    return lambda model, setting: ours(hk.Implicit(GGN(setting.damping), CG(iterations)))(model, setting)


def methods(which: str) -> dict[str, Any]:
    """The ways compared, by name."""
    small = {
        "identity (gradient products)": ours(hk.identity()),
        "gradient cosine": cosine,
        "TRAK, one network": trak,
        "KFAC, δ=0.0001": ours(hk.kfac(1e-4, fisher="type-2")),
        "KFAC reduce, δ=0.0001": ours(hk.kfac(1e-4, fisher="type-2", sharing="reduce")),
        **{f"EKFAC, δ={d:g}": ours(hk.ekfac(d, fisher="type-2")) for d in (1e-2, 1e-3, 1e-4, 1e-5)},
        **{f"EKFAC, δ={d:g}{LAYERS}": ours(layers_only(d, "type-2")) for d in (1e-3, 1e-4)},
        "EKFAC mc, δ=0.0001": ours(hk.ekfac(1e-4)),
        f"EKFAC mc, δ=0.0001{LAYERS}": ours(layers_only(1e-4, "mc")),
        DEFAULT: ours(None),
        AGREEING: agreeing(),
        **{f"kronfluence, damping {d}": kronfluence(d) for d in (None, 1e-3, 1e-5)},
    }
    if which == "small":
        return small
    solved = {f"PCG-{k}, shrunk, δ by the rule": shrunk(k) for k in (3, 10)}
    solved |= {f"PCG-{k}, δ by the rule": by_rule(k) for k in (3, 10)}
    solved |= {f"CG-{k}, δ by the rule": cg_by_rule(k) for k in (10, 50)}
    solved["PCG-10, δ=0.0001"] = ours(hk.pcg(10, 1e-4, preconditioner=EKFAC(1e-4, fisher="type-2")))
    return {**solved, **small}
