"""TRL's GRPOTrainer: all rows in one batch, no KL, one optimizer step an iteration.

An iteration lasts from one `on_step_begin` to the next, so all that the trainer does is in it.
"""

import os
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import trl
from datasets import Dataset
from serving import Repeat, serve
from tokenizers import Tokenizer, models, pre_tokenizers
from torch_model import make_model
from transformers import PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turnstile import Turnstile
from workload import SHAPES, make_requests, reward_of


def prepare(job: dict) -> tuple[str, Repeat]:
    shape = SHAPES[job["shape"]]
    requests = make_requests(shape, **job["requests"])
    texts = [{"prompt": " ".join(map(str, prompt))} for prompt in requests.prompts]
    tokenizer = number_tokenizer(shape.vocabulary)
    assert [tokenizer(text["prompt"])["input_ids"] for text in texts] == requests.prompts
    turnstile = Turnstile()
    trainer = GRPOTrainer(
        model=make_model(shape, job["cores"]),
        reward_funcs=reward,
        args=make_config(job, len(texts)),
        train_dataset=Dataset.from_list(texts),
        processing_class=tokenizer,
        callbacks=[OneAtATime(turnstile)],
    )
    turnstile.start(trainer.train)

    def repeat() -> dict:
        turnstile.once()
        lengths = [x["completions/mean_length"] for x in trainer.state.log_history if "loss" in x]
        return {"tokens": round(lengths[-1] * len(texts) * job["group_size"])}

    return f"trl {trl.__version__}, torch {torch.__version__}", repeat


class OneAtATime(TrainerCallback):
    def __init__(self, turnstile: Turnstile):
        self.turnstile = turnstile

    def on_step_begin(self, *_, **__):
        self.turnstile.wait()


def reward(completions: list[str], **_) -> list[float]:
    return [reward_of([int(word) for word in text.split()]) for text in completions]


def make_config(job: dict, num_prompts: int) -> GRPOConfig:
    return GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=num_prompts * job["group_size"],
        gradient_accumulation_steps=1,
        num_generations=job["group_size"],
        max_completion_length=job["max_new"],
        max_steps=10**6,
        learning_rate=1e-5,
        weight_decay=0.01,
        max_grad_norm=0.0,
        beta=0.0,
        temperature=1.0,
        top_k=0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        generation_kwargs={"min_new_tokens": job["max_new"]},
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def number_tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """A text is token ids with blanks between."""
    specials = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    words = {
        word: i for i, word in enumerate([*specials.values(), *map(str, range(3, vocabulary))])
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **specials)


if __name__ == "__main__":
    serve(prepare)
