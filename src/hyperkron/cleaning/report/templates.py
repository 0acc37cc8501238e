"""A page from a template of this folder: one file that makes no request and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from hyperkron.cleaning.report import wording
from hyperkron.solution import HyperkronError


def filled(template: str, script: str | None = None, data: str = "", **context: Any) -> str:
    """The text of a page.

    Args:
        template: its file; what is put into it is escaped.
        script: the file of its script, whose hash a Content-Security-Policy names; ``None`` allows no script.
        data: JSON for the script, as ``embed`` makes it.
        context: what the template shows.
    """
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise HyperkronError("A report needs jinja2; pip install 'hyperkron[report]'.") from error
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters = (wording.percent, wording.count, wording.duration, wording.memory, wording.value)
    environment.filters.update({function.__name__: function for function in filters})
    code, style = "" if script is None else _package_text(script), _package_text("report.css")
    allowed = "'none'" if script is None else _source(code)
    policy = f"default-src 'none'; img-src data:; style-src {_source(style)}; script-src {allowed}; "
    policy += "base-uri 'none'; form-action 'none'"
    made = environment.from_string(_package_text(template))
    return made.render(policy=policy, script=Markup(code), style=Markup(style), data=Markup(data), **context)


def _package_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _source(text: str) -> str:
    """How a Content-Security-Policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
