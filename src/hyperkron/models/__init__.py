"""Small networks to train from scratch, made of plain modules so that curvature sees every layer."""

from hyperkron.models.resnet import ResNet, resnet18
from hyperkron.models.transformer import TransformerClassifier

__all__ = ["ResNet", "TransformerClassifier", "resnet18"]
