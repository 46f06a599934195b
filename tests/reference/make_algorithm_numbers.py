"""What other libraries say of losses and advantages, for tests/test_algorithms_beside_others.py.

    python tests/reference/make_algorithm_numbers.py trl|verl|tunix

writes one library's numbers into algorithm_numbers.json; run it with a Python that has it: trl
1.16.0 or verl 0.9.1 (with torch 2.13), google-tunix 0.1.7 (with jax 0.10.2). The libraries' own
functions are called. Where one takes a model, it is one that answers with given log-probabilities
or values. A loss comes with its gradient by the log-probabilities (or values), [N][T].
"""

import json
import sys
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import algorithm_inputs as given_by
import numpy as np

GIVEN = given_by.inputs()
INDEX = np.repeat(np.arange(given_by.N // given_by.GROUP), given_by.GROUP)
AGGREGATIONS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm")


# Hugging Face TRL: the loss of its GRPO trainer, without the trainer


def of_trl() -> dict:
    return {
        "grpo": trl_loss("grpo"),
        "bnpo": trl_loss("bnpo"),
        "dr_grpo": trl_loss("dr_grpo"),
        "dual": trl_loss("grpo", delta=given_by.DUAL),
        # its bound is the ratio's own, where the paper's is 1 + epsilon
        "cispo": trl_loss("cispo", high=1 + given_by.CISPO_HIGH),
        "sequence": trl_loss(
            "grpo",
            *("sequence", given_by.SEQUENCE_LOW, given_by.SEQUENCE_HIGH),
            proximal=given_by.near(GIVEN),
        ),
        "grpo_with_kl": trl_loss("grpo", beta=0.1),
        "dr_grpo_with_an_empty_sequence": trl_loss(
            "dr_grpo", mask=given_by.with_an_empty_sequence(GIVEN)
        ),
    }


def trl_loss(
    loss_type,
    level="token",
    low=given_by.LOW,
    high=given_by.HIGH,
    proximal=GIVEN["proximal"],
    mask=GIVEN["mask"],
    delta=None,
    beta=0.0,
) -> dict:
    import torch
    from trl import GRPOTrainer

    policy = torch.tensor(GIVEN["policy"], requires_grad=True)
    mask = torch.tensor(mask)
    trainer = trl_trainer(policy, loss_type, level, low, high, delta, beta)
    none = torch.zeros((given_by.N, 0))
    advantages = "sequence_advantages" if level == "sequence" else "advantages"
    batch = {
        **{"prompt_ids": none, "prompt_mask": none, "completion_ids": mask},
        **{"completion_mask": mask, "num_items_in_batch": mask.sum()},
        "advantages": torch.tensor(GIVEN[advantages]),
        "old_per_token_logps": torch.tensor(proximal),
        "ref_per_token_logps": torch.tensor(GIVEN["reference"]),
    }
    return with_gradient(GRPOTrainer._compute_loss(trainer, None, batch), policy)


def trl_trainer(policy, loss_type, level, low, high, delta, beta):
    options = SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1)
    alone = SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x)
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (policy, policy.detach(), None),
        args=options,
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=low,
        epsilon_high=high,
        beta=beta,
        max_completion_length=given_by.MAX_TOKENS,
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        model=SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
        accelerator=alone,
    )


def with_gradient(loss, by) -> dict:
    loss.backward()
    return {"loss": loss.item(), "gradient": rounded(by.grad.numpy())}


# verl


def of_verl() -> dict:
    import torch
    from verl.trainer.ppo import core_algos

    empty = torch.tensor(given_by.with_an_empty_sequence(GIVEN))
    return {
        **verl_policy_losses(),
        **verl_advantages(),
        "kl": {
            kind: rounded(core_algos.kl_penalty(*verl_tensors("policy", "reference"), kind).numpy())
            for kind in ("k1", "k2", "k3")
        },
        "kl_gradient": {kind: verl_kl_gradient(kind) for kind in ("k1+", "k2", "k3+")},
        "value_loss": verl_value_loss(),
        "aggregation": {
            mode: core_algos.agg_loss(
                *(*verl_tensors("advantages"), empty, mode),
                loss_scale_factor=given_by.MAX_TOKENS,
            ).item()
            for mode in AGGREGATIONS
        },
    }


