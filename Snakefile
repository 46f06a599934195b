"""Reinforcement-learning post-training as a DAG: iteration n turns policy n-1 into policy n."""

from snakemake.utils import min_version

min_version("9.27")

if not workflow.config_settings.configfiles:

    configfile: f"{workflow.basedir}/configs/addition.yaml"


report: "workflow/report/workflow.rst"


include: "workflow/rules/common.smk"
include: "workflow/rules/paths.smk"
include: "workflow/rules/meshes.smk"
include: "workflow/rules/targets.smk"
include: "workflow/rules/policy.smk"
include: "workflow/rules/experience.smk"
include: "workflow/rules/learning.smk"
include: "workflow/rules/critic.smk"
include: "workflow/rules/evaluation.smk"
include: "workflow/rules/report.smk"
include: "workflow/rules/hooks.smk"


rule all:
    input:
        all_targets,
