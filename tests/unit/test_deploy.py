"""What stands in deploy/ is whole: it builds, it is valid, and it keeps what the documentation promises."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_pd_guard import __version__

yaml = pytest.importorskip("yaml")
DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kubernetes/base"
CHART = DEPLOY / "helm"
KUSTOMIZATIONS = [BASE, *sorted((DEPLOY / "kubernetes/overlays").iterdir())]

needs_kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


def built(folder):
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [resource for resource in yaml.safe_load_all(done.stdout) if resource]


def pods(resources):
    """(name, pod spec) of everything that runs."""
    for resource in resources:
        if resource["kind"] == "Deployment":
            yield resource["metadata"]["name"], resource["spec"]["template"]["spec"]
        if resource["kind"] == "LeaderWorkerSet":
            for part in ("leaderTemplate", "workerTemplate"):
                yield f"{resource['metadata']['name']} {part}", resource["spec"]["leaderWorkerTemplate"][part]["spec"]


def servers(resources):
    return {name: pod for name, pod in pods(resources) if name.split()[0] in ("prefill", "decode")}


def charted(**values):
    """What the Helm chart makes of these values, by the command or by Helm's library."""
    if shutil.which("helm"):
        command = ["helm", "template", "pd-guard", str(CHART), *(f"--set-json={name}={json.dumps(value)}" for name, value in values.items())]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(done.stderr)
        text = done.stdout
    else:
        helm = pytest.importorskip("helm_python", reason="neither helm nor helm-python-sdk is installed")
        try:
            text = helm.Chart.load(CHART).render(values, name="pd-guard")["pd-guard/templates/all.yaml"]
        except helm.HelmError as error:
            raise ValueError(str(error)) from error
    return [resource for resource in yaml.safe_load_all(text) if resource]


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_every_server_is_guarded_and_both_sides_agree(folder):
    resources = built(folder)
    found = servers(resources)
    assert {name.split()[0] for name in found} == {"prefill", "decode"}
    (settings,) = [r for r in resources if r["kind"] == "ConfigMap"]
    assert settings["data"]["SGLANG_PD_GUARD_PEER"] == ("prefer" if folder.name == "upgrade" else "require")
    for name, pod in found.items():
        (container,) = pod["containers"]
        args = container["args"]
        assert {"--enable-pd-guard", "--enable-metrics", "--context-length=$(CONTEXT)"} <= set(args), name
        assert {"configMapRef": {"name": settings["metadata"]["name"]}} in container["envFrom"]
        assert f"--disaggregation-mode={name.split()[0]}" in args
        assert container["image"] == f"sglang-pd-guard:{__version__}"
        assert pod["terminationGracePeriodSeconds"] >= 300


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_a_stuck_peer_kills_no_server_and_ready_means_that_the_pair_generates(folder):
    resources = built(folder)
    for name, pod in servers(resources).items():
        probe = pod["containers"][0].get("livenessProbe")
        assert (probe is None) == name.endswith("workerTemplate")
        assert probe is None or set(probe) & {"tcpSocket", "httpGet", "exec"} == {"tcpSocket"}
    router = dict(pods(resources))["router"]["containers"][0]
    assert "/v1/completions" in router["readinessProbe"]["exec"]["command"][-1]
    compile(router["readinessProbe"]["exec"]["command"][-1], "readiness", "exec")
    assert "--disable-circuit-breaker" in router["args"]


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_only_the_router_and_the_servers_reach_the_servers(folder):
    (policy,) = [r["spec"] for r in built(folder) if r["kind"] == "NetworkPolicy" and r["metadata"]["name"] == "servers"]
    assert policy["policyTypes"] == ["Ingress"]
    assert all(rule.get("from") for rule in policy["ingress"])


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda folder: folder.name)
def test_the_resources_are_valid(folder):
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("kubernetes-validate is not installed (pip install kubernetes-validate)")
    import kubernetes_validate

    for resource in built(folder):
        if resource["kind"] not in ("LeaderWorkerSet", "PodMonitor"):  # custom resources, whose schemas are not at hand
            kubernetes_validate.validate(resource, "1.31", strict=True)


@needs_kubectl
@pytest.mark.parametrize("overlay", ["rdma", "leaderworkerset"])
def test_an_overlay_keeps_what_it_adds_through_an_upgrade(overlay, tmp_path):
    def with_components(*names):
        shutil.copytree(DEPLOY / "kubernetes", tmp_path / "_".join(names) / "kubernetes")
        folder = tmp_path / "_".join(names) / "kubernetes/overlays" / overlay
        text = (folder / "kustomization.yaml").read_text() + f"components: [{', '.join(f'../../components/{name}' for name in names)}]\n"
        (folder / "kustomization.yaml").write_text(text)
        return built(folder)

    def pods_of(resources):
        return re.sub(r"pd-guard-\w{10}\b", "pd-guard", json.dumps(servers(resources), sort_keys=True))

    resources = with_components("upgrade", "monitoring")
    (settings,) = [r["data"] for r in resources if r["kind"] == "ConfigMap"]
    assert settings["SGLANG_PD_GUARD_PEER"] == "prefer"
    assert pods_of(resources) == pods_of(built(DEPLOY / "kubernetes/overlays" / overlay))
    assert [r["metadata"]["name"] for r in resources if r["kind"] == "PodMonitor"] == ["sglang"]
    if overlay == "rdma":
        for pod in servers(with_components("unguarded")).values():
            assert pod["hostNetwork"] and not [arg for arg in pod["containers"][0]["args"] if "guard" in arg]


