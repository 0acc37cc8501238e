"""Continued pretraining: hypergradients through two heads against dense oracles, the two streams, and what is run."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hyperkron as hk
import oracles
from experiments import records
from experiments.paper import domain_mixture, pretraining, pretraining_page
from experiments.paper.pretraining_data import IGNORED, Masked, Tokens, read_task, split, tokenize
from experiments.paper.pretraining_model import PROBLEM, AuxiliaryWeight, TwoHeads, token_losses, weight_network
from experiments.paper.pretraining_trial import METHODS, Case, Source, Trial, f1, load_encoder
from experiments.paper.recipe import Job, Result, Verdict, _marking
from experiments.paper.texts import MADE_UP
from experiments.pieces import Cells
from hyperkron.hyper import DomainWeights

transformers = pytest.importorskip("transformers")
WORDS, LENGTH = 5, 4

# --- the hypergradient -------------------------------------------------------------------------------------


def _network() -> TwoHeads:
    """A BERT of one layer with 160 trained parameters, in float64, away from its initial point."""
    shape = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 3}
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, type_vocab_size=1, **shape)
    model = TwoHeads(transformers.BertModel(config, add_pooling_layer=False), classes=3).double()
    for name, p in model.named_parameters():
        p.requires_grad_(not any(part in name for part in ("position", "token_type", "query", "key")))
        with torch.no_grad():
            p.add_(0.3 * torch.randn_like(p))
    return model


def _moved(weights: nn.Module) -> nn.Module:
    """λ away from its initial point, where its first layer would have no gradient."""
    weights = weights.double()
    with torch.no_grad():
        for p in weights.parameters():
            p.add_(0.5 * torch.randn_like(p))
    return weights


def _batches() -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Three labelled and four auxiliary texts of different lengths, and three texts of J_out."""

    def texts(count: int) -> tuple[Tensor, Tensor]:
        lengths = torch.randint(3, LENGTH + 1, (count, 1))
        return torch.randint(WORDS, (count, LENGTH)), torch.arange(LENGTH) < lengths

    targets = torch.tensor([[1, 4], [0, IGNORED], [3, 2], [3, IGNORED]])
    positions = torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    ids, mask = texts(7)
    return (ids, mask, torch.tensor([2, 0, 1]), positions, targets), (*texts(3), torch.tensor([1, 1, 0]))


