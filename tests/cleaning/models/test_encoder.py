"""Text encoders, on tiny random models made here: splitting, caching, safety, and what is said when there is none."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hyperkron.cleaning.data import InputForm
from hyperkron.cleaning.data.labelled import Roles
from hyperkron.cleaning.models import EncoderUnavailable, HashedNgrams, TextEncoder, choose_encoder, load_encoder
from hyperkron.cleaning.models.encoder import HUB_ENCODER
from hyperkron.cleaning.prepare import InputTransform
from hyperkron.curvature import KFAC
from hyperkron.solution import HyperkronError, HyperkronWarning, NonFiniteError

transformers = pytest.importorskip("transformers", reason="needs hyperkron[text]")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "very", "film", "the", "a", "was", "not"]
TEXTS = ["the film was very good", "bad", "", "not a good film", "a film", "the film was not very very very bad"]
SIZES = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 40,
}


def write_model(folder: Path, kind: str = "Bert", seed: int = 0) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = getattr(transformers, f"{kind}Model")(config)
    for name, p in model.named_parameters():
        if "LayerNorm" not in name:
            torch.nn.init.normal_(p, std=0.3)  # so that layers matter
    model.save_pretrained(folder)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    tokenizer.model_max_length = 32
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> TextEncoder:
    return TextEncoder(folder)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing named, nothing found, nothing reachable."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no network here")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.delenv("HYPERKRON_ENCODER", raising=False)
    monkeypatch.chdir(tmp_path)


def one_by_one(folder: Path) -> Tensor:
    """Each text on its own, straight through the library's model, without padding."""
    model = transformers.AutoModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        ids = [torch.tensor([tokenizer(text)["input_ids"]]) for text in TEXTS]
        return torch.cat([model(i).last_hidden_state.mean(1) for i in ids])


def test_embed_is_the_mean_over_tokens_in_the_order_given(encoder: TextEncoder, folder: Path) -> None:
    expected = one_by_one(folder)
    for batch_size in (1, 2, 64):
        x = encoder.embed(TEXTS, batch_size=batch_size, max_length=32)
        torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)
        assert x.dtype == torch.float32
        assert not x.requires_grad
    assert torch.equal(encoder.embed(TEXTS, max_length=32), encoder.embed(TEXTS, max_length=32))
    assert encoder.embed([], max_length=32).shape == (0, 16)
    assert not torch.allclose(encoder.embed(TEXTS[-1:], max_length=5), expected[-1:], atol=1e-3)  # cut


def test_progress_counts_every_token(encoder: TextEncoder) -> None:
    seen: list[tuple[int, int]] = []
    encoder.embed(TEXTS, batch_size=4, max_length=32, progress=lambda *step: seen.append(step))
    total = sum(len(text.split()) + 2 for text in TEXTS)
    assert [t for _, t in seen] == [total, total]
    assert 0 < seen[0][0] < seen[1][0] == total


