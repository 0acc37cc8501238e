"""The examples run and keep their claims; here at a reduced size."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import sklearn.base
import torch

import hyperkron as hk
from blobs import quicken
from hyperkron.cleaning.models import trees

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """An example may import another."""
    monkeypatch.syspath_prepend(EXAMPLES)


def load(name: str) -> ModuleType:
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= 60


def test_digits() -> None:
    """Fewer steps, on images that are all different, so that no row is in two parts."""
    module = load("digits")
    x, y = module.images()
    assert len(x) == len(y) == len(x.unique(dim=0)) == 1797
    found = module.main(0, steps=10, training=100)
    assert found["AUROC"] > 0.9
    assert found["trusted"] < found["weighted"] < 1


@pytest.mark.long
def test_learned_weights_of_digits_are_worth_their_price() -> None:
    """What docs/examples.md says of three splits."""
    splits = [load("digits").main(seed) for seed in range(3)]
    mean = {name: sum(found[name] for found in splits) / 3 for name in splits[0]}
    assert mean["AUROC"] > 0.95
    assert mean["weighted"] > max(mean["all"], mean["trusted"])


def test_digits_reads_other_images(tmp_path: Path) -> None:
    """One changed line: the name of the data."""
    module, random = load("digits"), np.random.default_rng(0)
    pixels = random.integers(0, 256, (1900, 1, 6, 6), dtype=np.uint8)
    np.savez(tmp_path / "train.npz", x=pixels, y=np.arange(1900) % 10)
    module.DATA = str(tmp_path / "train.npz")
    x, y = module.images()
    assert x.shape == (1797, 36) and float(x.max()) == 1.0 and set(y.tolist()) == set(range(10))
    assert set(module.main(steps=5, training=5)) == {"AUROC", "all", "trusted", "weighted"}


def test_sklearn_classifier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A short training finds most wrong labels; settings are those of scikit-learn, and classes keep their type."""
    quicken(monkeypatch, least=80, forest=12)
    module = load("sklearn_classifier")
    found = module.main(rows=150, epochs=1)
    assert found["cleaned"] > 0.8 and found["found"] > 0.8 and found["precision"] > 0.8
    assert f"cleaned {found['cleaned']:.1%}" in capsys.readouterr().out
    copy = sklearn.base.clone(module.CleanedClassifier(seed=3)).set_params(epochs=1)
    assert (copy.seed, copy.epochs) == (3, 1)


def test_unlearnable(capsys: pytest.CaptureFixture[str]) -> None:
    """A network trained on protected digits fails on clean ones; the change stays within ε by construction."""
    torch.manual_seed(0)
    clean, protected = load("unlearnable").main(40)
    assert clean > 0.75 and protected < 0.4
    assert f"clean {clean:.1%}, protected {protected:.1%}" in capsys.readouterr().out


