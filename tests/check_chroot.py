"""Install a wheel in Debian systems that have Python and no compiler, and answer requests there.

    python3 tests/check_chroot.py WHEEL MODEL.gguf SCRATCH_DIR [SUITE ...]

For the oldest Debian with Python 3.11 (bookworm) and the current one (trixie), or the suites that are named.
Each is made by debootstrap in SCRATCH_DIR/SUITE-MACHINE, or used as it is where that is there already. The
wheels of all dependencies are fetched here, for the system's own Python, and installed without an index. Then
`doctor`, `doctor --bits`, `generate`, and `serve` with a request run.
Needs root, debootstrap, iproute2 and Debian's archive.

The machine is that of the wheel. Another one than this is emulated, by qemu-user through the kernel's binfmt
(Debian: qemu-user-static, binfmt-support): slow, so the model should be a tiny one.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from check_manylinux import DEBIAN_NAMES

SUITES = ("bookworm", "trixie")
ARCHIVE = "http://deb.debian.org/debian"
PACKAGES = "python3,python3-venv,ca-certificates"
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}
PHASEWISE = "/venv/bin/phasewise"
ASK = """
import json, subprocess, time, urllib.request
command = ["/venv/bin/phasewise", "serve", "/model.gguf", "--port", "8123", "--served-model-name", "m"]
server = subprocess.Popen(command)
def get(path, body=None):
    url, headers = "http://127.0.0.1:8123" + path, {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers)
    return urllib.request.urlopen(request, timeout=600).read()
until = time.monotonic() + 600
while time.monotonic() < until:
    try:
        get("/ready")
        break
    except OSError:
        assert server.poll() is None, "the server has ended"
        time.sleep(0.1)
body = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
usage = json.loads(get("/v1/completions", json.dumps(body).encode()))["usage"]
assert usage["prompt_tokens"] == 3 and usage["completion_tokens"] > 0, usage
server.terminate()
assert server.wait(600) == 0
"""


def in_system(
    root: Path, *command: str, user: str = "0", environment: Mapping[str, str] = ENVIRONMENT
) -> str:
    """The output of a command in the system at `root`, with /proc and a loopback interface, no network."""
    inside = ("unshare", "--mount", "--pid", "--net", "--fork", f"--mount-proc={root}/proc")
    shell = ("sh", "-c", 'ip link set lo up; exec chroot --userspec="$0:$0" "$@"', user, root)
    done = subprocess.run(
        (*inside, *shell, *command), env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{root.name}: {' '.join(command)[:200]} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def made_system(suite: str, machine: str, scratch: Path) -> Path:
    """A Debian of `machine`'s with Python, without a compiler."""
    root = scratch / f"{suite}-{machine}"
    if not root.exists():
        what = (f"--arch={DEBIAN_NAMES[machine]}", "--variant=minbase", f"--include={PACKAGES}")
        subprocess.run(("debootstrap", *what, suite, root, ARCHIVE), check=True, stdout=subprocess.DEVNULL)
    compilers = in_system(root, "sh", "-c", "command -v cc gcc clang || true").strip()
    assert not compilers, f"{root.name} has a compiler: {compilers}"
    return root


def fetch_wheels(wheel: Path, machine: str, version: str, wheels: Path) -> None:
    """`wheel`, and wheels of all that it depends on, for `machine` and that version of Python."""
    shutil.rmtree(wheels, ignore_errors=True)
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in range(17, 37)]
    asked = ("--only-binary=:all:", f"--python-version={version}", f"--platform=manylinux2014_{machine}")
    download = (sys.executable, "-m", "pip", "download", "-q", "-d", wheels, *asked, *platforms, wheel)
    subprocess.run(download, check=True)


def check(suite: str, wheel: Path, model: Path, scratch: Path) -> None:
    machine = machine_of(wheel)
    root = made_system(suite, machine, scratch)
    version = in_system(root, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    fetch_wheels(wheel, machine, version, root / "wheels")
    shutil.copy(model, root / "model.gguf")
    install = ("-q", "--no-index", "--no-compile", "--find-links=/wheels", "phasewise")
    in_system(root, "python3", "-m", "venv", "--clear", "/venv")
    in_system(root, "/venv/bin/pip", "install", *install)
    in_system(root, PHASEWISE, "doctor")
    in_system(root, PHASEWISE, "doctor", "--bits")
    in_system(root, PHASEWISE, "generate", "/model.gguf", "-p", "a", "-n", "4")
    in_system(root, "python3", "-c", ASK)
    where = f"{suite}, {machine}{'' if machine == platform.machine() else ' (emulated)'}, Python {version}"
    works = "doctor, generate and serve work, and all bits are right"
    print(f"{where}, no compiler: {wheel.name} installs; {works}", flush=True)


def machine_of(wheel: Path) -> str:
    """The machine that a wheel is for, which this one is or can emulate."""
    machines = [machine for machine in DEBIAN_NAMES if wheel.stem.endswith(machine)]
    if not machines:
        sys.exit(f"{wheel.name} is for none of {', '.join(DEBIAN_NAMES)}")
    emulator = Path("/proc/sys/fs/binfmt_misc", f"qemu-{machines[0]}")
    if machines[0] != platform.machine() and not emulator.exists():
        sys.exit(f"no {emulator}: install qemu-user-static, then update-binfmts --enable {emulator.name}")
    return machines[0]


def main() -> None:
    wheel, model, scratch = (Path(word).resolve() for word in sys.argv[1:4])
    scratch.mkdir(parents=True, exist_ok=True)
    for suite in sys.argv[4:] or SUITES:
        check(suite, wheel, model, scratch)


if __name__ == "__main__":
    main()
