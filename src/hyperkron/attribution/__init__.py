"""Which training examples made the model do this? The hypergradient in example weights, read for each query."""

from hyperkron.attribution.attribute import attribute, self_influence
from hyperkron.attribution.damping import training_damping
from hyperkron.attribution.result import Attribution

__all__ = ["Attribution", "attribute", "self_influence", "training_damping"]
