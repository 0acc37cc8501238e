"""The trust evaluation of ``clean``: splits, scores and verdicts, on made-up data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch

from experiments import records
from experiments.cleaning import page, trust, trust_data, trust_summary


@pytest.fixture
def pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table, a text set with weak labels, and images."""
    monkeypatch.setattr(trust_data, "PLACE", tmp_path)
    random = np.random.default_rng(0)
    for name in ("vehicle", "youtube", "digits"):
        (tmp_path / name).mkdir()
    y = random.integers(3, size=300)
    table = pandas.DataFrame({"a": random.normal(size=300) + y, "b": np.array(["x", "y", "NA"])[y], "label": y})
    table.to_csv(tmp_path / "vehicle" / "pool.csv", index=False)
    texts = [f"text {i}" for i in range(300)]
    weak = np.where(random.random(300) < 0.3, "", y.astype(str))
    pandas.DataFrame({"text": texts, "label": y, "weak": weak}).to_csv(tmp_path / "youtube" / "pool.csv", index=False)
    np.savez(tmp_path / "youtube" / "embeddings.npz", x=random.normal(size=(300, 4)))
    np.savez(tmp_path / "digits" / "pool.npz", x=random.integers(256, size=(300, 1, 4, 4), dtype=np.uint8), y=y)
    return tmp_path


def test_two_sets_of_each_kind_are_kept_unseen() -> None:
    kinds = [s.kind for s in trust_data.SOURCES.values()]
    assert {k: kinds.count(k) for k in ("table", "text", "image")} == {"table": 8, "text": 8, "image": 4}
    unseen = [trust_data.SOURCES[n].kind for n in trust_data.UNSEEN]
    assert unseen == ["table"] * 2 + ["text"] * 2 + ["image"] * 2 + ["text"] * 2
    noises = {trust_data.noise_of("dna", seed) for seed in range(3)}
    assert noises == set(trust_data.NOISES) and trust_data.noise_of("trec", 1) == "weak"


def test_noise_is_what_it_is_called() -> None:
    random, labels = np.random.default_rng(0), np.arange(20000) % 10
    moved = trust_data.corrupt(labels, 10, "class-40", random)
    assert set(((moved - labels) % 10).tolist()) == {0, 1} and (moved != labels).mean() == pytest.approx(0.4, abs=0.02)
    drawn = trust_data.corrupt(labels, 10, "uniform-20", random)
    assert (drawn != labels).mean() == pytest.approx(0.18, abs=0.02)
    two = trust_data.corrupt(labels % 2, 2, "class-40", random)
    assert (two[labels % 2 == 1] == 1).all() and two[labels % 2 == 0].mean() == pytest.approx(0.4, abs=0.02)


def test_a_vote_of_silent_sources_is_no_class() -> None:
    assert trust_data.majority([-1, 2, 0, 2]) == "2" and trust_data.majority([1, -1, 0]) == "0"
    assert trust_data.majority([-1, -1]) == ""


@pytest.mark.parametrize("name", ["vehicle", "youtube", "digits"])
def test_a_split_keeps_test_trusted_and_noisy_rows_apart(pools: Path, name: str) -> None:
    few, many = (trust_data.split(name, 1, per_class) for per_class in (10, 50))
    assert np.array_equal(few.test_gold, many.test_gold) and len(few.test_gold) == 100
    assert np.bincount(few.trusted_gold).tolist() == [10, 10, 10]
    if name == "youtube":
        parts = [set(side["text"]) for side in (few.train, few.trusted, few.test)]
        assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]
        assert set(few.trusted["text"]) < set(many.trusted["text"])
        assert (few.given == few.gold).all()  # silent rows are not among them
        assert len(trust_data.vectors(["youtube"])) == 300
    elif name == "vehicle":
        assert (few.given != few.gold).any() and list(few.train["label"].astype(int)) == few.given.tolist()
        assert len(trust.features(few, "table", {})[2]) == 100
    else:
        assert few.train[0].shape[1:] == (1, 4, 4) and (few.train[1] == few.given).all()


def test_scores_agree_with_their_definition() -> None:
    from sklearn.metrics import average_precision_score

    random = np.random.default_rng(0)
    p = random.random(4000)
    wrong = random.random(4000) < p
    found = trust.reliability(wrong, p)
    assert found["error"] < 0.04 and sum(b[0] for b in found["bins"]) == 4000
    assert found["sure"] == [int(wrong[p > 0.99].sum()), int((p > 0.99).sum())]
    assert trust.reliability(wrong, np.minimum(1, p + 0.2))["error"] > 0.12
    assert trust.average_precision(wrong, p) == pytest.approx(average_precision_score(wrong, p))


