"""Texts to vectors: by a pretrained encoder or, where none can be had, by hashed n-grams, and never silently."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hyperkron.models.encoder import EncoderUnavailable, Progress, TextEncoder, choose_encoder
from hyperkron.solution import HyperkronError, HyperkronWarning

HASHED = "hashed n-grams"
"""What :class:`TextFeatures` calls the features that need no pretrained encoder."""
_BUCKETS = 2**15


@dataclass(frozen=True)
class TextFeatures:
    """The vectors of some lists of texts.

    Attributes:
        parts: for each list a float32 tensor (N, d).
        encoder: what made them: the name of the encoder, or ``"hashed n-grams"``.
        messages: what a person should know about it.
    """

    parts: tuple[Tensor, ...]
    encoder: str
    messages: tuple[str, ...] = ()


def text_features(
    parts: Sequence[Sequence[str]],
    encoder: str | Path | None = None,
    *,
    batch_size: int = 64,
    max_length: int = 128,
    progress: Progress | None = None,
    cache: str | Path | None = None,
    device: torch.device | str = "cpu",
) -> TextFeatures:
    """Vectors of several lists of texts, such as training, trusted and test, all made in the same way.

    An encoder that was asked for, by the argument or ``HYPERKRON_ENCODER``, is used or the reason why not is raised.
    Where nobody asked and the default one cannot be had, :func:`hashed_ngrams` takes its place, with a warning.

    Args:
        parts: the lists of texts; hashed n-grams learn their scale from the first.
        encoder: a name or folder for :class:`TextEncoder`; None takes the default, ``"hashed n-grams"`` none at all.
        batch_size, max_length, progress, cache: as in :meth:`TextEncoder.embed`.
        device: where the encoder computes.
    """
    if encoder == HASHED:
        return TextFeatures(hashed_ngrams(parts), HASHED)
    try:
        loaded = TextEncoder(encoder, device=device)
    except EncoderUnavailable as error:
        if choose_encoder(encoder).asked:
            raise
        message = (
            f"The texts are described by {HASHED}, as the default encoder cannot be had; expect lower accuracy. {error}"
        )
        warnings.warn(message, HyperkronWarning, stacklevel=2)
        return TextFeatures(hashed_ngrams(parts), HASHED, (message,))
    flat = [text for part in parts for text in part]
    x = loaded.embed(flat, batch_size=batch_size, max_length=max_length, progress=progress, cache=cache)
    return TextFeatures(x.split([len(part) for part in parts]), loaded.name)


def hashed_ngrams(parts: Sequence[Sequence[str]], dim: int = 256, seed: int = 0) -> tuple[Tensor, ...]:
    """Vectors of texts that need no pretrained model: latent semantic analysis of hashed n-grams.

    Words, pairs of words, and three to five characters of a word are counted in 2¹⁵ buckets, weighted by tf-idf, and
    projected on the ``dim`` leading right singular vectors of the first list, in a unit that gives the first dimension
    a root mean square of 1 on that list.

    Args:
        parts: the lists of texts; the first is learnt from.
        dim: size of a vector, less where the first list is small.
        seed: of the randomised decomposition.

    References:
        Deerwester et al., 1990, "Indexing by latent semantic analysis"; Weinberger et al., 2009, "Feature hashing for
        large scale multitask learning".
    """
    try:
        from sklearn.decomposition import TruncatedSVD
        from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
        from sklearn.pipeline import FeatureUnion
    except ImportError as error:
        raise HyperkronError(f"{HASHED} need scikit-learn: pip install 'hyperkron[data]'.") from error
    if not parts or len(parts[0]) < 2:
        raise HyperkronError(f"parts[0] has {len(parts[0]) if parts else 0} texts; {HASHED} need at least 2.")
    options = {"n_features": _BUCKETS, "norm": None, "alternate_sign": False}
    words = HashingVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b|[^\w\s]", **options)
    letters = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), **options)
    both = FeatureUnion([("words", words), ("letters", letters)]).fit(parts[0])
    counts = [both.transform(part) for part in parts]
    weigh = TfidfTransformer(sublinear_tf=True).fit(counts[0])
    weighted = [weigh.transform(count) for count in counts]
    project = TruncatedSVD(min(dim, len(parts[0]) - 1), random_state=seed).fit(weighted[0])
    leading = max(float(project.singular_values_[0]), 1e-12)
    scale = len(parts[0]) ** 0.5 / leading  # the first dimension gets a root mean square of 1
    return tuple(torch.from_numpy(project.transform(x) * scale).float() for x in weighted)
