"""Our Kronecker factors and their inverse against those of curvlinops, an independent implementation.

Both write a layer's block as B ⊗ A with A the mean of a aᵀ over rows and the loss's 1/N inside B, so for the
cross-entropy A and B agree one by one. They differ where a loss is averaged over more than its examples:
torch's ``MSELoss`` is 2/D times our ½‖f − y‖² (D entries an example), its ``BCEWithLogitsLoss`` 1/D times
ours. Then B_theirs = r · B_ours with the ratio r written next to each criterion below; A is the same.

For Monte-Carlo factors curvlinops is given the labels that our own loss draws, through its ``draw_label``.

Not compared, because the definitions differ: grouped convolutions (curvlinops averages the groups into one
block), padding modes other than zeros (it pads with zeros), and layers called more than once (it sums A over
the calls, where we average over all rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from hyperkron.curvature import KFAC
from hyperkron.curvature.kfac import KroneckerState
from hyperkron.evaluation.point import Point
from hyperkron.losses import Loss, binary_cross_entropy, cross_entropy, mse
from hyperkron.problem import BilevelProblem
from transformer import TransformerClassifier

curvlinops = pytest.importorskip("curvlinops", reason="curvlinops is a peer: pip install -r requirements/peers.txt")

FISHERS = ("mc", "type-2", "empirical")
SHARINGS = ("expand", "reduce")
SEED = 3
DAMPING = 1e-2


# --- criteria: the same loss in both conventions -----------------------------------------------------------


@dataclass(frozen=True)
class Criterion:
    """One loss in both libraries, with the ratio of their curvatures."""

    ours: Callable[[Tensor, Tensor], Loss]
    theirs: nn.Module
    ratio: Callable[[Tensor], float]
    """B_theirs / B_ours, from the model's output."""
    empirical_ratio: Callable[[Tensor], float]
    label: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The label that a Monte-Carlo vector of ours stands for, from (vector, √coefficient, output)."""
    target: Callable[[Tensor], Tensor]


def _classes(output: Tensor) -> Tensor:
    return torch.randint(output.shape[-1], output.shape[:-1])


CROSS_ENTROPY = Criterion(
    ours=cross_entropy,
    theirs=nn.CrossEntropyLoss(),
    ratio=lambda f: 1.0,
    empirical_ratio=lambda f: 1.0,
    label=lambda v, root, f: v.argmin(-1),  # √w (p − e_y) is negative at y alone
    target=_classes,
)
# MSELoss = (2/D) · ½‖f − y‖²; its Gaussian has variance ½. The empirical Fisher squares gradients, so 4/D.
SQUARED_ERROR = Criterion(
    ours=mse,
    theirs=nn.MSELoss(),
    ratio=lambda f: 2 / f.shape[-1],
    empirical_ratio=lambda f: 4 / f.shape[-1],
    label=lambda v, root, f: f - v / root * 0.5**0.5,  # 2 (f − y) = √2 ε
    target=torch.randn_like,
)
BINARY = Criterion(
    ours=binary_cross_entropy,
    theirs=nn.BCEWithLogitsLoss(),
    ratio=lambda f: 1 / f.shape[-1],
    empirical_ratio=lambda f: 1 / f.shape[-1],
    label=lambda v, root, f: (v < 0).to(v.dtype),  # √w (p − y) is negative where y = 1
    target=lambda f: torch.randint_like(f, 2),
)


# --- models ------------------------------------------------------------------------------------------------


class _PerToken(nn.Module):
    """Tokens to one prediction for each, through attention: every linear layer shares its weight over T."""

    def __init__(self) -> None:
        super().__init__()
        body = TransformerClassifier(vocab=11, classes=4, layers=1, width=8, heads=2, ffn=12, max_len=5)
        self.tokens, self.layer, self.head = body.tokens, body.layers[0], body.head

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.tokens(tokens)))


def _mlp() -> tuple[nn.Module, Tensor]:
    layers = [nn.Linear(5, 6), nn.ReLU(inplace=True), nn.Linear(6, 7, bias=False), nn.Tanh(), nn.Linear(7, 4)]
    return nn.Sequential(*layers), torch.randn(9, 5)


def _conv() -> tuple[nn.Module, Tensor]:
    """Same-size, strided, dilated and 1×1 convolutions, kernels that are not square, a norm between them."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 5, (3, 2), stride=(2, 1), padding=(1, 0), bias=False),
        nn.Tanh(),
        nn.Conv2d(5, 4, (2, 3), dilation=(1, 2), padding=(1, 2)),
        nn.Tanh(),
        nn.Conv2d(4, 6, 1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(24, 4),
    )
    return model, torch.randn(6, 3, 8, 7)


