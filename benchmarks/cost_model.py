"""What one KFAC hypergradient costs on a transformer encoder, in closed form: operations, bytes, seconds, memory.

Symbols: R rows (batch × tokens), w width, f hidden size, T tokens, P parameters, d the dimension of a factor. A product
of (m, k) with (k, n) is 2mkn operations, and F is a forward pass. Every formula is derived where it is used; constants
that the library decides by (``DUAL_RATIO``, ``MIN_BLOCKED_WIDTH``, ``LEAF``) are read from it. Numbers are float32.

A :class:`Work` takes ``max(operations / rate, bytes / bandwidth) + calls · latency``; the rates are measured, not
assumed (``calibrate`` in ``benchmarks/scaling.py``). Calls, which decide at small sizes, are not derived: they are
linear forms in the depth that agree with what torch's dispatcher counts (``tests/test_cost_model.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from hyperkron.curvature.kfac.factors import few_rows
from hyperkron.kernels.linalg import LEAF, MIN_BLOCKED_WIDTH

FLOAT = 4
INNER_STEPS = 10
Kind = Literal["matmul", "cholesky", "solve", "pass"]


@dataclass(frozen=True)
class Work:
    """Some operations on some bytes; ``size`` is the smallest dimension of a product, or that of a system."""

    kind: Kind
    flops: float
    bytes: float
    size: int = 0
    calls: float = 1.0


def product(m: int, k: int, n: int, count: float = 1, share: float = 1.0) -> Work:
    """``count`` products (m, k) × (k, n): 2mkn operations each, or a ``share`` of them; operands and result move."""
    return Work("matmul", count * share * 2 * m * k * n, count * FLOAT * (m * k + k * n + m * n), min(m, k, n), count)


def passes(floats: float, calls: float = 1) -> Work:
    """Elementwise work: ``floats`` numbers read or written."""
    return Work("pass", 0.0, FLOAT * floats, 0, calls)


def flops(works: Iterable[Work]) -> float:
    """All operations."""
    return sum(w.flops for w in works)


def moved(works: Iterable[Work]) -> float:
    """All bytes."""
    return sum(w.bytes for w in works)


@dataclass(frozen=True)
class Machine:
    """Effective rates: operations a second by size for each kind, bytes a second, seconds for a call.

    ``device`` says which ways the library takes: on a CPU Gram matrices by five eighths of their blocks and the
    library's Cholesky, on a GPU whole products and the factorisation by halves.
    """

    matmul: Mapping[int, float]
    cholesky: Mapping[int, float]
    solve: Mapping[int, float]
    bandwidth: float
    latency: float
    device: str = "cpu"

    def rate(self, kind: Kind, size: int) -> float:
        """Operations a second at ``size``: between measured sizes log-log linear, beyond them constant."""
        table = {"matmul": self.matmul, "cholesky": self.cholesky, "solve": self.solve}[kind]
        sizes = sorted(table)
        size = min(max(size, sizes[0]), sizes[-1])
        for low, high in pairwise(sizes):
            if low <= size <= high:
                t = math.log(size / low) / math.log(high / low)
                return table[low] ** (1 - t) * table[high] ** t
        return table[sizes[-1]]

    def seconds(self, works: Iterable[Work]) -> float:
        """The time of works done one after the other."""

        def one(w: Work) -> float:
            computing = w.flops / self.rate(w.kind, w.size) if w.flops else 0.0
            return max(computing, w.bytes / self.bandwidth) + w.calls * self.latency

        return sum(one(w) for w in works)


@dataclass(frozen=True)
class Layer:
    """``count`` times a group of ``uses`` linear layers, each (d_in + 1) → d_out on R rows, that read one input.

    Query, key and value are one group of three: A is summed once for them, but damped and factorised for each, for π
    differs. (A convolution is such a layer with one row for each output position and d_in = C·kh·kw.)
    """

    rows: int
    d_in: int
    d_out: int
    uses: int = 1
    count: int = 1

    @property
    def blocks(self) -> int:
        """Kronecker blocks."""
        return self.uses * self.count

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return self.blocks * (self.d_in + 1) * self.d_out


@dataclass(frozen=True)
class Side:
    """The factors on one side of a layer, of d dimensions (``size`` with the bias); a solve has ``other`` columns."""

    layer: Layer
    d: int
    size: int
    other: int
    sums: int  # how many different ones there are before damping
    dual: bool  # whether the rows are kept


def sides(layer: Layer) -> tuple[Side, Side]:
    """A, of d_in + 1 with the bias, and B, of d_out; as matrices or rows by the library's own rule."""
    r, n, m = layer.rows, layer.d_in, layer.d_out
    a = Side(layer, n, n + 1, m, layer.count, few_rows(r, n))
    return a, Side(layer, m, m, n + 1, layer.blocks, few_rows(r, m))


