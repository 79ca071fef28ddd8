"""The manifests of examples/kubernetes: by the schemas of Kubernetes, and by what no schema knows: the flags, ports, metrics and paths of
the programs in them, and the names by which the objects find each other."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hang_guard import HANG_SECONDS
from server_process import COMMAND, server_process

from aengine.server.cli import build_parser
from aengine.server.config.settings import GRPC, Settings, options, read_settings
from aengine.server.http.door import ANTHROPIC_TABLE, TABLE

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
OLDEST, NEWEST = "1.30", "1.37"
CUSTOM = "monitoring.coreos.com/v1"  # no schema of Kubernetes
KUSTOMIZE = "kustomize.config.k8s.io/v1beta1"
PUBLIC_PATHS = {"/", "/health"}  # need no token

Manifest = dict[str, Any]


def read(path: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all((FOLDER / path).read_text("utf-8")) if document]


FILES = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.yaml"))
DOCUMENTS = {path: read(path) for path in FILES}
BASE = [document for path, documents in DOCUMENTS.items() if path.startswith("base/") for document in documents]


def of_kind(kind: str, name: str | None = None) -> list[Manifest]:
    return [document for document in BASE if document["kind"] == kind and name in (None, document["metadata"]["name"])]


def merged(base: Any, patch: Any) -> Any:
    """A strategic merge, as kustomize makes it of the fields that the patches here have: lists of objects are merged by name."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {**base, **{key: merged(base[key], value) if key in base else value for key, value in patch.items()}}
    if isinstance(base, list) and base and isinstance(base[0], dict):
        changes = {one["name"]: one for one in patch}
        assert changes.keys() <= {one["name"] for one in base}
        return [merged(one, changes[one["name"]]) if one["name"] in changes else one for one in base]
    return patch


def patched(folder: str) -> Iterator[Manifest]:
    """The objects that an overlay changes."""
    (overlay,) = read(f"{folder}/kustomization.yaml")
    for patch in overlay["patches"]:
        for change in read(f"{folder}/{patch['path']}"):
            (base,) = of_kind(change["kind"], change["metadata"]["name"])
            yield merged(base, change)


DEPLOYMENTS = {**{document["metadata"]["name"]: document for document in of_kind("Deployment")}, "gpu": next(patched("gpu"))}


def pod_of(deployment: str) -> Manifest:
    pod: Manifest = DEPLOYMENTS[deployment]["spec"]["template"]
    return pod


def container_of(deployment: str) -> Manifest:
    (container,) = pod_of(deployment)["spec"]["containers"]
    return dict(container)


def settings_of(deployment: str) -> Settings:
    """What the program makes of arguments and environment. Raises `SettingsError`; exits for an unknown flag."""
    container = container_of(deployment)
    given = build_parser(GRPC).parse_args(container["args"])
    known = {option.name for option in options(GRPC)}
    environ = {}
    for variable in container.get("env", ()):
        match variable.get("valueFrom"):
            case None:
                environ[variable["name"]] = variable["value"]
            case {"resourceFieldRef": {"containerName": name, "resource": resource, "divisor": "1"}}:
                assert name == container["name"]
                kind, _, what = resource.partition(".")
                environ[variable["name"]] = container["resources"][kind][what]
    return read_settings({name: value for name, value in vars(given).items() if name in known}, environ, given.config, GRPC)


def ports_of(deployment: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in container_of(deployment)["ports"]}


def selected(selector: Mapping[str, str]) -> list[str]:
    """The Deployments whose pods a selector means."""
    return [name for name in ("aengine-replicas", "aengine-router") if selector.items() <= pod_of(name)["metadata"]["labels"].items()]


# ---- schemas -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
@pytest.mark.parametrize("path", FILES)
def test_manifests_are_those_of_the_schemas(path: str, version: str) -> None:
    for document in DOCUMENTS[path]:
        if document["apiVersion"] not in (CUSTOM, KUSTOMIZE) and not path.startswith("gpu/"):
            kubernetes_validate.validate(document, version, strict=True)