@pytest.mark.parametrize("kind", ["Bert", "MPNet", "Roberta", "Electra", "DistilBert"])
def test_states_then_head_is_the_whole_encoder(kind: str, tmp_path: Path) -> None:
    """The frozen lower part once, then the last k layers: what the encoder gives in one go, for every k."""
    encoder = TextEncoder(write_model(tmp_path, kind))
    expected = encoder.embed(TEXTS, max_length=32)
    for layers in range(4):
        hidden = encoder.prefix(TEXTS, layers, max_length=32, batch_size=4, dtype=torch.float32)
        model = encoder.with_head(5, layers)
        torch.testing.assert_close(model.features(*hidden.batch(range(6))), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(model.features(*hidden.batch([4, 1])), expected[[4, 1]], rtol=1e-5, atol=1e-5)
        assert model(*hidden.batch(range(6))).shape == (6, 5)
        half = encoder.prefix(TEXTS, layers, max_length=32)
        assert half.values.dtype == torch.float16
        torch.testing.assert_close(model.features(*half.batch(range(6))), expected, rtol=0, atol=0.02)


def test_an_encoder_that_cannot_be_cut_says_so(tmp_path: Path) -> None:
    """ALBERT shares one layer, so there are no last ones; its embeddings can still be classified."""
    encoder = TextEncoder(write_model(tmp_path, "Albert"))
    with pytest.raises(HyperkronError, match="type 'albert' has no embeddings followed by a list of 3 layers; use lay"):
        encoder.with_head(3, 1)
    hidden = encoder.prefix(TEXTS, 0, max_length=32, dtype=torch.float32)
    features = encoder.with_head(3).features(*hidden.batch(range(6)))
    torch.testing.assert_close(features, encoder.embed(TEXTS, max_length=32), rtol=1e-5, atol=1e-5)


def test_a_cut_that_changes_the_result_is_refused(encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = encoder._states
    monkeypatch.setattr(encoder, "_states", lambda *args: exact(*args) * 1.01)
    with pytest.raises(HyperkronError, match="computes something else when cut before its last 2 layers"):
        encoder.with_head(3, 2)


def test_only_the_last_layers_and_the_head_are_trained(encoder: TextEncoder) -> None:
    model = encoder.with_head(5, 2)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    layer = 4 * (16 * 16 + 16) + 2 * 16 * 24 + 16 + 24 + 2 * 32
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * layer + 5 * 17
    before = encoder.embed(TEXTS, max_length=32)
    hidden, y = encoder.prefix(TEXTS, 2, max_length=32), torch.tensor([1, 0, 2, 1, 3, 0])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(*hidden.batch(range(6))), y)
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.1
    assert all(p.grad is not None for name, p in model.named_parameters() if name in trained)
    assert torch.equal(encoder.embed(TEXTS, max_length=32), before)  # the encoder itself has not changed
    assert not any("embeddings" in name for name in model.state_dict())


def test_training_k_layers_runs_only_those(encoder: TextEncoder) -> None:
    calls: list[str] = []
    lower = encoder._model.encoder.layer
    handles = [layer.register_forward_hook(lambda *_, i=i: calls.append(f"lower {i}")) for i, layer in enumerate(lower)]
    hidden = encoder.prefix(TEXTS, 1, max_length=32)
    assert calls == ["lower 0", "lower 1"]
    model = encoder.with_head(3, 1)
    calls.clear()
    model(*hidden.batch([0, 1]))
    assert calls == ["lower 2"]  # the copy of the last layer kept its hook; no other one is there
    for handle in handles:
        handle.remove()


def test_with_head_is_fresh_under_the_seed_and_the_same_function_while_training(encoder: TextEncoder) -> None:
    torch.manual_seed(1)
    first, other = encoder.with_head(3, 1), encoder.with_head(3, 1)
    torch.manual_seed(1)
    again = encoder.with_head(3, 1)
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)
    batch = encoder.prefix(TEXTS, 1, max_length=32).batch(range(6))
    assert first.training
    assert torch.equal(first(*batch), first(*batch))


def test_kronecker_blocks_cover_the_trained_matrices_and_gradients_have_gradients(encoder: TextEncoder) -> None:
    model = encoder.with_head(3, 2)
    assert {row.reason for row in KFAC().coverage(model).uncovered} == {"LayerNorm"}
    batch = encoder.prefix(TEXTS, 2, max_length=32).batch(range(6))
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradient = torch.autograd.grad(model(*batch).square().mean(), parameters, create_graph=True)
    second = torch.autograd.grad(sum(g.square().sum() for g in gradient), parameters)  # type: ignore[arg-type]
    assert all(bool(g.isfinite().all()) for g in second)


def test_hidden_states_of_some_rows(encoder: TextEncoder) -> None:
    hidden = encoder.prefix(TEXTS, 1, max_length=32)
    some = hidden.select([3, 0])
    assert len(hidden) == 6
    assert len(some) == 2
    for (x, m), (y, n) in [(some.batch([0, 1]), hidden.batch([3, 0]))]:
        assert torch.equal(x, y) and torch.equal(m, n)
    states, mask = hidden.batch([1, 5])
    assert mask.sum(1).tolist() == [3, 10]
    assert not states[0, 3:].any()


