# Policies and their weights: the base, version 0, and what the rollout role gets of each version.


rule init_policy:
    input:
        source=model_source,
    output:
        model=directory("results/shared/models/{model}"),
    log:
        text="results/shared/logs/init_policy-{model}.log",
        timings="results/shared/timings/init_policy-{model}.json",
    wildcard_constraints:
        model=any_of(MODELS),
    localrule: True
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_host(one_of(MODELS, "model")),
    params:
        config=shared_slice("init_policy", MODELS, "model"),
    shell:
        shared_stage(
            "init_policy",
            outputs="model",
        )


rule init_value_model:
    input:
        source=value_model_source,
    output:
        model=directory("results/shared/models/{model}"),
    log:
        text="results/shared/logs/init_value_model-{model}.log",
        timings="results/shared/timings/init_value_model-{model}.json",
    wildcard_constraints:
        model=any_of(VALUE_MODELS),
    localrule: True
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_host(lambda wildcards: VALUE_MODELS[wildcards.model][0]),
    params:
        config=lambda wildcards: json.dumps(
            value_model_slice(VALUE_MODELS[wildcards.model][1]), sort_keys=True
        ),
    shell:
        shared_stage(
            "init_value_model",
            outputs="model",
        )


rule warm_start:
    input:
        model=lambda wildcards: f"results/shared/models/{model_name(WARM[wildcards.model])}",
        prompts=lambda wildcards: f"results/shared/prompts/{prompts_name(WARM[wildcards.model])}/train.parquet",
    output:
        model=directory("results/shared/models/{model}"),
    log:
        text="results/shared/logs/warm_start-{model}.log",
        timings="results/shared/timings/warm_start-{model}.json",
    wildcard_constraints:
        model=any_of(WARM),
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("actor", one_of(WARM, "model")),
    params:
        config=shared_slice("warm_start", WARM, "model"),
    shell:
        shared_stage(
            "warm_start",
            inputs="model prompts",
            outputs="model",
        )


rule start_policy:
    input:
        base=base_of,
    output:
        policy=temp(directory("results/{run}/{iteration}/policy")),
    log:
        text="results/{run}/{iteration}/logs/start_policy.log",
        timings="results/{run}/{iteration}/timings/start_policy.json",
    wildcard_constraints:
        iteration="0000",
    priority: run_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("actor"),
        last=last_iteration,
    params:
        config=slice_of("start_policy"),
    shell:
        stage(
            "start_policy",
            inputs="base",
            outputs="policy",
        )


rule sync_weights:
    input:
        policy="results/{run}/{iteration}/policy",
        base=base_of,
        checks=passed_checks,
    output:
        weights=temp(directory("results/{run}/{iteration}/weights")),
    log:
        text="results/{run}/{iteration}/logs/sync_weights.log",
        timings="results/{run}/{iteration}/timings/sync_weights.json",
    priority: run_priority
    localrule: True
    conda:
        "../envs/meshdial.yaml"
    resources:
        **for_export(),
        last=last_iteration,
    params:
        config=slice_of("sync_weights"),
    shell:
        stage(
            "sync_weights",
            inputs="policy base",
            outputs="weights",
        )


use rule start_policy as start_policy_kept with:
    output:
        policy=directory("results/{run}/{iteration}/policy"),
    wildcard_constraints:
        iteration="0000",
        run=run_at(kept_policies),


use rule sync_weights as sync_weights_kept with:
    output:
        weights=directory("results/{run}/{iteration}/weights"),
    wildcard_constraints:
        run=run_at(kept_weights),
    # Not taken over from the rule that this one is made from.
    localrule: True


ruleorder: start_policy_kept > start_policy
ruleorder: sync_weights_kept > sync_weights
