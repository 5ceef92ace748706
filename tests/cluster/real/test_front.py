"""The front's promises, with instances that a test speaks for: who is told what, in which order, and when
something fails."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phasewise.cluster.real.instance_messages import (
    CannotStart,
    Dropped,
    HandOverFailed,
    Heartbeat,
    PromptBegun,
    SendKvTo,
)
from phasewise.serving.engine.messages import (
    Abort,
    Answer,
    Delivery,
    EngineLoad,
    Failure,
    GivenOut,
    Progress,
    Submit,
)
from phasewise.serving.errors import EngineLost, RankLost, StepFailed
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.sampling.sampling import SampledToken
from tests.support.clusters import check_counts
from tests.support.servers.scripted_instances import (
    FINGERPRINT,
    IDENTITY,
    ScriptedInstance,
    ScriptedServer,
    scripted_front,
)

REQUEST = Submit("r", tuple(range(3, 103)), 8)


def divided(server: ScriptedServer, prompt: ScriptedInstance, token: ScriptedInstance) -> str:
    """A request whose prompt is computed by one instance for the other, which hears of it when the first has
    begun; its attempt."""
    server.front.send(REQUEST)
    attempt = prompt.hear(Submit)
    assert token.hears_nothing()
    prompt.say(PromptBegun(attempt.request_id))
    expected = token.hear(Submit)
    assert (attempt.part, expected.part) == ("prompt", "answer")
    assert attempt.request_id == expected.request_id
    return attempt.request_id


def begins(server: ScriptedServer, instance: ScriptedInstance, attempt: str) -> None:
    """The instance says that it computes an attempt, and the front has heard it."""
    instance.say(PromptBegun(attempt))
    server.wait_until(lambda: server.front._attempts[attempt].given.was_computed)


def with_kv_target(server: ScriptedServer) -> tuple[ScriptedInstance, ScriptedInstance, str]:
    """The instances of a divided request, and its attempt, which the prompt's knows where to write."""
    prompt, token = server.running()
    attempt = divided(server, prompt, token)
    token.place(attempt)
    prompt.hear(SendKvTo)
    return prompt, token, attempt


def test_a_divided_request_from_its_arrival_to_its_end() -> None:
    """The prompt's block is freed when everything has arrived, and answers carry the request's own id."""
    with scripted_front() as server:
        prompt, token = server.running()
        attempt = divided(server, prompt, token)
        token.place(attempt)
        target = prompt.hear(SendKvTo)
        prompt.tell(computed=[attempt])
        token.tell(Answer(attempt, "a", (), 1, 5), arrived=[attempt])

        assert (target.request_id, target.n_prompt, target.endpoint) == (attempt, 100, token.orders.listen)
        assert target.place is not None
        assert prompt.hear(Abort).request_id == attempt
        first = server.next_answer()
        assert (first.request_id, first.text) == ("r", "a")
        token.tell(Answer(attempt, "b", (), 8, 6, "length"))
        last = server.next_answer()
        assert last.finish_reason == "length"
        check_counts(server.front._router)
        assert not server.front._router._held


def test_a_request_in_shadow_is_computed_where_it_is_answered() -> None:
    """A block that is being sent could not give way."""
    with scripted_front() as server:
        _, token = server.running()
        server.front.send(replace(REQUEST, in_shadow=True))

        taken = token.hear(Submit)

        assert (taken.part, taken.in_shadow) == ("whole", True)
        assert server.front._load()[:2] == (0, 0)
        assert server.front._load().n_in_shadow == 1


def test_a_block_is_given_back_only_when_the_other_instance_has_stopped_writing() -> None:
    with scripted_front() as server:
        prompt, token, attempt = with_kv_target(server)
        server.front.send(Abort("r"))

        assert prompt.hear(Abort).request_id == attempt
        assert token.hears_nothing()
        prompt.say(Dropped(attempt))
        assert token.hear(Abort).request_id == attempt


def test_a_block_is_given_back_when_the_instance_that_may_write_has_ended() -> None:
    """And not before: the process is killed first."""
    with scripted_front() as server:
        prompt, token, attempt = with_kv_target(server)
        prompt.ended = "it was killed by SIGKILL"

        assert token.hear(Abort).request_id == attempt
        assert prompt.orders.name in server.launcher.killed
        again = token.hear(Submit)
        assert again.part == "whole"  # no instance is there that computes prompts
        assert again.request_id != attempt
        token.tell(Answer(attempt, "of the first attempt", (), 1, 5))
        token.tell(Answer(again.request_id, "b", (), 1, 5, "length"))
        out = server.next_answer()
        assert out.text == "b"
        assert server.front.recoveries().requests_rerun == 1
        assert server.front.failed == {"instance": 1}