def test_kept_embeddings_are_used_and_follow_texts_and_weights(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, cache, halves = TextEncoder(folder), tmp_path / "kept", [TEXTS[:2], TEXTS[2:]]
    monkeypatch.setattr(TextEncoder.embed, "__kwdefaults__", TextEncoder.embed.__kwdefaults__ | {"max_length": 32})

    def vectors(encoder: TextEncoder, texts: list[list[str]] = halves) -> Tensor:
        transform = InputTransform(InputForm("text", Roles()), encoder)
        return torch.cat([transform.raw(part, torch.device("cpu"), cache=cache) for part in texts])

    first = vectors(encoder)
    torch.testing.assert_close(first, encoder.embed(TEXTS))
    path, _ = cache.glob("*.safetensors")
    for other, texts in [(encoder, [TEXTS]), (TextEncoder(write_model(tmp_path / "other", seed=1)), halves)]:
        torch.testing.assert_close(vectors(other, texts), other.embed(TEXTS))
    assert len(list(cache.glob("*.safetensors"))) == 5
    with monkeypatch.context() as patched:
        patched.setattr(encoder._model, "forward", None)  # nothing is computed any more
        assert torch.equal(vectors(encoder), first)
    path.write_bytes(path.read_bytes()[:-9] + b"\x07" * 9)
    with pytest.warns(HyperkronWarning, match="is damaged"):
        assert torch.equal(vectors(encoder), first)
    assert torch.equal(vectors(encoder), first)  # written again, whole


def test_choice_of_encoder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYPERKRON_ENCODER", raising=False)
    assert choose_encoder() == type(choose_encoder())(HUB_ENCODER, False)
    (tmp_path / "data" / "minilm").mkdir(parents=True)
    assert choose_encoder().name == HUB_ENCODER  # an empty folder is none
    (tmp_path / "data" / "minilm" / "config.json").write_text("{}")
    assert choose_encoder().name == str(Path("data/minilm"))
    monkeypatch.setenv("HYPERKRON_ENCODER", "some/model")
    assert (choose_encoder().name, choose_encoder().asked) == ("some/model", True)
    assert choose_encoder("mine").name == "mine"


def test_pickled_weights_and_foreign_code_are_never_loaded(folder: Path, tmp_path: Path) -> None:
    """A model whose weights or code could run a program when read is refused, and nothing runs."""
    from safetensors.torch import load_file

    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    mark = tmp_path / "ran"
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, tmp_path / "pytorch_model.bin")  # sound, yet a pickle: it is not even opened
    with pytest.raises(EncoderUnavailable, match="cannot be loaded"):
        TextEncoder(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "code.C", "AutoModel": "code.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "code.py").write_text(f"open({str(mark)!r}, 'w')\nclass C: pass\nclass M: pass\n")
    with pytest.raises(EncoderUnavailable, match="cannot be loaded"):
        TextEncoder(tmp_path)
    assert not mark.exists()


def test_missing_weights_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(EncoderUnavailable, match=r"lacks 1 of its weights, such as 'encoder\.layer\.1"):
        TextEncoder(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "is not a folder; give the folder of a downloaded model"),
        ("/nowhere/at/all", "is not a folder"),
        ("bad name!", "neither a folder nor a name"),
        ("a/b/c", "neither a folder nor a name"),
        ("no-such-person/no-such-model", "is not on this computer and cannot be fetched"),
    ],
)
@pytest.mark.usefixtures("offline")
def test_an_encoder_that_was_asked_for_is_never_replaced(name: str, message: str) -> None:
    with pytest.raises(EncoderUnavailable, match=message):
        load_encoder(name)


@pytest.mark.usefixtures("offline")
def test_without_any_encoder_hashed_ngrams_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, messages = load_encoder()
    assert encoder is None
    assert messages[0].startswith("Using hashed n-grams: the default encoder is not available")
    assert HUB_ENCODER in messages[0]
    monkeypatch.setenv("HYPERKRON_ENCODER", "no-such-person/no-such-model")
    with pytest.raises(EncoderUnavailable, match="no-such-person"):
        load_encoder()


