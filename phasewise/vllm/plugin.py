"""The entry point `phasewise` of vLLM's general plugins, which vLLM calls in each of its processes.

It does nothing unless PHASEWISE_VLLM asks for it: phasewise may be installed beside vLLM for other reasons,
and a server's numbers must not change by that.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from phasewise._version import __version__

if TYPE_CHECKING:
    from phasewise.torch.packed_linear import WeightFormat

VARIABLE = "PHASEWISE_VLLM"
OFF = ("", "off")

logger = logging.getLogger("vllm.phasewise")  # below vLLM's own, whose lines are shown


def register() -> None:
    """Take over the linear layers of models that this process loads, if PHASEWISE_VLLM asks for it.

    ValueError for a value of the variable that is no format; vLLM may call this several times.
    """
    weight_format = asked_format(os.environ.get(VARIABLE, ""))
    if weight_format is None:
        return
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        logger.warning("%s is set, and vLLM does not run on CPUs here: nothing is replaced", VARIABLE)
        return
    from phasewise.vllm.methods import take_over, taken_layers

    # vLLM keeps compiled models under a name made of these, and asks for it when weights are loaded: one that
    # was compiled without us, or for other layers, calls other products.
    envs.environment_variables[VARIABLE] = lambda: (
        f"{weight_format}, phasewise {__version__}, {taken_layers()}"
    )
    take_over(weight_format)


def asked_format(value: str) -> WeightFormat | None:
    """The weight format of PHASEWISE_VLLM, `native` or `int8`; None: off. ValueError for anything else."""
    if value in OFF:
        return None
    if value not in ("native", "int8"):
        raise ValueError(f"{VARIABLE} is {value!r}: native, int8 or off expected")
    return value  # type: ignore[return-value]