def test_what_overlays_make_is_that_of_the_schemas() -> None:
    for document in patched("gpu"):
        kubernetes_validate.validate(document, NEWEST, strict=True)
    assert container_of("gpu")["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container_of("gpu")["args"] == container_of("aengine-replicas")["args"]


def test_the_schemas_refuse_what_is_misspelt() -> None:
    wrong = copy.deepcopy(DEPLOYMENTS["aengine-router"])
    (container,) = wrong["spec"]["template"]["spec"]["containers"]
    container["readinesProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(wrong, NEWEST, strict=True)


def test_every_manifest_is_in_its_kustomization() -> None:
    for path in FILES:
        if path.endswith("kustomization.yaml"):
            (kustomization,) = DOCUMENTS[path]
            named = {*kustomization["resources"], *(patch["path"] for patch in kustomization.get("patches", ()))}
            folder = (FOLDER / path).parent
            assert named - {"../base"} == {other.name for other in folder.glob("*.yaml")} - {"kustomization.yaml"}
            assert all((folder / name).exists() for name in named)


# ---- the programs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_the_program_takes_the_arguments_and_the_environment(deployment: str) -> None:
    server = settings_of(deployment).server
    wanted = {"grpc": server.port, "http": server.http_port, "metrics": server.metrics_port}
    assert ports_of(deployment) == {name: port for name, port in wanted.items() if port is not None}
    assert (server.host, server.metrics_host) == ("0.0.0.0", "0.0.0.0")
    assert server.token_file is not None


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_variables_that_kubernetes_makes_of_services_are_not_there(deployment: str) -> None:
    """The program would refuse AENGINE_PORT, which is made of the Service `aengine`, and others."""
    assert pod_of(deployment)["spec"]["enableServiceLinks"] is False


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_files_of_the_program_are_mounted(deployment: str) -> None:
    pod, container = pod_of(deployment)["spec"], container_of(deployment)
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert len(mounts) == len(volumes)
    assert "emptyDir" in mounts["/tmp"]  # the root directory cannot be written
    paths = {path for argument in container["args"] if (path := argument.partition("=")[2]).startswith("/etc/")}
    assert paths
    for path in paths:
        folder, _, key = path.rpartition("/")
        secret = mounts[folder]["secret"]["secretName"]
        assert re.search(rf"create secret generic {secret} --from-literal={key}=", (FOLDER / "README.md").read_text("utf-8"))


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_probes_ask_what_is_there(deployment: str) -> None:
    container, ports = container_of(deployment), ports_of(deployment)
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        match container[name]:
            case {"grpc": {"port": port}}:
                assert port == ports["grpc"]
            case {"httpGet": {"path": path, "port": port}}:
                assert port == "http"
                assert port in ports
                assert path in PUBLIC_PATHS
            case other:
                raise AssertionError(f"{name}: {other}")
    # A model may take minutes to load, and only then is it asked whether it lives.
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] >= 1800
    paths = {path for _, path, _ in (*TABLE, *ANTHROPIC_TABLE)}
    assert not PUBLIC_PATHS & paths  # those of the table need a token


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_a_drain_has_its_time(deployment: str) -> None:
    server, pod, container = settings_of(deployment).server, pod_of(deployment)["spec"], container_of(deployment)
    before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] >= before + server.drain_delay + server.drain_seconds + 5
    # After a drain that an administrator asked for the liveness probe must not come before its end, where it sees the health.
    probe = container["livenessProbe"]
    if "grpc" in probe:
        assert probe["periodSeconds"] * probe["failureThreshold"] > server.drain_delay + server.drain_seconds


@pytest.mark.parametrize("deployment", DEPLOYMENTS)
def test_containers_may_do_little(deployment: str) -> None:
    pod, container = pod_of(deployment)["spec"], container_of(deployment)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert "memory" in container["resources"]["limits"]


