"""Bad input to losses: the error names the argument, its value and the remedy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hyperkron.losses import as_loss, binary_cross_entropy, classification, cross_entropy, l2, mse
from hyperkron.solution import HyperkronError

N, T, C = 4, 3, 5
f, y, soft = torch.randn(N, C), torch.zeros(N, dtype=torch.long), torch.full((N, C), 1 / C)
_meta = torch.device("meta")
ERRORS: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "output is not a tensor": (lambda: cross_entropy([1.0], y), ("output", "list", ".logits")),  # type: ignore
    "output is integer": (lambda: mse(y, y), ("output", "int64", "floating point")),
    "output is a scalar": (lambda: mse(f.sum(), f.sum()), ("output", "no dimensions", "(N, ...)")),
    "output is 1-d logits": (lambda: cross_entropy(f[0], y[:1]), ("output", "(5,)", "unsqueeze(0)")),
    "empty batch": (lambda: cross_entropy(f[:0], y[:0]), ("output", "(0, 5)", "skip")),
    "empty batch, mse": (lambda: mse(f[:0], f[:0]), ("output", "(0, 5)", "skip")),
    "all masked": (lambda: cross_entropy(f, y - 100), ("target", "all 4 rows", "ignore_index=-100", "skip")),
    "class too large": (lambda: cross_entropy(f, y + 5), ("target", "class 5", "C=5", "0..4")),
    "class negative": (lambda: cross_entropy(f, y - 1), ("target", "class -1", "C=5", "ignore_index")),
    "torch's layout": (
        lambda: cross_entropy(torch.randn(N, C, T), torch.zeros(N, T, dtype=torch.long)),
        ("(4, 5, 3)", "(4, 3)", "output.movedim(1, -1)"),
    ),
    "target shape": (lambda: cross_entropy(f, y[:3]), ("target", "(3,)", "(4, 5)", "(4,)")),
    "float classes": (lambda: cross_entropy(f, y.float()), ("target", "float32", "target.long()")),
    "bool classes": (lambda: cross_entropy(f, y.bool()), ("target", "bool", "target.long()")),
    "integer one-hot": (lambda: cross_entropy(f, F.one_hot(y, C)), ("target", "int64", "target.float()")),
    "target is a list": (lambda: cross_entropy(f, [0] * N), ("target", "list", "torch.as_tensor")),  # type: ignore
    "target elsewhere": (
        lambda: cross_entropy(f, y.to(_meta)),
        ("target", "meta", "cpu", "target.to('cpu')"),
    ),
    "label smoothing": (lambda: cross_entropy(f, y, label_smoothing=1.5), ("label_smoothing=1.5", "[0, 1]")),
    "mse broadcast": (lambda: mse(f[:, :1], f[:, 0]), ("target", "(4,)", "(4, 1)", "output.squeeze(-1)")),
    "mse integers": (lambda: mse(f, y[:, None].expand(N, C)), ("target", "int64", "target.float()")),
    "bce range": (lambda: binary_cross_entropy(f, -2 * soft), ("target", "-0.4", "[0, 1]", "clamp")),
    "weight is a number": (lambda: cross_entropy(f, y, weight=0.5), ("weight=0.5", "0.5 * loss")),  # type: ignore
    "weight length": (lambda: cross_entropy(f, y, weight=torch.ones(7)), ("weight", "(7,)", "(4,)")),
    "weight column": (lambda: mse(f, f, weight=torch.ones(N, 1)), ("weight", "(4, 1)", "weight.squeeze(-1)")),
    "weight integer": (lambda: mse(f, f, weight=y), ("weight", "int64", "weight.float()")),
    "weight elsewhere": (
        lambda: mse(f, f, weight=torch.ones(N, device=_meta)),
        ("weight", "meta", ".to('cpu')"),
    ),
    "negative target mass": (
        lambda: cross_entropy(f, -soft).terms[0].vectors(),
        ("weight", "target mass", "-0.25"),
    ),
    "negative scale": (lambda: (-mse(f, f)).terms[0].vectors("type-2"), ("-0.25", "weights ≥ 0")),
    "fisher": (lambda: mse(f, f).terms[0].vectors("exact"), ("fisher='exact'", "mc, rademacher, type-2 or empirical")),  # type: ignore
    "samples": (lambda: mse(f, f).terms[0].vectors("mc", 0), ("samples=0", "≥ 1")),
    "generator is a seed": (
        lambda: mse(f, f).terms[0].vectors("mc", 1, 3),  # type: ignore[arg-type]
        ("generator=3", "torch.Generator(device='cpu')"),
    ),
    "generator elsewhere": (
        lambda: mse(f.to(_meta), f.to(_meta)).terms[0].vectors("mc", 1, torch.Generator()),
        ("generator", "cpu", "meta"),
    ),
    "product shape": (lambda: mse(f, f).terms[0].hessian_product(f[0]), ("v", "(5,)", "(4, 5)")),
    "per_example of a sum": (lambda: (mse(f, f) + mse(f, f)).per_example, ("per_example", "2", "terms[i]")),
    "per_example of a penalty": (lambda: l2(f, 1.0).per_example, ("per_example", "0 criteria")),
    "not a loss": (lambda: as_loss("x"), ("loss", "str", "'x'", "scalar tensor")),
    "vector as loss": (lambda: as_loss(f), ("loss", "(4, 5)", ".mean()")),
    "integer loss": (lambda: as_loss(y.sum()), ("loss", "int64", "floating point")),
    "vector added": (lambda: mse(f, f) + f, ("(4, 5)", ".mean()")),
    "vector factor": (lambda: mse(f, f) * f, ("factor", "(4, 5)", "scalar")),
    "l2 of nothing": (lambda: l2([], 1.0), ("parameters", "list", "generator can be read only once")),
    "l2 of a number": (lambda: l2(3, 1.0), ("parameters", "int", "module")),  # type: ignore[arg-type]
    "l2 of names": (lambda: l2(nn.Linear(1, 1).named_parameters(), 1.0), ("tuple", "module.parameters()")),  # type: ignore
    "l2 of integers": (lambda: l2([y], 1.0), ("parameters", "int64", "leave it out")),
    "l2 too few": (lambda: l2([f, f], [1.0]), ("coefficient", "1 entries", "2 parameters")),
    "l2 broadcast": (lambda: l2(f, torch.ones(4)), ("coefficient", "(4,)", "(4, 5)", "scalar")),
    "l2 enlarges": (lambda: l2(f[0], torch.ones(2, 5)), ("coefficient", "(2, 5)", "(5,)")),
    "l2 string": (lambda: l2(f, "big"), ("coefficient='big'", "str", "number")),  # type: ignore[arg-type]
    "l2 integer tensor": (lambda: l2(f, torch.tensor(1)), ("coefficient", "int64", "floating point")),
    "l2 elsewhere": (lambda: l2(f, torch.ones(5, device=_meta)), ("coefficient", "meta", ".to('cpu')")),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_named_with_its_value_and_remedy(name: str) -> None:
    call, fragments = ERRORS[name]
    with pytest.raises(HyperkronError) as caught:
        call()
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_where_asking_stalls_the_device_bad_targets_become_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    output = torch.randn(N, C)
    expected = cross_entropy(output, torch.tensor([0, 1, -100, 2]), label_smoothing=0.1).value
    monkeypatch.setattr(classification, "answers_at_once", lambda x: False)
    assert torch.equal(cross_entropy(output, torch.tensor([0, 1, -100, 2]), label_smoothing=0.1).value, expected)
    wrong = cross_entropy(output, torch.tensor([0, 1, 7, 2]))
    assert wrong.value.isnan() and wrong.terms[0].row_losses.isnan().tolist() == [False, False, True, False]
    assert cross_entropy(output, torch.full((N,), -100)).value.isnan()
