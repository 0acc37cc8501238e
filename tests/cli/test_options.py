"""The parser, configuration files, exit codes, and how little help needs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

import hyperkron
from hyperkron.cli import main
from hyperkron.cli.config import MAX_BYTES, read_config
from hyperkron.cli.options import ALTERNATIVES, CLEAN, as_options, seconds
from hyperkron.cli.parser import COMMANDS

Captured = pytest.CaptureFixture[str]
ALONE = "import sys, types\nfrom hyperkron.cli import main\n"


def alone(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", ALONE + code, *arguments], capture_output=True, text=True, timeout=60)


# --- help and version --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [[], *([name] for name in COMMANDS)])
def test_every_command_has_help(path: list[str], capsys: Captured) -> None:
    assert main([*path, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: {' '.join(['hyperkron', *path])} ")
    assert "example" in out and f"hyperkron {' '.join(path)}".strip() in out.partition("example")[2]


def test_version(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hyperkron {hyperkron.__version__}\n"


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "hyperkron", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"hyperkron {hyperkron.__version__}\n")


def test_help_and_mistakes_need_no_heavy_package() -> None:
    heavy = "('torch', 'numpy', 'pandas', 'rich', 'hyperkron.cleaning')"
    given = ["--help", "clean --help", "clean a.csv --print-config", "--version"]
    wrong = ["", "clean --epochs x", "clean", "clean --bogus", "clean a.csv --budget soon", "export runs/x -o a.csv"]
    code = f"""
