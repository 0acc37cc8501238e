"""The cross term ∂²_λθ J_in · v: how the inner gradient along v changes with λ.

:mod:`~hyperkron.cross.ways` computes it for any inner loss, :mod:`~hyperkron.cross.weighting` for losses in which λ
only weights examples and penalties, and :mod:`~hyperkron.cross.adjoint` for such losses in low precision.
:mod:`~hyperkron.cross.choice` chooses the cheapest way that is correct.
"""

from hyperkron.cross.choice import Cross, Mode
from hyperkron.cross.state import MAX_CHANGES, RECHECK, CrossState, code_of
from hyperkron.cross.ways import difference, forward, reverse

__all__ = ["MAX_CHANGES", "RECHECK", "Cross", "CrossState", "Mode", "code_of", "difference", "forward", "reverse"]
