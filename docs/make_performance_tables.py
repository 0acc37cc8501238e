"""Write the tables of docs/performance.md and benchmarks/performance-record.md from the committed result files.

python docs/make_performance_tables.py          # rewrite the tables between the markers
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "benchmarks" / "results"
GPU = tuple(f"outer_iteration_h200_{workload}.json" for workload in ("bert", "resnet7", "resnet3"))


def load(name: str) -> dict[str, Any]:
    """A result file."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text("utf-8"))
    return found


MAIN = (
    *("SAMA (Betty's way)", "SAMA, graph", "KFAC mc", "KFAC mc, graph", "KFAC mc reduce, graph"),
    *("KFAC mc, every 5, graph", "KFAC mc, keep_previous=False", "EKFAC, basis every 10, graph"),
    *("CG-3", "CG-3, graph", "Neumann-10", "KFAC (curvlinops)"),
)
"""The methods on the page for users; the record has all."""


def outer_iteration(methods: tuple[str, ...] | None = None) -> str:
    """Cost ratio and peak memory of every method, or of these, on every workload."""
    rows = [row for name in GPU for row in load(name)["rows"] if methods is None or row["method"] in methods]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    lines = ["| method | " + " | ".join(workloads) + " |", "| --- |" + " --- |" * len(workloads)]
    for method in methods or dict.fromkeys(row["method"] for row in rows):
        cells = []
        for workload in workloads:
            row = next((r for r in rows if r["method"] == method and r["workload"] == workload), None)
            cells.append("–" if row is None else cell(row))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(row: dict[str, Any]) -> str:
    """Ratio, time and memory of one method; a dagger marks an earlier run."""
    mark = "†" if row.get("earlier") else ""
    return f"{row['ratio']:.2f}×{mark}, {row['outer_ms']:.0f} ms, {row['peak_gib']:.2f} GiB"