# ---- objects that find each other --------------------------------------------------------------------------------------


def test_selectors_mean_one_deployment() -> None:
    for deployment in of_kind("Deployment"):
        assert selected(deployment["spec"]["selector"]["matchLabels"]) == [deployment["metadata"]["name"]]
        (spread,) = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert spread["labelSelector"] == deployment["spec"]["selector"]
    for service in of_kind("Service"):
        (target,) = selected(service["spec"]["selector"])
        assert all(port["targetPort"] in ports_of(target) for port in service["spec"]["ports"])
    for budget in of_kind("PodDisruptionBudget"):
        assert selected(budget["spec"]["selector"]["matchLabels"]) == [budget["metadata"]["name"]]
    (policy,) = of_kind("NetworkPolicy")
    assert selected(policy["spec"]["podSelector"]["matchLabels"]) == ["aengine-replicas"]
    requests, metrics = policy["spec"]["ingress"]
    assert selected(requests["from"][0]["podSelector"]["matchLabels"]) == ["aengine-router"]
    assert [port["port"] for rule in (requests, metrics) for port in rule["ports"]] == ["grpc", "metrics"]
    (monitor,) = DOCUMENTS["monitoring/podmonitor.yaml"]
    for name in selected(monitor["spec"]["selector"]["matchLabels"]):
        assert all(endpoint["port"] in ports_of(name) for endpoint in monitor["spec"]["podMetricsEndpoints"])
    assert len(selected(monitor["spec"]["selector"]["matchLabels"])) == 2


def test_the_router_finds_the_replicas() -> None:
    (service,) = of_kind("Service", "aengine-replicas")
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    assert f"--backends=dns:///{service['metadata']['name']}:{port['port']}" in container_of("aengine-router")["args"]
    # The resolved address is that of the pod, where no Service translates ports.
    assert port["port"] == ports_of("aengine-replicas")[port["targetPort"]]


def test_the_router_waits_for_the_first_replica_as_long_as_its_probe() -> None:
    router, probe = settings_of("aengine-router").router, container_of("aengine-router")["startupProbe"]
    assert router is not None
    assert 600 <= router.connect_timeout < probe["periodSeconds"] * probe["failureThreshold"]