def verl_tensors(*names):
    import torch

    return [torch.tensor(GIVEN[name]) for name in names]


def verl_policy_losses() -> dict:
    sequence = (given_by.SEQUENCE_LOW, given_by.SEQUENCE_HIGH)
    return {
        **{f"dual {mode}": verl_loss("vanilla", mode) for mode in AGGREGATIONS},
        "cispo": verl_loss("cispo", "token-mean", given_by.CISPO_LOW, given_by.CISPO_HIGH),
        "cispo without a lower bound": verl_loss("cispo", "token-mean", 1.0, given_by.CISPO_HIGH),
        "sequence": verl_loss("gspo", "seq-mean-token-mean", *sequence),
    }


def verl_loss(name, mode, low=given_by.LOW, high=given_by.HIGH) -> dict:
    import torch
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        **{"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1},
        **{"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": given_by.DUAL},
    )
    config.global_batch_info["loss_scale_factor"] = given_by.MAX_TOKENS
    policy = torch.tensor(GIVEN["policy"], requires_grad=True)
    mask, proximal, advantages = verl_tensors("mask", "proximal", "advantages")
    if name == "gspo":
        proximal = torch.tensor(given_by.near(GIVEN))
        advantages = verl_tensors("sequence_advantages")[0][:, None].expand(-1, given_by.T)
    loss = core_algos.get_policy_loss_fn(name)
    return with_gradient(loss(proximal, policy, advantages, mask, mode, config)[0], policy)


def verl_advantages() -> dict:
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo import core_algos

    mask, old_values = verl_tensors("mask", "old_values")
    rewards = torch.tensor(given_by.token_rewards(GIVEN))
    grpo, rloo = (
        core_algos.compute_grpo_outcome_advantage,
        core_algos.compute_rloo_outcome_advantage,
    )
    by_group = {
        "group_zscore": grpo(rewards, mask, INDEX),
        "group_mean": grpo(rewards, mask, INDEX, norm_adv_by_std_in_grpo=False),
        "leave_one_out": rloo(rewards, mask, INDEX),
    }
    whitened, _ = core_algos.compute_reinforce_plus_plus_outcome_advantage(
        rewards, mask, AlgoConfig(gamma=given_by.GAMMA)
    )
    advantages, returns = core_algos.compute_gae_advantage_return(
        rewards, old_values, mask, given_by.GAMMA, given_by.LAM
    )
    found = {name: pair[0] for name, pair in by_group.items()}
    found |= {"global_zscore": whitened, "gae": advantages, "gae_returns": returns}
    return {name: rounded(value.numpy()) for name, value in found.items()}


def verl_kl_gradient(kind) -> list:
    from verl.trainer.ppo import core_algos

    policy, reference = verl_tensors("policy", "reference")
    policy.requires_grad_()
    core_algos.kl_penalty(policy, reference, kind).sum().backward()
    return rounded(policy.grad.numpy())


def verl_value_loss() -> dict:
    from verl.trainer.ppo import core_algos

    values, returns, old_values, mask = verl_tensors("values", "returns", "old_values", "mask")
    values.requires_grad_()
    loss, clipped = core_algos.compute_value_loss(
        values, returns, old_values, mask, given_by.VALUE_CLIP
    )
    return with_gradient(loss, values) | {"clipped": clipped.item()}


# Google Tunix: its losses run a model, of which the answer is given


