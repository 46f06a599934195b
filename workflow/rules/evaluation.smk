# Held-out accuracy: before training (shared by all runs that start alike), and of later versions.


rule evaluate_base:
    input:
        base=lambda wildcards: f"results/shared/models/{base_name(EVALUATIONS[wildcards.evaluation])}",
        prompts=lambda wildcards: f"results/shared/prompts/{prompts_name(EVALUATIONS[wildcards.evaluation])}/heldout.parquet",
        scorers=lambda wildcards: modules_of(
            EVALUATIONS[wildcards.evaluation]["evaluation"]["functions"]
        ),
    output:
        evaluation="results/shared/evaluations/{evaluation}.parquet",
    log:
        text="results/shared/logs/evaluate_policy-{evaluation}.log",
        timings="results/shared/timings/evaluate_policy-{evaluation}.json",
    priority: 1_000_000_000
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("rollout", one_of(EVALUATIONS, "evaluation")),
        **engine_costs(one_of(EVALUATIONS, "evaluation")),
    params:
        config=shared_slice("evaluate_policy", EVALUATIONS, "evaluation"),
    shell:
        shared_stage(
            "evaluate_policy",
            inputs="base prompts",
            outputs="evaluation",
            costs="max_rows page_size kv_cache_mb",
        )


rule evaluate_policy:
    input:
        weights="results/{run}/{iteration}/weights",
        base=base_of,
        prompts=heldout_prompts_of,
        scorers=judge_files,
    output:
        evaluation="results/{run}/{iteration}/evaluation.parquet",
    log:
        text="results/{run}/{iteration}/logs/evaluate_policy.log",
        timings="results/{run}/{iteration}/timings/evaluate_policy.json",
    priority: evaluation_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("rollout"),
        **engine_costs(),
        last=last_iteration,
    params:
        config=slice_of("evaluate_policy"),
    shell:
        stage(
            "evaluate_policy",
            inputs="weights base prompts",
            outputs="evaluation",
            costs="max_rows page_size kv_cache_mb",
        )