def _transformer() -> tuple[nn.Module, Tensor]:
    model = TransformerClassifier(vocab=13, classes=4, layers=2, width=8, heads=2, ffn=16, max_len=6)
    return model, torch.randint(13, (5, 6))


def _per_token() -> tuple[nn.Module, Tensor]:
    return _PerToken(), torch.randint(11, (4, 5))


CASES = {
    "mlp": (_mlp, CROSS_ENTROPY),
    "mlp-mse": (_mlp, SQUARED_ERROR),
    "mlp-binary": (_mlp, BINARY),
    "conv2d": (_conv, CROSS_ENTROPY),
    "conv2d-mse": (_conv, SQUARED_ERROR),
    "transformer": (_transformer, CROSS_ENTROPY),
    "per-token": (_per_token, CROSS_ENTROPY),
}


# --- both libraries on one problem -------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A model, a batch, a criterion and the choices of KFAC."""

    model: nn.Module
    x: Tensor
    y: Tensor
    criterion: Criterion
    fisher: Literal["mc", "type-2", "empirical"]
    sharing: Literal["expand", "reduce"]
    samples: int

    @property
    def ratio(self) -> float:
        """B_theirs / B_ours."""
        choose = self.criterion.empirical_ratio if self.fisher == "empirical" else self.criterion.ratio
        return choose(self.model(self.x))

    def inner(self, model: nn.Module, hyper: nn.Module, batch: Any) -> Loss:
        return self.criterion.ours(model(batch[0]), batch[1])


def _setting(case: str, fisher: str, sharing: str, dtype: torch.dtype, samples: int = 1) -> Setting:
    make, criterion = CASES[case]
    model, x = make()
    model = model.to(dtype).eval()
    x = x.to(dtype) if x.is_floating_point() else x
    with torch.no_grad():
        y = criterion.target(model(x))
    return Setting(model, x, y, criterion, fisher, sharing, samples)  # type: ignore[arg-type]


def _ours(setting: Setting, damping: float = DAMPING) -> tuple[KroneckerState, Any]:
    """Our state, whose factors are kept because ``ema`` is not zero, and the operator with its inverse."""
    curvature = KFAC(
        damping=damping,
        fisher=setting.fisher,
        sharing=setting.sharing,
        samples=setting.samples,
        ema=0.5,
        seed=SEED,
    )
    state = curvature.init()
    problem = BilevelProblem(setting.inner, setting.inner)
    batch = (setting.x, setting.y)
    with Point(problem, setting.model, nn.Linear(1, 1).to(next(setting.model.parameters())), batch, batch) as point:
        operator = curvature.operator(point, state)
    return state, operator


def _our_labels(setting: Setting) -> Iterator[Tensor]:
    """The labels that our Monte-Carlo vectors stand for, in the order in which KFAC draws them."""
    (term,) = setting.inner(setting.model, nn.Identity(), (setting.x, setting.y)).terms
    output = term.output.detach()
    root = (term.coefficients / setting.samples).sqrt()
    root = root.reshape(root.shape + (1,) * (output.ndim - root.ndim))
    for vector in term.vectors("mc", setting.samples, torch.Generator().manual_seed(SEED)):
        yield setting.criterion.label(vector, root, output)


