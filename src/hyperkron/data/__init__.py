"""Readers of datasets."""

from hyperkron.data.idx import MNIST, mnist, read_idx

__all__ = ["MNIST", "mnist", "read_idx"]
