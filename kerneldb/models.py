"""The tables. Rows are appended: a trigger refuses to edit any of what was measured or chosen.

Deleting whole rows stays possible, for `gc`. An attribute has the name of the record's field that it keeps
(`rows` relies on it), also where the column has an older name.
A change here needs a migration: see `phasewise.migrations`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from phasewise.kerneldb.records import SINGLE_CORE, Schedule

# SQLite numbers rows by itself only where the key is declared INTEGER; its INTEGER has 64 bits anyway.
RowId = BigInteger().with_variant(Integer, "sqlite")
Word = String(32)
Line = String(255)


class Base(DeclarativeBase):
    """Constraints carry names on every database, so that migrations can refer to them."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class ProblemRow(Base):
    """The computation that a kernel is asked for. One row per key."""

    __tablename__ = "problem"
    __table_args__ = (UniqueConstraint("family", "format", "n", "k", "m", name="uq_problem"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    family: Mapped[str] = mapped_column(Word, comment="kernel family, e.g. gemm")
    format: Mapped[str] = mapped_column(Word, comment="weight format")
    n: Mapped[int] = mapped_column(comment="outputs")
    k: Mapped[int] = mapped_column(comment="inputs")
    m: Mapped[int] = mapped_column(comment="rows of activations")


class ScheduleRow(Base):
    """The way in which a kernel computes it. One row per key; checked against bounds again when read."""

    __tablename__ = "schedule"
    __table_args__ = (UniqueConstraint(*(field.name for field in fields(Schedule)), name="uq_schedule"),)

    id: Mapped[int] = mapped_column(RowId, primary_key=True)
    mr: Mapped[int] = mapped_column(comment="rows of the micro-kernel")
    panels: Mapped[int] = mapped_column(comment="columns of the micro-kernel / 16")
    block_m: Mapped[int] = mapped_column(comment="computation slice")
    block_n: Mapped[int]
    block_k: Mapped[int]
    threads_m: Mapped[int] = mapped_column(comment="thread grid")
    threads_n: Mapped[int]
    threads_k: Mapped[int] = mapped_column(comment="above 1: split-K, with a reduction")
    compute_path: Mapped[str] = mapped_column(Word, comment="a name that the kernel family knows")
    k_parts: Mapped[int] = mapped_column(comment="k is summed in so many parts, added in order")
    prefetch_bytes: Mapped[int] = mapped_column(comment="ahead of a panel's reads; 0: none")
    loop_order: Mapped[str] = mapped_column(Word, comment="nm: panel blocks outermost; mn: row blocks")


ProblemId = Annotated[int, mapped_column(RowId, ForeignKey("problem.id"))]
ScheduleId = Annotated[int, mapped_column(RowId, ForeignKey("schedule.id"))]
KernelAbi = Annotated[str, mapped_column(Line, comment="hash over the kernel family's body and flags")]
SamplesNs = Annotated[Any, mapped_column(JSON, comment="raw samples, a list in the order taken")]
EstimateNs = Annotated[int, mapped_column(BigInteger, comment="robust estimate over samples_ns")]
Conditions = Annotated[Any, mapped_column(JSON, comment="name to number: what the timer noticed around it")]
ModelKey = Annotated[str, mapped_column(Line, comment="tuner.plans.model_key: name@format")]
PhaseName = Annotated[str, mapped_column(Word, comment="prefill or decode")]


class OriginColumns:
    """The place and time at which a row was made: `records.Origin`, but for the cores that worked."""

    id: Mapped[int] = mapped_column(RowId, primary_key=True, sort_order=-1)
    core_sig: Mapped[str] = mapped_column(Line, comment="topology.signature, per-core half")
    program_version: Mapped[str] = mapped_column(Line, comment="phasewise that wrote the row")
    created_at_ms: Mapped[int] = mapped_column(BigInteger, comment="Unix time, UTC")
    verified: Mapped[bool] = mapped_column(comment="measured here; false: imported, not yet measured")


class PlacedColumns(OriginColumns):
    """`records.Origin`."""

    placement_sig: Mapped[str] = mapped_column(Line, comment="topology.signature, sharing half")


class ComparisonColumns:
    """`records.Comparison`, and what trusting its row means. Before the columns of an origin."""

    gain: Mapped[float] = mapped_column(Double, comment="incumbent's time / candidate's time")
    gain_low: Mapped[float] = mapped_column(Double, comment="of the confidence interval")
    gain_high: Mapped[float] = mapped_column(Double)
    confidence: Mapped[float] = mapped_column(Double, comment="of the interval, 0..1")
    pairs: Mapped[int] = mapped_column(comment="timings of each of the two")
    verified: Mapped[bool] = mapped_column(comment="compared here; false: imported")


class MeasurementRow(PlacedColumns, Base):
    """One timing of one schedule on one kind of machine. Appended, never edited."""

    __tablename__ = "measurement"
    __table_args__ = (
        Index(
            "ix_measurement_key",
            *(
                "core_sig",
                "placement_sig",
                "kernel_abi",
                "problem_id",
                "verified",
                "schedule_id",
                "estimate_ns",
            ),
        ),
        Index("ix_measurement_problem", "problem_id"),
        Index("ix_measurement_schedule", "schedule_id"),
    )

    problem_id: Mapped[ProblemId]
    schedule_id: Mapped[ScheduleId]
    kernel_abi: Mapped[KernelAbi]
    samples_ns: Mapped[SamplesNs]
    estimate_ns: Mapped[EstimateNs]
    numeric_error: Mapped[float | None] = mapped_column(
        Double, comment="largest error seen, relative; null: not compared"
    )
    effort_ns: Mapped[int] = mapped_column(BigInteger, comment="wall clock that the timing cost")
    conditions: Mapped[Conditions]


class PromotionRow(ComparisonColumns, PlacedColumns, Base):
    """A schedule taken into use after a paired comparison. The newest verified row of a key is in use."""

    __tablename__ = "promotion"
    __table_args__ = (
        Index("ix_promotion_key", "core_sig", "placement_sig", "kernel_abi", "problem_id"),
        Index("ix_promotion_problem", "problem_id"),
    )

    problem_id: Mapped[ProblemId]
    schedule_id: Mapped[ScheduleId]
    incumbent_id: Mapped[int | None] = mapped_column(
        RowId, ForeignKey("schedule.id"), comment="compared with; null: the kernel's default"
    )
    kernel_abi: Mapped[KernelAbi]


class StorageDuelRow(ComparisonColumns, PlacedColumns, Base):
    """A weight stored sparse, compared with itself stored dense. The newest verified row of a key counts."""

    __tablename__ = "storage_duel"
    __table_args__ = (
        Index("ix_storage_duel_key", "core_sig", "placement_sig", "kernel_abi", "problem_id"),
        Index("ix_storage_duel_problem", "problem_id"),
    )

    problem_id: Mapped[ProblemId] = mapped_column(
        comment="of the sparse weight: its format names the sixteenths that are kept"
    )
    schedule_id: Mapped[ScheduleId] = mapped_column(comment="of the sparse weight")
    dense_schedule_id: Mapped[int] = mapped_column(
        RowId, ForeignKey("schedule.id"), comment="of the same weight stored dense"
    )
    kernel_abi: Mapped[KernelAbi]
    gain: Mapped[float] = mapped_column(Double, comment="dense's time / sparse's time")


class ServicePlanRow(PlacedColumns, Base):
    """A service plan for one phase of one model on one kind of machine. The newest verified row wins."""

    __tablename__ = "service_plan"
    __table_args__ = (Index("ix_service_plan_key", "model_key", "phase", "core_sig", "placement_sig"),)

    placement_sig: Mapped[str] = mapped_column(Line, comment="topology.signature over all allowed PUs")
    model_key: Mapped[ModelKey]
    phase: Mapped[PhaseName]
    plan_json: Mapped[str] = mapped_column("plan", Text, comment="JSON, read and checked by tuner.plans")
    objectives: Mapped[Any] = mapped_column(JSON, comment="name to value reached; empty: set by hand")
    verified: Mapped[bool] = mapped_column(comment="measured or set here; false: imported, not yet measured")


class StepTimeRow(PlacedColumns, Base):
    """One timing of one step of a model on one configuration of cores. Appended, never edited."""

    __tablename__ = "step_time"
    __table_args__ = (Index("ix_step_time_key", "model_key", "phase", "core_sig", "placement_sig"),)

    placement_sig: Mapped[str] = mapped_column(Line, comment="topology.signature over all allowed PUs")
    model_key: Mapped[ModelKey]
    configuration_key: Mapped[str] = mapped_column(Line, comment="hash over the cores of the plan's ranks")
    plan_json: Mapped[str] = mapped_column("plan", Text, comment="JSON, read and checked by tuner.plans")
    kernels: Mapped[str] = mapped_column(Word, comment="default or tuned: by which schedules products ran")
    kernel_abi: Mapped[str] = mapped_column(Line, comment="of the family that most time is spent in")
    phase: Mapped[PhaseName]
    tokens: Mapped[int] = mapped_column(comment="new tokens of each sequence")
    sequences: Mapped[int]
    context: Mapped[int] = mapped_column(comment="tokens that each sequence has behind it")
    samples_ns: Mapped[SamplesNs]
    estimate_ns: Mapped[EstimateNs]
    conditions: Mapped[Conditions]
    verified: Mapped[bool] = mapped_column(comment="measured here; false: imported")


class PredictorScoreRow(PlacedColumns, Base):
    """The worth of a predictor of answers' lengths. Appended, never edited."""

    __tablename__ = "predictor_score"
    __table_args__ = (Index("ix_predictor_score_key", "model_name", "answers_key"),)

    placement_sig: Mapped[str] = mapped_column(Line, comment="topology.signature over all allowed PUs")
    model_name: Mapped[str] = mapped_column(Line, comment="whose answers they are")
    reads: Mapped[str] = mapped_column(Line, comment="tokens, or the embedding model that reads prompts")
    answers_key: Mapped[str] = mapped_column(Line, comment="hash over the answers that judged it")
    judged_by: Mapped[str] = mapped_column(Word, comment="held_out, folds or drift")
    learnt_answers: Mapped[int] = mapped_column(comment="answers that it learnt from")
    judged_answers: Mapped[int] = mapped_column(comment="answers that judged it")
    hold: Mapped[float] = mapped_column(Double, comment="share of answers that rooms were to hold, 0..1")
    figures: Mapped[Any] = mapped_column(JSON, comment="name to number, e.g. accuracy, coverage_90")
    verified: Mapped[bool] = mapped_column(comment="judged here; false: imported")


class UserKernelColumns(OriginColumns):
    """A user's kernel on one shape, and the choice of its parameters. One thread runs it."""

    placement_sig: ClassVar[str] = SINGLE_CORE
    name: Mapped[str] = mapped_column(Line, comment="of the kernel's function")
    kernel_abi: Mapped[str] = mapped_column(Line, comment="hash over the kernel's text and its lowered C")
    shape: Mapped[Any] = mapped_column(JSON, comment="pairs: argument, whole number")
    choice: Mapped[Any] = mapped_column("parameters", JSON, comment="pairs: parameter, value")


class UserKernelTimingRow(UserKernelColumns, Base):
    """One timing of one choice of a user's kernel's parameters, on one core. Appended, never edited."""

    __tablename__ = "user_kernel_timing"
    __table_args__ = (Index("ix_user_kernel_timing_key", "core_sig", "kernel_abi"),)

    samples_ns: Mapped[SamplesNs]
    estimate_ns: Mapped[EstimateNs]
    conditions: Mapped[Conditions]


class UserKernelPromotionRow(ComparisonColumns, UserKernelColumns, Base):
    """Parameters of a user's kernel, in use after a duel. The newest verified row of a key is in use."""

    __tablename__ = "user_kernel_promotion"
    __table_args__ = (Index("ix_user_kernel_promotion_key", "core_sig", "kernel_abi"),)

    incumbent: Mapped[Any] = mapped_column(JSON, comment="compared with; pairs as above")
