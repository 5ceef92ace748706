"""Errors of the tuner.

TunerError
├── PlanError          a service plan that cannot run on this machine, or that makes no sense
├── EvaluationError    a configuration or a step that cannot be timed here
├── TraceError         a trace file, a distribution or an objective that makes no sense
├── PredictorError     a predictor's file or log cannot be read, or there is too little to learn from
└── TopoTreeError      a transformation that a tree does not allow, or a notation that cannot be read
"""

from __future__ import annotations

from typing import ClassVar


class TunerError(Exception):
    """The tuner cannot do what was asked. The message says what is wrong and what to do."""

    exit_code: ClassVar[int] = 1


class PlanError(TunerError):
    """A service plan is malformed, or asks for what this machine does not allow."""


class EvaluationError(TunerError):
    """An evaluator cannot run a configuration or time a step, or the description of a machine is wrong."""


class TraceError(TunerError):
    """A trace of requests, an SLO or an objective is invalid."""


class TopoTreeError(TunerError):
    """A tree does not allow a transformation, or its notation cannot be read."""


class PredictorError(TunerError):
    """A length predictor, or a log of answers' lengths, cannot be read or made."""
