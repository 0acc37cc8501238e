"""Labels drawn from softmax probabilities, so that they hardly change where the probabilities hardly do.

Every class c of a row gets an exponential waiting time E_c of its own, and the first one to arrive is drawn:

    ỹ = argmin_c E_c / p_c ,    E_c = −log(1 − u_c) ,    P(ỹ = c) = p_c .

An error ε in a logit changes the label with a probability of about ε, whatever the number of classes. (A search in
the cumulated probabilities adds up the errors of all classes before the one that is drawn: of 32,000 logits, rounding
to bfloat16 changes a quarter of the labels.) The u_c are a hash of a random number of the row and of the class: so
one number for a row is drawn, and the same u_c are had in every precision, on every device, and for any part of the
rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP, FIRST, SECOND = -0x61C88647, 0x21F0AAAD, -0x2CA5D269
"""Odd constants of the hash: 2³² over the golden ratio; two multipliers that mix well (Wellons, hash-prospector)."""
SEEDS = (-(2**31), 2**31)
"""The range that a row's random number is drawn from."""
UNIT = (1 - 2.0**-24) * 2.0**-31
"""Turns −2³¹ … −1 into numbers between −1 and 0 that stay above −1 in float32."""


def drawn_classes(p: Tensor, seeds: Tensor, at_once: int) -> Tensor:
    """One class for each seed of a row: (rows, samples) for ``p`` (rows, classes) and seeds in int32.

    ``at_once`` is about how many numbers are made at a time.
    """
    keys = _mixed(torch.arange(p.shape[-1], dtype=torch.int32, device=p.device).mul_(STEP).add_(STEP))
    step = max(1, at_once // p.numel())
    return torch.cat([first_to_arrive(p, _mixed(some[..., None] + keys)) for some in seeds.split(step, -1)], -1)


def first_to_arrive(p: Tensor, bits: Tensor) -> Tensor:
    """argmin_c E_c / p_c for ``bits`` (rows, samples, classes), which are used up.

    A number u is made of 31 of them; a small one, as the first to arrive has, keeps all that it has.
    """
    negative = torch.mul(bits.bitwise_or_(SEEDS[0]), torch.tensor(UNIT, dtype=p.dtype))
    return negative.log1p_().div_(p[:, None]).argmax(-1)


def _mixed(x: Tensor) -> Tensor:
    """A hash of every 32-bit number, one to one, in place; sums and products are modulo 2³²."""
    low, high = (x.view(torch.int16)[..., side::2] for side in (0, 1))
    for multiplier in (FIRST, SECOND):
        low.bitwise_xor_(high)
        x.mul_(multiplier)
    return x
