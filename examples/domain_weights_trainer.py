"""Domain weights for continued pretraining inside a Hugging Face ``Trainer``, with made-up texts and a tiny Llama:
min_λ J_target(θ*), θ* = argmin_θ Σ_d p_d(λ) J_d(θ). Every tenth step moves λ, so that domains that help on the target
texts count more. Besides the objectives and the callback, an ordinary script changes in the four numbered lines.
"""

import torch
import transformers
from torch.utils.data import DataLoader, RandomSampler

import hyperkron as hk

DOMAINS, WORDS = 4, 24
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


def texts(domains):
    """In domain d a word is followed by the one d + 1 further on."""
    words = (torch.randint(WORDS, (len(domains), 1)) + torch.arange(16) * (domains + 1)[:, None]) % WORDS
    return [{"input_ids": w, "labels": w, "domain": d} for w, d in zip(words, domains, strict=True)]


def outer(model, mixture, batch, weight=None):
    logits = model(input_ids=batch["input_ids"]).logits
    return hk.losses.cross_entropy(logits[:, :-1], batch["labels"][:, 1:], weight=weight)


def inner(model, mixture, batch):
    return outer(model, mixture, batch, mixture(batch["domain"]))


def losses(mixture):  # in place of Trainer's; evaluations are without weights
    def compute_loss(model, batch, return_outputs=False, **_):
        return (outer(model, mixture, batch).value, {}) if return_outputs else inner(model, mixture, batch).value

    return compute_loss


class MixtureCallback(transformers.TrainerCallback):
    def __init__(self, mixture, *data):
        self.problem = hk.training.DataParallel(hk.BilevelProblem(inner, outer), divide=False)  # on several processes
        own = torch.Generator().manual_seed(torch.initial_seed() + self.problem.group.rank)  # Trainer seeds all alike
        loaders = [DataLoader(rows, 16, sampler=RandomSampler(rows, True, 10**9, own)) for rows in data]
        self.batches, self.mixture = zip(*loaders, strict=True), mixture
        self.optimizer, self.hypergradient = torch.optim.Adam(mixture.parameters(), lr=0.1), hk.kfac(damping=1e-2)

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step % 10 == 0:
            batches = [{key: x.to(model.device) for key, x in batch.items()} for batch in next(self.batches)]
            self.optimizer.zero_grad()
            self.hypergradient.backward(self.problem, model, self.mixture, *batches)
            self.optimizer.step()

    def on_save(self, args, state, control, **_):  # λ belongs to the checkpoint
        if args.should_save:
            saved = self.mixture.state_dict(), self.optimizer.state_dict()
            torch.save(saved, f"{args.output_dir}/checkpoint-{state.global_step}/mixture.pt")

    def on_train_begin(self, args, state, control, **_):
        if state.global_step > 0:  # by resume_from_checkpoint
            saved = torch.load(f"{args.output_dir}/checkpoint-{state.global_step}/mixture.pt")
            self.mixture.load_state_dict(saved[0])
            self.optimizer.load_state_dict(saved[1])


def main(resume=None, **options):
    train, target = texts(torch.arange(400) % DOMAINS), texts(torch.zeros(40, dtype=torch.long))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **SIZES))
    options = {"learning_rate": 3e-3, "report_to": "none", "save_strategy": "no"} | options
    options |= {"remove_unused_columns": False}  # 1: the objectives need the domains
    args = transformers.TrainingArguments(**options)
    trainer = transformers.Trainer(model, args, train_dataset=train, eval_dataset=target)
    mixture = hk.DomainWeights(DOMAINS).to(args.device)  # 2
    trainer.compute_loss, trainer.model_accepts_loss_kwargs = losses(mixture), False  # 3: each a mean over its batch
    trainer.add_callback(MixtureCallback(mixture, train, target))  # 4
    trainer.train(resume_from_checkpoint=resume)
    return mixture.proportions().tolist()


if __name__ == "__main__":
    print(main(max_steps=200))
