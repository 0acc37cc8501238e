"""Draws labels from softmax probabilities, so that small changes of the probabilities change few labels.

Every class c of a row gets its own exponential waiting time E_c, and the first class to arrive is drawn:

    ỹ = argmin_c E_c / p_c ,    E_c = −log(1 − u_c) ,    P(ỹ = c) = p_c .

An error ε in a logit changes the label with a probability of about ε, for any number of classes. (A search in the
cumulative probabilities would add up the errors of all classes before the drawn one: with 32,000 logits, rounding to
bfloat16 changes a quarter of the labels.) Each u_c is a hash of the class and of one random number per row. So the u_c
are the same in every precision, on every device, and for any part of the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEP, FIRST, SECOND = -0x61C88647, 0x21F0AAAD, -0x2CA5D269
"""Odd constants of the hash: 2³² over the golden ratio; two multipliers that mix well (Wellons, hash-prospector)."""
SEEDS = (-(2**31), 2**31)
"""The range of a row's random number."""
UNIT = (1 - 2.0**-24) * 2.0**-31
"""Turns −2³¹ … −1 into numbers between −1 and 0 that stay above −1 in float32."""


def drawn_classes(p: Tensor, seeds: Tensor, at_once: int) -> Tensor:
    """One class for each seed of a row: (rows, samples) for ``p`` (rows, classes) and seeds in int32.

    About ``at_once`` numbers are computed at a time.
    """
    keys = _mixed(torch.arange(p.shape[-1], dtype=torch.int32, device=p.device).mul_(STEP).add_(STEP))
    step = max(1, at_once // p.numel())
    return torch.cat([first_to_arrive(p, _mixed(some[..., None] + keys)) for some in seeds.split(step, -1)], -1)


def first_to_arrive(p: Tensor, bits: Tensor) -> Tensor:
    """argmin_c E_c / p_c for random ``bits`` (rows, samples, classes), which are overwritten.

    u has 31 random bits; a small u, as the first class to arrive has, keeps all its digits in floating point.
    """
    negative = torch.mul(bits.bitwise_or_(SEEDS[0]), torch.tensor(UNIT, dtype=p.dtype, device="cpu"))
    return negative.log1p_().div_(p[:, None]).argmax(-1)


def _mixed(x: Tensor) -> Tensor:
    """A hash of every 32-bit number, one to one, in place; sums and products are modulo 2³²."""
    low, high = (x.view(torch.int16)[..., side::2] for side in (0, 1))
    for multiplier in (FIRST, SECOND):
        low.bitwise_xor_(high)
        x.mul_(multiplier)
    return x
