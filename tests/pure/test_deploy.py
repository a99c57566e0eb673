"""The files of deploy/ agree with the server: probes, times to drain, keys, fields, figures of a dashboard. Nothing is built here."""

import asyncio
import configparser
import json
import re
import shlex
from itertools import combinations
from pathlib import Path

import pytest
import yaml

from jaxkv.cli.main import COMMANDS
from jaxkv.config import load_config
from jaxkv.config.fields import all_fields
from jaxkv.serve.gate import OPEN_PATHS
from jaxkv.serve.keys import API_KEYS
from jaxkv.serve.run import CLOSE_S, EXIT_BROKEN, FLUSH_S
from tests.serving import ServedFake, client

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DRAIN_S = load_config(ROOT / "configs" / "server.yaml").server.drain_s
STOP_S = DRAIN_S + CLOSE_S + FLUSH_S  # from SIGTERM to the end, at the most


def instructions():
    """A Dockerfile as (instruction, arguments), continued lines joined."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


def last(name):
    return [args for instruction, args in instructions() if instruction == name][-1]


def check_command(words):
    """A command line of ours: the command and every overridden field exist."""
    assert words[0] in COMMANDS
    fields = [word.removeprefix("--") for word in words if word.startswith("--")]
    assert set(fields) <= set(all_fields()), fields


def manifests():
    return {doc["kind"]: doc for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for doc in yaml.safe_load_all(path.read_text())}


def container():
    return manifests()["Deployment"]["spec"]["template"]["spec"]["containers"][0]


def test_the_image_is_made_of_the_locked_packages_by_nobody_special():
    steps = " ".join(args for name, args in instructions() if name == "RUN")
    assert "--requirement requirements.lock" in steps and "--no-deps" in steps
    assert last("USER") == "10001:10001" and "--uid 10001" in steps
    assert last("STOPSIGNAL") == "SIGTERM"
    copied = [args.split()[:-1] for name, args in instructions() if name == "COPY" and not args.startswith("--from")]
    assert all((ROOT / source).exists() for sources in copied for source in sources)
    assert not [args for name, args in instructions() if name in ("ENV", "ARG") and "KEY" in args], "no key is baked in"
    kept = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / name).exists() for name in kept) and {"jaxkv", "scheduler", "models", "configs", "requirements.lock"} <= set(kept)


def test_the_image_is_asked_for_its_health_and_stopped_in_time():
    (path,) = re.findall(r"http://127\.0\.0\.1:8000(/\w+)", last("HEALTHCHECK"))
    assert path == "/health" and path in OPEN_PATHS
    entry, words = json.loads(last("ENTRYPOINT")), json.loads(last("CMD"))
    assert entry == ["jaxkv"]
    check_command(words)
    assert words[words.index("--server.port") + 1] == last("EXPOSE") == "8000"
    text = (DEPLOY / "Dockerfile").read_text()
    assert int(re.findall(r"--stop-timeout (\d+)", text)[0]) > STOP_S and API_KEYS in text


def unit():
    parser = configparser.RawConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read(DEPLOY / "jaxkv.service")
    return parser


def test_the_unit_lets_the_server_drain_and_starts_it_again_only_where_that_helps():
    service = unit()["Service"]
    assert float(service["TimeoutStopSec"]) > STOP_S and service["KillSignal"] == "SIGTERM"
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == "2" != str(EXIT_BROKEN)
    check_command(shlex.split(service["ExecStart"])[1:])


def test_the_unit_gives_the_server_little_and_its_keys_to_nobody_else():
    service = unit()["Service"]
    assert service["User"] == "jaxkv"
    firm = ("NoNewPrivileges", "ProtectHome", "PrivateTmp", "PrivateDevices", "ProtectKernelTunables", "ProtectKernelModules",
            "ProtectControlGroups", "RestrictNamespaces", "RestrictSUIDSGID", "LockPersonality", "RestrictRealtime")  # fmt: skip
    assert {service[name] for name in firm} == {"yes"} and service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == "" and service["SystemCallFilter"] == "@system-service"
    text = (DEPLOY / "jaxkv.service").read_text()
    loaded = set(re.findall(r"^LoadCredential=([\w-]+):", text, re.MULTILINE))
    assert loaded == set(re.findall(r"\$\{CREDENTIALS_DIRECTORY\}/([\w-]+)", service["ExecStart"])) == {"keys", "operator-keys"}
    assert service["Environment"] == f"JAXKV_CACHE=%C/{service['CacheDirectory']}"


def test_the_manifests_hold_a_configuration_that_loads():
    config = load_config(yaml.safe_load(manifests()["ConfigMap"]["data"]["server.yaml"]))
    spec, mounts = manifests()["Deployment"]["spec"]["template"]["spec"], {m["mountPath"]: m["name"] for m in container()["volumeMounts"]}
    check_command(container()["args"])
    assert container()["args"][1] == "/etc/jaxkv/config/server.yaml" and mounts["/etc/jaxkv/config"] == "config"
    assert Path(str(config.server.api_key_file)) == Path("/etc/jaxkv/keys/api-keys")
    assert Path(str(config.server.operator_key_file)).parent == Path("/etc/jaxkv/keys") and mounts["/etc/jaxkv/keys"] == "keys"
    assert mounts[str(config.run.cache_dir)] == "cache"
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(volumes) == set(mounts.values())
    assert "secret" in volumes["keys"] and volumes["config"]["configMap"]["name"] == manifests()["ConfigMap"]["metadata"]["name"]
    assert volumes["cache"]["persistentVolumeClaim"]["claimName"] == manifests()["PersistentVolumeClaim"]["metadata"]["name"]
    (port,) = container()["ports"]
    assert port == {"name": "http", "containerPort": config.server.port} and config.server.host == "0.0.0.0"
    limit_mib = int(container()["resources"]["limits"]["memory"].removesuffix("Gi")) * 1024
    assert config.scheduler.host_budget_mib < limit_mib / 2


def test_probes_ask_for_what_each_is_about():
    probes = {name: container()[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["httpGet"] for name, probe in probes.items()} == {
        "startup": {"path": "/health", "port": "http"},
        "readiness": {"path": "/health", "port": "http"},
        "liveness": {"path": "/version", "port": "http"},
    }
    assert {probe["httpGet"]["path"] for probe in probes.values()} <= OPEN_PATHS, "probes have no key"
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == 600


def test_the_cluster_waits_longer_than_a_drain_and_routes_to_the_port():
    config = load_config(yaml.safe_load(manifests()["ConfigMap"]["data"]["server.yaml"]))
    spec = manifests()["Deployment"]["spec"]
    pause_s = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    stop_s = pause_s + config.server.drain_s + CLOSE_S + FLUSH_S
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > stop_s
    assert spec["replicas"] == 1 and spec["strategy"] == {"type": "Recreate"}
    labels = spec["template"]["metadata"]["labels"]
    assert manifests()["Service"]["spec"]["selector"] == spec["selector"]["matchLabels"] == labels
    assert manifests()["Service"]["spec"]["ports"][0]["targetPort"] == "http"


def test_the_pod_may_do_little_and_is_the_images_user():
    pod, inside = manifests()["Deployment"]["spec"]["template"]["spec"], container()["securityContext"]
    assert pod["securityContext"]["runAsNonRoot"] and f"{pod['securityContext']['runAsUser']}:10001" == last("USER")
    assert pod["securityContext"]["fsGroup"] == 10001 and not pod["automountServiceAccountToken"]
    assert inside == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def test_prometheus_asks_where_the_figures_are_and_with_a_key():
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["authorization"]["type"] == "Bearer"
    assert job["static_configs"] == [{"targets": [f"127.0.0.1:{load_config(ROOT / 'configs' / 'server.yaml').server.port}"]}]


@pytest.fixture(scope="module")
def exposed():
    """Every figure with the labels it has."""

    async def go():
        async with client(ServedFake()) as http:
            await http.get("/nowhere")
            return (await http.get("/metrics")).text

    found = {}
    for name, labels in re.findall(r"^(jaxkv_\w+)(?:\{(.*)\})? ", asyncio.run(go()), re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    return found


BOARD = json.loads((DEPLOY / "grafana.json").read_text())
TARGETS = [(panel["title"], target["expr"], target["legendFormat"]) for panel in BOARD["panels"] for target in panel.get("targets", [])]


@pytest.mark.parametrize(("title", "expr", "legend"), TARGETS)
def test_the_dashboard_names_only_figures_and_labels_that_exist(exposed, title, expr, legend):
    names = re.findall(r"jaxkv_\w+", expr)
    assert names and set(names) <= exposed.keys()
    labels = set(re.findall(r"\bby \((\w+)\)", expr)) | set(re.findall(r'(\w+)="', expr)) | set(re.findall(r"\{\{(\w+)\}\}", legend))
    assert labels <= set().union(*(exposed[name] for name in names))
    assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")


def test_counters_are_read_as_rates_and_histograms_by_their_buckets():
    for _, expr, _ in TARGETS:
        for name in re.findall(r"jaxkv_\w+", expr):
            is_total = name.endswith("_total") and not expr.startswith("sum(jaxkv_compilations")
            assert not is_total or re.search(rf"(?:rate|increase)\({name}", expr), expr
            assert not name.endswith("_bucket") or expr.startswith("histogram_quantile("), expr
            assert re.search(rf'{name}{{job=~"\$job", instance=~"\$instance"', expr), expr


def test_the_dashboard_shows_every_figure_there_is_but_totals_of_what_it_shows_in_parts(exposed):
    shown = {re.sub(r"_(bucket|total)$", "", name) for _, expr, _ in TARGETS for name in re.findall(r"jaxkv_\w+", expr)}
    there = {re.sub(r"_(bucket|sum|count|total|created)$", "", name) for name in exposed}
    assert there - shown == {"jaxkv_info", "jaxkv_parks", "jaxkv_restores", "jaxkv_pool_pages_used"}


def test_panels_do_not_lie_on_each_other():
    places = [panel["gridPos"] for panel in BOARD["panels"]]
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(places) and all(p["x"] + p["w"] <= 24 for p in places)
    for one, other in combinations(places, 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        assert apart_x or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"], (one, other)


def test_the_dashboards_choices_come_from_a_figure_that_exists(exposed):
    queries = [str(choice["query"]) for choice in BOARD["templating"]["list"]]
    assert {name for query in queries for name in re.findall(r"jaxkv_\w+", query)} == {"jaxkv_info"} <= exposed.keys()