@needs_kubectl
def test_the_chart_is_the_base():
    def plain(resources):
        """Without what each adds so that new settings start new pods: a name with a hash, an annotation."""
        text = re.sub(r"pd-guard-\w{10}\b", "pd-guard", json.dumps(resources))
        for resource in (found := json.loads(text)):
            if resource["kind"] == "Deployment":
                annotations = resource["spec"]["template"]["metadata"].get("annotations", {})
                annotations.pop("checksum/settings", None)
                resource["spec"]["template"]["metadata"]["annotations"] = annotations
        return sorted(found, key=lambda resource: (resource["kind"], resource["metadata"]["name"]))

    base = built(BASE)
    (settings,) = [r["data"] for r in base if r["kind"] == "ConfigMap"]
    assert plain(charted(model=settings["MODEL"], context=int(settings["CONTEXT"]))) == plain(base)


def test_the_chart_takes_its_values():
    given = {"replicas": 0, "args": ["--tp-size=2"], "resources": {"limits": {"nvidia.com/gpu": "2"}}, "pod": {"hostNetwork": True}}
    given |= {"env": [{"name": "A", "value": "b"}], "container": {"securityContext": {"runAsUser": 0}}}
    resources = charted(model="m", context=100, peer="prefer", image="i:1", prefill=given)
    (settings,) = [r["data"] for r in resources if r["kind"] == "ConfigMap"]
    assert settings == {"MODEL": "m", "CONTEXT": "100", "BACKEND": "mooncake", "SGLANG_PD_GUARD_PEER": "prefer"}
    deployments = {r["metadata"]["name"]: r["spec"] for r in resources if r["kind"] == "Deployment"}
    pod = deployments["prefill"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (deployments["prefill"]["replicas"], pod["hostNetwork"], container["resources"]) == (0, True, given["resources"])
    assert container["args"][-1] == "--tp-size=2" and "--enable-pd-guard" in container["args"]
    assert container["securityContext"] == {"runAsUser": 0} and [entry["name"] for entry in container["env"]] == ["SGLANG_HOST_IP", "A"]
    decode = deployments["decode"]["template"]["spec"]
    assert "hostNetwork" not in decode and "--tp-size=2" not in decode["containers"][0]["args"]
    assert all(spec["template"]["spec"]["containers"][0]["image"] == "i:1" for spec in deployments.values())

    def sums(**values):
        return {r["spec"]["template"]["metadata"]["annotations"]["checksum/settings"] for r in charted(**values) if r["kind"] == "Deployment"}

    assert len(sums(model="m", context=100) | sums(model="m", context=100, peer="prefer")) == 2


def test_the_chart_can_leave_the_guard_out():
    text = json.dumps(servers(charted(model="m", context=100, guard=False)))
    assert "--enable-metrics" in text and "--enable-pd-guard" not in text


@pytest.mark.parametrize("values", [{}, {"model": "m"}, {"model": "m", "context": 1, "peer": "none"}, {"model": "m", "context": 1, "decode": {"replica": 2}}])
def test_the_chart_refuses_what_it_does_not_know(values):
    with pytest.raises(ValueError, match="schema"):
        charted(**values)


def test_the_chart_is_of_this_version():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    assert yaml.safe_load((CHART / "values.yaml").read_text())["image"] == f"sglang-pd-guard:{__version__}"


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed (Debian: apt-get install docker-compose)")
def test_docker_compose_reads_the_file():
    command = ["docker-compose", "-f", str(DEPLOY / "compose/compose.yaml"), "config"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MODEL": "a/b", "CONTEXT": "4096"})
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)["services"]
    assert all("--model-path a/b " in read[name]["command"] and "--context-length 4096 " in read[name]["command"] for name in ("prefill", "decode"))
    without = subprocess.run(command, capture_output=True, text=True, env={k: v for k, v in os.environ.items() if k != "MODEL"} | {"CONTEXT": "1"})
    assert without.returncode != 0 and "set MODEL" in without.stderr


def test_compose_guards_both_servers_and_mounts_what_exists():
    compose = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text())
    assert set(compose["services"]) == {"prefill", "decode", "router", "prometheus"}
    for name in ("prefill", "decode"):
        command = compose["services"][name]["command"]
        assert f"--disaggregation-mode {name} " in command
        assert "--enable-pd-guard" in command and "--enable-metrics" in command and "--context-length ${CONTEXT" in command
    assert (DEPLOY / "compose" / compose["services"]["prefill"]["build"]["context"] / compose["services"]["prefill"]["build"]["dockerfile"]).exists()
    for volume in compose["services"]["prometheus"]["volumes"]:
        assert (DEPLOY / "compose" / volume.split(":")[0]).is_file()
    # Nothing listens on the host's other addresses.
    assert all(port.startswith("127.0.0.1:") for service in compose["services"].values() for port in service.get("ports", ()))


def test_the_image_copies_what_exists_and_checks_itself():
    lines = (DEPLOY / "docker/Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    assert copied and all((DEPLOY.parent / word).exists() for word in copied)
    assert lines[-1].endswith("pd-guard doctor")
    kept = {line[1:] for line in (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(copied)


def test_what_the_image_copies_can_be_installed(tmp_path):
    lines = (DEPLOY / "docker/Dockerfile").read_text().splitlines()
    for line in lines:
        if line.startswith("COPY"):
            for word in line.split()[1:-1]:
                source = DEPLOY.parent / word
                copy = shutil.copytree if source.is_dir() else shutil.copy
                copy(source, tmp_path / word)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build", "--build-base", "build"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    built = tmp_path / "build/lib/sglang_pd_guard"
    assert (built / "plugin.py").exists() and list((built / "patches").glob("*/*.patch"))
