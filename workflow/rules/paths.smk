# Where things lie: what runs share, the chain of iterations, and what is there only at times.


# What runs share is named by a readable word and a hash of all that its content depends on.
def hash_of(value):
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def model_name(run):
    """The model before any warm start."""
    word = Path(run["model"]["source"].split("==")[0].rstrip("/")).name.lower()
    word = re.sub(r"[^a-z0-9]+", "-", word).strip("-")
    return f"{word}-{hash_of(stage_config(run, 'init_policy'))}"


def prompts_name(run):
    return f"{run['task']['name']}-{hash_of(stage_config(run, 'prepare_prompts'))}"


def base_name(run):
    """The model that reinforcement learning starts from, which is the reference too."""
    if run["warm_start"] is None:
        return model_name(run)
    parts = [model_name(run), prompts_name(run), stage_config(run, "warm_start")]
    return f"{model_name(run)}-warm-{hash_of(parts)}"


def reward_models_slice(wildcards):
    """What scores of reward models depend on, besides the models themselves."""
    names = [component_name(m) for m in run_of(wildcards)["reward"]["models"]]
    return json.dumps(
        stage_config({}, "score_with_models") | {"names": names}, sort_keys=True
    )


def model_of(entry):
    return {key: entry[key] for key in ("source", "dtype")}


def value_models(run):
    """What a run makes models with a value head from: {source, dtype} of each."""
    models = [model_of(entry) for entry in run["reward"]["models"]]
    if uses_critic(run) and run["critic"]["source"]:
        models.append(critic_source(run))
    return models


def critic_source(run):
    return {"source": run["critic"]["source"], "dtype": run["model"]["dtype"]}


def value_model_slice(model):
    return stage_config({}, "init_value_model") | model


def value_model_name(model):
    word = re.sub(r"[^a-z0-9]+", "-", Path(model["source"]).name.lower()).strip("-")
    return f"{word}-{hash_of(value_model_slice(model))}"


def evaluation_name(run):
    """The evaluation before training, which does not depend on the adapter."""
    parts = stage_config(run, "evaluate_policy") | {"lora": None}
    return f"{base_name(run)}-{hash_of([prompts_name(run), parts])}"


def by_name(name):
    """The first run behind each shared artifact's name."""
    return {name(run): run for run in reversed(RUNS.values())}


WARM = by_name(lambda run: run["warm_start"] and base_name(run))
MODELS, PROMPTS, EVALUATIONS = (
    by_name(model_name),
    by_name(prompts_name),
    by_name(evaluation_name),
)


VALUE_MODELS = {
    value_model_name(model): (run, model)
    for run in reversed(RUNS.values())
    for model in value_models(run)
}


def shared_slice(name, runs, wildcard):
    """As `slice_of`, for an artifact that runs share and which therefore has no adapter."""

    def choose(wildcards):
        part = stage_config(runs[wildcards[wildcard]], name)
        return json.dumps(
            part | {"lora": None} if "lora" in part else part, sort_keys=True
        )

    return choose


def one_of(runs, wildcard):
    """The run that makes what several share."""
    return lambda wildcards: runs[wildcards[wildcard]]


def first_run(wildcards):
    return next(iter(RUNS.values()))


def any_of(names):
    """A regular expression of exactly these names."""
    return "|".join(re.escape(name) for name in names if name) or "(?!)"


# Paths of what a run shares with others.
def base_of(wildcards):
    return f"results/shared/models/{base_name(run_of(wildcards))}"


def trunk_of(wildcards):
    """The model that the critic starts from."""
    run = run_of(wildcards)
    if run["critic"]["source"] is None:
        return base_of(wildcards)
    return f"results/shared/models/{value_model_name(critic_source(run))}"


def reward_models_of(wildcards):
    """The folder of each reward model."""
    models = run_of(wildcards)["reward"]["models"]
    return [f"results/shared/models/{value_model_name(model_of(m))}" for m in models]


def named_reward_models(wildcards):
    """The reward models as inputs of a command."""
    names = [component_name(m) for m in run_of(wildcards)["reward"]["models"]]
    pairs = zip(names, reward_models_of(wildcards), strict=True)
    return " ".join(f"--input model.{shlex.quote(name)}={path}" for name, path in pairs)


def train_prompts_of(wildcards):
    return f"results/shared/prompts/{prompts_name(run_of(wildcards))}/train.parquet"


