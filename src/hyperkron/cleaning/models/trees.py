"""Tree ensembles: fitted by scikit-learn, kept and asked as tensors, so that nothing has to be unpickled."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hyperkron.solution import HyperkronError

TREES = 100
"""Trees of a forest."""
ROUNDS = 100
"""Rounds of boosting."""
BINS = 250
"""Where boosting of soft labels cuts a column at most."""
LEAST_SHARE = 0.1
"""Of q, below which a class of a row is not learnt."""
MAX_SAMPLE = 10_000
"""Rows of one tree of a forest at most."""
MAX_VALUES = 8_000_000
"""Numbers in the nodes of a forest, roughly; where rows and classes are many, leaves hold more rows."""
TREES_IN_CACHE = 4
"""Trees that a CPU asks at once: their nodes fit into its cache, which is four times as fast as all trees at once."""
FLOOR = 1e-8
"""The least probability whose logarithm a forest gives."""
SEEDS = 2**32
"""How many seeds scikit-learn knows; larger ones begin again at 0."""
MISSING = "scikit-learn is not installed, so trees are left out: pip install 'hyperkron[data]'."


def installed() -> bool:
    """Whether trees can be fitted here; asking fitted ones needs torch alone."""
    return importlib.util.find_spec("sklearn") is not None


class TreeEnsemble(nn.Module):
    """Decision trees as tensors; ``forward`` gives logits whose softmax are the class probabilities.

        logits(x) = base + Σ_t value[leaf_t(x)]        (boosting)
        logits(x) = log Σ_t value[leaf_t(x)]           (a forest, whose values are probabilities over the trees' number)

    From a node with children, an input goes to the first where ``x[feature] <= threshold``, else to the second. A leaf
    is its own child. All sizes can be read from the tensors, so a stored ensemble is built from its ``state_dict``.

    Args:
        roots: the first node of every tree (T,).
        feature, threshold: of each of M nodes (M,).
        branches: the two children of each node (M, 2).
        value: of each node (M, C); only those of leaves are used.
        base: (C,), or (0,) for a forest.

    Example:
        >>> stump = TreeEnsemble(torch.tensor([0]), torch.tensor([1, 0, 0]), torch.tensor([0.5, 0.0, 0.0]),
        ...                      torch.tensor([[1, 2], [1, 1], [2, 2]]), torch.tensor([[0, 0], [0.9, 0.1], [0.2, 0.8]]),
        ...                      torch.zeros(0))
        >>> stump(torch.tensor([[7.0, 0.0], [7.0, 1.0]])).softmax(1).round(decimals=3)
        tensor([[0.9000, 0.1000],
                [0.2000, 0.8000]])
    """

    NAMES = ("roots", "feature", "threshold", "branches", "value", "base")
    roots: Tensor
    feature: Tensor
    threshold: Tensor
    branches: Tensor
    value: Tensor
    base: Tensor

    def __init__(
        self, roots: Tensor, feature: Tensor, threshold: Tensor, children: Tensor, value: Tensor, base: Tensor
    ) -> None:
        super().__init__()
        for name, tensor in zip(self.NAMES, (roots, feature, threshold, children, value, base), strict=True):
            self.register_buffer(name, tensor)
        nodes, place = len(feature), torch.arange(len(feature), device=children.device)[:, None]
        shapes = children.shape == (nodes, 2) and value.dim() == 2 and len(value) == len(threshold) == nodes
        whole = all(x.dtype == torch.int64 for x in (roots, feature, children))
        if not shapes or not whole or base.shape not in ((0,), value.shape[1:]):
            raise HyperkronError("the tensors of a tree ensemble do not belong together; take them from one ensemble.")
        if not bool((children >= place).all() and (children < nodes).all() and (roots < nodes).all()):
            raise HyperkronError("a child of a tree's node must come after it; take the tensors from one ensemble.")
        if int(torch.cat([roots, feature]).min()) < 0:
            raise HyperkronError("a tree ensemble has a negative root or feature; take the tensors from one ensemble.")

    def forward(self, x: Tensor) -> Tensor:
        """Logits (N, C) of inputs (N, d), or of more dimensions, which are flattened."""
        x = x.flatten(1).float()
        together = len(self.roots) if x.is_cuda else TREES_IN_CACHE
        leaves = torch.cat([self._leaves(x, roots) for roots in self.roots.split(together)], 1)
        told = self.value[leaves].sum(1, dtype=torch.float64)
        found = told + self.base if len(self.base) else told.clamp(min=FLOOR).log()
        return found.to(x.dtype)

    def _leaves(self, x: Tensor, roots: Tensor) -> Tensor:
        """The leaf that each input reaches in each of these trees (N, T)."""
        node, before, child = roots.expand(len(x), -1), None, self.branches.flatten()
        while before is None or not torch.equal(before, node):
            right = x.gather(1, self.feature.take(node)) > self.threshold.take(node)
            before, node = node, child.take(2 * node + right)
        return node


def rebuilt(build: Callable[[], nn.Module], tensors: dict[str, Tensor]) -> nn.Module:
    """The model that a ``state_dict`` is of: a tree ensemble, or a network that ``build`` makes."""
    if set(tensors) == set(TreeEnsemble.NAMES):
        return TreeEnsemble(*(tensors[name] for name in TreeEnsemble.NAMES))
    network = build()
    network.load_state_dict(tensors)
    return network


def forest(
    x: Tensor, q: Tensor, weight: Tensor | None = None, *, seed: int = 0, trees: int | None = None
) -> tuple[TreeEnsemble, Tensor]:
    """A random forest of soft labels, and its out-of-bag probabilities of the same rows (N, C).

    Each tree splits to lower the squared error of q, which for certain labels is Gini's impurity, and answers with the
    mean of q in a leaf. Row n's out-of-bag answer is that of the trees whose bootstrap sample missed it. Inputs ``x``
    are (N, d) and probabilities ``q`` (N, C); there are TREES ``trees`` unless told otherwise.

    References:
        Breiman, 2001, "Random forests".
    """
    from sklearn.ensemble import RandomForestRegressor

    rows, classes = q.shape
    sample = min(rows, MAX_SAMPLE)
    model = RandomForestRegressor(
        TREES if trees is None else trees,
        max_features="sqrt",
        min_samples_leaf=max(1, math.ceil(1.3 * sample * TREES * classes / MAX_VALUES)),
        max_samples=None if sample == rows else sample,
        oob_score=True,
        random_state=seed % SEEDS,
    )
    told = None if weight is None else weight.double().cpu().numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a row that no tree missed gets the mean of all rows below
        model.fit(*_arrays(x, q.double()), sample_weight=told)
    answers = torch.from_numpy(model.oob_prediction_).to(q)
    total = answers.sum(1, keepdim=True)
    answers = torch.where(total > 0, answers / total.clamp(min=FLOOR), q.mean(0))
    found = as_tensors(model, classes)
    assert found is not None
    return found.to(q.device), answers


def boosted(
    x: Tensor, labels: Tensor, classes: int, weight: Tensor | None = None, *, seed: int = 0, rounds: int | None = None
) -> TreeEnsemble:
    """Gradient-boosted trees of labels (N,), one tree for each class in every round.

    References:
        Friedman, 2001, "Greedy function approximation: a gradient boosting machine".
    """
    from sklearn.ensemble import HistGradientBoostingClassifier

    rounds = ROUNDS if rounds is None else rounds
    model = HistGradientBoostingClassifier(
        max_iter=rounds, max_leaf_nodes=15, early_stopping=False, random_state=seed % SEEDS
    )
    model.fit(*_arrays(x, labels), sample_weight=None if weight is None else weight.cpu().numpy())
    found = as_tensors(model, classes)
    assert found is not None
    return found.to(x.device)


def soft_boosted(x: Tensor, q: Tensor, weight: Tensor, *, seed: int = 0) -> TreeEnsemble:
    """Gradient-boosted trees of soft labels q (N, C): every row counts ``weight`` · q(k) as one of class k.

    Columns are cut beforehand, at BINS places at most: with weights scikit-learn takes two to five times as long.
    A class that is likely for no row has probability 0.
    """
    at, labels = (q > LEAST_SHARE).nonzero(as_tuple=True)
    columns = x.flatten(1).float().T.contiguous()
    edges = [_edges(column) for column in columns]
    codes = torch.stack([torch.searchsorted(*pair) for pair in zip(edges, columns, strict=True)], 1)
    found = boosted(codes[at].float(), labels, q.shape[1], (weight[at] * q[at, labels]).double(), seed=seed).cpu()
    inner = (found.branches[:, 0] != torch.arange(len(found.branches))).nonzero()[:, 0]
    nodes = zip(found.feature[inner].tolist(), found.threshold[inner].tolist(), strict=True)
    found.threshold[inner] = torch.tensor([float(edges[k][int(code)]) for k, code in nodes])  # where the code ends
    return found.to(q.device)


def _edges(column: Tensor) -> Tensor:
    """Values between which a column is cut: halfway between all of its values, or some of them where they are many."""
    values = column.unique()
    middle = (values[1:].double() + values[:-1].double()) / 2
    ends = _downwards(middle)
    if len(ends) <= BINS:
        return ends
    return ends[torch.linspace(0, len(ends) - 1, BINS).round().long()]


def _arrays(x: Tensor, y: Tensor) -> tuple[Any, Any]:
    return x.flatten(1).float().cpu().numpy(), y.cpu().numpy()


def as_tensors(estimator: Any, classes: int) -> TreeEnsemble | None:
    """A fitted ensemble of scikit-learn as tensors; None for an estimator that is no such ensemble.

    Args:
        estimator: a fitted ``RandomForest…``, ``ExtraTrees…`` or ``HistGradientBoostingClassifier``, of numbers without
            missing values. A forest of regression trees must have one output per class.
        classes: how many there are; those that the estimator was not fitted to have probability 0.
    """
    from sklearn import ensemble as kinds

    known = torch.as_tensor([int(k) for k in getattr(estimator, "classes_", range(classes))])
    if isinstance(estimator, kinds.HistGradientBoostingClassifier):
        trees = [tree for trees in estimator._predictors for tree in trees]
        categorical = any(bool(tree.nodes["is_categorical"].any()) for tree in trees)
        return None if categorical else _boosted(estimator, known, classes)
    forests = (kinds.RandomForestClassifier, kinds.ExtraTreesClassifier, kinds.RandomForestRegressor)
    if not isinstance(estimator, forests):
        return None
    parts = []
    for tree in (fitted.tree_ for fitted in estimator.estimators_):
        value = torch.zeros(tree.node_count, classes, dtype=torch.float64)
        value[:, known] = torch.from_numpy(tree.value.reshape(tree.node_count, -1) / len(estimator.estimators_))
        left, right = tree.children_left, tree.children_right
        parts.append((tree.feature, tree.threshold, left, right, left < 0, value))
    return _joined(parts, torch.zeros(0))


def _boosted(estimator: Any, known: Tensor, classes: int) -> TreeEnsemble:
    """Trees of one output each: of its class, or of the second of two; of a single class nothing is left to say."""
    parts, many = [], len(known) > 2
    for trees in estimator._predictors:
        for k, tree in enumerate(trees):
            nodes, value = tree.nodes, torch.zeros(len(tree.nodes), classes, dtype=torch.float64)
            if len(known) > 1:
                value[:, known[k if many else 1]] = torch.from_numpy(nodes["value"].astype("float64"))
            leaf = nodes["is_leaf"].astype(bool)
            parts.append((nodes["feature_idx"], nodes["num_threshold"], nodes["left"], nodes["right"], leaf, value))
    base = torch.full((classes,), -1e4, dtype=torch.float64)
    begin = torch.from_numpy(estimator._baseline_prediction.reshape(-1).astype("float64"))
    base[known] = begin if many else torch.cat([torch.zeros(1, dtype=torch.float64), begin])[: len(known)]
    return _joined(parts, base.float())


def _joined(parts: list[tuple[Any, Any, Any, Any, Any, Tensor]], base: Tensor) -> TreeEnsemble:
    """One after the other, with nodes numbered through."""
    roots, features, thresholds, children, values, begin = [], [], [], [], [], 0
    for feature, threshold, left, right, leaf, value in parts:
        own, is_leaf = torch.arange(len(value)), torch.as_tensor(leaf.copy())
        sides = [torch.where(is_leaf, own, torch.as_tensor(side.astype("int64"))) for side in (left, right)]
        roots.append(begin)
        features.append(torch.as_tensor(feature.astype("int64")).masked_fill(is_leaf, 0))
        thresholds.append(_downwards(torch.as_tensor(threshold.astype("float64"))).masked_fill(is_leaf, 0))
        children.append(begin + torch.stack(sides, 1))
        values.append(value.float())
        begin += len(value)
    return TreeEnsemble(
        torch.tensor(roots), torch.cat(features), torch.cat(thresholds), torch.cat(children), torch.cat(values), base
    )


def _downwards(threshold: Tensor) -> Tensor:
    """The largest float32 up to each float64: for a float32 x, ``x <= threshold`` is the same for both."""
    near = threshold.float()
    return torch.where(near.double() > threshold, torch.nextafter(near, torch.full_like(near, -torch.inf)), near)
