"""Domain weights for continued pretraining inside a Hugging Face ``Trainer``, with made-up texts and a tiny Llama:
min_λ J_target(θ*), θ* = argmin_θ Σ_d p_d(λ) J_d(θ). Every tenth step moves λ, so that domains that help on the target
texts count more. Besides the objectives and the callback, an ordinary script changes in the four numbered lines.
"""

import torch
import transformers  # whose Trainer needs accelerate: pip install accelerate
from safetensors.torch import load_file, save_file
from torch.utils.data import RandomSampler, default_collate

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


class MixtureCallback(transformers.TrainerCallback):
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

    def on_save(self, args, state, control, **_):  # λ belongs to the checkpoint; KFAC's random numbers start again
        if args.should_save:
            saved = self.mixture.state_dict() | self.optimizer.state_dict()["state"].get(0, {})
            save_file(saved, f"{args.output_dir}/checkpoint-{state.global_step}/mixture.safetensors")

    def on_train_begin(self, args, state, control, **_):
        if state.global_step > 0:  # resumed; True: from the last checkpoint in args.output_dir, as Trainer does
            given, last = args.resume_from_checkpoint, transformers.trainer_utils.get_last_checkpoint
            saved = load_file(f"{last(args.output_dir) if given is True else given}/mixture.safetensors")
            self.mixture.load_state_dict({"logits": saved.pop("logits")})
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": {0: saved}})


def main(**options):
    train, target = texts(torch.arange(400) % DOMAINS), texts(torch.zeros(40, dtype=torch.long))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **SIZES))
    options = {"learning_rate": 3e-3, "report_to": "none", "save_strategy": "no", **options}
    args = transformers.TrainingArguments(remove_unused_columns=False, **options)  # 1: the objectives need the domains
    trainer = transformers.Trainer(model, args, train_dataset=train, eval_dataset=target)
    callback = MixtureCallback(hk.DomainWeights(DOMAINS).to(args.device), train, target)  # 2
    trainer.compute_loss, trainer.model_accepts_loss_kwargs = callback.compute_loss, False  # 3: means over batches
    trainer.add_callback(callback)  # 4
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    return callback.mixture.proportions().tolist()


if __name__ == "__main__":
    print("learned share of each domain (the target texts are of the first):", main(max_steps=200))