@pytest.mark.long
def test_poisoning_robustness(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The added rows cost accuracy, cleaning gives some of it back, and few clean rows are suspected."""
    monkeypatch.setattr(trees, "TREES", 12)
    found = load("poisoning_robustness").main()
    assert found["poisoned"] < found["clean"] - 0.01
    assert found["poisoned"] < found["cleaned"]
    printed = capsys.readouterr().out
    hits, suspects = (int(word) for word in printed.split() if word.isdecimal() and word != "90")
    assert f"poisoned {found['poisoned']:.1%}" in printed and hits > suspects / 2


def test_long_tail() -> None:
    """A shorter run: an example that is learned weighs less than one that is not, and training works."""
    equal, learned, low, high = load("long_tail").main(steps=30, device="cpu")
    assert 0.5 < equal < 1 and 0.5 < learned < 1
    assert low < 0.8 < 1.2 < high


def test_long_tail_reads_real_images(tmp_path: Path) -> None:
    """One changed line: the name of the data."""
    module, random = load("long_tail"), np.random.default_rng(0)
    y = np.arange(400) % 4
    pixels = random.integers(0, 256, (400, 3, 12, 12), dtype=np.uint8)
    np.savez(tmp_path / "train.npz", x_train=pixels, y_train=y)
    module.DATA, module.TEST = str(tmp_path / "train.npz"), 20
    images, labels = module.images()
    assert images.shape == (400, 3, 12, 12) and labels.bincount().tolist() == [100] * 4
    assert len(module.main(steps=2, device="cpu")) == 4


def test_continued_pretraining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer steps; the network learns the made-up task, and the weights of texts move. The test rows keep no graph."""
    transformers = pytest.importorskip("transformers")
    forward, graphs = transformers.BertModel.forward, []

    def watched(self: torch.nn.Module, *args: object, **more: object) -> object:
        graphs.append(torch.is_grad_enabled())
        return forward(self, *args, **more)

    monkeypatch.setattr(transformers.BertModel, "forward", watched)
    found = load("continued_pretraining").main(steps=10, inner_steps=5)
    assert graphs[0] and not graphs[-1]
    assert found["accuracy"] > 0.6  # a third without learning
    assert max(found["weights"]) - min(found["weights"]) > 1e-3


def check_mixture(found: list[float], name: str) -> None:
    """The domain of the target texts counts most."""
    assert sum(found) == pytest.approx(1)
    assert found[0] == max(found) > 0.3
    lines = (EXAMPLES / f"{name}.py").read_text("utf-8").splitlines()
    assert 4 <= sum(any(f"  # {i}" in line for i in range(1, 10)) for line in lines) <= 5


def test_domain_weights_lightning() -> None:
    pytest.importorskip("lightning", reason="not among the packages of the tests")
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    check_mixture(load("domain_weights_lightning").main(60), "domain_weights_lightning")


def test_domain_weights_trainer() -> None:
    """The callback, driven by the steps of a stand-in for Trainer, which needs accelerate."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    module = load("domain_weights_trainer")
    train, target = module.texts(torch.arange(400) % 4), module.texts(torch.zeros(40, dtype=torch.long))
    mixture = hk.DomainWeights(4)
    callback = module.MixtureCallback(mixture, train, target)
    assert [len(batch["domain"].unique()) for batch in callback.batches(0, 0)] == [4, 1]
    model = transformers.LlamaForCausalLM(module.CONFIG)
    optimizer, args = torch.optim.AdamW(model.parameters(), lr=3e-3), SimpleNamespace(seed=0)
    for step in range(1, 61):
        optimizer.zero_grad()
        module.inner(model, mixture, callback.batches(1, step)[0]).backward()
        optimizer.step()
        callback.on_step_end(args, SimpleNamespace(global_step=step), None, model=model, optimizer=optimizer)
    check_mixture(mixture.proportions().tolist(), "domain_weights_trainer")


def test_a_checkpoint_of_trainer_has_the_domain_weights(tmp_path: Path) -> None:
    """Else a resumed run would begin with equal weights again, and nothing would say so."""
    pytest.importorskip("transformers")
    module, rows = load("domain_weights_checkpoint"), load("domain_weights_trainer").texts(torch.arange(400) % 4)
    state, folders = SimpleNamespace(global_step=20), []
    for name in ("first", "second"):  # both with a step 20; the first one is resumed by a run that writes to the second
        folders.append(tmp_path / name / "checkpoint-20")
        folders[-1].mkdir(parents=True)
    old, new = (SimpleNamespace(output_dir=folder.parent, should_save=True) for folder in folders)
    saved, other, resumed = (module.SavedMixtureCallback(hk.DomainWeights(4), rows) for _ in range(3))
    other.on_save(new, state, None)  # before its first step
    saved.mixture.logits.grad = torch.arange(4.0)
    saved.optimizer.step()
    saved.on_save(old, state, None)
    assert [path.name for path in folders[0].iterdir()] == ["mixture.safetensors"]
    new.resume_from_checkpoint = None
    resumed.on_train_begin(new, SimpleNamespace(global_step=0), None)
    assert not resumed.mixture.logits.any()
    with pytest.raises(FileNotFoundError):  # where the arguments do not say from which folder
        resumed.on_train_begin(new, state, None)
    new.resume_from_checkpoint = str(folders[0])
    resumed.on_train_begin(new, state, None)
    for callback in (saved, resumed):
        callback.mixture.logits.grad = torch.ones(4)
        callback.optimizer.step()
    assert torch.equal(resumed.mixture.logits, saved.mixture.logits)
    for given in (str(folders[1]), True):  # True: the last one of the folder that is written to
        resumed.mixture.logits.data.fill_(1.0)
        new.resume_from_checkpoint = given
        resumed.on_train_begin(new, state, None)
        assert not resumed.mixture.logits.any()


def test_a_resumed_trainer_has_the_batches_that_would_have_followed() -> None:
    pytest.importorskip("transformers")
    module = load("domain_weights_trainer")
    rows, found = module.texts(torch.arange(400) % 4), []
    for earlier in ((10,), ()):
        callback = module.MixtureCallback(hk.DomainWeights(4), rows)
        before = [callback.batches(0, step)[0]["input_ids"] for step in earlier]
        random = torch.get_rng_state()
        found.append(callback.batches(0, 20)[0]["input_ids"])
        assert torch.equal(torch.get_rng_state(), random)  # those of θ are not changed
        assert not any(torch.equal(found[-1], x) for x in before)
    assert torch.equal(*found)


def test_each_process_of_trainer_has_its_own_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer seeds all processes alike, so that all would move λ by the same few texts."""
    pytest.importorskip("transformers")
    module = load("domain_weights_trainer")
    rows, first = module.texts(torch.arange(400) % 4), []
    for rank in range(2):
        group = SimpleNamespace(rank=rank)
        monkeypatch.setattr(hk.training, "DataParallel", lambda *_, group=group, **__: SimpleNamespace(group=group))
        first.append(module.MixtureCallback(hk.DomainWeights(4), rows).batches(0, 10)[0]["input_ids"])
    assert not torch.equal(*first)


def test_domain_weights_inside_the_real_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With evaluations, and resumed from a checkpoint."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    options = {"use_cpu": True, "save_strategy": "steps", "save_steps": 40, "eval_strategy": "steps", "eval_steps": 40}
    module = load("domain_weights_checkpoint")
    check_mixture(module.main(module.SavedMixtureCallback, max_steps=60, **options), "domain_weights_trainer")
    checkpoint = str(next(tmp_path.glob("*/checkpoint-40")))
    resumed = module.main(module.SavedMixtureCallback, max_steps=60, resume_from_checkpoint=checkpoint, **options)
    assert resumed[0] == max(resumed) > 0.3


def test_the_real_trainer_resumes_a_checkpoint_of_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the λ of the run that was not interrupted, by a hypergradient that draws no numbers of its own."""
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    module, found = load("domain_weights_checkpoint"), []
    monkeypatch.setattr(hk, "kfac", lambda **_: hk.identity(cross="reverse"))
    options = {"use_cpu": True, "save_strategy": "steps", "save_steps": 10, "max_steps": 20}
    for more in ({"output_dir": "first"}, {"output_dir": "second", "resume_from_checkpoint": "first/checkpoint-10"}):
        torch.manual_seed(0)  # the same texts
        found.append(module.main(module.SavedMixtureCallback, **options, **more))
    assert found[1] == found[0] != [0.25] * 4
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["checkpoint-20"]  # not from the beginning


def test_trainer_accumulates_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four batches of two in a step have the gradient of one batch of eight, not four times that."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    module, norms = load("domain_weights_trainer"), []

    class Watching(module.MixtureCallback):  # type: ignore[misc, name-defined]
        def on_pre_optimizer_step(self, *_: object, model: torch.nn.Module, **__: object) -> None:
            norms.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm())

    for size in (8, 2):
        transformers.set_seed(0)
        options = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        module.main(Watching, max_steps=1, use_cpu=True, max_grad_norm=0.0, save_strategy="no", **options)
    assert float(norms[1]) == pytest.approx(float(norms[0]), rel=1e-4)


@pytest.mark.parametrize("real", [False, True])
def test_domain_weights_accelerate(real: bool) -> None:
    """With a stand-in for what Accelerate does on one device, and with Accelerate."""
    pytest.importorskip("transformers")
    module = load("domain_weights_accelerate")
    stand_in = SimpleNamespace(
        device=torch.device("cpu"), prepare=lambda *x: x, backward=torch.Tensor.backward, unwrap_model=lambda m: m
    )
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True) if real else stand_in
    torch.manual_seed(0)
    check_mixture(module.main(accelerator, steps=60), "domain_weights_accelerate")
