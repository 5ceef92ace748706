"""Ends of instances aside the front's thread, places that are tried again, and draining."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from phasewise.cluster.real.front import DrainPlace
from phasewise.cluster.real.instance_messages import PromptBegun, SendKvTo, Stop
from phasewise.cluster.real.supervisor import InstanceMember
from phasewise.serving.engine.messages import Abort, Answer, Submit
from phasewise.serving.processes.restarts import Restarts
from tests.support.servers.scripted_instances import (
    FINGERPRINT,
    IDENTITY,
    ScriptedServer,
    scripted_front,
    who_hears,
)

REQUEST = Submit("r", tuple(range(3, 103)), 8)


def states(server: ScriptedServer) -> list[object]:
    return [member["state"] for member in server.front.members()]


def wait_until_states(server: ScriptedServer, *wanted: str) -> None:
    server.wait_until(lambda: states(server) == list(wanted))


def test_streams_go_on_while_an_instance_cannot_be_killed() -> None:
    """Its host is lost, and confirms nothing: pieces of others' answers are delivered meanwhile."""
    with scripted_front(("mixed", "mixed")) as server:
        first, other = server.running()
        server.front.send(REQUEST)
        serving = who_hears((first, other))
        attempt = serving.hear(Submit).request_id
        lost = other if serving is first else first
        server.launcher.kills_wait_for.clear()
        lost.ended = "its node is lost"
        server.wait_until(lambda: states(server)[lost.index] == "starting")
        for _ in range(50):
            serving.tell(Answer(attempt, "a", (), 1, 5))
            server.next_answer()

        assert states(server)[lost.index] == "starting"
        assert lost.orders.name not in server.launcher.killed
        server.launcher.kills_wait_for.set()
        again = server.launcher.next()
        assert again.index == lost.index


def test_a_block_waits_for_the_end_of_the_instance_that_may_write_to_it() -> None:
    """The request runs again at once; its first block is given back when the process is known to be dead."""
    with scripted_front() as server:
        prompt, token = server.running()
        server.front.send(REQUEST)
        attempt = prompt.hear(Submit).request_id
        prompt.say(PromptBegun(attempt))
        token.hear(Submit)
        token.place(attempt)
        prompt.hear(SendKvTo)
        server.launcher.kills_wait_for.clear()
        prompt.ended = "its node is lost"

        again = token.hear(Submit)
        assert again.request_id != attempt
        assert token.hears_nothing(0.4)
        assert server.launcher.launched.empty(), "a new life begins before the old one has ended"
        server.launcher.kills_wait_for.set()
        assert token.hear(Abort).request_id == attempt
        assert server.launcher.next().index == prompt.index


@pytest.mark.parametrize("joins", [True, False])
def test_a_place_that_did_not_fit_is_tried_again(joins: bool) -> None:
    """When a host joins, and after a while without one."""
    with scripted_front(("mixed", "mixed"), again_s=60.0 if joins else 0.3) as server:
        first, _other = server.running()
        second = server.replaced(first)
        second.ready(identity=replace(IDENTITY, version="0.0.1"))
        server.wait_until(lambda: server.launcher.vacated == [first.index])
        if joins:
            wait_until_states(server, "given up", "running")
            assert "it runs phasewise 0.0.1" in str(server.front.members()[0]["problem"])
            server.launcher.joined += 1
        third = server.launcher.next()
        assert third.index == first.index
        third.ready()
        wait_until_states(server, "running", "running")


def test_an_instance_without_a_place_waits_for_one_however_long() -> None:
    with scripted_front(("mixed", "mixed")) as server:
        first, _other = server.running()
        supervisor = server.front._supervisor
        patient, supervisor._settings = supervisor._settings, replace(supervisor._settings, start_s=0.2)
        server.launcher.waiting[first.index] = "no node has room for it"
        second = server.replaced(first, "its node is lost")
        wait_until_states(server, "waiting", "running")
        time.sleep(0.6)

        assert states(server) == ["waiting", "running"]
        assert server.front.members()[0]["problem"] == "no node has room for it"
        assert server.launcher.launched.empty()
        supervisor._settings = patient
        del server.launcher.waiting[first.index]
        second.ready()
        wait_until_states(server, "running", "running")


