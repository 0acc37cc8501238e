"""``clean`` and ``resume``: from data sources to a result and a run folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from torch import nn

from hyperkron.cleaning.arguments import check_reading, model_name, plain_sources, read_parts
from hyperkron.cleaning.config import CleanConfig
from hyperkron.cleaning.data import ReadOptions, row_hashes
from hyperkron.cleaning.data.files import listing
from hyperkron.cleaning.fields import FORMAT
from hyperkron.cleaning.folder import RunFolder, replacing
from hyperkron.cleaning.given import Given
from hyperkron.cleaning.own import Own, own_paths
from hyperkron.cleaning.prepare import refuse_early
from hyperkron.cleaning.progress import Progress, shown_progress
from hyperkron.cleaning.recorded import (
    encoder_to_load,
    recorded_paths,
    refuse_other_model,
    refuse_other_rules,
    refuse_other_settings,
)
from hyperkron.cleaning.result import CleanResult
from hyperkron.cleaning.run import ALONE, CleaningRun, Sharing
from hyperkron.cleaning.stages import RULES
from hyperkron.solution import HyperkronError


def clean(
    train: Any,
    trusted: Any = None,
    *,
    test: Any = None,
    out: str | Path | None = None,
    model: Callable[[], nn.Module] | None = None,
    config: CleanConfig | None = None,
    estimator: Any = None,
    probabilities: Any = None,
    embeddings: Any = None,
    overwrite: bool = False,
    progress: Progress | bool | None = None,
    command: str | None = None,
    on_result: Callable[[Path], None] | None = None,
    sharing: Sharing = ALONE,
    **reading: Any,
) -> CleanResult:
    """Find wrong labels in a training set with a few trusted rows, and train a better model.

    Args:
        train: the noisy rows: a path, a DataFrame, a dictionary of columns, a pair (x, y) of arrays, a torch Dataset
            of such pairs, or :class:`hyperkron.cleaning.data.Labelled` rows.
        trusted: rows with correct labels, in the same form; None if a column (``trusted_column=``) or a part of the
            source marks them.
        test: rows for a final evaluation; never used to choose a model.
        out: run folder, for the report and for resuming; None (default) writes nothing.
        model: function that returns a new network; None uses the default for the kind of data.
        config: settings; the defaults are meant for every dataset.
        estimator: a classifier of scikit-learn's kind, not fitted, to compare with: fitted to the rows as they are, and
            to the cleaned ones. If it wins it is ``result.model``; of those only trees are written to ``out``.
        probabilities: class probabilities of your own as one more expert: (rows, C) in the order of ``classes``, an
            array or the path of a ``.npy`` or ``.csv`` file, for every row of the training source, then of the trusted
            one. The models behind them must not have seen the labels of the rows they predict.
        embeddings: vectors (rows, d) that models take in place of the inputs: an array or the path of a ``.npy`` file,
            for every row of the training source, then the trusted one, then ``test``. ``predict`` then takes vectors.
        overwrite: replace the run that ``out`` holds; it is kept until the new one has finished.
        progress: object that shows progress; None shows a bar on a terminal and in a notebook, False nothing.
        command: the command line to record.
        on_result: called with the run folder when it holds a first result, before the alternatives are compared, and
            again as they finish; for example :func:`hyperkron.cleaning.report.write_report`.
        sharing: other processes that compute stages of the run with :func:`assist`; the command line fills it in
            where torchrun has started several.
        reading: columns and options for :func:`hyperkron.cleaning.data.read_pair` (``text=``, ``label=``, ...).

    Example:
        >>> import torch
        >>> x = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
        >>> y = (x[:, 0] > 0).long()
        >>> noisy = torch.where(torch.arange(160) % 5 == 0, 1 - y[:160], y[:160])
        >>> result = clean((x[:160], noisy), (x[160:], y[160:]), config=CleanConfig(epochs=1, compare=()))
        >>> len(result.weights), result.chosen
        (160, 'hyperkron')
    """
    check_reading(train, reading)
    shown, config = shown_progress(progress), CleanConfig() if config is None else config
    brought = own_paths(probabilities, embeddings)
    plain = None if out is None or brought is None else plain_sources(train, trusted, test, reading)
    with replacing(out, overwrite, shown.message):
        how = ReadOptions(charset=reading.get("charset") or ReadOptions.charset)
        hashes = None if plain is None else row_hashes(plain["train"], how, "train")  # before reading: never later ones
        parts = read_parts(train, trusted, test, reading)
        own = Own.of(parts, estimator=estimator, probabilities=probabilities, embeddings=embeddings)
        refuse_early(own.parts, config, model)
        folder = RunFolder(out, new=True)
        begun = {
            "format": FORMAT,
            "rules": RULES,
            "source": plain,
            "rows": None if hashes is None else folder.write_hashes(hashes),
            "model": None if model is None else model_name(model),
            "command": command,
            "own": brought,
            "estimator": None if estimator is None else type(estimator).__name__,
            "config": asdict(config),
            "data": own.data,
        }
        folder.write_json("config.json", begun)
        given = Given.of(train, parts[0])
        return CleaningRun(
            parts, own, config, folder, model, shown, command, given, config.encoder, on_result, sharing
        ).result()


def resume(
    out: str | Path,
    *,
    model: Callable[[], nn.Module] | None = None,
    expected: Mapping[str, Any] | None = None,
    progress: Progress | bool | None = None,
    on_result: Callable[[Path], None] | None = None,
    sharing: Sharing = ALONE,
) -> CleanResult:
    """Continue an interrupted run after its last finished stage; a finished run is read again.

    Data, settings, network, encoder and the rules of the method must be the same as at the start of the run; otherwise
    an error is raised. Another version of torch or hyperkron with the same rules, other code of hyperkron, or another
    kind of device is reported in the messages of the result.

    Args:
        out: the run folder.
        model: the same function as before, if the run used one.
        expected: arguments of :func:`clean` and settings of ``CleanConfig`` by name, such as ``{"seed": 1}``; an error
            is raised if the run started with others. A folder given as ``encoder`` is used if it holds the same one.
        progress: object that shows progress; None shows a bar on a terminal and in a notebook, False nothing.
        on_result, sharing: as for :func:`clean`.
    """
    return reopened(out, model, progress, expected, on_result=on_result, sharing=sharing).result()


def assist(
    out: str | Path,
    count: int,
    *,
    model: Callable[[], nn.Module] | None = None,
    expected: Mapping[str, Any] | None = None,
) -> None:
    """Compute stages of the run in ``out`` that another of ``count`` processes writes, until none is left to begin.

    ``model`` and ``expected`` are those of :func:`resume` in that process.
    """
    reopened(out, model, False, expected, writes=False, sharing=Sharing(count)).help()


def reopened(
    out: str | Path,
    model: Callable[[], nn.Module] | None,
    progress: Progress | bool | None,
    expected: Mapping[str, Any] | None = None,
    *,
    writes: bool = True,
    **more: Any,
) -> CleaningRun:
    """The run in a folder, with the data and settings it began with; without ``writes`` the folder stays as it is."""
    folder = RunFolder(out, new=False, writes=writes)
    kept = folder.read_config()
    source, settings = kept.child("source"), kept.child("config")
    train, trusted, test = (source.text(name) or None for name in ("train", "trusted", "test"))
    if train is None:
        raise HyperkronError(
            f"the run in {str(out)!r} was made from data in memory, which is not kept; call clean() again."
        )
    expected = {name: value for name, value in (expected or {}).items() if value is not None}
    refuse_other_rules(kept, out)
    refuse_other_settings(kept, expected)
    refuse_other_model(kept, model)
    parts = read_parts(train, trusted, test, source.child("reading").raw)
    own = Own.of(parts, **recorded_paths(kept))
    if own.data != kept.text("data"):
        read = (train, trusted, test, *recorded_paths(kept).values())
        raise HyperkronError(
            f"the data in {listing([repr(path) for path in read if path], 5)} is not what the run in {str(out)!r} "
            "began with; restore the file that has changed, or begin a new run."
        )
    if odd := sorted(settings.raw.keys() ^ {field.name for field in fields(CleanConfig)}):
        raise HyperkronError(
            f"the run in {str(out)!r} was begun with other settings than this version has ({', '.join(odd)}); begin a "
            "new run."
        )
    config = settings.into(CleanConfig)
    given, encoder = Given.of(train, parts[0]), encoder_to_load(kept, expected)
    shown, command = shown_progress(progress), kept.text("command") or None
    return CleaningRun(parts, own, config, folder, model, shown, command, given, encoder, **more)
