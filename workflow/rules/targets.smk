# What a complete set of runs consists of, and how the report describes it.


def iterations_of(run):
    return range(1, run["iterations"] + 1)


def tables_of(name, run):
    """Every table of a run, in the order of its iterations."""
    stems = ["rollouts.parquet", "rewards.parquet", "advantages.parquet"]
    stems += ["reference.parquet"] * has_reference(run)
    stems += ["policy_logprobs.parquet"] * has_policy_logprobs(run)
    stems += ["model_scores.parquet"] * has_reward_models(run)
    stems += ["values.parquet", "critic_update.json"] * uses_critic(run)
    stems += ["update.json", "checks.json"]
    for n in iterations_of(run):
        yield from (f"results/{name}/{n:04d}/{stem}" for stem in stems)
        if is_evaluated(run["evaluation"]["every"], n, run["iterations"]):
            yield f"results/{name}/{n:04d}/evaluation.parquet"


def versions_of(name, run):
    """The policy versions that a run keeps, its critics, and the weights."""
    yield from (f"results/{name}/{n}/policy" for n in kept_policies(run))
    if uses_critic(run):
        yield from (f"results/{name}/{n}/critic" for n in kept_policies(run))
    yield from (f"results/{name}/{n}/weights" for n in kept_weights(run))


def all_targets(wildcards):
    targets = []
    for name, run in RUNS.items():
        targets += tables_of(name, run)
        targets += versions_of(name, run)
        targets += [f"results/{name}/metrics.parquet"]
        targets += [f"results/{name}/report/{stem}.svg" for stem in FIGURES.split()]
    if SWEEP:
        targets.append(f"results/comparisons/{SWEEP}/final.csv")
    return targets


def comparison_config(wildcards):
    """Each run's seed and the settings in which the runs of the sweep differ."""
    flat = {name: dict(leaves(run)) for name, run in RUNS.items()}
    first = next(iter(flat.values()))
    varying = [
        key for key in first if any(run.get(key) != first[key] for run in flat.values())
    ]
    chosen = {
        name: {key: run.get(key) for key in {*varying, "seed"} - {"run"}}
        for name, run in flat.items()
    }
    config = stage_config({}, "compare_runs") | {
        "sweep": wildcards.sweep,
        "runs": chosen,
    }
    return json.dumps(config, sort_keys=True)


def figure(name):
    """A figure of a run that goes into Snakemake's report too."""
    return report(
        f"results/{{run}}/report/{name}.svg",
        caption=f"../report/{name}.rst",
        category="{run}",
        labels={"figure": name.replace("_", " ")},
    )


FIGURES = "learning_curve reward_spread kl entropy critic completion_length logprob_drift stage_seconds stage_timeline"


def in_iterations(name, path):
    """An input that the stage looks up in every iteration's folder: too many for a command line."""
    return f" --input '{name}=results/{{wildcards.run}}/{{{{iteration}}}}/{path}'"


def critic_update_of(wildcards):
    """As `in_iterations`, of a run with a critic."""
    has_critic = uses_critic(run_of(wildcards))
    return (
        f"results/{wildcards.run}/{{iteration}}/critic_update.json"
        if has_critic
        else ""
    )
