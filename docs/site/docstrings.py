"""For mkdocs: the docstrings of the package in the words of Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Plain(griffe.Extension):
    """Roles such as ``:class:`KFAC``` become code, and examples the code that they are."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Once for every module, class, function and attribute."""
        if obj.docstring is not None:
            text = re.sub(r":[a-z]+:`~?(?:hyperkron\.)?([^`]*)`", r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", text, flags=re.MULTILINE)