codes = [main(given.split()) for given in {given + wrong}]
print("|", codes, [name for name in {heavy} if name in sys.modules])
"""
    done = alone(code)
    assert done.stdout.rpartition("|")[2].strip() == f"{[0] * len(given) + [2] * len(wrong)} []", done.stderr


# --- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "name a command: clean, report, export, predict, attribute, resume, sweep, doctor."),
        (["clena"], "did you mean clean?"),
        (["paper", "list"], "invalid choice: 'paper'"),
        (["clean", "a.csv", "--lable", "y"], "unrecognized arguments: --lable y; did you mean --label?"),
        (["clean", "a.csv", "--epochs", "3.5"], "--epochs='3.5' must be a whole number."),
        (["clean", "a.csv", "--epoch", "3"], "did you mean --epochs?"),  # no abbreviations
        (["clean", "a.csv", "--budget", "soon"], "--budget='soon' must be a positive time"),
        (["clean", "a.csv", "--compare", "noisy,none"], "--compare='noisy,none' must be"),
        (["clean"], "TRAIN is missing"),
        (["report"], "report needs RUN"),
        (["export", "runs/x", "--drop", "suspects"], "hyperkron export: error: export needs --out"),
        (["export", "runs/x", "--drop", "suspects"], "See `hyperkron export --help`."),
        (["clean", "--bogus"], "unrecognized arguments: --bogus\n"),  # nothing is near it
        (["export", "runs/x", "-o", "a.csv"], "export needs one of --drop suspects and --relabel suspects"),
        (["export", "runs/x", "-o", "a.csv", "--drop", "suspects", "--relabel", "suspects"], "needs one of"),
        (["export", "runs/x", "-o", "a.csv", "--drop", "suspects", "--threshold", "1.5"], "between 0 and 1"),
    ],
)
def test_a_mistake_in_the_command_is_said_and_ends_with_2(arguments: list[str], message: str, capsys: Captured) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and "Traceback" not in err


def test_help_names_the_alternatives_there_are(capsys: Captured) -> None:
    from hyperkron.cleaning import ALTERNATIVES
    from hyperkron.cli import options

    assert options.ALTERNATIVES == ALTERNATIVES
    assert main(["clean", "--help"]) == 0
    assert "small-loss,trusted-confidence" in "".join(capsys.readouterr().out.split())


def test_errors_name_options_and_not_arguments() -> None:
    for said, shown in {
        "features[1]='w' is not a column": "--features[1]='w' is not a column",
        "train='a.csv' does not exist": "TRAIN='a.csv' does not exist",
        "run_folder='x' is not a folder": "RUN='x' is not a folder",
        "name it (trusted=..., --trusted)": "name it (--trusted)",
        "choose another, or pass overwrite=True.": "choose another, or pass --overwrite.",
        "it holds a run; continue it with resume('my run'), or": "it holds a run; continue it with `hyperkron resume "
        "'my run'`, or",
        "'label=3' and `seed=1` and noise.text=4": "'label=3' and `seed=1` and noise.text=4",
    }.items():
        assert as_options(said) == shown


def test_control_characters_of_an_argument_do_not_reach_the_terminal(capsys: Captured) -> None:
    assert main(["clean", "a.csv", "--\x1b[2J"]) == 2
    assert "\x1b" not in capsys.readouterr().err


def test_a_class_path_is_nothing_special(capsys: Captured) -> None:
    assert main(["clean", "a.csv", "--model.class_path", "os.system"]) == 2
    assert main(["clean", "a.csv", "--text.class_path=os.system"]) == 2


@pytest.mark.parametrize("text", ["90", "90s", "1.5m", " 90 S "])
def test_times(text: str) -> None:
    assert seconds(text) == 90.0


@pytest.mark.parametrize("text", ["", "0", "-3", "5 days", "1e9", "nan", "m", "5mm", "٣"])
def test_what_is_no_time(text: str) -> None:
    [budget] = [option for option in CLEAN if option.key == "budget"]
    with pytest.raises(argparse.ArgumentTypeError, match=r"--budget=.* must be a positive time"):
        budget.read(text)


# --- configuration files -----------------------------------------------------------------------------------

FULL = ["clean", "a b.csv", "--trusted", "t.csv", "--text", "null", "--label", "yes", "--features", "x: 1", "#y"]
FULL += [
    "--budget",
    "5m",
    "--compare",
    "noisy,pooled",
    "--seed",
    "3",
    "--epochs",
    "7",
    "--no-report",
    "--out",
    "runs/ü",
]


def test_a_printed_configuration_is_read_back(tmp_path: Path, capsys: Captured) -> None:
    assert main([*FULL, "--print-config"]) == 0
    printed = capsys.readouterr().out
    for name in ("mine.yaml", "mine.txt"):
        (tmp_path / name).write_text(printed)
        assert main(["clean", "--config", str(tmp_path / name), "--print-config"]) == 0
        assert capsys.readouterr().out == printed
    assert 'text: "null"' in printed and "seed: 3" in printed and "model" not in printed


def test_json_is_read_too_and_the_command_line_comes_first(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "mine.json"
    file.write_text(
        json.dumps({"train": "a.csv", "trusted-column": "ok", "seed": 3, "budget": 90, "compare": ["sama"]})
    )
    assert main(["clean", "b.csv", "--config", str(file), "--seed", "4", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert 'train: "b.csv"' in out and "seed: 4" in out and 'trusted_column: "ok"' in out
    assert "budget: 90.0" in out and 'compare: ["sama"]' in out


def test_an_empty_configuration_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# nothing\n")
    (tmp_path / "b.yaml").write_text("seed: null\ncompare: []\n")
    assert read_config(tmp_path / "a.yaml") == {}
    assert read_config(tmp_path / "b.yaml") == {"compare": ()}


def test_values_of_a_configuration_are_read_as_on_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("label: yes\ntext: 2021\nseed: '3'\nfeatures: [x, 1]\njson: true\nid: [no, =]\n")
    wanted = {"label": "yes", "text": "2021", "seed": 3, "features": ["x", "1"], "json": True, "id": ["no", "="]}
    assert read_config(tmp_path / "a.yaml") == wanted
    (tmp_path / "a.json").write_text('{"label": true, "text": 2021, "seed": 3, "compare": "all", "budget": 1.5}')
    wanted = {"label": "true", "text": "2021", "seed": 3, "compare": ALTERNATIVES, "budget": 1.5}
    assert read_config(tmp_path / "a.json") == wanted


MANY = "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nfeatures: [*c, *c]\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("model: os:system", "a configuration file may not name code (key model)"),
        ("Model: os:system", "the key 'Model' is unknown"),
        ('{"model": "os:system"}', "a configuration file may not name code (key model)"),
        ("lable: y", "the key 'lable' is unknown; did you mean label?"),
        ("class_path: os.system", "the key 'class_path' is unknown"),
        ("overwrite: true", "the key 'overwrite' is unknown"),
        ("config: other.yaml", "the key 'config' is unknown"),
        ("text: !!python/object/apply:os.system ['echo hi > hacked']", "a value is one word"),
        ("features: !!python/tuple [a, b]", "a value is one word"),
        ("features: [!!python/name:os.system '']", "a value is one word"),
        ("train: !!python/name:os.system", "a value is one word"),
        ("id: !!binary aGVsbG8=", "a value is one word"),
        ('{"features": [1, {}]}', "features must be a text, or a list of at least one text."),
        ("!!python/object/apply:os.system ['echo hi > hacked']", "expected lines such as `label: target`"),
        ("text: {class_path: os.system}", "a value is one word"),
        (MANY, "a value is one word"),
        ("? [a, b]\n: c", "a key is not text"),
        ("seed: true", "c.yaml: --seed='true' must be a whole number."),
        ("json: 1", "c.yaml: --json='1' must be true or false."),
        ("budget: soon", "c.yaml: --budget='soon' must be a positive time"),
        ("label: [x, y]", "label must be one value."),
        ("features: []", "features must be a text, or a list of at least one text."),
        ("seed: 1\nseed: 2", "'seed' appears twice"),
        ('{"seed": 1, "seed": 2}', "'seed' appears twice"),
        ('{"trusted-column": "a", "trusted_column": "b"}', "'trusted_column' appears twice"),
        ('{"text": {"class_path": "os.system"}}', "text must be one value"),
        ("- a\n- b", "expected lines such as `label: target`"),
        ("{ nonsense", "is not JSON"),
        ("text: [", "is not YAML"),
        ("[" * 3_000, "is no"),
        ('{"text":' + "[" * 200_000, "is no"),
        ("seed: 1\n---\nseed: 2", "is not YAML"),
        ("text: '" + "x" * MAX_BYTES + "'", "larger than"),
        (b"\xff\xfe\x00", "is not text in UTF-8"),
    ],
)
def test_a_hostile_or_mistaken_configuration_is_refused(
    content: str | bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["clean", "--config", "c.yaml", "--print-config"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err) < 1000 and "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


def test_a_configuration_that_is_no_file(tmp_path: Path, capsys: Captured) -> None:
    for path in (tmp_path, tmp_path / "absent.yaml"):
        assert main(["clean", "--config", str(path)]) == 2
        assert "is not a file" in capsys.readouterr().err


# --- exit codes of a process -------------------------------------------------------------------------------

FAILING = """
import hyperkron.cli.doctor as doctor
class HyperkronError(ValueError): pass
solution = types.ModuleType("hyperkron.solution"); solution.HyperkronError = HyperkronError
sys.modules["hyperkron.solution"] = solution
def fail(options): raise {error}
doctor.doctor = fail
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("error", "arguments", "code", "traceback"),
    [
        ("HyperkronError('no: do this')", ["doctor"], 1, False),
        ("HyperkronError('no: do this')", ["doctor", "--debug"], 1, True),
        ("OSError('no: do this')", ["doctor"], 1, False),
        ("KeyError('no: do this')", ["doctor"], 1, True),  # ours: a bug is to be seen
    ],
)
def test_errors_leave_with_1_and_a_traceback_only_where_it_helps(
    error: str, arguments: list[str], code: int, traceback: bool
) -> None:
    done = alone(FAILING.format(error=error), *arguments)
    assert done.returncode == code and done.stdout == ""
    assert "hyperkron doctor: error: " in done.stderr and "no: do this" in done.stderr
    assert ("Traceback" in done.stderr) == traceback


def test_an_error_under_json_is_one_object() -> None:
    done = alone(FAILING.format(error="HyperkronError('no: do this')"), "doctor", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"error": "no: do this", "type": "HyperkronError"}


def test_a_contradiction_under_json_is_one_object_too(capsys: Captured) -> None:
    assert main(["export", "runs/x", "-o", "a.csv", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["type"] == "UsageError"


def test_only_configurations_in_yaml_need_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "a.json").write_text('{"seed": 3}')
    (tmp_path / "a.yaml").write_text("seed: 3")
    assert main(["clean", "--config", str(tmp_path / "a.json"), "--print-config"]) == 0
    assert main(["clean", "--config", str(tmp_path / "a.yaml"), "--print-config"]) == 2
    assert "pip install 'hyperkron[cli]', or write it as JSON" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error() -> None:
    code = "import os\nr, w = os.pipe()\nos.close(r)\nos.dup2(w, 1)\nsys.exit(main(['clean', '--print-config']))"
    done = alone(code)
    assert done.stderr == "" and done.returncode == 1
