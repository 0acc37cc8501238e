"""Scores in the eigenbasis of A, where the inverse is a division:

    ⟨A⁻¹ G_q, G_n⟩ = ⟨G̃_q / (S + δ), G̃_n⟩ ,    G̃ = Q_Bᵀ G Q_A = Σ_s (Q_Bᵀ g_s) (Q_Aᵀ a_s)ᵀ .

The gradient of an example with few positions s goes into the basis row by row. Otherwise the dense gradient of every
query is multiplied by Q_A and Q_B and then, divided by S + δ, by both again.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.func import vmap

from hyperkron import trees
from hyperkron.curvature.base import Eigenbasis
from hyperkron.curvature.kfac.coverage import Block, Plan
from hyperkron.curvature.kfac.kept import KeptGradients
from hyperkron.solution import NonFiniteError
from hyperkron.trees import Tree


def usable(
    bases: Mapping[str, Eigenbasis], plan: Plan, params: Tree, kept: KeptGradients | None
) -> dict[str, Eigenbasis]:
    """The bases that are as precise as the model, of blocks whose gradients all come from rows.

    Those of a weight that an embedding uses as well do not, nor do kept gradients that are already products of rows.
    """
    elsewhere = {name for names in plan.diagonal.values() for name in names.values()}
    made = {one.block.name for _, part in kept.parts for one in part if one.whole} if kept is not None else set()
    dtypes = {p.dtype for p in params.values()}
    return {
        name: basis
        for name, basis in bases.items()
        if name not in made and elsewhere.isdisjoint(plan.blocks[name].names) and dtypes == {basis.a.dtype}
    }


class EigenCoordinates:
    """The blocks whose part of the scores is computed in their eigenbasis: none, until :meth:`choose` is called.

    The coordinates G̃_q / (S + δ) of a query are as many as the parameters of the block, and are held in a tree in place
    of A⁻¹ G_q.

    Attributes:
        bases: the eigenbases of these blocks, by name.
    """

    def __init__(self, blocks: Mapping[str, Block], known: Mapping[str, Eigenbasis]) -> None:
        self._blocks, self._known = blocks, known
        self.bases: dict[str, Eigenbasis] = {}

    def choose(self, positions: Mapping[str, float], queries: int, examples: int) -> None:
        """Choose the blocks for which the basis saves multiplications; ``positions`` tells how many rows an example
        has in each block."""
        for name, basis in self._known.items():
            d_out, d_in = basis.spectrum.shape[-2:]
            by_rows = (queries + examples) * positions.get(name, 0.0) * (d_in**2 + d_out**2)
            dense = 2 * queries * d_out * d_in * (d_out + d_in)
            if name in positions and self._blocks[name].weight is not None and by_rows < dense:
                self.bases[name] = Eigenbasis(*(x.contiguous() for x in basis))  # as it is read from a file

    @property
    def names(self) -> set[str]:
        """The parameters of these blocks."""
        return {name for block in self.bases for name in self._blocks[block].names}

    def of_gradients(self, gradients: Tree) -> Tree:
        """Stacked dense gradients, with those of these blocks replaced by coordinates of A⁻¹ times them."""

        def solved(tree: Tree) -> Tree:
            found = dict(tree)
            for name, (a, b, spectrum) in self.bases.items():
                block = self._blocks[name]
                found.update(block.part((b.mT @ block.join(tree) @ a) / spectrum, tree))
            return found

        made: Tree = vmap(solved)(gradients) if self.bases else gradients
        return made

    def to_vectors(self, coordinates: Tree) -> Tree:
        """The stacked vectors A⁻¹ G_q of these blocks from their coordinates."""

        def turned(tree: Tree) -> Tree:
            found: Tree = {}
            for name, (a, b, _) in self.bases.items():
                block = self._blocks[name]
                found.update(block.part(b @ block.join(tree) @ a.mT, tree))
            return found

        names = self.names
        made: Tree = vmap(turned)({name: coordinates[name] for name in names}) if names else {}
        return made

    def split(self, gradients: Tree) -> tuple[Tree, Tree]:
        """The coordinates in ``gradients``, which must be finite, and what A⁻¹ is still to be applied to."""
        names = self.names
        coordinates = {name: x for name, x in gradients.items() if name in names}
        if not trees.is_finite(coordinates):
            raise NonFiniteError("b holds NaN or infinity; check the outer loss and its batch")
        return coordinates, {name: x for name, x in gradients.items() if name not in names}
