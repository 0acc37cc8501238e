"""Every Python block of the documentation runs: on small data, with short trainings, page by page, top to bottom."""

from __future__ import annotations

import re
import shlex
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hyperkron as hk
from blobs import blobs, quicken
from hyperkron.cleaning import CleanConfig
from hyperkron.cleaning.models import HASHED
from hyperkron.cli.parser import COMMANDS, parse
from run_folder import write_run_folder

DOCS = Path(__file__).resolve().parent.parent / "docs"
STEPS = 2
Names = dict[str, Any]


def blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), flags=re.DOTALL)


PAGES = {page.name: blocks(page) for page in sorted(DOCS.rglob("*.md")) if blocks(page)}


def bilevel() -> Names:
    """What the pages about training assume: a problem of weighted rows, and optimizers."""
    x, y = torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3
    model, weights = nn.Linear(4, 3), hk.SampleWeights(24)

    def inner(model: nn.Module, weights: nn.Module, batch: Any) -> Any:
        return hk.losses.cross_entropy(model(batch[0]), batch[1], weight=weights(batch[2]))

    def outer(model: nn.Module, weights: nn.Module, batch: Any) -> Any:
        return hk.losses.cross_entropy(model(batch[0]), batch[1])

    adam = torch.optim.Adam(model.parameters())
    return {
        "hk": hk,
        "torch": torch,
        "problem": hk.BilevelProblem(inner, outer),
        "model": model,
        "weights": weights,
        "algorithm": hk.AID(hk.cg(2)),
        "train": (x, y, torch.arange(24)),
        "validation": (x, y, torch.arange(24)),
        "test": (x, y),
        "accuracy": lambda model, rows: float((model(rows[0]).argmax(1) == rows[1]).float().mean()),
        "optimizer": adam,
        "adam": adam,
        "sgd": torch.optim.SGD(weights.parameters(), 0.1),
        "cosine": torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10),
        "inner": inner,
        "wrapped": model,
        "hypergradient": hk.kfac(),
        "outer_optimizer": torch.optim.SGD(weights.parameters(), 0.1),
        "train_loader": [(x, y, torch.arange(24))],
        "trusted_loader": [(x, y)],
    }


def write_texts(folder: Path) -> None:
    for name, start, stop in (("train", 0, 40), ("trusted", 40, 60), ("test", 60, 70)):
        rows = (f"{'good nice' if i % 2 else 'bad poor'} words {i},{'pn'[i % 2]}\n" for i in range(start, stop))
        (folder / f"{name}.csv").write_text("text,label\n" + "".join(rows))


def before_cleaning(block: int, names: Names) -> None:
    data = blobs(rows=60)
    if block == 1:  # the rows were a DataFrame
        pandas = pytest.importorskip("pandas")
        names["frame"] = pandas.DataFrame({"a": data.x[:, 0], "b": data.x[:, 1], "label": data.noisy})
        trusted = pandas.DataFrame({"a": data.trusted[0][:, 0], "b": data.trusted[0][:, 1], "label": data.trusted[1]})
        names["result"] = hk.clean(names["frame"], trusted, config=CleanConfig(epochs=1, compare=()))
    if block == 2:
        names |= {"x": data.x, "y": data.noisy, "x_trusted": data.trusted[0], "y_trusted": data.trusted[1]}
        names |= {"x_test": data.test[0], "y_test": data.test[1], "MyNetwork": lambda: nn.Linear(2, 3)}


def before(page: str, block: int, names: Names) -> None:
    if page == "cleaning.md":
        before_cleaning(block, names)
    elif page == "data.md":
        names["kept"] = [0, 2, 3]
    elif page == "report.md":
        write_run_folder(Path("runs/mine"))
    elif page == "huggingface.md":
        pytest.importorskip("peft" if block == 1 else "transformers")
    elif page != "attribution.md":
        names |= bilevel()


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYPERKRON_ENCODER", HASHED)
    quicken(monkeypatch)
    write_texts(tmp_path)
    fit = hk.fit
    monkeypatch.setattr(hk, "fit", lambda *given, steps, **more: fit(*given, steps=min(steps, STEPS), **more))
    monkeypatch.setattr(hk, "clean", partial(hk.clean, config=CleanConfig(epochs=1, compare=("noisy",))))
    sweep = hk.sweeps.sweep
    monkeypatch.setattr(hk.sweeps, "sweep", lambda *given, trials, **more: sweep(*given, trials=STEPS, **more))
    names: Names = {}
    for i, block in enumerate(PAGES[page]):
        before(page, i, names)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # graph=True without a GPU, and the like
            exec(compile(block, f"docs/{page}, block {i}", "exec"), names)


def test_there_are_pages() -> None:
    assert {"cleaning.md", "data.md", "report.md", "runtime.md"} <= set(PAGES)


# --- the command line --------------------------------------------------------------------------------------

COMMAND = re.compile(r"(?:-m |^ *|`)hyperkron ((?:" + "|".join(COMMANDS) + r") [^\n`]*)", re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md"))])
def test_every_command_of_a_page_is_understood(page: str) -> None:
    for line in COMMAND.findall((DOCS.parent / page).read_text("utf-8")):
        words = shlex.split(re.split(r" [#>] ?", line)[0])
        if "…" not in line and "..." not in line:
            parse(words)  # exits at what it does not know


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_reference_of_its_command(command: str) -> None:
    text = (DOCS / "cli.md").read_text("utf-8")
    section = re.split(rf"^## `hyperkron {command}\b", text, flags=re.MULTILINE)[1].partition("\n## ")[0]
    where = text if command == "resume" else text.partition("\n## ")[0] + section  # resume takes those of clean
    known = re.findall(r"--[\w-]+", where)
    named = {option.name for option in COMMANDS[command][0] if option.name.startswith("--")}
    assert named and sorted(named - set(known)) == []
