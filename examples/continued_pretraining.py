"""Fine-tune an encoder with masked-language modelling beside it, in which a small network weights every text:
min_λ J_task(θ*) on held-out rows, θ* = argmin_θ J_task(θ) + mean_n w(ℓ_n; λ) ℓ_n with ℓ_n the loss of masked tokens.
"""

import pandas
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

import hyperkron as hk

TASK, ENCODER, RATE = "", "", 2e-3  # made-up words, a tiny BERT; real data: "data/tapt/sciie", "data/minilm", 1e-4


def load(task, encoder):
    """The encoder, its mask token, and rows (tokens, class) to train on, hold out and test; token 0 is padding."""
    if not task:  # three of ten words tell the class
        y, sizes = torch.randint(3, (400,)), {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        x = torch.cat([2 + 8 * y[:, None] + torch.randint(8, (400, 3)), torch.randint(2, 50, (400, 7))], 1)
        model = transformers.BertModel(transformers.BertConfig(vocab_size=50, intermediate_size=64, **sizes))
        return model, 1, [TensorDataset(x[part], y[part]) for part in (slice(150), slice(150, 200), slice(200, 400))]
    parts = [pandas.read_json(f"{task}/{part}.jsonl.gz", lines=True) for part in ("train", "dev", "test")]
    tokenizer, names = transformers.AutoTokenizer.from_pretrained(encoder), sorted({*parts[0].label})
    texts = [tokenizer([*p.text], padding=True, truncation=True, max_length=64)["input_ids"] for p in parts]
    classes = [torch.tensor([names.index(label) for label in part.label]) for part in parts]
    rows = [TensorDataset(torch.tensor(x), y) for x, y in zip(texts, classes, strict=True)]
    return transformers.AutoModel.from_pretrained(encoder, dtype=torch.float32), tokenizer.mask_token_id, rows


def main(steps=40, inner_steps=5):
    torch.manual_seed(0)
    encoder, mask, (train, held_out, test) = load(TASK, ENCODER)
    encoder.pooler, (words, width) = None, encoder.get_input_embeddings().weight.shape
    heads = {"task": torch.nn.Linear(width, 1 + int(train.tensors[1].max())), "words": torch.nn.Linear(width, words)}
    model, weights = torch.nn.ModuleDict({"encoder": encoder, **heads}), hk.MetaWeightNet(scale=2.0)

    def logits(model, ids, head):
        states = model["encoder"](input_ids=ids, attention_mask=(ids != 0).long()).last_hidden_state
        return model[head](states if head == "words" else states.mean(1))

    def outer(model, weights, batch):
        return hk.losses.cross_entropy(logits(model, batch[0], "task"), batch[1])

    def inner(model, weights, batch):
        hidden = (torch.rand(batch[0].shape) < 0.15) & (batch[0] != 0)
        output = logits(model, batch[0].masked_fill(hidden, mask), "words")
        answers = batch[0].masked_fill(~hidden, -100)
        each = hk.losses.cross_entropy(output, answers).per_example
        return outer(model, weights, batch) + hk.losses.cross_entropy(output, answers, weight=weights(each))

    data = [DataLoader(part, 16, shuffle=True, drop_last=True) for part in (train, held_out)]
    problem, algorithm = hk.BilevelProblem(inner, outer), hk.AID(hk.kfac(1e-3), inner_steps)
    adam = torch.optim.Adam(model.parameters(), RATE), torch.optim.Adam(weights.parameters(), 1e-3)
    hk.fit(problem, model, weights, algorithm, *data, steps=steps, inner_optimizer=adam[0], outer_optimizer=adam[1])
    right = torch.no_grad()(logits)(model.eval(), test.tensors[0], "task").argmax(1) == test.tensors[1]
    return {"accuracy": float(right.float().mean()), "weights": weights(torch.arange(6.0)).tolist()}


if __name__ == "__main__":
    print("test accuracy {accuracy:.1%}; weights of texts, by their loss (0 to 5): {weights}".format(**main()))
