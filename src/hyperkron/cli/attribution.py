"""``hyperkron attribute``: why does the model of a finished run say this?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyperkron.cli.cleaning import load_model, showing
from hyperkron.cli.output import UsageError, say, say_json


def attribute(options: Any, given: list[str]) -> int:
    """Write a page with the training rows behind each prediction."""
    if options.count < 1:
        raise UsageError(f"--count={options.count} must be at least 1.")
    from hyperkron.cleaning import explain
    from hyperkron.cleaning.report import write_explanation

    with showing(options) as shown:
        found = explain(
            options.run, options.query, count=options.count, model=load_model(options.model), progress=shown
        )
    page = write_explanation(found, options.out or Path(options.run) / "attribution.html")
    if options.json:
        queries = [asdict(query) for query in found.queries]
        say_json({"page": str(page), "messages": found.messages, "queries": queries})
    else:
        for message in found.messages if not options.quiet else ():
            say(message)
        print(page)
    return 0
