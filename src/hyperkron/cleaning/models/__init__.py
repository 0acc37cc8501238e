"""Networks made of plain modules, so that curvature sees every layer, and pretrained encoders of texts."""

from hyperkron.cleaning.models.defaults import default_model, load_callable
from hyperkron.cleaning.models.encoder import EncoderUnavailable, TextEncoder, choose_encoder
from hyperkron.cleaning.models.encoder_head import EncoderHead, Hidden
from hyperkron.cleaning.models.hashed_ngrams import HASHED, HashedNgrams, load_encoder
from hyperkron.cleaning.models.resnet import ResNet, resnet18
from hyperkron.cleaning.models.small import linear, mlp, small_cnn

__all__ = [
    "linear",
    "mlp",
    "small_cnn",
    "ResNet",
    "resnet18",
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
