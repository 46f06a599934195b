# The update that turns policy n-1 into policy n, and the gate behind it.


rule update_actor:
    input:
        policy=before("results/{run}/{iteration}/policy"),
        base=base_of,
        rollouts="results/{run}/{iteration}/rollouts.parquet",
        advantages="results/{run}/{iteration}/advantages.parquet",
        reference=where(has_reference, "results/{run}/{iteration}/reference.parquet"),
        policy_logprobs=where(
            has_policy_logprobs, "results/{run}/{iteration}/policy_logprobs.parquet"
        ),
    output:
        policy=temp(directory("results/{run}/{iteration}/policy")),
        figures="results/{run}/{iteration}/update.json",
    log:
        text="results/{run}/{iteration}/logs/update_actor.log",
        timings="results/{run}/{iteration}/timings/update_actor.json",
    wildcard_constraints:
        iteration="(?!0000)[0-9]{4}",
    priority: run_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("actor"),
        last=last_iteration,
        micro_batch_tokens=cost("micro_batch_tokens", "learner"),
        remat=is_rematerialised,
    params:
        config=slice_of("update_actor"),
    shell:
        stage(
            "update_actor",
            inputs="policy base rollouts advantages reference policy_logprobs",
            outputs="policy figures",
            costs="micro_batch_tokens remat",
        )


use rule update_actor as update_actor_kept with:
    output:
        policy=directory("results/{run}/{iteration}/policy"),
        figures="results/{run}/{iteration}/update.json",
    wildcard_constraints:
        run=run_at(kept_policies),
        iteration="(?!0000)[0-9]{4}",


ruleorder: update_actor_kept > update_actor


rule check_iteration:
    input:
        policy="results/{run}/{iteration}/policy",
        figures="results/{run}/{iteration}/update.json",
        rollouts="results/{run}/{iteration}/rollouts.parquet",
        rewards="results/{run}/{iteration}/rewards.parquet",
        advantages="results/{run}/{iteration}/advantages.parquet",
        model_scores=where(
            has_reward_models, "results/{run}/{iteration}/model_scores.parquet"
        ),
        reference=where(has_reference, "results/{run}/{iteration}/reference.parquet"),
        policy_logprobs=where(
            has_policy_logprobs, "results/{run}/{iteration}/policy_logprobs.parquet"
        ),
        values=where(uses_critic, "results/{run}/{iteration}/values.parquet"),
        critic=where(uses_critic, "results/{run}/{iteration}/critic"),
        critic_figures=where(
            uses_critic, "results/{run}/{iteration}/critic_update.json"
        ),
    output:
        checks="results/{run}/{iteration}/checks.json",
    log:
        text="results/{run}/{iteration}/logs/check_iteration.log",
        timings="results/{run}/{iteration}/timings/check_iteration.json",
    priority: run_priority
    localrule: True
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_host(),
        last=last_iteration,
        # A bound is no reason to make again what has passed its check.
        max_logprob_drift=cost("max_logprob_drift", "checks"),
        max_unscored=cost("max_unscored", "checks"),
    params:
        config=slice_of("check_iteration"),
    shell:
        stage(
            "check_iteration",
            inputs="policy figures rollouts rewards advantages model_scores reference"
            " policy_logprobs values critic critic_figures",
            costs="max_logprob_drift max_unscored",
            outputs="checks",
        )
