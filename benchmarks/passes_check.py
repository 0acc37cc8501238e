"""How far hypergradients with recorded passes are from ordinary ones, from the same random states.

    python benchmarks/passes_check.py --device cuda       # half a minute; --small: toys, which show nothing on a CPU

Language models of transformers make an attention mask while a graph is recorded, and so take another attention kernel;
so they are compared with ordinary passes that have such a mask, too, and these with themselves.
"""

from __future__ import annotations

import argparse
from typing import Any
from unittest.mock import patch

import torch
from common import line_writer
from torch import Tensor
from transformers import masking_utils
from workloads import LANGUAGE, Workload

import hyperkron as hk

OPTIONS: dict[str, dict[str, Any]] = {"mc": {}, "empirical": {"fisher": "empirical"}, "every 3": {"refresh_every": 3}}

MASKS = {"llama01": (False, True), "bert-dropout": (False,)}
"""Whether ordinary passes get an attention mask as recorded ones do, by workload."""


def found(work: Workload, graph: Any, options: dict[str, Any]) -> list[Tensor]:
    """Hypergradients on five batches; recordings are made in the first two."""
    method, answers = hk.kfac(graph=graph, keep_previous=False, **options), []
    for i in range(5):
        torch.manual_seed(i)
        result = method.compute(work.problem, work.model, work.hyper, work.batches[i], work.outer_batch)
        answers.append(torch.cat([g.flatten() for g in result.grads.values()]).double())
    return answers


def apart(mine: list[Tensor], its: list[Tensor]) -> list[float]:
    """Relative differences."""
    return [float(f"{float((x - y).norm() / y.norm()):.1e}") for x, y in zip(mine, its, strict=True)]


def main() -> None:
    """Parse, compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--small", action="store_true", help="toys of the same structure")
    parser.add_argument("--workloads", nargs="+", default=list(MASKS), choices=list(MASKS))
    parser.add_argument("--out", help="file of JSON lines, which are appended")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    keep = line_writer(args.out)
    for name in args.workloads:
        work = LANGUAGE[name](args.device, args.small)
        work.inner_steps()
        for mask in MASKS[name]:
            tracing = masking_utils.is_tracing
            with patch.object(masking_utils, "is_tracing", (lambda *_: True) if mask else tracing):
                for label, options in OPTIONS.items():
                    eager, again, passes = (found(work, graph, options) for graph in (False, False, "passes"))
                    row = {"workload": name, "mask": mask, "method": label, "passes": apart(passes, eager)}
                    keep({**row, "ordinary again": apart(again, eager)})


if __name__ == "__main__":
    main()
