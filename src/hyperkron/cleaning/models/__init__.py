"""Networks made of plain modules, so that curvature sees every layer, and pretrained encoders of texts."""

from hyperkron.cleaning.models.defaults import default_model, load_callable
from hyperkron.cleaning.models.encoder import EncoderUnavailable, TextEncoder, choose_encoder
from hyperkron.cleaning.models.encoder_head import EncoderHead, Hidden
from hyperkron.cleaning.models.resnet import ResNet, resnet18
from hyperkron.cleaning.models.small import linear, mlp, small_cnn
from hyperkron.cleaning.models.text_features import (
    HASHED,
    HashedNgrams,
    TextFeatures,
    hashed_ngrams,
    load_encoder,
    text_features,
)
from hyperkron.cleaning.models.transformer import TransformerClassifier

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