def begun(server: ScriptedServer) -> tuple[ScriptedInstance, ScriptedInstance]:
    """The instances of a divided request of which two tokens were given out, with a part of their text."""
    prompt, token = server.running()
    attempt = divided(server, prompt, token)
    pieces = [
        Answer(attempt, "a", (SampledToken(7),), 1, 5, n_cached=16),
        Answer(attempt, "", (), 2, 6, n_cached=16),
        Answer(attempt, "bc", (SampledToken(8),), 3, 7, n_cached=16),
    ]
    token.tell(*pieces, arrived=[attempt])
    for _ in pieces:
        server.next_answer()
    assert prompt.hear(Abort).request_id == attempt
    return prompt, token


def test_an_answer_that_has_begun_goes_on_after_what_was_given_out() -> None:
    """On another instance, which is told what the client has; the client hears the rest."""
    with scripted_front() as server:
        prompt, token = begun(server)
        token.ended = "it was killed by SIGKILL"

        again = prompt.hear(Submit)
        assert again.part == "whole"
        assert again.prompt_token_ids == REQUEST.prompt_token_ids
        assert again.given == GivenOut((7, 8), 3, 16)
        name = again.request_id
        prompt.tell(
            Answer(name, "d", (SampledToken(9),), 8, 8, "length", 16), progress=[Progress(name, 102, 0, 9, 5)]
        )
        out = server.next_answer()
        assert (out.request_id, out.text, out.finish_reason) == ("r", "d", "length")
        counts = server.front.recoveries()
        assert (counts.answers_continued, counts.requests_rerun) == (1, 0)
        assert not server.progress


def test_an_answer_that_goes_on_is_divided_as_any_other() -> None:
    """One instance computes prompt and tokens for another one, which goes on after them; once more after that
    with all that both have given out."""
    with scripted_front(("prompt", "token", "token")) as server:
        prompt, *tokens = server.running(3)
        server.front.send(REQUEST)
        given_out = None
        for n_known in (100, 101, 102):
            attempt = prompt.hear(Submit)
            name = attempt.request_id
            assert (attempt.part, len(attempt.prompt_token_ids), attempt.given) == (
                "prompt",
                n_known,
                None,
            )
            prompt.say(PromptBegun(name))
            server.wait_until(lambda: any(not token.hears_nothing(0.01) for token in tokens))
            (token,) = (token for token in tokens if not token.hears_nothing(0.01))
            expected = token.hear(Submit)
            assert (expected.part, expected.given) == ("answer", given_out)
            assert expected.prompt_token_ids == REQUEST.prompt_token_ids
            token.place(name)
            assert prompt.hear(SendKvTo).n_prompt == n_known
            prompt.tell(computed=[name])
            token.tell(Answer(name, "x", (SampledToken(n_known),), n_known - 99, 5), arrived=[name])
            server.next_answer()
            assert prompt.hear(Abort).request_id == name
            given_out = GivenOut(tuple(range(100, n_known + 1)), n_known - 99)
            tokens.remove(token)
            token.ended = "it was killed by SIGKILL"
            tokens.append(server.launcher.next())
            if n_known == 100:
                tokens[-1].ready()

        assert server.front.recoveries().answers_continued >= 2


def test_a_begun_answer_waits_until_an_instance_is_there() -> None:
    with scripted_front(("mixed",)) as server:
        (instance,) = server.running(1)
        server.front.send(REQUEST)
        name = instance.hear(Submit).request_id
        instance.tell(Answer(name, "a", (SampledToken(7),), 1, 5))
        server.next_answer()
        other = server.replaced(instance)
        server.wait_until_state("replacing")
        other.ready()

        assert other.hear(Submit).given == GivenOut((7,), 1)


