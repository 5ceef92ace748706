"""TopoTree: the space of a machine's service configurations, by computation alone."""

from phasewise.tuner.errors import TopoTreeError
from phasewise.tuner.topotree.configurations import (
    Configuration,
    OperatorLimits,
    UnevenCores,
    configuration_of,
    cross_section,
)
from phasewise.tuner.topotree.enumeration import every_tree, grouped_trees, parents, removals
from phasewise.tuner.topotree.fundamental import (
    Fundamental,
    LeftOut,
    apply,
    fundamental,
    largest_symmetric_part,
    parse,
)
from phasewise.tuner.topotree.tree import GROUP, Level, TopoTree

__all__ = [
    "GROUP",
    "Configuration",
    "Fundamental",
    "LeftOut",
    "Level",
    "OperatorLimits",
    "TopoTree",
    "TopoTreeError",
    "UnevenCores",
    "apply",
    "configuration_of",
    "cross_section",
    "every_tree",
    "fundamental",
    "grouped_trees",
    "largest_symmetric_part",
    "parents",
    "parse",
    "removals",
]
