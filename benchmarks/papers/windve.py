"""Tables I to III and Figures 5 and 6 of WindVE (Huang et al. 2025): the paper's numbers, and what follows
from fewer of them.
"""

from __future__ import annotations

from benchmarks.harness import Row, Yielded
from phasewise.serving.embedding.depth import LatencyLine, line_through
from tests.support.simulated_embedding import ModelledDevice, largest_concurrency

# The paper's own numbers: depths under 1 s and 2 s, the accelerator's and the CPU's.
TABLES = {
    "I": {"V100 + Xeon": ((44, 96), (8, 22)), "Atlas + Kunpeng": ((84, 172), (1, 8))},
    "II": {"V100 + Xeon": ((48, 112), (11, 30)), "Atlas + Kunpeng": ((128, 256), (6, 20))},
}
TABLE3 = {"Tesla V100": (40, 96), "Xeon E5": (8, 20), "Atlas 300I": (84, 195), "Kunpeng 920": (2, 15)}
FIG4_BETA = {"Tesla V100": 0.27, "Xeon E5": 0.32, "Atlas 300I": 0.24, "Kunpeng 920": 0.85}
FIG4_RATIO = {("Tesla V100", "Xeon E5"): 0.21, ("Atlas 300I", "Kunpeng 920"): 0.12}
NAMES = {"V100 + Xeon": ("Tesla V100", "Xeon E5"), "Atlas + Kunpeng": ("Atlas 300I", "Kunpeng 920")}

SLOS_S = (1.0, 2.0)
PAPER_TOKENS, PAPER_CORES = 75, 48
LENGTHS = (75, 150, 250, 350, 500)
CORES = (48, 46, 44, 40, 36, 32)


def line_of(depths: tuple[int, int]) -> LatencyLine:
    """Through the paper's depths under 1 s and 2 s."""
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
    return with_gain(alone, held([fast, slow], slo_s) - alone)


def with_gain(accelerated: int, added: int) -> str:
    return f"{accelerated} + {added} ({100 * added / accelerated:.1f} %)" if accelerated else f"0 + {added}"


def windve_tables() -> Yielded:
    """Tables I to III and Figures 5 and 6 of WindVE: the paper's numbers, and what follows from fewer.

    Nothing here is measured. Input is the paper's. Computed, for Table I: the depths under 1 s, from the
    depths under 2 s and Fig. 4's beta (t = alpha C + beta), by the production queues on simulated time.
    Fig. 4 has no beta for Table II. Of Table III: beta, and alphas to each other, from the depths under 1 s
    and 2 s, beside Fig. 4's. Figs. 5 and 6: from those lines, where alpha grows with the tokens of a query,
    and as cores become fewer.
    """
    for number, table in TABLES.items():
        for name, depths in table.items():
            row = {"table": number, "devices": name}
            for index, slo_s in enumerate(SLOS_S):
                row[f"input, {slo_s:g} s"] = with_gain(depths[0][index], depths[1][index])
            yield row | {"computed, 1 s": _from_two_seconds(name, depths) if number == "I" else ""}
    lines = {name: line_of(depths) for name, depths in TABLE3.items()}
    for name, line in lines.items():
        one_s, two_s = TABLE3[name]
        yield {
            "table": "III",
            "device": name,
            "input, 1 s and 2 s": f"{one_s}, {two_s}",
            "computed beta, s": line.beta_s,
            "Fig. 4's": FIG4_BETA[name],
            "computed alpha, ms": 1e3 * line.alpha_s,
        }
    for (fast_name, slow_name), paper in FIG4_RATIO.items():
        ratio = lines[fast_name].alpha_s / lines[slow_name].alpha_s
        yield f"computed alpha of {fast_name} to that of {slow_name}: {ratio:.3f} (Fig. 4: {paper})"
    gpu, cpu = lines["Tesla V100"], lines["Xeon E5"]
    for tokens in LENGTHS:
        scale = tokens / PAPER_TOKENS
        scaled = [LatencyLine(line.alpha_s * scale, line.beta_s) for line in (gpu, cpu)]
        yield _modelled("Fig. 5", f"{tokens} tokens", *scaled)
    for cores in CORES:
        fewer = LatencyLine(cpu.alpha_s * PAPER_CORES / cores, cpu.beta_s)
        yield _modelled("Fig. 6", f"{cores} cores", gpu, fewer)


def _from_two_seconds(name: str, depths: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """Depths under 1 s of devices that hold these under 2 s, and have Fig. 4's beta."""
    lines = []
    for device, (_, two_s) in zip(NAMES[name], depths, strict=True):
        beta_s = FIG4_BETA[device]
        lines.append(LatencyLine((SLOS_S[1] - beta_s) / two_s, beta_s))
    return both(*lines, SLOS_S[0])


def _modelled(figure: str, varied: str, gpu: LatencyLine, cpu: LatencyLine) -> Row:
    return {"figure": figure, "V100 + Xeon": varied} | {
        f"modelled, {slo_s:g} s": both(gpu, cpu, slo_s) for slo_s in SLOS_S
    }