@pytest.mark.parametrize(
    ("n_good", "n_rounds", "gives_out"), [(5, 7, True), (5, 8, False)], ids=["begun", "not begun"]
)
def test_a_request_whose_instances_end_under_it_comes_further_or_ends(
    n_good: int, n_rounds: int, gives_out: bool
) -> None:
    """Instances may end as often as they like while an answer comes further, or while they do not compute it;
    twice in a row without a token, or three times where there is none, and it may be what ends them."""
    with scripted_front(("mixed",), most_restarts=100) as server:
        (instance,) = server.running(1)
        server.front.send(REQUEST)
        for number in range(n_rounds):
            name = instance.hear(Submit).request_id
            if number >= n_good:
                begins(server, instance, name)
            elif gives_out:
                instance.tell(Answer(name, "a", (SampledToken(7),), 1, 5))
                server.next_answer()
            instance = server.replaced(instance)
            instance.ready()

        out = server.next_out()

        assert isinstance(out, Failure)
        assert isinstance(out.error, RankLost)
        assert instance.hears_nothing()
        assert server.front.recoveries().answers_continued == (6 if gives_out else 0)


def test_a_hand_over_that_fails_is_counted_and_runs_again_as_a_whole() -> None:
    with scripted_front() as server:
        prompt, token, attempt = with_kv_target(server)
        token.say(HandOverFailed(attempt, "sequence", "frame 3 came where 2 was expected"))

        prompt.hear(Abort)
        again = token.hear(Submit)
        assert again.part == "whole"
        assert server.front.failed == {"sequence": 1}


def has_failed(load: EngineLoad | None) -> bool:
    return load is not None and load.hand_overs is not None and bool(load.hand_overs.failed)


def test_hand_overs_are_counted_where_prometheus_reads_them() -> None:
    """Divided requests, failures by reason, and frames that running instances threw away."""
    with scripted_front() as server:
        prompt, token, attempt = with_kv_target(server)
        token.say(Heartbeat(1, False, 0, {"stale": 3}))
        token.say(HandOverFailed(attempt, "range", "position 900 of a prompt of 100 tokens"))
        prompt.hear(Abort)
        token.hear(Submit)
        token.tell()
        server.wait_until(lambda: has_failed(server.load))

        text = Metrics(Gauges(load=lambda: server.load)).exposition().decode()

    for line in (
        "phasewise_hand_overs_total 1.0",
        'phasewise_hand_overs_failed_total{reason="range"} 1.0',
        'phasewise_kv_frames_refused_total{reason="stale"} 3.0',
    ):
        assert line in text.splitlines()


def test_a_prompt_that_is_computed_and_never_arrives_is_given_up_in_time() -> None:
    with scripted_front(hand_over_s=0.2) as server:
        prompt, token, attempt = with_kv_target(server)
        prompt.tell(computed=[attempt])

        assert prompt.hear(Abort).request_id == attempt
        assert token.hear(Submit).part == "whole"
        assert server.front.failed == {"timeout": 1}


def test_a_prompt_of_which_its_instance_never_reports_is_computed_elsewhere() -> None:
    """It lives, has nothing to do, and says nothing of the prompt. One that is busy is waited for."""
    with scripted_front(hand_over_s=0.3) as server:
        prompt, token = server.running()
        prompt.say(Heartbeat(1, True, 0))
        divided(server, prompt, token)
        assert token.hears_nothing(0.7)
        prompt.say(Heartbeat(1, False, 0))

        prompt.hear(Abort)
        assert token.hear(Submit).part == "whole"
        assert server.front.failed == {"unreported": 1}


def test_each_of_several_instances_may_end_twice_under_a_request() -> None:
    with scripted_front(("mixed", "mixed"), most_restarts=100) as server:
        server.running()
        server.front.send(REQUEST)
        for _ in range(5):
            server.wait_until(lambda: bool(server.front._requests))
            (attempt,) = server.front._requests.values()
            instance = server.launcher.now[attempt.assignment.token]
            begins(server, instance, instance.hear(Submit).request_id)
            instance.ended = "it was killed by SIGSEGV"
            server.launcher.next().ready()
            server.wait_until_state("running")

        assert isinstance(server.next_out(), Failure)


def test_an_instance_that_says_nothing_is_dead() -> None:
    with scripted_front(("mixed",)) as server:
        (instance,) = server.running(1)
        server.front.send(REQUEST)
        instance.hear(Submit)
        supervisor = server.front._supervisor
        patient, supervisor._settings = supervisor._settings, replace(supervisor._settings, silent_s=0.2)

        other = server.launcher.next()
        supervisor._settings = patient
        other.ready()

        assert instance.orders.name in server.launcher.killed
        assert other.hear(Submit).part == "whole"


def test_requests_wait_while_no_instance_is_there() -> None:
    with scripted_front(("mixed",)) as server:
        (instance,) = server.running(1)
        other = server.replaced(instance)
        server.front.send(REQUEST)
        server.wait_until_state("replacing")
        other.ready()

        assert other.hear(Submit).prompt_token_ids == REQUEST.prompt_token_ids


