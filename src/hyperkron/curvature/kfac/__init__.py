"""KFAC and EKFAC, from a model to a product with the inverse:

- ``coverage``: which curvature every parameter gets; ``layers``: a module's input and output gradient as rows;
- ``capture``, ``recorder``: one forward and a few backward passes whose hooks turn these rows into factors and EKFAC's
  spectrum (``grams``, ``factors``, ``correlation``) and into diagonals (``diagonals``);
- ``inverse``, ``eigen``: the damped inverses of all blocks; ``penalty``: L2 penalties as damping;
- ``kronecker``, ``kfac``, ``ekfac``: the options, and when all this is done; ``state``: what is kept, and the operator.
"""

from hyperkron.curvature.kfac.coverage import Coverage
from hyperkron.curvature.kfac.ekfac import EKFAC
from hyperkron.curvature.kfac.kfac import KFAC
from hyperkron.curvature.kfac.layers import Layer
from hyperkron.curvature.kfac.state import KroneckerState

__all__ = ["EKFAC", "KFAC", "Coverage", "KroneckerState", "Layer"]