def heldout_prompts_of(wildcards):
    return f"results/shared/prompts/{prompts_name(run_of(wildcards))}/heldout.parquet"


def first_evaluation_of(wildcards):
    run = run_of(wildcards)
    if run["evaluation"]["every"] == 0:
        return []
    return f"results/shared/evaluations/{evaluation_name(run)}.parquet"


def model_source(wildcards):
    return source_files(MODELS[wildcards.model]["model"]["source"])


def value_model_source(wildcards):
    return source_files(VALUE_MODELS[wildcards.model][1]["source"])


def source_files(source):
    """The files that a model is made from, where it is made from files."""
    if source == "scratch" or source.startswith("pypi:"):
        return []
    path = Path(source).expanduser()
    is_made_here = path.parts[:1] == ("results",) and path.parts[1] in RUNS
    return model_files(path) if path.is_dir() and not is_made_here else [str(path)]


def prompt_files(wildcards):
    return task_files(PROMPTS[wildcards.prompts]["task"])


def scorer_files(wildcards):
    """The modules of the user's own reward functions: another one is another reward."""
    return modules_of(run_of(wildcards)["reward"]["functions"])


def judge_files(wildcards):
    """As `scorer_files`, for evaluation."""
    return modules_of(run_of(wildcards)["evaluation"]["functions"])


def modules_of(functions):
    names = [entry["function"] for entry in functions if ":" in entry["function"]]
    modules = {name.partition(":")[0] for name in names}
    return [os.path.relpath(module_file(module)) for module in sorted(modules)]


# The chain of iterations.
def before(path):
    """`path` in the iteration before the job's own."""
    return lambda wildcards: path.format(
        run=wildcards.run, iteration=f"{int(wildcards.iteration) - 1:04d}"
    )


def lagging(path):
    """`path` of the policy version that the job's iteration samples with."""

    def choose(wildcards):
        lag = run_of(wildcards)["lag"]
        version = behaviour_version(lag, int(wildcards.iteration))
        return path.format(run=wildcards.run, iteration=f"{version:04d}")

    return choose


def where(is_needed, path):
    """`path` of the job's own iteration, where the run needs it at all."""

    def choose(wildcards):
        return path.format(**wildcards) if is_needed(run_of(wildcards)) else []

    return choose


def passed_checks(wildcards):
    """No weight leaves an iteration that failed its checks; version 0 comes from no iteration."""
    if int(wildcards.iteration) == 0:
        return []
    return f"results/{wildcards.run}/{wildcards.iteration}/checks.json"


def has_reference(run):
    return "reference" in roles_on_meshes(run)


def has_reward_models(run):
    return bool(run["reward"]["models"])


def reference_policy(wildcards):
    """The policy that is the iteration's reference, where that is no longer the base."""
    every = run_of(wildcards)["reference"]["refresh_every"]
    version = reference_version(every, int(wildcards.iteration))
    return f"results/{wildcards.run}/{version:04d}/policy" if version else []


def has_policy_logprobs(run):
    """Whether the policy at the update's start is not the one that sampled, or does not stay."""
    return is_anchored(run) or run["lag"] > 0


def kept_policies(run):
    """The policy versions, and the critics, that stay on disk once their readers are done; so
    does what the next iteration would have as its reference."""
    last, every = run["iterations"], run["reference"]["refresh_every"]
    references = (
        {reference_version(every, n) for n in (last, last + 1)}
        if has_reference(run)
        else set()
    )
    kept = {n for n in range(last + 1) if is_kept(run["keep"], n, last)}
    return [f"{n:04d}" for n in sorted(kept | references)]


def kept_weights(run):
    """As `kept_policies`, for the versions whose weights stay."""
    keep, last, lag = run["keep"], run["iterations"], run["lag"]
    return [f"{n:04d}" for n in range(last + 1) if are_weights_kept(keep, n, last, lag)]


def run_at(versions_of):
    """Matches a run's name only in front of a version that `versions_of` finds for the run."""
    folders = [
        f"{re.escape(name)}/(?:{any_of(versions_of(run))})"
        for name, run in RUNS.items()
    ]
    return f"(?=(?:{'|'.join(folders)})/)(?:{any_of(RUNS)})"


wildcard_constraints:
    run=any_of(RUNS),
    iteration="[0-9]{4}",
    model="[a-z0-9-]+",
    prompts="[a-z0-9_-]+",
    evaluation="[a-z0-9-]+",
