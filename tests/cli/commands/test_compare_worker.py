"""The worker by which benchmarks/compare.py times phasewise answers what compare asks."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.models.tiny_models import write_tiny_gguf

WORKER = Path(__file__).resolve().parents[3] / "benchmarks" / "peers" / "phasewise_worker.py"


def test_each_phase_is_timed_when_asked(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    asked = [
        {"phase": "prefill", "n": 8, "sequences": 1},
        {"phase": "decode", "n": 2, "sequences": 1},
        {"phase": "decode", "n": 2, "sequences": 2},
    ]
    lines = "".join(json.dumps(step) + "\n" for step in asked)
    ended = subprocess.run(
        [sys.executable, WORKER, tmp_path / "tiny.gguf", "1"],
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert ended.returncode == 0, ended.stderr
    ready, *answers = map(json.loads, ended.stdout.splitlines())
    assert ready == {"ready": True}
    assert len(answers) == len(asked)
    assert all(answer["ns"] > 0 for answer in answers)
