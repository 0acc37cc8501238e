"""Cleaning as a classifier of scikit-learn: ``fit`` on rows with wrong labels, with a few trusted rows beside them. It
goes where any classifier goes: into pipelines, cross-validation and searches over settings."""

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.model_selection import train_test_split
from sklearn.utils.validation import check_is_fitted

import hyperkron as hk


class CleanedClassifier(ClassifierMixin, BaseEstimator):
    """``hk.clean`` behind fit and predict; ``trusted_x`` and ``trusted_y`` are the rows whose labels are right."""

    def __init__(self, trusted_x=None, trusted_y=None, estimator=None, compare=(), epochs=None, seed=0):
        self.trusted_x, self.trusted_y, self.estimator = trusted_x, trusted_y, estimator
        self.compare, self.epochs, self.seed = compare, epochs, seed

    def fit(self, x, y):
        trusted = np.asarray(self.trusted_x), np.asarray(self.trusted_y)
        config = hk.CleanConfig(compare=self.compare, epochs=self.epochs, seed=self.seed)
        rows, own = (np.asarray(x), np.asarray(y)), self.estimator
        self.result_ = hk.clean(rows, trusted, estimator=own, config=config, progress=False)
        self.classes_ = np.unique(np.concatenate([y, trusted[1]]))
        self._order = [self.result_.classes.index(str(label)) for label in self.classes_]  # clean has names
        return self

    def predict_proba(self, x):
        check_is_fitted(self)
        return self.result_.predict(np.asarray(x)).numpy()[:, self._order]

    def predict(self, x):
        return self.classes_[self.predict_proba(x).argmax(1)]


def main(rows=400, epochs=None):
    """A third of the labels of class c become c + 1; ten rows of each class are trusted."""
    x, y = load_digits(return_X_y=True)
    x, x_test, y, y_test = train_test_split(x, y, test_size=500, stratify=y, random_state=0)
    x, trusted_x, y, trusted_y = train_test_split(x, y, test_size=100, stratify=y, random_state=0)
    wrong = np.random.default_rng(0).random(rows) < 1 / 3
    noisy = np.where(wrong, (y[:rows] + 1) % 10, y[:rows])
    both = np.concatenate([x[:rows], trusted_x]), np.concatenate([noisy, trusted_y])
    plain = RandomForestClassifier(random_state=0).fit(*both)
    cleaned = CleanedClassifier(trusted_x, trusted_y, epochs=epochs).fit(x[:rows], noisy)
    scores = {"plain": plain.score(x_test, y_test), "cleaned": cleaned.score(x_test, y_test)}
    suspects = cleaned.result_.suspects.numpy()
    print("right on test rows: random forest {plain:.1%}, cleaned {cleaned:.1%}".format(**scores))
    print(f"{wrong[suspects].sum()} of {wrong.sum()} wrong labels are among the {len(suspects)} suspects")
    return {**scores, "found": wrong[suspects].sum() / wrong.sum(), "precision": wrong[suspects].mean()}


if __name__ == "__main__":
    main()
