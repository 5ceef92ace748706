"""The recipe of docs/guide/pools.md for a Ray cluster runs as printed, in namespaces of its own.

`pip` installs nothing there, since Ray lies beside the environment, and `ray stop` finds the processes of the
namespace alone.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import platformdirs
import pytest

from tests.support import ROOT
from tests.support.servers import ray_hosts

MODEL = Path("models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf")
PAGE = ROOT / "docs" / "guide" / "pools.md"
PROGRAMS = {
    "pip": "exit 0\n",
    "ray": f'exec {sys.executable} -c "from ray.scripts.scripts import main; main()" "$@"\n',
    "phasewise": f'exec {sys.executable} -m phasewise "$@"\n',
}
INSIDE = "ip link set lo up; ip link add hosts type bridge; ip addr add 10.79.0.1/24 dev hosts; " + (
    "ip link set hosts up; ip route add default dev hosts; mkdir -p /tmp/ray; mount -t tmpfs tmpfs /tmp/ray; "
)
"""An address for Ray to be found by, and a place of its own for its sockets."""
LONGEST_S = 400


def recipe() -> str:
    (block,) = re.findall(
        r"<!-- not run: tests/docs/test_ray_recipe.*?-->\n```console\n(.*?)```", PAGE.read_text(), re.S
    )
    return "\n".join(command.rstrip("\n") for command in re.split(r"^\$ ", block, flags=re.M)[1:])


def test_the_recipe_has_all_that_a_cluster_off_loopback_asks_for() -> None:
    text = recipe()
    before = text.partition("ray start")[0]

    assert all(f"RAY_TLS_{name}=" in before for name in ("SERVER_CERT", "SERVER_KEY", "CA_CERT"))
    assert all(name in before for name in ("RAY_USE_TLS=1", "RAY_AUTH_MODE=token", "RAY_AUTH_TOKEN="))


@pytest.mark.slow
def test_the_recipe_works_as_printed(tmp_path: Path) -> None:
    if (reason := ray_hosts.missing()) is not None:
        pytest.skip(reason)
    fetched = Path(os.environ.get("PHASEWISE_CACHE") or platformdirs.user_cache_path("phasewise")) / MODEL
    if not fetched.is_file():
        pytest.skip("the default model is not here: phasewise models pull smollm2-135m-instruct")
    cached = tmp_path / "cache" / "phasewise" / MODEL
    cached.parent.mkdir(parents=True)
    cached.symlink_to(fetched)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}")
        (programs / name).chmod(0o755)
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PHASEWISE_", "RAY_"))
    } | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(os.path.isabs, sys.path)]),
        "HOME": str(tmp_path),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    script = f"{INSIDE}\nset -em -o pipefail\n{recipe()}\n"
    namespaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    output = tmp_path / "output.txt"
    with output.open("wb") as written:
        done = subprocess.run(
            [*namespaces, "bash", "-xc", script],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=subprocess.STDOUT,
            timeout=LONGEST_S,
            check=False,
        )
    said = output.read_text(errors="replace")

    assert done.returncode == 0, said[-3000:]
    assert "Traceback" not in said
    assert re.findall(r"^(prompt|token)-\S+: \1, running$", said, re.M) == ["prompt", "token"], said[-3000:]
