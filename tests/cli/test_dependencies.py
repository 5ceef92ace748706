"""An installation brings few dependencies for serving, and a line in place of each that is an extra."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import httpx
import pytest

from phasewise._places import user_folder
from phasewise.cli.main import EXTRAS
from tests.support.models.tiny_models import write_tiny_gguf
from tests.support.servers.served_command import own_places

ROOT = Path(__file__).resolve().parents[2]
MOST_FOR_SERVING = 14
MOST_OF_OURS = 310  # 297 on two cores of one node; other hosts may read more of their topology
LATER = {"alembic", "huggingface-hub"}
"""Dependencies that serving imports when they are needed: to make the database, to fetch."""

SERVE = """
import atexit, pathlib, sys
atexit.register(lambda: pathlib.Path(sys.argv[0]).write_text(" ".join(sys.modules)))
sys.argv.pop(0)
from phasewise.cli.main import main
main()
"""
"""The command, which writes down all that it has imported when it ends."""


def _settings() -> configparser.ConfigParser:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    return settings


def _names(requirements: str) -> set[str]:
    return {re.split(r"[\[<>=]", line)[0] for line in requirements.split()}


@pytest.mark.slow
def test_serving_needs_few_direct_dependencies(tmp_path: Path) -> None:
    """Of all that an answer held to a schema and the metrics take."""
    pytest.importorskip(
        "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
    )
    model, modules = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "modules"
    command = [sys.executable, "-c", SERVE, modules, "serve", model, "--port", "0"]
    environment = own_places(tmp_path) | {"PHASEWISE_KV_BUDGET": "256M"}
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    try:
        assert server.stderr is not None
        url = next(line.split()[2] for line in server.stderr if line.startswith("listening on"))
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 8, "structured_outputs": {"choice": ["a"]}}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=60).status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200
        server.terminate()
        assert server.wait(60) == 0
    finally:
        server.kill()
    owners = packages_distributions()
    loaded = {
        owner.lower().replace("_", "-")
        for name in modules.read_text().split()
        for owner in owners.get(name.partition(".")[0], [])
    }

    needed = (loaded | LATER) & _names(_settings()["options"]["install_requires"])
    assert {"typer", "tokenizers", "jinja2", "llguidance", "prometheus-client"} <= needed
    assert len(needed) <= MOST_FOR_SERVING, sorted(needed)
    own = {name for name in modules.read_text().split() if name.startswith("phasewise")}
    assert len(own) <= MOST_OF_OURS, sorted(own)


def test_what_an_extra_has_is_no_dependency() -> None:
    settings = _settings()
    required = _names(settings["options"]["install_requires"])

    for module, extra in EXTRAS.items():
        distribution = module.replace("_", "-")
        assert distribution not in required
        assert distribution in _names(settings["options.extras_require"][extra])


@pytest.mark.many
@pytest.mark.parametrize(
    ("module", "extra", "arguments"),
    [
        ("tree_sitter", "kernels", ["kernels", "raise", "ir/samples/dot_f32.c", "--function", "dot_f32"]),
        pytest.param(
            *(
                "ray",
                "ray",
                [
                    "serve",
                    "MODEL",
                    "--port",
                    "0",
                    "--cluster",
                    "auto",
                    "--prompt-pool",
                    "1x1",
                    "--token-pool",
                    "1x1",
                ],
            ),
            marks=pytest.mark.slow,
        ),
        ("ray", "ray", ["cluster", "status"]),
    ],
)
def test_the_absence_of_an_extra_is_one_line_that_names_it(
    module: str, extra: str, arguments: list[str], tmp_path: Path
) -> None:
    pytest.importorskip(
        "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
    )
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    given = [str(model) if argument == "MODEL" else argument for argument in arguments]
    code = f"import sys; sys.modules[{module!r}] = None; from phasewise.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *given], capture_output=True, text=True, check=False, cwd=ROOT
    )

    assert done.returncode == 1
    assert f"phasewise[{extra}]" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize("kind", ["cache", "config", "data", "state"])
@pytest.mark.parametrize("value", ["/elsewhere", "", " "])
def test_folders_are_those_of_the_xdg_specification(
    kind: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.setenv(f"XDG_{kind.upper()}_HOME", value)

    assert user_folder(kind) == getattr(platformdirs, f"user_{kind}_path")("phasewise")  # type: ignore[arg-type]
