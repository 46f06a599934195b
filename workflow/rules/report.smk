# What a run says of itself, and a comparison of the runs of a sweep.


rule report_run:
    input:
        tables=lambda wildcards: list(tables_of(wildcards.run, run_of(wildcards))),
        first_evaluation=first_evaluation_of,
    output:
        metrics="results/{run}/metrics.parquet",
        learning_curve=figure("learning_curve"),
        reward_spread=figure("reward_spread"),
        kl=figure("kl"),
        entropy=figure("entropy"),
        critic=figure("critic"),
        completion_length=figure("completion_length"),
        logprob_drift=figure("logprob_drift"),
        stage_seconds=figure("stage_seconds"),
        stage_timeline=figure("stage_timeline"),
    log:
        text="results/{run}/logs/report_run.log",
        timings="results/{run}/timings/report_run.json",
    priority: run_priority
    localrule: True
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_host(),
    params:
        config=slice_of("report_run"),
        critic_update=critic_update_of,
    shell:
        shared_stage(
            "report_run", inputs="first_evaluation", outputs=f"metrics {FIGURES}"
        )
        + in_iterations("rollouts", "rollouts.parquet")
        + in_iterations("rewards", "rewards.parquet")
        + in_iterations("advantages", "advantages.parquet")
        + in_iterations("update", "update.json")
        + in_iterations("evaluation", "evaluation.parquet")
        + " --input critic_update={params.critic_update:q}"
        + in_iterations("timings", "timings/{{stage}}.json")
        + " --run {wildcards.run}"


rule compare_runs:
    input:
        metrics=expand("results/{run}/metrics.parquet", run=RUNS),
    output:
        table=report(
            "results/comparisons/{sweep}/final.csv",
            caption="../report/comparison.rst",
            category="Comparison",
        ),
        curves=report(
            "results/comparisons/{sweep}/curves.svg",
            caption="../report/comparison.rst",
            category="Comparison",
        ),
        page="results/comparisons/{sweep}/comparison.html",
    log:
        text="results/comparisons/{sweep}/logs/compare_runs.log",
        timings="results/comparisons/{sweep}/timings/compare_runs.json",
    wildcard_constraints:
        sweep=any_of([SWEEP]),
    localrule: True
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_host(first_run),
    params:
        config=comparison_config,
    shell:
        shared_stage("compare_runs", outputs="table curves page")
        + " --input 'metrics=results/{{run}}/metrics.parquet'"
