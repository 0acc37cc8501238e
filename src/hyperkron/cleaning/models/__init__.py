"""Networks made of plain modules, so that curvature sees every layer, and pretrained encoders of texts."""

from hyperkron.cleaning.models.encoder import EncoderUnavailable, TextEncoder, choose_encoder
from hyperkron.cleaning.models.encoder_head import EncoderHead, Hidden
from hyperkron.cleaning.models.hashed_ngrams import HASHED, HashedNgrams, load_encoder
from hyperkron.cleaning.models.networks import default_model, linear, load_callable, mlp, small_cnn

__all__ = [
    "linear",
    "mlp",
    "small_cnn",
    "TextEncoder",
    "EncoderHead",
    "EncoderUnavailable",
    "Hidden",
    "choose_encoder",
    "load_encoder",
    "HASHED",
    "HashedNgrams",
    "default_model",
    "load_callable",
]
