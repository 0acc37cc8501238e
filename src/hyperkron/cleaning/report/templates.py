"""A page from a template of this folder: one file that makes no request and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any

from hyperkron.cleaning.data.files import need
from hyperkron.cleaning.report import wording


def filled(template: str, script: str | None = None, data: str = "", **context: Any) -> str:
    """The text of a page.

    Args:
        template: its file; what is put into it is escaped.
        script: the file of its script, whose hash a Content-Security-Policy names; ``None`` allows no script.
        data: JSON for the script, as ``embed`` makes it.
        context: what the template shows.
    """
    jinja, plain = need("jinja2", "report"), need("markupsafe", "report").Markup
    environment = jinja.Environment(
        autoescape=True, undefined=jinja.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters = (wording.percent, wording.count, wording.duration, wording.memory, wording.value)
    environment.filters.update({function.__name__: function for function in filters})
    code, style = "" if script is None else _package_text(script), _package_text("report.css")
    allowed = "'none'" if script is None else _source(code)
    policy = f"default-src 'none'; img-src data:; style-src {_source(style)}; script-src {allowed}; "
    policy += "base-uri 'none'; form-action 'none'"
    made = environment.from_string(_package_text(template))
    page: str = made.render(policy=policy, script=plain(code), style=plain(style), data=plain(data), **context)
    return page


def _package_text(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _source(text: str) -> str:
    """How a Content-Security-Policy names an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
