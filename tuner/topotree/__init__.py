"""TopoTree: the space of service configurations of a machine. Pure: no files, no clock, nothing measured."""

from phasewise.tuner.errors import TopoTreeError
from phasewise.tuner.topotree.bounds import (
    count_grouped,
    count_groupings_of_levels,
    group_bound,
    removal_bound,
)
from phasewise.tuner.topotree.configurations import (
    Configuration,
    OperatorLimits,
    configuration_of,
    configurations,
    cross_section,
    every_configuration,
)
from phasewise.tuner.topotree.enumeration import (
    every_tree,
    grouped_trees,
    parents,
    removals,
    single_groups,
    transformation_tree,
)
from phasewise.tuner.topotree.fundamental import (
    Fundamental,
    LeftOut,
    fundamental,
    largest_symmetric_part,
)
from phasewise.tuner.topotree.levels import GROUP, Level
from phasewise.tuner.topotree.notation import apply, parse
from phasewise.tuner.topotree.tree import TopoTree
from phasewise.tuner.topotree.uneven import UnevenCores

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
    "single_groups",
    "transformation_tree",
]
