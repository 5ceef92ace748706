"""`phasewise topo`: the machine, its trees and its plans as JSON values and pictures."""
