"""Domain weights for continued pretraining inside an Accelerate loop, with made-up texts and a tiny Llama:
min_λ J_target(θ*), θ* = argmin_θ Σ_d p_d(λ) J_d(θ). Every tenth step moves λ, so that domains that help on the target
texts count more. Besides the objectives and ``move``, an ordinary loop changes in the five numbered lines."""

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


def divided():  # among the processes, if there are several: each has batches of its own, and all move λ alike
    return hk.training.DataParallel(hk.BilevelProblem(inner, outer), divide=False)


def move(optimizer, hypergradient, problem, *where):
    optimizer.zero_grad()
    hypergradient.backward(problem, *where)
    optimizer.step()


def main(accelerator, steps=100):
    train, target = texts(torch.arange(400) % DOMAINS), texts(torch.zeros(40, dtype=torch.long))
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loaders = [DataLoader(rows, 16, sampler=RandomSampler(rows, True, 16 * steps)) for rows in (train, target)]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    mixture = hk.DomainWeights(DOMAINS).to(accelerator.device)  # 1
    method = torch.optim.Adam(mixture.parameters(), lr=0.1), hk.kfac(damping=1e-2), divided()  # 2
    for step, (batch, target_batch) in enumerate(zip(*loaders, strict=True), 1):
        accelerator.backward(inner(model, mixture, batch).value)  # 3, in place of model(**batch).loss
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:  # 4
            move(*method, accelerator.unwrap_model(model), mixture, batch, target_batch)  # 5
    return mixture.proportions().tolist()


if __name__ == "__main__":
    from accelerate import Accelerator  # pip install accelerate

    print("learned share of each domain (the target texts are of the first):", main(Accelerator()))