def test_a_drained_instance_ends_what_it_has_and_stops() -> None:
    with scripted_front(("mixed", "mixed")) as server:
        instances = server.running()
        server.front.send(REQUEST)
        busy = who_hears(instances)
        (idle,) = (instance for instance in instances if instance is not busy)
        attempt = busy.hear(Submit).request_id
        server.front.send(DrainPlace(busy.index))
        for number in range(4):
            server.front.send(replace(REQUEST, request_id=f"r{number}"))
            idle.hear(Submit)

        assert busy.hears_nothing()
        assert states(server)[busy.index] == "draining"
        busy.tell(Answer(attempt, "a", (), 8, 5, "length"))
        server.next_answer()
        busy.hear(Stop)
        busy.ended = "it was told to stop"
        server.wait_until(lambda: states(server)[busy.index] == "drained")
        server.wait_until(lambda: server.launcher.vacated == [busy.index])
        assert server.launcher.launched.empty()
        assert server.front.state == "running"


def test_draining_is_undone_before_and_after_the_stop() -> None:
    with scripted_front(("mixed", "mixed")) as server:
        first, other = server.running()
        server.front.send(DrainPlace(0))
        first.hear(Stop)
        first.ended = "it was told to stop"
        server.wait_until(lambda: server.launcher.vacated == [0])
        server.front.send(DrainPlace(1))  # the last: it stays
        assert other.hears_nothing()
        assert states(server) == ["drained", "running"]
        server.front.send(DrainPlace(0, undo=True))
        again = server.launcher.next()
        again.ready()
        wait_until_states(server, "running", "running")
        server.front.send(DrainPlace(1))
        other.hear(Stop)
        other.ended = "it was told to stop"
        server.front.send(REQUEST)
        assert again.hear(Submit).part == "whole"


def test_a_draining_instance_that_is_lost_is_not_started_anew() -> None:
    with scripted_front(("mixed", "mixed")) as server:
        instances = server.running()
        server.front.send(REQUEST)
        busy = who_hears(instances)
        (idle,) = (instance for instance in instances if instance is not busy)
        busy.hear(Submit)
        server.front.send(DrainPlace(busy.index))
        server.wait_until(lambda: states(server)[busy.index] == "draining")
        busy.ended = "its node is lost"

        assert idle.hear(Submit).part == "whole"
        server.wait_until(lambda: states(server)[busy.index] == "drained")
        assert server.launcher.launched.empty()


def test_a_format_of_another_name_is_no_difference_and_other_numbers_are() -> None:
    named = replace(IDENTITY, fingerprint=replace(FINGERPRINT, weight_format="bf16"))
    with scripted_front() as server:
        first, second = server.launcher.next(), server.launcher.next()
        first.ready()
        second.ready(identity=named)
        server.wait_until_state("running")
        assert [member["format"] for member in server.front.members()] == ["native", "bf16"]


class _Fading:
    """The facts of an instance that is lost once they are looked at."""

    identity = IDENTITY
    pid, kv_bytes, kv_slots = 7, 8, 9
    cpus, plans = (0,), ("decode: one core",)

    def __init__(self, member: InstanceMember) -> None:
        self._member = member

    def __bool__(self) -> bool:
        self._member.ready = self._member.load = None
        return True


def test_an_instance_that_is_lost_while_its_facts_are_read_breaks_nothing() -> None:
    """Other threads read them: for metrics, receipts, and people."""
    member = InstanceMember(0, "mixed", Restarts(), life=1)
    member.ready = _Fading(member)  # type: ignore[assignment]

    facts = member.facts("mixed")

    assert (facts["pid"], facts["kv_slots"], facts["plans"]) == (7, 9, ["decode: one core"])
