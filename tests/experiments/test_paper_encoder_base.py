"""The encoder experiment's two recipes: what the large encoder has of its own, and what a step costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import paper
from experiments.paper import encoder_cleaning, encoder_page, page, texts
from experiments.paper.encoder_settings import BASE, MINILM, Settings
from experiments.paper.recipe import Job, Result, Verdict
from experiments.paper.text_cleaning import TextTrial, text_methods
from experiments.pieces import Cells
from hyperkron.solution import HyperkronError

CPU = torch.device("cpu")


def _job(folder: Path, settings: Settings) -> Job:
    return Job("smoke", settings, (1,), CPU, Cells(folder / "x.jsonl", {}))


def _prices(folder: Path, settings: Settings) -> dict[tuple[int, str], dict[str, Any]]:
    job = _job(folder, settings)
    return encoder_cleaning.prices(job, encoder_cleaning.source_of(job, texts.MADE_UP), texts.depths(2))


def test_two_recipes_share_all_but_their_settings_and_note() -> None:
    small, base = (paper.recipes()[name] for name in ("encoder", "encoder-base"))
    for name in ("work", "verdict", "tables", "plot", "answer", "place", "gpu", "seeds", "partial"):
        assert getattr(small, name) == getattr(base, name), name
    assert "MiniLM" in small.title and "MPNet" in base.title and small.note != base.note
    for scale in ("small", "paper"):
        assert MINILM[scale].encoders == ("minilm",) and BASE[scale].encoders == ("mpnet",)  # type: ignore[index]


def test_the_large_encoder_runs_every_dataset_at_every_depth_with_three_seeds() -> None:
    recipe, settings = paper.recipes()["encoder-base"], BASE["small"]
    run = {(p.dataset, p.depth): p.seeds for p in settings.parts if {"SAMA", "KFAC", "Baseline"} <= set(p.methods)}
    assert len(run) == 9 and set(run.values()) == {None} and recipe.seeds["small"] == 3
    assert settings.parts[0].dataset == settings.parts[1].dataset == "trec"
    depths = texts.depths(12)
    assert [settings.steps(depths[x]) for x in ("one", "middle", "all")] == [100, 40, 40]
    first = {p.depth: p.dataset for p in reversed(settings.parts)}
    assert set(first.values()) == {"trec"}  # where prices are measured


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TextTrial, "price", lambda self, steps: 0.5)


@pytest.mark.usefixtures("quick")
def test_every_bilevel_method_has_a_price_at_every_depth(tmp_path: Path) -> None:
    found = _prices(tmp_path, BASE["smoke"])
    assert {(layers, name) for layers in (1, 2) for name in encoder_page.BILEVEL} <= set(found)
    assert all(x == {"seconds": 0.5, "bytes": None} for x in found.values())
    assert (2, "CG") not in _prices(tmp_path, MINILM["smoke"])  # there only what is run


@pytest.mark.usefixtures("quick")
def test_on_a_gpu_the_most_memory_since_the_trial_began_is_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peak = [99]
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.append(7))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak[-1])
    settings = BASE["smoke"]
    job = _job(tmp_path, settings)
    source = encoder_cleaning.source_of(job, texts.MADE_UP)
    method = text_methods(settings.rates)["SAMA"]
    there = replace(job, device=torch.device("cuda"))
    assert encoder_cleaning._price(there, source, settings.parts[0], 1, method) == {"seconds": 0.5, "bytes": 7}


@pytest.mark.long
@pytest.mark.parametrize(
    ("failure", "said"),
    [(torch.OutOfMemoryError("CUDA"), "out of memory"), (HyperkronError("no price"), "a step failed")],
)
def test_a_price_that_fails_is_said_and_its_method_is_not_run(
    failure: Exception, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def price(self: TextTrial, steps: int) -> float:
        if self.name == "KFAC":
            raise failure
        return 0.5

    monkeypatch.setattr(TextTrial, "price", price)
    figures = encoder_cleaning.work(_job(tmp_path, BASE["smoke"]))
    assert figures["prices"]["2"]["KFAC"] == {"seconds": None, "error": said} and not figures["cut_short"]
    assert set(figures["stages"]["made-up/1/all/weak"]) == {"SAMA", "Baseline"}
    assert figures["stages"]["made-up/2/all/weak"]["SAMA"]["step_seconds"] == [0.5]
    table = encoder_page.tables(Result("encoder-base", "small", (1,), figures))[-1]
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["KFAC"] == [said, said] and rows["SAMA"] == ["500.0 (1.00 ×)"] * 2
    assert list(table.columns) == ["method", "1 layer", "2 layers"] and "GPU memory" not in table.title


def test_prices_are_set_beside_sama_and_may_be_missing() -> None:
    prices = {
        "12": {"SAMA": {"seconds": 0.2, "bytes": 2**31}, "KFAC": {"seconds": 0.3, "bytes": 3 * 2**30}},
        "7": {"KFAC": {"seconds": 0.1}, "CG": {"seconds": None, "error": "out of memory"}},
    }
    figures = {"encoder": {"name": "mpnet", "layers": 12}, "steps": 1, "stages": {}}
    (table,) = encoder_page.tables(Result("encoder-base", "small", (1,), figures | {"prices": prices}))
    assert list(table.columns) == ["method", "7 layers", "12 layers"] and "GPU memory" in table.title
    assert table.rows == [
        ["SAMA", "–", "200.0 (1.00 ×), 2.0 GiB"],
        ["KFAC", "100.0", "300.0 (1.50 ×), 3.0 GiB"],
        ["CG", "out of memory", "–"],
    ]
    assert encoder_page.tables(Result("encoder", "small", (1,), figures)) == []  # an older result


@pytest.mark.parametrize(("layers", "deep", "again"), [(1, False, True), (2, False, False), (2, True, True)])
def test_no_fresh_network_is_trained_where_many_layers_are_tuned(
    layers: int, deep: bool, again: bool, tmp_path: Path
) -> None:
    settings = replace(BASE["smoke"], again_deep=deep)
    method = text_methods(settings.rates)["SAMA"]
    setting = {name: values[0] for name, values in method.grid.items()}
    job = _job(tmp_path, settings)
    source = encoder_cleaning.source_of(job, texts.MADE_UP)
    entry = encoder_cleaning._entry(job, source, settings.parts[0], layers, method)
    assert ("again" in entry.final(setting, 1)) is again


@pytest.mark.long
@pytest.mark.usefixtures("quick")
def test_a_section_of_its_own(tmp_path: Path) -> None:
    recipe = paper.recipes()["encoder-base"]
    empty = page.section(recipe, None, tmp_path)
    [table] = empty.tables
    assert empty.judgement.verdict is Verdict.NOT_RUN and table.title.startswith("Printed") and not empty.answer
    figures = encoder_cleaning.work(_job(tmp_path, BASE["smoke"]))
    section = page.section(recipe, Result(recipe.name, "small", (1,), figures), tmp_path)
    assert section.figures == ["figures/paper/encoder-base-1.svg"] and (tmp_path / "encoder-base-1.svg").is_file()
    assert section.answer[0].startswith("SAMA or KFAC?") and section.judgement.verdict is not Verdict.NOT_RUN


def test_unpacking_leaves_a_whole_file_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    for i in (0, 1):
        save_file({f"b{i}": torch.ones(2)}, tmp_path / f"x_int8_{i}.safetensors")

    def torn(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(texts, "save_file", torn)
    with pytest.raises(KeyboardInterrupt):
        texts.unpack(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    monkeypatch.setattr(texts, "save_file", save_file)
    texts.unpack(tmp_path)
    assert (tmp_path / "model.safetensors").is_file() and not list(tmp_path.glob("*.part"))
