"""Tables I to III and Figures 5 and 6 of WindVE (Huang et al. 2025), by our queues over modelled devices.

    python benchmarks/windve_paper.py

A device is a line t = alpha C + beta through two of the paper's own figures: its depths under 1 s and 2 s.
The production queues then run on simulated time. Nothing here is measured on a GPU or an NPU. For the figures
alpha grows in proportion with the tokens of a query and with fewer cores; the paper shows how far that holds.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from phasewise.serving.embedding.depth import LatencyLine, line_through
from tests.support.simulated_embedding import ModelledDevice, largest_concurrency

# Depths under 1 s and 2 s, the accelerator's and the CPU's.
TABLE1 = {"V100 + Xeon": ((44, 96), (8, 22)), "Atlas + Kunpeng": ((84, 172), (1, 8))}
TABLE2 = {"V100 + Xeon": ((48, 112), (11, 30)), "Atlas + Kunpeng": ((128, 256), (6, 20))}
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
    used = [one for one in devices if one.depth > 0]
    return largest_concurrency(used, slo_s) if used else 0


def main() -> None:
    for number, table in (("I", TABLE1), ("II", TABLE2)):
        print(f"Table {number}: accelerator alone + CPU, paper and queues over modelled devices")
        for name, (fast, slow) in table.items():
            for at, slo_s in enumerate(SLOS_S):
                alone, both = held([line_of(fast)], slo_s), held([line_of(fast), line_of(slow)], slo_s)
                gain = 100 * slow[at] / fast[at]
                print(
                    f"  {name:16} {slo_s:g} s: paper {fast[at]} + {slow[at]} ({gain:.1f} %),"
                    f" ours {alone} + {both - alone}"
                )
    print("Table III: beta of the line through the regression's depths, and the paper's Fig. 4")
    lines = {name: line_of(depths) for name, depths in TABLE3.items()}
    for name, line in lines.items():
        print(
            f"  {name:12} beta {line.beta_s:.3f} (paper {FIG4_BETA[name]}), alpha {1e3 * line.alpha_s:.1f} ms"
        )
    for fast_name, slow_name in (("Tesla V100", "Xeon E5"), ("Atlas 300I", "Kunpeng 920")):
        ratio = lines[fast_name].alpha_s / lines[slow_name].alpha_s
        print(f"  alpha of {fast_name} to that of {slow_name}: {ratio:.3f}")
    gpu, cpu = lines["Tesla V100"], lines["Xeon E5"]
    print("Fig. 5, modelled: V100 alone + Xeon, by tokens of a query")
    for tokens in LENGTHS:
        scale = tokens / PAPER_TOKENS
        _print_pair(f"{tokens} tokens", *(LatencyLine(one.alpha_s * scale, one.beta_s) for one in (gpu, cpu)))
    print("Fig. 6, modelled: V100 alone + Xeon, by cores of the Xeon")
    for cores in CORES:
        _print_pair(f"{cores} cores", gpu, LatencyLine(cpu.alpha_s * PAPER_CORES / cores, cpu.beta_s))


def _print_pair(name: str, gpu: LatencyLine, cpu: LatencyLine) -> None:
    parts = []
    for slo_s in SLOS_S:
        alone = held([gpu], slo_s)
        parts.append(f"{slo_s:g} s: {alone} + {held([gpu, cpu], slo_s) - alone}")
    print(f"  {name:10} {', '.join(parts)}")


if __name__ == "__main__":
    main()
