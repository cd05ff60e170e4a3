"""docs/jobset.yaml starts the launchers of one run, and restarts a run that has stopped."""

from pathlib import Path

import pytest
import yaml

from torchtitan_lite.base.errors import STOPPED_EXIT_CODE
from torchtitan_lite.config import find_config, load_config
from torchtitan_lite.run.launch import VARIABLES, Launch

FILE = Path(__file__).parents[2] / "docs/jobset.yaml"


@pytest.fixture(scope="module")
def jobset():
    """The page, its only kind of job, and the only container of its pods."""
    page = yaml.safe_load(FILE.read_text())
    (jobs,) = page["spec"]["replicatedJobs"]
    assert jobs["replicas"] == 1
    job = jobs["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return page, job, container


def test_jobset_makes_each_pod_a_node_of_one_run(jobset):
    page, job, container = jobset
    assert (job["completionMode"], job["parallelism"]) == ("Indexed", job["completions"])
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert all(f"  {name} " in VARIABLES for name in env.keys() - {"TORCHINDUCTOR_CACHE_DIR"})
    (rank,) = [each["valueFrom"] for each in container["env"] if each["name"] == "NODE_RANK"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert rank == {"fieldRef": {"fieldPath": index}}

    words = [*container["command"], *container["args"]]
    assert words[:2] == ["torchtitan-lite", "train"]
    name, (nodes,) = page["metadata"]["name"], page["spec"]["replicatedJobs"]
    for node_rank in range(job["completions"]):
        run = Launch(env | {"NODE_RANK": str(node_rank)}, words[2:])
        assert (run.nnodes, run.node_rank) == (job["completions"], node_rank)
        # A pod's host name is JOBSET-JOB-REPLICA-INDEX, and the subdomain the JobSet's.
        assert run.endpoint.partition(":")[0] == f"{name}-{nodes['name']}-0-0.{name}"
        assert run.ngpu == container["resources"]["limits"]["nvidia.com/gpu"]
    assert find_config(run.words[1]).is_file()
    config = load_config(run.words, world_size=run.nnodes * run.ngpu)
    assert config.checkpoint.enable

    # What outlives a pod is on the volume that all pods share.
    volumes = job["template"]["spec"]["volumes"]
    (shared,) = [each["name"] for each in volumes if "persistentVolumeClaim" in each]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    for path in (config.job.dump_folder, env["TORCHINDUCTOR_CACHE_DIR"]):
        assert path and path.startswith(mounts[shared] + "/")


def test_jobset_gives_a_stopped_run_time_to_save_and_restarts_it_without_limit(jobset):
    page, job, container = jobset
    pod = job["template"]["spec"]
    run = Launch({"CUDA_VISIBLE_DEVICES": ""}, [])
    timeout = run.worker_env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert pod["terminationGracePeriodSeconds"] >= int(timeout)

    # Kubernetes allows a failure policy only if pods are never restarted in place.
    assert (pod["restartPolicy"], job["backoffLimit"]) == ("Never", 0)
    codes = {"containerName": container["name"], "operator": "In", "values": [STOPPED_EXIT_CODE]}
    assert job["podFailurePolicy"] == {"rules": [{"action": "FailJob", "onExitCodes": codes}]}
    (rule,) = page["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
