"""What a run started with. Whoever continues it must use the same, or is told what differs."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import os
import textwrap
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hyperkron.cleaning.arguments import absolute, model_name
from hyperkron.cleaning.fields import Fields
from hyperkron.cleaning.models import HASHED, TextEncoder
from hyperkron.cleaning.models.encoder import VARIABLE
from hyperkron.cleaning.stages import RULES
from hyperkron.solution import HyperkronError

_SOURCES = ("train", "trusted", "test")
_BROUGHT = ("probabilities", "embeddings")
_KNOWN = ("torch", "hyperkron", "transformers")
"""Packages whose modules are known by their version."""


# --- what was asked for ------------------------------------------------------------------------------------


def refuse_other_settings(kept: Fields, expected: Mapping[str, Any]) -> None:
    """Meet a setting, named as ``clean`` and ``CleanConfig`` do, that is not the one the run began with."""
    source, config = kept.child("source"), kept.child("config").raw
    for name, value in expected.items():
        began: Any
        if name in _SOURCES:
            began, value = source.text(name) or None, absolute(value)
        elif name in _BROUGHT:
            began, value = recorded_paths(kept).get(name), absolute(value)
        elif name in config:
            began = config[name]
        else:
            began = source.child("reading").raw.get(name)
        if name == "encoder" and kept.child("encoder").raw:
            continue  # another folder may hold the same one: judged by what it computes with
        began, value = (list(x) if isinstance(x, tuple) else x for x in (began, value))
        if value != began:
            usual = "left out" if began is None else repr(began)
            raise HyperkronError(
                f"{name}={value!r}, but the run began with {name} {usual}; leave it out to continue that run, or begin "
                "a new one."
            )


def refuse_other_rules(kept: Fields, out: str | Path) -> None:
    """Meet a run that a version with other rules began: its finished stages and the next would not belong together."""
    if kept.raw.get("rules") == RULES:
        return
    began = kept.child("environment").text("hyperkron")
    rules = f"rules {kept.raw['rules']}" if "rules" in kept.raw else "rules that were not recorded"
    raise HyperkronError(
        f"the run in {str(out)!r} was begun by hyperkron {began or 'of an unknown version'} with {rules}, and "
        f"hyperkron {installed_version('hyperkron')}, which runs now, has rules {RULES}: what it computes would not "
        "belong to the finished stages. Continue with the version that began it, or begin a new run. Results that are "
        "there can still be used by load, predict, export and report."
    )


def refuse_other_model(kept: Fields, model: Callable[[], nn.Module] | None) -> None:
    """Meet a builder of another name than the run began with, or none where there was one."""
    began, found = kept.text("model") or None, None if model is None else model_name(model)
    if began is not None and found is None:
        raise HyperkronError(f"the run used your own model ({began}); pass it again as model=... .")
    if found != began:
        usual = "the default network" if began is None else f"model={began!r}"
        remedy = "leave it out" if began is None else "give that one"
        raise HyperkronError(
            f"model={found!r}, but the run began with {usual}; {remedy} to continue it, or begin a new run."
        )


def recorded_paths(kept: Fields) -> dict[str, str]:
    """The files of probabilities and embeddings that a run began with; one with an estimator cannot be continued."""
    if kept.text("estimator"):
        raise HyperkronError(
            f"the run compared with estimator={kept.text('estimator')}, which is not kept on disk; call clean() again "
            "with it and overwrite=True."
        )
    return {name: path for name in _BROUGHT if (path := kept.child("own").text(name))}


def encoder_to_load(kept: Fields, expected: Mapping[str, Any]) -> str | None:
    """The encoder that a resumed run is to load: what is named now, else the one it began with."""
    asked = kept.child("config").text("encoder")
    variable = "" if asked else os.environ.get(VARIABLE)
    return expected.get("encoder") or variable or kept.child("encoder").text("name") or asked or None


# --- what is used ------------------------------------------------------------------------------------------


def encoder_identity(encoder: TextEncoder | None) -> dict[str, str | None]:
    """The name, or the whole path, and the SHA-256 of an encoder; hashed n-grams for None."""
    if encoder is None:
        return {"name": HASHED, "sha256": None}
    folder = os.path.expanduser(encoder.name)
    return {"name": os.path.abspath(folder) if os.path.isdir(folder) else encoder.name, "sha256": encoder.fingerprint}


def network_identity(build: Callable[[], nn.Module], device: torch.device) -> str:
    """The SHA-256 of the structure of the networks that a builder makes.

    It covers the modules as they print, plain attributes, the names, shapes and types of parameters and buffers, and
    the code, without comments, of modules that are neither torch's nor this library's. Initial values do not count.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        network = build()
    told: list[Any] = [repr(network)]
    told += [[name, str(x.dtype), list(x.shape)] for name, x in network.state_dict().items()]
    for name, module in network.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, (bool, int, float, str, tuple)) and k[0] != "_"}
        told.append([name, sorted((k, repr(v)) for k, v in plain.items() if k != "training")])
        told += [_code(kind) for kind in type(module).__mro__ if kind.__module__.partition(".")[0] not in _KNOWN]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _code(kind: type) -> str:
    """What a class says, comments and line ends apart; its name where its source is not available."""
    try:
        return ast.dump(ast.parse(textwrap.dedent(inspect.getsource(kind))))
    except (OSError, TypeError, SyntaxError):
        return f"{kind.__module__}.{kind.__qualname__}"


