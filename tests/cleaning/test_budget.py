"""A budget counts what a run will do: steps of networks and fits of trees."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blobs import Watch, blobs, quicken
from hyperkron.cleaning import CleanConfig, budget, clean
from hyperkron.cleaning.config import BOOSTED, FOREST
from hyperkron.cleaning.models import trees
from hyperkron.cleaning.run import Sharing

pytest.importorskip("sklearn")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.mark.long
def test_fits_of_trees_are_those_that_the_run_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    data, made, counted = blobs(rows=60), list[str](), list[budget.Fit]()

    def counting(kind: str, fit: Any, *given: Any, **named: Any) -> Any:
        made.append(kind)
        return fit(*given, **named)

    for kind, name in ((FOREST, "forest"), (BOOSTED, "boosted")):
        counted_fit = partial(counting, kind, getattr(trees, name))
        for module in ("models.trees", "method"):
            monkeypatch.setattr(f"hyperkron.cleaning.{module}.{name}", counted_fit, raising=False)

    def measured(work: Any, kinds: set[str]) -> dict[budget.Fit, float]:
        counted[:] = budget.tree_fits(work, ["forest", "boosted"], True)
        return {(kind, rows): 1e-6 for kind in kinds for rows in (1, 2)}

    monkeypatch.setattr(budget, "seconds_per_fit", measured)
    config = CleanConfig(epochs=1, compare=("forest", "boosted"), budget=1e6)
    assert len(clean(data.train, data.trusted, test=data.test, config=config).candidates) == 3
    views = 5
    last = len(made) - (len(counted) - (1 + views))  # of trees that won: at most one of all rows in each view
    assert 0 <= last <= 1 + views
    assert [kind for kind, _ in counted].count(BOOSTED) <= made.count(BOOSTED) <= made.count(FOREST)
    assert {rows for _, rows in counted} == {84, 42}


def test_seconds_lie_on_the_line_through_two_sizes() -> None:
    measured = {(FOREST, 100): 1.0, (FOREST, 200): 1.5, (BOOSTED, 100): 2.0, (BOOSTED, 200): 1.9}
    assert budget.seconds_of([(FOREST, 100), (FOREST, 400)], measured) == pytest.approx(1.0 + 2.5)
    assert budget.seconds_of([(BOOSTED, 200)], measured) == 2.0  # no fit of more rows takes less time
    assert budget.seconds_of([], {}) == 0.0


def test_trees_count_and_the_most_expensive_alternative_goes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = blobs(rows=60)
    monkeypatch.setattr(budget, "seconds_per_step", lambda work: 1e-6)
    prices = {(kind, rows): price for kind, price in ((FOREST, 1.0), (BOOSTED, 2.0)) for rows in (42, 84)}
    monkeypatch.setattr(budget, "seconds_per_fit", lambda work, kinds: prices)
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    within, asked = budget.within, list[Any]()
    whole = lambda work, names, test, left: within(work, names, test, config.budget)  # noqa: E731
    monkeypatch.setattr("hyperkron.cleaning.run.within", whole)

    class Stop(Exception):
        pass

    def stop(work: Any, plan: Any, names: list[str], test: bool) -> int:
        asked.append((work, names))
        raise Stop

    monkeypatch.setattr("hyperkron.cleaning.run.steps_of", stop)  # called once the plan is made
    watch = Watch()
    # 1 + 6 forests, 6 times two halves of both kinds and a forest, and 5 of each alternative
    method, forest, boosted = 7 + 6 * (2 + 4 + 1), 5.0, 10.0
    for seconds, left in ((method + forest + boosted + 1, 3), (method + forest + 1, 2), (method + 1, 1)):
        config = CleanConfig(epochs=1, compare=("noisy", "forest", "boosted"), budget=float(seconds))
        with pytest.raises(Stop):
            clean(data.train, data.trusted, config=config, progress=watch)
        assert budget.ONE_PROCESS not in watch.messages and asked[-1][1] == ["noisy", "forest", "boosted"][:left]
        assert asked[-1][0].trees
    told = [m.split(" to stay")[0] for m in watch.messages if "left out of the comparison" in m]
    with pytest.raises(Stop):
        clean(data.train, data.trusted, config=config, progress=watch, out=tmp_path / "run", sharing=Sharing(2))
    assert budget.ONE_PROCESS in watch.messages
    assert told == [f"'{name}' is left out of the comparison" for name in ("boosted", "boosted", "forest")]


def test_long_training_is_shortened_to_a_tenth_once_nothing_is_left_to_leave_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First to a third, with all alternatives; then without them; then to a fifth and a tenth."""
    data, watch, kept = blobs(rows=60), Watch(), list[dict[str, Any]]()
    monkeypatch.setattr(budget, "seconds_per_step", lambda work: 1.0)
    monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    within = budget.within

    class Stop(Exception):
        pass

    def planned(work: Any, names: list[str], test: bool, left: float) -> Any:
        shares = (1.0, 1 / 3, 1 / 3, 0.2, 0.1, 0.01)
        for share, asked in zip(shares, (names, names, [], [], [], []), strict=True):
            plan = replace(work.plan, epochs=share * work.plan.epochs, least=max(60, round(work.plan.least * share)))
            kept.append(within(work, names, test, float(budget.steps_of(work, plan, asked, test))))
        raise Stop

    monkeypatch.setattr("hyperkron.cleaning.run.within", planned)
    config = CleanConfig(epochs=1000, compare=("noisy", "trusted"), budget=1e6)
    monkeypatch.setattr(trees, "installed", lambda: False)
    with pytest.raises(Stop):
        clean(data.train, data.trusted, config=config, progress=watch)
    assert [x["epochs"] for x in kept] == pytest.approx([1000, 1000 / 3, 1000 / 3, 200, 100, 100])
    assert [len(x["compare"]) for x in kept] == [2, 2, 0, 0, 0, 0]
    assert [any("still take" in m for m in x["messages"]) for x in kept] == [False] * 5 + [True]
    assert "Training is shortened to 200.0 epochs" in kept[3]["messages"][0]