class _ClassesSecond(nn.Module):
    """Logits (N, ..., C) as (N, C, ...), which is where torch and curvlinops look for classes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).movedim(-1, 1)


def _theirs(setting: Setting) -> Any:
    """curvlinops' operator over all parameters of linear and convolutional layers, with factors computed."""
    labels = iter(list(_our_labels(setting)))  # drawn before curvlinops' hooks are in place

    class Told(curvlinops.KFACLinearOperator):  # type: ignore[misc]
        def draw_label(self, output: Tensor) -> Tensor:
            label = next(labels)
            return label.reshape(output.shape) if label.is_floating_point() else label.reshape(-1)

    by_layer = [m for m in setting.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    classes = setting.criterion is CROSS_ENTROPY
    operator = Told(
        _ClassesSecond(setting.model) if classes else setting.model,
        setting.criterion.theirs,
        [p for m in by_layer for p in m.parameters()],
        [(setting.x, setting.y)],
        fisher_type=setting.fisher,
        mc_samples=setting.samples,
        kfac_approx=setting.sharing,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    operator.compute_kronecker_factors()
    return operator


def _relative(found: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """‖found − expected‖ / max(‖expected‖, floor)."""
    return float((found - expected).norm()) / max(float(expected.norm()), floor)


def _largest_difference(setting: Setting) -> float:
    """The largest relative difference over A, B and B ⊗ A of all layers.

    Some factors are zero but for rounding (with ``reduce`` that of an attention's keys, because a softmax
    does not see a shift), so what is below a billionth of the largest factor is compared to that.
    """
    state, _ = _ours(setting)
    theirs = _theirs(setting)
    strip = len("model.") if isinstance(theirs._model_func, _ClassesSecond) else 0
    inputs = {name[strip:]: a for name, a in theirs._input_covariances.items()}
    gradients = {name[strip:]: b for name, b in theirs._gradient_covariances.items()}
    assert set(state.factors) == set(inputs) == set(gradients)
    floor = 1e-9 * max(float(b.norm()) for b in gradients.values())
    worst = 0.0
    for name, (a, b) in state.factors.items():
        assert a.shape[0] == b.shape[0] == 1
        scaled = b[0] * setting.ratio
        worst = max(worst, _relative(a[0], inputs[name]), _relative(scaled, gradients[name], floor))
        product = torch.kron(gradients[name], inputs[name])
        worst = max(worst, _relative(torch.kron(scaled, a[0]), product, floor * float(a.norm())))
    return worst


# --- the tests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("case", CASES)
def test_factors_agree(case: str, fisher: str, sharing: str) -> None:
    """In float64, to ten digits."""
    assert _largest_difference(_setting(case, fisher, sharing, torch.float64)) < 1e-10


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("fisher", FISHERS)
@pytest.mark.parametrize("case", ["mlp", "conv2d", "transformer"])
def test_factors_agree_in_single_precision(case: str, fisher: str, sharing: str) -> None:
    assert _largest_difference(_setting(case, fisher, sharing, torch.float32)) < 1e-5


@pytest.mark.parametrize("case", ["mlp", "mlp-mse", "conv2d", "per-token"])
def test_factors_agree_for_several_samples(case: str) -> None:
    assert _largest_difference(_setting(case, "mc", "expand", torch.float64, samples=3)) < 1e-10


def test_the_comparison_sees_other_labels() -> None:
    """Where the samples differ the factors do: the Monte-Carlo comparison is not vacuous."""
    setting = _setting("mlp", "mc", "expand", torch.float64)
    state, _ = _ours(setting)
    other = curvlinops.KFACLinearOperator(
        setting.model,
        nn.CrossEntropyLoss(),
        list(setting.model.parameters()),
        [(setting.x, setting.y)],
        separate_weight_and_bias=False,
    )
    other.compute_kronecker_factors()
    assert _relative(state.factors["4"][1][0], other._gradient_covariances["4"]) > 1e-2


@pytest.mark.parametrize("case", ["mlp", "conv2d", "transformer"])
def test_damped_inverses_agree(case: str) -> None:
    """(B + δ_B I)⁻¹ V (A + δ_A I)⁻¹ with δ split by π, on all layers at once."""
    setting = _setting(case, "type-2", "expand", torch.float64)
    _, ours = _ours(setting)
    theirs = _theirs(setting)
    inverse = curvlinops.KFACInverseLinearOperator(theirs, damping=DAMPING, use_heuristic_damping=True, min_damping=0)
    names = {id(p): name for name, p in setting.model.named_parameters()}
    right = {name: torch.randn_like(p) for name, p in setting.model.named_parameters()}
    found = ours.solve(right)
    expected = inverse @ [right[names[id(p)]] for p in theirs._params]
    for p, value in zip(theirs._params, expected, strict=True):
        assert _relative(found[names[id(p)]], value) < 1e-9
