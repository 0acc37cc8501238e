"""Pretrained text encoders: frozen embeddings, or the last layers trained on states computed once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hyperkron.cleaning.models.encoder_head import EncoderHead, Hidden, encoder_layers, mean_pool, pack
from hyperkron.solution import HyperkronError, NonFiniteError
from hyperkron.validation import check_device, check_whole

HUB_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
"""The encoder that is fetched where none is named or found."""
LOCAL_ENCODER = "data/minilm"
"""The folder, below the current one, where an encoder is looked for first."""
VARIABLE = "HYPERKRON_ENCODER"
"""The environment variable that names an encoder."""

HUB_SECONDS = 8.0
"""How long the hub may take to say whether it has an encoder."""

Progress = Callable[[int, int], None]
"""Called with how many tokens are done, and of how many; tokens, as texts differ in length and time."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?\Z")
_REMEDY = (
    "give the folder of a downloaded model (config.json, model.safetensors and the tokenizer's files), or connect to "
    "the internet once so that it is kept in the cache of Hugging Face"
)


class EncoderUnavailable(HyperkronError):
    """A text encoder that is not available here; the message says why and what to do."""


class Choice(NamedTuple):
    """Which encoder, and whether somebody asked for it by name."""

    name: str
    asked: bool


def choose_encoder(name: str | Path | None = None) -> Choice:
    """The encoder to use: the argument; else ``HYPERKRON_ENCODER``; else ``./data/minilm``; else the hub's MiniLM.

    Example:
        >>> choose_encoder("sentence-transformers/all-mpnet-base-v2")
        Choice(name='sentence-transformers/all-mpnet-base-v2', asked=True)
    """
    if name is not None:
        return Choice(str(name), True)
    if variable := os.environ.get(VARIABLE):
        return Choice(variable, True)
    if (Path(LOCAL_ENCODER) / "config.json").is_file():
        return Choice(str(Path(LOCAL_ENCODER)), False)
    return Choice(HUB_ENCODER, False)