def of_tunix() -> dict:
    import jax

    jax.config.update("jax_enable_x64", True)
    from tunix.rl import algo_core, common

    empty = given_by.with_an_empty_sequence(GIVEN)
    near = given_by.near(GIVEN)
    modes = {"token-mean": {}, "sequence-mean-token-mean": {}}
    modes["sequence-mean-token-scale"] = {"norm": given_by.MAX_TOKENS}
    rewards, mask = given_by.token_rewards(GIVEN), GIVEN["mask"]
    advantages, returns = algo_core.compute_gae_advantages(
        rewards, GIVEN["old_values"], mask, given_by.GAMMA, given_by.LAM
    )
    group = GIVEN["rewards"], given_by.GROUP
    return {
        "ppo token-mean": tunix_loss("token-mean"),
        "ppo sequence-mean-token-mean": tunix_loss("sequence-mean-token-mean"),
        "dual": tunix_loss("token-mean", epsilon_c=given_by.DUAL),
        "sequence": tunix_loss(
            "sequence-mean-token-mean",
            *("gspo-token", given_by.SEQUENCE_LOW, given_by.SEQUENCE_HIGH, near),
        ),
        "group_zscore": rounded(algo_core.compute_advantages(*group)),
        "group_mean": rounded(algo_core.compute_drgrpo_advantages(*group)),
        "leave_one_out": rounded(algo_core.compute_rloo_advantages(*group)),
        "gae": rounded(advantages),
        "gae_returns": rounded(returns),
        "value_loss": tunix_value_loss(),
        "kl": {
            ours: rounded(common.compute_kl_divergence(GIVEN["policy"], GIVEN["reference"], method))
            for ours, method in (("k1", "kl"), ("k2", "mse_kl"), ("k3", "low_var_kl"))
        },
        "aggregation": {
            mode: float(common.aggregate_loss(GIVEN["advantages"], empty, mode, **options))
            for mode, options in modes.items()
        },
    }


def tunix_model(given, answer_of):
    """A model whose answer at the place before a token depends on what is given for the token."""
    import jax.numpy as jnp
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self):
            self.given = nnx.Param(jnp.asarray(given))

        def __call__(self, tokens, **_):
            padded = jnp.pad(self.given[...], ((0, 0), (0, 1)), constant_values=-1.0)
            return answer_of(padded)

    return Model()


def tunix_loss(
    mode,
    algorithm="grpo",
    low=given_by.LOW,
    high=given_by.HIGH,
    proximal=GIVEN["proximal"],
    epsilon_c=None,
) -> dict:
    import jax.numpy as jnp
    from tunix.rl import algo_core

    def logits(logprobs):  # of two tokens, of which the second is always drawn
        return jnp.stack([jnp.log1p(-jnp.exp(logprobs)), logprobs], axis=-1), None

    advantages = "advantages" if algorithm == "grpo" else "sequence_advantages"
    example = tunix_example(
        advantages=GIVEN[advantages], old_per_token_logps=proximal, ref_per_token_logps=None
    )
    config = SimpleNamespace(
        **{"beta": 0.0, "epsilon": low, "epsilon_high": high, "epsilon_c": epsilon_c},
        **{"loss_algo": algorithm, "loss_agg_mode": mode, "temperature": 1.0},
    )

    def loss(model):
        return algo_core.grpo_loss_fn(model, example, config, pad_id=-1, eos_id=-2)

    return tunix_gradient(loss, tunix_model(GIVEN["policy"], logits))


def tunix_value_loss() -> dict:
    from tunix.rl import algo_core

    example = tunix_example(old_values=GIVEN["old_values"], returns=GIVEN["returns"])

    def loss(model):
        return algo_core.ppo_value_loss_fn(
            model, example, given_by.VALUE_CLIP, pad_id=-1, eos_id=-2
        )

    return tunix_gradient(loss, tunix_model(GIVEN["values"], lambda values: values[..., None]))


def tunix_example(**given):
    import jax.numpy as jnp

    tokens = jnp.ones((given_by.N, given_by.T), jnp.int32)
    prompt = tokens[:, :1]
    mask = jnp.asarray(GIVEN["mask"])
    return SimpleNamespace(prompt_ids=prompt, completion_ids=tokens, completion_mask=mask, **given)


def tunix_gradient(loss, model) -> dict:
    from flax import nnx

    (value, _), gradient = nnx.value_and_grad(loss, has_aux=True)(model)
    return {"loss": float(value), "gradient": rounded(gradient["given"][...])}


def rounded(values) -> list:
    return np.asarray(values, np.float64).round(9).tolist()


PEERS = {"trl": ("trl", of_trl), "verl": ("verl", of_verl), "tunix": ("google-tunix", of_tunix)}


def main() -> None:
    name = sys.argv[1]
    package, numbers = PEERS[name]
    path = Path(__file__).with_name("algorithm_numbers.json")
    known = json.loads(path.read_text()) if path.exists() else {}
    known[name] = {"library": f"{package} {version(package)}", **numbers()}
    path.write_text(json.dumps(dict(sorted(known.items())), separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
