"""The networks: shapes, sizes, and what they promise about masks and bad arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hyperkron.curvature import KFAC
from hyperkron.solution import HyperkronError
from resnet import resnet18
from transformer import TransformerClassifier


def transformer(**changes: int) -> TransformerClassifier:
    sizes = {"vocab": 20, "classes": 3, "layers": 2, "width": 16, "heads": 4, "ffn": 32, "max_len": 8}
    return TransformerClassifier(**{**sizes, **changes})


def test_resnet18_has_the_paper_s_size() -> None:
    """With the 3×3 stem and ten classes, and with the 7×7 stem and a thousand."""
    assert sum(p.numel() for p in resnet18().parameters()) == 11_173_962
    assert sum(p.numel() for p in resnet18(1000, "7x7").parameters()) == 11_689_512


@pytest.mark.parametrize(("stem", "size", "last"), [("3x3", 32, 4), ("7x7", 64, 2)])
def test_resnet18_shapes(stem: str, size: int, last: int) -> None:
    model = resnet18(classes=7, stem=stem, width=4)  # type: ignore[arg-type]
    x = torch.randn(2, 3, size, size)
    assert model.stages(model.stem(x)).shape == (2, 32, last, last)
    assert model(x).shape == (2, 7)


def test_resnet18_learns_every_parameter() -> None:
    model = resnet18(width=4)
    model(torch.randn(4, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    assert all(m.inplace for m in model.modules() if isinstance(m, nn.ReLU))


def test_transformer_ignores_masked_positions() -> None:
    """A masked sequence gives what the shorter one gives, whatever stands in the masked places."""
    model = transformer().double().eval()
    tokens = torch.randint(20, (5, 8))
    mask = torch.arange(8) < 6
    expected = model(tokens[:, :6])
    torch.testing.assert_close(model(tokens, mask.expand(5, 8)), expected, rtol=1e-10, atol=1e-12)
    tokens[:, 6:] = 0
    torch.testing.assert_close(model(tokens, mask.expand(5, 8)), expected, rtol=1e-10, atol=1e-12)


def test_transformer_attends_across_positions_and_knows_their_order() -> None:
    model = transformer(layers=1).double()
    tokens = torch.arange(8)[None]
    assert not torch.allclose(model(tokens), model(tokens.flip(1)))
    attention = model.layers[0].attention  # type: ignore[union-attr]
    x = torch.randn(1, 4, 16, dtype=torch.float64, requires_grad=True)
    attention(x)[0, 0].sum().backward()  # type: ignore[operator]
    assert x.grad is not None
    assert bool((x.grad.abs().sum(-1) > 0).all())


def test_attention_is_softmax_of_scaled_products() -> None:
    attention = transformer(heads=1).layers[0].attention.double()  # type: ignore[union-attr]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    scores = attention.query(x) @ attention.key(x).mT / 16**0.5  # type: ignore[operator]
    expected = attention.out(scores.softmax(-1) @ attention.value(x))  # type: ignore[operator]
    torch.testing.assert_close(attention(x), expected, rtol=1e-10, atol=1e-12)  # type: ignore[operator]


@pytest.mark.parametrize("model", [resnet18(width=4), transformer()], ids=["resnet18", "transformer"])
def test_kfac_covers_all_matrices(model: nn.Module) -> None:
    """Only norms and embeddings lie outside the Kronecker blocks."""
    outside = {row.reason for row in KFAC().coverage(model).uncovered}
    assert outside <= {"BatchNorm2d", "LayerNorm", "Embedding"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resnet18(stem="5x5"), "stem='5x5'"),  # type: ignore[arg-type]
        (lambda: resnet18(classes=0), "classes=0"),
        (lambda: resnet18(width=0), "width=0"),
        (lambda: transformer(heads=3), "heads=3 must divide width=16"),
        (lambda: transformer()(torch.zeros(1, 9, dtype=torch.long)), "9 positions but max_len=8"),
    ],
)
def test_bad_arguments_are_named(make: object, message: str) -> None:
    with pytest.raises(HyperkronError, match=message):
        make()  # type: ignore[operator]
