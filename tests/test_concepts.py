"""The ten-second rule: whoever knows the formula, the name of a method or a task finds its file by name alone."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONCEPTS = {
    # the formula
    "the two objectives": "src/hyperkron/problem.py",
    "losses that know their curvature": "src/hyperkron/losses/classification.py",
    "where objectives are evaluated": "src/hyperkron/evaluation/point.py",
    "A = identity": "src/hyperkron/curvature/identity.py",
    "A = Adam diagonal": "src/hyperkron/curvature/adam_diagonal.py",
    "A = Hessian": "src/hyperkron/curvature/hessian.py",
    "A = Gauss–Newton": "src/hyperkron/curvature/ggn.py",
    "A = KFAC": "src/hyperkron/curvature/kfac/kfac.py",
    "A = EKFAC": "src/hyperkron/curvature/kfac/ekfac.py",
    "which layers KFAC covers": "src/hyperkron/curvature/kfac/coverage.py",
    "conjugate gradients": "src/hyperkron/solvers/cg.py",
    "Neumann series": "src/hyperkron/solvers/neumann.py",
    "the cross term": "src/hyperkron/cross/ways.py",
    "the implicit hypergradient": "src/hyperkron/hypergradient/implicit.py",
    "unrolled differentiation": "src/hyperkron/hypergradient/unrolled.py",
    "the named hypergradients": "src/hyperkron/hypergradient/named.py",
    "which method a problem needs, and which damping": "src/hyperkron/hypergradient/diagnosis.py",
    # methods
    "AID": "src/hyperkron/algorithms/aid.py",
    "AmIGO": "src/hyperkron/algorithms/amigo.py",
    "stocBiO": "src/hyperkron/algorithms/stocbio.py",
    "SAMA": "src/hyperkron/algorithms/sama.py",
    "BOME": "src/hyperkron/algorithms/bome.py",
    # what users do
    "λ as a module": "src/hyperkron/hyper.py",
    "run an algorithm": "src/hyperkron/training/fit.py",
    "save and resume": "src/hyperkron/training/checkpoint.py",
    "where batches come from": "src/hyperkron/batches.py",
    "optimizers of both levels": "src/hyperkron/optimizers.py",
    "clean a dataset": "src/hyperkron/cleaning/api.py",
    "export cleaned data": "src/hyperkron/cleaning/data/export.py",
    # the paper, and speed
    "the paper's encoder experiment": "experiments/paper/encoder_cleaning.py",
    "what an outer iteration costs": "benchmarks/bench_outer_iteration.py",
}


@pytest.mark.parametrize("concept", CONCEPTS)
def test_a_concept_has_a_file_that_is_named_after_it(concept: str) -> None:
    path = ROOT / CONCEPTS[concept]
    assert path.is_file()
    assert path.read_text("utf-8").startswith('"""'), "its first line says what it holds"


def test_every_concept_has_a_file_of_its_own() -> None:
    assert len(CONCEPTS) == len(set(CONCEPTS.values())) == 31
