"""The image and deploy/kubernetes: objects are valid, numbers and names are those of the code."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import jsonschema_rs
import pytest
import yaml

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.service import LAST_STEP_S
from phasewise.workflows.serve.settings import Accepting
from tests.support import ROOT
from tests.support.scripts import script
from tests.support.servers.fake_server import FakeServer, fake_server

FOLDER = ROOT / "deploy" / "kubernetes"
DATA = ROOT / "tests" / "data" / "kubernetes"
CONTAINER = (ROOT / "Containerfile").read_text()
VALUES = "prometheus-adapter-values.yaml"
"""Of a Helm chart: no object of Kubernetes."""
Object = dict[str, Any]


def objects() -> list[Object]:
    files = sorted(path for path in FOLDER.glob("*.yaml") if path.name != VALUES)
    return [each for path in files for each in yaml.safe_load_all(path.read_text())]


OBJECTS = objects()


def of_kind(kind: str) -> Object:
    (manifest,) = (each for each in OBJECTS if each["kind"] == kind)
    return manifest


def _checkers() -> dict[str, jsonschema_rs.Validator]:
    schemas = json.loads((DATA / "schemas.json").read_text())
    own = {kind: {"$ref": f"#/$defs/{name}"} for kind, name in schemas["kinds"].items()}
    extensions = json.loads((DATA / "extensions.json").read_text())
    own |= {kind: schema for kind, schema in extensions.items() if kind != "about"}
    return {
        kind: jsonschema_rs.validator_for({**schema, "$defs": schemas["$defs"]})
        for kind, schema in own.items()
    }


CHECKERS = _checkers()


@pytest.mark.parametrize("each", OBJECTS, ids=lambda each: each["kind"])
def test_every_object_is_what_its_schema_says(each: Object) -> None:
    CHECKERS[each["kind"]].validate(each)


def pods() -> list[tuple[Object, Object]]:
    """For each server the pod that states its grace period, and its container."""
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    kserve = of_kind("InferenceService")["spec"]["predictor"]
    return [(pod, pod["containers"][0]), (kserve, of_kind("ServingRuntime")["spec"]["containers"][0])]


PODS = pytest.mark.parametrize(("pod", "container"), pods(), ids=["Deployment", "KServe"])


def option(container: Object, name: str) -> str:
    (value,) = (arg.partition("=")[2] for arg in container["args"] if arg.startswith(f"--{name}="))
    return str(value)


@PODS
def test_the_grace_period_is_longer_than_all_that_happens_in_it(pod: Object, container: Object) -> None:
    leaves_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    readiness = container["readinessProbe"]

    assert pod["terminationGracePeriodSeconds"] > leaves_s + int(option(container, "drain")) + LAST_STEP_S
    assert leaves_s > readiness["periodSeconds"] * readiness["failureThreshold"]


@PODS
def test_probes_ask_what_the_server_answers_without_a_key(pod: Object, container: Object) -> None:
    port = int(option(container, "port"))
    names = {str(each.get("name")): each["containerPort"] for each in container["ports"]}
    paths = {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    for probe, path in paths.items():
        asked = container[probe]["httpGet"]
        assert asked["path"] == path
        assert names.get(asked["port"], asked["port"]) == port
    assert set(names.values()) == {port}
    with fake_server(HttpLimits(api_keys=("sesame",))) as server:
        assert all(httpx.get(f"{server.url}{path}").status_code == 200 for path in paths.values())


@PODS
def test_serve_has_its_options(pod: Object, container: Object) -> None:
    command, model, *options = container["args"]
    reference = (ROOT / "docs" / "reference" / "cli.md").read_text()
    serve = re.split(r"^## ", reference.split("## phasewise serve\n")[1], maxsplit=1, flags=re.M)[0]

    assert command == "serve"
    assert not model.startswith("-")
    assert {name.partition("=")[0] for name in options} <= set(re.findall(r"--[a-z-]+", serve))
    assert option(container, "host") == "0.0.0.0"


@PODS
def test_several_replicas_take_no_batches(pod: Object, container: Object) -> None:
    """Of which one pod alone would know, as long as it lives."""
    assert of_kind("Deployment")["spec"]["replicas"] > 1
    assert of_kind("InferenceService")["spec"]["predictor"]["minReplicas"] > 1
    assert option(container, "batch-bytes") == "0"
    with fake_server(batch_bytes=0) as server:
        refused = httpx.get(f"{server.url}/v1/batches", timeout=60)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_batches")


@PODS
def test_it_is_the_user_of_the_image_and_has_whole_cores(pod: Object, container: Object) -> None:
    (user,) = re.findall(r"^USER (\d+)$", CONTAINER, re.M)
    rights = {**pod.get("securityContext", {}), **container["securityContext"]}
    resources = container["resources"]

    assert rights["runAsUser"] == int(user)
    assert rights["runAsNonRoot"]
    assert not rights["allowPrivilegeEscalation"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["cpu"].isdecimal()


def test_nobody_else_reaches_the_pods() -> None:
    """Pods of the namespace, where the picker is, and namespaces that have a label for it: at one port."""
    policy = of_kind("NetworkPolicy")["spec"]
    (container,) = of_kind("Deployment")["spec"]["template"]["spec"]["containers"]
    (rule,) = policy["ingress"]

    assert policy["policyTypes"] == ["Ingress"]
    assert rule["ports"] == [{"protocol": "TCP", "port": container["ports"][0]["containerPort"]}]
    assert [next(iter(peer)) for peer in rule["from"]] == ["podSelector", "namespaceSelector"]
    assert all(
        peer["namespaceSelector"]["matchLabels"] for peer in rule["from"] if "namespaceSelector" in peer
    )


def test_all_that_select_pods_select_these() -> None:
    deployment, pool = of_kind("Deployment"), of_kind("InferencePool")["spec"]
    labels = deployment["spec"]["template"]["metadata"]["labels"].items()
    port = of_kind("Service")["spec"]["ports"][0]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (exposed,) = container["ports"]

    for selector in (
        deployment["spec"]["selector"]["matchLabels"],
        of_kind("Service")["spec"]["selector"],
        of_kind("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of_kind("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        pool["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels
        assert selector
    assert port["targetPort"] == exposed["name"]
    assert pool["targetPorts"] == [{"number": exposed["containerPort"]}]
    scaled = of_kind("HorizontalPodAutoscaler")["spec"]
    assert scaled["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert scaled["minReplicas"] > of_kind("PodDisruptionBudget")["spec"]["maxUnavailable"]


def picker() -> Object:
    document = yaml.safe_load(of_kind("ConfigMap")["data"]["config.yaml"])
    assert isinstance(document, dict)
    return document


def test_metrics_that_others_read_are_gauges_of_the_server() -> None:
    gauges = {
        family.name
        for family in script("docs/make_http_reference.py").registry().collect()
        if family.type == "gauge"
    }
    (extractor,) = (plugin for plugin in picker()["plugins"] if plugin["type"] == "core-metrics-extractor")
    (engine,) = extractor["parameters"]["engineConfigs"]
    (metric,) = of_kind("HorizontalPodAutoscaler")["spec"]["metrics"]
    (rule,) = yaml.safe_load((FOLDER / VALUES).read_text())["rules"]["custom"]
    read = {value for name, value in engine.items() if name.endswith("Spec")}

    assert extractor["parameters"]["defaultEngine"] == engine["name"]
    assert len(read) == 5
    assert read <= gauges
    assert metric["pods"]["metric"]["name"] == rule["seriesQuery"].partition("{")[0]
    assert metric["pods"]["metric"]["name"] in gauges


LINES = (ROOT / "Containerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()


def is_healthy(server: FakeServer) -> bool:
    """By the image's own check, asked of this server."""
    (line,) = (line for line in LINES if line.startswith("HEALTHCHECK"))
    program, *arguments = json.loads(line.partition("CMD ")[2])
    assert program == "python"
    port = str(urlsplit(server.url).port)
    given = [argument.replace("8000", port) for argument in arguments]
    return subprocess.run([sys.executable, *given], capture_output=True, check=False).returncode == 0