def _case(model: TwoHeads, weights: nn.Module, batch: Any, outer: Any, *, stop: bool = True) -> Any:
    """Both objectives in plain torch, text by text."""

    def plain_inner() -> Tensor:
        ids, mask, labels, positions, targets = batch
        logits, tokens = model(ids, mask, positions)
        each = F.cross_entropy(tokens.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        each, total = each.reshape(targets.shape), 0.0
        for losses, valid in zip(each, targets != IGNORED, strict=True):
            of_text = losses[valid].mean()
            total = total + weights((of_text.detach() if stop else of_text).reshape(1))[0] * losses[valid].sum()
        return F.cross_entropy(logits, labels) + total / (targets != IGNORED).sum()

    def plain_outer() -> Tensor:
        return F.cross_entropy(model(*outer[:2])[0], outer[2])

    return SimpleNamespace(model=model, hyper=weights, plain_inner=plain_inner, plain_outer=plain_outer)


class _Attached(nn.Module):
    """The weight network without its stopped gradient, for the check that the oracle sees the difference."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.own = net

    def forward(self, losses: Tensor) -> Tensor:
        return self.own.scale * self.own.net(losses[:, None]).squeeze(1).sigmoid()


def _found(weights: nn.Module) -> Tensor:
    return oracles.flat([p.grad for p in weights.parameters() if p.grad is not None])


@pytest.mark.long
def test_exact_curvature_gives_the_exact_hypergradient() -> None:
    """Two losses, two heads, tied embeddings, weights of detached losses, against dense matrices."""
    model, weights = _network(), _moved(weight_network(5))
    batch, outer = _batches()
    case, damping = _case(model, weights, batch, outer), 6.0
    matrix = oracles.hessian(case.plain_inner, list(oracles.trainable(model).values()))
    assert float(torch.linalg.eigvalsh(matrix)[0]) > 0.1 - damping
    wanted = oracles.flat(oracles.implicit(case, matrix, damping=damping))
    for cross, error in (("reverse", 1e-9), ("auto", 1e-5)):
        weights.zero_grad()
        solved = hk.cg(300, damping, tolerance=1e-13, cross=cross)  # type: ignore[arg-type]
        solved.backward(PROBLEM, model, weights, batch, outer)
        assert oracles.relative(_found(weights), wanted) < error
    attached = _case(model, _Attached(weights), batch, outer, stop=False)
    other = oracles.implicit(attached, matrix, damping=damping)
    assert oracles.relative(oracles.flat(other), wanted) > 1e-2  # the oracle sees what is detached


def _one_layer() -> tuple[TwoHeads, nn.Module, Any, Any]:
    """One layer below both heads is trained, and all texts are the same word with different answers: the layer has the
    same input in every row, so that B ⊗ A is the whole curvature."""
    model, weights = _network(), _moved(weight_network(5))
    model.requires_grad_(False)
    model.encoder.encoder.layer[0].intermediate.dense.requires_grad_(True)
    word, real = torch.full((7, 1), 2), torch.ones(7, 1, dtype=torch.bool)
    answers = torch.tensor([[1], [0], [4], [3]])
    batch = (word, real, torch.tensor([2, 0, 1]), torch.zeros(4, 1, dtype=torch.long), answers)
    return model, weights, batch, (torch.tensor([[1], [3]]), real[:2], torch.tensor([1, 0]))


@pytest.mark.parametrize("method", ["kfac", "ekfac", "empirical"])
def test_kfac_is_exact_where_it_should_be(method: str) -> None:
    model, weights, batch, outer = _one_layer()
    case, damping = _case(model, weights, batch, outer), 0.05
    params = list(oracles.trainable(model).values())
    matrix = (_empirical_fisher if method == "empirical" else _gauss_newton)(model, weights, batch, params)
    found = {
        "kfac": hk.kfac(damping, fisher="type-2", split="exact", cross="reverse"),
        "ekfac": hk.ekfac(damping, fisher="type-2", cross="reverse"),
        "empirical": hk.kfac(damping, fisher="empirical", split="exact", cross="reverse"),
    }[method]
    found.backward(PROBLEM, model, weights, batch, outer)
    wanted = oracles.flat(oracles.implicit(case, matrix, damping=damping))
    assert oracles.relative(_found(weights), wanted) < 1e-10
    without = oracles.flat(oracles.implicit(case, torch.zeros_like(matrix), damping=damping))
    assert oracles.relative(without, wanted) > 1e-2  # the curvature matters


def _gauss_newton(model: TwoHeads, weights: nn.Module, batch: Any, params: list[Tensor]) -> Tensor:
    """Jᵀ H J of both heads."""
    ids, mask, labels, positions, targets = batch
    logits, tokens = model(ids, mask, positions)
    each = weights(token_losses(tokens, targets)).detach()

    def auxiliary(output: Tensor) -> Tensor:
        return (each * F.cross_entropy(output[:, 0], targets[:, 0], reduction="none")).mean()

    task = oracles.ggn(logits, lambda output: F.cross_entropy(output, labels), params)
    return task + oracles.ggn(tokens, auxiliary, params)


def _empirical_fisher(model: TwoHeads, weights: nn.Module, batch: Any, params: list[Tensor]) -> Tensor:
    """Σ_r w_r ∇c_r ∇c_rᵀ over labelled rows (w = 1/N) and masked tokens (w = weight/M)."""
    ids, mask, labels, positions, targets = batch
    logits, tokens = model(ids, mask, positions)
    rows = [(1 / len(labels), F.cross_entropy(x, y)) for x, y in zip(logits, labels, strict=True)]
    each = weights(token_losses(tokens, targets)).detach()
    pairs = zip(each, tokens[:, 0], targets[:, 0], strict=True)
    rows += [(float(w) / len(targets), F.cross_entropy(x, y)) for w, x, y in pairs]
    gradients = [(w, oracles.gradient(loss, params).detach()) for w, loss in rows]
    return torch.stack([w * torch.outer(g, g) for w, g in gradients]).sum(0)


def test_weights_begin_at_one() -> None:
    losses = torch.tensor([0.0, 1.0, 9.0])
    for weights in (weight_network(), AuxiliaryWeight()):
        assert torch.equal(weights(losses), torch.ones(3))


# --- the streams -------------------------------------------------------------------------------------------


def test_masking() -> None:
    _, tokenizer = load_encoder(MADE_UP, None)
    texts = read_task(MADE_UP, None).domain
    tokens = tokenize(tokenizer, texts, 14, torch.device("cpu"))
    assert int(tokens.mask.sum()) == 10 * len(texts) and not bool(tokens.special[tokens.mask].any())
    stream, changed, counts = Masked(tokens, tokenizer, 40, 0), 0, 0
    for _ in range(50):
        ids, mask, positions, targets = stream()
        valid = targets != IGNORED
        assert torch.equal(valid.sum(1), torch.full((40,), 2))  # 15 % of ten tokens
        rows = torch.arange(40)[:, None].expand_as(positions)
        assert bool(mask[rows[valid], positions[valid]].all())
        answers = ids.gather(1, positions)[valid]
        changed, counts = changed + int((answers != targets[valid]).sum()), counts + int((answers == stream.mark).sum())
        restored = ids.scatter(1, positions, torch.where(valid, targets, ids.gather(1, positions)))
        assert {tuple(x) for x in restored.tolist()} == {tuple(x) for x in tokens.ids.tolist()}
    assert changed / 4000 == pytest.approx(0.8 + 0.1 * 31 / 32, abs=0.03)
    assert counts / 4000 == pytest.approx(0.8 + 0.1 / 32, abs=0.03)


def _write(folder: Path, name: str, rows: list[tuple[str, str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join(json.dumps({"text": text, "label": label}) for text, label in rows)
    (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(text.encode()))


def test_test_texts_are_taken_out_of_training(tmp_path: Path) -> None:
    where = tmp_path / "tapt" / "toy"
    _write(where, "train", [("a", "x"), ("b", "y"), ("c", "x"), ("d", "y"), ("g", "x")])
    _write(where, "dev", [("c", "x"), ("e", "y"), ("f", "x")])
    _write(where, "test", [("a", "x"), ("f", "y")])
    clean, given = read_task("toy", tmp_path), read_task("toy", tmp_path, leaky=True)
    assert clean.parts["train"] == [("b", "y"), ("d", "y"), ("g", "x")]
    assert clean.parts["dev"] == [("c", "x"), ("e", "y")] and len(given.parts["train"]) == 5
    (where / "test.jsonl.gz").unlink()
    with pytest.raises(hk.HyperkronError, match="is missing"):
        read_task("toy", tmp_path)


def test_held_out_rows_are_neither_trained_on_nor_masked() -> None:
    _, tokenizer = load_encoder(MADE_UP, None)
    rows = split(read_task(MADE_UP, None), tokenizer, 16, 1, torch.device("cpu"))

    def texts(tokens: Tokens) -> set[tuple[int, ...]]:
        return {tuple(x) for x in tokens.ids.tolist()}

    assert len(rows.held_out[1]) == 16 and len(rows.train[1]) == 74
    assert not texts(rows.held_out[0]) & (texts(rows.train[0]) | texts(rows.auxiliary))
    assert texts(rows.train[0]) < texts(rows.auxiliary) and len(rows.auxiliary) == 74 + 40


def test_f1_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    labels, predicted = torch.randint(4, (60,)), torch.randint(5, (60,))
    for micro in (True, False):
        wanted = metrics.f1_score(labels, predicted, average="micro" if micro else "macro", zero_division=0)
        assert f1(predicted, labels, micro=micro) == pytest.approx(100 * wanted)


# --- the runs ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_learns_and_moves_its_weights() -> None:
    source = Source(MADE_UP, None, torch.device("cpu"), {MADE_UP: 12})
    case = Case(batch=16, inner_steps=5, steps=6, looks=2, head_steps=0)
    near, far = (Trial(source, case, MADE_UP, "KFAC-EMP", 1e-2, rate, 0).train() for rate in (1e-7, 1e-3))
    assert near["weights"]["moved"] < 1e-3 < 0.02 < far["weights"]["moved"]
    plain = Trial(source, case, MADE_UP, "TARTAN-MT", 1e-2, None, 0).train()
    assert plain["weights"] is None and plain["dev"] > 60  # 33 without learning


def _job(folder: Path) -> Job:
    settings = pretraining.SETTINGS["small"]
    cells = Cells(folder / "cells.jsonl", {})
    return Job("small", settings, (1, 2, 3), torch.device("cpu"), cells)


def _done(dev: float, test: float, moved: float | None = None) -> dict[str, Any]:
    weights = None if moved is None else {"moved": moved, "mean": 1 + moved}
    return {"dev": dev, "dev_loss": 1.0, "test": test, "failed": None, "weights": weights}


def test_runs_that_others_depend_on_come_first(tmp_path: Path) -> None:
    job = _job(tmp_path)
    first = pretraining._missing(job)
    assert {task.method for task in first} == {"Baseline"}  # θ's step sizes, of the first two tasks only
    assert [task.dataset for task in first] == ["sciie"] * 4 + ["citation_intent"] * 4
    while left := [task for task in pretraining._missing(job) if task.method == "Baseline" and task.seed == 1]:
        for task in left:
            job.cells.put(list(task), _done(70 + (task.inner == 2e-4), 60), 1.0)
    left = pretraining._missing(job)
    assert {task.inner for task in left} == {2e-4}
    names = {task.method for task in left}
    assert names == {*METHODS} and left[0] == ("sciie", "TARTAN-MT", 2e-4, None, 1)
    for task in left:
        job.cells.put(list(task), _done(70 + (task.outer == 1e-3), 60), 1.0)
    again = pretraining._missing(job)
    chosen = {task.outer for task in again if task.method == "SAMA"}
    assert chosen == {1e-3} and {task.seed for task in again} == {2, 3}
    for task in again:
        job.cells.put(list(task), _done(71, 60), 1.0)
    assert not pretraining._missing(job)


@pytest.mark.parametrize(
    ("gains", "moved", "wanted"),
    [
        ((3.0, 3.1, 2.9), 0.4, Verdict.REPRODUCED),
        ((-3.0, -3.1, -2.9), 0.4, Verdict.FAILED),
        ((3.0, -3.0, 0.1), 0.4, Verdict.REFUSED),  # the interval holds what is printed, and much else
        ((3.0, 3.1, 2.9), 0.01, Verdict.REFUSED),
    ],
)
def test_the_verdict(gains: tuple[float, ...], moved: float, wanted: Verdict, tmp_path: Path) -> None:
    """KFAC-EMP must be clearly above equal weights, and λ must have moved."""
    job = _job(tmp_path)
    while left := pretraining._missing(job):
        for task in left:
            learned = task.method == "KFAC-EMP"
            test = 60 + (gains[task.seed - 1] if learned else 0)
            job.cells.put(list(task), _done(70, test, None if task.outer is None else moved), 1.0)
    figures = {"tasks": {x: pretraining.summary(job, x) for x in pretraining.LENGTHS}, "prices": {}}
    result = Result("pretraining", "small", (1, 2, 3), figures)
    assert pretraining_page.verdict(result).verdict is wanted
    table = pretraining_page.tables(result)[0]
    row = next(row for row in table.rows if row[0] == "KFAC-EMP")
    words = {Verdict.REPRODUCED: "agrees", Verdict.FAILED: "opposite", Verdict.REFUSED: "open"}
    word = "λ hardly moved" if moved < 0.05 else words[wanted]
    assert row[1].startswith("85.04 ± 0.23 / ") and row[1].endswith(f"({word})")
    assert len(pretraining_page.answer(result)) == 4


# --- domains -----------------------------------------------------------------------------------------------


def test_the_hypergradient_of_a_mixture_is_exact() -> None:
    """Domain weights of a causal language model, in float64, against dense matrices."""
    size = domain_mixture.Size(words=5, length=4, width=2, layers=1, batch=1)
    model, mixture = domain_mixture.language_model(size, 0).double(), _moved(DomainWeights(3))
    ids, domain = torch.tensor([[2, 3, 4, 2], [4, 2, 3, 0], [3, 3, 2, 4]]), torch.arange(3)
    target = torch.tensor([[2, 4, 3, 3], [4, 4, 2, 0]])

    def plain(rows: Tensor, weights: Tensor) -> Tensor:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        each = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), ignore_index=0, reduction="none")
        return (each.reshape(len(rows), -1) * weights[:, None]).sum() / (rows[:, 1:] != 0).sum()

    case = SimpleNamespace(
        model=model,
        hyper=mixture,
        plain_inner=lambda: plain(ids, 3 * mixture.logits.softmax(0)[domain]),
        plain_outer=lambda: plain(target, torch.ones(2, dtype=torch.float64)),
    )
    matrix = oracles.hessian(case.plain_inner, list(oracles.trainable(model).values()))
    damping = 1.0 - min(0.0, 2 * float(torch.linalg.eigvalsh(matrix)[0]))
    solved = hk.cg(300, damping, tolerance=1e-13, cross="reverse")
    solved.backward(domain_mixture.PROBLEM, model, mixture, (ids, domain), target)
    wanted = oracles.flat(oracles.implicit(case, matrix, damping=damping))
    assert oracles.relative(_found(mixture), wanted) < 1e-9


@pytest.mark.long
def test_the_source_that_is_the_target_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Made-up sources with words of their own; the last of them is the target."""
    size = domain_mixture.Size(words=50, length=6, width=8, layers=1, batch=2, steps=12, rate=1e-2)
    texts = domain_mixture.corpus(Path(MADE_UP), size)
    names = ("uniform", "proportional", "SAMA", "KFAC")
    found = {name: domain_mixture.run(texts, size, name, 0.3, 0) for name in names}
    assert found["uniform"]["proportions"] == [0.25] * 4 and found["proportional"]["proportions"] == [0.25] * 4
    for name in ("SAMA", "KFAC"):
        assert max(found[name]["proportions"]) == found[name]["proportions"][3] > 0.4
        assert found[name]["test"] < found["uniform"]["test"]
    domain_mixture.main(["--table", "--out", str(tmp_path / "none.jsonl")])
    assert "uniform" not in capsys.readouterr().out


# --- the page ----------------------------------------------------------------------------------------------


def test_the_page_has_the_recorded_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    page = (records.PAGES / "pretraining.md").read_text("utf-8")
    domain_mixture.main(["--table"])
    assert capsys.readouterr().out.strip() in page
    result = Result.read(records.RESULTS / "paper" / "pretraining-small.json")
    table = pretraining_page.tables(result)[0]
    names = ("ACL-ARC (macro)", "SciERC (macro)", "ChemProt (micro)")
    for row in table.rows[:4]:
        cells = [row[0], *(row[table.columns.index(name)] for name in names)]
        assert f"| {' | '.join(cells)} |" in page
    tried = {x.title.partition(",")[0]: x.rows for x in pretraining_page.tables(result) if "first seed" in x.title}
    columns = [
        tried[name] for name in ("SciERC (macro)", "ACL-ARC (macro)", "ChemProt (micro)", "HyperPartisan (macro)")
    ]
    joined = [[rows[0][0], *(x for row in rows for x in row[1:])] for rows in zip(*columns, strict=True)]
    assert all(f"| {' | '.join(row)} |" in page for row in joined) and len(joined) == 4
    rest = [row[table.columns.index("HyperPartisan (macro)")] for row in table.rows[:4]]
    assert all(cell.partition(" / ")[2].partition(" (")[0] in page for cell in rest)
    assert all(f"{x['ms']:.1f} ms" in page for x in result.figures["alone"]["pretraining"].values())
    learned = [x for task in result.figures["tasks"].values() for x in task["methods"].values() if "printed" in x]
    assert len(learned) == 8 and all(w["moved"] < 0.015 for x in learned for w in x["printed"]["weights"])


def test_the_committed_runs_are_those_of_the_settings() -> None:
    """The file that a GPU run continues from has the cells of today's settings."""
    marking = _marking(pretraining.SETTINGS["small"])
    cells = Cells(records.RESULTS / "paper" / "pretraining.jsonl", {"device": "NVIDIA H200", "settings": marking})
    assert len(cells.found) == len(cells.lines.rows) >= 38
