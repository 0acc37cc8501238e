"""Several networks for one attack: what is trained, what is kept, and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from experiments import records
from experiments.paper import poisoning, poisoning_attacks, poisoning_networks, poisoning_page, poisoning_problem
from experiments.paper.recipe import Result, Verdict
from experiments.pieces import Lines
from experiments.seeds import shown


def here(count: int, make: Any, ready: Any, keep: Any, **_: Any) -> None:
    """Tasks one after the other, without processes."""
    carry_out = make()
    while tasks := ready():
        key, task = tasks[0]
        keep(key, carry_out(task), 1.0, 1.0)


def test_several_networks_judge_one_attack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is that of table 5; the others train on the rows that were kept, and nothing is done twice."""
    monkeypatch.setattr(poisoning_networks, "share", here)
    monkeypatch.setattr(poisoning_networks, "METHODS", ("clean", "TGDA-CG"))
    out, rows = tmp_path / "x.jsonl", tmp_path / "rows"
    given = ["--toy", "--model", "LR", "--seeds", "1", "--networks", "2", "--out", str(out), "--rows", str(rows)]
    poisoning_networks.main(given)
    found = {(row["method"], row["network"]): row for row in Lines(out).rows}
    assert len(found) == len(Lines(out).rows) == 4
    case = poisoning.SETTINGS["smoke"].cases["LR"]
    split = poisoning_problem.split_of(case, poisoning_problem.load(case), 1)
    first = poisoning_attacks.judged(case, split, None, 1, test=True)
    assert {key: found["clean", 0][key] for key in first} == first
    [kept] = rows.glob("LR-TGDA-CG-1*")  # and no checkpoint of the attack
    with safe_open(kept, "pt") as file:
        x, facts = file.get_tensor("x"), json.loads(file.metadata()["facts"])
    made = poisoning_attacks.Poison((x, split.origin[1]), facts)
    assert found["TGDA-CG", 0]["moved"] == facts["moved"] > 0 and "moved" not in found["TGDA-CG", 1]
    for network in (0, 1):
        judged = poisoning_attacks.judged(case, split, made, 1 + 1000 * network, test=True)
        assert {key: found["TGDA-CG", network][key] for key in judged} == judged
    before = out.read_text("utf-8")
    poisoning_networks.main(given)
    assert out.read_text("utf-8") == before
    capsys.readouterr()
    poisoning_networks.main([*given, "--table"])
    drops = [found["clean", k]["test"] - found["TGDA-CG", k]["test"] for k in (0, 1)]
    assert f"| {shown(drops, 2)} |" in capsys.readouterr().out


def test_attacks_with_the_printed_step_sizes_have_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poisoning_networks, "share", here)
    monkeypatch.setattr(poisoning_networks, "METHODS", ("TGDA-CG",))
    rates = {}
    for arm in ("own", "printed"):
        out = tmp_path / f"{arm}.jsonl"
        given = ["--toy", "--model", "LR", "--arm", arm, "--seeds", "1", "--networks", "1"]
        poisoning_networks.main([*given, "--out", str(out), "--rows", str(tmp_path / "rows")])
        [row] = Lines(out).rows
        rates[arm] = row["rate"]
    assert rates["printed"] == poisoning.PRINTED["outer"][0] != rates["own"]


def test_the_first_network_of_an_attack_comes_before_the_others() -> None:
    task = poisoning_networks.Task
    first = list(poisoning_networks.missing(set(), (1, 2), 3))
    assert first[0] == ("clean", 1, 0) and {x.network for x in first} == {0} and len(first) == 6
    then = list(poisoning_networks.missing({task("TGDA-CG", 1, 0)}, (1, 2), 3))
    assert [x for x in then if x.network] == [("TGDA-CG", 1, 1), ("TGDA-CG", 1, 2)]


def test_the_settings_of_several_networks_are_those_recorded() -> None:
    found = poisoning_networks.chosen("CNN")
    assert (found["TGDA-CG"]["outer"], found["TGDA-KFAC-EMP"]["outer"]) == (3e-6, 1e-5)


def test_the_verdict_takes_the_mean_over_networks_where_all_are_recorded(tmp_path: Path) -> None:
    """Recorded here as if KFAC cost more than CG."""
    lines, accuracy = Lines(tmp_path / "x.jsonl"), {"clean": 58.0, "TGDA-CG": 57.0, "TGDA-KFAC-EMP": 54.0}
    for method, base in accuracy.items():
        for seed in (2, 1, 3):
            for network in (0, 1):
                test = base + 0.01 * seed + (0.2 if network else -0.2)
                lines.append({"model": "CNN", "method": method, "seed": seed, "network": network, "test": test})
    found = poisoning_page.by_networks(tmp_path / "x.jsonl")
    assert found["CNN"]["TGDA-CG"] == pytest.approx([1.0] * 3)
    assert found["CNN"]["TGDA-KFAC-EMP"] == pytest.approx([4.0] * 3)
    begun = {"model": "CNN", "seed": 4, "network": 0}
    lines.append({**begun, "method": "clean", "test": 58.0})
    lines.append({**begun, "method": "TGDA-CG", "test": 9.0})
    assert poisoning_page.by_networks(tmp_path / "x.jsonl") == found  # a seed counts once it is finished
    lines.append({**begun, "method": "TGDA-KFAC-EMP", "test": 9.0})
    assert poisoning_page.by_networks(tmp_path / "x.jsonl") == found
    lines.append({"model": "CNN", "method": "TGDA-CG", "seed": 1, "network": 2, "test": 9.0})
    assert poisoning_page.by_networks(tmp_path / "x.jsonl") == {}  # no other seed has this many
    result = Result.read(records.RESULTS / "paper" / "poisoning-small.json")
    assert poisoning_page.verdict(result).verdict is Verdict.FAILED
    result.figures["networks"] = found
    judged = poisoning_page.verdict(result)
    assert judged.verdict is Verdict.TREND and "TGDA-CG 1.00, TGDA-KFAC-EMP 4.00; KFAC less CG +3.00" in judged.because
