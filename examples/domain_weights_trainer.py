"""Domain weights for continued pretraining inside a Hugging Face ``Trainer``, with made-up texts and a tiny Llama:
min_λ J_target(θ*), θ* = argmin_θ Σ_d p_d(λ) J_d(θ). An ordinary script changes in the four numbered lines."""

import torch
from torch.utils.data import RandomSampler, default_collate
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import hyperkron as hk

CONFIG = LlamaConfig(vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


def texts(domains):  # of 24 words; in domain d a word is followed by the one d + 1 further on
    words = (torch.randint(24, (len(domains), 1)) + torch.arange(16) * (domains + 1)[:, None]) % 24
    return [{"input_ids": w, "labels": w, "domain": d} for w, d in zip(words, domains, strict=True)]


def outer(model, mixture, batch, weight=None):
    logits = model(input_ids=batch["input_ids"]).logits
    return hk.losses.cross_entropy(logits[:, :-1], batch["labels"][:, 1:], weight=weight)


def inner(model, mixture, batch):
    return outer(model, mixture, batch, mixture(batch["domain"]))


class MixtureCallback(TrainerCallback):
    def __init__(self, mixture, *data):
        self.problem = hk.training.DataParallel(hk.BilevelProblem(inner, outer), divide=False)  # on several processes
        self.mixture, self.data = mixture, data
        self.optimizer, self.hypergradient = torch.optim.Adam(mixture.parameters(), lr=0.1), hk.kfac(damping=1e-2)

    def compute_loss(self, model, batch, return_outputs=False, **_):  # for Trainer; evaluations are without weights
        loss = (outer if return_outputs else inner)(model, self.mixture, batch).value
        return (loss, {}) if return_outputs else loss

    def batches(self, seed, step):  # others on each process, and the same in a resumed run
        own = torch.Generator().manual_seed(hash((seed, step, self.problem.group.rank)))
        return [default_collate([rows[i] for i in RandomSampler(rows, True, 16, own)]) for rows in self.data]

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step % 10 == 0:
            both = [{k: x.to(model.device) for k, x in b.items()} for b in self.batches(args.seed, state.global_step)]
            self.optimizer.zero_grad()
            self.hypergradient.backward(self.problem, model, self.mixture, *both)
            self.optimizer.step()


def main(Callback=MixtureCallback, **options):
    train, target = texts(torch.arange(400) % 4), texts(torch.zeros(40, dtype=torch.long))
    args = TrainingArguments(remove_unused_columns=False, learning_rate=3e-3, report_to="none", **options)  # 1
    move = Callback(hk.DomainWeights(4).to(args.device), train, target)  # 2
    trainer = Trainer(LlamaForCausalLM(CONFIG), args, train_dataset=train, eval_dataset=target, callbacks=[move])  # 3
    trainer.compute_loss, trainer.model_accepts_loss_kwargs = move.compute_loss, False  # 4: means over batches
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    return move.mixture.proportions().tolist()


if __name__ == "__main__":  # needs accelerate: pip install accelerate
    print("learned share of each domain (the target texts are of the first):", main(max_steps=200, save_strategy="no"))