def test_what_an_earlier_life_says_is_not_heard() -> None:
    with scripted_front(("mixed",)) as server:
        (instance,) = server.running(1)
        server.front.send(REQUEST)
        attempt = instance.hear(Submit).request_id
        other = server.replaced(instance)
        other.ready()
        again = other.hear(Submit).request_id
        instance.tell(Answer(again, "late", (), 1, 5))
        instance.tell(Answer(attempt, "late", (), 1, 5))
        other.tell(Answer(again, "new", (), 1, 5))

        out = server.next_answer()
        assert out.text == "new"


@pytest.mark.parametrize(
    ("identity", "says"),
    [
        (replace(IDENTITY, version="0.0.1"), "it runs phasewise 0.0.1, this server is"),
        (replace(IDENTITY, model_hash="cd" * 32), "its model or weight format differs"),
        (replace(IDENTITY, shape=replace(IDENTITY.shape, kv_format="f32")), "it keeps keys and values as"),
        (replace(IDENTITY, context_length=17), "its context is "),
        (
            replace(IDENTITY, fingerprint=replace(FINGERPRINT, arithmetic="1/avx2/00")),
            "they differ in arithmetic",
        ),
    ],
)
def test_an_instance_that_does_not_fit_ends_the_start_in_one_line(identity: object, says: str) -> None:
    with scripted_front() as server:
        first, second = server.launcher.next(), server.launcher.next()
        first.ready()
        second.ready(identity=identity)  # type: ignore[arg-type]
        server.wait_until_state("lost")

        assert server.is_lost
        assert isinstance(server.front.lost, EngineLost)
        assert says in str(server.front.lost)
        assert "\n" not in str(server.front.lost)


def test_an_instance_that_cannot_start_ends_the_start_in_one_line() -> None:
    with scripted_front() as server:
        server.launcher.next().say(CannotStart("this process may not use core 99, only 0-1"))
        server.wait_until_state("lost")

        assert str(server.front.lost).endswith("cannot start: this process may not use core 99, only 0-1")


def test_what_cannot_be_read_ends_the_instance_and_nothing_else() -> None:
    with scripted_front(("mixed", "mixed")) as server:
        first, second = server.running()
        first._socket.send(b'{"kind":"told","answers":[[1]]}')
        other = server.launcher.next()

        assert other.index == first.index
        server.front.send(REQUEST)
        assert second.hear(Submit).part == "whole"


def test_the_progress_of_prompts_and_their_pace_reach_whoever_asked() -> None:
    """Instances that compute prompts at the same time are together as fast as the sum of their rates."""
    with scripted_front() as server:
        prompt, token = server.running()
        attempt = divided(server, prompt, token)
        prompt.tell(progress=[Progress("gone@7", 9, 0, 4, 5), Progress(attempt, 100, 0, 64, 5)])
        server.wait_until(lambda: bool(server.progress))

        assert server.progress == [Progress("r", 100, 0, 64, 5)]
        for instance, token_ns in ((prompt, 3e6), (token, 6e6)):
            load = EngineLoad(0, 0, 0, 1024, prompt_token_ns=token_ns)
            instance.say(Delivery((), None, load))
        server.wait_until(lambda: server.load is not None and 0 < server.load.prompt_token_ns < 3e6)
        assert server.load is not None
        assert server.load.prompt_token_ns == pytest.approx(2e6)


def test_at_the_end_every_request_is_told() -> None:
    with scripted_front() as server:
        prompt, token = server.running()
        divided(server, prompt, token)
        server.launcher.is_stopping = True
        server.front.stop(5.0)

        out = server.next_out()

        assert isinstance(out, Failure)
        assert not isinstance(out.error, StepFailed)


def test_it_is_ready_while_every_pool_has_an_instance_and_takes_requests_all_the_time() -> None:
    """Pools of two and of one: what is lost is told until the pool's first instance is there again."""
    with scripted_front(("prompt", "token", "token")) as server:
        prompt, *tokens = server.running(3)
        assert server.front.state == "running"
        first = server.replaced(tokens[0])
        assert server.front.state == "running"
        tokens[1].ended = "it was killed by SIGKILL"
        server.wait_until_state("replacing")
        second = server.launcher.next()
        first.ready()
        server.wait_until_state("running")
        prompt.ended = "it was killed by SIGKILL"
        server.wait_until_state("replacing")
        second.ready()
        server.launcher.next().ready()
        server.wait_until_state("running")