@contextmanager
def running(deployment: str, files: Path, *changes: tuple[str, str]) -> Iterator[int]:
    """The program with the arguments of its container, on a free port, which this gives. `changes`: of arguments."""
    arguments = " ".join(container_of(deployment)["args"]).replace("=/etc/aengine/", f"={files}/")
    for old, new in ((r"port=\d+", "port=0"), *changes):
        arguments = re.sub(old, new, arguments)
    process = subprocess.Popen([*COMMAND, *arguments.split()], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if found := re.search(r"aengine-grpc listening on 0\.0\.0\.0:(\d+)", line):
                yield int(found[1])
                return
        raise AssertionError("".join(seen))
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_replica_behind_a_router(tmp_path: Path) -> None:
    for name, content in (("token", "of-replicas"), ("replicas/token", "of-replicas"), ("clients/tokens", "alice of-alice")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    with running("aengine-replicas", tmp_path) as replica:
        service = (r"dns:///[\w-]+:\d+", f"dns:///localhost:{replica}")
        with running("aengine-router", tmp_path, service) as router:
            command = [sys.executable, "-m", "aengine.client.cli", "--address", f"127.0.0.1:{router}", "--max-tokens", "4", "It is"]
            (tmp_path / "alice").write_text("of-alice")
            with_token = [*command, "--token-file", str(tmp_path / "alice")]
            done = subprocess.run(with_token, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
            assert (done.returncode, done.stderr.startswith("[MAX_TOKENS, 4 tokens")) == (0, True), done.stderr
            assert subprocess.run(command, capture_output=True, timeout=HANG_SECONDS, check=False).returncode == 1  # without a token


def test_metrics_of_the_autoscaler_are_exported() -> None:
    (scaler,) = of_kind("HorizontalPodAutoscaler")
    target = scaler["spec"]["scaleTargetRef"]
    (deployment,) = of_kind(target["kind"], target["name"])
    assert "replicas" not in deployment["spec"]  # every apply would set it back
    table = (ROOT / "docs" / "metrics.md").read_text("utf-8")  # which is that of the code: tests/server/test_metrics.py
    wanted = {one["pods"]["metric"]["name"]: float(one["pods"]["target"]["averageValue"]) for one in scaler["spec"]["metrics"]}
    for name in wanted:
        assert re.search(rf"^\| `{name}` \| gauge \|", table, re.MULTILINE)
    assert wanted["aengine_sequences_running"] < settings_of("aengine-replicas").engine.num_seqs


# ---- the image ---------------------------------------------------------------------------------------------------------


def instructions() -> list[tuple[str, str]]:
    """Those of the Containerfile, with what follows each."""
    text = re.sub(r"^#.*\n", "", (FOLDER / "Containerfile").read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = [[]]
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found


def test_the_image_is_built_from_what_is_there() -> None:
    _, build, _ = stages()
    for word, rest in build:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources), rest
    (install,) = [rest for word, rest in build if word == "RUN" and "pip install" in rest]
    extras = re.search(r'"\.\[([\w,]+)\]"', install)
    assert extras is not None
    declared = (ROOT / "pyproject.toml").read_text("utf-8").partition("[project.optional-dependencies]")[2]
    assert all(f"\n{extra} = [" in declared for extra in extras[1].split(","))
    modules = [module for word, rest in build if word == "RUN" for module in re.findall(r"python -m (tools\.\w+)", rest)]
    assert modules == ["tools.prebuild"]


def test_kernels_are_compiled_with_what_the_image_has_by_then() -> None:
    """No torch yet: the compiler's module and what it imports are light."""
    code = "import sys, tools.prebuild; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=HANG_SECONDS)


def test_the_image_runs_without_root_and_without_a_compiler() -> None:
    *_, last = stages()
    found = dict(last)
    assert re.fullmatch(r"([1-9]\d*):[1-9]\d*", found["USER"])
    assert int(found["USER"].split(":")[0]) == pod_of("aengine-router")["spec"]["securityContext"]["runAsUser"]
    assert not any(re.search(r"\b(gcc|g\+\+|clang|build-essential)\b", rest) for _, rest in last)
    assert ("ARG", 'PACKAGES=""') in last
    (program,) = json.loads(found["ENTRYPOINT"])
    assert f'\n{program} = "' in (ROOT / "pyproject.toml").read_text("utf-8")
    assert set(found["EXPOSE"].split()) == {str(port) for port in ports_of("aengine-router").values()}
    names = [rest.split() for word, rest in last if word == "ENV"]
    environ = dict(pair.split("=", 1) for pairs in names for pair in pairs)
    assert environ["PATH"].startswith("/opt/aengine/bin:")
    mounts = {mount["mountPath"] for mount in container_of("aengine-replicas")["volumeMounts"]}
    assert {environ["HF_HOME"], environ["HOME"]} <= mounts


@pytest.mark.slow
def test_the_health_check_of_the_image() -> None:
    *_, last = stages()
    command = json.loads(dict(last)["HEALTHCHECK"].partition("CMD ")[2])
    assert command[:2] == ["python", "/opt/aengine/healthy.py"]

    def check(address: str) -> int:
        return subprocess.run([sys.executable, str(FOLDER / "healthy.py"), address], timeout=HANG_SECONDS, check=False).returncode

    with server_process() as server:
        assert check(server.address) == 0
        server.process.terminate()
        server.end()
        assert check(server.address) == 1
