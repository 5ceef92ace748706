"""TopoTree: the space of service configurations of a machine. Pure: no files, no clock, nothing measured."""

from phasewise.tuner.errors import TopoTreeError
from phasewise.tuner.topotree.configurations import (
    Configuration,
    OperatorLimits,
    UnevenCores,
    configuration_of,
    configurations,
    cross_section,
    every_configuration,
)
from phasewise.tuner.topotree.enumeration import (
    count_grouped,
    count_groupings_of_levels,
    every_tree,
    group_bound,
    grouped_trees,
    parents,
    removal_bound,
    removals,
)
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
    "configurations",
    "count_grouped",
    "count_groupings_of_levels",
    "cross_section",
    "every_configuration",
    "every_tree",
    "fundamental",
    "group_bound",
    "grouped_trees",
    "largest_symmetric_part",
    "parents",
    "parse",
    "removal_bound",
    "removals",
]