def environment(device: torch.device) -> dict[str, str]:
    """Versions, the code and the kind of device, whose change is said and not refused."""
    versions = {name: installed_version(name) for name in ("hyperkron", "torch")}
    return {"device": device.type, **versions, "code of hyperkron": _own_code()[:12]}


def _own_code() -> str:
    """The SHA-256 of this library's files, which tells versions apart that are still being written."""
    place, found = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(place.rglob("*.py")):
        found.update(file.relative_to(place).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()


def installed_version(package: str) -> str:
    """The version of a package, or ``not installed``."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def environment_notes(kept: Fields, now: Mapping[str, str]) -> list[str]:
    """What to say where a run continues with other versions, or on another kind of device."""
    began = kept.child("environment").raw
    changed = [f"{name} {began.get(name)} (now {value})" for name, value in now.items() if began.get(name) != value]
    if not changed:
        return []
    return [
        f"The run began with {', '.join(changed)}. Finished stages are kept, so the result may differ from that of a "
        "run without an interruption."
    ]


def refuse_other_encoder(kept: Fields, found: Mapping[str, Any]) -> None:
    """Meet an encoder that computes with something else."""
    began = kept.child("encoder")
    if (sha256 := began.text("sha256") or None) == found["sha256"]:
        return
    raise HyperkronError(
        f"encoder={found['name']!r} ({_short(found['sha256'])}) is not the one that the run began with, "
        f"{began.text('name')!r} ({_short(sha256)}); name a folder that holds that one as encoder= or in {VARIABLE}, "
        "or begin a new run."
    )


def refuse_other_network(kept: Fields, found: str) -> None:
    """Meet a network of another structure."""
    if (began := kept.text("network")) != found:
        raise HyperkronError(
            f"model: the network that is built now (SHA-256 {found[:12]}… of its structure and code) is not the one "
            f"that the run began with ({began[:12]}…); restore that one, or begin a new run."
        )


def digest(kept: Mapping[str, Any]) -> str:
    """The SHA-256 of all that a stage of a run depends on."""
    encoder, names = kept.get("encoder") or {}, ("config", "data", "model", "network", "rules")
    config, data, model, network, rules = map(kept.get, names)
    told = [config, data, model, network, encoder.get("sha256"), rules]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _short(sha256: str | None) -> str:
    return "no encoder" if sha256 is None else f"SHA-256 {sha256[:12]}…"