def gram_share(d: int, device: str) -> float:
    """In four block rows with only the blocks on and right of the diagonal, (4+3+2+1)/16 of the products: 5/8."""
    least = MIN_BLOCKED_WIDTH.get(device)
    return 5 / 8 if least is not None and d >= least else 1.0


def gram(side: Side, device: str) -> list[Work]:
    """Primal: XᵀX, 2Rd² for every distinct input. Dual: XXᵀ, 2R²d for every block, shared input or not."""
    rows = side.layer.rows
    if side.dual:
        return [product(rows, side.size, rows, side.layer.blocks, gram_share(rows, device))]
    share = gram_share(side.d, device)
    calls = side.sums * ((1 if share == 1 else 8) + (6 if side.size > side.d else 0))
    border = (rows + 2 * side.size) * side.size * side.sums if side.size > side.d else 0
    return [replace(product(side.d, rows, side.d, side.sums, share), calls=calls), passes(border, 0)]


def factorisation_flops(n: int, device: str) -> float:
    """Cholesky n³/3; by halves T(n) = 2T(n/2) + n³/8 (C = Q K⁻ᵀ) + n³/4 (C Cᵀ), which is n³/2 (leaves left out)."""
    return n**3 / 3 if device == "cpu" or n <= LEAF else n**3 / 2


def factorisation(side: Side, device: str) -> list[Work]:
    """One system of size d (+1), or R in the dual form, for each block; passes: the mean of rows 2n², a look for nan
    n², joining systems of one size 2n², the shifted copy 2n², zeros above the diagonal 2n²."""
    n, blocks = (side.layer.rows if side.dual else side.size), side.layer.blocks
    return [
        Work("cholesky", blocks * factorisation_flops(n, device), FLOAT * blocks * n * n, n, 1),
        passes(9 * blocks * n * n, 6 + 3 * blocks),
    ]


def solve(side: Side) -> list[Work]:
    """Two triangular solves with k columns, 2n²k; the dual form puts X and Xᵀ around them, 4Rdk more."""
    rows, k, blocks = side.layer.rows, side.other, side.layer.blocks
    n = rows if side.dual else side.size
    found = [Work("solve", 2 * n * n * k * blocks, FLOAT * blocks * (n * n + 2 * n * k), n, 2)]
    if side.dual:
        around = [product(rows, side.size, k, blocks), product(side.size, rows, k, blocks)]
        found += [replace(w, calls=1) for w in around] + [passes(3 * blocks * side.size * k, 1)]
    return found


def inverse_floats(side: Side, device: str) -> float:
    """Kept for solves: L as a square on a CPU, n²/2 and leaves in halves; in the dual form the rows besides."""
    n = side.layer.rows if side.dual else side.size
    triangle = n * n if device == "cpu" or n <= LEAF else n * n / 2 + n * LEAF
    return side.layer.blocks * (triangle + (side.layer.rows * side.size if side.dual else 0))


def factor_floats(side: Side) -> float:
    """A factor while it is summed: the matrix, or the rows."""
    each = side.layer.rows * side.size if side.dual else side.size**2
    return each * side.sums


