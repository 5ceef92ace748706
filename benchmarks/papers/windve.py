"""Tables I to III and Figures 5 and 6 of WindVE (Huang et al. 2025), by our queues over modelled devices."""

from __future__ import annotations

from benchmarks.harness import Row, Yielded
from phasewise.serving.embedding.depth import LatencyLine, line_through
from tests.support.simulated_embedding import ModelledDevice, largest_concurrency

# Depths under 1 s and 2 s, the accelerator's and the CPU's.
TABLES = {
    "I": {"V100 + Xeon": ((44, 96), (8, 22)), "Atlas + Kunpeng": ((84, 172), (1, 8))},
    "II": {"V100 + Xeon": ((48, 112), (11, 30)), "Atlas + Kunpeng": ((128, 256), (6, 20))},
}
TABLE3 = {"Tesla V100": (40, 96), "Xeon E5": (8, 20), "Atlas 300I": (84, 195), "Kunpeng 920": (2, 15)}
FIG4_BETA = {"Tesla V100": 0.27, "Xeon E5": 0.32, "Atlas 300I": 0.24, "Kunpeng 920": 0.85}
SLOS_S = (1.0, 2.0)
PAPER_TOKENS, PAPER_CORES = 75, 48
LENGTHS = (75, 150, 250, 350, 500)
CORES = (48, 46, 44, 40, 36, 32)


def line_of(depths: tuple[int, int]) -> LatencyLine:
    return line_through((depths[0], SLOS_S[0]), (depths[1], SLOS_S[1]))


def held(lines: list[LatencyLine], slo_s: float) -> int:
    """Queries at once that all devices together answer within the SLO, each with the depth of its line."""
    devices = [
        ModelledDevice(str(rank), rank, line, line.largest_within(slo_s)) for rank, line in enumerate(lines)
    ]
    used = [device for device in devices if device.depth > 0]
    return largest_concurrency(used, slo_s) if used else 0


def both(fast: LatencyLine, slow: LatencyLine, slo_s: float) -> str:
    """The accelerator's depth, and what the CPU adds."""
    alone = held([fast], slo_s)
    return f"{alone} + {held([fast, slow], slo_s) - alone}"


def windve_tables() -> Yielded:
    """Tables I to III and Figures 5 and 6 of WindVE, by our queues over modelled devices.

    A device is a line t = alpha C + beta through two of the paper's own figures: its depths under 1 s and
    2 s. The production queues then run on simulated time. Nothing here is measured on a GPU or an NPU. For
    the figures alpha grows in proportion with the tokens of a query and with fewer cores.
    """
    for number, table in TABLES.items():
        for name, (fast, slow) in table.items():
            for index, slo_s in enumerate(SLOS_S):
                yield {
                    "table": number,
                    "devices": name,
                    "SLO, s": slo_s,
                    "paper": f"{fast[index]} + {slow[index]} ({100 * slow[index] / fast[index]:.1f} %)",
                    "ours": both(line_of(fast), line_of(slow), slo_s),
                }
    lines = {name: line_of(depths) for name, depths in TABLE3.items()}
    for name, line in lines.items():
        ms = 1e3 * line.alpha_s
        yield {
            "table": "III",
            "device": name,
            "beta, s": line.beta_s,
            "paper's Fig. 4": FIG4_BETA[name],
            "alpha, ms": ms,
        }
    for fast_name, slow_name in (("Tesla V100", "Xeon E5"), ("Atlas 300I", "Kunpeng 920")):
        ratio = lines[fast_name].alpha_s / lines[slow_name].alpha_s
        yield f"alpha of {fast_name} to that of {slow_name}: {ratio:.3f}"
    gpu, cpu = lines["Tesla V100"], lines["Xeon E5"]
    for tokens in LENGTHS:
        scale = tokens / PAPER_TOKENS
        scaled = [LatencyLine(one.alpha_s * scale, one.beta_s) for one in (gpu, cpu)]
        yield _modelled("Fig. 5", f"{tokens} tokens", *scaled)
    for cores in CORES:
        fewer = LatencyLine(cpu.alpha_s * PAPER_CORES / cores, cpu.beta_s)
        yield _modelled("Fig. 6", f"{cores} cores", gpu, fewer)


def _modelled(figure: str, varied: str, gpu: LatencyLine, cpu: LatencyLine) -> Row:
    return {"figure": figure, "V100 + Xeon": varied} | {
        f"{slo_s:g} s": both(gpu, cpu, slo_s) for slo_s in SLOS_S
    }
