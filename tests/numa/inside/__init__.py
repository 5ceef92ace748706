"""The program of a machine, and its checks by subject. Importing it fills `checks.CHECKS`."""

from tests.numa.inside import changing_cores, placement_checks, topology_checks

__all__ = ["changing_cores", "placement_checks", "topology_checks"]
