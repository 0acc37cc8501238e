"""Domain weights in a LightningModule, with made-up texts and a tiny Llama: min_λ J_target(θ*) where
θ* = argmin_θ Σ_d p_d(λ) J_d(θ). Every tenth step moves λ. Besides the objectives, five numbered lines are new."""

import lightning  # pip install lightning
import torch
import transformers
from torch.utils.data import DataLoader

import hyperkron as hk

DOMAINS, WORDS = 4, 24
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def texts(domains):  # in domain d a word is followed by the one d + 1 further on
    words = (torch.randint(WORDS, (len(domains), 1)) + torch.arange(16) * (domains + 1)[:, None]) % WORDS
    return [{"input_ids": w, "labels": w, "domain": d} for w, d in zip(words, domains, strict=True)]


def outer(model, mixture, batch, weight=None):
    logits = model(input_ids=batch["input_ids"]).logits
    return hk.losses.cross_entropy(logits[:, :-1], batch["labels"][:, 1:], weight=weight)


def inner(model, mixture, batch):
    return outer(model, mixture, batch, mixture(batch["domain"]))


class Pretraining(lightning.LightningModule):
    def __init__(self, targets):
        super().__init__()
        self.model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **SIZES))
        self.mixture = hk.DomainWeights(DOMAINS)  # 1: a part of the module, so that checkpoints have it
        self.outer_optimizer = torch.optim.Adam(self.mixture.parameters(), lr=0.1)  # 2
        self.problem, self.method, self.targets = hk.BilevelProblem(inner, outer), hk.kfac(damping=1e-2), targets  # 3

    def configure_optimizers(self):
        return torch.optim.AdamW(self.model.parameters(), lr=3e-3)

    def training_step(self, batch, number):
        return inner(self.model, self.mixture, batch).value  # 4, in place of self.model(**batch).loss

    def on_train_batch_end(self, outputs, batch, number):  # 5
        if self.global_step % 10 == 0:
            target = self.transfer_batch_to_device(next(iter(self.targets)), self.device, 0)
            self.outer_optimizer.zero_grad()  # training_step has left gradients of J_in there
            self.method.backward(self.problem, self.model, self.mixture, batch, target)
            self.outer_optimizer.step()


def main(steps=100):
    rows = texts(torch.arange(400) % DOMAINS), texts(torch.zeros(40, dtype=torch.long))
    train, targets = (DataLoader(part, 16, shuffle=True) for part in rows)
    trainer = lightning.Trainer(max_steps=steps, logger=False, enable_checkpointing=False)
    trainer.fit(module := Pretraining(targets), train)
    return module.mixture.proportions().tolist()


if __name__ == "__main__":
    print("learned share of each domain (the target texts are of the first):", main())
