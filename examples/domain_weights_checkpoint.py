"""Checkpoints of a Hugging Face ``Trainer`` that hold λ: the domain weights of domain_weights_trainer.py are saved with
every checkpoint and read again when the run is resumed. Without this, a resumed run begins with equal weights."""

import sys

from domain_weights_trainer import MixtureCallback, main
from safetensors.torch import load_file, save_file
from transformers.trainer_utils import get_last_checkpoint


class SavedMixtureCallback(MixtureCallback):
    """Batches follow from the seed and the step, so they need not be saved; KFAC's random numbers start again."""

    def on_save(self, args, state, control, **_):
        if args.should_save:
            saved = self.mixture.state_dict() | self.optimizer.state_dict()["state"].get(0, {})
            save_file(saved, f"{args.output_dir}/checkpoint-{state.global_step}/mixture.safetensors")

    def on_train_begin(self, args, state, control, **_):
        if state.global_step > 0:  # resumed; True: from the last checkpoint in args.output_dir, as Trainer does
            given = args.resume_from_checkpoint
            folder = get_last_checkpoint(args.output_dir) if given is True else given
            saved = load_file(f"{folder}/mixture.safetensors")
            self.mixture.load_state_dict({"logits": saved.pop("logits")})
            self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": {0: saved}})


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "runs/mixture"
    options = {"output_dir": folder, "save_strategy": "steps", "save_steps": 50}
    print("after 100 steps:", main(SavedMixtureCallback, max_steps=100, **options))
    print("after 200 steps:", main(SavedMixtureCallback, max_steps=200, resume_from_checkpoint=True, **options))
