# Experience of one iteration: prompts, rollouts, rewards, log-probabilities and advantages.


rule prepare_prompts:
    input:
        files=prompt_files,
    output:
        train="results/shared/prompts/{prompts}/train.parquet",
        heldout="results/shared/prompts/{prompts}/heldout.parquet",
    log:
        text="results/shared/logs/prepare_prompts-{prompts}.log",
        timings="results/shared/timings/prepare_prompts-{prompts}.json",
    wildcard_constraints:
        prompts=any_of(PROMPTS),
    localrule: True
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_host(one_of(PROMPTS, "prompts")),
    params:
        config=shared_slice("prepare_prompts", PROMPTS, "prompts"),
    shell:
        shared_stage(
            "prepare_prompts",
            outputs="train heldout",
        )


rule generate_rollouts:
    input:
        weights=lagging("results/{run}/{iteration}/weights"),
        base=base_of,
        prompts=train_prompts_of,
    output:
        rollouts="results/{run}/{iteration}/rollouts.parquet",
    log:
        text="results/{run}/{iteration}/logs/generate_rollouts.log",
        timings="results/{run}/{iteration}/timings/generate_rollouts.json",
    priority: run_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("rollout"),
        **engine_costs(),
        last=last_iteration,
        lag=lag_of,
    params:
        config=slice_of("generate_rollouts"),
    shell:
        stage(
            "generate_rollouts",
            inputs="weights base prompts",
            outputs="rollouts",
            costs="max_rows page_size kv_cache_mb lag",
        )


rule score_with_models:
    input:
        rollouts="results/{run}/{iteration}/rollouts.parquet",
        prompts=train_prompts_of,
        models=reward_models_of,
    output:
        model_scores="results/{run}/{iteration}/model_scores.parquet",
    log:
        text="results/{run}/{iteration}/logs/score_with_models.log",
        timings="results/{run}/{iteration}/timings/score_with_models.json",
    priority: run_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("reward"),
        last=last_iteration,
        micro_batch_tokens=cost("micro_batch_tokens", "learner"),
    params:
        config=reward_models_slice,
        models=named_reward_models,
    shell:
        stage(
            "score_with_models",
            inputs="rollouts prompts",
            outputs="model_scores",
            costs="micro_batch_tokens",
        )
        + " {params.models}"


rule score_rewards:
    input:
        rollouts="results/{run}/{iteration}/rollouts.parquet",
        model_scores=where(
            has_reward_models, "results/{run}/{iteration}/model_scores.parquet"
        ),
        scorers=scorer_files,
    output:
        rewards="results/{run}/{iteration}/rewards.parquet",
    log:
        text="results/{run}/{iteration}/logs/score_rewards.log",
        timings="results/{run}/{iteration}/timings/score_rewards.json",
    priority: run_priority
    localrule: True
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_host(),
        last=last_iteration,
    params:
        config=slice_of("score_rewards"),
    shell:
        stage(
            "score_rewards",
            inputs="rollouts model_scores",
            outputs="rewards",
        )


rule reference_logprobs:
    input:
        rollouts="results/{run}/{iteration}/rollouts.parquet",
        base=base_of,
        policy=reference_policy,
    output:
        reference="results/{run}/{iteration}/reference.parquet",
    log:
        text="results/{run}/{iteration}/logs/reference_logprobs.log",
        timings="results/{run}/{iteration}/timings/reference_logprobs.json",
    priority: run_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("reference"),
        last=last_iteration,
        micro_batch_tokens=cost("micro_batch_tokens", "learner"),
    params:
        config=slice_of("reference_logprobs"),
    shell:
        stage(
            "reference_logprobs",
            inputs="rollouts base policy",
            outputs="reference",
            costs="micro_batch_tokens",
        )


rule policy_logprobs:
    input:
        rollouts="results/{run}/{iteration}/rollouts.parquet",
        policy=before("results/{run}/{iteration}/policy"),
        base=base_of,
    output:
        policy_logprobs="results/{run}/{iteration}/policy_logprobs.parquet",
    log:
        text="results/{run}/{iteration}/logs/policy_logprobs.log",
        timings="results/{run}/{iteration}/timings/policy_logprobs.json",
    priority: run_priority
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_mesh("actor"),
        last=last_iteration,
        micro_batch_tokens=cost("micro_batch_tokens", "learner"),
    params:
        config=slice_of("policy_logprobs"),
    shell:
        stage(
            "policy_logprobs",
            inputs="rollouts policy base",
            outputs="policy_logprobs",
            costs="micro_batch_tokens",
        )


rule estimate_advantages:
    input:
        rollouts="results/{run}/{iteration}/rollouts.parquet",
        rewards="results/{run}/{iteration}/rewards.parquet",
        reference=where(penalises_reward, "results/{run}/{iteration}/reference.parquet"),
        policy_logprobs=where(
            penalises_reward, "results/{run}/{iteration}/policy_logprobs.parquet"
        ),
        values=where(uses_critic, "results/{run}/{iteration}/values.parquet"),
    output:
        advantages="results/{run}/{iteration}/advantages.parquet",
    log:
        text="results/{run}/{iteration}/logs/estimate_advantages.log",
        timings="results/{run}/{iteration}/timings/estimate_advantages.json",
    priority: run_priority
    localrule: True
    conda:
        "../envs/meshdial.yaml"
    resources:
        **on_host(),
        last=last_iteration,
    params:
        config=slice_of("estimate_advantages"),
    shell:
        stage(
            "estimate_advantages",
            inputs="rollouts rewards reference policy_logprobs values",
            outputs="advantages",
        )
