# The critic of a run whose algorithm has one: its own chain of versions beside the policy's.


rule start_critic:
    input:
        trunk=trunk_of,
        base=base_of,
    output:
        critic=temp(directory("results/{run}/{iteration}/critic")),
    log:
        text="results/{run}/{iteration}/logs/start_critic.log",
        timings="results/{run}/{iteration}/timings/start_critic.json",
    wildcard_constraints:
        iteration="0000",
    priority: run_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("critic"),
        last=last_iteration,
    params:
        config=slice_of("start_critic"),
    shell:
        stage(
            "start_critic",
            inputs="trunk base",
            outputs="critic",
        )


rule critic_values:
    input:
        rollouts="results/{run}/{iteration}/rollouts.parquet",
        critic=before("results/{run}/{iteration}/critic"),
        trunk=trunk_of,
    output:
        values="results/{run}/{iteration}/values.parquet",
    log:
        text="results/{run}/{iteration}/logs/critic_values.log",
        timings="results/{run}/{iteration}/timings/critic_values.json",
    priority: run_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("critic"),
        last=last_iteration,
        micro_batch_tokens=cost("micro_batch_tokens", "learner"),
    params:
        config=slice_of("critic_values"),
    shell:
        stage(
            "critic_values",
            inputs="rollouts critic trunk",
            outputs="values",
            costs="micro_batch_tokens",
        )


rule update_critic:
    input:
        critic=before("results/{run}/{iteration}/critic"),
        trunk=trunk_of,
        rollouts="results/{run}/{iteration}/rollouts.parquet",
        advantages="results/{run}/{iteration}/advantages.parquet",
        values="results/{run}/{iteration}/values.parquet",
    output:
        critic=temp(directory("results/{run}/{iteration}/critic")),
        figures="results/{run}/{iteration}/critic_update.json",
    log:
        text="results/{run}/{iteration}/logs/update_critic.log",
        timings="results/{run}/{iteration}/timings/update_critic.json",
    wildcard_constraints:
        iteration="(?!0000)[0-9]{4}",
    priority: run_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("critic"),
        last=last_iteration,
        micro_batch_tokens=cost("micro_batch_tokens", "learner"),
        remat=is_rematerialised,
    params:
        config=slice_of("update_critic"),
    shell:
        stage(
            "update_critic",
            inputs="critic trunk rollouts advantages values",
            outputs="critic figures",
            costs="micro_batch_tokens remat",
        )


use rule start_critic as start_critic_kept with:
    output:
        critic=directory("results/{run}/{iteration}/critic"),
    wildcard_constraints:
        iteration="0000",
        run=run_at(kept_policies),


use rule update_critic as update_critic_kept with:
    output:
        critic=directory("results/{run}/{iteration}/critic"),
        figures="results/{run}/{iteration}/critic_update.json",
    wildcard_constraints:
        run=run_at(kept_policies),
        iteration="(?!0000)[0-9]{4}",


ruleorder: start_critic_kept > start_critic
ruleorder: update_critic_kept > update_critic