@dataclass(frozen=True)
class Encoder:
    """A ``TransformerClassifier`` with f = 4w and heads of 64, on batch × tokens."""

    width: int = 768
    depth: int = 4
    batch: int = 64
    tokens: int = 128
    classes: int = 10
    vocab: int = 1000

    @property
    def rows(self) -> int:
        """R."""
        return self.batch * self.tokens

    @property
    def ffn(self) -> int:
        """f."""
        return 4 * self.width

    @property
    def heads(self) -> int:
        """Attention heads."""
        return max(1, self.width // 64)

    def layers(self) -> list[Layer]:
        """Query, key and value; output; up; down; and the head on the mean over tokens."""
        r, w, f, depth = self.rows, self.width, self.ffn, self.depth
        return [
            Layer(r, w, w, 3, depth),
            Layer(r, w, w, 1, depth),
            Layer(r, w, f, 1, depth),
            Layer(r, f, w, 1, depth),
            Layer(self.batch, w, self.classes),
        ]

    @property
    def sides(self) -> list[Side]:
        """All factors."""
        return [side for layer in self.layers() for side in sides(layer)]

    @property
    def parameters(self) -> int:
        """P: linear layers, two norms a layer and one at the end, tables of tokens and positions."""
        norms, tables = (2 * self.depth + 1) * 2 * self.width, (self.vocab + self.tokens) * self.width
        return sum(layer.parameters for layer in self.layers()) + norms + tables

    @property
    def tensors(self) -> int:
        """Parameter tensors."""
        return 16 * self.depth + 6

    @property
    def strategies(self) -> str:
        """How many factors are inverted as matrices and how many by their rows, in the curvature's words."""
        dual = sum(s.layer.blocks for s in self.sides if s.dual)
        primal = sum(s.layer.blocks for s in self.sides) - dual
        return ", ".join(f"{count} {kind}" for kind, count in (("primal", primal), ("dual", dual)) if count)


def linear_products(e: Encoder, count: float = 1) -> list[Work]:
    """2·R·d_in·d_out for every layer: forward, or by the weight, or by the input."""
    return [product(x.rows, x.d_in, x.d_out, count * x.blocks) for x in e.layers()]


def attention(e: Encoder, products: float) -> Work:
    """``products`` of 2·N·T²·w: two forward (QKᵀ, PV), five backward (QKᵀ again, dV, dP, dQ, dK)."""
    size = min(e.tokens, e.width // e.heads)
    done = e.depth * products * 2 * e.batch * e.tokens**2 * e.width
    return Work("matmul", done, e.depth * products * 2 * FLOAT * e.rows * e.width, size, e.depth)


def forward(e: Encoder) -> list[Work]:
    """F: linear layers and attention; elementwise two norms (2w each), two residual sums (3w each), GELU (2f)."""
    elementwise = passes(e.depth * e.rows * (10 * e.width + 2 * e.ffn), 5 * e.depth + 8)
    return [*linear_products(e), attention(e, 2), elementwise]


def backward(e: Encoder, weights: bool = True) -> list[Work]:
    """Gradients of inputs, F, and of ``weights``, F again.

    Elementwise two norms (3w), four sums where paths meet (3w each), GELU (3f); biases read what arrives (5w + f).
    """
    w, f = e.width, e.ffn
    calls = 13 * e.depth + 13 if weights else 11 * e.depth + 6
    elementwise = passes(e.depth * e.rows * (18 * w + 3 * f + (5 * w + f if weights else 0)), calls)
    tables = passes(3 * (e.vocab + e.tokens) * w, 4)
    return [*linear_products(e, 2 if weights else 1), attention(e, 5), elementwise, *([tables] if weights else [])]


def optimizer_step(e: Encoder, device: str) -> list[Work]:
    """AdamW, pass by pass: decay 2, first moment 3, second 2 + 3, root 2, correction 2, ε 2, step 4: 20P."""
    return [passes(20 * e.parameters, 10 * (e.tensors if device == "cpu" else 1))]


def inner_step(e: Encoder, device: str) -> list[Work]:
    """3F and the optimizer."""
    return [*forward(e), *backward(e), *optimizer_step(e, device)]


def diagonals(e: Encoder) -> list[Work]:
    """Norm layers: x̂ anew (2w), its product with g (3w), two sums (2w); each table: sums over equal tokens (6w)."""
    norms = passes((2 * e.depth + 1) * e.rows * 7 * e.width, 10 * (2 * e.depth + 1))
    return [norms, passes(2 * 6 * e.rows * e.width, 30)]


def stages(e: Encoder, device: str) -> dict[str, list[Work]]:
    """The hypergradient, stage by stage; in operations 3F + 2F + 2F and what the factors cost:

    outer gradient 3F; passes of the factors 2F, for weights get no gradient; Gram matrices, per layer with f = 4w
    2R(19 + 21)w², five eighths of it on a CPU; Cholesky 46w³ (CPU) or 69w³; solves 96w³; cross term 2F, two forward
    passes at θ ± εv (vectors: ‖v‖ 3P, εv and the sum 5P for each sign). With F = 24Rw² a layer, KFAC/F is
    7 + 3.3 + 6.9 w/R on a GPU and 7 + 2.1 + 5.9 w/R on a CPU, where all factors are matrices.
    """
    sides_, p = e.sides, e.parameters
    return {
        "outer gradient": [*forward(e), *backward(e), passes(2 * p, e.tensors + 16)],
        "passes of the factors": [*forward(e), *backward(e, weights=False), *diagonals(e)],
        "Gram matrices": [w for s in sides_ for w in gram(s, device)],
        "Cholesky": [w for s in sides_ for w in factorisation(s, device)],
        "solves": [*(w for s in sides_ for w in solve(s)), passes(4 * p, 11 * e.depth + 16)],
        "cross term": [*forward(e), *forward(e), passes(13 * p, 62)],
    }


def conjugate_gradients(e: Encoder, iterations: int = 3) -> list[Work]:
    """CG on the GGN: outer gradient 3F, graph of Jᵀu 3F, each product 4F (J v by a second reverse pass 2F, Jᵀ 2F) and
    vectors (four dots 8P, three updates 15P, damping 3P), cross term 2F: 8F + 4F a product."""
    products = [*backward(e), *backward(e), passes(26 * e.parameters, 17 * e.tensors + 60)] * iterations
    return [*forward(e), *backward(e), *forward(e), *backward(e), *products, *forward(e), *forward(e)]


def training_memory(e: Encoder) -> float:
    """Bytes of parameters, gradients and AdamW's two moments."""
    return 4 * FLOAT * e.parameters


def activations(e: Encoder) -> float:
    """Bytes that autograd keeps: per row and layer the inputs of both norms, their outputs, q, k, v and the mixed
    values (8w), GELU's input and output (2f); around the layers the last norm's input (w)."""
    return FLOAT * e.rows * (e.depth * (8 * e.width + 2 * e.ffn) + e.width)


def kfac_memory(e: Encoder, device: str) -> dict[str, float]:
    """Bytes above model, optimizer and the previous inverses, by moment; the peak is the largest.

    Factors: activations, and A and B so far. Cholesky: factors, their inverses, on a CPU one system copied besides.
    Outer gradient: inverses, activations, and the gradient b. Solves: inverses, b, a product, and v. Cross term:
    inverses, v, θ on one side and εv, or that θ and what a layer holds. On a GPU the previous inverses have made room
    for the new ones before the solves.
    """
    sides_, p, kept = e.sides, FLOAT * e.parameters, activations(e)
    factors = FLOAT * sum(factor_floats(s) for s in sides_)
    inverses = FLOAT * sum(inverse_floats(s, device) for s in sides_)
    held = inverses if device == "cpu" else 0.0
    largest = FLOAT * max(s.layer.rows**2 if s.dual else s.size**2 for s in sides_)
    return {
        "factors": kept + factors,
        "Cholesky": factors + inverses + largest,
        "outer gradient": inverses + kept + p,
        "solves": held + 3 * p,
        "cross term": held + max(3 * p, 2 * p + kept / e.depth),
    }


@dataclass(frozen=True)
class Prediction:
    """Seconds and bytes of one size on one machine."""

    inner_step_s: float
    stages_s: dict[str, float]
    cg3_s: float
    kfac_bytes: float

    @property
    def kfac_s(self) -> float:
        """The hypergradient."""
        return sum(self.stages_s.values())

    @property
    def ratio(self) -> float:
        """Outer iteration over its ten inner steps."""
        return 1 + self.kfac_s / (INNER_STEPS * self.inner_step_s)


def predict(e: Encoder, machine: Machine) -> Prediction:
    """All of it, from the machine's rates."""
    device = machine.device
    return Prediction(
        machine.seconds(inner_step(e, device)),
        {name: machine.seconds(works) for name, works in stages(e, device).items()},
        machine.seconds(conjugate_gradients(e)),
        max(kfac_memory(e, device).values()),
    )


def crossover(d: int, columns: int, device: str) -> float:
    """R/d up to which the dual form of one factor needs fewer operations than the primal one, solving ``columns``."""

    def operations(rows: int, dual: bool) -> float:
        side = Side(Layer(rows, d, columns), d, d, columns, 1, dual)
        return flops([*gram(side, device), *factorisation(side, device), *solve(side)])

    return max((r for r in range(1, 2 * d) if operations(r, True) < operations(r, False)), default=0) / d
