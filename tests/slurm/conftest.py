"""A SLURM cluster for the whole session, and workplaces whose stages are its jobs."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from rl.artifacts import artifact_id

from ..workflow.conftest import LIMIT_S, ROOT, TINY, Workplace, kill, pids_where, wait_for
from . import cluster

HERE = Path(__file__).parent
MESHES = {"train": {"devices": 1}, "decode": {"devices": 1}}
ROLES = {"actor": "train", "reference": "train", "rollout": "decode", "reward": "decode"}
FIRST_POLICY = "results/tiny/0000/policy"
COLUMNS = {"id": "%i", "state": "%T", "pool": "%P", "rule": "%k", "node": "%N", "gres": "%b"}
COLUMNS |= {"folder": "%Z"}


def reason_to_skip() -> str:
    """Why none of this can be had here; empty where it can."""
    reason = cluster.reason_to_skip()
    if not reason and find_spec("snakemake_executor_plugin_slurm") is None:
        reason = "no SLURM executor: pip install -e '.[slurm]'"
    return reason


def pytest_collection_modifyitems(items):
    """All of this takes minutes; where there can be no cluster it is skipped, and says why. With
    CI=true it fails then."""
    reason = reason_to_skip()
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slow)
            if reason and not os.environ.get("CI"):
                item.add_marker(pytest.mark.skip(reason=reason))


class Submitter(Workplace):
    """Runs Snakemake with the SLURM profile; `stall` makes one of the stages to come wait."""

    profile = ROOT / "profiles" / "slurm"

    def command(self, *arguments, config: Path = TINY) -> list[str]:
        config = self.config() if config is TINY else config
        return [
            *(sys.executable, str(HERE / "impatient_snakemake.py")),
            *("--snakefile", str(ROOT / "Snakefile")),
            *("--workflow-profile", str(self.profile)),
            *("--directory", str(self.folder)),
            *("--configfile", str(config), *arguments),
        ]

    def config(self, **more) -> Path:
        """The tiny experiment in two iterations, by default on two meshes."""
        dial = {"cluster": {"meshes": MESHES, "roles": ROLES}}
        return written(self.folder / "config.yaml", dial | more)

    def adapt(self, rule: str, **resources) -> None:
        """As someone who writes other resources of a rule into the profile."""
        profile = yaml.safe_load((self.profile / "config.yaml").read_text())
        profile["set-resources"][rule] = profile["set-resources"][rule] | resources
        self.profile = self.folder / "profile"
        self.profile.mkdir()
        (self.profile / "config.yaml").write_text(yaml.safe_dump(profile))

    def forget_the_last_update(self) -> str:
        """Remove what it made; the target that brings it back."""
        for name in ("policy", "weights"):
            shutil.rmtree(self.path("tiny", "0002", name))
        return "results/tiny/0002/weights"

    def stall(self, stage: str) -> Path:
        """The file that says that the stage stalls."""
        mark = self.folder / "stalled"
        self.environment |= {
            "MESHDIAL_STAGES_MODULE": "tests.slurm.stalling_stages",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "STALLED_STAGE": stage,
            "STALL_MARK": str(mark),
        }
        return mark

    def start_and_stall(self, stage: str, *arguments) -> tuple[subprocess.Popen, dict]:
        """Snakemake at work, and its job that has stalled."""
        mark = self.stall(stage)
        process = self.start(*arguments)
        wait_for(lambda: mark.exists() or process.poll() is not None)
        assert process.poll() is None, self.printed()
        (job,) = (job for job in self.jobs() if job["state"] == "RUNNING")
        return process, job

    def close(self) -> None:
        """What ran on a node that was lost has outlived its job."""
        own = str(self.folder).encode()
        kill(pids_where(lambda entry: own in (entry / "cmdline").read_bytes()))
        super().close()

    def ended(self, process: subprocess.Popen) -> int:
        """The exit status of a started Snakemake, once it has one."""
        return process.wait(LIMIT_S)

    def printed(self) -> str:
        return (self.folder / "started.log").read_text()

    def artifacts(self) -> dict[str, str | bytes]:
        return artifacts_of(self.path("tiny"))

    def jobs(self) -> list[dict]:
        """All that SLURM knows of, in the order of their submission."""
        form = "|".join(COLUMNS.values())
        table = cluster.run("squeue", "-ha", "-S", "i", "-t", "all", "-o", form)
        rows = (dict(zip(COLUMNS, line.split("|"), strict=True)) for line in table.splitlines())
        return [row for row in rows if row["folder"] == str(self.folder)]


def written(path: Path, changes: dict) -> Path:
    path.write_text(yaml.safe_dump(yaml.safe_load(TINY.read_text()) | {"iterations": 2} | changes))
    return path


def artifacts_of(folder: Path) -> dict[str, str | bytes]:
    """What must be equal between runs: tables to the byte, policies and weights by content id."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.glob("0*/*.parquet")}
    for path in (*folder.glob("0*/policy"), *folder.glob("0*/weights")):
        found[str(path.relative_to(folder))] = artifact_id(path)
    return found


@pytest.fixture(scope="session")
def slurm():
    assert not reason_to_skip()
    with cluster.running_cluster():
        yield


@pytest.fixture(scope="session")
def local(tmp_path_factory):
    """The tiny experiment in two iterations, run on this machine without SLURM."""
    place = Workplace(tmp_path_factory.mktemp("local"))
    place.run(config=written(place.folder / "config.yaml", {}))
    yield place
    place.close()


@pytest.fixture(scope="session")
def stuck(slurm, tmp_path_factory):
    """A workplace whose first job gets a minute and takes longer, with its Snakemake. It is started
    before all others, which have run by the time that this one is over."""
    place = Submitter(tmp_path_factory.mktemp("stuck"))
    place.adapt("start_policy_kept", runtime=1)
    process, job = place.start_and_stall("start_policy", "--retries", "0", "--", FIRST_POLICY)
    yield place, process, job
    process.kill()
    place.close()


@pytest.fixture(scope="session")
def submitted(stuck, tmp_path_factory):
    """The tiny experiment on two pools, undisturbed. Tests must not change it."""
    place = Submitter(tmp_path_factory.mktemp("submitted"))
    place.output = place.run()
    yield place
    place.close()


@pytest.fixture
def copied(submitted, tmp_path):
    """A copy of the finished run to change, with Snakemake's records of it."""
    place = Submitter(tmp_path / "copied")
    for name in ("results", ".snakemake"):
        shutil.copytree(submitted.folder / name, place.folder / name, symlinks=True)
    yield place
    place.close()