def test_a_run_is_one_record(pools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = trust_data.split("vehicle", 0, 10)
    doubt = pandas.Series(np.where(split.given != split.gold, 0.995, 0.1))
    doubt[0] = np.nan  # left out

    def cleaned(train: Any, trusted: Any, **options: Any) -> Any:
        assert "label" in train and len(options["test"]) == 100
        one = {"name": "hyperkron", "accuracy": 0.8, "low": 0.7, "high": 0.9, "rows": 30, "test_accuracy": 0.75}
        summary = {"learner": "network", "noise": {"rate": 0.2, "matrix": [[1.0]]}, "seconds": {"total": 1.0}}
        return SimpleNamespace(
            error_probability=doubt,
            summary=summary,
            candidates=[one],
            chosen="hyperkron",
            verdict="",
            classes=(0, 1, 2),
        )

    monkeypatch.setattr(trust, "clean", cleaned)
    monkeypatch.setattr(trust, "outside", lambda *a: {"test": 0.7, "average_precision": 0.5})
    record = trust.measure(("vehicle", 0, 10), {}, None)
    assert record["average_precision"] == 1 and record["rows"] == len(split.given) - 1
    assert record["reliability"]["sure"][0] == record["reliability"]["sure"][1] > 0
    assert record["estimated"] == {"rate": 0.2} and record["learner"] == "network" and record["outside"]["test"] == 0.7
    assert trust.measure(("vehicle", 0, 10), {}, None, alone=True)["outside"] is None


def test_the_encoder_gives_the_kept_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    from hyperkron.cleaning.models import TextEncoder

    monkeypatch.setattr(TextEncoder, "embed", TextEncoder.embed)  # put back afterwards
    trust.cached_encoder({"a b": np.ones(3, np.float16)})
    found = TextEncoder.embed(object(), ["a  b"], cache=None)  # type: ignore[arg-type]
    assert torch.equal(found, torch.ones(1, 3))


def run(
    dataset: str, seed: int, ours: float, forest: float, *, chosen: str = "hyperkron", **more: Any
) -> dict[str, Any]:
    """A record: intervals ± 0.05 around held-out accuracies, which are ours + 0.02 and the forest's + 0.01."""

    def one(name: str, held: float, test: float) -> dict[str, Any]:
        return {"name": name, "accuracy": held, "low": held - 0.05, "high": held + 0.05, "test_accuracy": test}

    return {
        "dataset": dataset,
        "kind": "table",
        "unseen": False,
        "seed": seed,
        "per_class": 10,
        "trusted": 30,
        "test_rows": 1000,
        "chosen": chosen,
        "candidates": [one("hyperkron", ours + 0.02, ours), one("forest", forest + 0.01, forest)],
        "outside": {"test": 0.1, "average_precision": 0.5},
        "wrong": 0.3,
        "estimated": {"rate": 0.31},
        "reliability": {"error": 0.04, "bins": [[10, 0.5, 1]] * 10, "sure": [98, 100]},
        "average_precision": 0.9,
        "seconds": {"clean": 1.0},
        **more,
    }


def test_figures_of_made_up_runs() -> None:
    runs = [run("a", 0, 0.8, 0.7), run("b", 0, 0.6, 0.9, chosen="forest"), run("c", 0, 0.6, 0.9)]
    before = [run("a", 0, 0.8, 0.7, average_precision=0.91), run("b", 0, 0.6, 0.9, average_precision=0.9)]
    f = trust_summary.figures(runs, before)
    assert f["coverage"] == 1 and f["optimism_ours"][0] == pytest.approx(2)
    assert f["optimism_against"] == (pytest.approx(1), pytest.approx(0, abs=1e-9))
    assert list(f["below"]) == [("c", 10)] and f["below"]["c", 10]["best"] == "forest"
    s = f["switches"]
    assert (s["switched"], s["better"], s["worse"], s["missed"], s["stayed"]) == (1, 1, 0, 1, 2)
    assert f["precision_lower"] == [("a", 0, 10, pytest.approx(-0.01))] and f["precision_compared"] == 2
    said = {line[0]: line[3] for line in trust_summary.verdicts(runs, before)}
    assert said["the 95 % interval holds the test accuracy"] == "reached"
    assert said["held-out minus test, ours against the alternatives"] == "**not reached**"
    assert said["the choice switches rightly where trees win"] == "reached"
    assert said["average precision against the version before"] == "**not reached**"


def test_trees_of_our_own_method_count_as_trees_and_are_right_where_no_network_is_better() -> None:
    ours = run("a", 0, 0.8, 0.7, model="TreeEnsemble")
    assert trust_summary.delivers_trees(ours) and not trust_summary.delivers_trees(run("a", 0, 0.8, 0.7))
    assert trust_summary.delivers_trees(run("a", 0, 0.8, 0.7, learner="boosted trees"))
    assert not trust_summary.delivers_trees(run("a", 0, 0.8, 0.7, learner="network"))
    ours["candidates"].append({**ours["candidates"][0], "name": "pooled", "test_accuracy": 0.75})
    assert trust_summary.best_network(ours) == 0.75


def test_counting_wrong_labels_is_binomial() -> None:
    assert trust_summary.by_counting(0.5, 2) == pytest.approx(0.5)  # one of the two
    assert trust_summary.by_counting(0.0, 10) == 1


def test_a_test_accuracy_outside_the_interval_is_seen() -> None:
    one = {"accuracy": 0.8, "low": 0.75, "high": 0.85, "test_accuracy": 0.853}
    assert not trust_summary.covered(one, 1000) and trust_summary.covered(one, 1000, widened=True)
    assert not trust_summary.covered({**one, "test_accuracy": 0.9}, 1000, widened=True)


def test_the_page_has_every_promise_and_every_run() -> None:
    more = {"noise": "uniform-20", "commit": "abc"}
    runs = [run(name, 0, 0.8, 0.7, unseen=name == "dna", **more) for name in ("vehicle", "dna")]
    assert len(page.promises(runs, [])) == 2 + len(trust_summary.verdicts(runs, []))
    assert [line.split(" | ")[0] for line in page.short(runs)[2:]] == ["| vehicle", "| dna (unseen)"]
    assert page.candidates(runs)[2].startswith("| hyperkron | 2 | 80.0 | +0.0 | +2.0 ± 0.0 | – | 100% | 2 | 2 |")
    assert page.below(runs) == "none"


def test_our_model_is_told_by_its_kind_against_networks_and_trees() -> None:
    def made(seed: int, ours: float, network: float, kind: str) -> dict[str, Any]:
        found = run("vehicle", seed, ours, 0.5, noise="uniform-20", commit="abc")
        found["candidates"][0]["learner"] = kind
        found["candidates"].append({**found["candidates"][0], "name": "pooled", "test_accuracy": network})
        return found

    runs = [made(0, 0.9, 0.8, "boosted trees"), made(1, 0.7, 0.8, "boosted trees"), made(2, 0.6, 0.5, "network")]
    lines = page.learners([*runs, {**made(3, 0.1, 0.2, "network"), "kind": "text"}])
    assert lines[2:] == [
        "| boosted trees | 2 | 80.0 | 80.0 | 50.0 | 1 of 2 |",
        "| network | 1 | 60.0 | 50.0 | 50.0 | 1 of 1 |",
    ]


def test_a_table_is_compared_with_the_one_before_run_by_run() -> None:
    more = {"noise": "uniform-20", "commit": "abc", "estimated": {"rate": 0.31, "low": 0.2, "high": 0.4}}
    before = [run("vehicle", seed, 0.8, 0.1, **more) for seed in (0, 1)]
    now = [run("vehicle", seed, score, 0.1, **more) for seed, score in ((0, 0.85), (1, 0.8), (2, 0.1))]
    lines = page.paired(now, before)
    assert "| all (2) | delivered model, test % | 80.0 | 82.5 | +2.5 ± 2.5 |" in lines
    assert len(lines) == 2 + 6  # the figures of all runs; no other part has two


def test_the_pages_are_up_to_date() -> None:
    assert page.PAGE.read_text("utf-8") == page.page(), "run python -m experiments.cleaning.page"
    told = (records.ROOT / "docs" / "cleaning-results.md").read_text("utf-8")
    runs, before, _ = page.measured()
    assert "\n".join(page.short(runs)) in told and "\n".join(page.promises(runs, before)) in told


def test_the_summary_of_a_file_is_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(page.RUNS.read_text("utf-8").splitlines(keepends=True)[:12]), "utf-8")
    monkeypatch.setattr("sys.argv", ["trust_summary", str(few)])
    trust_summary.main()
    printed = capsys.readouterr().out
    assert "all: 12 runs" in printed and "below the best rival by more than the interval: " in printed
    assert not set("{}[]") & set(printed)
