"""Domain weights for continued pretraining inside a Hugging Face ``Trainer``, with made-up texts and a tiny Llama:
min_λ J_target(θ*), θ* = argmin_θ Σ_d p_d(λ) J_d(θ). Every tenth step moves λ, so that domains that help on the target
texts count more. Besides the objectives and two small classes, an ordinary script changes in the five numbered lines.
"""

import torch
import transformers
from torch.utils.data import DataLoader

import hyperkron as hk

DOMAINS, WORDS = 4, 24
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def texts(domains):
    """In domain d a word is followed by the one d + 1 further on."""
    words = (torch.randint(WORDS, (len(domains), 1)) + torch.arange(16) * (domains + 1)[:, None]) % WORDS
    return [{"input_ids": w, "labels": w, "domain": d} for w, d in zip(words, domains, strict=True)]


def endless(data):
    while True:
        yield from DataLoader(data, 16, shuffle=True)


def outer(model, mixture, batch, weight=None):
    logits = model(input_ids=batch["input_ids"]).logits
    return hk.losses.cross_entropy(logits[:, :-1], batch["labels"][:, 1:], weight=weight)


def inner(model, mixture, batch):
    return outer(model, mixture, batch, mixture(batch["domain"]))


class MixtureTrainer(transformers.Trainer):
    def compute_loss(self, model, inputs, **_):
        return inner(model, self.mixture, inputs).value


class MixtureCallback(transformers.TrainerCallback):
    def __init__(self, mixture, *data):
        self.batches, self.mixture = zip(*map(endless, data), strict=True), mixture
        self.optimizer, self.hypergradient = torch.optim.Adam(mixture.parameters(), lr=0.1), hk.kfac(damping=1e-2)

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step % 10 == 0:
            batches = [{key: x.to(model.device) for key, x in batch.items()} for batch in next(self.batches)]
            self.optimizer.zero_grad()
            self.hypergradient.backward(hk.BilevelProblem(inner, outer), model, self.mixture, *batches)
            self.optimizer.step()


def main(**options):
    train, target = texts(torch.arange(400) % DOMAINS), texts(torch.zeros(40, dtype=torch.long))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **SIZES))
    options = {"learning_rate": 3e-3, "report_to": "none", "save_strategy": "no", **options}
    options["remove_unused_columns"] = False  # 1: the objectives need the domains
    arguments, mixture = transformers.TrainingArguments(**options), hk.DomainWeights(DOMAINS)  # 2: λ
    trainer = MixtureTrainer(model, arguments, train_dataset=train)  # 3
    trainer.mixture = mixture.to(arguments.device)  # 4
    trainer.add_callback(MixtureCallback(mixture, train, target))  # 5
    trainer.train()
    return mixture.proportions().tolist()


if __name__ == "__main__":
    print(main(max_steps=200))
