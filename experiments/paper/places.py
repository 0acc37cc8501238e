"""Every table and figure of the paper, in its order, so that the page leaves none out."""

from __future__ import annotations

PLACES = (
    *("Table 1", "Figure 1, top", "Figure 1, bottom", "Figure 2", "Figure 3", "Table 2", "Table 3", "Figure 4"),
    *("Table 4", "Table 5", "Table 6", "Table 7", "Figure 5", "Figure 6", "Figure 7", "Appendix C"),
)
"""A recipe covers a place when the place's name is in the recipe's ``place``; every place has one."""


def order(place: str) -> int:
    """Where a section with this place belongs on the page.

    Example:
        >>> order("Table 1"), order("Figure 4; Table 7"), order("elsewhere")
        (0, 7, 16)
    """
    first = place.split(";")[0].strip()
    return PLACES.index(first) if first in PLACES else len(PLACES)
