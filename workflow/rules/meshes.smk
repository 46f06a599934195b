# Where a rule's stage runs. The dial says which mesh, and the profile how processes hold meshes;
# both travel as resources, since neither is a reason to run anything again.


def chosen_launcher():
    """The launcher of the profile's default resources, which are expressions."""
    default = workflow.resource_settings.default_resources or {}
    if "launcher" not in default:
        return "warm"
    return (
        default["launcher"]
        .evaluate(None, input=[], attempt=1, threads=1, rulename="", async_run=None)
        .value
    )


LAUNCHER = chosen_launcher()
if LAUNCHER not in LAUNCHERS:
    raise WorkflowError(
        f"the launcher is {LAUNCHER!r}, expected one of {', '.join(LAUNCHERS)}"
    )


def on_mesh(role, choose=run_of):
    """The resources of a rule that computes on `role`'s mesh, of the run that `choose` finds."""
    return mesh_resources(
        choose, lambda run: layout(run, role), lambda run: pool_of(run, role)
    )


def on_host(choose=run_of):
    """The resources of a rule that needs no accelerator.

    It leaves the meshes alone where there are several or each stage is a process of its own. The
    one process that holds everything serves it too.
    """
    return mesh_resources(
        choose,
        lambda run: HOST if has_own_host(run) else layout(run, "actor"),
        lambda run: None if has_own_host(run) else pool_of(run, "actor"),
    )


def for_export():
    """The policy is exported by the process that has it, or else by any that can read it."""
    return on_host() if LAUNCHER == "cold" else on_mesh("actor")


def has_own_host(run):
    return LAUNCHER == "cold" or (LAUNCHER != "shared" and len(layouts(run)) > 1)


def pool_of(run, role):
    """What a rule takes one of, and of which the profile allows one at a time."""
    return pool(run, "actor" if LAUNCHER == "shared" else role)


def mesh_resources(choose, mesh_of_run, pool_of_run):
    def booked(name):
        return lambda wildcards: int(pool_of_run(choose(wildcards)) == name)

    return {
        "mesh": lambda wildcards: mesh_of_run(choose(wildcards)),
        "meshes": lambda wildcards: process_layout(choose(wildcards)),
        **{name: booked(name) for name in POOLS},
    }


POOLS = [f"{role}_mesh" for role in ROLES]


def check_limits():
    """A limit of 0 would scale what a rule takes down to nothing, which is no limit at all."""
    for name, limit in workflow.resource_settings.resources.items():
        if name.endswith("_mesh") and name not in POOLS:
            raise WorkflowError(
                f"the resource limit {name} is unknown, expected one of {', '.join(POOLS)}"
            )
        if name in POOLS and limit.value < 1:
            raise WorkflowError(
                f"the resource limit {name} is {limit.value}, expected at least 1"
            )


check_limits()
