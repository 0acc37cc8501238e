"""The trials of a sweep in a database, shared by its workers.

Optuna stores the trials and suggests settings. Its heartbeat alone leaves gaps: SQLite has no row locks, so two workers
may take one trial; a trial whose worker died before its first heartbeat is never missed; a retry is lost if the worker
that should add it dies; and nobody looks for lost trials once no new one is due. Here every decision (take a trial,
record it, notice a lost one) is made under one lock, which ends with the process that holds it, and begins by
completing what the last holder left undone.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyperkron.solution import HyperkronError, HyperkronWarning
from hyperkron.sweeps.space import Space, distributions
from hyperkron.training.program import BYTECODE
from hyperkron.validation import need

LOCK_SECONDS = 600
"""How long to wait for the lock, which is held for milliseconds."""
MISSED = 4
"""A worker is lost after this many heartbeats that did not come."""


class TrialQueue:
    """The trials of one study; a *chain* is a trial and its retries, which all have the same settings.

    The arguments are those of :func:`hyperkron.sweeps.sweep`; without a ``space`` an existing study is only read.
    ``code`` is that of the function: trials of another one are warned of.
    """

    def __init__(
        self,
        storage: str,
        study: str,
        space: Space | None,
        maximize: bool = False,
        retries: int = 1,
        heartbeat: int = 9,
        code: dict[str, str] | None = None,
    ) -> None:
        self.optuna = need("optuna", "sweep", "sweeps")
        self._name, self._retries, self._heartbeat = study, retries, heartbeat
        self._space = None if space is None else distributions(space)
        self._url = storage if "://" in storage else f"sqlite:///{storage}"
        self._url = self._url.replace("postgresql://", "postgresql+psycopg://", 1)  # one driver with every SQLAlchemy
        self._file = None if self._url.startswith("postgresql") else Path(self._url.partition(":///")[2])
        if self._file and (not self._url.startswith("sqlite") or self._file.name in ("", ":memory:")):
            raise HyperkronError(
                f"storage={storage.partition(':')[0]!r}... must be the path of an SQLite file, or "
                "postgresql://user@host/database."
            )
        if self._file and (self._file.is_dir() or not (self._file.exists() or space)):
            raise HyperkronError(f"storage={storage!r} is not the database of a sweep; name another file.")
        options: dict[str, Any] = {"connect_args": {"timeout": 120}} if self._file else {"pool_pre_ping": True}
        with self._locked(), self._quietly():
            escaped = self._url.replace("{", "{{").replace("}", "}}")
            beats = {"heartbeat_interval": heartbeat, "grace_period": MISSED * heartbeat}
            self.storage = self.optuna.storages.RDBStorage(escaped, options, **beats)
            self.study = self._opened("maximize" if maximize else "minimize", code)

    def _opened(self, way: str, code: dict[str, str] | None) -> Any:
        names = self.optuna.get_all_study_names(self.storage)
        if self._space is None and self._name not in names:
            raise HyperkronError(f"study={self._name!r} is not in the storage, which has {', '.join(names) or 'none'}.")
        if self._name not in names:
            self.optuna.create_study(study_name=self._name, storage=self.storage, direction=way)
        study = self.optuna.load_study(study_name=self._name, storage=self.storage)
        if self._space is not None:
            asked = {"direction": way} | {name: repr(one) for name, one in self._space.items()}
            begun = study.user_attrs.get("asked", asked)
            if begun != asked:
                other = ", ".join(sorted(name for name in {*begun, *asked} if begun.get(name) != asked.get(name)))
                raise HyperkronError(
                    f"space or maximize: study={self._name!r} was begun with others ({other}); give the same ones, or "
                    "another study name."
                )
            study.set_user_attr("asked", asked)
        if code is not None and (begun := study.user_attrs.get("code")) is None:
            study.set_user_attr("code", code)
        elif code is not None and begun[BYTECODE] == code[BYTECODE]:
            # What only one of them has may be code of a value that an earlier trial left behind, such as a cache.
            other = ", ".join(sorted(path for path in begun.keys() & code.keys() if begun[path] != code[path]))
            if other and study.trials:
                warnings.warn(
                    f"study={self._name!r} was begun with other code ({other}), and its {len(study.trials)} trials "
                    "count here; if they should not, give another study name or storage.",
                    HyperkronWarning,
                    stacklevel=4,
                )
        return study

    def take(self, trials: int, seed: int) -> Any:
        """The next of ``trials`` trials to run, or ``None`` if all are taken."""
        with self._locked(), self._quietly():
            self._recover()
            chains = self.chains()
            if len(chains) >= trials and all(chain[-1].state.name != "WAITING" for chain in chains):
                return None
            seed += sum(map(len, chains))  # the same for whichever worker takes this trial
            self.study.sampler = self.optuna.samplers.TPESampler(seed=seed % 2**32, constant_liar=True)
            trial = self.study.ask(self._space)
            self.storage.record_heartbeat(trial._trial_id)
            trial.set_user_attr("worker", os.getpid())
            return trial

    def record(self, trial: Any, state: str, value: float | None = None, **notes: Any) -> bool:
        """Record how a trial ended; ``False`` if it was given to another worker meanwhile, whose result counts."""
        with self._locked(), self._quietly():
            if self.storage.get_trial(trial._trial_id).state.name != "RUNNING":
                return False
            for name, note in notes.items():
                trial.set_user_attr(name, note)
            self.study.tell(trial, value, state=self.optuna.trial.TrialState[state])
            return True

    @contextlib.contextmanager
    def beating(self, trial: Any) -> Iterator[None]:
        """Give signs of life while the block runs."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(self._heartbeat):
                with contextlib.suppress(self.optuna.exceptions.StorageInternalError):  # busy; the next one may pass
                    self.storage.record_heartbeat(trial._trial_id)
            self.storage.remove_session()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def chains(self) -> list[list[Any]]:
        """Every trial with its retries, in their order."""
        found: dict[int, list[Any]] = {}
        for trial in self.study.get_trials(deepcopy=False):
            found.setdefault(trial.user_attrs.get("origin", trial.number), []).append(trial)
        return list(found.values())

    def ended(self, chain: list[Any]) -> bool:
        """Whether a trial has a result, an error, or no retry left."""
        last = chain[-1]
        lost = sum("interrupted" not in trial.user_attrs for trial in chain)
        failed = "error" in last.user_attrs or lost > self._retries
        return failed if last.state.name == "FAIL" else bool(last.state.is_finished())

    def _recover(self) -> None:
        """Fail the trials that are lost, and queue a retry of each, also where a worker was killed while doing this."""
        for chain in self.chains():
            if chain[-1].state.name == "RUNNING" and "worker" not in chain[-1].user_attrs:  # killed in `take`
                self.study.tell(chain[-1].number, state=self.optuna.trial.TrialState.FAIL)
        self.optuna.storages.fail_stale_trials(self.study)
        for chain in self.chains():
            if chain[-1].state.name == "FAIL" and not self.ended(chain):
                self.study.enqueue_trial(settings_of(chain), user_attrs={"origin": chain[0].number})

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        import sqlalchemy
        from optuna import exceptions as storing

        try:
            if self._file:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                lock: Any = sqlite3.connect(f"{self._file}.lock", timeout=LOCK_SECONDS, isolation_level=None)
                with contextlib.closing(lock):
                    lock.execute("BEGIN EXCLUSIVE")
                    yield
            else:
                engine = sqlalchemy.create_engine(self._url, poolclass=sqlalchemy.pool.NullPool)
                with engine.connect() as lock:
                    lock.execute(sqlalchemy.text("SELECT pg_advisory_lock(hashtext(:name))"), {"name": self._name})
                    yield
        except (sqlite3.Error, sqlalchemy.exc.SQLAlchemyError, storing.StorageInternalError, ImportError) as error:
            raise HyperkronError(
                f"storage={sqlalchemy.make_url(self._url)!r} cannot be used ({str(error).splitlines()[0]}); check the "
                "file or the server, and for PostgreSQL its driver (pip install 'psycopg[binary]')."
            ) from error

    @contextlib.contextmanager
    def _quietly(self) -> Iterator[None]:
        """Without Optuna's remarks on features it calls experimental and on studies that are created."""
        level = self.optuna.logging.get_verbosity()
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
                warnings.filterwarnings("ignore", "Heartbeat of storage")  # `beating` gives it
                yield
        finally:
            self.optuna.logging.set_verbosity(level)


def settings_of(chain: list[Any]) -> dict[str, Any]:
    """The settings of a trial, also where its last attempt ended before it had them."""
    return {name: value for trial in chain for name, value in trial.params.items()}
