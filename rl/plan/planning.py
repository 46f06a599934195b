"""From the command's arguments to everything that a plan is made from."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from rl.config import expand, read
from rl.errors import MeshdialError
from rl.mesh import layouts, uses_critic
from rl.models.spec import ModelConfig
from rl.plan.dial import todays_dial
from rl.plan.hardware import chosen_device, chosen_links, link_named
from rl.plan.iteration import Machines
from rl.plan.measured import Measured, measured_run
from rl.plan.report import Plan
from rl.plan.source import model_sizes, value_model_sizes
from rl.plan.work import guessed_prompt_tokens, work_of

SHARED_MODELS = Path("results/shared/models")


def plan_of(arguments: argparse.Namespace) -> Plan:
    """MeshdialError, in one sentence, for arguments or a config that cannot be planned."""
    for flag in ("devices", "prompt_tokens", "completion_tokens"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            raise MeshdialError(f"--{flag.replace('_', '-')} is {value}, expected at least 1")
    config = _chosen_run(arguments)
    machines = _machines(arguments)
    measured = _measured(arguments.measured, config) if arguments.measured else None
    model = model_sizes(config["model"], arguments.model, SHARED_MODELS)
    prompt_tokens, completion_tokens, notes = _lengths(arguments, config, measured)
    if machines.device.name != "custom" and arguments.device is None:
        notes.append(f"the device is taken to be {machines.device.name}: set --device")
    others = _value_models(config)
    notes += _guesses(config, others)
    work = work_of(config, model, prompt_tokens, completion_tokens, others)
    dial = todays_dial(config, work)
    return Plan(
        run=config,
        work=work,
        dial=dial,
        machines=machines,
        links=chosen_links(arguments.link),
        num_devices=arguments.devices or dial.num_devices,
        notes=tuple(notes),
        measured=measured,
    )


def _value_models(config: dict) -> dict[str, ModelConfig]:
    """The sizes of a critic's and of reward models' sources, as far as they are there."""
    sources = [model["source"] for model in config["reward"]["models"]]
    if uses_critic(config) and config["critic"]["source"] is not None:
        sources.append(config["critic"]["source"])
    found = {source: value_model_sizes(source, SHARED_MODELS) for source in sources}
    return {source: sizes for source, sizes in found.items() if sizes is not None}


def _guesses(config: dict, known: Mapping[str, ModelConfig]) -> Iterator[str]:
    """What is not known of the run's other models, and what stands for it."""
    source = config["critic"]["source"]
    if uses_critic(config) and source is not None and source not in known:
        yield f"critic.source {source} is not there yet: it is taken to have the policy's sizes"
    models = [model["source"] for model in config["reward"]["models"]]
    for source in models:
        if source not in known:
            yield f"the reward model {source} is not there yet, and not counted"
    if known.keys() & set(models):
        yield "reward models are taken to read as many tokens as the policy"


def _chosen_run(arguments: argparse.Namespace) -> dict:
    runs = expand(read(arguments.configfile), arguments.configfile.parent)
    name = arguments.run or next(iter(runs))
    if name not in runs:
        raise MeshdialError(f"--run is {name!r}, expected one of {', '.join(runs)}")
    return runs[name]


def _measured(folder: Path, config: dict) -> Measured:
    """MeshdialError where the run had another dial: its figures are not those foreseen."""
    found = measured_run(folder)
    ran_on, planned = found.meshes - {"host"}, frozenset(layouts(config))
    if ran_on and ran_on != planned:
        raise MeshdialError(
            f"--measured is {str(folder)!r}, which ran on the meshes {', '.join(sorted(ran_on))}; "
            f"the config has {', '.join(sorted(planned))}"
        )
    return found


def _machines(arguments: argparse.Namespace) -> Machines:
    figures = (arguments.flops, arguments.bandwidth, arguments.memory, arguments.inside)
    links = chosen_links(arguments.link)
    return Machines(
        device=chosen_device(arguments.device, *figures),
        between=link_named(links, arguments.sync_over, "--sync-over"),
        disk=link_named(links, arguments.disk, "--disk"),
    )


def _lengths(
    arguments: argparse.Namespace, config: dict, measured: Measured | None
) -> tuple[int, int, list[str]]:
    """(tokens of a prompt, of a completion, notes on what was assumed)."""
    prompt, completion, notes = arguments.prompt_tokens, arguments.completion_tokens, []
    if measured is not None and measured.mean_prompt is not None:
        prompt = prompt or round(measured.mean_prompt)
        completion = completion or max(1, round(measured.mean_completion))
    if prompt is None:
        prompt = guessed_prompt_tokens(config["task"])
        notes.append(f"prompts are taken to have {prompt} tokens: set --prompt-tokens")
    return prompt, completion or config["rollout"]["max_tokens"], notes
