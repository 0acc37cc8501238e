"""Which training examples made the model do this? The hypergradient in example weights, read for each query."""

from hyperkron.attribution.attribute import attribute, self_influence
from hyperkron.attribution.damping import agreeing_damping, training_damping, training_time
from hyperkron.attribution.result import Attribution
from hyperkron.attribution.unrolled import attribute_unrolled

__all__ = [
    "Attribution",
    "agreeing_damping",
    "attribute",
    "attribute_unrolled",
    "self_influence",
    "training_damping",
    "training_time",
]