def inner_loops() -> str:
    """Ten inner steps, and a whole outer iteration with KFAC, the ways they can run."""
    rows = [row for name in GPU for row in load(name)["inner_loops"]]
    reference = {
        row["workload"]: row["inner_ms"] + row["outer_ms"]
        for name in GPU
        for row in load(name)["rows"]
        if row["method"] == "KFAC (curvlinops)"
    }
    eager = {row["workload"]: row["ms"] for row in rows if row["inner loop"] == "eager"}
    lines = [
        "| workload | inner loop | ten steps | against eager | whole KFAC outer iteration | against curvlinops |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        whole = row.get("outer_iteration_ms")
        last = f"{whole:.0f} ms | {reference[row['workload']] / whole:.2f}×" if whole else "– | –"
        speedup = eager[row["workload"]] / row["ms"]
        mark = "†" if row.get("earlier") else ""
        lines.append(
            f"| {row['workload']} | {row['inner loop']} | {row['ms']:.0f} ms{mark} | {speedup:.2f}× | {last} |"
        )
    return "\n".join(lines)


def bfloat16() -> str:
    """Cosine between the hypergradients of the bfloat16 and the float32 model."""
    lines = [
        "| workload | hypergradient | ratio of norms | v, factors alone so | ∂θ J_out itself | without curvature | "
        "hypergradient by default |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in [row for name in ("bfloat16_h200.json", "bfloat16_cifar_h200.json") for row in load(name)["rows"]]:
        more = " | ".join(f"{row[key]:.4f}" for key in ("v_by_factors", "outer_gradient", "identity"))
        what = f"{row['workload']}, {row['images']}, {row['steps']} steps" if "images" in row else row["workload"]
        default = f"{row['cosine_by_default']:.4f}, bfloat16 {row['default']}"
        lines.append(f"| {what} | {row['cosine']:.4f} | {row['ratio_of_norms']:.3f} | {more} | {default} |")
    return "\n".join(lines)


def curvlinops() -> str:
    """Factors, factorisation and one solve on the CPU, against curvlinops."""
    lines = [
        "| model | curvlinops | ours | faster | memory, of theirs | without norm layers and embeddings |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, model in load("curvlinops_cpu.json")["models"].items():
        ours, blocks = model["ours"], model["ours, blocks only"]
        lines.append(
            f"| {name} | {model['curvlinops']['median_s']:.2f} s | {ours['median_s']:.2f} s "
            f"| {ours['faster_by_median']:.2f}× | {ours['share_of_memory']:.2f} "
            f"| {blocks['faster_by_median']:.2f}×, {blocks['share_of_memory']:.2f} |"
        )
    return "\n".join(lines)


def figure(row: dict[str, Any], name: str, scale: float, digits: int) -> str:
    """A figure of one size, measured / predicted."""
    kinds = ("measured", "predicted")
    return " / ".join(f"{row[kind][name] * scale:.{digits}f}" for kind in kinds) if row["measured"][name] else "–"


def scaling(name: str = "scaling_cpu.json") -> str:
    """Time and memory along each axis, against the cost model."""
    lines = [
        "| axis | rows | inner step, ms | KFAC, ms | CG-3, ms | ratio of KFAC | memory of KFAC, MiB | factors |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for axis, rows in load(name)["axes"].items():
        for row in rows:
            cells = [f"{axis} {row['encoder'][axis]}", str(row["rows"])]
            if "measured" in row:
                cells += [figure(row, key, 1e3, 1) for key in ("inner_step_s", "kfac_s", "cg3_s")]
                cells += [figure(row, "ratio", 1, 2), figure(row, "kfac_bytes", 2**-20, 0)]
                cells += [row["measured"]["strategies"]]
            else:
                cells += ["skipped", *["–"] * 5]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def strategy(name: str = "scaling_cpu.json") -> str:
    """Time of the dual over that of the primal form of one factor, by rows for each dimension."""
    found = load(name)["strategy"]
    ratios = [x["ratio"] for x in found[0]["times"]]
    lines = [
        "| d, columns | " + " | ".join(f"{r:g}" for r in ratios) + " | cross at | by operations |",
        "| --- |" + " --- |" * (len(ratios) + 2),
    ]
    for row in found:
        cells = [f"{x['dual_s'] / x['primal_s']:.2f}" for x in row["times"]]
        where = "–" if row["crossover"] is None else f"{row['crossover']:.2f}"
        cells += [where, f"{row['crossover_in_operations']:.2f}"]
        lines.append(f"| {row['d']}, {row['columns']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TENSOR, HALF, PLAIN, BANDWIDTH = 495e12, 989e12, 67e12, 4.8e12
"""An H200 by its data sheet: operations a second in TF32, float16 and float32, and bytes a second."""
TRACED = {
    "outer gradient": "44",
    "passes of the factors": "34",
    "Gram matrices": "22",
    "Cholesky": "34, beside the outer gradient",
    "solves": "7",
    "cross term": "24",
}
"""Milliseconds of kernels, 166 in all, in one trace of a recorded step on BERT; put to stages by hand, and no finer."""


def roofline() -> str:
    """What each stage of a KFAC hypergradient on BERT could take at the least, and what it takes."""
    sys.path.insert(0, str(RESULTS.parent))
    import cost_model

    lines = [
        "| stage | TFLOP | GB | operations a byte | floor, ms | bound by | measured, ms |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, works in cost_model.stages(cost_model.Encoder(768, 12, 128, 100, 6), "cuda").items():
        peak = {"Gram matrices": HALF, "Cholesky": PLAIN}.get(name, TENSOR)
        times = [(work.flops / peak, work.bytes / BANDWIDTH) for work in works]
        floor = sum(max(pair) for pair in times)
        computing = sum(max(pair) for pair in times if pair[0] >= pair[1]) / floor
        flops, moved = cost_model.flops(works), cost_model.moved(works)
        lines.append(
            f"| {name} | {flops / 1e12:.2f} | {moved / 1e9:.0f} | {flops / moved:.0f} | {1e3 * floor:.0f} "
            f"| {computing:.0%} operations, {1 - computing:.0%} memory | {TRACED[name]} |"
        )
    return "\n".join(lines)


TABLES = {
    "roofline": roofline,
    "outer-iteration": outer_iteration,
    "main-methods": lambda: outer_iteration(MAIN),
    "inner-loops": inner_loops,
    "bfloat16": bfloat16,
    "curvlinops": curvlinops,
    "scaling": scaling,
    "strategy": strategy,
    "scaling-gpu": lambda: scaling("scaling_cuda.json"),
    "strategy-gpu": lambda: strategy("scaling_cuda.json"),
}


PAGES = (HERE / "performance.md", RESULTS.parent / "performance-record.md")


def rendered(text: str) -> str:
    """``text`` with every marked table written again."""
    for name, table in TABLES.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if begin in text:
            head, rest = text.split(begin, 1)
            text = f"{head}{begin}{table()}\n{end}{rest.split(end, 1)[1]}"
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page.read_text("utf-8")), "utf-8")
