"""Networks made of plain modules, so that curvature sees every layer, and pretrained encoders of texts."""

from hyperkron.models.defaults import default_model, load_callable
from hyperkron.models.encoder import EncoderUnavailable, TextEncoder, choose_encoder
from hyperkron.models.encoder_head import EncoderHead, Hidden
from hyperkron.models.resnet import ResNet, resnet18
from hyperkron.models.small import linear, mlp, small_cnn
from hyperkron.models.text_features import (
    HASHED,
    HashedNgrams,
    TextFeatures,
    hashed_ngrams,
    load_encoder,
    text_features,
)
from hyperkron.models.transformer import TransformerClassifier

__all__ = [
    "linear",
    "mlp",
    "small_cnn",
    "ResNet",
    "resnet18",
    "TransformerClassifier",
    "TextEncoder",
    "EncoderHead",
    "EncoderUnavailable",
    "Hidden",
    "choose_encoder",
    "TextFeatures",
    "text_features",
    "load_encoder",
    "HASHED",
    "HashedNgrams",
    "hashed_ngrams",
    "default_model",
    "load_callable",
]