class TextEncoder:
    """A pretrained encoder of texts from Hugging Face, by name or from a folder, in float32 and frozen.

    Only weights in the safetensors format are read and no code that comes with a model is run.

    Args:
        name: of a model on the Hugging Face hub, or a folder; None looks in the places of :func:`choose_encoder`.
        device: where it computes.

    Attributes:
        name: as given or found.
        dim: the size of an embedding.
        layers: how many layers it has.

    References:
        Devlin et al., 2019, "BERT"; mean pooling as in Reimers and Gurevych, 2019, "Sentence-BERT".
    """

    def __init__(self, name: str | Path | None = None, *, device: torch.device | str = "cpu") -> None:
        self.name = choose_encoder(name).name
        self.device = check_device("device", device)
        self._model, self._tokenizer = _load(self.name)
        self._model.requires_grad_(False).eval().to(self.device)
        self.dim = int(self._model.config.hidden_size)
        self.layers = int(self._model.config.num_hidden_layers)

    def to(self, device: torch.device | str) -> TextEncoder:
        """Compute there from now on."""
        self.device = torch.device(device)
        self._model.to(self.device)
        return self

    @functools.cached_property
    def fingerprint(self) -> str:
        """The SHA-256 of what it computes with: its configuration, weights and tokenizer, wherever they lie."""
        config = self._model.config.to_dict()
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        tokenizer = json.loads(backend.to_str()) if backend is not None else {"vocab": self._tokenizer.get_vocab()}
        for name in ("_name_or_path", "transformers_version"):
            config.pop(name, None)
        for name in ("truncation", "padding"):  # of the last call
            tokenizer.pop(name, None)
        settings = [config, tokenizer, self._tokenizer.model_max_length]
        found = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
        for name, x in sorted(self._model.state_dict().items()):
            found.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
            found.update(x.detach().cpu().contiguous().numpy().tobytes())
        return found.hexdigest()

    def embed(
        self,
        texts: Sequence[str],
        *,
        batch_size: int = 64,
        max_length: int = 128,
        progress: Progress | None = None,
    ) -> Tensor:
        """One vector for each text: the mean of the last layer over its tokens, Σ_t h_t / T; float32, (N, dim).

        Texts of like length are computed together, so that little is padded; the order of the result is that of
        ``texts``.

        Each is cut after ``max_length`` tokens, at most what the encoder can take; ``progress`` is called after every
        batch.
        """
        tokens = self._tokens(texts, max_length)
        out = torch.zeros(len(tokens), self.dim)
        for rows, ids, mask in self._batches(tokens, batch_size, progress):
            with torch.inference_mode():
                out[rows] = mean_pool(self._model(input_ids=ids, attention_mask=mask).last_hidden_state, mask).cpu()
        self._check_finite(out)
        return out

    def prefix(
        self,
        texts: Sequence[str],
        layers: int,
        *,
        batch_size: int = 64,
        max_length: int = 128,
        progress: Progress | None = None,
        dtype: torch.dtype = torch.float16,
    ) -> Hidden:
        """The states that enter the last ``layers`` layers, those to be trained: the frozen lower part, computed once.

        They are kept as ``dtype`` and handed out as float32; the other arguments are those of :meth:`embed`.
        """
        self._check_layers(layers)
        tokens = self._tokens(texts, max_length)
        states: list[Tensor] = [torch.empty(0, self.dim, dtype=dtype)] * len(tokens)
        for rows, ids, mask in self._batches(tokens, batch_size, progress):
            hidden = self._states(ids, mask, layers)
            self._check_finite(hidden)
            if not bool(hidden.to(dtype).isfinite().all()):
                raise NonFiniteError(f"dtype={dtype} overflows with the states of {self.name!r}; use torch.float32.")
            for row, state in zip(rows.tolist(), hidden.to("cpu", dtype), strict=True):
                states[row] = state[: len(tokens[row])].clone()
        return pack(states, self.dim, dtype)

    def with_head(self, classes: int, layers: int = 0) -> EncoderHead:
        """A classifier of the states of :meth:`prefix`: copies of the last layers and a fresh linear head, trainable.

        There is no dropout, so that every evaluation of the loss is the same function. With ``layers=0`` the head alone
        is trained.
        """
        self._check_layers(layers)
        check_whole("classes", classes)
        head = EncoderHead(self._model, classes, layers)
        self._check_split(head)
        return head

    def _check_split(self, head: EncoderHead) -> None:
        """Lower and upper part, one after the other, must give what the encoder gives."""
        tokens = [[1, 2, 3, 2, 1], [3, 1, 2]]
        [(_, ids, mask)] = self._batches(tokens, 2, None)
        with torch.no_grad():
            expected = mean_pool(self._model(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
            try:
                found = head.eval().features(self._states(ids, mask, head.layers), mask.bool())
            except (RuntimeError, TypeError, AttributeError, KeyError):  # its parts do not fit together in this way
                found = torch.full_like(expected, torch.nan)
        head.train()
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max())):
            raise HyperkronError(
                f"encoder={self.name!r} (of type {self._model.config.model_type!r}) computes something else when cut "
                f"before its last {head.layers} layers; use layers=0, or an encoder such as BERT, RoBERTa or MPNet."
            )

    def _states(self, ids: Tensor, mask: Tensor, layers: int) -> Tensor:
        """What enters the last ``layers`` layers, without computing those."""
        if layers == 0:
            with torch.no_grad():
                last: Tensor = self._model(input_ids=ids, attention_mask=mask).last_hidden_state
            return last
        first = encoder_layers(self._model)[-layers]
        try:
            with torch.no_grad(), first.register_forward_pre_hook(_stop, with_kwargs=True):
                self._model(input_ids=ids, attention_mask=mask)
        except _Reached as reached:
            return reached.states
        raise HyperkronError(f"encoder={self.name!r} does not run its layers in order; use layers=0.")

    def _tokens(self, texts: Sequence[str], max_length: int) -> list[list[int]]:
        if isinstance(texts, str):
            raise HyperkronError("texts is one string; give a list of strings.")
        for i, text in enumerate(texts):
            if not isinstance(text, str):
                raise HyperkronError(f"texts[{i}] is a {type(text).__name__}, {text!r:.50}; give strings only.")
        most = min(self._tokenizer.model_max_length, getattr(self._model.config, "max_position_embeddings", 10**9))
        if not 3 <= max_length <= most:
            raise HyperkronError(f"max_length={max_length!r} must lie between 3 and {most} for {self.name!r}.")
        if not len(texts):
            return []
        ids: list[list[int]] = self._tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
        return ids

    def _batches(
        self, tokens: list[list[int]], batch_size: int, progress: Progress | None
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows, ids and mask, the longest texts first."""
        check_whole("batch_size", batch_size)
        order = sorted(range(len(tokens)), key=lambda i: (-len(tokens[i]), i))
        done, total = 0, sum(map(len, tokens))
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            longest = max(1, len(tokens[rows[0]]))
            ids = torch.full((len(rows), longest), int(self._tokenizer.pad_token_id))
            mask = torch.zeros(len(rows), longest, dtype=torch.long)
            for k, row in enumerate(rows):
                ids[k, : len(tokens[row])] = torch.tensor(tokens[row], dtype=torch.long)
                mask[k, : len(tokens[row])] = 1
            yield torch.tensor(rows), ids.to(self.device), mask.to(self.device)
            done += int(mask.sum())
            if progress is not None:
                progress(done, total)

    def _check_layers(self, layers: int) -> None:
        if not 0 <= layers <= self.layers:
            raise HyperkronError(f"layers={layers!r} must lie between 0 and the {self.layers} layers of {self.name!r}.")

    def _check_finite(self, x: Tensor) -> None:
        if not bool(x.isfinite().all()):
            raise NonFiniteError(f"encoder={self.name!r} gives NaN or infinity; its weights are damaged, get it again.")


class _Reached(Exception):
    """Ends a computation at the layer that is to be trained; no error."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = states


def _stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args[0] if args else kwargs["hidden_states"])