def test_a_budget_that_is_too_short_for_trees_leaves_them_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, watch = blobs(rows=60), Watch()
    monkeypatch.setattr(budget, "seconds_per_step", lambda work: 1e-6)
    prices = {(kind, rows): price for kind, price in ((FOREST, 1e-6), (BOOSTED, 1e3)) for rows in (42, 84)}
    monkeypatch.setattr(budget, "seconds_per_fit", lambda work, kinds: prices)
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr("hyperkron.cleaning.models.trees.forest", None)  # not called
        patched.setattr("hyperkron.cleaning.method.forest", None)
        config = CleanConfig(epochs=1, compare=("noisy", "forest"), budget=900.0)
        result = clean(data.train, data.trusted, config=config, progress=watch, out=out)
    assert [c["name"] for c in result.candidates] == ["hyperkron", "noisy"]  # no forest, though it would be cheap
    assert any("without trees" in message for message in watch.messages)
    assert not any("still take" in message for message in watch.messages)


def test_only_a_part_of_the_trees_is_fitted_to_measure_them(monkeypatch: pytest.MonkeyPatch) -> None:
    data, asked = blobs(rows=60), list[dict[str, int]]()

    class Stop(Exception):
        pass

    def look(work: Any, names: list[str], test: bool, seconds: float) -> Any:
        monkeypatch.setattr(trees, "TREES", 100)
        monkeypatch.setattr(trees, "ROUNDS", 100)
        for name in ("forest", "boosted"):
            monkeypatch.setattr(trees, name, lambda *_, **named: asked.append(named))
        now = iter(range(100))
        monkeypatch.setattr(budget, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
        assert set(budget.seconds_per_fit(work, {FOREST, BOOSTED}).values()) == {10.0}  # a tenth takes a second
        raise Stop

    monkeypatch.setattr("hyperkron.cleaning.run.within", look)
    with pytest.raises(Stop):
        clean(data.train, data.trusted, config=CleanConfig(epochs=1, compare=(), budget=5.0))
    assert asked == [{"rounds": 10}] * 2 + [{"trees": 10}] * 2


def test_trees_of_two_sizes_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    data, found = blobs(rows=60), dict[str, Any]()

    class Stop(Exception):
        pass

    def look(work: Any, names: list[str], test: bool, seconds: float) -> Any:
        found["measured"] = budget.seconds_per_fit(work, {FOREST, BOOSTED})
        raise Stop

    monkeypatch.setattr("hyperkron.cleaning.run.within", look)
    with pytest.raises(Stop):
        clean(data.train, data.trusted, config=CleanConfig(epochs=1, compare=(), budget=5.0))
    assert sorted(found["measured"]) == [(BOOSTED, 42), (BOOSTED, 84), (FOREST, 42), (FOREST, 84)]
    assert min(found["measured"].values()) > 0
