"""Which devices a process sees, how they are called, and what JAX is told."""

import json
import os
import subprocess
import sys

import pytest

from rl.errors import MeshdialError
from rl.processes import accelerators
from rl.processes.runtime import parse_process_layout

TRAIN, DECODE = "train:devices=4,fsdp=4", "decode:devices=2,first=4,tensor=2"
SLURM = {"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "3"}


@pytest.fixture
def machine(monkeypatch):
    """A machine with GPUs 0, 1, 3, 5, 6 and 7; a function that sets its environment."""
    for name in list(os.environ):
        if name.startswith(("SLURM_", "JAX_", "XLA_", "CUDA_", "MESHDIAL_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(accelerators, "_gpu_numbers", lambda: [0, 1, 3, 5, 6, 7])

    def set_environment(**variables):
        for name, value in variables.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_environment


def names(layout, launcher="warm"):
    return accelerators.device_names(parse_process_layout(layout), launcher)


def gpus(layout, launcher="warm", num_processes=1):
    return accelerators.own_gpus(parse_process_layout(layout), launcher, num_processes)


@pytest.mark.parametrize(
    ("platforms", "visible", "expected"),
    [
        ("cpu", "0,1", ["cpu-4", "cpu-5"]),
        ("cuda,cpu", "2,0,9,8,7,6", ["gpu-7", "gpu-6"]),
        ("cuda", "", ["cpu-4", "cpu-5"]),
        ("cuda", "-1", ["cpu-4", "cpu-5"]),
        ("cuda", None, ["gpu-6", "gpu-7"]),
        (None, None, ["gpu-6", "gpu-7"]),
        ("cuda", "a,b,c,d,GPU-89,MIG-1/2", ["gpu-GPU-89", "gpu-MIG-1_2"]),
    ],
)
def test_a_mesh_has_its_own_part_of_the_machine(machine, platforms, visible, expected):
    machine(JAX_PLATFORMS=platforms, CUDA_VISIBLE_DEVICES=visible)
    assert names(DECODE) == expected


def test_all_meshes_in_one_process(machine):
    assert gpus(f"{TRAIN}+{DECODE}") == ["0", "1", "3", "5", "6", "7"]
    assert gpus(TRAIN) == ["0", "1", "3", "5"]
    machine(JAX_PLATFORMS="cpu")
    assert names(f"{TRAIN}+{DECODE}") == [f"cpu-{number}" for number in range(6)]


def test_the_host_has_no_device(machine):
    assert names("host:devices=0") == []


def test_cuda_reads_up_to_the_first_word_that_is_no_device(machine):
    machine(CUDA_VISIBLE_DEVICES="3,1,-1,0")
    assert gpus("all:devices=2") == ["3", "1"]
    sentence = "mesh all wants 3 GPUs, up to number 2 of this machine counted from 0, and 2 are"
    with pytest.raises(MeshdialError, match=sentence):
        gpus("all:devices=3")


def test_gpus_that_cannot_be_counted_are_taken_to_be_there(machine, monkeypatch):
    monkeypatch.setattr(accelerators, "_gpu_numbers", lambda: [])
    machine(JAX_PLATFORMS="rocm")
    assert gpus(DECODE) == ["4", "5"]
    assert names(DECODE) == ["gpu-4", "gpu-5"]


def test_a_part_of_a_tpu_is_refused(machine):
    machine(JAX_PLATFORMS="tpu")
    assert names(f"{TRAIN}+{DECODE}") == ["tpu"]
    with pytest.raises(MeshdialError, match="use the launcher shared"):
        names(DECODE)


def test_the_step_of_a_pool_worker_with_just_the_wanted_gpus_is_its_own(machine):
    machine(**SLURM, CUDA_VISIBLE_DEVICES="0,1")
    assert gpus(DECODE, "pool") == ["0", "1"]
    assert names(DECODE, "pool") == ["gpu-17.3-0", "gpu-17.3-1"]


def test_the_job_of_one_stage_is_its_own(machine):
    """With a step around it or, in a job for several tasks, without."""
    machine(SLURM_JOB_ID="17", MESHDIAL_STAGE_JOB="17", CUDA_VISIBLE_DEVICES="0,1")
    assert gpus(DECODE, "cold") == ["0", "1"]
    machine(SLURM_STEP_ID="0")
    assert gpus(DECODE, "cold") == ["0", "1"]
    machine(MESHDIAL_STAGE_JOB="16")  # as in a job that was submitted from there
    with pytest.raises(MeshdialError, match="mesh decode wants 2 GPUs, up to number 5 of"):
        gpus(DECODE, "cold")


@pytest.mark.parametrize("launcher", ["warm", "shared", "cold"])
@pytest.mark.parametrize("step", [None, "0"], ids=["batch script", "shell of srun"])
def test_two_meshes_in_one_job_never_get_the_same_gpu(machine, launcher, step):
    machine(SLURM_JOB_ID="17", SLURM_STEP_ID=step, CUDA_VISIBLE_DEVICES="0")
    assert gpus("train:devices=1", launcher) == ["0"]
    sentence = "mesh decode wants 1 GPUs, up to number 1 of this machine counted from 0, and 1 are"
    with pytest.raises(MeshdialError, match=sentence):
        gpus("decode:devices=1,first=1", launcher)
    with pytest.raises(MeshdialError, match=sentence):
        names("decode:devices=1,first=1", launcher)
    machine(CUDA_VISIBLE_DEVICES="4,6")
    assert gpus("train:devices=1", launcher) == ["4"]
    assert gpus("decode:devices=1,first=1", launcher) == ["6"]


def test_the_last_gpu_counts_whatever_the_order_of_the_meshes(machine):
    machine(CUDA_VISIBLE_DEVICES="0,1,2")
    with pytest.raises(MeshdialError, match="up to number 5 of this machine"):
        gpus("decode:devices=2,first=4+train:devices=2")


def test_a_gap_between_the_meshes_of_a_process_stays_free(machine):
    assert gpus("train:devices=2+decode:devices=2,first=4") == ["0", "1", "6", "7"]


def test_slurm_tells_which_gpus_those_are(machine):
    machine(**SLURM, CUDA_VISIBLE_DEVICES="0,1", SLURM_STEP_GPUS="6,7", SLURM_JOB_GPUS="5,6,7")
    assert names(DECODE, "pool") == ["gpu-6", "gpu-7"]


def test_workers_in_one_slurm_job_share_its_gpus(machine):
    machine(SLURM_JOB_ID="17", CUDA_VISIBLE_DEVICES="0,1,2,3,4,5")
    assert (gpus(TRAIN), gpus(DECODE)) == (["0", "1", "2", "3"], ["4", "5"])
    assert names(DECODE) == ["gpu-17-4", "gpu-17-5"]


def test_cpu_devices_of_two_jobs_differ(machine):
    machine(SLURM_JOB_ID="17", JAX_PLATFORMS="cpu")
    assert names("all:devices=1") == ["cpu-17-0"]
    machine(SLURM_JOB_ID="18")
    assert names("all:devices=1") == ["cpu-18-0"]


def test_processes_on_one_node_divide_its_gpus(machine):
    machine(**SLURM, CUDA_VISIBLE_DEVICES="0,1,2,3", SLURM_LOCALID="1")
    assert gpus(TRAIN, "cold", num_processes=2) == ["2", "3"]
    machine(CUDA_VISIBLE_DEVICES="0,1")  # two nodes, or bound to its task
    assert gpus(TRAIN, "cold", num_processes=2) == ["0", "1"]
    with pytest.raises(MeshdialError, match="4 devices, which 3 processes cannot share evenly"):
        gpus(TRAIN, "cold", num_processes=3)


def run_jax(tmp_path, layout, num_processes=1, **variables):
    code = (
        "import json, os; from rl.processes import accelerators, runtime;"
        f"layouts = runtime.parse_process_layout({layout!r});"
        f"accelerators.configure_jax(layouts, 'cold', {num_processes});"
        "import jax; c = jax.config; print(json.dumps([c.jax_compilation_cache_dir,"
        "c.jax_persistent_cache_min_compile_time_secs, jax.device_count(), c.jax_platforms]))"
    )
    environment = {
        name: value for name, value in os.environ.items() if name[:4] not in ("JAX_", "XLA_")
    }
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu", **variables}
    command = [sys.executable, "-c", code]
    return json.loads(subprocess.run(command, env=environment, text=True, stdout=-1).stdout)


def test_jax_reads_the_settings(tmp_path):
    cache, seconds, count, _ = run_jax(tmp_path, f"{TRAIN}+{DECODE}")
    assert cache.startswith(str(tmp_path / "meshdial" / "xla") + "/")
    assert (seconds, count) == (0, 6)


def test_a_process_has_its_part_of_a_mesh(tmp_path):
    assert run_jax(tmp_path, TRAIN, num_processes=2)[2] == 2


def test_the_host_computes_on_the_cpu(tmp_path):
    assert run_jax(tmp_path, "host:devices=0", JAX_PLATFORMS="cuda")[2:] == [1, "cpu"]


def test_jax_must_not_be_imported_before():
    import jax  # noqa: F401

    with pytest.raises(RuntimeError, match="before jax is imported"):
        accelerators.configure_jax()