def _load(name: str) -> tuple[Any, Any]:
    """The model and the tokenizer, from a folder, from the cache, or from the hub, in this order."""
    try:
        import transformers
    except ImportError as error:
        raise EncoderUnavailable(
            f"encoder={name!r} needs the package transformers: pip install 'hyperkron[text]'."
        ) from error
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _read(transformers, str(folder), name, local=True)
    if name.startswith((".", "/", "~")) or "\\" in name or folder.exists():
        raise EncoderUnavailable(f"encoder={name!r} is not a folder; {_REMEDY}.")
    if not _HUB_NAME.match(name) or ".." in name:
        raise EncoderUnavailable(f"encoder={name!r:.100} is neither a folder nor a name on the Hugging Face hub.")
    try:
        return _read(transformers, name, name, local=True)
    except EncoderUnavailable:
        if trouble := _hub_trouble(name):
            raise EncoderUnavailable(
                f"encoder={name!r} is not on this computer and cannot be fetched ({trouble}); {_REMEDY}."
            ) from None
    return _read(transformers, name, name, local=False)


@functools.cache
def _hub_trouble(name: str) -> str:
    """Why the hub does not give a model; empty if it does. Asked once in a process, for a few seconds at most."""
    from huggingface_hub import HfApi

    found = [f"no answer within {HUB_SECONDS:g} s"]

    def ask() -> None:
        try:
            HfApi().model_info(name, timeout=HUB_SECONDS)
            found.append("")
        except Exception as error:  # the kinds of error differ from version to version of its HTTP library
            found.append(str(error)[:200] or type(error).__name__)

    asking = threading.Thread(target=ask, daemon=True)  # its client tries again and again for minutes
    asking.start()
    asking.join(HUB_SECONDS)
    return found[-1]


def _read(transformers: Any, place: str, name: str, *, local: bool) -> tuple[Any, Any]:
    safe = {"trust_remote_code": False, "local_files_only": local}
    try:
        with _quiet(transformers):
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, use_fast=True, **safe)
            model, report = transformers.AutoModel.from_pretrained(
                place,
                dtype=torch.float32,
                attn_implementation="eager",
                use_safetensors=True,
                output_loading_info=True,
                **safe,
            )
    except Exception as error:  # OSError, ValueError, KeyError, SafetensorError, ...: whatever is wrong with the files
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise EncoderUnavailable(f"encoder={name!r} cannot be loaded ({lines[0][:200]}); {_REMEDY}.") from error
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith("pooler.")):
        raise EncoderUnavailable(
            f"encoder={name!r} lacks {len(missing)} of its weights, such as {missing[0]!r}; get it again."
        )
    if getattr(model.config, "is_encoder_decoder", False) or not hasattr(model.config, "hidden_size"):
        raise EncoderUnavailable(
            f"encoder={name!r} is a {type(model).__name__}, not an encoder of texts; use one such as {HUB_ENCODER!r}."
        )
    if tokenizer.pad_token_id is None:
        raise EncoderUnavailable(f"encoder={name!r} has no padding token; use an encoder such as {HUB_ENCODER!r}.")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # unused here, and untrained in many models
    return model, tokenizer


@contextlib.contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars and notes of its own while a model is loaded."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
