"""Texts to vectors: with a pretrained encoder or, if none is available, with hashed n-grams and a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hyperkron.cleaning.models.encoder import EncoderUnavailable, Progress, TextEncoder, choose_encoder
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
        embed: makes vectors of further texts in the very same way.
    """

    parts: tuple[Tensor, ...]
    encoder: str
    messages: tuple[str, ...] = ()
    embed: Callable[[Sequence[str]], Tensor] | None = None


def load_encoder(
    encoder: str | Path | None = None, *, device: torch.device | str = "cpu"
) -> tuple[TextEncoder | None, tuple[str, ...]]:
    """The encoder to use, or None for hashed n-grams, and messages.

    One that was asked for, by the argument or ``HYPERKRON_ENCODER``, is used or the reason why not is raised. Where
    none was asked for and the default is not available, hashed n-grams are used, with a warning.

    Args:
        encoder: a name or folder for :class:`TextEncoder`; None takes the default, ``"hashed n-grams"`` none at all.
        device: where the encoder computes.
    """
    if encoder == HASHED:
        return None, ()
    try:
        return TextEncoder(encoder, device=device), ()
    except EncoderUnavailable as error:
        if choose_encoder(encoder).asked:
            raise
        message = f"Using {HASHED}: the default encoder is not available (accuracy will be lower). {error}"
        warnings.warn(message, HyperkronWarning, stacklevel=2)
        return None, (message,)


def text_features(
    parts: Sequence[Sequence[str]],
    encoder: str | Path | TextEncoder | None = None,
    *,
    batch_size: int = 64,
    max_length: int = 128,
    progress: Progress | None = None,
    cache: str | Path | None = None,
    device: torch.device | str = "cpu",
) -> TextFeatures:
    """Vectors of several lists of texts, such as training, trusted and test, all made in the same way.

    Args:
        parts: the lists of texts; hashed n-grams learn their scale from the first.
        encoder: one that is loaded, or what :func:`load_encoder` takes.
        batch_size, max_length, progress, cache: as in :meth:`TextEncoder.embed`.
        device: where the encoder computes.
    """
    loaded, messages = (encoder, ()) if isinstance(encoder, TextEncoder) else load_encoder(encoder, device=device)
    if loaded is None:
        hashed = HashedNgrams(parts[0] if parts else ())
        return TextFeatures(tuple(hashed(part) for part in parts), HASHED, messages, hashed)
    flat = [text for part in parts for text in part]
    x = loaded.embed(flat, batch_size=batch_size, max_length=max_length, progress=progress, cache=cache)
    embed = partial(loaded.embed, batch_size=batch_size, max_length=max_length)
    return TextFeatures(x.split([len(part) for part in parts]), loaded.name, messages, embed)


def hashed_ngrams(parts: Sequence[Sequence[str]], dim: int = 256, seed: int = 0) -> tuple[Tensor, ...]:
    """Vectors (N, d) of each list of texts by :class:`HashedNgrams`, learnt on the first list."""
    hashed = HashedNgrams(parts[0] if parts else (), dim, seed)
    return tuple(hashed(part) for part in parts)


class HashedNgrams:
    """Vectors of texts that need no pretrained model: latent semantic analysis of hashed n-grams.

    Words, pairs of words, and three to five characters of a word are counted in 2¹⁵ buckets, weighted by tf-idf, and
    projected on the ``dim`` leading right singular vectors of the texts learnt from, in a unit that gives the first
    dimension a root mean square of 1 on them.

    Args:
        texts: that are learnt from; at least 2.
        dim: size of a vector, less where there are few texts.
        seed: of the randomised decomposition.

    References:
        Deerwester et al., 1990, "Indexing by latent semantic analysis"; Weinberger et al., 2009, "Feature hashing for
        large scale multitask learning".
    """

    def __init__(self, texts: Sequence[str], dim: int = 256, seed: int = 0) -> None:
        try:
            from sklearn.decomposition import TruncatedSVD
            from sklearn.feature_extraction.text import HashingVectorizer, TfidfTransformer
            from sklearn.pipeline import FeatureUnion
        except ImportError as error:
            raise HyperkronError(f"{HASHED} need scikit-learn: pip install 'hyperkron[data]'.") from error
        if len(texts) < 2:
            raise HyperkronError(f"parts[0] has {len(texts)} texts; {HASHED} need at least 2.")
        options = {"n_features": _BUCKETS, "norm": None, "alternate_sign": False}
        words = HashingVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b|[^\w\s]", **options)
        letters = HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), **options)
        self._count = FeatureUnion([("words", words), ("letters", letters)]).fit(texts)
        counts = self._count.transform(texts)
        self._weigh = TfidfTransformer(sublinear_tf=True).fit(counts)
        self._project = TruncatedSVD(min(dim, len(texts) - 1), random_state=seed).fit(self._weigh.transform(counts))
        leading = max(float(self._project.singular_values_[0]), 1e-12)
        self._scale = len(texts) ** 0.5 / leading  # the first dimension gets a root mean square of 1

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Vectors (N, d) of texts, float32."""
        if not len(texts):
            return torch.zeros(0, self._project.n_components)
        weighted = self._weigh.transform(self._count.transform(texts))
        return torch.from_numpy(self._project.transform(weighted) * self._scale).float()
