"""Vectors of texts without a pretrained encoder, and the choice between the two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperkron.cleaning.models.encoder import EncoderUnavailable, TextEncoder, choose_encoder
from hyperkron.solution import HyperkronError
from hyperkron.validation import need

HASHED = "hashed n-grams"
"""The name of the features that need no pretrained encoder."""
_BUCKETS = 2**15


def load_encoder(
    encoder: str | Path | None = None, *, device: torch.device | str = "cpu", required: bool = False
) -> tuple[TextEncoder | None, tuple[str, ...]]:
    """The encoder to use, or None for hashed n-grams, and messages.

    One that was asked for, by the argument or ``HYPERKRON_ENCODER``, is used or the reason why not is raised. Where
    none was asked for and the default is not available, hashed n-grams are used, and the messages say so.

    Args:
        encoder: a name or folder for :class:`TextEncoder`; None takes the default, ``"hashed n-grams"`` none at all.
        device: where the encoder computes.
        required: refuse hashed n-grams, because layers of an encoder are to be trained.
    """
    if choose_encoder(encoder).name == HASHED and not required:
        return None, ()
    try:
        return TextEncoder(encoder, device=device), ()
    except EncoderUnavailable as error:
        if required or choose_encoder(encoder).asked:
            raise
        return None, (f"Using {HASHED}: the default encoder is not available (accuracy will be lower). {error}",)


class HashedNgrams:
    """Vectors of texts that need no pretrained model: latent semantic analysis of hashed n-grams.

    Words, pairs of words, and three to five characters of a word are counted in 2¹⁵ buckets, weighted by tf-idf, and
    projected on the ``dim`` leading right singular vectors of the texts learnt from, in a unit that gives the first
    dimension a root mean square of 1 on them.

    Args:
        texts: that are learnt from; at least 2.
        dim: size of a vector, less where there are few texts.

    References:
        Deerwester et al., 1990, "Indexing by latent semantic analysis"; Weinberger et al., 2009, "Feature hashing for
        large scale multitask learning".
    """

    def __init__(self, texts: Sequence[str], dim: int = 256) -> None:
        if len(texts) < 2:
            raise HyperkronError(f"texts has {len(texts)} texts; {HASHED} need at least 2.")
        self._count, self._weigh = _counters()
        counts = self._count.fit(texts).transform(texts)
        self._weigh.fit(counts)
        decompose = need("sklearn.decomposition").TruncatedSVD(min(dim, len(texts) - 1), random_state=0)
        project = decompose.fit(self._weigh.transform(counts))
        leading = max(float(project.singular_values_[0]), 1e-12)
        self._components, self._scale = project.components_, len(texts) ** 0.5 / leading
        self._unseen = math.log(1 + len(texts)) + 1  # idf of a bucket without texts

    def tensors(self) -> dict[str, Tensor]:
        """All that was learnt, without the buckets that no text falls into."""
        idf = torch.from_numpy(self._weigh.idf_)
        seen = (idf < self._unseen - 1e-9).nonzero()[:, 0]
        components = torch.from_numpy(self._components)[:, seen].float()
        rest = torch.tensor([self._unseen, self._scale], dtype=torch.float64)
        return {"buckets": seen, "idf": idf[seen], "components": components, "rest": rest}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> HashedNgrams:
        """What :meth:`tensors` gave, ready to be asked."""
        found, seen = cls.__new__(cls), tensors["buckets"]
        found._count, found._weigh = _counters()
        found._count.fit([""])
        idf = tensors["rest"][0].repeat(2 * _BUCKETS)
        idf[seen] = tensors["idf"]
        found._weigh.idf_ = idf.numpy()
        components = torch.zeros(len(tensors["components"]), 2 * _BUCKETS)
        components[:, seen] = tensors["components"]
        found._unseen, found._scale = tensors["rest"].tolist()
        found._components = components.numpy()
        return found

    def __call__(self, texts: Sequence[str]) -> Tensor:
        """Vectors (N, d) of texts, float32."""
        if not len(texts):
            return torch.zeros(0, len(self._components))
        weighted = self._weigh.transform(self._count.transform(texts))
        return torch.from_numpy(weighted @ self._components.T * self._scale).float()


def _counters() -> tuple[Any, Any]:
    """What counts n-grams in buckets, and what weighs the counts."""
    text, pipeline = need("sklearn.feature_extraction.text"), need("sklearn.pipeline")
    options = {"n_features": _BUCKETS, "norm": None, "alternate_sign": False}
    words = text.HashingVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\b\w+\b|[^\w\s]", **options)
    letters = text.HashingVectorizer(analyzer="char_wb", ngram_range=(3, 5), **options)
    return pipeline.FeatureUnion([("words", words), ("letters", letters)]), text.TfidfTransformer(sublinear_tf=True)