def test_a_hub_that_does_not_answer_is_asked_once_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from hyperkron.cleaning.models import encoder

    asked, never = [], threading.Event()

    def wait(self: object, name: str, timeout: float) -> None:
        asked.append(name)
        never.wait()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", wait)
    monkeypatch.setattr(encoder, "HUB_SECONDS", 0.01)
    for _ in range(2):
        with pytest.raises(EncoderUnavailable, match=r"cannot be fetched \(no answer within 0.01 s\)"):
            load_encoder("nobody/silent-model")
    assert asked == ["nobody/silent-model"]
    never.set()


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(EncoderUnavailable, match=r"pip install 'hyperkron\[text\]'"):
        TextEncoder("some/model")


def test_an_encoder_that_is_there_is_loaded(folder: Path) -> None:
    encoder, messages = load_encoder(folder)
    assert encoder is not None
    assert (encoder.name, messages) == (str(folder), ())


def test_hashed_ngrams_keep_what_texts_share() -> None:
    topics = ["the cat sat on the mat", "stocks fell on the market", "a goal in the last minute"]
    texts = [f"{topics[i % 3]} number {i}" for i in range(30)]
    hashed = HashedNgrams(texts, dim=8)
    train, test = hashed(texts), hashed(["cats sit on mats", "market stocks"])
    assert train.shape == (30, 8)
    assert train.dtype == torch.float32
    assert float(train[:, 0].square().mean()) == pytest.approx(1, rel=1e-3)
    near = torch.nn.functional.normalize(test) @ torch.nn.functional.normalize(train).T
    assert near.argmax(1).remainder(3).tolist() == [0, 1]
    assert torch.equal(HashedNgrams(texts, dim=8)(texts), train)
    assert HashedNgrams(texts[:3])(texts[:3]).shape == (3, 2)
    assert hashed([]).shape == (0, 8)


def test_what_few_texts_share_stays_small_beside_what_many_do() -> None:
    texts = [f"{('the cat sat on the mat', 'stocks fell on the market')[i % 2]} number {i}" for i in range(30)]
    hashed = HashedNgrams(texts, dim=16)
    transform = InputTransform(InputForm("text", Roles(text="text")), hashed).fitted(hashed(texts))
    inputs = transform(texts, torch.device("cpu")).values
    assert inputs.mean(0).abs().max() < 1e-5
    wide = inputs.std(0)
    assert wide[-1] < 0.5 * wide[1] and torch.allclose(wide, hashed(texts).std(0))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda e: e.embed("one text"), HyperkronError, "texts is one string"),
        (lambda e: e.embed(["a", None], max_length=8), HyperkronError, r"texts\[1\] is a NoneType"),
        (lambda e: e.embed(["a"], max_length=33), HyperkronError, "max_length=33 must lie between 3 and 32"),
        (lambda e: e.embed(["a"], max_length=8, batch_size=0), HyperkronError, "batch_size=0"),
        (lambda e: e.prefix(["a"], 4, max_length=8), HyperkronError, "layers=4 must lie between 0 and the 3"),
        (lambda e: e.with_head(3, -1), HyperkronError, "layers=-1"),
        (lambda e: e.with_head(0, 1), HyperkronError, "classes=0"),
        (lambda _: HashedNgrams(["one"]), HyperkronError, "has 1 texts"),
    ],
)
def test_bad_arguments_are_named(encoder: TextEncoder, call: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(encoder)


def test_damaged_weights_and_overflow_are_met(folder: Path) -> None:
    encoder = TextEncoder(folder)
    with torch.no_grad():
        encoder._model.encoder.layer[0].output.LayerNorm.bias += 1e5
    with pytest.raises(NonFiniteError, match=r"dtype=torch\.float16 overflows"):
        encoder.prefix(TEXTS, 2, max_length=32)
    assert encoder.prefix(TEXTS, 2, max_length=32, dtype=torch.float32).values.isfinite().all()
    with torch.no_grad():
        encoder._model.encoder.layer[0].output.LayerNorm.bias.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="gives NaN or infinity"):
        encoder.embed(TEXTS, max_length=32)