def test_it_is_healthy_while_it_is_ready() -> None:
    with fake_server() as server:
        assert is_healthy(server)
        server.life.drain(30)
        assert not is_healthy(server)


def test_it_is_stopped_by_the_signal_that_drains() -> None:
    assert "STOPSIGNAL SIGTERM" in LINES


@pytest.mark.parametrize(
    "page",
    [
        "Containerfile",
        "docs/guide/installing.md",
        "docs/guide/running-as-a-service.md",
        "docs/guide/phasewise.service",
    ],
)
def test_every_stop_is_told_to_wait_longer_than_the_drain(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    waits = re.findall(
        r"(?:--stop-timeout|TimeoutStopSec=|stop_grace_period:|terminationGracePeriodSeconds:) ?(\d+)", text
    )
    runs = re.findall(r"podman run .*", text)
    assert all("--stop-timeout" in run and "-p 127.0.0.1:" in run for run in runs)
    assert waits
    assert all(int(seconds) > Accepting().drain_s for seconds in waits)


def _instructions() -> list[tuple[str, str]]:
    """Every instruction of the file with what follows it."""
    lines = [line.strip() for line in LINES if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines]


def test_what_runs_is_neither_root_nor_a_shell() -> None:
    instructions = _instructions()
    users = [rest for name, rest in instructions if name == "USER"]

    assert users
    assert all(user.isdecimal() and int(user) > 0 for user in users)
    assert all(json.loads(rest) for name, rest in instructions if name in ("ENTRYPOINT", "CMD"))


UNIT = ROOT / "docs" / "guide" / "phasewise.service"


def _unit() -> dict[str, dict[str, list[str]]]:
    """The settings of the unit, by section; one that is repeated has several values."""
    sections: dict[str, dict[str, list[str]]] = {}
    section: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            name, _, value = line.partition("=")
            section.setdefault(name, []).append(value)
    return sections


def test_the_unit_s_command_is_one_that_phasewise_has() -> None:
    (command,) = _unit()["Service"]["ExecStart"]
    program, *arguments = command.split()
    asked = [sys.executable, "-m", "phasewise", *arguments, "--help"]

    assert program.endswith("/phasewise")
    assert subprocess.run(asked, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_the_unit_s_exposure_is_as_the_guide_says() -> None:
    asked = ["systemd-analyze", "security", "--offline=true", "--threshold=20", str(UNIT)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if "Unknown" in done.stderr or "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze judges no file")

    assert done.returncode == 0, done.stdout[-300:]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    """The program is another one, for systemd asks whether it can be run."""
    (command,) = _unit()["Service"]["ExecStart"]
    text = UNIT.read_text(encoding="utf-8").replace(command.split()[0], sys.executable)
    copy = tmp_path / UNIT.name
    copy.write_text(text, encoding="utf-8")
    asked = ["systemd-analyze", "verify", "--man=no", "--generators=no", "--recursive-errors=no", str(copy)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if "unrecognized" in done.stderr:
        pytest.skip("this systemd-analyze judges no file")

    assert (done.returncode, done.stderr) == (0, "")
