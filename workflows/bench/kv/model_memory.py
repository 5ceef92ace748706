"""The KV slots and speeds of a replay that a model in a given amount of memory means on this machine."""

from __future__ import annotations

from dataclasses import replace

from phasewise.tuner.config.steps import ModelShape
from phasewise.workflows.bench.kv.step_times import Speeds
from phasewise.workflows.errors import UsageError
from phasewise.workflows.report import Report, silent

KV_CHUNK_SLOTS = 16
PROMPT_TOKENS = 512
DECODE_SEQUENCES = (1, 8, 32, 128)
DECODE_CONTEXT = 512


def slots_and_speeds(
    model: str, memory_bytes: int, kv_format: str = "auto", report: Report = silent
) -> tuple[int, Speeds]:
    """KV slots beside the weights of `model` in `memory_bytes`, and modelled speeds of this machine.

    Raises ModelError and EvaluationError for the model, UsageError where the weights leave no room.
    """
    from phasewise.cython_kernels.kv_formats import kv_slot_bytes
    from phasewise.workflows.opening.model_shape import shape_of_reference

    shape = shape_of_reference(model, "native", report)
    if kv_format != "auto":
        per_head = kv_slot_bytes(kv_format, shape.head_dim, latent=shape.kv_vectors == 1)
        shape = replace(shape, kv_bytes_per_slot=shape.n_layers * shape.n_kv_heads * per_head)
    free_bytes = memory_bytes - shape.weight_bytes
    n_slots = free_bytes // shape.kv_bytes_per_slot // KV_CHUNK_SLOTS * KV_CHUNK_SLOTS
    if n_slots < KV_CHUNK_SLOTS:
        least_mib = (shape.weight_bytes + KV_CHUNK_SLOTS * shape.kv_bytes_per_slot) / (1 << 20)
        raise UsageError(
            f"--memory: the weights of {shape.name} alone need more; give {least_mib:.0f}M at least"
        )
    report(
        f"{shape.name}: {shape.weight_bytes >> 20} MiB of weights leave {n_slots} KV slots of "
        f"{shape.kv_bytes_per_slot} bytes; speeds are modelled; --speeds states measured ones"
    )
    return n_slots, modelled_speeds(shape)


def modelled_speeds(shape: ModelShape) -> Speeds:
    """Tokens/s of prefill, and of decode by sequences, by the modelled evaluator."""
    from phasewise.topology import read_machine
    from phasewise.tuner.config.modelled import ModelledEvaluator
    from phasewise.tuner.config.steps import Step
    from phasewise.tuner.plans import default_plan
    from phasewise.tuner.topotree import Configuration

    machine = read_machine()
    evaluator = ModelledEvaluator(machine, shape)
    with evaluator.open(Configuration(default_plan(machine, "prefill").ranks), "prefill") as timer:
        prompt_s = timer(Step("prefill", PROMPT_TOKENS, 1, 0)) / 1e9
    with evaluator.open(Configuration(default_plan(machine, "decode").ranks), "decode") as timer:
        decode = tuple(
            (count, count / (timer(Step("decode", 1, count, DECODE_CONTEXT)) / 1e9))
            for count in DECODE_SEQUENCES
        )
    return Speeds(PROMPT_TOKENS / prompt_s, decode)
